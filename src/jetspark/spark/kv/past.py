"""The table of a bucket at a moment that the bucket has forgotten, from the archive of its stream.

A bucket drops a revision of a key when the key has more than ``history`` of them. What was archived before that is in
the archive; a revision that was dropped earlier leaves a gap in its sequences. A gap before the moment may be the value
that a key had then: only a key that has had ``history`` later revisions, or was purged, since.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from typing import Any

import pyarrow as pa

from jetspark.core.headers import Headers, readable, with_values
from jetspark.core.subjects import on_one_of
from jetspark.jetstream.kv import KVOperation, operation_of
from jetspark.spark.kv.rows import columns
from jetspark.state.deliveries import sequence_of
from jetspark.state.tables import BucketView, TablePlan, operation

__all__ = ["PastRows", "PastTable"]

_NO_ROWS = pa.RecordBatch.from_pylist([], pa.schema([]))


class PastTable:
    """Finds the revisions that made up a table; a row maker that makes no rows."""

    needs_contents = False
    archive_columns = ("sequence", "subject", "headers", "raw_subject", "raw_headers")

    def __init__(self, bucket: BucketView, as_of: int) -> None:
        self._as_of, self._history, self._prefix = as_of, bucket.history, bucket.prefix
        self._is_wanted = on_one_of(bucket.subjects)
        self._last: dict[str, tuple[int, KVOperation]] = {}
        self._later: Counter[str] = Counter()
        self._next, self._gap = 1, 0

    def of_messages(self, stream: str, messages: Sequence[Any]) -> pa.RecordBatch:
        return self._take((sequence_of(each), each.subject, operation(each)) for each in messages)

    of_stored = of_messages

    def of_archived(self, stream: str, rows: pa.RecordBatch) -> pa.RecordBatch:
        found = zip(*(rows.column(name).to_pylist() for name in self.archive_columns), strict=True)
        return self._take(
            (
                sequence,
                subject if raw_subject is None else raw_subject.decode(errors="surrogateescape"),
                operation_of(_headers(pairs, block)) if pairs or block else "put",
            )
            for sequence, subject, pairs, raw_subject, block in found
        )

    def _take(self, revisions: Iterable[tuple[int, str, KVOperation]]) -> pa.RecordBatch:
        for sequence, subject, what in revisions:
            if sequence <= self._as_of:
                self._pass(sequence)
                if self._is_wanted(subject):
                    self._last[subject] = sequence, what
            elif self._is_wanted(subject):
                self._later[subject] += self._history if what == "purge" else 1
        return _NO_ROWS

    def _pass(self, sequence: int) -> None:
        if sequence > self._next:
            self._gap = sequence - 1
        self._next = sequence + 1

    def plan(self, *, include_deletes: bool) -> TablePlan:
        """The revisions of the table; call it after the last one was taken."""
        self._pass(self._as_of + 1)
        doubtful = {
            subject
            for subject, later in self._later.items()
            if later >= self._history and self._gap > self._last.get(subject, (0,))[0]
        }
        wanted = [
            revision
            for subject, (revision, what) in self._last.items()
            if subject not in doubtful and (include_deletes or what == "put")
        ]
        keys = sorted(subject.removeprefix(self._prefix) for subject in doubtful)
        return TablePlan(self._as_of, array("Q", sorted(wanted)), tuple(keys))


class PastRows:
    """Makes rows of some revisions of a range; a row maker."""

    needs_contents = True

    def __init__(self, prefix: str, schema: pa.Schema, wanted: Set[int] | None, *, with_deletes: bool) -> None:
        """Without ``wanted`` every revision is a row."""
        self._prefix_length, self._schema, self._wanted, self._with_deletes = len(prefix), schema, wanted, with_deletes
        self.read = 0
        """Wanted messages, also without a row."""

    def of_messages(self, stream: str, messages: Sequence[Any]) -> pa.RecordBatch:
        if self._wanted is not None:
            messages = [each for each in messages if sequence_of(each) in self._wanted]
        self.read += len(messages)
        if not self._with_deletes:
            messages = [each for each in messages if operation(each) == "put"]
        if not messages:
            return pa.RecordBatch.from_pylist([], self._schema)
        return columns(messages, self._prefix_length, self._schema)

    of_stored = of_messages


def _headers(pairs: Any, block: bytes | None) -> Headers:
    return with_values(dict(pairs)) if block is None else readable(block)
