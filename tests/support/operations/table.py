"""The table of operations, and the world that its rows work with."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import jetspark
import jetspark.blocking
from jetspark import ConsumerConfig, KVConfig, StreamConfig
from support.in_place import InPlace
from support.interrupts import KINDS, Call, Ended, Interruption, counted, innermost

__all__ = ["A_WHILE_S", "ROWS", "Row", "World", "accepted_by", "drained", "interruption", "plain", "row"]

A_WHILE_S = 30.0


@dataclass(frozen=True)
class Row:
    """One operation, or several that are used together."""

    covers: tuple[str, ...]
    run: Callable[[World], Awaitable[None]]
    starts_threads: bool = False
    """CPython may hand an exception set from outside to the thread that is being started instead."""
    may_leave: frozenset[str] = frozenset()
    """What an interruption of the blocking driver may leave behind: the call had made what it could not return any
    more, and no code of ours runs after its ``return``."""

    @property
    def name(self) -> str:
        return self.covers[0]


ROWS: dict[str, Row] = {}


def row(
    *covers: str, may_leave: str = "", starts_threads: bool = False
) -> Callable[[Callable[[World], Awaitable[None]]], None]:
    def register(run: Callable[[World], Awaitable[None]]) -> None:
        assert covers[0] not in ROWS, covers
        ROWS[covers[0]] = Row(covers, run, starts_threads, frozenset(may_leave.split()))

    return register


def plain(cover: str, call: Callable[[World], Coroutine[Any, Any, Any]], *, may_leave: str = "") -> None:
    """An operation that promises nothing but its answer."""

    async def run(w: World) -> None:
        await w.interrupt(lambda: call(w))

    row(cover, may_leave=may_leave)(run)


@dataclass
class World:
    """What a row works with: a connection that everybody shares, and things of its own in every run."""

    driver: str
    url: str
    name: str
    nc: Any
    js: Any
    witness: jetspark.blocking.Client
    """A connection that is never interrupted, to see what the server has."""
    stream: Any = None
    number: int = 0
    """Of the run."""
    steps: int = 0
    took_s: float = 0.0
    interruption: Interruption | None = None
    seen: dict[str, list[bytes]] = field(default_factory=dict)
    """What was stored on a subject when its row was over."""
    kept: dict[str, Any] = field(default_factory=dict)

    interrupted_in: str = ""
    """The innermost function of ours that was interrupted."""
    sessions: int = 0
    """How many the connection had had when the run began."""

    @property
    def has_lost_session(self) -> bool:
        """A thread may be interrupted in the middle of a write: then only a new session is sound, and what was on its
        way is in doubt."""
        machine = self.nc._machine
        return self.is_blocking and (machine.sessions != self.sessions or not machine.is_connected)

    @property
    def is_blocking(self) -> bool:
        return self.driver == "blocking"

    @property
    def subject(self) -> str:
        return f"{self.name}.{self.number}"

    @property
    def slack(self) -> int:
        """How many messages of an interrupted call may be sent though it raised: a blocking call may be interrupted
        on its very last bytecode."""
        return 1 if self.is_blocking else 0

    async def interrupt(self, call: Call) -> Ended:
        """Run it: to the end the first times, to measure it, and then interrupted."""
        if self.interruption is None:
            ended, self.took_s = await counted(call, self.driver)
            self.steps = ended.steps
            return ended
        ended = await self.interruption.of(call, self.steps, self.took_s)
        self.interrupted_in = innermost(ended.error)
        return ended

    async def sleep(self, seconds: float) -> None:
        if self.is_blocking:
            time.sleep(seconds)  # noqa: ASYNC251
        else:
            await asyncio.sleep(seconds)

    async def connect(self, **options: Any) -> Any:
        if self.is_blocking:
            return InPlace(jetspark.blocking.connect(self.url, **options))
        return await jetspark.connect(self.url, **options)

    async def result(self, future: Any) -> Any:
        return future.result(A_WHILE_S) if self.is_blocking else await asyncio.wait_for(future, A_WHILE_S)

    # ---- things -------------------------------------------------------------------------------------------------

    async def thing(self, key: str, make: Callable[[], Awaitable[Any]]) -> Any:
        """Made once for all runs."""
        if key not in self.kept:
            self.kept[key] = await make()
        return self.kept[key]

    async def bucket(self) -> Any:
        config = KVConfig(bucket=self.name, history=5, storage="memory", allow_atomic=True)
        return await self.thing("bucket", lambda: self.js.create_kv(config))

    async def objects(self) -> Any:
        config = jetspark.ObjectStoreConfig(bucket=self.name, storage="memory")
        return await self.thing("objects", lambda: self.js.create_object_store(config))

    async def consumer(self, messages: int = 20, **config: Any) -> Any:
        """A consumer of this run, with messages."""
        for number in range(messages):
            await self.js.publish_async(self.subject, b"%d" % number)
        await self.js.publish_async_complete()
        return await self.stream.create_consumer(
            ConsumerConfig(name=f"c{self.number}", filter_subjects=[self.subject], **config)
        )

    async def spare_stream(self) -> Any:
        """One to change or to delete."""
        return await self.js.create_stream(StreamConfig(name=f"{self.name}_{self.number}", storage="memory"))

    def stream_of(self, subject: str) -> jetspark.blocking.Stream:
        [name] = self.witness.jetstream().stream_names(subject)
        return self.witness.jetstream().stream(name)

    async def stored(self, subject: str | None = None) -> list[bytes]:
        """What the stream has, when everything sent before is done; the runner looks again at the end of all runs."""
        subject = subject or self.subject
        await self.js.publish(f"{self.name}.fence")
        found = self.look(subject)
        self.seen[subject] = found
        return found

    def look(self, subject: str) -> list[bytes]:
        return [each.data for each in self.stream_of(subject).get_messages(subject=subject)]


def accepted_by(w: World, ended: Ended, sent: list[bytes], stored: list[bytes]) -> None:
    """What was accepted is stored, in order, and nothing else: but for the call that was interrupted, perhaps."""
    most = len(sent) + (w.slack if ended.was_interrupted else 0)
    if w.has_lost_session:
        assert len(stored) == len(set(stored)), stored
    else:
        assert stored[: len(sent)] == sent, (len(stored), len(sent))
    assert len(stored) <= most, (len(stored), len(sent))


async def drained(iterator: AsyncIterator[Any]) -> list[Any]:
    async with contextlib.aclosing(iterator) as entries:  # type: ignore[type-var]
        return [entry async for entry in entries]


def interruption(row: Row, driver: str, rng: random.Random) -> Interruption:
    kinds = [kind for kind in KINDS[driver] if kind != "thread" or not row.starts_threads]
    return Interruption(rng.choice(kinds), rng.random())
