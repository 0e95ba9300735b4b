"""How far a bucket of a projection is, and how that is read. Pure, but for one procedure.

A bucket has the position of its reader under ``_jetspark.position``: JSON with the stream, when it was created, and
a sequence. Every event at or below that sequence is stored, or parks its key, or has a letter. It is written by
compare-and-set, and not after every batch: what was read once more changes nothing.

A position is moved back by one thing only, the repair of a parked key. An engine passes by the events of such a key, so
a repaired state is right only together with a position at or below its sequence. A repair writes both in one atomic
batch, key and position by their revisions, and counts itself in ``repairs`` (:meth:`FoldPosition.repaired`). Then an
engine that begins later reads again what the state has not; and one that runs finds its own next position refused,
sees that there was a repair, and begins anew from the position it finds.

Where keys are folded in partitions, each has a position of its own besides, under ``_jetspark.position.<part>-<of>``;
that of the bucket is the lowest of them, so a reader that knows nothing of partitions is right.

A position also says which version of the fold it is of, so that another version touches nothing; and which events may
be missing: the stream dropped them, by its limits or a purge, before they were read. That is never forgotten. And it
names two events that were read, so that a later reader can tell whether events were dropped (``state/losses``).

A position is read by :func:`read_position`, from the leader, through the object that the states are loaded with: what
is loaded afterwards has at least the events that the position says (:mod:`jetspark.state.store`).
"""

from __future__ import annotations

import datetime
import json
from typing import Any, NamedTuple

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
    """A place in a stream."""

    stream: str
    created: str
    """When the stream was made: another one of the same name has other events under the same sequences."""
    sequence: int
    repairs: int = 0
    """How many keys were repaired so far."""
    version: int = 0
    """Of the fold that makes the states; 0 where nobody has said."""
    missed: tuple[int, int] | None = None
    """The stream had dropped events between these sequences, both included, before they could be read."""
    witnesses: tuple[int, int] | None = None
    """The first event of the projection in the stream, and the last one that was read up to this position; 0 for one
    that is not known.
    """

    @property
    def first_event(self) -> int:
        return 0 if self.witnesses is None else self.witnesses[0]

    @property
    def last_event(self) -> int:
        return 0 if self.witnesses is None else self.witnesses[1]

    def reaching(self, sequence: int, first_event: int, last_event: int) -> FoldPosition:
        """The same, further on: with the events that were read up to there, 0 for none."""
        first, last = self.first_event or first_event, max(self.last_event, last_event)
        return self._replace(sequence=sequence, witnesses=(first, last) if first or last else None)

    def missing(self, first: int, last: int) -> FoldPosition:
        """The same, with events missing between two sequences, besides those that are missing already."""
        known = self.missed or (first, last)
        return self._replace(missed=(min(first, known[0]), max(last, known[1])))

    def repaired(self, sequence: int) -> FoldPosition:
        """What goes with a repaired state that has the events up to ``sequence``."""
        back = self._replace(sequence=min(self.sequence, sequence), repairs=self.repairs + 1)
        if self.last_event <= back.sequence:
            return back
        # An event behind the position says nothing of those that are to be read again. The first one always does.
        return back._replace(witnesses=(self.first_event, self.first_event) if self.first_event else None)

    def encode(self) -> bytes:
        fields = {name: value for name, value in self._asdict().items() if value is not None}
        return json.dumps(fields, sort_keys=True).encode()

    @classmethod
    def decode(cls, value: bytes) -> FoldPosition:
        """
        Raises:
            ProtocolError: It is none.
        """
        try:
            fields = json.loads(value)
            stream, created = str(fields["stream"]), str(fields["created"])
            repairs, version = int(fields.get("repairs", 0)), int(fields.get("version", 0))
            missed, witnesses = _pair(fields.get("missed")), _pair(fields.get("witnesses"))
            found = cls(stream, created, int(fields["sequence"]), repairs, version, missed, witnesses)
        except (ValueError, KeyError, TypeError, IndexError):
            raise ProtocolError(f"the position of a projection is not readable: {value[:200]!r}") from None
        return found

    @classmethod
    def beginning(cls, stream: str, created: datetime.datetime | None) -> FoldPosition:
        return cls(stream, "" if created is None else created.isoformat(), 0)


class StoredPosition(NamedTuple):
    """What a bucket says of how far it is."""

    position: FoldPosition | None
    """None if nobody has noted one."""
    revision: int
    """Of the note; 0 if there is none."""

    @property
    def sequence(self) -> int | None:
        return None if self.position is None else self.position.sequence


def read_position(bucket: StateBucket) -> Procedure[StoredPosition]:
    """How far a bucket is.

    Raises:
        ProtocolError: What is noted is no position.
    """
    [found] = yield from _read_all(bucket, [position_key()])
    return found


def read_part_positions(bucket: StateBucket, partitions: int) -> Procedure[list[StoredPosition]]:
    """How far each partition of a bucket is."""
    return (yield from _read_all(bucket, [position_key(part_name(part, partitions)) for part in range(partitions)]))


def _read_all(bucket: StateBucket, keys: list[str]) -> Procedure[list[StoredPosition]]:
    # Of the leader: what a replica that is behind says may have been moved back since.
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
    """Where a reader of the stream begins.

    Args:
        stored: What the bucket has; None for a new one.
        beginning: That of the stream as it is now.
        version: Of the reader's fold; 0 if it does not say.

    Raises:
        UsageError: The position is one of another stream, or of another version of the fold.
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
            f"{stored.created}, and stream {beginning.stream!r} was created at {beginning.created}: its position means "
            "nothing there. Rebuild it (jetspark rebuild), or delete the bucket to begin anew"
        )
    return stored if not version else stored._replace(version=version)


def position_change(position: FoldPosition, revision: int, part: str = "") -> Change:
    """The write of a position, if the record still has this revision; 0 if there is none."""
    return Change(position_key(part), position.encode(), "put", position.sequence, revision)


def part_start(part: FoldPosition | None, whole: FoldPosition) -> int:
    """Where a reader of one partition begins.

    The position of the whole bucket is never beyond that of a partition. That of the partition counts only if nothing
    was repaired since it was written: a repair moves the position of the whole back.
    """
    if part is None or _bare(part) != _bare(whole):
        return whole.sequence
    return max(part.sequence, whole.sequence)


def _bare(position: FoldPosition) -> FoldPosition:
    return position._replace(sequence=0, missed=None, witnesses=None)


def _pair(value: Any) -> tuple[int, int] | None:
    return None if not value else (int(value[0]), int(value[1]))
