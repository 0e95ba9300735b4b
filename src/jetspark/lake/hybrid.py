"""One history of an archive and its stream: the part of a range that is read from each.

Planning is pure; :class:`Archives` opens tables.

An archive covers ``[first, next)``, and the stream has what its limits have left. They overlap where messages are
archived and not removed yet. Everything that the archive covers is read from it, and the rest from the stream, so that
a reader depends as little as possible on what the stream removes while it reads::

    archive        |first ............... next|
    stream                     |first ..................... next|
    read from      |archive ................. |stream ......... |

A gap is a sequence that neither of them has. It is :class:`~jetspark.errors.DataLoss` for a range that needs it.

The border moves: the archive grows, and the stream loses archived messages. Offsets are sequences of the stream, and
both have the same message at each of them, so a range gives the same rows wherever its border is. A reader that finds a
part missing, in the stream or in the archive, opens the archive again and continues at its position there
(:class:`HybridCursor`).
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from jetspark.errors import ArchiveDamaged, ConfigError, DataLoss, StreamNotFound, StreamRecreated, StreamWentBack
from jetspark.lake.archive import find_tables
from jetspark.lake.position import StreamIdentity
from jetspark.lake.reading import ArchiveReader, ArchiveRoot
from jetspark.state.scan import Head, Range

__all__ = ["Archives", "HybridCursor", "HybridHead", "HybridRange", "Slice", "archive_alone", "joined"]

_logger = logging.getLogger("jetspark.lake")

# Attempts to read a part that is found missing each time, without a message in between.
MAX_ATTEMPTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridHead(Head):
    """A stream that begins in its archive."""

    tail: Head
    """The stream alone."""
    archive: ArchiveReader
    is_deleted: bool = False
    """The stream does not exist any more; ``tail`` is empty."""
    is_front_whole: bool = False
    """Nothing that counts was removed before the archive begins."""

    def first_loss(self, start: int, end: int) -> range | None:
        covered, tail = self.archive.position, self.tail
        begin = covered.first if start < covered.first < covered.next and self.is_front_whole else start
        begin = covered.next if covered.first <= begin < covered.next else begin
        if begin >= min(end, tail.whole_from):
            return None
        there = max(tail.first, begin + 1)
        return range(begin, min(there, covered.first) if begin < covered.first < covered.next else there)

    def begin_at(self, moment: datetime.datetime, found: int) -> int:
        """The first sequence stored at or after a moment.

        Args:
            found: The answer of the stream alone.
        """
        archived, covered = self.archive.sequence_at(moment), self.archive.position
        if archived is None and covered.next < self.tail.whole_from and found <= self.tail.first:
            return covered.next  # messages of the gap may be of this time
        return found if archived is None else min(found, archived)

    def count_from(self, sequence: int, in_stream: Callable[[int], int]) -> int:
        """The number of messages from a sequence on; ``in_stream`` counts those of the stream."""
        covered = self.archive.position
        count = self.archive.count_from(sequence) + in_stream(max(sequence, covered.next))
        return count + (in_stream(sequence) - in_stream(covered.first) if sequence < covered.first else 0)

    def range_of(self, part: Range) -> HybridRange:
        """A range of this stream as a task reads it."""
        return HybridRange(
            part.stream,
            part.created,
            part.start,
            part.end,
            part.subjects,
            part.is_earliest,
            archive=self.archive.within(part.start, part.end),
            is_kept=self.kept_from is not None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridRange(Range):
    """A range, and the files of the archive that have a part of it."""

    archive: ArchiveReader
    is_kept: bool = False
    """Nothing that counts was removed from the stream, though it may begin later (:mod:`jetspark.state.losses`)."""


def joined(head: Head, archive: ArchiveReader, *, is_older: bool = False) -> HybridHead:
    """A stream and its archive as one history.

    Args:
        is_older: The archive was read before the stream, which therefore has at least as many sequences.

    Raises:
        ConfigError: The archive is of another stream.
        StreamRecreated: The archive is of another incarnation of the stream.
        StreamWentBack: The stream ends before the archive.
    """
    covered = archive.position
    _check_identity(covered.identity, StreamIdentity(head.stream, head.created), archive.uri)
    if is_older and covered.next > head.next:
        raise StreamWentBack(head.stream, covered.next, head.next)
    is_empty = covered.first == covered.next
    first = head.first if is_empty else min(covered.first, head.first)
    size = head.bytes_per_message or archive.bytes_per_message
    in_stream = max(0, head.next - max(head.first, covered.next)) - min(head.missing, head.next - head.first)
    messages = archive.rows + max(0, in_stream)
    return HybridHead(
        head.stream,
        head.created,
        first,
        head.next,
        size * messages / max(1, head.next - first),
        max(0, head.next - first - messages),
        size,
        head.kept_from,
        tail=head,
        archive=archive,
    )


def archive_alone(archive: ArchiveReader) -> HybridHead:
    """The history of a stream that does not exist any more: it ends where its archive ends."""
    covered = archive.position
    identity, end = covered.identity, covered.next
    return replace(joined(Head(identity.stream, identity.created, end, end), archive), is_deleted=True)


def _check_identity(archived: StreamIdentity, found: StreamIdentity, uri: str) -> None:
    if archived.stream != found.stream:
        raise ConfigError(f"archive {uri} is of stream {archived.stream!r}: expected one of stream {found.stream!r}")
    if archived.created != found.created:
        remedy = (
            f"archive {uri} is of the former one: archive the present stream, too, or restore the former one from its "
            "archive into a stream of another name"
        )
        raise StreamRecreated(found.stream, archived.created, found.created, remedy)


class Slice(NamedTuple):
    """A part of a range that comes from one place."""

    start: int
    end: int
    is_archived: bool


class HybridCursor:
    """The position of one reader in a range, and where the next messages come from."""

    def __init__(self, part: HybridRange) -> None:
        self._part, self.next = part, part.start
        self.archive = part.archive
        self._attempts = 0

    def slice(self) -> Slice | None:
        """The next part of the range; None at its end."""
        start, end, covered = self.next, self._part.end, self.archive.position
        if start >= end:
            return None
        if covered.first <= start < covered.next:
            return Slice(start, min(end, covered.next), is_archived=True)
        if start < covered.first < covered.next:
            end = min(end, covered.first)
        return Slice(start, end, is_archived=False)

    def slices(self) -> Iterator[Slice]:
        """All parts from here on, as far as is known; each counts as read when the next one is taken."""
        while (found := self.slice()) is not None:
            yield found
            self.reached(found.end)

    def in_stream(self, part: Slice) -> Range:
        """A part to read from the stream."""
        # Messages removed from the front of the stream are not lost at the beginning of a history, and lost elsewhere.
        covered, whole = self.archive.position, self._part
        is_beginning = covered.first == covered.next or part.start < covered.first
        is_early = whole.is_kept or (whole.is_earliest and is_beginning)
        return Range(whole.stream, whole.created, part.start, part.end, whole.subjects, is_early)

    def reached(self, sequence: int) -> None:
        """Everything before this sequence was read."""
        if sequence > self.next:
            self.next, self._attempts = sequence, 0

    def can_continue(self, error: DataLoss | ArchiveDamaged) -> bool:
        """Open the archive again after a part was found missing; True if it has the part now.

        The stream may have lost messages that were archived since the range was planned, and a compaction replaces
        files. Messages that the archive itself has lost do not come back.
        """
        part, self._attempts = self.slice(), self._attempts + 1
        is_of_archive = part is not None and part.is_archived
        if self._attempts > MAX_ATTEMPTS or (is_of_archive and isinstance(error, DataLoss)):
            return False
        version = self.archive.version
        self.archive = self.archive.reopened().within(self.next, self._part.end)
        if is_of_archive:
            return self.archive.version != version
        part = self.slice()
        return part is not None and part.is_archived


class Archives:
    """The archives of the streams of one reader: each is opened once, and again when a gap behind it shows."""

    def __init__(self, root: ArchiveRoot | None, *, may_lack: bool = False) -> None:
        """
        Args:
            root: None for no archives: heads stay as they are.
            may_lack: Streams without an archive are read as they are, if at least one has an archive.
        """
        self._root, self._may_lack = root, may_lack
        self._readers: dict[str, ArchiveReader | None] = {}
        self._fresh: set[str] = set()
        self.has_gap = False
        """The last archive was opened once more, because the stream begins behind its end."""

    def open(self, streams: Iterable[str]) -> None:
        """Open the archives of streams, before their heads are read: so a stream that went back is noticed."""
        for stream in streams:
            if self._root is not None and stream not in self._readers:
                self._readers[stream] = self._open(self._root, stream)
                self._fresh.add(stream)

    def extend(self, head: Head, anchor: int = 0) -> Head:
        """A stream and its archive as one history; ``head`` itself without an archive.

        ``anchor`` is the sequence of an event that was read, as in :mod:`jetspark.state.losses`; 0 if unknown.
        """
        if isinstance(head, HybridHead):
            return head
        is_older = head.stream in self._fresh
        self.open([head.stream])
        self._fresh.discard(head.stream)
        reader = self._readers.get(head.stream)
        if reader is None:
            return head
        whole = joined(head, reader, is_older=is_older)
        self.has_gap = whole.first_loss(whole.first, whole.next) is not None
        if self.has_gap:
            # The stream has lost more since, which the archive may have by now.
            self._readers[head.stream] = reader = reader.reopened()
            whole = joined(head, reader)
        covered = reader.position
        return replace(whole, is_front_whole=covered.first <= anchor < covered.next)

    def alone(self, stream: str) -> HybridHead | None:
        """The history of a stream that does not exist any more; None without an archive of it."""
        self.open([stream])
        reader = self._readers.get(stream)
        return None if reader is None else archive_alone(reader)

    def whole(self, stream: str, look: Callable[[int], Head], anchor: int = 0) -> Head:
        """The history of a stream, which need not exist any more.

        Args:
            look: Returns the head of the stream, given the anchor to look for in it.
            anchor: As for :meth:`extend`.

        Raises:
            StreamNotFound: The stream does not exist and has no archive.
        """
        self.open([stream])
        try:
            return self.extend(look(self.anchor_in_stream(stream, anchor)), anchor)
        except StreamNotFound:
            if (alone := self.alone(stream)) is None:
                raise
            return alone

    def anchor_in_stream(self, stream: str, anchor: int) -> int:
        """The event to look for in the stream; 0 for an archived one, which may have been trimmed."""
        reader = self._readers.get(stream)
        return 0 if reader is not None and anchor < reader.position.next else anchor

    def _open(self, root: ArchiveRoot, stream: str) -> ArchiveReader | None:
        try:
            return root.open(stream)
        except ConfigError:
            if not self._may_lack or not find_tables(root.uri, options=root.options):
                raise
            _logger.warning("archive %s has none of stream %s, which is read without one", root.uri, stream)
            return None
