"""Key-value buckets with asyncio. :mod:`jetspark.jetstream.kv` has the requests and their meaning."""

from __future__ import annotations

import datetime
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from functools import partial
from typing import Literal, Unpack, overload

from jetspark.aio.atomic import AtomicBatch
from jetspark.aio.context import DriverContext
from jetspark.aio.ordered import Watch
from jetspark.aio.stream import Stream, known_config, last_messages, last_messages_patience
from jetspark.core.arguments import texts
from jetspark.core.numbers import UINT64, seconds, whole
from jetspark.errors import KeyNotFound, WrongLastSequence
from jetspark.jetstream.info import StoredMessage, StreamInfo
from jetspark.jetstream.kv import Bucket, KVEntry, KVStatus, WatchKeywords, check_key, entry_of_delivery, watch_options
from jetspark.jetstream.ordered import OrderedOptions
from jetspark.publish.atomic import Outcome
from jetspark.publish.transaction import TransactionBase

__all__ = ["KeyValue", "Transaction"]


class KeyValue:
    """A bucket: a map whose values have revisions, whose changes can be watched, and whose past can be read.

    A write returns when the stream behind the bucket has acknowledged it. Reads go to any replica, which may not yet
    have the latest write. ``update`` and ``create`` are decided by the leader, so a stale read never leads to
    overwriting another client's value.

    As with :class:`JetStream`, calls to the server raise ``ServerError`` when it refuses, ``JetStreamUnavailable`` when
    JetStream is not available, and ``RequestTimeout`` when no answer came in time; a write may then be stored or not.
    """

    def __init__(self, context: DriverContext, stream: Stream) -> None:
        self._context = context
        self._stream = stream
        self._bucket = Bucket.of(context.api, known_config(stream))
        entry_of = partial(entry_of_delivery, self._bucket.name)
        self._watch = Watch(context, stream.name, entry_of, lambda entry: entry.operation != "put")

    @property
    def bucket(self) -> str:
        return self._bucket.name

    # ---- one key -----------------------------------------------------------------------------------------------

    async def put(self, key: str, value: bytes) -> int:
        """Write a value unconditionally; returns its revision."""
        return await self._context.run(self._bucket.put(key, value))

    async def get(self, key: str, *, revision: int | None = None, direct: bool | None = None) -> KVEntry:
        """The latest value, or that of a revision the bucket still has.

        ``direct=False`` reads from the leader: slower, but never stale. By default any replica answers, if the bucket
        allows it.

        Raises:
            KeyNotFound: The key, or that revision, has no value.
        """
        return await self._context.run(self._bucket.get(key, revision, direct))

    async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> int:
        """Write the value of a key that has none; returns its revision.

        With ``ttl`` the value expires after that many seconds. This needs ``limit_marker_ttl_s`` on the bucket. In a
        bucket with ``history`` a TTL below ``limit_marker_ttl_s`` is refused, because the server would lengthen it.

        Raises:
            KeyExists: The key has a value.
        """
        return await self._context.run(self._bucket.create(key, value, ttl))

    async def update(self, key: str, value: bytes, *, revision: int, ttl: float | None = None) -> int:
        """Write a value if ``revision`` is still the latest one (compare and set); returns the new revision.

        Raises:
            Conflict: The key has a newer revision; nothing was written.
        """
        return await self._context.run(self._bucket.update(key, value, revision, ttl))

    async def delete(self, key: str, *, revision: int | None = None) -> None:
        """Mark a key as deleted; its history stays. With ``revision``, only if that is the latest one.

        Raises:
            Conflict: The key has a newer revision; nothing was written.
        """
        await self._context.run(self._bucket.mark(key, "delete", revision, None))

    async def purge(self, key: str, *, revision: int | None = None, ttl: float | None = None) -> None:
        """Delete a key and its history. A delete marker stays; with ``ttl`` it expires after that many seconds.

        Raises:
            Conflict: ``revision`` is not the latest one; nothing was written.
        """
        await self._context.run(self._bucket.mark(key, "purge", revision, ttl))

    async def history(self, key: str) -> list[KVEntry]:
        """Every revision the bucket has of a key, deletions included, oldest first.

        Raises:
            RequestTimeout: Nothing arrived for as long as the context's ``timeout``.
            StreamRecreated: The bucket was deleted and re-created during the call.
        """
        options = watch_options(self._bucket.origin, (check_key(key),), include_history=True)
        return [entry async for entry in self._present(options, f"history of {key!r}")]

    async def get_at(self, key: str, sequence: int) -> KVEntry:
        """The value a key had when the bucket was at ``sequence``.

        Raises:
            KeyNotFound: The key had no value then, or the bucket's history does not reach back that far.
        """
        entry = (await self.snapshot([check_key(key)], at=whole("sequence", sequence, low=0, high=UINT64))).get(key)
        if entry is None:
            raise KeyNotFound(self.bucket, key)
        return entry

    # ---- several keys or none ----------------------------------------------------------------------------------

    def transaction(self) -> Transaction:
        """Write several keys together, or none::

            async with kv.transaction() as tx:
                await tx.put("order.1", b"shipped")
                await tx.update("stock.7", b"41", revision=revision)

        Nothing is sent before the end of the block; leaving it by an exception writes nothing. Each key may be written
        once. The server bounds the number of keys, 1000 by default. ``tx.expect`` adds a condition on keys that are
        only read. ``tx.revisions`` has the new revisions afterwards. Needs nats-server 2.12.

        Raises (at the end of the block):
            Conflict: A key named in ``keys`` has changed since; nothing was written.
            ConfigError: The bucket does not have ``allow_atomic``.
            BatchTooLarge: More keys than the server allows; nothing was written.
            BatchInDoubt: No answer in time; all keys were written, or none. ``tx.resolve`` tells which.
        """
        return Transaction(self._context, self._bucket)

    # ---- many keys ---------------------------------------------------------------------------------------------

    async def keys(self, *filters: str) -> AsyncIterator[str]:
        """The keys that have a value, each once; the server applies the filters.

        Survives reconnects and restarts. Memory grows with the names listed so far.

        Raises:
            RequestTimeout: Nothing arrived for as long as the context's ``timeout``; the whole listing may take longer.
            StreamRecreated: The bucket was deleted and re-created during the call.
        """
        seen: set[str] = set()
        options = watch_options(self._bucket.origin, filters, meta_only=True)
        async with aclosing(self._present(options, "keys")) as entries:
            async for entry in entries:
                if entry.operation == "put" and entry.key not in seen:
                    seen.add(entry.key)
                    yield entry.key

    async def snapshot(self, filters: Iterable[str], *, at: int | None = None) -> dict[str, KVEntry]:
        """The values of many keys at one moment: now, or when the bucket was at sequence ``at``.

        ``filters`` are keys, or patterns with ``*`` and ``>``; at most 1024 keys may match. For the past, the bucket
        needs enough ``history``: a key that was overwritten more often since then is missing.

        Reading several keys, or the past, takes one request and the right to read the whole bucket
        (``$JS.API.DIRECT.GET.KV_<bucket>``). A single key without ``at`` needs no more than :meth:`get`; a user who may
        read only some keys reads them one by one.
        """
        wanted = texts("filters", filters, "a list of keys")
        if len(wanted) == 1 and at is None and not {"*", ">"} & set(wanted[0]):
            messages = await self._context.run(self._bucket.snapshot_of_one(wanted[0]))
            return self._values(messages)
        patience = last_messages_patience(self._context, self._stream.name)
        if at is not None:
            at = await self._context.run(self._bucket.snapshot_sequence(whole("at", at, low=0, high=UINT64)))
        subjects = self._bucket.subjects(wanted)
        return self._values(await last_messages(self._context, self._stream.name, subjects, at, patience))

    def _values(self, messages: list[StoredMessage]) -> dict[str, KVEntry]:
        entries = [KVEntry.of(self.bucket, message) for message in messages]
        return {entry.key: entry for entry in entries if entry.operation == "put"}

    @overload
    def watch(
        self,
        *filters: str,
        initial_marker: Literal[False] = False,
        ignore_deletes: bool = False,
        **kind: Unpack[WatchKeywords],
    ) -> AsyncIterator[KVEntry]: ...

    @overload
    def watch(
        self, *filters: str, initial_marker: Literal[True], ignore_deletes: bool = False, **kind: Unpack[WatchKeywords]
    ) -> AsyncIterator[KVEntry | None]: ...

    def watch(
        self, *filters: str, initial_marker: bool = False, ignore_deletes: bool = False, **kind: Unpack[WatchKeywords]
    ) -> AsyncIterator[KVEntry | None]:
        """Yield the present value of every matching key (all, without ``filters``), then every change, without end.

        Survives reconnects and restarts; no change that the bucket still has is missed, repeated or out of order. If
        the connection is lost during the present values, the remaining ones are those after the reconnect.

        Args:
            initial_marker: Yield None once, between the present values and the changes.
            include_history: Begin with all stored revisions, not only the latest.
            updates_only: Begin with the next change.
            meta_only: Leave out the values.
            ignore_deletes: Leave out deletions and purges.
            from_revision: Begin with the writes at or after this revision, to continue an earlier watch.

        Raises (while iterating):
            StreamNotFound: The bucket was deleted; usually detected at once, and within 11 seconds.
            StreamRecreated: The bucket was deleted and re-created. The entries yielded so far are from the old one:
                discard them, and watch again.
            RequestTimeout: No answer within the context's ``timeout`` at the start of the watch.
        """
        options = watch_options(self._bucket.origin, filters, **kind)
        return self._watch.changes(options, initial_marker=initial_marker, ignore_deletes=ignore_deletes)

    async def purge_deletes(self, older_than: float = 1800.0) -> int:
        """Remove delete markers that are at least ``older_than`` seconds old; returns how many were removed.

        Raises:
            RequestTimeout: Nothing arrived for as long as the context's ``timeout``; some markers may be removed.
            StreamRecreated: The bucket was deleted and re-created during the call.
        """
        removed = 0
        options = watch_options(self._bucket.origin, (), meta_only=True)
        limit = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=seconds("older_than", older_than))
        for entry in [entry async for entry in self._present(options, "purge_deletes") if entry.operation != "put"]:
            # Purge no further than the marker that was read: the key may have a new value by now.
            last = entry.revision if entry.created < limit else entry.revision - 1
            [subject] = self._bucket.subjects([entry.key])
            removed += await self._stream.purge(subject=subject, up_to_sequence=last)
        return removed

    async def status(self) -> KVStatus:
        """The bucket's configuration and size."""
        return await self._context.run(self._bucket.status())

    async def stream_info(self) -> StreamInfo:
        """Configuration and state of the stream behind the bucket."""
        return await self._stream.info()

    def _present(self, options: OrderedOptions, what: str) -> AsyncGenerator[KVEntry, None]:
        return self._watch.present(options, f"{what} of bucket {self.bucket!r}")

    def __repr__(self) -> str:
        return f"<KeyValue {self.bucket}>"


class Transaction(TransactionBase):
    """Writes that are stored together when the block is left; see :meth:`KeyValue.transaction`.

    Outside of its block every write raises ``UsageError``; use ``revisions`` and ``resolve`` after it.
    ``RequestTimeout`` means that no answer came in time and nothing is stored; ``BatchInDoubt`` that all or nothing is.
    """

    _line = "async with kv.transaction() as tx:"

    def __init__(self, context: DriverContext, bucket: Bucket) -> None:
        super().__init__(bucket)
        self._context = context
        self._batch: AtomicBatch = AtomicBatch(context)

    async def expect(self, keys: str, *, revision: int) -> None:
        """Add a condition on a key the transaction does not write, or on all keys that match a pattern (``order.>``).

        The transaction is stored only if ``revision`` is still the latest revision of these keys, deletions included; 0
        means that they have none. Several conditions are possible. Each needs a message of the batch to carry it: if
        there are more conditions than writes without a revision, the last write is repeated, and watchers see it more
        than once.
        """
        self._open.expect(keys, revision)

    async def put(self, key: str, value: bytes) -> None:
        """Write a value unconditionally."""
        self._open.put(key, value, None)

    async def create(self, key: str, value: bytes, *, ttl: float | None = None) -> None:
        """Write the value of a key that has none; with ``ttl`` the value expires after that many seconds.

        Raises:
            KeyExists: The key has a value.
            ConfigError: The bucket does not allow this ``ttl``; see :meth:`KeyValue.create`.
        """
        writes = self._open
        await self._context.run(self._bucket.check_ttl(ttl))
        writes.put(key, value, await self._context.run(self._bucket.vacant_revision(key)), ttl)

    async def update(self, key: str, value: bytes, *, revision: int) -> None:
        """Write a value if ``revision`` is still the latest one."""
        self._open.update(key, value, revision)

    async def delete(self, key: str, *, revision: int | None = None) -> None:
        """Mark a key as deleted; with ``revision``, only if that is the latest one."""
        self._open.mark(key, "delete", revision)

    async def purge(self, key: str, *, revision: int | None = None) -> None:
        """Delete a key and its history; with ``revision``, only if that is the latest one."""
        self._open.mark(key, "purge", revision)

    async def resolve(self) -> Outcome:
        """Determine the outcome after :class:`~jetspark.BatchInDoubt`; see :meth:`AtomicBatch.resolve`.

        In a bucket that keeps one revision of each key, the outcome is lost once other clients have written all keys
        of the transaction.

        Raises:
            BatchInDoubt: The outcome cannot be determined.
        """
        outcome = await self._batch.resolve()
        self._store_revisions()
        return outcome

    async def __aenter__(self) -> Transaction:
        return self._enter()

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        self._leave_block()
        if kind is not None:
            await self._batch.discard()
            return
        # Not the one made at the beginning: the younger a batch, the less has to be read to find it.
        self._batch = AtomicBatch(self._context)
        try:
            async with self._batch as batch:
                for write in self._writes.messages():
                    await batch.add(write.subject, write.value, headers=write.headers, expect=write.expect)
        except WrongLastSequence as refused:
            # One request for each key, of which there may be a thousand.
            raise await self._context.run(self._writes.conflict(), for_each=True) from refused
        self._store_revisions()
