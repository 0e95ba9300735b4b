"""Reads the last messages of many subjects by one request. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence

from jetspark.core.message import CoreMessage
from jetspark.errors import JetStreamUnavailable, ProtocolError, ServerError
from jetspark.jetstream.info import StoredMessage
from jetspark.jetstream.kv import operation_of
from jetspark.jetstream.operations import Request
from jetspark.state.changes import (
    MARK_HEADER,
    SEQUENCE_HEADER,
    STREAM_CREATED_HEADER,
    WRITER_HEADER,
    Stored,
    stored_sequence,
)

__all__ = ["Lookup", "lookup_requests", "stored_delivery", "stored_of"]

# nats-server answers a request for more than 1024 subjects with 413, and one of them may be the witness.
LOAD_KEYS = 1023
# A quarter of what a message may have by default.
LOAD_BYTES = 256 << 10

# A state as a projection or a fold has written it, with what the server puts behind it: nearly every answer is one. One
# look at all of its headers costs a fifth of one at each. Whatever looks otherwise is read header by header.
_plain_state = re.compile(
    rb"NATS/1\.0\r\n"
    rb"JetSpark-Sequence: ([0-9]{1,20})\r\n"
    rb"(?:JetSpark-Projection: ([^\r\n]*+)\r\n)?+"
    rb"(?:Nats-Expected-Last-Subject-Sequence: [0-9]++\r\n)?+"
    rb"Nats-Stream: [^\r\n]++\r\n"
    rb"Nats-Subject: ([^\s]++)\r\n"
    rb"Nats-Sequence: ([0-9]++)\r\n"
    rb"Nats-Time-Stamp: [^\r\n]++\r\n"
    rb"Nats-Num-Pending: [0-9]++\r\n"
    rb"Nats-Last-Sequence: ([0-9]++)\r\n\r\n"
).fullmatch
# The same as a consumer delivers it: without what the server puts behind it.
_plain_delivery = re.compile(
    rb"NATS/1\.0\r\n"
    rb"JetSpark-Sequence: ([0-9]{1,20})\r\n"
    rb"(?:JetSpark-Projection: ([^\r\n]*+)\r\n)?+"
    rb"(?:Nats-Expected-Last-Subject-Sequence: [0-9]++\r\n)?+"
    rb"\r\n"
).fullmatch


class Lookup:
    """One request for the last messages of many subjects, and its answers.

    Like :class:`~jetspark.jetstream.direct_get.LastGet`, in a third of the time for each message, because only a few
    headers are parsed. The server cuts an answer at 64 MB; the next request is for the subjects that are ``left``.

    Any replica or mirror may answer. The end of an answer has the sequence of the stream up to which it is valid, and
    its first message names the stream. An answer that lags ``at_least``, or comes from a mirror, which may lack
    messages of the stream, is discarded: ``is_behind``. An answer without messages does not name its stream; so the
    request includes the probe subject, which has a message.
    """

    def __init__(
        self, prefix: str, stream: str, subjects: Sequence[str], *, at_least: int = 0, probe_subject: str | None = None
    ) -> None:
        """
        Args:
            at_least: A sequence of the stream that an answer has to be up to; 0 if any will do.
            probe_subject: A subject that has a message at or below that sequence.
        """
        self._subject = f"{prefix}.DIRECT.GET.{stream}"
        self._stream, self._at_least = stream, at_least
        self._probe_subject = None if probe_subject is None or probe_subject in subjects else probe_subject
        self.left = list(subjects)
        self.found: list[Stored] = []
        self.up_to = 0
        """The answers that count are true up to this sequence, at least."""
        self._answer: list[Stored] = []
        self.is_over = False
        self.is_behind = self._is_of_mirror = False

    def request(self) -> Request:
        self.is_over = self.is_behind = self._is_of_mirror = False
        self._answer = []
        asked = self.left if self._probe_subject is None else [*self.left, self._probe_subject]
        return Request(self._subject, json.dumps({"multi_last": asked}).encode())

    def lost(self) -> None:
        """The rest of the answer will not come: half of it counts for nothing."""
        self.is_over = True

    def accept_all(self, messages: Sequence[CoreMessage]) -> None:
        """Take answers; the last one makes it ``is_over``.

        Raises:
            JetStreamUnavailable: No server answers for the stream.
            ServerError: The server refused.
        """
        answer, look = self._answer, _plain_state
        mark_texts: dict[bytes | None, str | None] = {None: None}  # most have the same one
        for message in messages:
            raw = message.raw_headers or b""
            if (plain := look(raw)) is None:
                self._accept_other(message, raw)
                if self.is_over:
                    return
                continue
            sequence, mark, subject, revision, before = plain.groups()
            # As `_take`, without a call for each.
            if int(before) != (answer[-1].revision if answer else 0):
                continue
            if not answer:
                self._set_stream(raw)
            if mark not in mark_texts:
                mark_texts[mark] = _text(mark)
            name = subject.decode(errors="surrogateescape")
            answer.append(Stored(name, int(revision), message.data, "put", int(sequence), None, mark_texts[mark]))

    def _accept_other(self, message: CoreMessage, raw: bytes) -> None:
        """Take an answer that is not a plain state: a marker, a value with other headers, or the end."""
        status, before = message.status, int(_field(raw, b"Nats-Last-Sequence") or 0)
        if status is None:
            self._accept(_stored(raw, message), before, raw)
            return
        is_unbroken = self._follows(before)
        self.is_over = True
        if status.code == 204:
            if is_unbroken:  # else it is asked for again
                self._end(raw)
        elif status.code == 404:
            # The answer does not show how far the replica is.
            self.is_behind = self._at_least > 0
            self.left = self.left if self.is_behind else []
        elif status.code == 503:
            raise JetStreamUnavailable(self._subject)
        else:
            raise ServerError(status.code, 0, status.description)

    def _follows(self, before: int) -> bool:
        """Check that no message was lost on the way: each message, and the end, names the message before it."""
        return before == (self._answer[-1].revision if self._answer else 0)

    def _accept(self, stored: Stored, before: int, raw: bytes) -> None:
        if not self._follows(before):
            return
        if not self._answer:
            self._set_stream(raw)
        self._answer.append(stored)

    def _set_stream(self, raw: bytes) -> None:
        """The first message says of which stream all are."""
        self._is_of_mirror = _field(raw, b"Nats-Stream") not in (None, self._stream)

    def _end(self, raw: bytes) -> None:
        up_to = int(_field(raw, b"Nats-UpTo-Sequence") or 0)
        self.is_behind = self._at_least > 0 and (self._is_of_mirror or up_to < self._at_least)
        if self.is_behind:
            return
        self.up_to = max(self.up_to, up_to)
        self.found += [each for each in self._answer if each.subject != self._probe_subject]
        is_cut = int(_field(raw, b"Nats-Num-Pending") or 0) > 0
        has = {each.subject for each in self._answer} if is_cut else set()
        self.left = [subject for subject in self.left if subject not in has] if is_cut else []


def lookup_requests(subjects: Iterable[str]) -> Iterator[list[str]]:
    """Each subject once, as many at a time as the server answers for, and no more than fits a message."""
    unique = list(dict.fromkeys(subjects))
    if not unique:
        return
    # By the longest of them, so that not each has to be counted.
    fit = LOAD_BYTES // (max(map(len, unique)) + len('"",'))
    size = max(1, min(fit, LOAD_KEYS))
    for begin in range(0, len(unique), size):
        yield unique[begin : begin + size]


def stored_of(message: StoredMessage) -> Stored:
    """The same of a message that the stream's leader was asked for."""
    headers = message.headers
    return Stored(
        message.subject,
        message.sequence,
        message.data,
        operation_of(headers),
        stored_sequence(headers.get(SEQUENCE_HEADER)),
        headers.get(WRITER_HEADER),
        headers.get(MARK_HEADER),
        stored_sequence(headers.get(STREAM_CREATED_HEADER)) or 0,
    )


def stored_delivery(subject: str, revision: int, message: CoreMessage) -> Stored:
    """The same of a message that a consumer or a direct get has delivered."""
    raw = message.raw_headers or b""
    if (plain := _plain_delivery(raw)) is not None:
        sequence, mark = plain.groups()
        return Stored(
            subject, revision, message.data, "put", int(sequence), None, None if mark is None else _text(mark)
        )
    is_mark = b"KV-Operation" in raw or b"Nats-Marker-Reason" in raw
    return Stored(
        subject,
        revision,
        message.data,
        operation_of(message.headers) if is_mark else "put",
        stored_sequence(_field(raw, SEQUENCE_HEADER.encode())),
        _field(raw, WRITER_HEADER.encode()),
        _field(raw, MARK_HEADER.encode()),
        stored_sequence(_field(raw, STREAM_CREATED_HEADER.encode())) or 0,
    )


def _stored(raw: bytes, message: CoreMessage) -> Stored:
    subject, revision = _field(raw, b"Nats-Subject"), _field(raw, b"Nats-Sequence")
    if subject is None or revision is None:
        raise ProtocolError(f"a direct message that does not say where it was: {raw[:200]!r}")
    return stored_delivery(subject, int(revision), message)


def _field(raw: bytes, name: bytes) -> str | None:
    """The last value of a header: the server's own are behind those of the message, which may have the same names."""
    at = raw.rfind(b"\r\n" + name + b":")
    if at < 0:
        return None
    at += len(name) + 3
    return _text(raw[at : raw.index(b"\r\n", at)])


def _text(value: bytes) -> str:
    return value.decode(errors="surrogateescape").strip(" \t")
