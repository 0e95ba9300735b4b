"""Asking a server again, on Spark's drivers and executors; the clock moves while somebody sleeps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("pyspark")

from jetspark.errors import (
    ConfigError,
    ConnectionClosed,
    ConnectionLost,
    JetSparkError,
    NoServersAvailable,
    RequestTimeout,
    ServerError,
)
from jetspark.spark import connections
from jetspark.spark.connections import FIRST_CONTACT_S, patiently
from jetspark.spark.options import Connecting
from jetspark.spark.stream import sink
from jetspark.spark.stream.sink import PartWritten, SinkOptions
from jetspark.spark.tasks import TaskId

OPTIONS = Connecting(servers=("nats://a",))


class Clock:
    """Time that passes while one sleeps, and connections: each is the number of those before it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.connections = 0.0, 0
        monkeypatch.setattr(connections, "time", self)
        monkeypatch.setattr(connections, "jetstream_for", self._connect)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def _connect(self, options: Any) -> Any:
        self.connections += 1
        return self.connections


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def _raising(error: Exception) -> Callable[[Any], None]:
    def ask(js: Any) -> None:
        raise error

    return ask


def test_patience_outlasts_a_server_that_is_away_and_ends_in_time(clock: Clock) -> None:
    waits: list[JetSparkError] = []

    def answer(js: Any) -> str:
        if clock.now < 5:
            raise ConnectionLost("gone")
        return "here"

    assert patiently(OPTIONS, answer, patience_s=10, on_wait=waits.append) == "here"
    assert len(waits) > 3
    with pytest.raises(RequestTimeout):
        patiently(OPTIONS, _raising(RequestTimeout("info", 1.0)), patience_s=10)
    assert clock.now <= 16


def test_patience_asks_less_and_less_often_and_a_last_time_at_its_end(clock: Clock) -> None:
    asked: list[float] = []

    def ask(js: Any) -> None:
        asked.append(round(clock.now, 2))
        raise ConnectionLost("gone")

    with pytest.raises(ConnectionLost):
        patiently(OPTIONS, ask, patience_s=4.3)
    assert asked == [0, 0.05, 0.15, 0.35, 0.75, 1.55, 2.55, 3.55, 4.3]


def test_patience_is_for_what_passes_only(clock: Clock) -> None:
    for error in (ServerError(400, 10025, "bad request"), ConfigError("no")):
        with pytest.raises(type(error)):
            patiently(OPTIONS, _raising(error), patience_s=10)
    assert clock.now == 0


def test_a_closed_connection_passes_because_the_next_attempt_has_another(clock: Clock) -> None:
    def ask(js: Any) -> int:
        if js < 3:
            raise ConnectionClosed("closed for good")
        return int(js)

    assert patiently(OPTIONS, ask, patience_s=10) == 3


def test_where_nothing_ever_listened_it_is_given_up_soon(clock: Clock) -> None:
    nobody = _raising(NoServersAvailable({"a": "refused"}))
    with pytest.raises(NoServersAvailable) as caught:
        patiently(OPTIONS, nobody, patience_s=30, is_first_contact=True)
    assert clock.now == pytest.approx(FIRST_CONTACT_S)
    assert caught.value.__cause__ is None
    with pytest.raises(NoServersAvailable):
        patiently(OPTIONS, nobody, patience_s=30)
    assert clock.now == pytest.approx(FIRST_CONTACT_S + 30)


class _Context:
    """As much of a JetStream context as a ledger needs; of the first one the connection is closed."""

    def __init__(self, number: int, stored: dict[str, bytes]) -> None:
        self._number, self._stored = number, stored

    def kv(self, bucket: str) -> Any:
        return self

    def put(self, key: str, value: bytes) -> int:
        if self._number == 1:
            raise ConnectionClosed("closed for good")
        self._stored[key] = value
        return 1


def test_a_sink_notes_its_batch_over_another_connection_when_one_was_closed(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored: dict[str, bytes] = {}

    def connect(options: Any) -> _Context:
        clock.connections += 1
        return _Context(clock.connections, stored)

    monkeypatch.setattr(connections, "jetstream_for", connect)
    monkeypatch.setattr(sink, "jetstream_for", connect, raising=False)
    options = SinkOptions(servers=("nats://a",), subject="s")
    sink._commit(options, [PartWritten(TaskId("query", 3, 0), 5)])
    assert list(stored) == ["query.committed"]
