"""Positions: the last stream sequence that a bucket of a projection contains. Pure, but for the procedures that read.

A bucket holds the position of its reader under ``_jetspark.position``: JSON with the stream, its creation time, and a
sequence. Every event at or below that sequence is in a state, has made its key stuck, or has a dead letter. The
position is written by compare-and-set, less often than batches: events that are read a second time change nothing.

Only the repair of a stuck key moves a position back. An engine skips the events of a stuck key, so a repaired state is
right only with a position at or below its sequence. A repair writes key and position in one atomic batch, both by their
revisions, and increments ``repairs`` (:meth:`FoldPosition.repaired`). An engine that starts later reads the events that
the state lacks. The next position of a running engine is refused; the engine sees the repair and restarts from the
stored position.

With partitions each partition has a position of its own under ``_jetspark.position.<part>-<of>``. The position of the
bucket is the lowest of them, so it is also right for readers that do not know partitions.

A position has the version of its fold, so that code of another version changes nothing. It also has the range of events
that may be missing, because the stream dropped them, by its limits or a purge, before they were read; this range is
kept permanently. And it names two events that were read, by which a later reader detects losses (``state/losses``).

:func:`read_position` reads from the leader, through the object that also loads the states. States that are loaded later
contain at least the events up to the position (:mod:`jetspark.state.store`).
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from typing import NamedTuple

from jetspark.app.projections.state_header import position_key
from jetspark.errors import ProtocolError, UsageError
from jetspark.publish.steps import Procedure
from jetspark.state.changes import Change, Current
from jetspark.state.store import StateBucket

__all__ = [
    "FoldPosition",
    "StoredPosition",
    "part_start",
    "position_change",
    "read_part_positions",
    "read_position",
    "start_of",
]


class FoldPosition(NamedTuple):
    """A sequence of a stream, and what a reader needs to continue there."""

    stream: str
    created: str
    """Creation time of the stream: a re-created stream has other events under the same sequences."""
    sequence: int
    repairs: int = 0
    """Number of repairs so far."""
    version: int = 0
    """Version of the fold that makes the states; 0 if unknown."""
    missed: tuple[int, int] | None = None
    """First and last sequence of the range in which the stream dropped events before they were read."""
    witnesses: tuple[int, int] | None = None
    """The first event of the projection in the stream, and the last event read up to this position; 0 if unknown."""

    @property
    def first_event(self) -> int:
        return 0 if self.witnesses is None else self.witnesses[0]

    @property
    def last_event(self) -> int:
        return 0 if self.witnesses is None else self.witnesses[1]

    def reaching(self, sequence: int, first_event: int, last_event: int) -> FoldPosition:
        """The position advanced to ``sequence``; first and last event read up to there are 0 if there was none."""
        first, last = self.first_event or first_event, max(self.last_event, last_event)
        return self._replace(sequence=sequence, witnesses=(first, last) if first or last else None)

    def missing(self, first: int, last: int) -> FoldPosition:
        """The position with its range of missing events extended by ``first`` to ``last``."""
        known = self.missed or (first, last)
        return self._replace(missed=(min(first, known[0]), max(last, known[1])))

    def repaired(self, sequence: int) -> FoldPosition:
        """The position to write with a repaired state whose last event is ``sequence``."""
        back = self._replace(sequence=min(self.sequence, sequence), repairs=self.repairs + 1)
        if self.last_event <= back.sequence:
            return back
        # An event after the position proves nothing about events that are read again. The first event always does.
        return back._replace(witnesses=(self.first_event, self.first_event) if self.first_event else None)

    def encode(self) -> bytes:
        fields = {name: value for name, value in self._asdict().items() if value is not None}
        return json.dumps(fields, sort_keys=True).encode()

    @classmethod
    def decode(cls, value: bytes) -> FoldPosition:
        """
        Raises:
            ProtocolError: The value is not a position.
        """
        try:
            fields = json.loads(value)
            stream, created = str(fields["stream"]), str(fields["created"])
            repairs, version = int(fields.get("repairs", 0)), int(fields.get("version", 0))
            missed, witnesses = _pair(fields.get("missed")), _pair(fields.get("witnesses"))
            found = cls(stream, created, int(fields["sequence"]), repairs, version, missed, witnesses)
        except (ValueError, KeyError, TypeError, IndexError):
            raise ProtocolError(f"the position of a projection cannot be decoded: {value[:200]!r}") from None
        return found

    @classmethod
    def beginning(cls, stream: str, created: datetime.datetime | None) -> FoldPosition:
        return cls(stream, "" if created is None else created.isoformat(), 0)


class StoredPosition(NamedTuple):
    """The position record of a bucket."""

    position: FoldPosition | None
    """None if the bucket has no position."""
    revision: int
    """The record's revision; 0 without a record."""

    @property
    def sequence(self) -> int | None:
        return None if self.position is None else self.position.sequence


def read_position(bucket: StateBucket) -> Procedure[StoredPosition]:
    """The position of a bucket, from the leader.

    Raises:
        ProtocolError: The record cannot be decoded.
    """
    [found] = yield from _read_all(bucket, [position_key()])
    return found


def read_part_positions(bucket: StateBucket, partitions: int) -> Procedure[list[StoredPosition]]:
    """The position of each partition of a bucket, from the leader."""
    return (yield from _read_all(bucket, [position_key(part_name(part, partitions)) for part in range(partitions)]))


def _read_all(bucket: StateBucket, keys: list[str]) -> Procedure[list[StoredPosition]]:
    # From the leader: a replica that lags may still have a position that was moved back since.
    found = yield from bucket.load_from_leader(keys)
    return [_stored(found.get(key)) for key in keys]


def _stored(current: Current | None) -> StoredPosition:
    if current is None:
        return StoredPosition(None, 0)
    return StoredPosition(None if current.value is None else FoldPosition.decode(current.value), current.revision)


def part_name(part: int, partitions: int) -> str:
    return f"{part}-{partitions}"


def start_of(
    stored: FoldPosition | None, beginning: FoldPosition, *, projection: str, bucket: str, version: int = 0
) -> FoldPosition:
    """The position that a reader of the stream continues from.

    Args:
        stored: The position of the bucket; None for a new bucket.
        beginning: The beginning of the stream as it is now.
        version: Version of the reader's fold; 0 if unknown.

    Raises:
        UsageError: The position is of another stream, or of another version of the fold.
    """
    if stored is None:
        return beginning._replace(version=version)
    if version and stored.version and stored.version != version:
        raise UsageError(
            f"projection {projection!r} is at version {stored.version} (bucket {bucket}), and this code is version "
            f"{version}: rebuild it and swap (jetspark rebuild --swap), or run the code of version {stored.version}"
        )
    if (stored.stream, stored.created) != (beginning.stream, beginning.created):
        raise UsageError(
            f"projection {projection!r} (bucket {bucket}) was made of stream {stored.stream!r} as it was created at "
            f"{stored.created}, and stream {beginning.stream!r} was created at {beginning.created}: its position is "
            "not valid there. Rebuild it (jetspark rebuild), or delete the bucket to start from the first event"
        )
    return stored if not version else stored._replace(version=version)


def position_change(position: FoldPosition, revision: int, part: str = "") -> Change:
    """A write of a position, conditional on the record's revision (0: no record yet)."""
    return Change(position_key(part), position.encode(), "put", position.sequence, revision)


def part_start(part: FoldPosition | None, whole: FoldPosition) -> int:
    """The sequence that a reader of one partition continues from.

    The position of the bucket is never beyond that of a partition. The partition's position is valid only if there was
    no repair since it was written, because a repair moves only the bucket's position back.
    """
    if part is None or _bare(part) != _bare(whole):
        return whole.sequence
    return max(part.sequence, whole.sequence)


def _bare(position: FoldPosition) -> FoldPosition:
    return position._replace(sequence=0, missed=None, witnesses=None)


def _pair(value: Sequence[int] | None) -> tuple[int, int] | None:
    return None if not value else (int(value[0]), int(value[1]))
