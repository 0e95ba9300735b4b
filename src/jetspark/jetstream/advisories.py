"""Announcements of the server about streams, on plain subjects: only current subscribers receive an advisory."""

from __future__ import annotations

import datetime
from dataclasses import dataclass

from jetspark.core.message import CoreMessage
from jetspark.errors import ProtocolError
from jetspark.jetstream import wire
from jetspark.jetstream.checks import check_name

__all__ = ["BatchAbandoned", "abandoned_subject"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchAbandoned:
    """The server has dropped a batch that was not committed: nothing of an atomic one is stored.

    ``reason`` is ``"timeout"`` (idle for too long), ``"incomplete"`` (a message was missing), ``"large"`` (more
    messages than allowed) or ``"unsupported"`` (an API level the server does not have).
    """

    stream: str
    batch: str
    reason: str
    time: datetime.datetime
    id: str

    @classmethod
    def of(cls, message: CoreMessage) -> BatchAbandoned:
        """The content of an advisory.

        Raises:
            ProtocolError: The message is not such an advisory.
        """
        fields = wire.read_object(message.data)
        try:
            moment = wire.parse_time(str(fields["timestamp"]))
            if moment is None:
                raise ProtocolError("an advisory without a time")
            return cls(
                stream=str(fields["stream"]),
                batch=str(fields["batch"]),
                reason=str(fields["reason"]),
                time=moment,
                id=str(fields["id"]),
            )
        except KeyError as error:
            raise ProtocolError(f"an advisory without {error}: {message.data[:80]!r}") from None


def abandoned_subject(stream: str | None) -> str:
    """The subject for advisories of abandoned batches, of one stream or of all."""
    name = "*" if stream is None else check_name("stream", stream)
    return f"$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED.{name}"
