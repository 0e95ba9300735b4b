"""The connection machine in a world of its own: a model server, a network that cuts anywhere, no real time.

A run is a seed. The workload publishes numbered messages and flushes; the faults cut the connection between any two
bytes, in either direction, and make dialling fail; the checkers look only at what came out. Seeds are those of
:mod:`support.seeds`; run one again, and the same happens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import seeds

from jetspark.core.connection import Connection, Done, Failed, Ready
from jetspark.core.events import Disconnected
from jetspark.core.lifecycle import Converse, Dial, Hangup, establish
from jetspark.core.options import ConnectOptions
from jetspark.core.reconnect import parse_servers
from jetspark.core.step_runner import Sleep
from jetspark.errors import ConnectionLost

SEEDS = range(150)
FRESH_SEEDS = 10
STEPS = 600


class ModelServer:
    """What nats-server does for one client at a time: routes, counts, answers pings. Remembers what it processed."""

    def __init__(self) -> None:
        self.processed: list[int] = []
        self.violations: list[str] = []
        self.begin()

    def begin(self) -> None:
        self._buffer = b""
        self._subscriptions: dict[int, list[int]] = {}
        """Subscription id to [messages sent, limit]; a limit of 0 is none."""
        self.out = b'INFO {"server_id":"model","max_payload":1000}\r\n'

    def receive(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n")) >= 0:
            words = self._buffer[:end].split()
            if words[0] == b"PUB":
                size = int(words[-1])
                if len(self._buffer) < end + 2 + size + 2:
                    return
                payload = self._buffer[end + 2 : end + 2 + size]
                self._buffer = self._buffer[end + 2 + size + 2 :]
                self._publish(payload)
                continue
            self._buffer = self._buffer[end + 2 :]
            if words[0] == b"PING":
                self.out += b"PONG\r\n"
            elif words[0] == b"SUB":
                if int(words[-1]) in self._subscriptions:
                    self.violations.append(f"subscribed twice: {words}")
                self._subscriptions[int(words[-1])] = [0, 0]
            elif words[0] == b"UNSUB":
                self._unsubscribe(int(words[1]), int(words[2]) if len(words) > 2 else 0)
            elif words[0] not in (b"CONNECT", b"PONG"):
                self.violations.append(f"not the protocol: {words}")

    def _unsubscribe(self, sid: int, limit: int) -> None:
        if sid in self._subscriptions:
            self._subscriptions[sid][1] = limit
            if not limit or self._subscriptions[sid][0] >= limit:
                del self._subscriptions[sid]

    def _publish(self, payload: bytes) -> None:
        self.processed.append(int(payload))
        for sid in list(self._subscriptions):
            self.out += b"MSG numbers %d %d\r\n%b\r\n" % (sid, len(payload), payload)
            self._subscriptions[sid][0] += 1
            if self._subscriptions[sid][0] == self._subscriptions[sid][1]:
                del self._subscriptions[sid]


class World:
    """A client, a server, a wire between them, and a random generator."""

    def __init__(self, seed: int, connection: type[Connection] = Connection) -> None:
        self.rng = random.Random(seed)
        self.server = ModelServer()
        self.untrue: list[str] = []
        """What was confirmed or resolved and should not have been."""
        options = ConnectOptions(reconnect_wait_s=0.1, send_buffer_bytes=1 << 20)
        self.client = connection(options, parse_servers("a,b"), inbox="_INBOX.me", jitter=self.rng.random)
        self.is_wired = False
        self.to_server = b""
        self.faults_allowed = True
        self.is_working = True
        self.published = 0
        self.events: list[Any] = []
        self.flushes: dict[int, int] = {}
        """Flush number to the messages published before it."""
        self.resolved: dict[int, Exception | None] = {}
        self._life = self._live()
        self.subscription = self.client.subscribe("numbers")
        self.limited = self.client.subscribe("numbers")
        self.client.unsubscribe(self.limited, 20)

    def step(self) -> None:
        """One thing happens, somewhere."""
        action = self.rng.choice(["publish", "publish", "flush", "wire", "wire", "wire", "wire", "live", "live", "cut"])
        if action == "publish" and self.is_working:
            self.client.publish("numbers", b"%d" % self.published)
            self.published += 1
        elif action == "flush" and self.is_working and len(self.flushes) - len(self.resolved) < 4:
            number = len(self.flushes)
            self.flushes[number] = self.published
            self.client.flush(number)
        elif action == "wire":
            self.move_bytes()
        elif action == "live":
            next(self._life)
        elif action == "cut" and self.faults_allowed and self.rng.random() < 0.3:
            self.cut()
        self.note_events()

    def move_bytes(self) -> None:
        """Some bytes, any number of them, get across in each direction."""
        if not self.is_wired:
            return
        self.to_server += self.client.data_to_send()
        amount = self.rng.randint(0, len(self.to_server))
        self.server.receive(self.to_server[:amount])
        self.to_server = self.to_server[amount:]
        amount = self.rng.randint(0, len(self.server.out))
        data, self.server.out = self.server.out[:amount], self.server.out[amount:]
        self.client.receive_data(data)

    def cut(self) -> None:
        """Whatever is on the wire is gone, in both directions; the client learns of it now."""
        self.is_wired = False
        self.to_server = b""
        if self.client.is_connected:
            self.client.end("cut")

    def note_events(self) -> None:
        for event in self.client.events():
            if isinstance(event, Done | Failed):
                if event.handle in self.resolved:
                    self.untrue.append(f"flush {event.handle} was resolved twice")
                error = event.error if isinstance(event, Failed) else None
                self.resolved[event.handle] = error
                if error is None:
                    self.check_confirmed(event.handle)
            elif not isinstance(event, Ready):
                self.events.append(event)

    def check_confirmed(self, flush: int) -> None:
        """A flush that succeeded spoke the truth: all before it was processed, or an event had told of the doubt."""
        missing = set(range(self.flushes[flush])) - set(self.server.processed) - self.in_doubt()
        if missing:
            self.untrue.append(f"flush {flush} was confirmed without {sorted(missing)}")

    def in_doubt(self) -> set[int]:
        numbers: set[int] = set()
        for event in self.events:
            if isinstance(event, Disconnected):
                end = event.published_messages - event.buffered_messages
                numbers.update(range(end - event.unconfirmed_messages, end))
        return numbers

    def _live(self) -> Iterator[None]:
        """What a driver does: establish a session, wait until it is gone, again."""
        is_first = True
        while True:
            if self.client.is_connected:
                yield
                continue
            steps = establish(self.client, None, None, is_first=is_first)
            problem: Exception | None = None
            while True:
                try:
                    step = next(steps) if problem is None else steps.throw(problem)
                except StopIteration:
                    is_first = False
                    break
                except ConnectionLost:
                    break  # the first attempts all failed: the user would call connect again
                problem = None
                if isinstance(step, Dial):
                    if self.faults_allowed and self.rng.random() < 0.3:
                        problem = ConnectionRefusedError("refused")
                    else:
                        self.server.begin()
                        self.is_wired, self.to_server = True, b""
                elif isinstance(step, Converse):
                    while self.is_wired and not step.is_done():
                        yield
                    if not self.is_wired:
                        problem = ConnectionLost("cut")
                else:
                    assert isinstance(step, Sleep | Hangup)
                    self.is_wired = self.is_wired and not isinstance(step, Hangup)
                yield


# ---- checkers --------------------------------------------------------------------------------------------------------


def the_protocol_is_kept(world: World) -> None:
    assert world.server.violations == []


def nothing_is_lost_doubled_or_reordered_without_a_word(world: World) -> None:
    processed = world.server.processed
    assert processed == sorted(set(processed)), "duplicated or reordered"
    assert set(range(world.published)) - set(processed) <= world.in_doubt(), "lost without a word"


def confirmations_are_true(world: World) -> None:
    assert world.untrue == []
    # Once faults stop, nothing is in doubt that is not old.
    assert (world.client.unconfirmed_messages, world.resolved[len(world.flushes) - 1]) == (0, None)
    for error in world.resolved.values():
        assert error is None or (isinstance(error, ConnectionLost) and error.unconfirmed_messages > 0)


def what_is_delivered_is_delivered_once_and_in_order(world: World) -> None:
    received = [int(message.data) for message in world.subscription.pending]
    assert received == sorted(set(received)), "delivered twice or out of order"
    assert set(received) <= set(world.server.processed)
    assert len(world.limited.pending) == world.limited.received <= 20


CHECKERS: list[Callable[[World], None]] = [
    the_protocol_is_kept,
    nothing_is_lost_doubled_or_reordered_without_a_word,
    confirmations_are_true,
    what_is_delivered_is_delivered_once_and_in_order,
]


def live(seed: int, connection: type[Connection] = Connection, *, max_steps: int = 100_000) -> World:
    """A whole course of events: faults, then calm and a last flush. A machine that gets nowhere ends it, too."""
    world = World(seed, connection)
    for _ in range(STEPS):
        world.step()
    world.faults_allowed = world.is_working = False
    steps = iter(range(max_steps))
    while (len(world.resolved) < len(world.flushes) or not world.client.is_connected) and next(steps, None) is not None:
        world.step()
    last = len(world.flushes)
    world.flushes[last] = world.published
    world.client.flush(last)
    while last not in world.resolved and next(steps, None) is not None:
        world.step()
    return world


def judge(seed: int) -> None:
    try:
        world = live(seed)
        for check in CHECKERS:
            check(world)
    except BaseException as error:
        error.add_note(f"again: {seeds.again(seed)} .venv/bin/python -m pytest tests/simulation/test_sessions.py")
        raise


@pytest.mark.parametrize("seed", seeds.given() or SEEDS)
def test_nothing_is_lost_duplicated_or_reordered_without_a_word(seed: int) -> None:
    judge(seed)


def test_it_holds_for_seeds_nobody_has_tried() -> None:
    for seed in seeds.fresh(FRESH_SEEDS):
        judge(seed)


def test_the_faults_do_happen() -> None:
    """A simulation without losses and reconnects would prove nothing."""
    losses = reconnects = limited = 0
    for seed in SEEDS[:30]:
        world = World(seed)
        for _ in range(STEPS):
            world.step()
        losses += len(world.in_doubt() - set(world.server.processed))
        reconnects += sum(isinstance(event, Disconnected) for event in world.events)
        limited += world.limited.is_finished
    assert losses > 30
    assert reconnects > 60
    assert limited > 5
