"""When a publisher writes by itself, and when it leaves that to what follows; time is stated."""

from __future__ import annotations

import pytest

from jetspark.core.gathering import GATHER_S, LINGER_S, MUCH_BYTES, Gathering


class Publishers:
    """They write down when they would have written."""

    def __init__(self) -> None:
        self.gathering = Gathering()
        self.clock_s, self.gathered_bytes = 100.0, 0
        self.written_at: list[float] = []

    def publish(self, size: int, *, every_s: float, times: int) -> None:
        for _ in range(times):
            self.gathered_bytes += size
            if self.clock_s >= self.gathering.until:
                self.gathering.begin(self.clock_s, self.gathered_bytes)
                self.written_at.append(self.clock_s)
                self.gathered_bytes = 0
            self.clock_s += every_s

    def pauses(self) -> list[float]:
        return [after - before for before, after in zip(self.written_at, self.written_at[1:], strict=False)]


@pytest.fixture
def publishers() -> Publishers:
    return Publishers()


def test_messages_with_time_between_them_are_written_at_once(publishers: Publishers) -> None:
    publishers.publish(10 * MUCH_BYTES, every_s=LINGER_S * 1.01, times=20)
    assert len(publishers.written_at) == 20


def test_a_small_stream_is_written_in_short_turns(publishers: Publishers) -> None:
    publishers.publish(MUCH_BYTES // 100, every_s=GATHER_S / 10, times=1000)
    assert max(publishers.pauses()) < 1.2 * GATHER_S
    assert publishers.gathered_bytes  # what is written last by nobody is left to the connection's thread


def test_a_broad_stream_is_written_in_turns_that_grow_and_never_past_the_bound(publishers: Publishers) -> None:
    publishers.publish(MUCH_BYTES // 10, every_s=GATHER_S / 20, times=4000)
    assert publishers.pauses()[0] < publishers.pauses()[1] < publishers.pauses()[2]
    assert LINGER_S <= max(publishers.pauses()) < 1.1 * LINGER_S
    publishers.publish(1, every_s=GATHER_S / 10, times=400)
    assert max(publishers.pauses()[-5:]) < 1.2 * GATHER_S
