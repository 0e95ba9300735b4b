"""The batcher among impatient producers and unreliable sinks: thousands of courses of events, each of them a seed.

It is the real asyncio driver in virtual time. After every step of the event loop the accounting is compared with an
independent count; at the end every item's story is compared with what the sink saw. Seeds are those of
:mod:`support.seeds`; one alone::

    JETSPARK_SEED=1234 .venv/bin/python -m pytest tests/simulation/test_batcher.py -k in_order
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest
from support import seeds
from support.virtual_time import VirtualLoop, run

from jetspark.batcher import Batcher, BatcherConfig, BatcherTimeout, Closed, DroppedOnShutdown, FlushTimeout

SEEDS, FRESH_SEEDS = 600, 40
FLUSH_TIMEOUT_S = 0.5
# A sink that does not obey its cancellation goes on for at most this long.
STUBBORN_S = 2.0


@dataclass(frozen=True)
class Item:
    producer: int
    number: int
    size: int


@dataclass
class Story:
    """What happened to the items of a run, told by producers and the sink."""

    accepted: list[Item] = field(default_factory=list)
    refused: set[Item] = field(default_factory=set)
    acks: dict[Item, asyncio.Future[None]] = field(default_factory=dict)
    passed: list[Item] = field(default_factory=list)
    written: set[Item] = field(default_factory=set)
    batches: int = 0
    complaints: list[str] = field(default_factory=list)
    """Of the sink, which cannot fail a test by raising: the batcher takes that for a failed write."""
    cancelled_adds: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)


class Sink:
    """Quick, slow, failing, hanging and dying, as the random generator has it; and it spoils the list it was given."""

    def __init__(self, rng: random.Random, story: Story, config: dict[str, int | None], temper: list[str]) -> None:
        self._rng, self._story, self._config, self._temper = rng, story, config, temper

    async def write(self, batch: Sequence[Item], /) -> None:
        rng, story, items = self._rng, self._story, tuple(batch)
        story.batches += 1
        story.passed += items
        most_bytes = self._config["max_batch_bytes"]
        if not 0 < len(items) <= (self._config["max_batch_size"] or 0):
            story.complaints.append(f"a batch of {len(items)} items")
        if most_bytes is not None and sum(item.size for item in items) > most_bytes:
            story.complaints.append(f"a batch of more than {most_bytes} bytes")
        if rng.random() < 0.2:
            cast(list[Item], batch).clear()
        mood = rng.choice(self._temper)
        if mood == "slow":
            await asyncio.sleep(rng.uniform(0, 2 * FLUSH_TIMEOUT_S))
        elif mood == "yielding":
            await asyncio.sleep(0)
        elif mood == "failing":
            await asyncio.sleep(rng.choice([0, 0.01]))
            raise OSError("the disk is full")
        elif mood == "hanging":
            await asyncio.Event().wait()
        elif mood == "stubborn":
            try:
                await asyncio.sleep(FLUSH_TIMEOUT_S + STUBBORN_S)
            except asyncio.CancelledError:
                await asyncio.sleep(rng.uniform(0, STUBBORN_S))
        elif mood == "dying":
            raise asyncio.CancelledError
        if batch and tuple(batch) != items:
            story.complaints.append("the batch changed while the sink had it")
        story.written.update(items)


class Producer:
    def __init__(self, number: int, rng: random.Random, story: Story, batcher: Batcher[Item]) -> None:
        self._number, self._rng, self._story, self._batcher = number, rng, story, batcher
        self._count = 0
        self._is_over = False

    def _item(self) -> Item:
        self._count += 1
        return Item(self._number, self._count, self._rng.randrange(1, 40))

    async def run(self, steps: int) -> None:
        for _ in range(steps):
            if self._is_over:
                return
            if self._rng.random() < 0.3:
                await asyncio.sleep(self._rng.choice([0, 0, 0.001, 0.02, 0.3]))
            await self._step()

    async def _step(self) -> None:
        rng, story, batcher = self._rng, self._story, self._batcher
        timeout = rng.choice([None, None, 0, 0.01, 0.2])
        items = [self._item() for _ in range(rng.randrange(1, 5))] if rng.random() < 0.2 else [self._item()]
        before = batcher.stats()
        try:
            kind = rng.random()
            if len(items) > 1:
                await self._or_cancelled(batcher.add_batch(items, timeout=timeout))
            elif kind < 0.2:
                if not batcher.try_add(items[0]):
                    assert batcher.stats().rejected == before.rejected + 1
                    story.refused.update(items)
                    return
            elif kind < 0.5:
                story.acks[items[0]] = await batcher.add_with_ack(items[0], timeout=timeout)
            else:
                await self._or_cancelled(batcher.add(items[0], timeout=timeout))
        except Closed:
            story.refused.update(items)
            self._is_over = True
        except BatcherTimeout:
            assert timeout is not None
            story.refused.update(items)
        except asyncio.CancelledError:
            story.cancelled_adds += 1
            story.refused.update(items)
        else:
            story.accepted += items

    async def _or_cancelled(self, adding: object) -> None:
        """Await it, and have it cancelled at some moment: perhaps the very one in which its place is granted."""
        task = asyncio.ensure_future(adding)  # type: ignore[call-overload]
        if self._rng.random() < 0.3:
            asyncio.get_running_loop().call_later(self._rng.choice([0, 1e-6, 0.01, 0.5]), task.cancel)
        await task


def check(loop: VirtualLoop, batcher: Batcher[Item]) -> None:
    machine, stats = batcher._machine, batcher.stats()
    settled = stats.flushed_ok + stats.flushed_fail + stats.dropped_on_shutdown
    assert stats.enqueued == settled + stats.in_flight
    assert stats.in_flight == machine.held
    assert stats.queue_depth <= max(batcher.config.queue_depth, batcher.config.max_batch_size)
    assert len(batcher._writes) <= batcher.config.max_concurrent_flushes
    assert stats.dropped_on_shutdown == 0 or stats.is_closed


async def course(
    loop: VirtualLoop, seed: int, *, slots: int, temper: list[str], kind: type[Batcher[Item]] = Batcher
) -> Story:
    rng, story = random.Random(seed), Story()
    is_patient = rng.random() < 0.2
    """Then time is no trigger: only size, bytes, flush and shutdown make batches go."""
    max_batch_size, queue_depth = rng.choice([1, 2, 5, 20]), rng.choice([4, 5, 10, 50])
    limits: dict[str, int | None] = {
        "max_batch_size": max_batch_size,
        "max_batch_bytes": rng.choice([None, None, 40, 100]),
    }
    batcher = kind(
        BatcherConfig(
            sink=Sink(rng, story, limits, temper),
            max_batch_size=max_batch_size,
            max_batch_bytes=limits["max_batch_bytes"],
            size_of=lambda item: item.size,
            max_batch_delay=1e6 if is_patient else rng.choice([0.001, 0.05, 1.0]),
            queue_depth=queue_depth,
            flush_timeout=FLUSH_TIMEOUT_S,
            max_concurrent_flushes=slots,
            name="simulated",
        )
    )
    loop.on_step = lambda: check(loop, batcher)
    producers = [
        asyncio.ensure_future(Producer(number, rng, story, batcher).run(rng.randrange(1, 30)))
        for number in range(rng.randrange(1, 6))
    ]
    for _ in range(rng.choice([0, 0, 1, 3])):
        await asyncio.sleep(rng.uniform(0, 0.1))
        accepted = len(story.accepted)
        try:
            await batcher.flush(timeout=rng.choice([None, 0.01, 1.0]))
        except BatcherTimeout:
            pass
        else:
            check_flushed(story, accepted)
    if rng.random() < 0.5:
        await asyncio.sleep(rng.choice([0, 0.01, 0.1, 1.0]))
    else:
        await asyncio.wait(producers)
    await end(batcher, story, rng.choice([None, None, 0, 0.01, 1.0]))
    await asyncio.wait_for(asyncio.gather(*producers), 60)  # nobody may wait for ever for a closed batcher
    await batcher.shutdown(timeout=60 + 10 * len(story.accepted))  # the writing goes on to its end
    loop.on_step()
    loop.on_step = lambda: None
    tell(batcher, story, slots)
    return story


def check_flushed(story: Story, accepted: int) -> None:
    assert set(story.accepted[:accepted]) <= set(story.passed), "flush returned too early"


async def end(batcher: Batcher[Item], story: Story, timeout: float | None) -> None:
    try:
        await batcher.shutdown(timeout=timeout)
    except BatcherTimeout:
        assert timeout is not None
        story.outcomes["shutdown timed out"] += 1
        assert batcher.stats().in_flight == 0
    else:
        story.outcomes["shutdown was clean"] += 1
        assert batcher.stats().dropped_on_shutdown == 0


def tell(batcher: Batcher[Item], story: Story, slots: int) -> None:
    """The whole story, once it is over: nothing lost, nothing doubled, in order, and every ack true."""
    stats, passed = batcher.stats(), Counter(story.passed)
    assert not story.complaints
    assert stats.enqueued == len(story.accepted)
    assert not passed.keys() & story.refused, "an item was written whose add had failed"
    assert passed.keys() == set(story.accepted), "an accepted item was never passed to the sink"
    assert set(passed.values()) <= {1}, "an item was passed to the sink twice"
    assert sum(stats.flushes.values()) == story.batches
    assert stats.flushed_ok + stats.late_ok == len(story.written)
    if slots == 1:
        for producer in {item.producer for item in story.passed}:
            numbers = [item.number for item in story.passed if item.producer == producer]
            assert numbers == sorted(numbers), "items of a producer were written out of order"
    for item, ack in story.acks.items():
        assert ack.done()
        error = ack.exception()
        if error is None:
            assert item in story.written, "an ack was given for an item that was not written"
        else:
            # Written all the same only when time was over before the sink was done.
            assert item not in story.written or isinstance(error, FlushTimeout | DroppedOnShutdown)
        story.outcomes["acked" if error is None else type(error).__name__] += 1


CHECKERS: list[Callable[..., object]] = [check, check_flushed, end, tell]

TEMPERS = {
    "quick": ["quick", "quick", "yielding", "slow"],
    "unreliable": ["quick", "yielding", "slow", "failing", "hanging", "stubborn", "dying"],
}


def happen(chosen: Iterable[int], slots: int, temper: str, batcher: type[Batcher[Item]] = Batcher) -> Counter[str]:
    """Let the courses of some seeds happen, and say what was seen in them."""
    totals: Counter[str] = Counter()
    for seed in chosen:

        async def main(loop: VirtualLoop, seed: int = seed) -> None:
            story = await course(loop, seed, slots=slots, temper=TEMPERS[temper], kind=batcher)
            totals.update(story.outcomes)
            totals["cancelled adds"] += story.cancelled_adds

        try:
            run(main)
        except BaseException as error:
            error.add_note(f"again: {seeds.again(seed)} .venv/bin/python -m pytest tests/simulation/test_batcher.py")
            raise
    return totals


@pytest.mark.parametrize("temper", TEMPERS)
@pytest.mark.parametrize("slots", [1, 3], ids=["in_order", "side_by_side"])
def test_it_holds_for_seeds_nobody_has_tried(slots: int, temper: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL", logger="jetspark.batcher")
    happen(seeds.fresh(FRESH_SEEDS), slots, temper)


@pytest.mark.parametrize("temper", TEMPERS)
@pytest.mark.parametrize("slots", [1, 3], ids=["in_order", "side_by_side"])
def test_every_accepted_item_is_passed_on_once_and_accounted_for_at_any_moment(
    slots: int, temper: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL", logger="jetspark.batcher")
    given = seeds.given()
    totals = happen(given or range(SEEDS), slots, temper)
    if given is not None:
        return
    # What they have to have seen, or they prove little.
    wanted = ["acked", "shutdown was clean", "shutdown timed out", "cancelled adds", "DroppedOnShutdown"]
    if temper == "unreliable":
        wanted += ["OSError", "FlushTimeout", "JetSparkError"]
    assert {name for name in wanted if totals[name] >= 5} == set(wanted), totals
