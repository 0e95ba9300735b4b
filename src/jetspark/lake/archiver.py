"""Archives streams: looks at a stream, writes new messages as files, and commits the files with the new position.

An archiver is at one place of its stream: the position in the table's last commit. A *step* writes the messages from
there on and commits them, if enough messages wait or have waited for long enough. Whatever ends a process in between,
files that are in no commit are not in the table, and the next writer begins at the same position. So the only critical
moment is the commit, and the table decides it: it refuses a commit if it has moved since it was read.

A refused commit has one of two reasons. A compaction has replaced files, and the position is the same: the commit is
made again on top of it. Or another writer was first: the files are given up, and reading continues at its position.

An idle stream has nothing to commit. The archiver is not behind then, because its position is the stream's end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple, Protocol

from jetspark.blocking import JetStream
from jetspark.blocking.steps import ProcedureRunner
from jetspark.core.backoff import Backoff
from jetspark.errors import (
    ArchiveMoved,
    JetSparkError,
    MessageNotFound,
    RequestTimeout,
    StreamNotFound,
    StreamRecreated,
    StreamWentBack,
)
from jetspark.jetstream.config import StreamConfig
from jetspark.lake.archive import ArchiveTable, open_table
from jetspark.lake.lease import WriterLease
from jetspark.lake.position import DataFile, Snapshot, StreamIdentity
from jetspark.lake.range_writing import ArchiveOptions, StreamPart, WrittenPart, front, write_range
from jetspark.lake.store import require_conditional_writes
from jetspark.state.patience import Attempts
from jetspark.state.scan import Head

__all__ = [
    "ArchiveCommit",
    "ArchiveEngine",
    "LocalArchiver",
    "archive_streams",
]

_logger = logging.getLogger("jetspark.lake")

POLL_S = 1.0
"""How often a stream is looked at. A commit waits for `every_s`, or for enough messages."""
PAUSE = Backoff(first_s=0.1, max_s=5.0)
# A stream with limits keeps messages for a while. The archive commits at least this often in that while.
COMMITS_WITHIN_LIMITS = 4
MAX_REPEATS = 20
"""Commits on top of compactions, one after the other."""


class ArchiveCommit(NamedTuple):
    """A commit, as a callback gets it."""

    table: ArchiveTable
    snapshot: Snapshot
    """The table after the commit."""
    files: tuple[DataFile, ...]
    """The new files, in the order of their sequences."""


class ArchiveEngine(Protocol):
    """Writes a part of a stream as files: in this process, or in the tasks of Spark."""

    def write(
        self,
        table: ArchiveTable,
        part: StreamPart,
        options: ArchiveOptions,
        head: Head,
        on_piece: Callable[[int], bool],
    ) -> WrittenPart:
        """As :func:`~jetspark.lake.range_writing.write_range`; may end before the part does."""


class LocalArchiver:
    """Writes in this process."""

    def __init__(self, js: JetStream) -> None:
        self._runner = ProcedureRunner(js)

    def write(
        self,
        table: ArchiveTable,
        part: StreamPart,
        options: ArchiveOptions,
        head: Head,
        on_piece: Callable[[int], bool],
    ) -> WrittenPart:
        return write_range(self._runner, table.store, part, options, is_cut=True, on_piece=on_piece)


def archive_streams(
    js: JetStream,
    streams: Sequence[str],
    options: ArchiveOptions,
    *,
    once: bool = False,
    stop: Callable[[float], bool] | None = None,
    engine: ArchiveEngine | None = None,
    on_commit: Callable[[ArchiveCommit], None] | None = None,
    on_progress: Callable[[str, int, int], None] | None = None,
) -> None:
    """Archive streams, each into tables of its own, until ``stop`` says so.

    A process that ends at any moment leaves a sound table, and the next one continues at its position. Two processes
    at once never write a message twice.

    Args:
        once: True to end when everything is archived that the streams have now.
        stop: A function that waits up to a number of seconds, and returns True, at once, when the archiver is to end;
            ``Event().wait`` is one. Messages read by then are committed.
        engine: :class:`LocalArchiver` by default.
        on_commit: Called after each commit. After a crash it was not called for the last one.
        on_progress: Called with a stream, the next sequence to archive, and the last sequence of the stream.

    Raises:
        DataLoss: A stream's limits removed messages before they were archived; see ``on_loss``.
        StreamNotFound: A stream does not exist.
        StreamWentBack: A stream was restored from an older state, so that it gives archived sequences again.
        ConfigError: The store does not honour conditional writes, or an option cannot be used.
        RequestTimeout, StoreUnavailable: For longer than ``patience_s`` the server or the store was away, or (with
            ``once``) another writer had the lease.
    """
    wait = stop or _sleep
    writing = engine or LocalArchiver(js)
    archivers = [
        _Archiver(js, stream, options, writing, is_once=once, stop=wait, on_commit=on_commit, on_progress=on_progress)
        for stream in streams
    ]
    try:
        while not (once and all(each.is_done for each in archivers)):
            is_busy = [each.try_step() for each in archivers if not each.is_done]
            if wait(0.0 if any(is_busy) else POLL_S):
                return
    finally:
        for each in archivers:
            each.release()


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


class _Archiver:
    """Archives one stream, step by step."""

    def __init__(
        self,
        js: JetStream,
        stream: str,
        options: ArchiveOptions,
        engine: ArchiveEngine,
        *,
        is_once: bool,
        stop: Callable[[float], bool],
        on_commit: Callable[[ArchiveCommit], None] | None,
        on_progress: Callable[[str, int, int], None] | None,
    ) -> None:
        self._js, self._stream, self._options, self._engine = js, stream, options, engine
        self._is_once, self._stop, self._on_commit, self._on_progress = is_once, stop, on_commit, on_progress
        self._runner = ProcedureRunner(js)
        self._attempts = Attempts(options.patience_s, PAUSE)
        self._lease: WriterLease | None = None
        self._epoch = 0
        self._owner: str | None = None
        """The other writer that this one waits for."""
        self._table: ArchiveTable | None = None
        self._base: Snapshot | None = None
        """The table as it was last read; None if it does not exist."""
        self._end = 0
        """The end of the stream when it was last looked at."""
        self._empty: WrittenPart | None = None
        """Read from the position on, and without a message."""
        self._pending: WrittenPart | None = None
        """Written, and to be committed."""
        self._waiting_since: float | None = None
        self._target = 0
        self.is_done = False
        """With ``is_once``: everything is archived that the stream had at the start."""

    def try_step(self) -> bool:
        """Do a step; True if the next one is due now. Errors that may pass are raised when the patience is over."""
        try:
            is_busy = self._step()
        except StreamRecreated:
            self._pending = None
            return True  # the next look at the stream says so
        except ArchiveMoved:
            if self._base is not None:
                raise
            assert self._table is not None
            self._base = self._table.snapshot()  # created by another writer, at the same moment
            return True
        except JetSparkError as error:
            # A stream that is being re-created is not there for a moment.
            if not (error.may_pass or (isinstance(error, StreamNotFound) and self._table is not None)):
                raise
            wait_s = self._attempts.wait_s(time.monotonic())
            if wait_s is None:
                raise
            _logger.warning("stream %s: %s; trying again", self._stream, error)
            self._stop(wait_s)
            return False
        self._attempts.progress(time.monotonic())
        return is_busy

    def release(self) -> None:
        if self._lease is not None:
            self._lease.release()

    def _step(self) -> bool:
        head, config = self._look()
        if self._table is None or self._table.identity != StreamIdentity(head.stream, head.created):
            self._open(head)
        if not self._is_owner(config):
            return False
        if self._pending is None:
            self._end = head.next
            if not self._is_due(head, config):
                return False
            self._write(head)
        if self._pending is not None:
            self._commit(self._pending)
        if self._on_progress is not None:
            self._on_progress(self._stream, self._next, self._end - 1)
        self.is_done = self._is_once and self._next >= self._target
        return True

    # ---- the stream --------------------------------------------------------------------------------------------

    def _look(self) -> tuple[Head, StreamConfig]:
        return self._runner.run(front(self._stream, self._anchor, 0.0))

    def _open(self, head: Head) -> None:
        """Open the table of the stream's present incarnation."""
        options, identity = self._options, StreamIdentity(head.stream, head.created)
        if self._table is not None:
            unread = f"; of the old one, sequences {self._next}-{self._end - 1} were not archived"
            _logger.warning(
                "stream %s was deleted and re-created at %s: a new table is begun%s",
                self._stream,
                identity.created,
                unread if self._next < self._end else "",
            )
        table = open_table(options.to, identity, format=options.format, options=options.storage_options)
        base = table.snapshot()
        if base is not None:
            require_conditional_writes(table.store)
            if base.position.next > head.next:
                head, _ = self._look()  # another writer may have archived what came after the first look
                if base.position.next > head.next:
                    raise StreamWentBack(self._stream, base.position.next, head.next)
        self._table, self._base, self._target = table, base, head.next
        self._empty, self._pending, self._waiting_since = None, None, None

    @property
    def _next(self) -> int:
        """The first sequence that was not read yet; 0 if nothing was."""
        if self._empty is not None:
            return self._empty.end
        return 0 if self._base is None else self._base.position.next

    @property
    def _anchor(self) -> int:
        """The sequence of the last row in the table; 0 without one."""
        files = () if self._base is None else self._base.files
        return files[-1].max_sequence if files else 0

    def _is_due(self, head: Head, config: StreamConfig) -> bool:
        """True if messages are to be written now."""
        waiting = head.next - max(self._next, head.first if self._base is None else 0)
        if waiting <= 0:
            self._waiting_since = None
            self.is_done = self._is_once
            return False
        now, options = time.monotonic(), self._options
        self._waiting_since = self._waiting_since or now
        every_s = min([options.every_s, *_share(config.max_age_s)])
        rows = min([options.max_rows, *_share(config.max_messages)])
        size = min([options.max_bytes, *_share(config.max_bytes)])
        is_full = waiting >= rows or waiting * head.bytes_per_sequence >= size
        return self._is_once or is_full or now - self._waiting_since >= every_s

    def _write(self, head: Head) -> None:
        """Write the new messages as files, to be committed."""
        table, base, empty = self._table, self._base, self._empty
        assert table is not None
        self._check_history(base)
        begin = head.first if base is None else base.position.next
        part = StreamPart(
            identity=table.identity,
            begin=begin,
            start=max(begin, self._next),
            end=head.next,
            lost=() if empty is None else empty.lost,
            anchor=self._anchor,
            is_first=base is None,
        )
        options = self._options
        if base is None:
            # The table is created for sequences from the first row on, and before there are files, by which a table is
            # known that has lost its log. The rest is for the engine.
            written = write_range(
                self._runner, table.store, part, options, on_piece=self._on_first_piece, on_begin=self._create
            )
        else:
            written = self._engine.write(table, part, options, head, self._on_piece)
        self._waiting_since = None
        if written.files:
            self._pending = written
        else:
            self._empty = written

    def _create(self, first: int) -> None:
        assert self._table is not None
        self._base = self._table.open_for_writing(first, epoch=self._epoch)

    def _on_first_piece(self, at: int) -> bool:
        self._on_piece(at)
        return True

    def _on_piece(self, at: int) -> bool:
        self._attempts.progress(time.monotonic())
        if self._lease is not None:
            self._lease.keep()
        if self._on_progress is not None:
            self._on_progress(self._stream, at, self._end - 1)
        return self._stop(0.0)

    def _check_history(self, base: Snapshot | None) -> None:
        """Check that the stream has not been restored from an older state since the last commit.

        A restored stream gives archived sequences to new messages, which have a later time than any archived one.

        Raises:
            StreamWentBack: It has.
        """
        if base is None or not base.files:
            return
        last = base.files[-1]
        try:
            found = self._js.stream(self._stream, verify=False).get_message(last.max_sequence, direct=False)
        except MessageNotFound:
            return  # removed since it was archived
        if (found.time_ns or 0) // 1000 > last.max_time_us:
            raise StreamWentBack(self._stream, base.position.next, last.max_sequence, is_reused=True)

    # ---- the table ---------------------------------------------------------------------------------------------

    def _commit(self, written: WrittenPart) -> None:
        """Commit files, or give them up if another writer was first. After an error, call it again."""
        table, base = self._table, self._base
        assert table is not None
        ours = {each.path for each in written.files}
        for _ in range(MAX_REPEATS):
            try:
                assert base is not None
                position = base.position
                if ours <= {each.path for each in base.files}:
                    break  # by an earlier call, whose outcome was unknown
                if position.next != written.begin or position.epoch > self._epoch > 0:
                    self._give_up(table, written, base)
                    return
                position = replace(position, next=written.end, epoch=max(self._epoch, position.epoch))
                base = table.log.commit(base, position, add=written.files)
                break
            except ArchiveMoved as error:
                moved, base = error, table.snapshot()
        else:
            raise moved
        self._base, self._pending, self._empty = base, None, None
        rows = sum(each.rows for each in written.files)
        _logger.info("stream %s: %d rows archived, to sequence %d", self._stream, rows, written.end - 1)
        if self._on_commit is not None:
            self._on_commit(ArchiveCommit(table, base, written.files))

    def _give_up(self, table: ArchiveTable, written: WrittenPart, found: Snapshot) -> None:
        _logger.warning("%s; reading continues there", ArchiveMoved(table.uri, written.begin, found.position.next))
        self._base, self._pending, self._empty = found, None, None
        if found.position.epoch > self._epoch and self._lease is not None:
            self._lease.lose()
        with suppress(JetSparkError):  # in no table: a compaction removes them later
            table.store.delete([each.path for each in written.files])

    def _is_owner(self, config: StreamConfig) -> bool:
        """True if this writer has the lease; acquires it if it is free.

        Raises:
            RequestTimeout: Another writer has it, and ``once`` is to end.
        """
        options, table = self._options, self._table
        assert table is not None
        if options.lease_s is None:
            return True
        if self._lease is None:
            self._lease = WriterLease(
                self._js, self._stream, options.to, lease_s=options.lease_s, replicas=config.replicas
            )
        self._lease.keep()
        if self._lease.is_owned:
            return True
        if (owner := self._lease.acquire()) is not None:
            if self._is_once:
                raise RequestTimeout(f"lease of the archive of stream {self._stream}, which {owner} has", 0.0)
            if owner != self._owner:
                _logger.info("stream %s: %s archives it; waiting until it ends", self._stream, owner)
            self._owner = owner
            return False
        self._owner, self._base, self._pending, self._empty = None, table.snapshot(), None, None
        # A bucket of leases that was re-created counts from 1 again.
        self._epoch = max(self._lease.epoch, 0 if self._base is None else self._base.position.epoch)
        return True


def _share(limit: float | None) -> list[float]:
    """The share of a limit that may wait for a commit; empty without a limit."""
    return [limit / COMMITS_WITHIN_LIMITS] if limit is not None and limit > 0 else []
