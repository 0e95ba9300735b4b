"""How a range is asked for, and when it is proven to be read: procedures without a server."""

from __future__ import annotations

from jetspark.core.message import CoreMessage
from jetspark.jetstream.pull import Ask, Puller, Wait
from jetspark.state.scan import REQUEST_MESSAGES, SILENCE_S, Sweep

# ---- asking --------------------------------------------------------------------------------------------------------


def sweep(left: int) -> Sweep:
    return Sweep(Puller("_INBOX.x", "$JS.API.CONSUMER.MSG.NEXT.S.c"), left)


def asked(machine: Sweep, now: float = 0.0) -> list[bytes]:
    bodies = []
    while isinstance(step := machine.step(now, 1), Ask):
        bodies.append(step.body)
    assert isinstance(step, Wait)
    return bodies


def test_two_requests_are_out_ahead_of_the_reader() -> None:
    bodies = asked(sweep(999_999))
    assert len(bodies) == 2
    assert all(f'"batch":{REQUEST_MESSAGES},'.encode() in body for body in bodies)


def test_no_more_is_asked_for_than_is_expected() -> None:
    [body] = asked(sweep(11))
    assert b'"batch":11,' in body


def test_the_wait_is_bounded_by_the_silence_after_which_the_leader_is_asked() -> None:
    machine = sweep(4)
    asked(machine)
    assert machine.step(10.0, 1) == Wait(10.0 + SILENCE_S)


def test_nothing_is_asked_while_there_is_no_connection() -> None:
    assert sweep(4).step(0.0, None) == Wait(SILENCE_S)


def test_a_message_larger_than_a_request_is_asked_for_alone_and_without_a_bound() -> None:
    machine = sweep(2)
    asked(machine)
    refusal = b"NATS/1.0 409 Message Size Exceeds MaxBytes\r\nNats-Pending-Messages: 2\r\nNats-Pending-Bytes: 0\r\n\r\n"
    machine._puller.absorb([CoreMessage("_INBOX.x.1", b"", None, refusal, None)], 1.0)  # type: ignore[list-item]
    first, *_ = asked(machine, 1.0)
    assert b'"batch":1,' in first
    assert b"max_bytes" not in first
