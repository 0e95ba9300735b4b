"""A worker's watch of the handlers' bucket: parked keys, and with partitions the other workers."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, cast

from jetspark.errors import Conflict, JetSparkError, KeyNotFound, RequestTimeout

if TYPE_CHECKING:
    from jetspark.aio.kv import KeyValue
    from jetspark.app.handlers.handler_store import HandlerStore
    from jetspark.app.handlers.machine import HandlerMachine
    from jetspark.jetstream.kv import KVEntry

__all__ = ["Members", "RecordWatch"]

# Heartbeats within ``takeover_s``: two of three may be late.
BEATS = 3
# The time that the tombstone of a worker that has left stays in the bucket.
TOMBSTONE_TTL_S = 60.0
# The watch lags by some milliseconds. While it lags for longer, pulled events wait, and the log has to show that.
CATCH_UP_S = 5.0


class Members:
    """The workers of a handler with partitions: one record each, which expires unless it is renewed."""

    def __init__(self, records: KeyValue, handler: str, takeover_s: float) -> None:
        self._records, self._handler = records, handler
        self.id = secrets.token_hex(8)
        self.ttl_s = max(1.0, takeover_s)
        self.alive: set[str] = set()
        """Ids of the workers with a record, this worker included once it has joined."""
        self._revision = 0
        self._lock = asyncio.Lock()

    @property
    def filter(self) -> str:
        return f"members.{self._handler}.*"

    @property
    def key(self) -> str:
        """The key of this worker's record."""
        return f"members.{self._handler}.{self.id}"

    @property
    def beat_s(self) -> float:
        return self.ttl_s / BEATS

    async def beat(self) -> int:
        """Renew this worker's record, and return its revision."""
        value = json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode()
        async with self._lock:
            while True:
                try:
                    if self._revision:
                        self._revision = await self._records.update(
                            self.key, value, revision=self._revision, ttl=self.ttl_s
                        )
                    else:
                        self._revision = await self._records.create(self.key, value, ttl=self.ttl_s)
                    return self._revision
                except Conflict:  # it has expired, or the answer to an earlier beat was lost
                    with suppress(KeyNotFound):
                        self._revision = 0
                        self._revision = (await self._records.get(self.key)).revision

    async def leave(self) -> None:
        """Remove the record, so that others take over at once. If this fails, they do after the record's TTL."""
        with suppress(JetSparkError):
            async with self._lock:
                await self._records.purge(self.key, ttl=TOMBSTONE_TTL_S)

    def apply(self, entry: KVEntry) -> bool:
        """Apply a change of a worker's record; returns whether a worker joined or left."""
        name = entry.key.rsplit(".", 1)[-1]
        is_alive = entry.operation == "put"
        if (name in self.alive) == is_alive:
            return False
        (self.alive.add if is_alive else self.alive.discard)(name)
        return True


class RecordWatch:
    """Follows changes of parked keys and workers, in the order in which they were written."""

    def __init__(self, store: HandlerStore, machine: HandlerMachine, members: Members | None) -> None:
        self._store, self._machine, self.members = store, machine, members
        self.changed = asyncio.Event()
        """Set when another worker joins or leaves."""
        self._seen = 0
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        filters = [f"parked.{store.handler}.>", *([members.filter] if members is not None else [])]
        self.changes = cast("AsyncGenerator[KVEntry | None, None]", store.records.watch(*filters, initial_marker=True))

    async def load(self) -> None:
        """Apply the records that are stored now."""
        async for entry in self.changes:
            if entry is None:
                return
            self._apply(entry)

    async def follow(self, wake: Callable[[], None]) -> None:
        async for entry in self.changes:
            if entry is not None:
                self._apply(entry)
                wake()

    async def catch_up(self) -> None:
        """Return when every record that was written before the call is applied.

        The watch is up to date when it has delivered a new heartbeat of this worker.

        Raises:
            RequestTimeout: It was not delivered within ``CATCH_UP_S``.
        """
        if self.members is None:
            return
        revision = await self.members.beat()
        if self._seen < revision:
            reached = asyncio.get_running_loop().create_future()
            self._waiting.append((revision, reached))
            try:
                async with asyncio.timeout(CATCH_UP_S):
                    await reached
            except TimeoutError:
                behind = f"the watch of the handlers' bucket is at revision {self._seen}, behind {revision}"
                raise RequestTimeout(behind, CATCH_UP_S) from None

    def _apply(self, entry: KVEntry) -> None:
        self._seen = max(self._seen, entry.revision)
        if entry.key.startswith("members."):
            assert self.members is not None
            if self.members.apply(entry):
                self.changed.set()
        else:
            self._apply_parked(entry)
        for revision, reached in self._waiting:
            if revision <= self._seen and not reached.done():
                reached.set_result(None)
        self._waiting = [each for each in self._waiting if not each[1].done()]

    def _apply_parked(self, entry: KVEntry) -> None:
        """Apply the record of a parked key, unless this process has written or applied a newer one."""
        store, machine = self._store, self._machine
        if entry.operation == "put":
            fields = json.loads(entry.value)
            key = fields["key"]
            if entry.revision > store.parked_revisions.get(key, 0):
                store.parked_revisions[key] = entry.revision
                store.parked_names[entry.key] = key
                machine.park(key, fields["head"])
            return
        parked = store.parked_names.get(entry.key)
        if parked is not None and entry.revision > store.parked_revisions.get(parked, 0):
            machine.unpark(parked)
