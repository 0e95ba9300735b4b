"""Closing and draining, step by step, without anybody who waits."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.readers import SilentReader

from jetspark.core.connection import Connection, Failed
from jetspark.core.lifecycle import (
    INTERRUPTED_S,
    AwaitAcks,
    ClosingStep,
    Confirm,
    Ending,
    ReadUp,
    close,
    drain,
    leaving_s,
    lost,
)
from jetspark.core.options import ConnectOptions
from jetspark.core.reconnect import Server
from jetspark.errors import (
    AuthenticationFailed,
    BufferFull,
    ConnectionLost,
    JetSparkError,
    NoServersAvailable,
    PermissionDenied,
    RequestTimeout,
    UsageError,
)

A = Server("a", 4222)


def connected(publishes: int = 0) -> Connection:
    machine = Connection(ConnectOptions(), [A], inbox="_INBOX.me", jitter=lambda: 0.0)
    machine.begin(A)
    machine.receive_data(b"INFO %b\r\n" % json.dumps({"max_payload": 1024}).encode())
    machine.login(None)
    machine.data_to_send()
    machine.receive_data(b"PONG\r\n")
    for _ in range(publishes):
        machine.publish("a", b"")
    return machine


def confirm(machine: Connection) -> None:
    machine.flush(object())
    machine.data_to_send()
    machine.receive_data(b"PONG\r\n")


def run(steps: Ending, answers: dict[type, Any] | None = None) -> list[ClosingStep]:
    """What it asks for; each is answered with the value of its kind, or with an error."""
    asked: list[ClosingStep] = []
    answer: Any = None
    try:
        while True:
            step = steps.throw(answer) if isinstance(answer, Exception) else steps.send(answer)
            asked.append(step)
            answer = (answers or {}).get(type(step))
    except StopIteration:
        return asked


def failure_of(steps: Ending, answers: dict[type, Any]) -> JetSparkError:
    with pytest.raises(JetSparkError) as caught:
        run(steps, answers)
    return caught.value


# ---- close -----------------------------------------------------------------------------------------------------------


def test_a_close_has_the_server_confirm_what_was_published_before_it_waits_for_acknowledgements() -> None:
    assert run(close(connected(3))) == [Confirm(), AwaitAcks()]


def test_a_close_with_nothing_in_doubt_asks_for_no_confirmation() -> None:
    machine = connected(3)
    confirm(machine)
    assert run(close(machine)) == [AwaitAcks()]


@pytest.mark.parametrize("error", [RequestTimeout("close", 1), BufferFull(1, 1)])
def test_a_close_that_is_not_confirmed_says_how_much_is_in_doubt_and_why(error: JetSparkError) -> None:
    failure = failure_of(close(connected(3)), {Confirm: error})
    assert isinstance(failure, ConnectionLost)
    assert failure.unconfirmed_messages == 3
    assert failure.__cause__ is error


def test_what_the_server_refused_is_what_a_close_raises() -> None:
    error = PermissionDenied("publish", "a")
    assert failure_of(close(connected(2)), {Confirm: error}) is error


def test_a_session_that_ends_meanwhile_leaves_what_had_left_and_what_had_not_in_doubt() -> None:
    machine = connected(2)
    machine.data_to_send()
    machine.publish("a", b"stays here")
    steps = close(machine)
    assert next(steps) == Confirm()
    machine.flush(handle := object())
    machine.end("gone")
    [error] = [event.error for event in machine.events() if isinstance(event, Failed) and event.handle is handle]
    assert steps.throw(error) == AwaitAcks()
    with pytest.raises(ConnectionLost, match="closed before the server confirmed: gone") as caught:
        next(steps)
    assert caught.value.unconfirmed_messages == 3


@pytest.mark.parametrize("error", [None, AuthenticationFailed("nats://a", "no"), NoServersAvailable({"a": "refused"})])
def test_a_connection_that_has_ended_says_why_and_waits_for_nothing_else(error: JetSparkError | None) -> None:
    machine = connected(3)
    machine.close(error)
    with pytest.raises(JetSparkError) as refused:
        machine.flush(object())
    steps = close(machine)
    assert next(steps) == Confirm()
    with pytest.raises(ConnectionLost) as caught:
        steps.throw(refused.value)
    assert caught.value.unconfirmed_messages == 3
    assert str(error or "") in str(caught.value)


def test_a_connection_that_has_ended_with_nothing_in_doubt_has_nothing_to_tell() -> None:
    machine = connected(3)
    confirm(machine)
    machine.close(NoServersAvailable({"a": "refused"}))
    assert run(close(machine)) == []


def test_the_messages_of_another_process_are_not_in_doubt_here() -> None:
    machine = connected(3)
    machine.disown(UsageError("forked"))
    assert machine.is_closed
    assert machine.events() == []
    assert run(close(machine)) == []


def test_what_is_confirmed_just_before_the_connection_ends_is_not_in_doubt() -> None:
    machine = connected(3)
    steps = close(machine)
    assert next(steps) == Confirm()
    confirm(machine)
    assert steps.throw(ConnectionLost("gone")) == AwaitAcks()
    assert list(steps) == []


def test_a_wrong_call_is_not_taken_for_a_lost_connection() -> None:
    error = UsageError("another event loop")
    assert failure_of(close(connected(2)), {Confirm: error}) is error


def test_a_close_waits_for_acknowledgements_also_when_the_confirmation_failed() -> None:
    steps = close(connected(1))
    assert next(steps) == Confirm()
    assert steps.throw(PermissionDenied("publish", "a")) == AwaitAcks()


# ---- drain -----------------------------------------------------------------------------------------------------------


def test_a_drain_lets_the_readers_finish_and_then_closes() -> None:
    machine = connected(1)
    subscriptions = [machine.subscribe("a", reader=SilentReader()) for _ in range(2)]
    assert run(drain(machine, 5.0), {ReadUp: True}) == [ReadUp(subscriptions), Confirm(), AwaitAcks()]


def test_a_drain_leaves_inboxes_and_subscriptions_without_a_reader_alone() -> None:
    machine = connected()
    machine.subscribe("a")
    machine.subscribe("b", reader=SilentReader(), is_inbox=True)
    assert run(drain(machine, 5.0), {ReadUp: True}) == [ReadUp([]), AwaitAcks()]


def test_readers_that_do_not_finish_are_told_after_everything_is_confirmed() -> None:
    machine = connected(1)
    machine.subscribe("a", reader=SilentReader(3))
    machine.subscribe("b", reader=SilentReader(4))
    asked = drain(machine, 5.0)
    assert isinstance(asked.send(None), ReadUp)
    assert asked.send(False) == Confirm()
    assert asked.send(None) == AwaitAcks()
    with pytest.raises(RequestTimeout, match="drain, 7 messages unread") as caught:
        asked.send(None)
    assert caught.value.timeout_s == 5.0
    assert "in doubt" not in str(caught.value)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_drain_that_is_not_confirmed_in_time_says_what_is_unread_and_in_doubt(is_read: bool) -> None:
    machine = connected(2)
    machine.subscribe("a", reader=SilentReader(3))
    failure = failure_of(drain(machine, 5.0), {ReadUp: is_read, Confirm: RequestTimeout("close", 1)})
    assert isinstance(failure, RequestTimeout)
    assert failure.timeout_s == 5.0
    assert "drain, 3 messages unread, 2 messages in doubt" in str(failure)


def test_a_drain_that_cannot_be_confirmed_says_how_much_is_in_doubt() -> None:
    failure = failure_of(drain(connected(3), 5.0), {ReadUp: True, Confirm: BufferFull(1, 1)})
    assert isinstance(failure, ConnectionLost)
    assert failure.unconfirmed_messages == 3


def again(machine: Connection) -> None:
    """Another session, after the one that has ended."""
    machine.begin(A)
    machine.receive_data(b"INFO {}\r\n")
    machine.login(None)
    machine.data_to_send()
    machine.receive_data(b"PONG\r\n")


def test_a_message_that_is_lost_while_readers_finish_is_told_at_the_end_of_the_drain() -> None:
    machine = connected()
    steps = drain(machine, 5.0)
    assert next(steps) == ReadUp([])
    machine.publish("a", b"of a reader")
    machine.data_to_send()
    machine.end("gone")
    again(machine)
    assert steps.send(True) == AwaitAcks()
    with pytest.raises(ConnectionLost, match="the session ended during the drain") as caught:
        next(steps)
    assert caught.value.unconfirmed_messages == 1


def test_messages_that_were_lost_before_a_drain_are_not_told_by_it() -> None:
    machine = connected(3)
    machine.data_to_send()
    machine.end("gone")
    again(machine)
    assert run(drain(machine, 5.0), {ReadUp: True}) == [ReadUp([]), AwaitAcks()]


def test_what_is_lost_counts_messages_that_never_left() -> None:
    assert lost(connected(4)).unconfirmed_messages == 4


# ---- leaving a block -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_who_is_interrupted_leaves_soon(kind: type[BaseException]) -> None:
    assert leaving_s(ConnectOptions(), kind) == INTERRUPTED_S < ConnectOptions().drain_timeout_s
    assert leaving_s(ConnectOptions(drain_timeout_s=0.1), kind) == 0.1


@pytest.mark.parametrize("kind", [None, ValueError, RequestTimeout, GeneratorExit])
def test_who_leaves_in_any_other_way_has_the_time_of_a_drain(kind: type[BaseException] | None) -> None:
    assert leaving_s(ConnectOptions(drain_timeout_s=60), kind) == 60
