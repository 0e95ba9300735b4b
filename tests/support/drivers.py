"""One way to write a test, two drivers to run it on.

Tests are coroutines against the asyncio API. For the blocking driver every object is wrapped so that its methods
can be awaited: each call runs in a thread of its own. What differs between the drivers is then only what the tests
are there to compare.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from typing import Any, Concatenate, ParamSpec, TypeVar

import uvloop

import jetspark
import jetspark.blocking

P = ParamSpec("P")
R = TypeVar("R")

# Methods that return iterators without being generator functions, and those that wait for nothing.
_ITERATING = {"streams", "stream_names", "consumers", "consumer_names", "watch", "batch_advisories"}
_IMMEDIATE = {
    "jetstream",
    "messages",
    "ordered_consumer",
    "pushed_messages",
    "transaction",
    "atomic_batch",
    "fast_batch",
    "fast_publisher",
}


def _typed_like(call: Callable[P, R]) -> Callable[[Callable[..., Any]], Callable[Concatenate[Driver, P], R]]:
    """Gives a method the arguments and the result of ``call``.

    A test is written against asyncio's types, and that is how it is checked. `Awaited` has their methods at run time
    only: it finds them by name, so that a method both drivers have needs no line here.
    """
    return lambda method: method


class Driver:
    """``connect`` in the driver's own way, and the loop to run a test in."""

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        factory = uvloop.new_event_loop if self.name == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(self._with_threads(test))

    async def _with_threads(self, test: Coroutine[Any, Any, None]) -> None:
        with ThreadPoolExecutor(max_workers=128, thread_name_prefix="test") as threads:
            asyncio.get_running_loop().set_default_executor(threads)
            await test

    @_typed_like(jetspark.connect)
    def connect(self, *args: Any, **kwargs: Any) -> Any:
        if self.name == "blocking":
            return _BlockingConnect(args, kwargs)
        return jetspark.connect(*args, **kwargs)


class _BlockingConnect:
    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._start = functools.partial(jetspark.blocking.connect, *args, **kwargs)
        self._client: Awaited | None = None

    def __await__(self) -> Any:
        return _in_thread(self._start).__await__()

    async def __aenter__(self) -> Any:
        self._client = await self
        return self._client

    async def __aexit__(self, *exc_info: Any) -> None:
        assert self._client is not None
        await self._client.__aexit__(*exc_info)


class Awaited:
    """A blocking object seen through asyncio's glasses."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if name in _ITERATING or inspect.isgeneratorfunction(value):
            return lambda *args, **kwargs: _iterate(value(*args, **kwargs))
        if name in _IMMEDIATE:  # no await in either driver
            return lambda *args, **kwargs: _wrap(value(*args, **kwargs))
        if not inspect.ismethod(value):
            return value

        async def call(*args: Any, **kwargs: Any) -> Any:
            kwargs = {key: each._target if isinstance(each, Awaited) else each for key, each in kwargs.items()}
            if inspect.iscoroutinefunction(callback := kwargs.get("callback")):
                kwargs["callback"] = _from_thread(callback)
            return await _in_thread(functools.partial(value, *args, **kwargs))

        return call

    def __aiter__(self) -> AsyncIterator[Any]:
        return _iterate(iter(self._target))

    async def __aenter__(self) -> Awaited:
        await _in_thread(self._target.__enter__)
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await _in_thread(functools.partial(self._target.__exit__, *exc_info))


def _wrap(value: Any) -> Any:
    if isinstance(value, list):
        return [_wrap(each) for each in value]
    return Awaited(value) if type(value).__module__.startswith("jetspark.blocking") else value


async def _in_thread(call: Callable[[], Any]) -> Any:
    return _wrap(await asyncio.get_running_loop().run_in_executor(None, call))


async def _iterate(iterator: Any) -> AsyncIterator[Any]:
    end = object()
    try:
        while (value := await _in_thread(functools.partial(next, iterator, end))) is not end:
            yield value
    finally:
        iterator.close()


def _from_thread(callback: Callable[[Any], Awaitable[None]]) -> Callable[[Any], None]:
    loop = asyncio.get_running_loop()

    async def call(message: Any) -> None:
        await callback(_wrap(message))

    return lambda message: asyncio.run_coroutine_threadsafe(call(message), loop).result(timeout=60)


def on_both_drivers(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Makes a coroutine with a ``driver`` argument a test that each driver runs."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        kwargs["driver"].run(test(*args, **kwargs))

    return run


async def entered(block: AbstractAsyncContextManager[R]) -> R:
    """A batch or publisher inside its block, which the test leaves as it likes, or not at all."""
    return await block.__aenter__()


def inside(thing: Any) -> Any:
    """The driver's own object, for what only one driver has and for private parts, which no type promises."""
    return getattr(thing, "_target", thing)


class Recorder:
    """An ``on_event`` that tests can wait on."""

    def __init__(self) -> None:
        self.events: list[jetspark.ConnectionEvent] = []
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def __call__(self, event: jetspark.ConnectionEvent) -> None:
        self.events.append(event)
        self._loop.call_soon_threadsafe(self._changed.set)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]

    async def wait_for(self, kind: type[Any], count: int = 1, timeout: float = 60.0) -> Any:
        """The ``count``-th event of ``kind``."""
        async with asyncio.timeout(timeout):
            while len(found := self.of(kind)) < count:
                self._changed.clear()
                await self._changed.wait()
        return found[count - 1]


async def until(condition: Callable[[], object], timeout: float = 60.0) -> None:
    """Poll for what gives no signal."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
