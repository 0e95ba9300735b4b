"""Loads and stores many keys of a bucket at once, by compare-and-set. Procedures for both drivers.

A fold repeats three steps (``state/rounds``): :func:`load` the keys, decide, :func:`store`. Each change has the
revision that it is based on. The leader compares it, and a key that another writer has changed is reported as a
conflict for the next round. :func:`store_newest` is this loop for values that are not derived from present ones: only
newer ones are written.

**A load never lags.** The leader compares revisions only for keys that are written. If a key is *not* written, because
it seems to be missing or stuck, nothing is compared: with an outdated load an event would be skipped permanently. Any
replica or mirror may answer a load, and may lag. So a :class:`StateBucket` keeps the highest sequence of the bucket
that it has seen (:attr:`StateBucket.seen`): from the leader when it was opened, from its own writes, and from every
answer. A load that lags this sequence is repeated, finally at the leader, key by key. A reader that takes the bucket's
position through the same object therefore loads states that are at least as new as the position.

Nothing is written twice or lost if an answer is lost. A change with an unknown result is sent again. If it was stored
before, it is refused now, and recognised by its sequence and value, or without a sequence by the header
``JetSpark-Writer``. So a whole task can also be repeated with the same ``writer``. Unconditional changes are simply
sent again.

Changes are sent in one fast batch (``allow_batched``), which reports refusals one by one and continues. A bucket that
does not allow batches is written message by message: the same guarantees, at about a quarter of the speed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from jetspark.codes import Code
from jetspark.core.step_runner import ReadClock, Sleep
from jetspark.errors import (
    BatchInDoubt,
    ConfigError,
    Conflict,
    ConnectionClosed,
    ConnectionLost,
    JetSparkError,
    JetStreamUnavailable,
    MessageNotFound,
    PayloadTooLarge,
    ServerError,
    StreamNotFound,
    WrongLastSequence,
)
from jetspark.jetstream.info import StreamInfo
from jetspark.jetstream.kv import Bucket, check_bucket, check_key, check_keys, subject_of
from jetspark.jetstream.operations import Api, message_query
from jetspark.publish.outgoing import Item
from jetspark.publish.steps import AskMany, Connect, IngestAll, IngestReport, Procedure, PublishEach
from jetspark.state.changes import (
    Change,
    Current,
    Outcome,
    Stored,
    current_of,
    header_bytes,
    header_fields,
    is_unchanged,
    is_written,
    newer,
    newest,
)
from jetspark.state.lookup import Lookup, lookup_requests, stored_of
from jetspark.state.patience import REPORT_AFTER_S, REPORT_EVERY_S, Persistence

__all__ = ["PATIENCE_S", "StateBucket", "load", "open_bucket", "store", "store_newest"]

MAX_FRUITLESS_REQUESTS = 3
# A fast batch itself is unbounded; this bounds the reports of refusals, and the changes to send again after a lost
# batch.
BATCH_CHANGES = 20_000
# Waits for a lagging replica, which usually catches up within a round trip. After them the leader is asked.
BEHIND_PAUSES_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
# As long as the fast publisher's: it covers a restart and the election of a leader.
PATIENCE_S = 120.0

_logger = logging.getLogger("jetspark.state")


def load(bucket: str, keys: Iterable[str], *, patience_s: float = PATIENCE_S) -> Procedure[dict[str, Current]]:
    """The entries of any number of keys, at least as new as this call; keys that never had a value are omitted.

    A thousand keys at a time are read consistently. Writers need no more, because they write with the loaded revisions.

    Raises:
        ConfigError: A key is invalid, or the bucket does not allow direct gets.
        StreamNotFound: The bucket does not exist.
        JetSparkError: No answer for ``patience_s`` seconds.
    """
    names = list(keys)
    target = yield from _patiently_open(bucket, patience_s, for_writing=False)
    return (yield from target.load_all(names))


def store(
    bucket: str, changes: Iterable[Change], *, writer: str = "", patience_s: float = PATIENCE_S
) -> Procedure[Outcome]:
    """Write changes, one for each key, those with a revision only if it is still the last.

    Returns when every one of them is stored or known to be in conflict. ``writer`` is a name that is the same when the
    same changes are tried again, here or by another process, and never otherwise: by it a change without a sequence is
    recognised that was written before. Changes that expect a revision need the one or the other.

    Raises:
        ConfigError: A key that cannot be one or is there twice, a change that could not be recognised, or a bucket that
            cannot be written.
        ServerError: The bucket refuses a change for good: it is full, or the value too large. Others may be written.
        JetSparkError: No progress for ``patience_s`` seconds.
    """
    target = yield from open_bucket(bucket, patience_s=patience_s)
    return (yield from target.store_all(changes, writer=writer))


def open_bucket(bucket: str, *, patience_s: float = PATIENCE_S) -> Procedure[StateBucket]:
    """Open a bucket for repeated loads and stores; its configuration is read once.

    Args:
        patience_s: Longest time without progress in each operation on the bucket.

    Raises:
        ConfigError: The bucket cannot be written.
        StreamNotFound: The bucket does not exist.
        JetSparkError: No answer for ``patience_s`` seconds.
    """
    return (yield from _patiently_open(bucket, patience_s, for_writing=True))


def store_newest(
    bucket: str,
    changes: Iterable[Change],
    *,
    current: Mapping[str, Current] | None = None,
    patience_s: float = PATIENCE_S,
) -> Procedure[Outcome]:
    """Write the changes that are newer, by their sequence, than what the bucket has; each key once, with its newest.

    Doing it again changes nothing, and several who do it at once, in any order, leave the newest. ``current`` is what
    :func:`load` returned for the keys, if that was done already.

    Raises:
        ConfigError: As :func:`store`; or a change has no sequence.
        Conflict: A key was changed by others again and again, for ``patience_s`` seconds.
        JetSparkError: As :func:`store`.
    """
    target = yield from open_bucket(bucket, patience_s=patience_s)
    outcomes: list[Outcome] = []
    for batch in _batches(newest(changes).values(), BATCH_CHANGES):
        left = batch
        persistence = Persistence(patience_s)
        yield from persistence.progress()
        while left:
            known = current
            if known is None:
                known = yield from target.load([change.key for change in left], persistence)
            current = None  # it was true once; the next round has to look again
            wanted = newer(left, known)
            outcome = yield from target.store(wanted, "", persistence)
            outcomes.append(Outcome(outcome.written, (), len(left) - len(wanted)))
            again = set(outcome.conflicts)
            left = [change for change in wanted if change.key in again]
            if left:
                yield from persistence.pause(Conflict(bucket, tuple(sorted(again))))
    return Outcome.of_all(outcomes)


# ---- small steps -----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Sent:
    """How sending some changes went."""

    written: int = 0
    refused: list[Change] = field(default_factory=list)
    unknown: list[Change] = field(default_factory=list)
    """Changes with an unknown result."""
    reason: Exception | None = None
    revisions: dict[str, int] = field(default_factory=dict)


def _patiently_open(bucket: str, patience_s: float, *, for_writing: bool) -> Procedure[StateBucket]:
    """Asking what the bucket is like is a request as any other: the server may be away."""
    persistence = Persistence(patience_s)
    yield from persistence.progress()
    return (yield from persistence.attempt(lambda: _open(bucket, patience_s, for_writing=for_writing)))


def _open(bucket: str, patience_s: float, *, for_writing: bool) -> Procedure[StateBucket]:
    api: Api = yield Connect()
    info = yield from api.stream_info(f"KV_{check_bucket(bucket)}")
    target = StateBucket(api, info, patience_s)
    if for_writing:
        target.check_may_write()
    return target


class StateBucket:
    """A bucket to load from and store to; make one with :func:`open_bucket`."""

    def __init__(self, api: Api, info: StreamInfo, patience_s: float = PATIENCE_S) -> None:
        self._api, self._config, self._patience_s = api, info.config, patience_s
        self.created = info.created
        """When the stream behind it was made: another time is another bucket."""
        self._bucket = Bucket.of(api, info.config)
        self._prefix = subject_of(self._bucket.origin, "")
        """Prefix of the subject of every key."""
        self._last_sequence = info.state.last_sequence
        """A sequence that the bucket had before the next batch is sent."""
        self.seen = info.state.last_sequence
        """Loads are at least as new as the message of the bucket with this sequence."""
        self._is_seen_unsure = False
        """A write was stored under an unknown sequence."""
        self._probe_subject: str | None = None
        """A subject that has a message at or below ``seen``; None if none is known."""

    @property
    def name(self) -> str:
        return self._bucket.name

    def check_may_write(self) -> None:
        name, origin = self._bucket.name, self._bucket.origin
        if origin != name:
            raise ConfigError(f"bucket={name!r}: a mirror of {origin!r}; write to that one")

    def write_subject(self, key: str) -> str:
        """Where a change of a key is published to."""
        return self._bucket.write_subject(key)

    def advance_seen(self, key: str, revision: int) -> None:
        """A key was written without this object: later loads are at least as new as that revision."""
        self._advance_seen(revision, subject_of(self._bucket.origin, key))

    def load_all(self, keys: Sequence[str]) -> Procedure[dict[str, Current]]:
        """As :func:`load`, but for its moment: not before anything that this object has seen, or written."""

        def log_failure(reason: Exception) -> None:
            gone = ": if it was deleted, re-create it (`jetspark apply`)" * isinstance(reason, JetStreamUnavailable)
            what = "1 state" if len(keys) == 1 else f"{len(keys)} states"
            _logger.warning("bucket %s: %s cannot be loaded: %s%s", self._bucket.name, what, reason, gone)

        persistence = Persistence(self._patience_s, log_failure)
        yield from persistence.progress()
        return (yield from self.load(keys, persistence))

    def load(self, keys: Sequence[str], persistence: Persistence) -> Procedure[dict[str, Current]]:
        found = yield from persistence.attempt(lambda: self._last_messages(keys))
        return {key: current_of(stored) for key, stored in found.items()}

    def load_from_leader(self, keys: Iterable[str]) -> Procedure[dict[str, Current]]:
        """The leader's entries of some keys, by one request for each."""
        found: dict[str, Current] = {}
        persistence = Persistence(self._patience_s)
        yield from persistence.progress()
        for key in keys:
            stored = yield from persistence.attempt(partial(self._from_leader, key))
            if stored is not None:
                found[key] = current_of(stored)
        return found

    def store_all(self, changes: Iterable[Change], *, writer: str = "") -> Procedure[Outcome]:
        """As :func:`store`."""
        seen: set[str] = set()
        outcomes: list[Outcome] = []
        for batch in _batches(changes, BATCH_CHANGES):
            for change in batch:
                _check(change, seen, writer)
            persistence = Persistence(self._patience_s)
            yield from persistence.progress()
            outcomes.append((yield from self.store(batch, writer, persistence)))
        return Outcome.of_all(outcomes)

    # ---- loading -----------------------------------------------------------------------------------------------

    def _advance_seen(self, sequence: int, subject: str | None = None) -> None:
        self.seen = max(self.seen, sequence)
        self._probe_subject = subject or self._probe_subject

    def _last_messages(self, keys: Sequence[str]) -> Procedure[dict[str, Stored]]:
        check_keys(keys)
        config, prefix = self._config, self._prefix
        if not config.allow_direct:
            raise ConfigError(
                f"bucket={self._bucket.name!r} does not allow direct gets: "
                f"js.update_stream(StreamConfig(name={config.name!r}, allow_direct=True))"
            )
        self._api = yield Connect()
        if self._is_seen_unsure:
            yield from self._find_end()
        found: dict[str, Stored] = {}
        # One after the other: with several requests under way it takes as long.
        for subjects in lookup_requests([prefix + key for key in keys]):
            for stored in (yield from self._lookup_all(subjects)):
                found[stored.subject[len(prefix) :]] = stored
        return found

    def _find_end(self) -> Procedure[None]:
        self._is_seen_unsure = False  # before the answer: what is written meanwhile makes it unsure again
        try:
            info = yield from self._api.stream_info(self._config.name)
        except JetSparkError as error:
            self._is_seen_unsure = True
            if isinstance(error, StreamNotFound):  # a direct get of a deleted bucket gets no answer; nor does this
                raise JetStreamUnavailable(self._prefix + "*", str(error)) from error
            raise
        self._advance_seen(info.state.last_sequence)

    def _lookup_all(self, subjects: Sequence[str]) -> Procedure[list[Stored]]:
        """The last messages of some subjects, none of them from before ``seen``."""
        found: list[Stored] = []
        left, fruitless, pauses = list(subjects), 0, iter(BEHIND_PAUSES_S)
        while left:
            lookup = Lookup(
                self._api.prefix, self._config.name, left, at_least=self.seen, probe_subject=self._probe_subject
            )
            yield AskMany(lookup)
            found += lookup.found
            left = lookup.left
            self._advance_seen(lookup.up_to)
            if lookup.is_behind:
                if self._probe_subject is None:
                    yield from self._find_probe_subject()
                elif (pause_s := next(pauses, None)) is not None:
                    yield Sleep(pause_s)
                else:
                    return found + (yield from self._each_from_leader(left))
            fruitless = 0 if lookup.found or lookup.is_behind else fruitless + 1
            if fruitless == MAX_FRUITLESS_REQUESTS and left:
                raise ConnectionLost(f"answers about the last revisions of bucket {self._bucket.name!r} were lost")
        return found

    def _find_probe_subject(self) -> Procedure[None]:
        """A message that the bucket has, and every replica that is not behind has, too."""
        # Another procedure may have found that the bucket was emptied, and has reset it.
        seen = [message_query(sequence=self.seen)] if self.seen else []
        for query in (*seen, message_query(last_for=subject_of(self._bucket.origin, ">"))):
            try:
                last = yield from self._api.get_message(self._config.name, query, direct=False)
            except MessageNotFound:
                continue  # the last message was removed
            self._advance_seen(last.sequence, last.subject)
            return
        self.seen = 0  # there is none at all: nothing is older than that

    def _each_from_leader(self, subjects: Iterable[str]) -> Procedure[list[Stored]]:
        _logger.info("bucket %s: replicas lag sequence %d; asking the leader", self._bucket.name, self.seen)
        self._probe_subject = None  # it may have been removed
        found = []
        for subject in subjects:
            stored = yield from self._last_of(subject)
            if stored is not None:
                found.append(stored)
        return found

    def _from_leader(self, key: str) -> Procedure[Stored | None]:
        return (yield from self._last_of(subject_of(self._bucket.origin, check_key(key))))

    def _last_of(self, subject: str) -> Procedure[Stored | None]:
        """Asks the leader."""
        try:
            query = message_query(last_for=subject)
            found = stored_of((yield from self._api.get_message(self._config.name, query, direct=False)))
        except MessageNotFound:
            return None
        self._advance_seen(found.revision, subject)
        return found

    # ---- storing -----------------------------------------------------------------------------------------------

    def store(self, changes: Sequence[Change], writer: str, persistence: Persistence) -> Procedure[Outcome]:
        """Until nothing is unknown."""
        written = 0
        conflicts: list[str] = []
        found: dict[str, Current] = {}
        revisions: dict[str, int] = {}
        left, tell_at = list(changes), (yield ReadClock()) + REPORT_AFTER_S
        while left:
            sent = yield from self._send(left, writer)
            written += sent.written
            revisions |= sent.revisions
            left = sent.unknown
            reason = sent.reason or BatchInDoubt("", "messages were lost", 0)
            if sent.refused:
                try:
                    present = yield from self._present(sent.refused)
                except JetSparkError as error:
                    if not error.may_pass:
                        raise
                    # Sent again together with the others; a second refusal is examined then.
                    left, reason = left + sent.refused, error
                else:
                    for change in sent.refused:
                        stored = present.get(change.key)
                        if is_written(change, stored, writer):
                            written += 1
                        elif is_unchanged(change, stored):
                            left.append(change)
                        else:
                            conflicts.append(change.key)
                            if stored is not None:
                                found[change.key] = current_of(stored)
            if left:
                if len(left) < len(changes):
                    changes = left
                    yield from persistence.progress()
                now = yield ReadClock()
                if now >= tell_at:
                    _logger.warning(
                        "bucket %s: %d changes wait to be stored: %s%s",
                        self._bucket.name,
                        len(left),
                        reason,
                        _remedy(reason),
                    )
                    tell_at = now + REPORT_EVERY_S
                yield from persistence.pause(reason)
        return Outcome(written, tuple(conflicts), 0, found, revisions)

    def _present(self, refused: Sequence[Change]) -> Procedure[dict[str, Stored]]:
        """The leader's entries of refused keys."""
        present = yield from self._last_messages([change.key for change in refused])
        for change in refused:
            known = present.get(change.key)
            if change.revision is not None and (0 if known is None else known.revision) < change.revision:
                # A message was removed, which leaves no later one by which a replica could be known to be behind; or
                # the revision never was one. The leader knows.
                last = yield from self._from_leader(change.key)
                if last is None:
                    present.pop(change.key, None)
                else:
                    present[change.key] = last
        return present

    def _send(self, changes: Sequence[Change], writer: str) -> Procedure[_Sent]:
        items: Iterator[Item]
        try:
            subjects = self._bucket.write_subjects([change.key for change in changes])
            self._api = yield Connect()
            if self._config.allow_batched:
                items = (_item(subject, change, writer) for subject, change in zip(subjects, changes, strict=True))
                report: IngestReport = yield IngestAll(items)
                self._see_report(changes, report)
                sent = _of_batch(changes, report)
                sent.revisions = self._revisions(changes, report)
                return sent
            items = (
                (subject, change.value, header_fields(change, writer))
                for subject, change in zip(subjects, changes, strict=True)
            )
            errors: list[Exception | None] = yield PublishEach(items)
            self._is_seen_unsure = True
            return _of_each(changes, errors)
        except PayloadTooLarge as error:
            largest = max(changes, key=lambda change: len(change.value))
            raise ConfigError(f"key {largest.key!r}: {error}") from error
        except JetSparkError as error:
            self._is_seen_unsure = True
            if not error.may_pass:
                raise
            return _Sent(unknown=list(changes), reason=error)

    def _see_report(self, changes: Sequence[Change], report: IngestReport) -> None:
        """Advance ``seen`` over the written changes, if their sequences are known."""
        self._advance_seen(report.last_sequence)
        if report.failure is not None or report.missing:
            self._is_seen_unsure = True
        elif not report.refusals:
            self._probe_subject = subject_of(self._bucket.origin, changes[-1].key)

    def _revisions(self, changes: Sequence[Change], report: IngestReport) -> dict[str, int]:
        """Revisions of a batch that was stored completely and without messages of other writers in between.

        The server reports only the sequence of the last message. If its distance from an earlier known sequence equals
        the number of messages in the batch, all sequences in between are of this batch.
        """
        before, last = self._last_sequence, report.last_sequence
        self._last_sequence = last or before
        is_whole = report.failure is None and not report.missing and not report.refusals
        if not is_whole or last != before + len(changes):
            return {}
        return {change.key: sequence for sequence, change in enumerate(changes, start=before + 1)}


# ---- deciding --------------------------------------------------------------------------------------------------------


def _item(subject: str, change: Change, writer: str) -> Item:
    block = header_bytes(change, writer)
    return (subject, change.value) if block is None else (subject, change.value, block)


def _check(change: Change, seen: set[str], writer: str) -> None:
    if change.key in seen:
        raise ConfigError(f"key={change.key!r}: changed twice in one call; give its last change only")
    if change.revision is not None and change.sequence is None and not writer:
        raise ConfigError(
            f"key={change.key!r}: a revision without a sequence; name the writer, or nothing tells this change from "
            "another one when its answer is lost"
        )
    seen.add(change.key)


def _of_batch(changes: Sequence[Change], report: IngestReport) -> _Sent:
    """
    Raises:
        JetSparkError: The batch failed, and would again; or the bucket refuses a change for good.
    """
    failure = report.failure
    if failure is not None and not failure.may_pass:
        raise failure
    sent = _Sent(reason=failure)
    if failure is None and not report.missing and not report.refusals:
        sent.written = len(changes)
        return sent
    open_ended = [range(report.acknowledged + 1, len(changes) + 1)] if failure is not None else []
    unknown = {number for missing in [*report.missing, *open_ended] for number in missing}
    errors = {refusal.sequence: refusal.error for refusal in report.refusals}
    for number, change in enumerate(changes, start=1):
        if (said := errors.get(number)) is not None:
            sent.refused.append(_conflicting(change, said))
        elif number in unknown:
            sent.unknown.append(change)
        else:
            sent.written += 1
    return sent


def _of_each(changes: Sequence[Change], errors: Sequence[Exception | None]) -> _Sent:
    sent = _Sent()
    for change, found in zip(changes, errors, strict=True):
        match found:
            case None:
                sent.written += 1
            case ServerError() as error:
                sent.refused.append(_conflicting(change, error))
            case ConnectionClosed() as error:
                raise error
            case error:
                sent.unknown.append(change)
                sent.reason = error
    return sent


def _remedy(reason: Exception) -> str:
    is_full = isinstance(reason, ServerError) and reason.err_code in (Code.STORE_FAILED, Code.STORAGE_EXCEEDED)
    return ": raise max_bytes of the bucket (and apply that), give the server more room, or remove keys" * is_full


def _conflicting(change: Change, error: ServerError) -> Change:
    """The change, if it was refused because of its revision.

    Raises:
        ServerError: It would be refused again.
    """
    if isinstance(error, WrongLastSequence) and change.revision is not None:
        return change
    raise type(error)(error.code, error.err_code, f"key {change.key!r}: {error.description}")


def _batches(changes: Iterable[Change], size: int) -> Iterator[list[Change]]:
    iterator = iter(changes)
    while batch := list(islice(iterator, size)):
        yield batch
