"""Sizes and acks of waiting items."""

from __future__ import annotations

import pytest

from jetspark.batcher.waiting_items import WaitingAcks, WaitingSizes
from jetspark.errors import ConfigError


def test_as_many_fit_as_their_sizes_allow() -> None:
    sizes = WaitingSizes[str](10, len)
    sizes.add(["x" * size for size in (4, 6, 1, 10)])
    assert (sizes.each, sizes.total) == ([4, 6, 1, 10], 21)
    assert sizes.fitting(4) == (2, 10)
    assert sizes.fitting(1) == (1, 4)


def test_they_are_full_when_they_make_a_batch() -> None:
    sizes = WaitingSizes[str](10, len)
    sizes.add(["x" * 9])
    assert not sizes.is_full
    sizes.add(["x"])
    assert sizes.is_full


@pytest.mark.parametrize("size", [-1, 11])
def test_one_that_can_never_fit_keeps_all_out(size: int) -> None:
    sizes = WaitingSizes[int](10, lambda item: item)
    with pytest.raises(ConfigError, match=f"an item of {size} bytes: expected at most max_batch_bytes=10"):
        sizes.add([0, 10, size])
    assert (sizes.each, sizes.total) == ([], 0)


def test_sizes_of_items_that_do_not_wait_are_forgotten_after_an_interrupt() -> None:
    sizes = WaitingSizes[int](10, lambda item: item)
    sizes.add([1, 2, 3])
    sizes.total = 0
    sizes.trim(2)
    assert (sizes.each, sizes.total) == ([1, 2], 3)


def _acks(*positions: int) -> tuple[WaitingAcks, list[tuple[int, object]]]:
    told: list[tuple[int, object]] = []
    acks = WaitingAcks()
    for position in positions:
        acks.append((position, lambda error, position=position: told.append((position, error))))  # type: ignore[misc]
    return acks, told


def test_a_flush_takes_the_acks_of_its_items_alone() -> None:
    acks, told = _acks(0, 3, 7)
    taken = acks.before(7)
    for ack in taken:
        ack(None)
    assert told == [(0, None), (3, None)]
    assert len(acks) == 3
    acks.drop(len(taken))
    assert [position for position, _ in acks] == [7]


def test_all_are_told_in_order() -> None:
    acks, told = _acks(0, 3)
    error = OSError("no")
    acks.fail_all(error)
    assert (told, len(acks)) == ([(0, error), (3, error)], 0)


def test_one_that_was_interrupted_is_told_again() -> None:
    acks, told = _acks(0)

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    acks.appendleft((0, interrupted))
    with pytest.raises(KeyboardInterrupt):
        acks.fail_all(OSError("no"))
    assert (len(acks), told) == (2, [])


def test_acks_of_items_that_do_not_wait_are_forgotten_after_an_interrupt() -> None:
    acks, _ = _acks(0, 2, 3, 5)
    acks.trim(2, 5)
    assert [position for position, _ in acks] == [2, 3]
