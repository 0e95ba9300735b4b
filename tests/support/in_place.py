"""Blocking objects, awaited without a loop: a coroutine written for asyncio runs in one thread, as a plain call."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from jetspark.blocking.ack_future import AckFuture
from support.drivers import _IMMEDIATE, _ITERATING

__all__ = ["InPlace", "run_in_place", "wrap"]

# What waits for nothing in either driver.
IMMEDIATE = _IMMEDIATE | {"published", "unpublished", "stats", "try_add", "reply_subject"}


class InPlace:
    """A blocking object whose methods can be awaited, and which is called in the thread that awaits.

    So a coroutine written for asyncio runs from its beginning to its end in :func:`run_in_place`, as a plain call.
    """

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if name in _ITERATING or inspect.isgeneratorfunction(value):
            return lambda *args, **kwargs: _iterate(value(*args, **kwargs))
        if name in IMMEDIATE:
            return lambda *args, **kwargs: wrap(value(*args, **kwargs))
        if not inspect.ismethod(value):
            return value

        async def call(*args: Any, **kwargs: Any) -> Any:
            kwargs = {key: each._target if isinstance(each, InPlace) else each for key, each in kwargs.items()}
            return wrap(value(*args, **kwargs))

        return call

    def __aiter__(self) -> AsyncIterator[Any]:
        return _iterate(iter(self._target))

    async def __aenter__(self) -> InPlace:
        self._target.__enter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        self._target.__exit__(*exc_info)


def wrap(value: Any) -> Any:
    if isinstance(value, list):
        return [wrap(each) for each in value]
    is_ours = type(value).__module__.startswith(("jetspark.blocking", "jetspark.batcher.blocking"))
    return InPlace(value) if is_ours and not isinstance(value, AckFuture) else value


async def _iterate(iterator: Any) -> AsyncIterator[Any]:
    try:
        for value in iterator:
            yield wrap(value)
    finally:
        iterator.close()


def run_in_place(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits for a loop."""
    try:
        work.send(None)
    except StopIteration as finished:
        return finished.value
    finally:
        work.close()
    raise AssertionError("it waits for an event loop")
