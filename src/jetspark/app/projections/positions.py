"""How far a live engine is. Pure.

A bucket has the position of its reader under ``_jetspark.position``: JSON with the stream, when it was created, and
a sequence. Every event at or below that sequence is stored, or parks its key, or has a letter. It is written by
compare-and-set, and not after every batch: what was read once more changes nothing.

A position is moved back by one thing only, the repair of a parked key. An engine passes by the events of such a key, so
a repaired state is right only together with a position at or below its sequence. Whoever repairs a key writes both in
one atomic batch, key and position by their revisions, and counts the repair in ``repairs`` (:meth:`Position.repaired`).
Then an engine that begins later reads again what the state has not; and one that runs finds its own next position
refused, sees that there was a repair, and begins anew from the position it finds.

Where keys are folded in partitions, each has a position of its own besides, under ``_jetspark.position.<part>-<of>``;
that of the bucket is the lowest of them, so whoever knows nothing of partitions is right.

A position also says which version of the fold it is of, so that another version touches nothing; and which events may
be missing: the stream dropped them, by its limits or a purge, before they were read. That is never forgotten.
"""

from __future__ import annotations

import datetime
import json
from typing import NamedTuple

from jetspark.app.projections.marks import position_key
from jetspark.errors import ProtocolError, UsageError
from jetspark.jetstream.config import StreamConfig
from jetspark.state.changes import Change

__all__ = ["FoldPosition", "first_ever", "part_start", "position_change", "start_of"]


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

    def missing(self, first: int, last: int) -> FoldPosition:
        """The same, with events missing between two sequences, besides those that are missing already."""
        known = self.missed or (first, last)
        return self._replace(missed=(min(first, known[0]), max(last, known[1])))

    def repaired(self, sequence: int) -> FoldPosition:
        """What goes with a repaired state that has the events up to ``sequence``."""
        return self._replace(sequence=min(self.sequence, sequence), repairs=self.repairs + 1)

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
            missed = fields.get("missed") and (int(fields["missed"][0]), int(fields["missed"][1]))
            found = cls(stream, created, int(fields["sequence"]), repairs, version, missed)
        except (ValueError, KeyError, TypeError, IndexError):
            raise ProtocolError(f"the position of a projection is not readable: {value[:200]!r}") from None
        return found

    @classmethod
    def beginning(cls, stream: str, created: datetime.datetime | None) -> FoldPosition:
        return cls(stream, "" if created is None else created.isoformat(), 0)


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


def first_ever(config: StreamConfig) -> int:
    """The sequence of the first message that a stream ever had."""
    return max(1, config.first_sequence or 1)


def position_change(position: FoldPosition, revision: int, part: str = "") -> Change:
    """The write of a position, if the record still has this revision; 0 if there is none."""
    return Change(position_key(part), position.encode(), "put", position.sequence, revision)


def part_start(part: FoldPosition | None, whole: FoldPosition) -> int:
    """Where a reader of one partition begins.

    The position of the whole bucket is never beyond that of a partition. That of the partition counts only if nothing
    was repaired since it was written: a repair moves the position of the whole back.
    """
    if part is None or part._replace(sequence=0, missed=None) != whole._replace(sequence=0, missed=None):
        return whole.sequence
    return max(part.sequence, whole.sequence)
