"""When a publisher of the blocking driver writes by itself, and when it leaves that to what follows; time is stated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from jetspark.blocking import transport
from jetspark.blocking.transport import GATHER_S, LINGER_S, MUCH_BYTES, Link


class Gathering(Link):
    """A link without a connection, which writes down when it would have written."""

    def __init__(self) -> None:
        self.connection = SimpleNamespace(out_bytes=0)  # type: ignore[assignment]
        self._gather_s, self._gather_until = GATHER_S, 0.0
        self._is_alarmed = False
        self.clock_s = 100.0
        self.written_at: list[float] = []

    def flush(self) -> None:
        self.written_at.append(self.clock_s)
        self.connection.out_bytes = 0

    def wake(self) -> None:
        self._is_alarmed = True

    def publish(self, size: int, *, every_s: float, times: int) -> None:
        for _ in range(times):
            self.connection.out_bytes += size
            self.flush_soon()
            self.clock_s += every_s

    def pauses(self) -> list[float]:
        return [after - before for before, after in zip(self.written_at, self.written_at[1:], strict=False)]


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Gathering:
    link = Gathering()
    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: link.clock_s))
    return link


def test_messages_with_time_between_them_are_written_at_once(link: Gathering) -> None:
    link.publish(10 * MUCH_BYTES, every_s=LINGER_S * 1.01, times=20)
    assert len(link.written_at) == 20
    assert not link._is_alarmed


def test_a_small_stream_is_written_in_short_turns(link: Gathering) -> None:
    link.publish(MUCH_BYTES // 100, every_s=GATHER_S / 10, times=1000)
    assert max(link.pauses()) < 1.2 * GATHER_S
    assert link._is_alarmed  # what is written last by nobody is left to the connection's thread


def test_a_broad_stream_is_written_in_turns_that_grow_and_never_past_the_bound(link: Gathering) -> None:
    link.publish(MUCH_BYTES // 10, every_s=GATHER_S / 20, times=4000)
    assert link.pauses()[0] < link.pauses()[1] < link.pauses()[2]
    assert LINGER_S <= max(link.pauses()) < 1.1 * LINGER_S
    link.publish(1, every_s=GATHER_S / 10, times=400)
    assert max(link.pauses()[-5:]) < 1.2 * GATHER_S
