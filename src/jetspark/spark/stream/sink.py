"""Frames into streams: ``df.write`` and ``df.writeStream`` with ``format("jetstream")``.

A task writes one partition: it reads the state of the stream and the ledger, converts its rows into messages
(:mod:`jetspark.spark.stream.writing`), publishes them in one of three ways, and returns when all are stored. Spark may
run the same task several times, also at once and after a restart of the query. Every row is stored once, because its id
is the same each time, and because the ledger (:mod:`jetspark.spark.stream.ledger`) replaces ids that the stream has
forgotten. ``docs/spark-sink.md`` has the guarantees and their limits.
"""

from __future__ import annotations

import hashlib
import logging
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import NamedTuple, TypeVar

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from jetspark.blocking import JetStream
from jetspark.core.gc_tuning import seldom_collecting
from jetspark.core.subjects import matches
from jetspark.errors import (
    ConfigError,
    JetSparkError,
    StreamNotFound,
    UsageError,
)
from jetspark.jetstream.info import StreamInfo
from jetspark.jetstream.kv import check_bucket
from jetspark.spark.connections import client_for, jetstream_for, patiently
from jetspark.spark.options import Connecting, boolean, choice, count, milliseconds, option, read_options, size, text
from jetspark.spark.stream.ledger import Committed, Ledger, Opening, stored_ids, time_of
from jetspark.spark.stream.publishing import AsyncPublishing, AtomicPublishing, FastPublishing, Pace, Publisher
from jetspark.spark.stream.writing import Destination, Layout, RowEncoder, RowLayout, Rows, added_up
from jetspark.spark.tasks import BATCH_ID, QUERY_ID, RUN_ID, TaskFailed, TaskId, is_final, raise_failure

__all__ = ["BatchWriter", "SinkOptions", "StreamWriter", "Target", "WritingOptions", "batch_writer", "stream_writer"]

T = TypeVar("T")

_logger = logging.getLogger("jetspark.spark")

# What a set of ids may take in memory: some gigabyte. A micro-batch is a small part of it.
MAX_RECOVERED_IDS = 10_000_000
FEW_MESSAGES = 1_000_000
"""When a batch is repeated, up to this many messages that came since its first attempt are read before any row is sent.
More are read only when the stream is about to forget their ids."""

_is_write_id = re.compile(r"[A-Za-z0-9_-]{1,64}").fullmatch
_is_run_id = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}").fullmatch


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingOptions(Connecting):
    """The options of every write to a stream, of messages or of events."""

    stream: str | None = option(
        text, "the stream that has to store the rows; by default the one that stores the subject"
    )
    publish_mode: str = option(
        choice("fast", "atomic", "async"),
        "`fast`: at the server's speed, the stream needs `allow_batched`; `atomic`: each partition whole or not at "
        "all, the stream needs `allow_atomic`; `async`: any stream",
        default="fast",
    )
    write_id: str | None = option(
        text,
        "name of a batch write: with the same name, the same rows are not stored twice, and others are refused "
        "(`df.write` only); in `foreachBatch`, of a write among those of a batch",
    )
    exactly_once: bool = option(
        boolean, "`false`: no ids and no ledger; half as fast again, and rows may be stored twice", default=True
    )
    max_pending_messages: int = option(count, "messages of a task on their way to the stream", default=10_000)
    max_pending_bytes: int = option(size, "bytes of a task on their way, in mode `fast`", default=64 << 20)
    max_atomic_messages: int = option(
        count, "rows of a partition in mode `atomic`; the server's own limit is 1000 by default", default=1000
    )
    patience_s: float = option(
        milliseconds,
        "longest wait for a server that is away, before the task fails; half the stream's duplicate window, if that is "
        "less",
        default=60.0,
        name="patienceMs",
    )
    ledger: bool = option(boolean, "remember in a bucket what is written, for longer than ids last", default=True)
    ledger_bucket: str = option(text, "that bucket; made when there is none", default="jetspark_ledger")
    recovery_horizon_s: float = option(
        milliseconds,
        "how long after a failure the query may start again, where only the duplicate window protects it",
        default=600.0,
        name="recoveryHorizonMs",
    )
    when_not_exactly_once: str = option(
        choice("warn", "fail"), "what to do where rows may be stored twice after a failure", default="warn"
    )

    def __post_init__(self) -> None:
        Connecting.__post_init__(self)
        check_bucket(self.ledger_bucket)
        if self.write_id is not None and not _is_write_id(self.write_id):
            raise ConfigError(f"writeId={self.write_id!r}: expected 1 to 64 of the characters A-Z a-z 0-9 _ -")
        if self.publish_mode == "atomic" and not self.keeps_ledger:
            # A batch that is sent again is refused, and only the ledger says where to look for the first one.
            raise ConfigError("publishMode=atomic without the ledger: expected it, or another mode")
        if self.write_id is not None and not self.exactly_once:
            raise ConfigError(f"writeId={self.write_id!r} with exactlyOnce=false: expected one of them")

    @property
    def keeps_ledger(self) -> bool:
        return self.ledger and self.exactly_once

    @property
    def target_name(self) -> str:
        """A short name for where the rows go, to tell the writes of a batch apart."""
        return hashlib.sha256(self.target.encode()).hexdigest()[:12]

    @property
    def target(self) -> str:
        raise NotImplementedError

    def connecting(self) -> Connecting:
        """The part that says how to connect, by which connections are kept."""
        return Connecting(**{entry.name: getattr(self, entry.name) for entry in fields(Connecting)})


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkOptions(WritingOptions):
    """The options of ``write`` and ``writeStream``."""

    subject: str | None = option(text, "where all rows go; wins over a column `subject`")
    msg_id_column: str | None = option(text, "column with message ids; by default `msg_id`, if there is one")

    @property
    def target(self) -> str:
        return f"{self.stream}\n{self.subject}"


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceWriter:
    """For ``df.write``.

    Raises:
        ConfigError: An option or a column cannot be used, or the mode is not ``append``.
    """
    read = read_options(SinkOptions, "jetstream", options)
    if overwrite:
        raise ConfigError(
            'jetstream: mode("overwrite"): a stream is added to, not replaced; use mode("append"), and purge the '
            "stream before if that is what you want"
        )
    return BatchWriter(read, Layout.of(schema, subject=read.subject, msg_id_column=read.msg_id_column))


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
    """For ``df.writeStream``.

    Raises:
        ConfigError: As :func:`batch_writer`; here the output mode has to be ``append``.
    """
    read = read_options(SinkOptions, "jetstream", options)
    if overwrite:
        raise ConfigError(
            'jetstream: outputMode("complete") would store the whole result again with every batch: use "append", or '
            'keep the latest result of each key with format("jetstream_kv")'
        )
    if read.write_id is not None:
        raise ConfigError("jetstream: writeId is for df.write: a streaming query is known by its checkpoint")
    return StreamWriter(read, Layout.of(schema, subject=read.subject, msg_id_column=read.msg_id_column))


class Unnamed(NamedTuple):
    """A write within ``foreachBatch`` that is known by its target alone.

    In another run of the query, a write of the same batch to the same target is the same write, repeated. In the same
    run it is a second one: Spark repeats no batch within a run.
    """

    run: str
    write: str

    def check_is_alone(self, committed: Committed | None, task_id: TaskId) -> None:
        """
        Raises:
            UsageError: Another write of this run has written the batch to the same target.
        """
        if committed is None or committed.batch != task_id.batch:
            return
        if committed.run == self.run and committed.write != self.write:
            raise UsageError(
                f"jetstream: batch {task_id.batch} of query {task_id.query} has written to the same subject or stream "
                "already, by another write of the same foreachBatch, and nothing tells the two apart when the batch is "
                "repeated. Leave the first as it is and give each other one a name of its own, with the option writeId"
            )


@dataclass(frozen=True)
class PartWritten(WriterCommitMessage):
    """Counts of a written partition."""

    task_id: TaskId
    rows: int
    sent: int = 0
    """Rows sent to the stream, which may recognise some; the other rows were found to be stored."""
    replicas: int | None = None
    is_committed_already: bool = False
    unnamed: Unnamed | None = None
    stream: str = ""
    created: str = ""
    """When the stream was made."""
    run: str = ""
    """Run of the query, for a write within ``foreachBatch``."""
    digest: int = 0
    """Digest of the rows of a named write."""
    refused: int = 0
    """Rows that became dead letters, besides ``rows``."""


class BatchWriter(DataSourceArrowWriter):
    """One ``df.write``. Spark pickles it: plain data only."""

    def __init__(self, options: WritingOptions, layout: RowLayout) -> None:
        self._options, self._layout = options, layout
        self._write = uuid.uuid4().hex
        self._job = options.write_id or self._write

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = _context()
        return _run(lambda: self._task(context), iterator)

    def _task(self, context: TaskContext) -> Task:
        """Within ``foreachBatch`` it is a part of a query, whose batches may be run again by another process."""
        options, partition = self._options, context.partitionId()
        query, batch = context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID)
        if not query or not batch:
            return Task(options, self._layout, TaskId(self._job, 0, partition))
        run = context.getLocalProperty(RUN_ID) or ""
        if options.write_id is not None:
            task_id = TaskId(f"{query}-{options.write_id}", int(batch), partition)
            return Task(options, self._layout, task_id, run=run if _is_run_id(run) else "")
        if options.keeps_ledger and _is_run_id(run):
            task_id = TaskId(f"{query}-{options.target_name}", int(batch), partition)
            return Task(options, self._layout, task_id, Unnamed(run, self._write))
        # Two writes to the same target look like one repeated write. Duplicates are preferred to lost rows.
        task = Task(options, self._layout, TaskId(self._write, 0, partition))
        if options.exactly_once:
            why = f"the job group is {run!r}, not Spark's own" if options.keeps_ledger else "ledger=false"
            task.complain(
                f"a write within foreachBatch without writeId ({why}): if the batch is repeated, its rows are stored "
                "twice; give it the option writeId, a name among the writes of the batch"
            )
        return task

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        raise_failure(messages)
        written = _written(messages)
        is_in_query = any(each.task_id.query != self._job for each in written)
        if self._options.write_id is not None or is_in_query:
            _commit(self._options, written)
        # Of a query and target the next batch takes the place of this one.
        if any(each.rows for each in written) and (self._options.write_id is not None or not is_in_query):
            self._forget(written[0].task_id.query)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Stored rows stay in the stream. With ``writeId`` the next attempt continues from them."""
        _logger.warning("write %s failed; the rows it has stored stay in the stream", self._job)
        if self._options.write_id is None:
            self._forget(self._write)

    def _forget(self, name: str) -> None:
        """Remove the open entries. If that fails some entries stay, which does no harm: the rows are stored."""
        if not self._options.keeps_ledger:
            return
        try:
            Ledger.of(jetstream_for(self._options.connecting()), self._options.ledger_bucket, name).forget()
        except JetSparkError as error:
            _logger.info("%s", error)


class StreamWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a query. Spark creates it for each batch and for its commit: plain data only."""

    def __init__(self, options: WritingOptions, layout: RowLayout) -> None:
        self._options, self._layout = options, layout

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = _context()
        query, batch = context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID)
        if not query or not batch:
            raise UsageError(
                f"jetstream: Spark did not say which query and batch this is ({QUERY_ID}, {BATCH_ID}): this version of "
                "Spark is not supported"
            )
        task_id = TaskId(query, int(batch), context.partitionId())
        return _run(lambda: Task(self._options, self._layout, task_id), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        raise_failure(messages)
        _commit(self._options, _written(messages))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        """Stored rows stay: Spark runs the same batch again, and they are recognised."""
        _logger.warning("batch %d failed; its stored rows are recognised when it runs again", batchId)


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise UsageError("jetstream: write() outside of a Spark task")
    return context


def _run(make: Callable[[], Task], batches: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
    """Run a task. Final errors of the write become the task's message; an invalid row is raised and ends the write.

    A task whose message is an error counts as done, and other tasks continue. They notice an error of the write
    themselves; but an invalid row in one task would be reported only after they have written everything.
    """
    task: Task | None = None
    try:
        task = make()
        return task.run(batches)
    except JetSparkError as error:
        if not is_final(error):
            raise
        if task is not None and task.is_sending and isinstance(error, ConfigError):
            raise error.with_traceback(None) from None
        return TaskFailed(error)


def _written(messages: list[WriterCommitMessage | None]) -> list[PartWritten]:
    return [message for message in messages if isinstance(message, PartWritten)]


def _commit(options: WritingOptions, written: list[PartWritten]) -> None:
    """All rows of a batch are stored: note it, if there are any."""
    filled = [each for each in written if each.rows]
    if refused := sum(each.refused for each in written):
        _logger.warning(
            "batch %d of %s: %d rows are not valid events; dead letters written", *written[0].task_id[1::-1], refused
        )
    if not filled or not options.keeps_ledger:
        return
    task_id, rows, unnamed = filled[0].task_id, sum(each.rows for each in filled), filled[0].unnamed
    run, write = unnamed or (filled[0].run, "")
    streams = {each.stream: each.created for each in filled}
    digest = "" if options.write_id is None else f"{added_up(each.digest for each in filled):032x}"
    now = Committed(task_id.batch, rows, streams, run, write, digest)

    def save(js: JetStream) -> None:
        ledger = Ledger.of(js, options.ledger_bucket, task_id.query, filled[0].replicas)
        known = ledger.committed() if unnamed or any(each.is_committed_already for each in filled) else None
        if unnamed is not None:
            unnamed.check_is_alone(known, task_id)
        is_other = known is not None and known.batch == task_id.batch and (known.rows, known.digest) != (rows, digest)
        if known is not None and is_other and options.write_id is not None and known.run == run:
            raise _other_rows(options, task_id, known)
        # Of a batch that is noted, some are stored only now if the stream was made again.
        if known is None or known.batch != task_id.batch or not all(each.is_committed_already for each in filled):
            ledger.commit(now)
            return
        if run:
            # Of the writes of this run it is the first; a second one has to see that.
            ledger.commit(replace(known, run=run, write=write))
        if is_other:
            _logger.warning(
                "batch %d of %s was written with %d rows and now has %d other ones: its input is not deterministic; "
                "what was written stays",
                task_id.batch,
                task_id.query,
                known.rows,
                rows,
            )

    patiently(options.connecting(), save, patience_s=options.patience_s)


def _other_rows(options: WritingOptions, task_id: TaskId, known: Committed) -> UsageError:
    """A write whose name has written other rows: not a repetition, so leaving them out would lose them."""
    return UsageError(
        f"jetstream: writeId={options.write_id!r} has written {known.rows} other rows to stream "
        f"{', '.join(map(repr, known.streams))}: only the same rows are recognised as stored already. Give each "
        f"write a writeId of its own; or delete the key {task_id.query}.committed of bucket {options.ledger_bucket!r} "
        "to write under this name again"
    )


class Target:
    """The stream a task writes to, as it was when the task began."""

    def __init__(self, info: StreamInfo) -> None:
        self.info, self.name = info, info.config.name
        self._filters = tuple(info.config.subjects or ())

    @property
    def window_s(self) -> float:
        return self.info.config.duplicate_window_s or 0.0

    def stores(self, subject: str) -> bool:
        return any(matches(each, subject) for each in self._filters)

    @property
    def keeps_everything(self) -> bool:
        """True if stored messages can be read later, until a limit drops the oldest."""
        config = self.info.config
        return config.retention in (None, "limits") and (config.max_messages_per_subject or 0) <= 0

    def has_all_after(self, sequence: int) -> bool:
        return self.keeps_everything and self.info.state.first_sequence <= sequence + 1

    @classmethod
    def find(cls, js: JetStream, options: WritingOptions, layout: RowLayout, subject: str) -> Target:
        """Where ``subject`` is stored.

        Raises:
            ConfigError: Nowhere, or by a stream that cannot do what the mode needs; it says how to change that.
        """
        name = options.stream or layout.stream or next(js.stream_names(subject), None)
        if name is None:
            need = _NEEDS[options.publish_mode]
            raise ConfigError(
                f"no stream stores subject {subject!r}: create one with js.create_stream(StreamConfig(name=..., "
                f"subjects=[{subject!r}]{f', {need}=True' if need else ''}))"
            )
        try:
            target = cls(js.stream(name).cached_info)
        except StreamNotFound:
            raise ConfigError(
                f"stream={name!r}: there is no such stream; create it with "
                f"js.create_stream(StreamConfig(name={name!r}, ...))"
            ) from None
        target._check(options, layout)
        return target

    def destination(self, max_bytes: int, *, is_expected: bool) -> Destination:
        """Where messages go; ``max_bytes`` is what the server takes in one of them."""
        return Destination(
            stream=self.name,
            is_stored=self.stores,
            max_bytes=max_bytes,
            max_stream_bytes=self.info.config.max_message_bytes,
            is_expected=is_expected,
        )

    def _check(self, options: WritingOptions, layout: RowLayout) -> None:
        config, need = self.info.config, _NEEDS[options.publish_mode]
        if need and not getattr(config, need):
            raise ConfigError(
                f"stream {self.name!r} does not allow publishMode={options.publish_mode}: turn it on with "
                f"js.update_stream(StreamConfig(name={self.name!r}, {need}=True)), or use publishMode=async"
            )
        if layout.has_ttl and not config.allow_message_ttl:
            raise ConfigError(
                f"stream {self.name!r} does not allow a column ttl: turn it on with "
                f"js.update_stream(StreamConfig(name={self.name!r}, allow_message_ttl=True)), or leave the column out"
            )
        for is_so, why in (
            (config.sealed, "is sealed"),
            (config.mirror is not None, "is a mirror"),
            (config.no_ack, "acknowledges nothing"),
        ):
            if is_so:
                raise ConfigError(f"stream {self.name!r} {why}: rows cannot be written to it")


_NEEDS = {"fast": "allow_batched", "atomic": "allow_atomic", "async": ""}


class Task:
    """One attempt to write one partition."""

    def __init__(
        self,
        options: WritingOptions,
        layout: RowLayout,
        task_id: TaskId,
        unnamed: Unnamed | None = None,
        *,
        run: str = "",
    ) -> None:
        self.options, self.layout, self.task_id, self.unnamed, self._run = options, layout, task_id, unnamed, run
        self.patience_s = options.patience_s
        self.is_sending = False
        """All is found to be right but for the rows."""

    @seldom_collecting()
    def run(self, batches: Iterator[pa.RecordBatch]) -> PartWritten:
        """Returns when every row is stored. Reads to the end in any case: stateful operators note their state there."""
        filled = (batch for batch in batches if batch.num_rows)
        first = next(filled, None)
        if first is None:
            return PartWritten(self.task_id, 0)
        target = self.patiently(
            lambda js: Target.find(
                js, self.options, self.layout, self.layout.some_subject(first, self.task_id.partition)
            )
        )
        # Half of the window to stop in time, the other half for messages on their way to arrive.
        self.patience_s = min(self.patience_s, max(target.window_s / 2, 0.1))
        encoder = self._encoder(target)
        earlier = self._find_earlier(target)
        if earlier is None:
            return self._skipped(target, encoder, chain([first], filled))
        sent = 0
        pace = Pace(
            max_messages=self.options.max_pending_messages,
            max_bytes=self.options.max_pending_bytes,
            patience_s=self.patience_s,
        )
        # All is sent over one connection. If that is closed the task fails, and Spark's next attempt has another.
        js = self.patiently(lambda js: js)
        self.is_sending = True
        pieces = encoder.encode_all(chain([first], filled))
        with self._publisher(js, earlier, pace) as publisher:
            for rows in pieces:
                missing = earlier.missing(rows)
                sent += len(missing)
                if len(missing):
                    publisher.send(missing)
        written = self._written(target, encoder)
        return replace(written, sent=sent, replicas=target.info.config.replicas, refused=encoder.refused)

    def _written(self, target: Target, encoder: RowEncoder) -> PartWritten:
        return PartWritten(
            self.task_id,
            encoder.rows,
            unnamed=self.unnamed,
            stream=target.name,
            created=time_of(target.info.created),
            run=self._run,
            digest=encoder.digest,
        )

    def _skipped(self, target: Target, encoder: RowEncoder, batches: Iterator[pa.RecordBatch]) -> PartWritten:
        """The batch is written: nothing is sent. Whether a name was used for other rows is compared in ``commit``."""
        has_name = self.options.write_id is not None
        rows = sum(map(len, encoder.encode_all(batches) if has_name else batches))
        return replace(self._written(target, encoder), rows=rows, is_committed_already=True)

    def _publisher(self, js: JetStream, earlier: Earlier, pace: Pace) -> Publisher:
        match self.options.publish_mode:
            case "fast":
                has_ids = self.options.exactly_once or self.layout.has_own_ids
                return FastPublishing(js, pace, has_ids=has_ids)
            case "async":
                return AsyncPublishing(js, pace)
            case _:
                return AtomicPublishing(
                    js,
                    pace,
                    partition=self.task_id.partition,
                    limit=self.options.max_atomic_messages,
                    find_stored=earlier.find,
                    are_ids_ours=not self.layout.has_own_ids,
                )

    def _encoder(self, target: Target) -> RowEncoder:
        max_bytes = client_for(self.options.connecting()).server_info.max_payload_bytes
        destination = target.destination(max_bytes, is_expected=self.options.stream is not None)
        return self.layout.encoder(
            destination,
            self.task_id,
            has_ids=self.options.exactly_once,
            with_digest=self.options.write_id is not None,
        )

    def _find_earlier(self, target: Target) -> Earlier | None:
        """Results of earlier attempts; None if the whole batch is written."""
        options, task_id = self.options, self.task_id
        if options.exactly_once and not (options.ledger and target.keeps_everything):
            self._check_window(target)
        if not options.keeps_ledger:
            return Earlier(self, target, None)

        def ledger(js: JetStream) -> Ledger:
            return Ledger.of(js, options.ledger_bucket, task_id.query, target.info.config.replicas)

        committed = self.patiently(lambda js: ledger(js).committed())
        if self.unnamed is not None:
            self.unnamed.check_is_alone(committed, task_id)
        if committed is not None and committed.batch >= task_id.batch:
            self._check_not_rewound(committed)
        if committed is not None and committed.batch == task_id.batch and not self._is_lost(committed, target):
            _logger.info("batch %d of query %s is written already; nothing is sent", task_id.batch, task_id.query)
            return None
        opening = self.patiently(lambda js: ledger(js).open(task_id.batch, task_id.partition, target.info))
        return Earlier(self, target, opening)

    def _is_lost(self, committed: Committed, target: Target) -> bool:
        """True if the rows of a written batch were lost, because their stream was deleted and created again.

        Raises:
            UsageError: The rows are in a stream of another name, and may not belong into this one.
        """
        if committed.is_of(target.info):
            return False
        if target.name in committed.streams:
            return True
        if self.task_id.query != self.options.write_id:
            return False  # a query that goes on elsewhere: the batch is stored
        raise UsageError(
            f"jetstream: writeId={self.options.write_id!r} has written to stream "
            f"{', '.join(map(repr, committed.streams))}, and now would write to {target.name!r}: give each write a "
            f"writeId of its own; or delete the key {self.task_id.query}.committed of bucket "
            f"{self.options.ledger_bucket!r} to use the name again"
        )

    def _check_not_rewound(self, committed: Committed) -> None:
        """Spark repeats only the last batch; an earlier one means that an old checkpoint was restored."""
        if committed.batch == self.task_id.batch:
            return
        raise UsageError(
            f"query {self.task_id.query} has written batch {committed.batch}, and now runs batch {self.task_id.batch}: "
            "its checkpoint was put back. Start with a new checkpoint; or, to write these batches again, delete the "
            f"key {self.task_id.query}.committed of bucket {self.options.ledger_bucket!r}"
        )

    def _check_window(self, target: Target) -> None:
        if target.window_s >= self.options.recovery_horizon_s:
            return
        why = "ledger=false" if not self.options.ledger else "what the stream no longer has cannot be found there"
        self.complain(
            f"stream {target.name!r} knows ids for {target.window_s:g} s, and the query may start again "
            f"{self.options.recovery_horizon_s:g} s after a failure: rows may then be stored twice ({why}); set "
            f"duplicate_window_s={self.options.recovery_horizon_s:g} on the stream, or a lower recoveryHorizonMs"
        )

    def complain(self, why: str) -> None:
        """Exactly once is not certain."""
        if self.options.when_not_exactly_once == "fail":
            raise UsageError(f"jetstream: {why}")
        key = (self.task_id.query, why)
        if key not in _complaints:
            if len(_complaints) >= MAX_COMPLAINTS:
                _complaints.clear()
            _complaints.add(key)
            _logger.warning("%s", why)

    def patiently(self, ask: Callable[[JetStream], T]) -> T:
        return patiently(self.options.connecting(), ask, patience_s=self.patience_s, on_wait=self._on_wait)

    def _on_wait(self, error: JetSparkError) -> None:
        _logger.warning("%s: trying again for at most %g s", error, self.patience_s)


# A warning is given once in a process and query, not with every batch.
MAX_COMPLAINTS = 1000
_complaints: set[tuple[str, str]] = set()


class Earlier:
    """Rows that earlier attempts have stored.

    Within its duplicate window the stream recognises the ids of repeated messages. Sending may take longer than that,
    so stored rows are found first; ids only cover messages that an earlier attempt still has on their way.
    """

    def __init__(self, task: Task, target: Target, opening: Opening | None) -> None:
        self._task, self._target, self._opening = task, target, opening
        self._began = time.monotonic()
        self._known: set[bytes] | None = None
        self._gap: str | None = None
        """Why some may be stored that were not found: it matters when the stream does not know their ids any more."""

    @property
    def is_repeated(self) -> bool:
        return self._opening is not None and self._opening.is_repeated

    def missing(self, rows: Rows) -> Rows:
        """The rows to send: rows that the stream lacks, or whose ids it recognises."""
        if self._known is None and self.is_repeated and (self._is_too_late_for_ids() or self._are_few()):
            self.find()
        self._complain_if_late()
        return rows.but_for(self._known) if self._known else rows

    def find(self) -> set[bytes]:
        """Read the ids of stored rows, whatever their age."""
        opening, task = self._opening, self._task
        assert opening is not None
        info = task.patiently(lambda js: js.stream(self._target.name).info())
        layout, task_id = task.layout, task.task_id
        self._known, has_all = task.patiently(
            lambda js: stored_ids(
                js,
                info,
                opening.after,
                prefix="" if layout.has_own_ids else task_id.id_prefix(),
                max_ids=MAX_RECOVERED_IDS,
            )
        )
        is_sure = has_all and Target(info).has_all_after(opening.after) and not layout.has_ttl
        if info.state.last_sequence > opening.after and not is_sure:
            self._gap = (
                f"stream {self._target.name!r} no longer has all messages after sequence {opening.after}, and its "
                f"duplicate window of {self._target.window_s:g} s is over: rows of batch {task_id.batch}, partition "
                f"{task_id.partition} that an earlier attempt has stored may be stored twice"
            )
            self._complain_if_late()
        _logger.info("batch %d, partition %d: %d rows are stored already", *task_id[1:], len(self._known))
        return self._known

    def _complain_if_late(self) -> None:
        if self._gap is not None and self._is_too_late_for_ids():
            self._task.complain(self._gap)

    def _are_few(self) -> bool:
        assert self._opening is not None
        info = self._task.patiently(lambda js: js.stream(self._target.name).info())
        return info.state.last_sequence - self._opening.after <= FEW_MESSAGES

    def _is_too_late_for_ids(self) -> bool:
        assert self._opening is not None
        return self._opening.age_s + time.monotonic() - self._began >= self._target.window_s / 2
