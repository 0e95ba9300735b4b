"""A ledger of earlier attempts to write the same rows, in a key-value bucket.

A stream forgets ids after its duplicate window. Rows that Spark computes again after that would be stored twice, so the
sink keeps a ledger with two kinds of entries for each query (or batch write), each a small JSON object::

    <query>.open.<partition>   written before the first row of a partition is sent: its batch, and the last sequence of
                               the stream. All rows that any attempt has stored come after this sequence.
    <query>.committed          written when all partitions of a batch are stored: the batch, the number of rows, and for
                               a named write the digest of its rows, which tells a repeated write from other rows
                               under the same name

``<query>`` is the query's id, the name of a batch write, or both for a write within ``foreachBatch``.

When Spark runs a batch, there are three cases.

- The batch is committed in the ledger: Spark failed before its own commit. The rows are read and not sent.
- A partition is open in the ledger: an earlier attempt may have stored some or all of its rows. Within the duplicate
  window sending them again is harmless. After that the stream is read from the saved sequence on, and rows that it has
  are not sent again (:func:`stored_ids`).
- Neither: no row of it was sent.

Invariants: no row is sent before its partition is open; an open entry of the present batch is never overwritten, so the
saved sequence is that of the first attempt, also with several attempts at a time; a batch is committed only after all
its rows are stored. The number of entries is bounded by queries and partitions: a batch replaces the one before.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple, TypeVar

from jetspark.blocking import JetStream, KeyValue, KVConfig
from jetspark.blocking.context import context_of
from jetspark.blocking.ordered import Reading
from jetspark.blocking.steps import ProcedureRunner
from jetspark.core.headers import Headers, readable
from jetspark.errors import (
    Conflict,
    JetSparkError,
    JetStreamUnavailable,
    KeyNotFound,
    ProtocolError,
    StreamNameInUse,
    StreamNotFound,
    UsageError,
)
from jetspark.jetstream.info import StreamInfo
from jetspark.jetstream.ordered import OrderedOptions
from jetspark.state.scan import Range, RangeScan, head_of

__all__ = ["Committed", "Ledger", "Opened", "stored_ids", "time_of"]

T = TypeVar("T")

# Another attempt at the same task may write the same entry; each time one of the two wins.
MAX_CONFLICTS = 20
CONFLICT_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Committed:
    """The last batch of which everything is stored."""

    batch: int
    rows: int
    streams: Mapping[str, str]
    """The streams that have the rows: names, and when each stream was created."""
    run: str = ""
    """Within ``foreachBatch``: the run of the query that has seen it last, for it is the same batch in the next one."""
    write: str = ""
    """And the write: another one of the same run is not a repetition."""
    digest: str = ""
    """Digest of all rows of a named write, independent of their order and partitions."""

    def is_of(self, info: StreamInfo) -> bool:
        """True if the rows are in this stream, and it was not re-created since."""
        return self.streams.get(info.config.name) == time_of(info.created)


@dataclass(frozen=True, slots=True)
class Opened:
    """A partition some attempt has begun to write."""

    batch: int
    stream: str
    created: str
    """When the stream was made: another one of the same name has other sequences."""
    after: int
    """The last sequence of the stream before the first row."""


@dataclass(frozen=True, slots=True)
class Opening:
    """Entries that an attempt finds."""

    after: int
    is_repeated: bool
    """An earlier attempt, or another one right now, may have stored rows of it."""
    age_s: float
    """Since the first attempt, by the server's clock."""


class Ledger:
    """The entries of one query, or of one batch write."""

    def __init__(self, js: JetStream, bucket: KeyValue, query: str) -> None:
        self._js, self._bucket, self._query = js, bucket, query

    @classmethod
    def of(cls, js: JetStream, bucket: str, query: str, replicas: int | None = None) -> Ledger:
        """Open the ledger's bucket; a missing bucket is created with as many replicas as the stream has."""
        try:
            return cls(js, js.kv(bucket), query)
        except StreamNotFound:
            pass
        config = KVConfig(
            bucket=bucket, history=1, replicas=replicas, description="What Spark queries have written to streams"
        )
        try:
            return cls(js, js.create_kv(config), query)
        except StreamNameInUse:  # another task made it meanwhile, for a stream with other replicas
            return cls(js, js.kv(bucket), query)

    def committed(self) -> Committed | None:
        found = self._get("committed")
        return None if found is None else self._read(Committed, "committed", found[0])

    def commit(self, batch: Committed) -> None:
        """Note a batch as written."""
        self._bucket.put(f"{self._query}.committed", _json(batch))

    def open(self, batch: int, partition: int, info: StreamInfo) -> Opening:
        """Note that a partition is about to be written to a stream, or find that it was noted before.

        ``info`` must be younger than the decision to write and older than the first row.
        """
        key = f"open.{partition}"
        new = Opened(batch, info.config.name, time_of(info.created), info.state.last_sequence)
        for _ in range(MAX_CONFLICTS):
            found = self._get(key)
            if found is not None:
                value, _, created = found
                known = self._read(Opened, key, value)
                if known.batch > batch:
                    # A task of a driver that died, slower than the driver that came after it.
                    raise UsageError(f"batch {batch} is over: the query writes batch {known.batch} by now")
                if known.batch == batch and known.stream == new.stream:
                    # Of a stream that was made again, nothing that is there is from before.
                    after = known.after if known.created == new.created else 0
                    return Opening(after, True, self._age_s(key, created))
            try:
                if found is None:
                    self._bucket.create(f"{self._query}.{key}", _json(new))
                else:
                    self._bucket.update(f"{self._query}.{key}", _json(new), revision=found[1])
            except Conflict:
                # Decided by the leader, while a replica may have answered the read a moment behind it.
                time.sleep(CONFLICT_PAUSE_S)
                continue
            return Opening(new.after, False, 0.0)
        raise JetStreamUnavailable(f"ledger {self._bucket.bucket!r}")

    def _age_s(self, key: str, created: datetime.datetime) -> float:
        """By the server's clock alone: those of executors may differ from it, and from each other."""
        again = f"{key}.again"
        revision = self._bucket.put(f"{self._query}.{again}", b"")
        found = self._get(again)
        # On a replicated bucket the read may be a moment behind the write, and find nothing or the note of the attempt
        # before, which was long ago and would make the first one seem young. Then our own clock has to do.
        now = found[2] if found is not None and found[1] >= revision else datetime.datetime.now(datetime.UTC)
        return max(0.0, (now - created).total_seconds())

    def forget(self) -> None:
        """Remove the open entries, which are no longer needed."""
        bucket = self._bucket.bucket
        # Not key by key, which would leave a mark for each.
        self._js.stream(f"KV_{bucket}").purge(subject=f"$KV.{bucket}.{self._query}.open.>")

    def _get(self, key: str) -> tuple[bytes, int, datetime.datetime] | None:
        try:
            entry = self._bucket.get(f"{self._query}.{key}")
        except KeyNotFound:
            return None
        return entry.value, entry.revision, entry.created

    def _read(self, kind: type[T], key: str, value: bytes) -> T:
        names = kind.__dataclass_fields__  # type: ignore[attr-defined]
        try:
            fields = json.loads(value)
            # Unknown fields are a later version's, which has these as well.
            return kind(**{name: fields[name] for name in names})
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(
                f"key {self._query}.{key} of bucket {self._bucket.bucket!r} is not an entry of a ledger: expected JSON "
                f"with {', '.join(names)}, found {value[:200]!r}. Delete the key to send the rows again: the stream "
                "drops those whose ids it remembers"
            ) from error


class StoredIds(NamedTuple):
    """The ids of rows that a stream has."""

    ids: set[bytes]
    is_all: bool
    """Every message after the sequence was there to be read: none was removed since, at the front or in between."""


def stored_ids(js: JetStream, info: StreamInfo, after: int, *, prefix: str, max_ids: int) -> StoredIds:
    """The message ids with this prefix, without it, that a stream has after a sequence.

    On whatever subject: the stream or the account may have stored a row under another one than it was sent to.

    Raises:
        RequestTimeout: The reading came to a standstill.
        JetSparkError: There are more than ``max_ids``.
    """
    found: set[bytes] = set()
    read = 0
    for headers in _headers_after(js, info, after):
        read += 1
        msg_id = headers.get("Nats-Msg-Id")
        if msg_id is not None and msg_id.startswith(prefix):
            found.add(msg_id[len(prefix) :].encode("utf-8", "surrogateescape"))
            if len(found) > max_ids:
                raise JetSparkError(
                    f"stream {info.config.name!r} has more than {max_ids} messages after sequence {after}, too "
                    "many to find out which rows are stored: write smaller batches (maxOffsetsPerTrigger)"
                )
    return StoredIds(found, read >= info.state.last_sequence - after)


def _headers_after(js: JetStream, info: StreamInfo, after: int) -> Iterator[Headers]:
    """The headers of each message after a sequence; undecodable headers are skipped."""
    name, last = info.config.name, info.state.last_sequence
    if last <= after:
        return
    if info.config.retention == "workqueue":
        # It takes no consumer that only reads.
        if info.config.allow_direct:
            part = Range(name, head_of(info).created, after + 1, last + 1, is_earliest=True)
            for piece in ProcedureRunner(js).pieces(RangeScan(part)):
                yield from (message.headers for message in piece)
        return
    options = OrderedOptions(start_sequence=after + 1, headers_only=True)
    reading = Reading(context_of(js), name, options, listing=f"message ids of stream {name!r}")
    try:
        reading.start()
        if not reading.initial_pending:
            return
        while True:
            message = reading.next(until_idle=True)
            if message is None:  # the last ones are gone since they were counted
                return
            yield readable(message.raw_headers)
            metadata = message.metadata
            if metadata.stream_sequence >= last or not metadata.pending:
                return
    finally:
        reading.close()


def _json(entry: Committed | Opened) -> bytes:
    return json.dumps(asdict(entry), separators=(",", ":")).encode()


def time_of(moment: datetime.datetime | None) -> str:
    return "" if moment is None else moment.isoformat()
