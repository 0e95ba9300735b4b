"""Who is told what happens to a connection."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from support.readers import SilentReader

from jetspark.core.connection import Done, Failed, Ready
from jetspark.core.dispatcher import Dispatcher
from jetspark.core.events import Closed, Connected, ConnectionEvent, Disconnected, ErrorReported
from jetspark.core.subscription import SubscriptionState
from jetspark.errors import ConnectionLost

LOGGER = logging.getLogger("jetspark.test")


class Told:
    """Remembers what it is told, under its name."""

    def __init__(self, name: str, log: list[Any], error: Exception | None = None) -> None:
        self._name, self._log, self._error = name, log, error

    def on_event(self, event: ConnectionEvent) -> None:
        self._log.append((self._name, event))
        if self._error is not None:
            raise self._error

    def next_deadline(self) -> float | None:
        return None

    def on_time(self, now: float) -> None:
        raise AssertionError("time is the driver's to tell")


class Waiting:
    def __init__(self, *, is_done: bool = False) -> None:
        self.is_done = is_done
        self.outcome: Any = None

    def done(self) -> bool:
        return self.is_done

    def set_result(self, result: Any) -> None:
        self.outcome = result

    def set_exception(self, error: Exception) -> None:
        self.outcome = error


class Due(Told):
    def __init__(self, deadline: float | None) -> None:
        super().__init__("due", [])
        self._deadline = deadline

    def next_deadline(self) -> float | None:
        return self._deadline


def test_the_nearest_deadline_counts_and_those_whose_time_has_come_are_due() -> None:
    dispatcher = Dispatcher(LOGGER, None)
    assert dispatcher.next_deadline() is None
    late, never, soon = Due(9.0), Due(None), Due(3.0)
    for attached in (late, never, soon):
        dispatcher.attach(attached)
    assert dispatcher.next_deadline() == 3.0
    assert dispatcher.due(2.9) == []
    assert dispatcher.due(3.0) == [soon]
    assert dispatcher.due(9.0) == [late, soon]
    dispatcher.detach(soon)
    assert dispatcher.next_deadline() == 9.0


def test_what_is_attached_is_told_before_the_program_until_it_is_detached() -> None:
    log: list[Any] = []
    dispatcher = Dispatcher(LOGGER, lambda event: log.append(("program", event)))
    first, second = Told("first", log), Told("second", log)
    for attached in (first, second, first):  # twice is once
        dispatcher.attach(attached)
    dispatcher.deliver([Connected("a")])
    assert log == [("first", Connected("a")), ("second", Connected("a")), ("program", Connected("a"))]
    log.clear()
    for _ in range(2):  # an interrupted thread may do it again
        dispatcher.detach(first)
    dispatcher.report(error := ConnectionLost("gone"))
    assert log == [("second", ErrorReported(error)), ("program", ErrorReported(error))]


def test_an_attached_mistake_is_reported_and_keeps_nothing_from_the_others(caplog: pytest.LogCaptureFixture) -> None:
    log: list[Any] = []
    dispatcher = Dispatcher(LOGGER, lambda event: log.append(("program", event)))
    mistake = AssertionError("a mistake")
    dispatcher.attach(Told("broken", log, mistake))
    dispatcher.attach(Told("good", log))
    dispatcher.deliver([Connected("a")])
    assert [name for name, _ in log] == ["broken", "program", "good", "program"]
    assert log[1] == ("program", ErrorReported(mistake))
    assert "a mistake" in caplog.text


def test_who_waits_for_an_answer_gets_it_unless_it_is_gone() -> None:
    dispatcher = Dispatcher(LOGGER, None)
    answered, failed, gone = Waiting(), Waiting(), Waiting(is_done=True)
    error = ConnectionLost("gone")
    dispatcher.deliver([Done(answered, 1), Failed(failed, error), Done(gone, 2), Failed(gone, error)])
    assert (answered.outcome, failed.outcome, gone.outcome) == (1, error, None)


def test_a_readers_mistake_is_reported_and_the_others_are_woken(caplog: pytest.LogCaptureFixture) -> None:
    events: list[ConnectionEvent] = []
    woken: list[str] = []

    class Broken(SilentReader):
        def wake(self) -> None:
            raise AssertionError("a mistake")

    class Good(SilentReader):
        def wake(self) -> None:
            woken.append("good")

    def subscription(reader: SilentReader | None) -> Ready:
        state = SubscriptionState(1, "a", "", max_pending_messages=1, max_pending_bytes=1, reader=reader)
        return Ready(state)

    dispatcher = Dispatcher(LOGGER, events.append)
    dispatcher.deliver([subscription(Broken()), subscription(None), subscription(Good())])
    assert woken == ["good"]
    assert [str(event.error) for event in events if isinstance(event, ErrorReported)] == ["a mistake"]


def test_a_program_that_raises_is_logged_and_told_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    told: list[ConnectionEvent] = []

    def on_event(event: ConnectionEvent) -> None:
        told.append(event)
        raise ValueError("a mistake of the program's")

    Dispatcher(LOGGER, on_event).deliver([Connected("a"), Disconnected("a", "gone", 0, 0, 0)])
    assert len(told) == 2
    assert caplog.text.count("on_event raised") == 2


def test_the_end_is_logged_only_of_a_connection_that_there_was(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, LOGGER.name)
    Dispatcher(LOGGER, None).deliver([Closed(ConnectionLost("nobody there"))])
    assert caplog.records == []
    Dispatcher(LOGGER, None).deliver([Connected("a"), Closed(ConnectionLost("gone"))])
    assert len(caplog.records) == 2
