"""What manual flushes wait for."""

from __future__ import annotations

import pytest

from jetspark.batcher.fences import Fence, Fences


def _fences(*places: tuple[int, int]) -> tuple[Fences, list[Fence], list[int]]:
    fences, made, woken = Fences(), list[Fence](), list[int]()
    for number, (first, end) in enumerate(places):
        made.append(Fence(first, end, lambda number=number: woken.append(number)))  # type: ignore[misc]
        fences.add(made[-1])
    return fences, made, woken


def test_each_counts_only_its_own_items() -> None:
    fences, (first, second), _ = _fences((0, 4), (2, 8))
    fences.count(0, 3, None)
    fences.count(3, 10, OSError("no"))
    assert [(each.ok, each.failed) for each in (first, second)] == [(3, 1), (1, 5)]
    fences.count(20, 30, None)
    assert [(each.ok, each.failed) for each in (first, second)] == [(3, 1), (1, 5)]


def test_those_are_done_whose_items_are_all_settled() -> None:
    fences, made, woken = _fences((0, 4), (2, 8), (0, 3))
    fences.complete(2)
    assert woken == []
    fences.complete(4)
    assert (woken, [each.is_done for each in made]) == ([0, 2], [True, False, True])
    assert list(fences) == [made[1]]


def test_one_whose_waking_was_interrupted_is_woken_again() -> None:
    fences, woken = Fences(), list[int]()

    def wake() -> None:
        woken.append(1)
        if len(woken) == 1:
            raise KeyboardInterrupt

    fences.add(Fence(0, 1, wake))
    with pytest.raises(KeyboardInterrupt):
        fences.complete(1)
    assert len(fences) == 1
    fences.complete(1)
    assert (len(woken), len(fences)) == (2, 0)


def test_all_are_woken_when_nothing_more_will_be_settled_and_none_is_done() -> None:
    fences, made, woken = _fences((0, 4), (2, 8))
    fences.release()
    assert (woken, len(fences), [each.is_done for each in made]) == ([0, 1], 0, [False, False])


def test_one_that_is_forgotten_is_not_woken() -> None:
    fences, (first, _), woken = _fences((0, 4), (2, 8))
    fences.forget(first)
    fences.forget(first)
    fences.complete(100)
    assert woken == [1]
