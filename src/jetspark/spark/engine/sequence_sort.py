"""Sorts the rows of a task by sequence within a bound of memory. Independent of Spark.

After a shuffle a task gets its rows in pieces from all earlier tasks, in any order. :class:`SequenceSort` holds the
rows as Arrow batches, which need a fraction of the memory of decoded events. Beyond the bound it sorts the held rows
and writes them to a temporary file (a *run*). At the end the runs are merged, with one Arrow batch of each in memory.
The files are unnamed, so even a killed worker leaves no file behind.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc

__all__ = ["SequenceSort"]

# Rows converted into Python objects at a time. Decoded events need about ten times their bytes.
PIECE_ROWS = 50_000
PIECE_BYTES = 16 << 20
# Largest number of open runs, each with one Arrow batch in memory; when it is reached, all are merged into one.
MAX_RUNS = 32


class SequenceSort:
    """Takes rows with some columns, ``sequence`` among them; a context manager, which closes the files."""

    def __init__(self, *, max_rows: int, max_bytes: int, columns: Sequence[str]) -> None:
        self._max_rows, self._max_bytes = max_rows, max_bytes
        self._columns = tuple(columns)
        self._held: list[pa.RecordBatch] = []
        self._held_rows = self._held_bytes = 0
        self._runs: list[IO[bytes]] = []
        self._sorted: pa.Table | None = None
        self.rows = 0
        """How many were added."""
        self.spilled_rows = 0
        """How many went through files."""

    def __enter__(self) -> SequenceSort:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for run in self._runs:
            run.close()

    def add(self, batch: pa.RecordBatch) -> None:
        assert self._sorted is None, "rows after pieces() was called"
        if not batch.num_rows:
            return
        self._held.append(batch)
        self.rows += batch.num_rows
        self._held_rows += batch.num_rows
        self._held_bytes += batch.nbytes
        if self._held_rows > self._max_rows or self._held_bytes > self._max_bytes:
            self._spill()

    def pieces(self) -> Iterator[list[list[Any]]]:
        """All rows by ascending sequence, as lists, one for each column.

        It may be called again, once the iterator before is not used any more.
        """
        if self._runs:
            self._spill()
            for table in _merged(self._runs):
                yield from _pieces(table, self._columns)
            return
        if self._held:
            self._sorted = _sorted(self._held)
            self._held = []
        if self._sorted is not None:
            yield from _pieces(self._sorted, self._columns)

    def _spill(self) -> None:
        if not self._held:
            return
        # One batch of each run is in memory while they are merged: together no more than is held here.
        rows_at_a_time = max(1, self._held_rows // MAX_RUNS)
        self._runs.append(_write([_sorted(self._held)], rows_at_a_time))
        self.spilled_rows += self._held_rows
        self._held = []
        self._held_rows = self._held_bytes = 0
        if len(self._runs) == MAX_RUNS:
            merged = _write(_merged(self._runs), rows_at_a_time)
            for run in self._runs:
                run.close()
            self._runs = [merged]


def _sorted(batches: list[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches(batches).sort_by("sequence")


def _write(tables: Iterable[pa.Table], rows_at_a_time: int) -> IO[bytes]:
    """A run: a file without a name, in the folder Spark has for what does not fit into memory, if it says one."""
    folder = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    file = tempfile.TemporaryFile(dir=folder if folder and Path(folder).is_dir() else None)  # noqa: SIM115
    writer: pa.RecordBatchStreamWriter | None = None
    for table in tables:
        if writer is None:
            writer = pa.ipc.new_stream(file, table.schema)
        writer.write_table(table, max_chunksize=rows_at_a_time)
    if writer is not None:
        writer.close()
    return file


def _batches(run: IO[bytes]) -> Iterator[pa.Table]:
    run.seek(0)
    for batch in pa.ipc.open_stream(run):
        yield pa.Table.from_batches([batch])


def _merged(runs: list[IO[bytes]]) -> Iterator[pa.Table]:
    """The rows of sorted runs, sorted, some at a time.

    Whatever a run still has in its file is at least as high as the last row of its batch in memory. So all rows up to
    the lowest of these last rows are in memory, and one batch at least is used up by handing them on.
    """
    following = [_batches(run) for run in runs]
    heads = [(number, head) for number, each in enumerate(following) if (head := next(each, None)) is not None]
    while heads:
        limit = min(head["sequence"][-1].as_py() for _, head in heads)
        ready, left = [], []
        for number, head in heads:
            count = pc.sum(pc.less_equal(head["sequence"], limit)).as_py()
            ready.append(head.slice(0, count))
            rest = head.slice(count) if count < head.num_rows else next(following[number], None)
            if rest is not None:
                left.append((number, rest))
        heads = left
        yield pa.concat_tables(ready).sort_by("sequence")


def _pieces(table: pa.Table, columns: Sequence[str]) -> Iterator[list[list[Any]]]:
    size = max(1, min(PIECE_ROWS, PIECE_BYTES * table.num_rows // max(1, table.nbytes)))
    for start in range(0, table.num_rows, size):
        part = table.slice(start, size)
        yield [part[name].to_pylist() for name in columns]
