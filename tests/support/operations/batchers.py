"""Rows of batchers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import jetspark
import jetspark.batcher
import jetspark.batcher.blocking
from jetspark.batcher import BatcherConfig
from support.in_place import wrap
from support.interrupts import Ended
from support.operations.table import A_WHILE_S, World, row


class _Sink:
    def __init__(self) -> None:
        self.items: list[int] = []

    async def write(self, batch: Any) -> None:
        await asyncio.sleep(0)
        self.items.extend(batch)


class _BlockingSink(_Sink):
    def write(self, batch: Any) -> None:  # type: ignore[override]
        time.sleep(0.0005)
        self.items.extend(batch)


def _batcher(w: World) -> tuple[Any, _Sink]:
    sink = _BlockingSink() if w.is_blocking else _Sink()
    module: Any = jetspark.batcher.blocking if w.is_blocking else jetspark.batcher
    config: Any = BatcherConfig(name="fuzz", max_batch_size=3, max_batch_delay=0.002, queue_depth=6, sink=sink)
    return wrap(module.Batcher(config)), sink


async def _check_batcher(w: World, batcher: Any, sink: _Sink, added: list[int], ended: Ended, slack: int) -> None:
    await batcher.shutdown(timeout=A_WHILE_S)
    assert len(sink.items) == len(set(sink.items)), sink.items
    assert set(added) <= set(sink.items), (added, sink.items)
    assert len(sink.items) <= len(added) + (slack if ended.was_interrupted else 0), (added, sink.items)


@row(
    "Batcher.add", "Batcher.add_with_ack", "Batcher.add_batch", "Batcher.try_add", "Batcher.stats", starts_threads=True
)
async def _(w: World) -> None:
    batcher, sink = _batcher(w)
    added: list[int] = []

    async def act() -> None:
        for number in range(0, 40, 4):
            await batcher.add(number)
            added.append(number)
            await batcher.add_with_ack(number + 1)
            added.append(number + 1)
            await batcher.add_batch([number + 2, number + 3])
            added.extend((number + 2, number + 3))

    ended = await w.interrupt(act)
    await _check_batcher(w, batcher, sink, added, ended, 2 * w.slack)


@row("Batcher.flush", "Batcher.shutdown", starts_threads=True)
async def _(w: World) -> None:
    batcher, sink = _batcher(w)
    added: list[int] = []

    async def act() -> None:
        for number in range(6):
            await batcher.add(number)
            added.append(number)
        await batcher.flush()
        await batcher.add(6)
        added.append(6)
        await batcher.shutdown()

    ended = await w.interrupt(act)
    await _check_batcher(w, batcher, sink, added, ended, w.slack)
