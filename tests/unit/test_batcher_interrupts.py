"""A thread that uses a batcher is interrupted, once, at every place where that can happen."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from support.interrupts import Ended, Interrupted, at_bytecode
from support.patience import PATIENCE_S

from jetspark.batcher import BatcherConfig
from jetspark.batcher.blocking import Batcher


class Kept:
    def __init__(self) -> None:
        self.items: list[bytes] = []

    def write(self, items: Sequence[bytes], /) -> None:
        self.items += items


class Trial:
    """One batcher, used in every way."""

    def __init__(self, **config: Any) -> None:
        self.sink = Kept()
        self.batcher: Batcher[bytes] = Batcher(
            BatcherConfig(sink=self.sink, max_batch_size=2, max_batch_delay=30, queue_depth=3, **config)
        )
        self.added: list[bytes] = []
        self.futures: list[Future[None]] = []

    async def use(self) -> None:
        batcher = self.batcher
        batcher.add(b"0")
        self.added.append(b"0")
        self.futures.append(batcher.add_with_ack(b"1"))
        self.added.append(b"1")
        batcher.add_batch([b"2", b"3", b"4"])
        self.added += [b"2", b"3", b"4"]
        batcher.flush()
        if batcher.try_add(b"5"):
            self.added.append(b"5")
        batcher.shutdown(timeout=10)

    def check(self, ended: Ended) -> None:
        assert isinstance(ended.error, Interrupted | None), ended.error
        self.batcher.shutdown(timeout=10)
        stats = self.batcher.stats()
        assert stats.enqueued == stats.flushed_ok == len(self.sink.items)
        assert stats.in_flight == stats.dropped_on_shutdown == 0
        assert self.sink.items == sorted(set(self.sink.items))
        assert set(self.added) <= set(self.sink.items)
        assert len(self.sink.items) <= len(self.added) + (3 if ended.was_interrupted else 0)
        for future in self.futures:
            assert future.result(PATIENCE_S) is None


def test_an_interrupt_anywhere_leaves_a_batcher_that_writes_what_it_has_and_ends() -> None:
    _interrupt_everywhere(max_concurrent_flushes=1)


def test_an_interrupt_anywhere_leaves_a_true_account_of_bytes() -> None:
    _interrupt_everywhere(step=3, max_concurrent_flushes=2, max_batch_bytes=2)


def _interrupt_everywhere(step: int = 1, **config: Any) -> None:
    number = 0
    while True:
        trial = Trial(**config)
        ended = at_bytecode(trial.use, number)
        try:
            trial.check(ended)
        except BaseException as error:
            error.add_note(f"interrupted at place {number}: {ended.error}")
            raise
        if not ended.was_interrupted:
            assert number > 100
            return
        number += step
