"""Folding events into a bucket from Spark: the bucket's value is the state, and says how far it has come.

A fold is a function of the present state of a key and an event. Rows arrive in a task with their key, their sequence
and the event; the task sorts them by sequence, loads the present values of the keys it has seen in bulk, applies to
each the events that are newer than the value, and writes each key once. A value carries the sequence of the last
event applied to it (header ``JetSpark-Sequence``), so an event that comes again, in a retry, a replay, or another
engine at the same time, is a no-op; and a value is written only if nobody else has written it since it was loaded.

For that, all events of a key have to be in one task: ``repartition(n, "key")`` before writing. Spark's own state
store is not involved. Per key and batch a grouped Python function costs Spark 0.2 to 2 ms; this costs microseconds.
"""

from __future__ import annotations

import importlib
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceArrowWriter, DataSourceWriter, WriterCommitMessage
from pyspark.sql.types import LongType, StringType, StructType

from jetspark.blocking import JetStream
from jetspark.errors import ConfigError, Conflict
from jetspark.spark.collector import seldom_collecting
from jetspark.spark.connections import jetstream_for
from jetspark.spark.kv_writing import Change, Current, Outcome, load, store
from jetspark.spark.ledger import patiently
from jetspark.spark.options import Connecting, milliseconds, option, read_options, text

__all__ = ["DELETE", "Fold", "FoldFormat", "fold_into"]

# Others may write the same keys; who loses a race loads again. This many times is no race any more.
MAX_ROUNDS = 20
# It covers a restart and the election of a leader.
PATIENCE_S = 60.0


class _Delete:
    """What ``apply`` returns to have the key deleted."""

    def __repr__(self) -> str:
        return "DELETE"


DELETE = _Delete()


class Fold(Protocol):
    """Pure: the old state and an event in, the new state out."""

    def apply(self, state: Any, event: Any, sequence: int) -> Any:
        """The new state: anything JSON can say, or ``DELETE``. ``state`` is None for a key without a value."""


class Applied(NamedTuple):
    """An event on its way into a state."""

    sequence: int
    event: Any


def fold_into(
    js: JetStream, bucket: str, fold: Fold, events: Mapping[str, list[Applied]], *, patience_s: float = PATIENCE_S
) -> Outcome:
    """Apply events, given by key, to a bucket. Those the bucket has already are left alone.

    A server that is away is waited for: whatever was under way is done again, which changes nothing.

    Raises:
        Conflict: Others write the same keys faster than this.
        JetSparkError: As :func:`~jetspark.spark.kv_writing.store`; or nobody answers for ``patience_s`` seconds.
    """
    ordered = {key: sorted(each, key=lambda applied: applied.sequence) for key, each in events.items()}
    written = dropped = 0
    left: Iterable[str] = ordered
    for attempt in range(MAX_ROUNDS):
        present = patiently(partial(load, js, bucket, left), patience_s)
        changes = []
        for key in left:
            change, skipped = _next(key, present.get(key), ordered[key], fold)
            dropped += skipped if attempt == 0 else 0
            if change is not None:
                changes.append(change)
        outcome = patiently(partial(store, js, bucket, changes, patience_s=patience_s), patience_s)
        written += outcome.written
        left = outcome.conflicts
        if not left:
            return Outcome(written, (), dropped)
        time.sleep(0.01 * (attempt + 1))
    raise Conflict(bucket, tuple(left))


def _next(key: str, present: Current | None, events: list[Applied], fold: Fold) -> tuple[Change | None, int]:
    """The change that brings a key up to date, and how many events it had already."""
    known = Current(None, 0, 0) if present is None else present
    new = [applied for applied in events if applied.sequence > known.sequence]
    skipped = len(events) - len(new)
    if not new:
        return None, skipped
    state = None if known.value is None else json.loads(known.value)
    for applied in new:
        state = fold.apply(None if state is DELETE else state, applied.event, applied.sequence)
    last = new[-1].sequence
    if state is DELETE:
        return Change(key, b"", "delete", last, known.revision), skipped
    value = json.dumps(state, separators=(",", ":"), sort_keys=True).encode()
    return Change(key, value, "put", last, known.revision), skipped


# ---- as a Spark sink -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldOptions(Connecting):
    bucket: str = option(text, "the bucket to fold into; it must exist", default="")
    fold: str = option(
        text, "where the fold is, `package.module:name`: a class without arguments, or an object", default=""
    )
    patience_s: float = option(
        milliseconds, "longest wait for a server that is away", default=PATIENCE_S, name="patienceMs"
    )

    def __post_init__(self) -> None:
        Connecting.__post_init__(self)
        for name in ("bucket", "fold"):
            if not getattr(self, name):
                raise ConfigError(f"jetstream_fold: the option {name!r} is missing")
        if self.fold.count(":") != 1:
            raise ConfigError(f"fold={self.fold!r}: expected 'package.module:name'")

    def load(self) -> Fold:
        module_name, _, name = self.fold.partition(":")
        try:
            found: Any = getattr(importlib.import_module(module_name), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"fold={self.fold!r}: {error}; is it installed where Spark's workers run?") from error
        made: Fold = found() if isinstance(found, type) else found
        return made


class FoldFormat(DataSource):
    """``df.repartition(n, "key").write.format("jetstream_fold")``: columns ``key``, ``sequence``, ``event`` (JSON)."""

    @classmethod
    def name(cls) -> str:
        return "jetstream_fold"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        if overwrite:
            raise ConfigError("jetstream_fold: expected mode 'append': a fold goes on from the present state")
        kinds = {"key": StringType(), "sequence": LongType(), "event": StringType()}
        found = {field.name: field.dataType for field in schema.fields}
        if found != kinds:
            wanted = ", ".join(f"{name} {kind.simpleString()}" for name, kind in kinds.items())
            raise ConfigError(f"jetstream_fold: columns {schema.simpleString()}: expected {wanted}")
        return _FoldWriter(read_options(FoldOptions, "jetstream_fold", self.options))


@dataclass
class _Folded(WriterCommitMessage):
    written: int
    dropped: int


class _FoldWriter(DataSourceArrowWriter):
    def __init__(self, options: FoldOptions) -> None:
        self._options = options

    @seldom_collecting()
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        events: dict[str, list[Applied]] = defaultdict(list)
        for batch in iterator:
            columns = [batch.column(name).to_pylist() for name in ("key", "sequence", "event")]
            for key, sequence, event in zip(*columns, strict=True):
                if key is None or sequence is None or event is None:
                    raise ConfigError(
                        f"key={key!r}, sequence={sequence}: expected key, sequence and event in every row"
                    )
                events[key].append(Applied(sequence, json.loads(event)))
        options = self._options
        js = patiently(partial(jetstream_for, options), options.patience_s)
        outcome = fold_into(js, options.bucket, options.load(), events, patience_s=options.patience_s)
        return _Folded(outcome.written, outcome.dropped)
