"""Reads one partition, a range of a stream's sequences, into Arrow record batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import pyarrow as pa

from jetspark.jetstream.acks import AckableMessage
from jetspark.jetstream.info import StoredMessage
from jetspark.spark.connections import runner_for
from jetspark.spark.options import LOSS_REMEDY
from jetspark.spark.stream.source_options import SourceOptions
from jetspark.state.scan import Range, RangeScan

__all__ = ["RangeReader", "RowMaker"]


class RowMaker(Protocol):
    """Converts messages into record batches: columns of a stream, of a bucket, or rows of projections."""

    @property
    def needs_contents(self) -> bool:
        """True if the messages' data is needed."""

    def of_messages(self, stream: str, messages: Sequence[AckableMessage]) -> pa.RecordBatch: ...

    def of_stored(self, stream: str, messages: Sequence[StoredMessage]) -> pa.RecordBatch: ...


class RangeReader:
    """Makes a record batch of each piece of a :class:`~jetspark.state.scan.RangeScan`."""

    def __init__(self, options: SourceOptions, part: Range, columns: RowMaker) -> None:
        self._options, self._part, self._columns = options, part, columns
        self._scan = RangeScan(
            part,
            wants_data=columns.needs_contents,
            fail_on_loss=options.fail_on_data_loss,
            loss_remedy=LOSS_REMEDY,
            timeout_s=options.fetch_timeout_s,
        )

    @property
    def lost_sequences(self) -> int:
        """Number of removed sequences, if removal is allowed."""
        return self._scan.lost_sequences

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, in order; errors are those of the scan."""
        pieces = runner_for(self._options).pieces(self._scan)
        try:
            yield from map(self._batch, pieces)
        finally:
            pieces.close()

    def _batch(self, messages: list[Any]) -> pa.RecordBatch:
        make = self._columns.of_stored if isinstance(messages[0], StoredMessage) else self._columns.of_messages
        return make(self._part.stream, messages)
