"""Writing many keys of a bucket at once, each only if it is still as it was read. Nothing of Spark is in here.

Three steps that whoever folds events into a bucket repeats: :func:`load` the keys, decide, :func:`store`. Each change
names the revision it was decided on, the leader compares, and a key that somebody else wrote meanwhile comes back as a
conflict, for another round. :func:`store_newest` is that loop for values that are not derived from the present ones:
only what is newer is written.

A value says which event it is the result of: the header ``JetSpark-Sequence`` is stored with it, also on the marks of
deleted keys. Other NATS clients read and keep such values like any other. A value without it, written by one of them,
is as old as can be: sequence 0.

Nothing is written twice or lost when an answer is. Whatever became of a change is found out by sending it again: one
that had been stored is refused now, and is recognised by its sequence and value, or where it has no sequence by the
header ``JetSpark-Writer``. So trying a whole task again with the same ``writer`` is safe, too. Changes that expect no
revision are simply sent again.

All go in one fast batch (``allow_batched``), where refusals are reported one by one and do not end it. A bucket that
does not allow that is written through ``publish_async``: the same guarantees, at about a quarter of the speed.
"""

from __future__ import annotations

import json
import logging
import random
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pyarrow as pa

from jetspark.blocking import JetStream
from jetspark.blocking.jetstream import Stream
from jetspark.core.message import CoreMessage
from jetspark.errors import (
    BatchCutShort,
    BatchInDoubt,
    ConfigError,
    Conflict,
    ConnectionClosed,
    ConnectionLost,
    JetSparkError,
    JetStreamUnavailable,
    MessageNotFound,
    PayloadTooLarge,
    ProtocolError,
    RequestTimeout,
    ServerError,
    TooManyBatches,
    WrongLastSequence,
)
from jetspark.jetstream.kv import Operation, check_bucket, check_key, operation_of, subject_of
from jetspark.jetstream.operations import Request
from jetspark.state.changes import (
    SEQUENCE_HEADER,
    STAMP_HEADER,
    WRITER_HEADER,
    Change,
    Current,
    Outcome,
    Stored,
    current_of,
    header_fields,
    is_unchanged,
    is_written,
    newer,
    newest,
    stored_sequence,
)

__all__ = ["Lookup", "changes_of", "load", "store", "store_newest"]

# What the server answers for at most in one request.
LOAD_KEYS = 1024
# A quarter of what a message may have by default.
LOAD_BYTES = 256 << 10
MAX_FRUITLESS_REQUESTS = 3
# A fast batch has no bound; this is for the reports of refusals, and for what has to be sent again when it is lost.
BATCH_CHANGES = 20_000
# As long as the fast publisher's: it covers a restart and the election of a leader.
PATIENCE_S = 120.0
PAUSE_S = 0.02
LONGEST_PAUSE_S = 2.0

# What passes: a leader is elected, the connection comes back, others end their batches.
_PASSING = (BatchCutShort, BatchInDoubt, ConnectionLost, JetStreamUnavailable, RequestTimeout, TooManyBatches)

_logger = logging.getLogger("jetspark.spark")


def load(js: JetStream, bucket: str, keys: Iterable[str]) -> dict[str, Current]:
    """The present state of some keys, any number of them; those that never had a value are left out.

    Each thousand is read at one moment, but not all of them, and on a replicated bucket a replica may be a moment
    behind. Neither matters to who writes with the revisions that were read.

    Raises:
        ConfigError: A key that cannot be one, or the bucket does not allow direct gets.
        StreamNotFound: There is no such bucket.
    """
    return {key: current_of(stored) for key, stored in _Target(js, bucket).last_messages(keys).items()}


def store(
    js: JetStream, bucket: str, changes: Iterable[Change], *, writer: str | None = None, patience_s: float = PATIENCE_S
) -> Outcome:
    """Write changes, one for each key, those with a revision only if it is still the last.

    Returns when every one of them is stored or known to be in conflict. ``writer`` is a name that is the same when the
    same changes are tried again by another process, and never otherwise: with it, what was written before is not a
    conflict.

    Raises:
        ConfigError: A key that cannot be one or is there twice, or a bucket that cannot be written.
        ServerError: The bucket refuses a change for good: it is full, or the value too large. Others may be written.
        JetSparkError: No progress for ``patience_s`` seconds.
    """
    target = _open_patiently(js, bucket, _Patience(patience_s))
    seen: set[str] = set()
    total = Outcome()
    stamp = writer or uuid.uuid4().hex
    for batch in _batches(changes, BATCH_CHANGES):
        for change in batch:
            if change.key in seen:
                raise ConfigError(f"key={change.key!r}: changed twice in one call; give its last change only")
            seen.add(change.key)
        total = total.plus(target.store(batch, stamp, _Patience(patience_s)))
    return total


def store_newest(
    js: JetStream,
    bucket: str,
    changes: Iterable[Change],
    *,
    current: Mapping[str, Current] | None = None,
    patience_s: float = PATIENCE_S,
) -> Outcome:
    """Write the changes that are newer, by their sequence, than what the bucket has; each key once, with its newest.

    Doing it again changes nothing, and several who do it at once, in any order, leave the newest. ``current`` is what
    :func:`load` returned for the keys, if that was done already.

    Raises:
        ConfigError: As :func:`store`; or a change has no sequence.
        Conflict: A key was changed by others again and again, for ``patience_s`` seconds.
        JetSparkError: As :func:`store`.
    """
    target = _open_patiently(js, bucket, _Patience(patience_s))
    total = Outcome()
    for batch in _batches(newest(changes).values(), BATCH_CHANGES):
        left = batch
        patience = _Patience(patience_s)
        while left:
            known = current if current is not None else _load_patiently(target, left, patience)
            current = None  # it was true once; the next round has to look again
            wanted = newer(left, known)
            outcome = target.store(wanted, "", patience)
            total = total.plus(Outcome(outcome.written, (), len(left) - len(wanted)))
            again = set(outcome.conflicts)
            left = [change for change in wanted if change.key in again]
            if left:
                patience.pause(Conflict(bucket, tuple(sorted(again))))
    return total


# ---- deciding: pure --------------------------------------------------------------------------------------------------


_OPERATIONS: dict[str, Operation] = {"put": "put", "delete": "delete", "purge": "purge"}


def changes_of(batch: pa.RecordBatch, guard: str) -> Iterator[Change]:
    """The rows of a batch as changes: the columns ``key``, ``value``, ``operation``, and the one the guard is named by.

    Raises:
        ConfigError: A row cannot be written.
    """
    number = batch.num_rows

    def column(name: str) -> list[Any]:
        return batch.column(name).to_pylist() if name in batch.schema.names else [None] * number

    guards = column(guard) if guard != "none" else [None] * number
    for key, value, operation, limit in zip(column("key"), column("value"), column("operation"), guards, strict=True):
        what = _OPERATIONS.get(operation or "put")
        if key is None:
            raise ConfigError("a row without a key")
        if what is None:
            raise ConfigError(f"key {key!r}: operation {operation!r}: expected put, delete or purge")
        if what == "put" and value is None:
            raise ConfigError(f"key {key!r} has no value: to remove it, say so with operation='delete'")
        if guard != "none" and (limit is None or limit < 0):
            raise ConfigError(f"key {key!r}: {guard} {limit}: expected 0 or more (guard={guard})")
        yield Change(
            check_key(key),
            b"" if what != "put" else value.encode() if isinstance(value, str) else value,
            what,
            limit if guard == "sequence" else None,
            limit if guard == "revision" else None,
        )


def _field(raw: bytes, name: bytes) -> str | None:
    """The last value of a header: the server's own are behind those of the message, which may have the same names."""
    at = raw.rfind(b"\r\n" + name + b":")
    if at < 0:
        return None
    at += len(name) + 3
    return raw[at : raw.index(b"\r\n", at)].decode(errors="surrogateescape").strip(" \t")


class Lookup:
    """One request for the last messages of many keys, and its answers. No connection.

    What :class:`~jetspark.jetstream.batchget.LastGet` does, for a third of the time a message: only the few headers
    that matter are looked at. And the server ends an answer of more than 64 MB; what is ``left`` is asked for next.
    """

    def __init__(self, prefix: str, stream: str, subjects: Sequence[str]) -> None:
        self._subject = f"{prefix}.DIRECT.GET.{stream}"
        self.left = list(subjects)
        self.found: list[Stored] = []
        self._answer: list[Stored] = []
        self.is_over = False

    def request(self) -> Request:
        self.is_over = False
        self._answer = []
        return Request(self._subject, json.dumps({"multi_last": self.left}).encode())

    def accept(self, message: CoreMessage) -> None:
        """Take an answer; the last one makes it ``is_over``.

        Raises:
            JetStreamUnavailable: Nobody answers for the stream.
            ServerError: The server refused.
        """
        raw = message.raw_headers or b""
        # Each message names the one before it, and so does the end: one that got lost on the way is noticed.
        is_unbroken = int(_field(raw, b"Nats-Last-Sequence") or 0) == (self._answer[-1].revision if self._answer else 0)
        status = message.status
        if status is None:
            if is_unbroken:
                self._answer.append(_stored(raw, message))
            return
        self.is_over = True
        if status.code == 204:
            if not is_unbroken:
                return  # asked for again
            self.found += self._answer
            is_cut = int(_field(raw, b"Nats-Num-Pending") or 0) > 0
            has = {each.subject for each in self._answer} if is_cut else set()
            self.left = [subject for subject in self.left if subject not in has] if is_cut else []
        elif status.code == 404:
            self.left = []
        elif status.code == 503:
            raise JetStreamUnavailable(self._subject)
        else:
            raise ServerError(status.code, 0, status.description)


def _stored(raw: bytes, message: CoreMessage) -> Stored:
    subject, revision = _field(raw, b"Nats-Subject"), _field(raw, b"Nats-Sequence")
    if subject is None or revision is None:
        raise ProtocolError(f"a direct message that does not say where it was: {raw[:200]!r}")
    is_mark = b"KV-Operation" in raw or b"Nats-Marker-Reason" in raw
    return Stored(
        subject,
        int(revision),
        message.data,
        operation_of(message.headers) if is_mark else "put",
        stored_sequence(_field(raw, SEQUENCE_HEADER.encode())),
        _field(raw, WRITER_HEADER.encode()),
        _field(raw, STAMP_HEADER.encode()),
    )


def _requests(subjects: Iterable[str]) -> Iterator[list[str]]:
    """Each subject once, as many at a time as the server answers for, and no more than fits a message."""
    request: list[str] = []
    size = 0
    for subject in dict.fromkeys(subjects):
        if request and (len(request) == LOAD_KEYS or size + len(subject) > LOAD_BYTES):
            yield request
            request, size = [], 0
        request.append(subject)
        size += len(subject) + 3
    if request:
        yield request


def _batches(changes: Iterable[Change], size: int) -> Iterator[list[Change]]:
    iterator = iter(changes)
    while batch := list(islice(iterator, size)):
        yield batch


# ---- doing -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Report:
    """How sending some changes went."""

    written: int = 0
    refused: list[Change] = field(default_factory=list)
    unknown: list[Change] = field(default_factory=list)
    """Nobody knows whether they are stored."""
    reason: Exception | None = None


class _Patience:
    """Pauses that grow, until there was no progress for too long."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._until = time.monotonic() + patience_s
        self._pause_s = PAUSE_S

    def pause(self, reason: Exception) -> None:
        """Wait a moment before the next attempt; or raise the reason for the wait."""
        if time.monotonic() >= self._until:
            raise reason
        # Writers that met once would meet again if they waited equally long.
        time.sleep(self._pause_s * random.SystemRandom().uniform(0.5, 1.0))
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def progress(self) -> None:
        self._until = time.monotonic() + self._patience_s
        self._pause_s = PAUSE_S


class _Target:
    """A bucket to load from and store to."""

    def __init__(self, js: JetStream, bucket: str) -> None:
        self._js, self._bucket = js, check_bucket(bucket)
        self._stream: Stream = js.stream(f"KV_{bucket}")
        config = self._stream.cached_info.config
        self._origin = bucket if config.mirror is None else config.mirror.name.removeprefix("KV_")
        self._prefix_length = len(subject_of(self._origin, ""))
        self._is_batched = bool(config.allow_batched)

    def check_may_write(self) -> None:
        if self._origin != self._bucket:
            raise ConfigError(f"bucket={self._bucket!r}: a mirror of {self._origin!r}; write to that one")

    def last_messages(self, keys: Iterable[str]) -> dict[str, Stored]:
        config = self._stream.cached_info.config
        if not config.allow_direct:
            raise ConfigError(
                f"bucket={self._bucket!r} does not allow direct gets: "
                f"js.update_stream(StreamConfig(name={config.name!r}, allow_direct=True))"
            )
        found: dict[str, Stored] = {}
        # One after the other: with several requests under way it takes as long.
        for subjects in _requests(subject_of(self._origin, check_key(key)) for key in keys):
            for stored in self._look_up(Lookup(self._js._api.prefix, config.name, subjects)):
                found[stored.subject[self._prefix_length :]] = stored
        return found

    def _look_up(self, lookup: Lookup) -> list[Stored]:
        fruitless = 0
        while lookup.left:
            before = len(lookup.found)
            with self._js._asked(lookup.request()) as answers:
                while not lookup.is_over:
                    lookup.accept(answers.next(self._js._timeout_s))
            fruitless = 0 if len(lookup.found) > before else fruitless + 1
            if fruitless == MAX_FRUITLESS_REQUESTS:
                raise RequestTimeout(f"the last revisions of bucket {self._bucket!r}", self._js._timeout_s)
        return lookup.found

    def store(self, changes: Sequence[Change], writer: str, patience: _Patience) -> Outcome:
        """Until nothing is unknown."""
        written = 0
        conflicts: list[str] = []
        left = list(changes)
        while left:
            report = self._send(left, writer)
            written += report.written
            left = report.unknown
            reason = report.reason or BatchInDoubt("", "messages were lost", 0)
            if report.refused:
                try:
                    present = self._present(report.refused)
                except _PASSING as error:
                    # Asked again together with the others: what is refused once more is looked at then.
                    left, reason = left + report.refused, error
                else:
                    for change in report.refused:
                        stored = present.get(change.key)
                        if is_written(change, stored, writer):
                            written += 1
                        elif is_unchanged(change, stored):
                            left.append(change)
                        else:
                            conflicts.append(change.key)
            if left:
                if len(left) < len(changes):
                    changes = left
                    patience.progress()
                _logger.debug("%s: %d changes are sent again: %s", self._bucket, len(left), reason)
                patience.pause(reason)
        return Outcome(written, tuple(conflicts))

    def _present(self, refused: Sequence[Change]) -> dict[str, Stored]:
        """What the bucket has instead of what was expected."""
        present = self.last_messages(change.key for change in refused)
        for change in refused:
            known = present.get(change.key)
            if change.revision is not None and (0 if known is None else known.revision) < change.revision:
                # A replica that is behind, or a revision that never was one; the leader knows.
                try:
                    subject = subject_of(self._origin, change.key)
                    last = self._stream.get_message(last_for=subject, direct=False)
                    headers = last.headers
                    present[change.key] = Stored(
                        subject,
                        last.sequence,
                        last.data,
                        operation_of(headers),
                        stored_sequence(headers.get(SEQUENCE_HEADER)),
                        headers.get(WRITER_HEADER),
                        headers.get(STAMP_HEADER),
                    )
                except MessageNotFound:
                    present.pop(change.key, None)
        return present

    def _send(self, changes: Sequence[Change], writer: str) -> _Report:
        try:
            return self._send_batch(changes, writer) if self._is_batched else self._send_each(changes, writer)
        except PayloadTooLarge as error:
            largest = max(changes, key=lambda change: len(change.value))
            raise ConfigError(f"key {largest.key!r}: {error}") from error

    def _send_batch(self, changes: Sequence[Change], writer: str) -> _Report:
        prefix = subject_of(self._origin, "")
        batch = self._js.fast_batch(gap="ok")
        failure: JetSparkError | None = None
        try:
            with batch:
                batch.add_many(
                    (
                        (prefix + check_key(change.key), change.value, header_fields(change, writer))
                        for change in changes
                    ),
                    commit=True,
                )
        except _PASSING as error:
            failure = error
        report = _Report(reason=failure)
        open_ended = [range(batch.acknowledged + 1, len(changes) + 1)] if failure is not None else []
        unknown = {number for missing in [*batch.gaps, *batch.doubts, *open_ended] for number in missing}
        errors = {refusal.sequence: refusal.error for refusal in batch.errors}
        for number, change in enumerate(changes, start=1):
            if (said := errors.get(number)) is not None:
                report.refused.append(_conflicting(change, said))
            elif number in unknown:
                report.unknown.append(change)
            else:
                report.written += 1
        return report

    def _send_each(self, changes: Sequence[Change], writer: str) -> _Report:
        prefix = subject_of(self._origin, "")
        futures = [
            self._js.publish_async(prefix + check_key(change.key), change.value, headers=header_fields(change, writer))
            for change in changes
        ]
        report = _Report()
        for change, future in zip(changes, futures, strict=True):
            match future.exception():
                case None:
                    report.written += 1
                case ServerError() as error:
                    report.refused.append(_conflicting(change, error))
                case ConnectionClosed() as error:
                    raise error
                case error:
                    report.unknown.append(change)
                    report.reason = error
        return report


def _conflicting(change: Change, error: ServerError) -> Change:
    """The change, if it was refused because of its revision.

    Raises:
        ServerError: It would be refused again.
    """
    if isinstance(error, WrongLastSequence) and change.revision is not None:
        return change
    raise type(error)(error.code, error.err_code, f"key {change.key!r}: {error.description}")


def _open_patiently(js: JetStream, bucket: str, patience: _Patience) -> _Target:
    """To write to. Asking what the bucket is like is a request as any other: the server may be away."""
    while True:
        try:
            target = _Target(js, bucket)
        except _PASSING as error:
            patience.pause(error)
        else:
            target.check_may_write()
            return target


def _load_patiently(target: _Target, changes: Iterable[Change], patience: _Patience) -> dict[str, Current]:
    keys = [change.key for change in changes]
    while True:
        try:
            return {key: current_of(stored) for key, stored in target.last_messages(keys).items()}
        except _PASSING as error:
            patience.pause(error)
