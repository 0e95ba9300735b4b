"""Changes of keys, entries of buckets, and which of two is newer. Pure.

The header ``JetSpark-Sequence`` of a value, or of the marker of a deleted key, has the sequence of the last event in
it. Other NATS clients read such values like any other. A value without the header, written by another client, counts as
older than every event: sequence 0.

A re-created stream starts its sequences again. So a change may have the creation time of its stream, which is stored as
the header ``JetSpark-Stream-Created``: then the later stream is newer, whatever the sequences. A sequence with a
creation time and one without cannot be compared, and the change is refused.
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
    """The entry of a key in a bucket. A deleted key has no value, but a revision and the sequence of its deletion."""

    value: bytes | None
    sequence: int
    revision: int
    mark: str | None = None
    """The mark of a projection, from the header ``JetSpark-Projection``."""
    stream_created: int = 0
    """When the stream of the sequence was created, in microseconds since 1970; 0 where its writer did not say."""

    @property
    def age(self) -> tuple[int, int]:
        """How new it is: by stream, and within a stream by sequence."""
        return self.stream_created, self.sequence


NOTHING = Current(None, 0, 0)
"""The entry of a missing key."""


class Change(NamedTuple):
    """A write of one key."""

    key: str
    value: bytes = b""
    operation: KVOperation = "put"
    sequence: int | None = None
    """Sequence of the last event in the value; stored with it."""
    revision: int | None = None
    """Write only if this is still the key's last; 0 says that it has none. None writes whatever is there."""
    mark: str | None = None
    """The mark of a projection, stored as the header ``JetSpark-Projection``."""
    stream_created: int = 0
    """When the stream of the sequence was created, in microseconds since 1970; 0 where that is not known."""

    @property
    def age(self) -> tuple[int, int]:
        """How new it is: by stream, and within a stream by sequence."""
        return self.stream_created, self.sequence or 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of storing some changes."""

    written: int = 0
    conflicts: tuple[str, ...] = ()
    """Keys that had another revision than expected: nothing was written to them."""
    dropped: int = 0
    """Not written, because the bucket had newer ones, or the same."""
    present: Mapping[str, Current] = field(default_factory=dict, compare=False)
    """The leader's entries of keys in conflict; missing keys are omitted."""
    revisions: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Revisions of written changes, if they are known with certainty."""

    @classmethod
    def of_all(cls, outcomes: Sequence[Outcome]) -> Outcome:
        """The union of the outcomes of parts."""
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
    """Keep the newer one of two changes of a key; the later one if they have the same sequence or none.

    Raises:
        ConfigError: Only one of the two has the creation time of its stream.
    """
    known = kept.get(change.key)
    if known is None or not _is_newer(known, change):
        kept[change.key] = change


def newer(changes: Iterable[Change], known: Mapping[str, Current]) -> list[Change]:
    """The changes that are newer than the known entries, each conditional on the known revision.

    Raises:
        ConfigError: A change has no sequence, or only one of change and entry has the creation time of its stream.
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
    """True if a change is newer than another change or an entry.

    Raises:
        ConfigError: Only one of the two has the creation time of its stream.
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
    """True if the bucket has this change from an earlier attempt of the same writer."""
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
    """True if the key has the expected revision although the leader refused the change: the replica lags."""
    return (0 if stored is None else stored.revision) == change.revision


def stored_sequence(text: str | None) -> int | None:
    """The number in a header such as ``JetSpark-Sequence``; None for a text that another client put there."""
    return int(text) if text is not None and text.isascii() and text.isdecimal() else None


def some_keys(keys: Collection[str]) -> str:
    """Some of the keys, for an error."""
    named = [repr(key) for key, _ in zip(keys, range(MAX_NAMED), strict=False)]
    more = len(keys) - len(named)
    return f"key{'s' if len(keys) > 1 else ''} {', '.join(named)}{f' and {more} more' if more else ''}"
