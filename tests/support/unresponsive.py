"""Rows that run one operation each while something is wrong with the server, and the conditions that are wrong.

All rows run at once, each on a connection of its own, so that a condition lasts as long as the longest of them. A row
prepares, has :meth:`Stall.stalled` run its operation under the condition, and checks that what was reported is true.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import pytest

import jetspark
import jetspark.batcher
import jetspark.errors
from jetspark import BufferFull, JetSparkError, KVConfig, ObjectStoreConfig, Placement, StreamConfig
from jetspark.aio.kv import Transaction
from jetspark.aio.pull import Messages
from jetspark.aio.push import PushMessages
from jetspark.server import NatsCluster, NatsServer
from support.certificates import Certificates
from support.cluster import leader
from support.drivers import Driver
from support.impostor import Impostor

__all__ = [
    "BUCKET",
    "PAYLOAD",
    "ROWS",
    "TIMEOUT_S",
    "Condition",
    "CutOff",
    "Ended",
    "Full",
    "Impersonated",
    "Row",
    "Stall",
]
__all__ += ["Stopped", "Undisturbed", "documented", "make_streams", "row", "run_rows"]

R = TypeVar("R")

TIMEOUT_S = 2.0
# Generous, and far below the connection's own timeouts: a minute means that the operation used those instead.
SLACK_S = 30.0
OPTIONS: dict[str, Any] = {"request_timeout_s": 60.0, "drain_timeout_s": 60.0, "send_buffer_bytes": 64 << 10}
PAYLOAD = bytes(100)
BUCKET = "stall"
_CLASSES: dict[str, type] = {
    each.__name__: each for each in (jetspark.batcher.Batcher, Transaction, Messages, PushMessages)
}


@dataclass(frozen=True)
class Row:
    """One operation."""

    covers: tuple[str, ...]
    """What it is about, first the one whose docstring names the errors."""
    run: Callable[[Stall], Awaitable[None]]
    options: dict[str, Any]
    """Of its connection."""


ROWS: dict[str, Row] = {}


def row(*covers: str, **options: Any) -> Callable[[Callable[[Stall], Awaitable[None]]], None]:
    def register(run: Callable[[Stall], Awaitable[None]]) -> None:
        assert run.__name__ not in ROWS, run.__name__
        ROWS[run.__name__] = Row(covers, run, options)

    return register


@dataclass
class Ended:
    result: Any = None
    error: BaseException | None = None
    took_s: float = 0.0


class Stall:
    """What one row works with."""

    def __init__(self, run: _Run, name: str, nc: jetspark.Client) -> None:
        self._run, self.name, self.nc = run, name, nc
        self.js = nc.jetstream(timeout=run.condition.timeout_s)
        self.patient = nc.jetstream(timeout=20)
        """To prepare and to look afterwards."""
        self.subject = f"stall.{name}"
        self.is_blocking = run.driver.name == "blocking"
        self.answers_pings = run.condition.answers_pings
        self.loses_messages = run.condition.loses_messages
        self.keeps_batches = run.condition.keeps_batches
        self.replicas = run.condition.replicas

    async def stalled(self, call: Callable[[], Awaitable[Any]], *, waits: bool = False) -> Ended:
        """Run it under the condition; returns when that is over.

        With ``waits`` it has no timeout, and may go on until then.
        """
        operation = ROWS[self.name].covers[0]
        await self._run.begins(self.nc)
        began = time.monotonic()
        task = asyncio.ensure_future(call())
        await asyncio.wait({task}, timeout=TIMEOUT_S if waits else TIMEOUT_S + SLACK_S)
        was_done, ended = task.done(), Ended(took_s=time.monotonic() - began)
        await self._run.ends()
        await asyncio.wait({task}, timeout=60)
        assert task.done(), f"{operation} goes on for ever"
        assert was_done or waits, f"{operation} took longer than {TIMEOUT_S} s: it ended when the server answered"
        if task.exception() is None:
            ended.result = task.result()
        else:
            ended.error = task.exception()
            assert isinstance(ended.error, JetSparkError), ended.error
            names = {cls.__name__ for cls in type(ended.error).__mro__}
            assert names & documented(operation), (
                f"{operation} raised {ended.error!r}, which its docstring does not name"
            )
            self._run.condition.check(ended.error)
        return ended

    async def stored(self) -> list[bytes]:
        """What the stream has when all is done that was sent on this connection."""

        async def look() -> list[bytes]:
            await self.js.publish("stall.fence", timeout=20)
            stream = await self.js.stream("STALL")
            return [each.data async for each in stream.get_messages(subject=self.subject)]

        return await self.tried(look)

    async def led(self, of: Any) -> None:
        """Have the server that the condition is about lead this stream or consumer."""
        if self.replicas > 1:
            await _led_by(of, self._run.condition.node)

    async def tried(self, call: Callable[[], Awaitable[R]]) -> R:
        return await tried(call)

    async def holds(self, ended: Ended, claim: Callable[[], Awaitable[bool]]) -> None:
        """What was reported as done is so; soon, as any replica may answer, and one may be a moment behind."""
        if ended.error is not None:
            assert not self._run.condition.must_succeed, f"{self.name}: {ended.error!r}, though nothing is wrong"
            return
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(JetSparkError):
                if await claim():
                    return
            assert time.monotonic() < deadline, f"{self.name} reported {ended.result!r}, which is not so"
            await asyncio.sleep(0.05)


async def tried(call: Callable[[], Awaitable[R]]) -> R:
    """Try again as long as there is no leader, or no room."""
    async with asyncio.timeout(120):
        while True:
            try:
                return await call()
            except (jetspark.RequestTimeout, jetspark.JetStreamUnavailable, BufferFull):
                await asyncio.sleep(0.1)


def documented(operation: str) -> set[str]:
    """Errors that the docstring names, of the method or of its class; ``JetSparkError`` alone does not count."""
    name, _, method = operation.partition(".")
    owner = _CLASSES.get(name) or getattr(jetspark, name)
    texts = [owner.__doc__ or "", getattr(owner, method).__doc__ or ""]
    return {name for name in re.findall(r"\w+", " ".join(texts)) if name in jetspark.errors.__all__}


class _Run:
    """All rows, which wait for one another before and after the condition."""

    def __init__(self, driver: Driver, rows: int, condition: Condition) -> None:
        self.driver, self._rows, self.condition = driver, rows, condition
        # Rows that connect and prepare. All at once would take a busy machine longer than a connection, or the two
        # seconds of an operation that prepares, may take.
        self.preparing = asyncio.Semaphore(8)
        self._ready, self._over = 0, 0
        self._begun, self._ended = asyncio.Event(), asyncio.Event()
        self._connections: list[Any] = []

    async def begins(self, nc: jetspark.Client | None) -> None:
        """A row is prepared, on that connection; or has failed before it had one."""
        if nc is not None:
            self._connections.append(nc)
        self.preparing.release()
        self._ready += 1
        if self._ready == self._rows:
            try:
                await self.condition.begin(self._connections)
            finally:
                self._begun.set()
        await self._begun.wait()

    async def ends(self) -> None:
        self._over += 1
        if self._over == self._rows:
            try:
                await self.condition.end()
            finally:
                self._ended.set()
        await self._ended.wait()

    async def give_up(self, nc: jetspark.Client | None) -> None:
        """A row failed before its turn: the others do not wait for it."""
        if nc is None or nc not in self._connections:
            await self.begins(nc)
            await self.ends()


async def run_rows(driver: Driver, names: list[str], condition: Condition) -> None:
    whole = _Run(driver, len(names), condition)

    async def run(name: str) -> None:
        await whole.preparing.acquire()
        nc = None
        try:
            options = OPTIONS | condition.options | ROWS[name].options
            nc = await driver.connect(await condition.address(name), **options)
            async with asyncio.timeout(300):
                await ROWS[name].run(Stall(whole, name, nc))
        except BaseException as error:
            error.add_note(f"{name} on {driver.name}")
            raise
        finally:
            await whole.give_up(nc)
            if nc is not None:
                with contextlib.suppress(JetSparkError):
                    await nc.close(2)

    async with condition:
        results = await asyncio.gather(*map(run, names), return_exceptions=True)
    errors = ["".join(traceback.format_exception(each)) for each in results if isinstance(each, BaseException)]
    if errors:
        pytest.fail("\n".join(errors), pytrace=False)


async def make_streams(condition: Condition, url: str | None = None) -> None:
    """What the rows need, new; on another server than the condition's, if ``url`` says so."""
    async with jetspark.connect(url or condition.url) as nc:
        js = nc.jetstream(timeout=20)
        for name in await tried(lambda: _listed(js.stream_names())):
            with contextlib.suppress(jetspark.StreamNotFound):  # an earlier attempt did it, and was not told
                await tried(functools.partial(js.delete_stream, name))
        stall = StreamConfig(
            name="STALL",
            subjects=["stall.>"],
            storage="memory",
            replicas=condition.replicas,
            allow_atomic=True,
            allow_batched=True,
            allow_direct=True,
        )
        kv = KVConfig(bucket=BUCKET, storage="memory", replicas=condition.replicas, allow_atomic=True)
        objects = ObjectStoreConfig(bucket=BUCKET, storage="memory", replicas=condition.replicas)
        await tried(lambda: js.create_stream(stall))
        await tried(lambda: js.create_kv(kv))
        await tried(lambda: js.create_object_store(objects))
        if condition.replicas > 1:
            for name in ("STALL", f"KV_{BUCKET}", f"OBJ_{BUCKET}"):
                await _led_by(await tried(functools.partial(js.stream, name)), condition.node)


async def _listed(names: AsyncIterator[str]) -> list[str]:
    return [name async for name in names]


async def _led_by(of: Any, node: str) -> None:
    async with asyncio.timeout(120):
        while await leader(of) != node:
            with contextlib.suppress(jetspark.ServerError, jetspark.RequestTimeout):
                await of.step_down(Placement(preferred=node))
            await asyncio.sleep(0.1)


# ---- what may be wrong -----------------------------------------------------------------------------------------------


class Condition:
    """What is wrong with the server between :meth:`begin` and :meth:`end`; entered once for all rows."""

    answers_pings = False
    loses_messages = False
    """Whether a message that nobody acknowledged may be lost."""
    keeps_batches = True
    """Whether an atomic batch that was begun can go on afterwards."""
    must_succeed = False
    """Whether every write has to be reported as done, so that it is looked at."""
    timeout_s = TIMEOUT_S
    """Of all JetStream contexts."""
    replicas = 1
    """Of all streams."""
    options: dict[str, Any] = {}  # noqa: RUF012
    """Of all connections."""

    def __init__(self, server: NatsServer) -> None:
        self._server = server

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def node(self) -> str:
        assert self._server.config.server_name is not None
        return self._server.config.server_name

    async def __aenter__(self) -> Condition:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end()

    async def address(self, name: str) -> str:
        """Where the row of that name connects."""
        return self._server.url

    async def begin(self, connections: list[Any]) -> None:
        raise NotImplementedError

    async def end(self) -> None:
        raise NotImplementedError

    def check(self, error: BaseException) -> None:
        """Whether an operation may end with it, if it is documented."""


class Undisturbed(Condition):
    """Nothing is wrong: otherwise a write that is reported as done, and is not, might never be seen."""

    answers_pings = True
    must_succeed = True
    timeout_s = 15.0  # on a busy machine

    async def begin(self, connections: list[Any]) -> None:
        pass

    async def end(self) -> None:
        pass


class Stopped(Condition):
    """The process gets no time."""

    async def begin(self, connections: list[Any]) -> None:
        await asyncio.to_thread(self._server.pause)

    async def end(self) -> None:
        await asyncio.to_thread(self._server.resume)


class Full(Stopped):
    """The network takes no more of any connection either."""

    async def begin(self, connections: list[Any]) -> None:
        await super().begin(connections)
        await asyncio.gather(*map(_fill, connections))


async def _fill(nc: Any) -> None:
    client = getattr(nc, "_target", nc)
    if client.is_closed:
        return
    machine, transport = client._machine, client._transport
    rounds_in_vain = 0
    while rounds_in_vain < 3:
        rounds_in_vain += 1
        with getattr(transport, "lock", contextlib.nullcontext()):
            transport.flush()
            for size_bytes in (30_000, 1000, 1):
                with contextlib.suppress(BufferFull):
                    while True:
                        machine.publish("fill", bytes(size_bytes))
                        rounds_in_vain = 0
        await asyncio.sleep(0.02)


class CutOff(Condition):
    """The leader is cut off from the others until they have another one, while clients still reach it."""

    answers_pings = True
    replicas = 3
    loses_messages = True
    keeps_batches = False  # only its leader has what is not committed

    def __init__(self, cluster: NatsCluster, node: NatsServer) -> None:
        super().__init__(node)
        self._cluster, self._index, self._is_cut = cluster, list(cluster.nodes).index(node), False

    async def begin(self, connections: list[Any]) -> None:
        self._is_cut = True
        await asyncio.to_thread(self._cluster.partition, self._index)

    async def end(self) -> None:
        if not self._is_cut:
            return
        self._is_cut = False
        try:
            await asyncio.to_thread(self._cluster.wait_until_ready, 150)  # without it
        finally:
            await asyncio.to_thread(self._cluster.heal, self._index)
        await asyncio.to_thread(self._cluster.wait_until_ready, 150)


class Impersonated(Condition):
    """A peer without a certificate has taken the server's place, and answers everything before TLS."""

    loses_messages = True
    keeps_batches = False

    def __init__(self, server: NatsServer, accomplice: NatsServer, certificates: Certificates) -> None:
        super().__init__(server)
        self._accomplice, self._certificates = accomplice, certificates
        self._impostors: dict[str, Impostor] = {}
        self._stack = contextlib.AsyncExitStack()
        self.options = {
            "tls": jetspark.TLSConfig(ca_file=certificates.ca_file),
            "reconnect_wait_s": 0.05,
            "reconnect_wait_max_s": 0.2,
        }

    async def __aexit__(self, *exc_info: Any) -> None:
        await self._stack.aclose()

    async def address(self, name: str) -> str:
        impostor = Impostor(self._server.port, self._accomplice.port, self._certificates)
        self._impostors[name] = await self._stack.enter_async_context(impostor)
        return impostor.url

    async def begin(self, connections: list[Any]) -> None:
        self._connections = connections
        for impostor in self._impostors.values():
            impostor.hold()
        async with jetspark.connect(self._accomplice.url) as nc:
            for subject in ("quiet", *(f"stall.{name}" for name in self._impostors)):
                await nc.publish(subject, b"FORGED")

    async def end(self) -> None:
        open_ports = {nc.server for nc in self._connections if not nc.is_closed}
        for impostor in self._impostors.values():
            if impostor.url in open_ports:
                await impostor.until_all_was_tried()
            impostor.give_back()
            assert b"CONNECT" not in impostor.heard
            assert b"PUB " not in impostor.heard

    def check(self, error: BaseException) -> None:
        assert not isinstance(error, jetspark.ServerError), f"it believed {error!r}"
