"""Rows of a task come out by ascending sequence, whatever their order and number."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest

from jetspark.spark.engine import sequence_sort
from jetspark.spark.engine.sequence_sort import SequenceSort

COLUMNS = ("key", "sequence", "event")


def batches(sequences: list[int], size: int) -> list[pa.RecordBatch]:
    parts = [sequences[start : start + size] for start in range(0, len(sequences), size)]
    return [
        pa.record_batch(
            {
                "key": pa.array([f"k{each % 3}" for each in part], pa.string()),
                "sequence": pa.array(part, pa.int64()),
                "event": pa.array([f"e{each}" for each in part], pa.string()),
            }
        )
        for part in parts
    ]


@pytest.mark.parametrize("held", [1, 100, 1_000, 100_000])
@pytest.mark.parametrize("size", [1, 50, 5_000])
def test_rows_come_sorted_however_many_are_held(held: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_sort, "PIECE_ROWS", 50)
    chance = random.Random(held * size)
    count = 200 if size == 1 else 2_000
    sequences = [chance.randrange(count) for _ in range(count)]  # some more than once
    with SequenceSort(max_rows=held, max_bytes=1 << 30, columns=COLUMNS) as rows:
        for batch in batches(sequences, size):
            rows.add(batch)
        for _ in range(2):  # a key that others have written meanwhile is folded again
            found = [row for piece in rows.pieces() for row in zip(*piece, strict=True)]
            assert [row[1] for row in found] == sorted(sequences)
            assert all(row == (f"k{row[1] % 3}", row[1], f"e{row[1]}") for row in found)
        assert (rows.spilled_rows > 0) == (held < count)


def test_as_few_rows_are_in_memory_as_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many rows there are, and however many files: what a sort has at hand stays within twice its bound."""
    monkeypatch.setattr(sequence_sort, "PIECE_ROWS", 1_000)
    before, most = pa.total_allocated_bytes(), 0
    with SequenceSort(max_rows=1 << 40, max_bytes=1 << 20, columns=COLUMNS) as rows:
        for start in range(0, 400_000, 2_000):
            [batch] = batches([(each * 7919) % 400_000 for each in range(start, start + 2_000)], 2_000)
            rows.add(batch)
            most = max(most, pa.total_allocated_bytes() - before)
        for _ in rows.pieces():
            most = max(most, pa.total_allocated_bytes() - before)
        assert rows.spilled_rows == 400_000
    assert most < 3 << 20


def test_no_rows_are_no_pieces() -> None:
    with SequenceSort(max_rows=10, max_bytes=10, columns=COLUMNS) as rows:
        rows.add(batches([1], 1)[0].slice(0, 0))
        assert list(rows.pieces()) == []
