"""Reads one partition, a range of a stream's sequences, into Arrow record batches."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import pyarrow as pa

from jetspark.errors import ArchiveDamaged, DataLoss
from jetspark.jetstream.acks import AckableMessage
from jetspark.jetstream.info import StoredMessage
from jetspark.lake.hybrid import HybridCursor, HybridRange, Slice
from jetspark.lake.reading import ArchiveReader
from jetspark.lake.rows import messages_of
from jetspark.spark.connections import runner_for
from jetspark.spark.options import LOSS_REMEDY
from jetspark.spark.stream.source_options import SourceOptions
from jetspark.state.deliveries import sequence_of
from jetspark.state.scan import Range, RangeScan

__all__ = ["ArchiveRowMaker", "RangeReader", "RowMaker"]

_logger = logging.getLogger("jetspark.spark")


class RowMaker(Protocol):
    """Converts messages into record batches: columns of a stream, of a bucket, or rows of projections.

    Rows of an archive come as stored messages, unless the maker is an :class:`ArchiveRowMaker`.
    """

    @property
    def needs_contents(self) -> bool:
        """True if the messages' data is needed."""

    def of_messages(self, stream: str, messages: Sequence[AckableMessage]) -> pa.RecordBatch: ...

    def of_stored(self, stream: str, messages: Sequence[StoredMessage]) -> pa.RecordBatch: ...


@runtime_checkable
class ArchiveRowMaker(Protocol):
    """A row maker that takes rows of an archive as Arrow columns."""

    @property
    def archive_columns(self) -> Sequence[str]:
        """The columns it needs, of :data:`jetspark.lake.rows.RAW_SCHEMA`."""

    def of_archived(self, stream: str, rows: pa.RecordBatch) -> pa.RecordBatch:
        """``rows`` has the columns that are needed, and ``sequence``."""


_Batches: TypeAlias = Iterator[tuple[pa.RecordBatch, int]]
"""Record batches, each with the first sequence after it."""


class RangeReader:
    """Makes a record batch of each piece of a range, of the stream or of its archive."""

    def __init__(self, options: SourceOptions, part: Range, columns: RowMaker) -> None:
        self._options, self._part, self._columns = options, part, columns
        self.lost_sequences = 0
        """Number of removed sequences, if removal is allowed."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, in order; errors are those of the scan, and of the archive."""
        part = self._part
        if isinstance(part, HybridRange):
            yield from self._hybrid(HybridCursor(part))
            return
        for batch, _ in self._scanned(part, fail_on_loss=self._options.fail_on_data_loss):
            yield batch

    def _hybrid(self, cursor: HybridCursor) -> Iterator[pa.RecordBatch]:
        fail_on_loss = True  # until it is known that the archive does not have the lost messages
        while (part := cursor.slice()) is not None:
            try:
                read = self._archived if part.is_archived else self._scanned_slice
                for batch, following in read(cursor, part, fail_on_loss):
                    yield batch
                    cursor.reached(following)
                cursor.reached(part.end)
                fail_on_loss = True
            except (ArchiveDamaged, DataLoss) as error:
                if cursor.can_continue(error):
                    continue
                if isinstance(error, ArchiveDamaged) or self._options.fail_on_data_loss or not fail_on_loss:
                    raise
                fail_on_loss = False

    def _archived(self, cursor: HybridCursor, part: Slice, fail_on_loss: bool) -> _Batches:
        archive, maker, stream = cursor.archive, self._columns, self._part.stream
        assert isinstance(archive, ArchiveReader)
        is_loss_error = self._options.fail_on_data_loss and not self._is_kept
        direct = maker if isinstance(maker, ArchiveRowMaker) else None
        for rows in archive.batches(
            part.start,
            part.end,
            columns=None if direct is None else list(dict.fromkeys([*direct.archive_columns, "sequence"])),
            filters=self._part.subjects,
            on_loss=None if is_loss_error else self._lose,
        ):
            made = maker.of_stored(stream, messages_of(rows)) if direct is None else direct.of_archived(stream, rows)
            yield made, rows.column("sequence")[-1].as_py() + 1

    @property
    def _is_kept(self) -> bool:
        return isinstance(self._part, HybridRange) and self._part.is_kept

    def _lose(self, lost: range) -> None:
        if not self._is_kept:
            _logger.warning("archive of %s: sequences %d to %d are lost", self._part.stream, lost.start, lost.stop - 1)
            self.lost_sequences += len(lost)

    def _scanned_slice(self, cursor: HybridCursor, part: Slice, fail_on_loss: bool) -> _Batches:
        return self._scanned(cursor.in_stream(part), fail_on_loss=fail_on_loss)

    def _scanned(self, part: Range, *, fail_on_loss: bool) -> _Batches:
        scan = RangeScan(
            part,
            wants_data=self._columns.needs_contents,
            fail_on_loss=fail_on_loss,
            loss_remedy=LOSS_REMEDY,
            timeout_s=self._options.fetch_timeout_s,
        )
        pieces = runner_for(self._options).pieces(scan)
        try:
            for piece in pieces:
                yield self._batch(piece)
        finally:
            pieces.close()
            self.lost_sequences += scan.lost_sequences

    def _batch(self, messages: list[Any]) -> tuple[pa.RecordBatch, int]:
        stream, following = self._part.stream, sequence_of(messages[-1]) + 1
        make = self._columns.of_stored if isinstance(messages[0], StoredMessage) else self._columns.of_messages
        return make(stream, messages), following
