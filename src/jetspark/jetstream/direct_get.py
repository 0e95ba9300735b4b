"""Reading many messages by direct get: the fast way to read a stream without a consumer.

The server sends a batch of messages to one inbox and ends it with status 204. Each message names its predecessor, so a
message that is lost on the way (a reconnect, a dropped chunk) is noticed, and the rest is requested again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from jetspark.core.arguments import texts
from jetspark.core.headers import last_value
from jetspark.core.message import CoreMessage
from jetspark.core.numbers import UINT64, whole
from jetspark.core.subjects import validate_filter
from jetspark.errors import ConfigError, ServerError
from jetspark.jetstream.errors import unavailable
from jetspark.jetstream.info import StoredMessage, direct_status
from jetspark.jetstream.operations import Request
from jetspark.jetstream.wire import number_in

__all__ = ["BatchGet", "LastGet"]

# Batch size of one request; the server also stops at 64 MB.
BATCH_MESSAGES = 1000

# How often the whole answer may be requested again because a part of it was lost on the way.
MAX_LAST_REQUESTS = 3


class BatchGet:
    """The messages from a sequence on, in order, over as many requests as it takes.

    The driver sends :meth:`request`, gives every answer to :meth:`accept` until the batch ``is_over``, calls
    :meth:`lost` when the connection is lost before, and requests again until ``is_done``. The driver also decides how
    long to wait for the next answer.
    """

    def __init__(
        self, prefix: str, stream: str, *, start_sequence: int, subject: str | None, max_messages: int | None
    ) -> None:
        start_sequence = whole("start_sequence", start_sequence, high=UINT64)
        if max_messages is not None:
            max_messages = whole("max_messages", max_messages, instead="or None for all")
        self._stream = stream
        self._subject = f"{prefix}.DIRECT.GET.{stream}"
        self._filter = None if subject is None else validate_filter(subject)
        self._next_sequence = start_sequence
        self._left = max_messages
        self._last_sequence: int | None = None
        self.is_over = False
        self.is_done = False

    def request(self) -> Request:
        self.is_over = False
        self._last_sequence = 0
        batch = BATCH_MESSAGES if self._left is None else min(BATCH_MESSAGES, self._left)
        body: dict[str, Any] = {"batch": batch, "seq": self._next_sequence}
        if self._filter is not None:
            body["next_by_subj"] = self._filter
        return Request(self._subject, json.dumps(body).encode())

    def accept(self, message: CoreMessage) -> StoredMessage | None:
        """The message in an answer; None at the end of the batch, or after a message was lost.

        Raises:
            JetStreamUnavailable: The stream does not exist, or does not allow direct gets.
            ServerError: The server refused.
        """
        status = direct_status(message)
        if status is not None:
            self.is_over = True
            if status.code == 204:
                self.is_done = number_in(message.headers.get("Nats-Num-Pending", "0")) == 0 and self._is_unbroken(
                    message
                )
            elif status.code == 404:
                self.is_done = True
            elif status.code == 503:
                raise unavailable(self._subject)
            else:
                raise ServerError(status.code, 0, status.description, self._stream)
            return None
        if not self._is_unbroken(message):
            self.is_over = True
            return None
        stored = StoredMessage.from_direct(message)
        self._last_sequence = stored.sequence
        self._next_sequence = stored.sequence + 1
        if self._left is not None:
            self._left -= 1
            self.is_done = self.is_over = not self._left
        return stored

    def lost(self) -> None:
        """The connection was lost, and with it the rest of the batch."""
        self.is_over = True

    def _is_unbroken(self, message: CoreMessage) -> bool:
        """True if the message before this one is the last received; the first message of a batch has no predecessor."""
        return _last_sequence(message) == self._last_sequence


def _last_sequence(message: CoreMessage) -> int:
    # The server's headers come behind the message's own, which may have the same name.
    return number_in(last_value(message.raw_headers, "Nats-Last-Sequence") or "0")


def _pending(message: CoreMessage) -> int:
    found = message.headers.get_all("Nats-Num-Pending")
    return number_in(found[-1]) if found else 0


class LastGet:
    """The last message of each of many subjects, all at the same moment."""

    # nats-server answers 413 above this.
    MAX_SUBJECTS = 1024

    def __init__(self, prefix: str, stream: str, filters: Iterable[str], up_to_sequence: int | None) -> None:
        wanted = texts("filters", filters, "a list of subjects or filters")
        if not wanted:
            raise ConfigError("filters=[]: expected a list of subjects or filters")
        self._stream = stream
        self._subject = f"{prefix}.DIRECT.GET.{stream}"
        self._body: dict[str, Any] = {"multi_last": [validate_filter(each) for each in wanted]}
        if up_to_sequence is not None:
            self._body["up_to_seq"] = whole("up_to_sequence", up_to_sequence, low=0, high=UINT64)
        self.is_empty = up_to_sequence == 0
        """At sequence 0 the stream was empty, so no request is sent: the server takes 0 for no limit."""
        self.messages: list[StoredMessage] = []
        self.is_over = False
        self.is_broken = False
        """A message was lost on the way. All are requested again: a partial answer does not show one moment."""

    def request(self) -> Request:
        self.messages = []
        self.is_over = self.is_broken = False
        return Request(self._subject, json.dumps(self._body).encode())

    def lost(self) -> None:
        """The connection was lost, and with it the rest of the answer."""
        self.is_over = self.is_broken = True

    def accept(self, message: CoreMessage) -> None:
        status = direct_status(message)
        last = self.messages[-1].sequence if self.messages else 0
        if status is None:
            self.is_broken |= _last_sequence(message) != last
            self.messages.append(StoredMessage.from_direct(message))
            return
        self.is_over = True
        if status.code == 204:
            self.is_broken |= _last_sequence(message) != last
            if not self.is_broken and (left := _pending(message)):
                # The rest could be requested, but it might be from another moment.
                raise ConfigError(
                    f"{left} of the last messages of {self._body['multi_last']} are beyond the 64 MB that nats-server "
                    "answers with at a time: ask for fewer"
                )
        elif status.code == 413:
            raise ConfigError(
                f"more than {self.MAX_SUBJECTS} subjects match {self._body['multi_last']}: ask for fewer at a time"
            )
        elif status.code == 503:
            raise unavailable(self._subject)
        elif status.code != 404:
            raise ServerError(status.code, 0, status.description, self._stream)
