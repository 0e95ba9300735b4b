"""What a change of a key is, what a bucket has for a key, and which of the two is newer. Pure.

A value says which event it is the result of: the header ``JetSpark-Sequence`` is stored with it, also on the markers of
deleted keys. Other NATS clients read and keep such values like any other. A value without it, written by one of them,
counts as older than every event: sequence 0.

Sequences begin again where a stream is deleted and re-created. A change may say when the stream of its
sequence was created, stored as the header ``JetSpark-Stream-Created``: then the later stream is newer, whatever the
sequences. A sequence that says so and one that does not cannot be compared, and the change is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jetspark.core.headers import encode
from jetspark.errors import ConfigError
from jetspark.jetstream.kv import KVOperation, marker_headers

__all__ = [
    "DELETE",
    "MARK_HEADER",
    "NOTHING",
    "SEQUENCE_HEADER",
    "STREAM_CREATED_HEADER",
    "WRITER_HEADER",
    "Change",
    "Current",
    "Outcome",
    "Stored",
    "current_of",
    "header_bytes",
    "header_fields",
    "is_unchanged",
    "is_written",
    "keep_newest",
    "newer",
    "newest",
    "some_keys",
    "stored_sequence",
]

SEQUENCE_HEADER = "JetSpark-Sequence"
STREAM_CREATED_HEADER = "JetSpark-Stream-Created"
MARK_HEADER = "JetSpark-Projection"
WRITER_HEADER = "JetSpark-Writer"
_EXPECTED = "Nats-Expected-Last-Subject-Sequence"
# An error names this many keys; it has to fit a log.
MAX_NAMED = 5


class _Delete:
    """Returned by ``apply`` of a projection or an entity to delete the key."""

    def __repr__(self) -> str:
        return "DELETE"

    def __reduce__(self) -> str:
        return "DELETE"  # the same object in another process: it is compared by identity


DELETE = _Delete()


class Current(NamedTuple):
    """What a bucket has for a key. A deleted key has no value, but a revision, and the sequence of its deletion."""

    value: bytes | None
    sequence: int
    revision: int
    mark: str | None = None
    """What a projection noted with it (``JetSpark-Projection``)."""
    stream_created: int = 0
    """When the stream of the sequence was created, in microseconds since 1970; 0 where its writer did not say."""

    @property
    def age(self) -> tuple[int, int]:
        """How new it is: by stream, and within a stream by sequence."""
        return self.stream_created, self.sequence


NOTHING = Current(None, 0, 0)
"""What a bucket has for a key that it has nothing for."""


class Change(NamedTuple):
    """A write of one key."""

    key: str
    value: bytes = b""
    operation: KVOperation = "put"
    sequence: int | None = None
    """Of the event this is the result of; stored with it."""
    revision: int | None = None
    """Write only if this is still the key's last; 0 says that it has none. None writes whatever is there."""
    mark: str | None = None
    """What a projection says of its value, stored as the header ``JetSpark-Projection``."""
    stream_created: int = 0
    """When the stream of the sequence was created, in microseconds since 1970; 0 where that is not known."""

    @property
    def age(self) -> tuple[int, int]:
        """How new it is: by stream, and within a stream by sequence."""
        return self.stream_created, self.sequence or 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of some changes."""

    written: int = 0
    conflicts: tuple[str, ...] = ()
    """Keys that had another revision than expected: nothing was written to them."""
    dropped: int = 0
    """Not written, because the bucket had newer ones, or the same."""
    present: Mapping[str, Current] = field(default_factory=dict, compare=False)
    """What keys in conflict have instead, according to the leader; those that have nothing are left out."""
    revisions: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Of changes that were written, where they are known for sure."""

    @classmethod
    def of_all(cls, outcomes: Sequence[Outcome]) -> Outcome:
        """What became of all changes, given the outcomes of parts of them."""
        if len(outcomes) == 1:
            return outcomes[0]
        present: dict[str, Current] = {}
        revisions: dict[str, int] = {}
        for each in outcomes:
            present.update(each.present)
            revisions.update(each.revisions)
        return cls(
            sum(each.written for each in outcomes),
            tuple(key for each in outcomes for key in each.conflicts),
            sum(each.dropped for each in outcomes),
            present,
            revisions,
        )


class Stored(NamedTuple):
    """The last message of a key, as far as it matters here."""

    subject: str
    revision: int
    value: bytes
    operation: KVOperation
    sequence: int | None
    writer: str | None
    mark: str | None = None
    stream_created: int = 0


def newest(changes: Iterable[Change]) -> dict[str, Change]:
    """One change for each key: that with the highest sequence, and of those with the same the last."""
    found: dict[str, Change] = {}
    for change in changes:
        keep_newest(found, change)
    return found


def keep_newest(kept: dict[str, Change], change: Change) -> None:
    """Of two changes of a key keep the newer one; of two that are as new, or have no sequence, the later.

    Raises:
        ConfigError: One of the two says of which stream its sequence is, and the other does not.
    """
    known = kept.get(change.key)
    if known is None or not _is_newer(known, change):
        kept[change.key] = change


def newer(changes: Iterable[Change], known: Mapping[str, Current]) -> list[Change]:
    """The changes that go beyond what is known, each expecting the revision that is known.

    Raises:
        ConfigError: A change has no sequence; or only one of the change and the bucket says of which stream it is.
    """
    wanted = []
    for change in changes:
        if change.sequence is None:
            raise ConfigError(f"key={change.key!r}: a change without a sequence; nothing tells whether it is newer")
        present = known.get(change.key)
        if present is None:
            wanted.append(change._replace(revision=0))
        elif _is_newer(change, present):
            wanted.append(change._replace(revision=present.revision))
    return wanted


def _is_newer(change: Change, known: Current | Change) -> bool:
    """Whether a change is newer than another, or than what a bucket has.

    Raises:
        ConfigError: Only one of the two says of which stream its sequence is.
    """
    # What another client has written has neither, and is older than every event.
    if bool(change.stream_created) != bool(known.stream_created) and known.age != (0, 0):
        with_time, without = (change, known) if change.stream_created else (known, change)
        raise ConfigError(
            f"key={change.key!r}: sequence {with_time.sequence} says when its stream was created, and sequence "
            f"{without.sequence} does not, so nothing tells which is newer: write all rows of a bucket with "
            "stream_created, or none; to begin with stream_created, fill a new bucket"
        )
    return change.age > known.age


def header_fields(change: Change, writer: str) -> dict[str, str] | None:
    """The headers of a change; None when it has none."""
    fields: dict[str, str] = {}
    if change.operation != "put":
        fields |= marker_headers(change.operation)
    if change.sequence is not None:
        fields[SEQUENCE_HEADER] = str(change.sequence)
    if change.mark is not None:
        fields[MARK_HEADER] = change.mark
    if change.stream_created:
        fields[STREAM_CREATED_HEADER] = str(change.stream_created)
    if change.revision is not None:
        fields[_EXPECTED] = str(change.revision)
        if change.sequence is None:
            fields[WRITER_HEADER] = writer
    return fields or None


def header_bytes(change: Change, writer: str) -> bytes | None:
    """The headers of a change as they stand in a frame; None when it has none."""
    # A state of a projection, of which there are thousands in a batch.
    is_state = change.operation == "put" and change.sequence is not None and not change.stream_created
    # A mark with a line break would be another header; `encode` refuses it.
    if is_state and (change.mark is None or change.mark.isprintable()):
        mark = "" if change.mark is None else f"\r\n{MARK_HEADER}: {change.mark}"
        expected = "" if change.revision is None else f"\r\n{_EXPECTED}: {change.revision}"
        return f"NATS/1.0\r\n{SEQUENCE_HEADER}: {change.sequence}{mark}{expected}\r\n\r\n".encode()
    fields = header_fields(change, writer)
    return None if fields is None else encode(fields)


def current_of(stored: Stored) -> Current:
    value = stored.value if stored.operation == "put" else None
    return Current(value, stored.sequence or 0, stored.revision, stored.mark, stored.stream_created)


def is_written(change: Change, stored: Stored | None, writer: str) -> bool:
    """Whether the bucket has this very change, stored before, and not somebody else's."""
    if stored is None or stored.value != change.value or stored.operation != change.operation:
        return False
    if change.sequence is not None:
        # Who applies the same events to the same state gets the same value: then it does not matter who wrote it.
        return (stored.stream_created, stored.sequence, stored.mark) == (
            change.stream_created,
            change.sequence,
            change.mark,
        )
    return stored.writer == writer


def is_unchanged(change: Change, stored: Stored | None) -> bool:
    """Whether the key looks as expected, though the leader refused the change: the replica that was read is behind."""
    return (0 if stored is None else stored.revision) == change.revision


def stored_sequence(text: str | None) -> int | None:
    """The number in a header such as ``JetSpark-Sequence``; None for a text that another client put there."""
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None


def some_keys(keys: Collection[str]) -> str:
    """Some of the keys, for an error."""
    named = [repr(key) for key, _ in zip(keys, range(MAX_NAMED), strict=False)]
    more = len(keys) - len(named)
    return f"key{'s' if len(keys) > 1 else ''} {', '.join(named)}{f' and {more} more' if more else ''}"
