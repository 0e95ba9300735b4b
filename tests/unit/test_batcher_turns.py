"""The lock of a batcher on threads."""

from __future__ import annotations

import sys
import threading
from _thread import RLock
from collections.abc import Iterator

import pytest
from support.interrupts import Interrupt, Interrupted, count_places
from support.patience import PATIENCE_S

from jetspark.batcher.blocking.turns import TurnLock


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads take turns all the time, also within a block that holds a lock."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def is_free(lock: TurnLock) -> bool:
    """Whether another thread gets it."""
    got: list[bool] = []
    other = threading.Thread(target=lambda: got.append(RLock.acquire(lock, False)))
    other.start()
    other.join()
    return got == [True]


def test_a_block_has_the_lock_and_gives_it_back() -> None:
    lock = TurnLock()
    with lock:
        assert not is_free(lock)
    assert is_free(lock)


def test_a_thread_that_finds_it_taken_has_it_when_it_is_free() -> None:
    lock, began, done = TurnLock(), threading.Event(), threading.Event()

    def take() -> None:
        began.set()
        with lock:
            done.set()

    with lock:
        other = threading.Thread(target=take)
        other.start()
        began.wait(PATIENCE_S)
        assert not done.wait(0.01)
    assert done.wait(PATIENCE_S)
    other.join()
    assert is_free(lock)


@pytest.mark.usefixtures("hasty_threads")
def test_one_thread_has_it_at_a_time() -> None:
    lock = TurnLock()
    inside: list[None] = []
    most: list[int] = []

    def count() -> None:
        for _ in range(300):
            with lock:
                inside.append(None)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 2400


class TakenAtFirst(TurnLock):  # type: ignore[misc]  # it is not final
    """Another thread has it when it is asked for the first time, and the second."""

    tries = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self.tries += 1
        return self.tries > 2 and super().acquire(blocking, timeout)


@pytest.mark.parametrize("kind", [TurnLock, TakenAtFirst])
def test_an_interrupt_anywhere_leaves_it_free(kind: type[TurnLock]) -> None:
    def take() -> None:
        with lock:
            pass

    lock = kind()
    places = count_places(take)
    if sys.version_info < (3, 12):  # later ones do not tell all bytecodes of a function that is being called
        assert places >= (3 if kind is TurnLock else 10)
    for number in range(places):
        lock = kind()
        with pytest.raises(Interrupted), Interrupt(number):
            take()
        assert is_free(lock), f"interrupted at place {number}"
