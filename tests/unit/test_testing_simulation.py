"""A connection kept connected in virtual time, and the faults that keep it busy."""

from __future__ import annotations

import random
from typing import Any

from support.readers import SilentReader

from jetspark import StreamConfig
from jetspark.core.events import Connected, ConnectionEvent, Disconnected, Reconnected
from jetspark.core.options import ConnectOptions
from jetspark.testing import ModelServer
from jetspark.testing.network import Front, Network, VirtualClock
from jetspark.testing.simulation import FaultPlan, Faults, SimulatedTransport


def make(seed: int = 1, *, max_in_flight_bytes: int = 1 << 20) -> Network:
    model = ModelServer()
    model.create_stream(StreamConfig(name="S", subjects=["s.>"], replicas=3))
    return Network(Front(model, VirtualClock()), random.Random(seed), max_in_flight_bytes=max_in_flight_bytes)


def opened(network: Network, **options: Any) -> tuple[SimulatedTransport, list[ConnectionEvent]]:
    transport = SimulatedTransport(network, name="me", options=ConnectOptions(**options))
    events: list[ConnectionEvent] = []
    transport.listeners.append(events.append)
    transport.open()
    return transport, events


def test_a_link_connects_and_connects_again() -> None:
    network = make()
    transport, events = opened(network)
    network.clock.run(network.clock.now + 1.0)
    assert [type(event) for event in events] == [Connected]
    network.cut()
    network.clock.run(network.clock.now + 5.0)
    assert [type(event) for event in events] == [Connected, Disconnected, Reconnected]
    assert transport.machine.is_connected


def test_a_first_attempt_that_fails_is_made_again() -> None:
    network = make()
    network.refuse(3.0)
    transport, _ = opened(network)
    network.clock.run(network.clock.now + 2.9)
    assert not transport.machine.is_connected
    network.clock.run(network.clock.now + 1.0)
    assert transport.machine.is_connected


def test_messages_answers_and_requests_reach_their_handles() -> None:
    network = make()
    transport, _ = opened(network)
    woken: list[int] = []
    answers: list[tuple[Any, Exception | None]] = []
    reader = SilentReader()
    subscription = transport.machine.subscribe("x", reader=reader)
    reader.wake = lambda: woken.append(len(subscription.pending))  # type: ignore[method-assign]
    network.clock.run(network.clock.now + 1.0)
    transport.machine.publish("x", b"1")
    transport.machine.request(lambda result, error: answers.append((result, error)), "s.a", b"", None)
    transport.machine.flush(lambda result, error: answers.append((result, error)))
    transport.schedule_flush()
    network.clock.run(network.clock.now + 1.0)
    assert woken == [1]
    assert answers[0][0].data == b'{"stream":"S","seq":1}'
    assert answers[1] == (None, None)


def test_a_server_that_does_not_answer_is_given_up_and_sought_again() -> None:
    network = make()
    transport, events = opened(network, ping_interval_s=1.0)
    network.clock.run(network.clock.now + 0.5)
    network.front.close_all()  # without a word to the client
    network.clock.run(network.clock.now + 10.0)
    assert [type(event) for event in events] == [Connected, Disconnected, Reconnected]
    assert transport.machine.is_connected


def test_a_full_wire_holds_back_what_is_sent_until_there_is_room() -> None:
    network = make(max_in_flight_bytes=100)
    transport, _ = opened(network)
    network.clock.run(network.clock.now + 1.0)
    woken: list[float] = []
    for _ in range(2):
        transport.machine.publish("s.a", b"x" * 200)
        transport.flush()
    transport.call_when_there_is_room(lambda: woken.append(network.clock.now))
    assert transport.machine.out_bytes > 200
    network.clock.run(network.clock.now + 1.0)
    assert transport.machine.out_bytes == 0
    assert woken
    assert network.front.model.last_sequence("S") == 2


def test_a_closed_link_stays_closed() -> None:
    network = make()
    transport, _ = opened(network)
    network.clock.run(network.clock.now + 1.0)
    transport.close()
    network.clock.run(network.clock.now + 5.0)
    assert network.front.sessions == 0
    transport.open()
    network.clock.run(network.clock.now + 5.0)
    assert network.front.sessions == 0


def test_faults_are_drawn_from_the_die_and_are_over_when_they_say() -> None:
    plan = FaultPlan(kinds=("cut", "cut all", "refuse", "kill", "leader"), every_s=0.5, for_s=10.0, per_write=0.1)
    courses = []
    for _ in range(2):
        network = make(7)
        transport, _ = opened(network)
        faults = Faults(network, network.rng, plan, stream="S")
        began = network.clock.now
        network.clock.run(faults.over_at)
        assert network.is_reachable
        network.clock.run(network.clock.now + 10.0)
        assert transport.machine.is_connected
        assert {kind for _, kind, _ in faults.happened} == set(plan.kinds)
        assert all(when <= began + plan.for_s for when, _, _ in faults.happened)
        courses.append(faults.happened)
    assert courses[0] == courses[1]
