# Generated from aio/message.py by tools/unasync.py; edit that file.
"""A received message that can be answered."""

from __future__ import annotations

from jetspark.core.headers import HeadersLike
from jetspark.core.message import CoreMessage

__all__ = ["Message"]


class Message(CoreMessage):
    """A received message: ``subject``, ``data``, ``headers``, ``reply``."""

    def respond(self, data: bytes = b"", *, headers: HeadersLike | None = None) -> None:
        """Publish a reply to the sender of the request.

        Raises:
            UsageError: The message has no reply subject.
        """
        self._client.publish(self.reply_subject(), data, headers=headers)
