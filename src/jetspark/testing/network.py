"""A network in virtual time: a clock that jumps, wires that break, and a front that speaks NATS for the model server.

Nothing here sleeps, and only the given rng is random, so a run is a function of its seed.

The clock holds future events, ordered by time and then by arrival, and is moved by its owner. A wire is one
transport between a client and the front, two directions of bytes::

    client ──write()──> [in flight: in order, each chunk with a delay of its own] ──> front
    client <── on_data() ────────────────── [in flight] <──────────────────────────── front

    up ──cut()──> cut: a part of the bytes in flight still arrives, ending anywhere; the rest, and all later writes, are
                  lost; the client and the front learn of it later, each at its own time

A wire accepts at most ``max_in_flight_bytes`` from a client, as a socket does: then ``is_full``, until ``on_room`` is
called.

The front handles sessions and subscriptions; the model handles publishes. Messages reach the model in the order in
which their last byte arrives, at once or, with ``service_s``, one after the other at the pace of a server that needs
that time for each. Core subscribers count as interest: they get the message, and its sender gets no 503.

The front is a cluster of ``NODES`` servers. Each session is connected to one of them, in turn. That matters only while
a stream's leader is on the far side of a partition::

    whole ──cut_off_node()──> parted: the model continues without that node; a fork of it, with the old leader, which is
       ^                        │     alone and unaware of it, serves the sessions of that node
       └──────join()────────────┘
"""

from __future__ import annotations

import heapq
import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from jetspark.core import frames
from jetspark.core.headers import Headers, decode, encode
from jetspark.core.subjects import matches
from jetspark.testing.model import Delivery, ModelServer

__all__ = ["Front", "Network", "NetworkTimer", "Publication", "VirtualClock", "Wire"]

# Number of servers in the cluster: the usual number of replicas of a replicated stream.
NODES = 3

# Real monotonic clocks never show zero, so code under test need not handle it.
BEGINNING = 1000.0


class NetworkTimer:
    """A scheduled event; after ``cancel`` it does not happen."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self._call = None

    @property
    def is_pending(self) -> bool:
        return self._call is not None


class VirtualClock:
    """Virtual time, in seconds, and its scheduled events."""

    def __init__(self, now: float = BEGINNING) -> None:
        self.now = now
        self._queue: list[tuple[float, int, NetworkTimer]] = []
        self._last = 0

    @property
    def has_more(self) -> bool:
        """True if an event is scheduled."""
        while self._queue and not self._queue[0][2].is_pending:
            heapq.heappop(self._queue)
        return bool(self._queue)

    @property
    def next_at(self) -> float:
        """The time of the next event; only while ``has_more``."""
        return self._queue[0][0]

    def at(self, when: float, call: Callable[[], None]) -> NetworkTimer:
        """Schedule ``call``; for a past time it runs now, after all events that are due already."""
        timer, now = NetworkTimer(call), self.now
        self._last += 1
        heapq.heappush(self._queue, (when if when > now else now, self._last, timer))
        return timer

    def after(self, seconds: float, call: Callable[[], None]) -> NetworkTimer:
        return self.at(self.now + seconds, call)

    def step(self, until: float) -> bool:
        """Run the next event due by ``until``; otherwise advance the clock to ``until`` and return False."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            when, _, timer = heapq.heappop(queue)
            call = timer._call
            if call is not None:
                timer._call = None
                self.now = when
                call()
                return True
        self.now = max(self.now, until)
        return False

    def run(self, until: float, is_done: Callable[[], bool] | None = None) -> bool:
        """Run all events until a time, or until ``is_done``; returns True if it is done."""
        if is_done is None:
            while self.step(until):
                pass
            return False
        while not is_done():
            if not self.step(until):
                return is_done()
        return True


# ---- the front -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Publication:
    """A message as it reached the server, for watchers."""

    client: int
    """The number of its session."""
    subject: str
    reply: str
    headers: Headers | None
    data: bytes


class _Subscription:
    __slots__ = ("filter", "limit", "queue", "sent", "session", "sid")

    def __init__(self, session: _PeerSession, sid: int, filter: str, queue: str = "") -> None:
        self.session, self.sid, self.filter, self.queue = session, sid, filter, queue
        self.sent = self.limit = 0
        """Number of messages delivered, and their limit; a limit of 0 is no limit."""


class _Interest:
    """All subscriptions. Whole subjects and ``a.b.>``, the form of inboxes, are found without a search."""

    def __init__(self) -> None:
        self._exact: dict[str, list[_Subscription]] = {}
        self._tails: dict[str, list[_Subscription]] = {}
        self._patterns: list[_Subscription] = []

    def _place(self, filter: str) -> list[_Subscription]:
        stem = filter.removesuffix(".>")
        if "*" in stem or ">" in stem:
            return self._patterns
        return (self._exact if stem == filter else self._tails).setdefault(stem, [])

    def add(self, entry: _Subscription) -> None:
        self._place(entry.filter).append(entry)

    def remove(self, entry: _Subscription) -> None:
        self._place(entry.filter).remove(entry)

    def find(self, subject: str) -> list[_Subscription]:
        found = list(self._exact.get(subject, ()))
        stem, dot, _ = subject.rpartition(".")
        while dot:
            found += self._tails.get(stem, ())
            stem, dot, _ = stem.rpartition(".")
        found += [each for each in self._patterns if matches(each.filter, subject)]
        return found


class _PeerSession:
    """The server's end of one connection."""

    def __init__(self, front: Front, number: int, write: Callable[[bytes], None]) -> None:
        self.number = number
        self.node = number % NODES if front.next_node is None else front.next_node
        """The server of the cluster to which it is connected."""
        front.next_node = None
        self.subscriptions: dict[int, _Subscription] = {}
        self.is_open = True
        self._front, self._write = front, write
        self._buffer = b""
        self._out: list[bytes] = []

    def receive(self, data: bytes) -> None:
        """Receive bytes, in pieces of any size."""
        if not self.is_open:
            return
        buffer, start = self._buffer + data, 0
        while self.is_open and (end := buffer.find(b"\r\n", start)) >= 0:
            line = buffer[start:end]
            body = end + 2
            verb = line[:4].upper()
            if verb in (b"PUB ", b"HPUB"):
                words = line.split()
                size = int(words[-1])
                if len(buffer) < body + size + 2:
                    break
                self._on_publish(words, buffer[body : body + size])
                start = body + size + 2
                continue
            start = body
            self._on_line(line)
        self._buffer = buffer[start:]
        self._front.flush()

    def _on_publish(self, words: list[bytes], body: bytes) -> None:
        has_headers = words[0].upper() == b"HPUB"
        addresses = words[1 : -2 if has_headers else -1]
        header_size = int(words[-2]) if has_headers else 0
        self._front.on_published(
            Publication(
                self.number,
                addresses[0].decode(),
                addresses[1].decode() if len(addresses) > 1 else "",
                decode(body[:header_size]) if has_headers else None,
                body[header_size:],
            )
        )

    def _on_line(self, line: bytes) -> None:
        verb, *words = line.split(b" ", 1) if line[:1].upper() == b"C" else line.split()
        match verb.upper():
            case b"PING":
                self.send(frames.PONG)
            case b"SUB":
                queue = words[1].decode() if len(words) > 2 else ""
                entry = _Subscription(self, int(words[-1]), words[0].decode(), queue)
                self.subscriptions[entry.sid] = entry
                self._front.interest.add(entry)
            case b"UNSUB":
                self._unsubscribe(int(words[0]), int(words[1]) if len(words) > 1 else 0)
            case b"CONNECT" | b"PONG":
                pass
            case _:
                self.send(b"-ERR 'Unknown Protocol Operation'\r\n")
                self._front.flush()
                self.close()

    def _unsubscribe(self, sid: int, limit: int) -> None:
        entry = self.subscriptions.get(sid)
        if entry is None:
            return
        entry.limit = limit
        if entry.sent >= limit:
            self._forget(entry)

    def _forget(self, entry: _Subscription) -> None:
        del self.subscriptions[entry.sid]
        self._front.interest.remove(entry)

    def deliver(self, entry: _Subscription, subject: str, reply: str, block: bytes, data: bytes) -> None:
        address = f"{subject} {entry.sid} {reply}".rstrip().encode()
        if block:
            self.send(b"HMSG %b %d %d\r\n%b%b\r\n" % (address, len(block), len(block) + len(data), block, data))
        else:
            self.send(b"MSG %b %d\r\n%b\r\n" % (address, len(data), data))
        entry.sent += 1
        if entry.sent == entry.limit:
            self._forget(entry)

    def send(self, frame: bytes) -> None:
        if not self._out:
            self._front.has_news(self)
        self._out.append(frame)

    def flush(self) -> None:
        data = b"".join(self._out)
        self._out.clear()
        if self.is_open and data:
            self._write(data)

    def close(self) -> None:
        if self.is_open:
            self.is_open = False
            for entry in list(self.subscriptions.values()):
                self._forget(entry)
            self._front.closed(self)


class Front:
    """Speaks the client protocol for a :class:`ModelServer`."""

    def __init__(
        self, model: ModelServer, clock: VirtualClock, *, service_s: float = 0.0, max_payload_bytes: int = 1 << 20
    ) -> None:
        """``service_s`` is the time the server needs for each message; 0 is an unlimited rate."""
        self.model, self.clock = model, clock
        self.watchers: list[Callable[[Publication], None]] = []
        """Each is called with every message, before the model."""
        self.reply_watchers: list[Callable[[Delivery], None]] = []
        """Each is called with every message of the server, even one without a subscriber."""
        self.gates: list[Callable[[Publication], bool]] = []
        """Each is called with every arriving message; the message is lost if one of them returns False."""
        self.interest = _Interest()
        self._service_s = service_s
        self._busy_until = 0.0
        self._sessions: dict[int, _PeerSession] = {}
        self._last_session = self._turn = 0
        self._talkative: list[_PeerSession] = []
        self.fork: ModelServer | None = None
        """The model on the far side of a partition."""
        self.parted_node = -1
        self.parted_at = 0.0
        self.next_node: int | None = None
        """The node of the next session; by default nodes take turns."""
        self._answers_at = 0.0
        info = {
            "server_id": "MODEL",
            "version": "2.15.1",
            "proto": 1,
            "headers": True,
            "jetstream": True,
            "api_lvl": 5,
            "max_payload": max_payload_bytes,
        }
        self._info = f"INFO {json.dumps(info)}\r\n".encode()

    @property
    def sessions(self) -> int:
        """Number of open sessions, as the server sees it."""
        return len(self._sessions)

    def open(self, write: Callable[[bytes], None]) -> _PeerSession:
        """Accept a connection; ``write`` is called with the server's bytes, from now on."""
        self._last_session += 1
        session = self._sessions[self._last_session] = _PeerSession(self, self._last_session, write)
        session.send(self._info)
        self.flush()
        return session

    # ---- partitions --------------------------------------------------------------------------------------------

    def cut_off_node(self, node: int, stream: str) -> None:
        """Cut a node off from the others, and with it the stream's leader if it is that node; the leader does not
        notice."""
        is_leader = self.model.leader(stream) == node
        if is_leader:
            # A majority has the messages that a leader has stored, so it may still acknowledge them behind the
            # partition.
            store = self.model.stream(stream).store
            store.promise(store.last_sequence)
        self.fork, self.parted_node, self.parted_at = self.model.fork(), node, self.clock.now
        if is_leader:
            self.fork.cut_off_leader(stream, self.clock.now)
        else:
            self.fork.lose_leader(stream, self.clock.now)

    def join(self) -> None:
        """End the partition: its leader becomes a follower, and its own messages are dropped."""
        self.fork, self.parted_node = None, -1

    def is_parted(self, client: int) -> bool:
        """True if a session is connected to the node behind the partition."""
        session = self._sessions.get(client)
        return self.fork is not None and session is not None and session.node == self.parted_node

    def model_of(self, client: int) -> ModelServer:
        """The model that serves a session."""
        return self.fork if self.fork is not None and self.is_parted(client) else self.model

    def close_all(self) -> None:
        for session in list(self._sessions.values()):
            session.close()

    def closed(self, session: _PeerSession) -> None:
        del self._sessions[session.number]

    def say(self, deliveries: Iterable[Delivery], *, by: ModelServer | None = None) -> None:
        """Send messages of the server to the subscribers on its side of a partition."""
        is_from_fork = by is not None and by is self.fork
        for each in deliveries:
            for watch in self.reply_watchers:
                watch(each)
            block = b""
            if each.headers is not None or each.status is not None:
                block = encode(each.headers)
                if each.status is not None:
                    first_line = f"NATS/1.0 {each.status.code} {each.status.description}".rstrip().encode()
                    block = first_line + block[len(b"NATS/1.0") :]
            for entry in self.interest.find(each.subject):
                if self.fork is None or (entry.session.node == self.parted_node) == is_from_fork:
                    entry.session.deliver(entry, each.shown_subject or each.subject, each.reply, block, each.data)
        self.flush()
        self._watch(self.model if by is None else by)

    def _watch(self, model: ModelServer) -> None:
        """Schedule the model's delayed answers."""
        at = model.next_answer_at()
        if at is not None and (model is not self.model or not self.clock.now < self._answers_at <= at):
            if model is self.model:
                self._answers_at = at
            self.clock.at(at, lambda: self.say(model.on_time(self.clock.now), by=model))

    def on_published(self, message: Publication) -> None:
        if not self._service_s:
            self.process(message)
            return
        self._busy_until = max(self._busy_until, self.clock.now) + self._service_s
        self.clock.at(self._busy_until, lambda: self.process(message))

    def process(self, message: Publication) -> None:
        """Process a message as the server does: core subscribers first, then JetStream."""
        for may_pass in list(self.gates):
            if not may_pass(message):
                return
        for watch in self.watchers:
            watch(message)
        model = self.model_of(message.client)
        said = model.publish(
            message.subject, message.data, reply=message.reply or None, headers=message.headers, now=self.clock.now
        )
        listeners = self.interest.find(message.subject)
        if listeners:
            block = b"" if message.headers is None else encode(message.headers)
            if self.fork is not None:
                is_parted = self.is_parted(message.client)
                listeners = [each for each in listeners if (each.session.node == self.parted_node) == is_parted]
            for entry in self._one_of_each_group(listeners):
                entry.session.deliver(entry, message.subject, message.reply, block, message.data)
            said = [each for each in said if each.status is None or each.subject != message.reply]
        if said:
            self.say(said, by=model)
        else:
            self._watch(model)

    def _one_of_each_group(self, entries: list[_Subscription]) -> list[_Subscription]:
        """The subscriptions that get a message: one of each queue group, in turn."""
        chosen = [entry for entry in entries if not entry.queue]
        if len(chosen) < len(entries):
            groups: dict[str, list[_Subscription]] = {}
            for entry in entries:
                if entry.queue:
                    groups.setdefault(entry.queue, []).append(entry)
            self._turn += 1
            chosen += [group[self._turn % len(group)] for group in groups.values()]
        return chosen

    def has_news(self, session: _PeerSession) -> None:
        self._talkative.append(session)

    def flush(self) -> None:
        """Send the collected frames, one chunk for each session."""
        talkative, self._talkative = self._talkative, []
        for session in talkative:
            session.flush()


# ---- wires -----------------------------------------------------------------------------------------------------------


class _Pipe:
    """One direction: data arrive later, in order."""

    def __init__(self, clock: VirtualClock, delays: Iterator[float], out: Callable[[bytes], None]) -> None:
        self.in_flight_bytes = 0
        self.is_cut = False
        self._clock, self._delays, self._out = clock, delays, out
        self._in_flight: deque[bytes] = deque()
        self._last_at = self._silent_until = 0.0

    def send(self, data: bytes) -> None:
        if self.is_cut or not data:
            return
        self._in_flight.append(data)
        self.in_flight_bytes += len(data)
        self._last_at = max(self._last_at, self._clock.now + next(self._delays))
        self._clock.at(self._last_at, self._arrive)

    def _arrive(self) -> None:
        if self._clock.now < self._silent_until:
            self._clock.at(self._silent_until, self._arrive)
        elif self._in_flight:
            data = self._in_flight.popleft()
            self.in_flight_bytes -= len(data)
            self._out(data)

    def silence(self, until: float) -> None:
        """Deliver nothing before ``until``, then everything that was sent, in its order."""
        self._last_at = self._silent_until = max(self._silent_until, until)

    def cut(self, keep_bytes: int) -> None:
        """Lose everything in flight except its first ``keep_bytes``, and everything written later."""
        self.is_cut = True
        kept: deque[bytes] = deque()
        for data in self._in_flight:
            part = data[:keep_bytes]
            keep_bytes -= len(part)
            if part:
                kept.append(part)
        self._in_flight = kept
        self.in_flight_bytes = sum(map(len, kept))


class Wire:
    """One transport from a client to the front."""

    def __init__(
        self,
        network: Network,
        on_data: Callable[[bytes], None],
        on_lost: Callable[[str], None],
        on_room: Callable[[], None],
    ) -> None:
        self._network = network
        self._on_data, self._on_lost, self._on_room = on_data, on_lost, on_room
        self.is_open = True
        """True until the client notices the end."""
        delays = network.delays()
        self._to_server = _Pipe(network.clock, delays, self._arrive)
        self._to_client = _Pipe(network.clock, delays, self._deliver)
        self._session = network.front.open(self._to_client.send)

    @property
    def client(self) -> int:
        """The number of its session."""
        return self._session.number

    @property
    def is_full(self) -> bool:
        return self._to_server.in_flight_bytes >= self._network.max_in_flight_bytes

    @property
    def is_cut(self) -> bool:
        return self._to_server.is_cut

    def write(self, data: bytes) -> None:
        """Send data; in pieces, as networks do, that are independent of frames."""
        for piece in self._network.pieces(data):
            self._to_server.send(piece)
            if self._network.on_write is not None:
                self._network.on_write()

    def _arrive(self, data: bytes) -> None:
        was_full = self._to_server.in_flight_bytes + len(data) >= self._network.max_in_flight_bytes
        self._session.receive(data)
        if was_full and not self.is_full and self.is_open and not self.is_cut:
            self._on_room()

    def _deliver(self, data: bytes) -> None:
        if self.is_open:
            for piece in self._network.pieces(data):
                if self.is_open:
                    self._on_data(piece)

    def hang_up(self) -> None:
        """Close the wire from the client's side. Its writes still arrive; the server notices the end after that."""
        if self.is_open:
            self.is_open = False
            if not self.is_cut:
                self._to_server.is_cut = self._to_client.is_cut = True
                self._network.forget(self)
                self._network.clock.after(self._network.learning_s(), self._session.close)

    def silence(self, seconds: float) -> None:
        """Deliver nothing in either direction for some seconds, without an error; then everything that was sent.

        That is what TCP does when packets are lost for a while: both ends keep the connection and send again.
        """
        for pipe in (self._to_server, self._to_client):
            pipe.silence(self._network.clock.now + seconds)

    def cut(self, *, reason: str = "the connection was reset") -> None:
        """Break the wire, somewhere in the middle of the bytes in flight."""
        if self.is_cut:
            return
        rng, clock = self._network.rng, self._network.clock
        for pipe in (self._to_server, self._to_client):
            pipe.cut(rng.randint(0, pipe.in_flight_bytes))
        self._network.forget(self)
        clock.after(self._network.learning_s(), self._session.close)
        clock.after(self._network.learning_s(), lambda: self._end(reason))

    def _end(self, reason: str) -> None:
        if self.is_open:
            self.is_open = False
            self._on_lost(reason)


class Network:
    """Wires to one front, and the faults of both."""

    def __init__(
        self,
        front: Front,
        rng: random.Random,
        *,
        delay_s: tuple[float, float] = (0.0005, 0.005),
        learning_s: tuple[float, float] = (0.0, 0.5),
        max_in_flight_bytes: int = 64 << 10,
        piece_bytes: int = 0,
    ) -> None:
        """All randomness comes from ``rng``.

        Args:
            front: The server end of the wires.
            rng: The source of all random numbers.
            delay_s: Shortest and longest delay of a chunk, in either direction.
            learning_s: Shortest and longest time until either end notices a broken wire.
            max_in_flight_bytes: Bytes that a wire accepts from a client before it is full.
            piece_bytes: Cut writes into pieces of at most this many bytes; 0 does not cut them.
        """
        self.front, self.clock, self.rng = front, front.clock, rng
        self.max_in_flight_bytes = max_in_flight_bytes
        self.on_write: Callable[[], None] | None = None
        """Called after every piece of data that a client writes."""
        self._delay_s, self._learning_s, self._piece_bytes = delay_s, learning_s, piece_bytes
        self._wires: list[Wire] = []
        self._down_until = self._refusing_until = 0.0

    @property
    def wires(self) -> list[Wire]:
        """The wires that are not cut, the oldest first."""
        return list(self._wires)

    @property
    def is_reachable(self) -> bool:
        return self.clock.now >= self._down_until and self.clock.now >= self._refusing_until

    # ---- what a client does ------------------------------------------------------------------------------------

    def dial(
        self, on_data: Callable[[bytes], None], on_lost: Callable[[str], None], on_room: Callable[[], None]
    ) -> Wire:
        """Open a wire.

        Raises:
            ConnectionRefusedError: The server is down, or refuses connections.
        """
        if not self.is_reachable:
            raise ConnectionRefusedError("connection refused")
        wire = Wire(self, on_data, on_lost, on_room)
        self._wires.append(wire)
        return wire

    def delays(self) -> Iterator[float]:
        low, high = self._delay_s
        while True:
            yield self.rng.uniform(low, high)

    def learning_s(self) -> float:
        return self.rng.uniform(*self._learning_s)

    def pieces(self, data: bytes) -> Iterable[bytes]:
        if not self._piece_bytes or len(data) <= 1:
            return (data,)
        pieces, start = [], 0
        while start < len(data):
            end = start + self.rng.randint(1, self._piece_bytes)
            pieces.append(data[start:end])
            start = end
        return pieces

    def forget(self, wire: Wire) -> None:
        self._wires.remove(wire)

    # ---- misfortune --------------------------------------------------------------------------------------------

    def cut(self, wire: Wire | None = None) -> None:
        """Break a wire; without an argument a random one."""
        if wire is None and self._wires:
            wire = self.rng.choice(self._wires)
        if wire is not None:
            wire.cut()

    def cut_client(self, client: int) -> None:
        """Break the wire of a session, by its number; see :attr:`Publication.client`."""
        for wire in self.wires:
            if wire.client == client:
                wire.cut()

    def refuse(self, seconds: float) -> None:
        """Refuse new connections for some seconds; open ones stay."""
        self._refusing_until = max(self._refusing_until, self.clock.now + seconds)

    def kill_server(self, seconds: float) -> None:
        """Stop the server, and with it every connection; it restarts after some seconds with its stored messages."""
        self._down_until = max(self._down_until, self.clock.now + seconds)
        for wire in self.wires:
            wire.cut(reason="the server is gone")
        self.front.close_all()
        self.front.join()
        self.front.say(self.front.model.restart(self.clock.now, back_at=self._down_until))

    def lose_leader(self, stream: str, seconds: float, *, drop: int = 0, is_silent: bool = False) -> None:
        """A stream is without a leader for some seconds; see :meth:`ModelServer.lose_leader`."""
        model, front, clock = self.front.model, self.front, self.clock
        front.say(model.lose_leader(stream, clock.now, drop=drop, is_silent=is_silent))
        clock.after(seconds, lambda: self._elect(stream))

    def _elect(self, stream: str) -> None:
        """Elect the next replica that is not behind a partition."""
        front, model, now = self.front, self.front.model, self.clock.now
        leader = (model.leader(stream) + 1) % NODES
        if leader == front.parted_node:
            leader = (leader + 1) % NODES
        front.say(model.elect_leader(stream, now, leader=leader))

    def slow_down(self, stream: str, seconds: float, *, apply_s: float) -> None:
        """Let replicas take their time for some seconds; see :meth:`ModelServer.slow_down`."""
        model, front, clock = self.front.model, self.front, self.clock
        front.say(model.slow_down(stream, clock.now, apply_s))
        clock.after(seconds, lambda: front.say(model.slow_down(stream, clock.now, 0.0)))

    def hold_replica(self, stream: str, seconds: float) -> None:
        """Let one replica fall behind for some seconds; see :meth:`ModelServer.hold_replica`."""
        model = self.front.model
        model.hold_replica(stream, True)
        self.clock.after(seconds, lambda: model.hold_replica(stream, False))

    def partition(self, stream: str, seconds: float, *, without_s: float, drop: int = 0) -> None:
        """Part the node that leads a stream from the others for some seconds.

        It stays leader for its own clients; the others elect one after ``without_s``. The proposals it could not
        replicate, up to ``drop`` messages, are lost. A node that is behind an earlier partition returns first.
        """
        front, model, clock = self.front, self.front.model, self.clock
        front.join()
        front.cut_off_node(model.leader(stream), stream)
        fork = front.fork
        self.lose_leader(stream, without_s, drop=drop)
        clock.after(seconds, lambda: front.join() if front.fork is fork else None)

    def cut_off_leader(self, stream: str, seconds: float, *, without_s: float = 0.0) -> None:
        """Cut a stream's leader off from the other replicas for some seconds; see :meth:`ModelServer.cut_off_leader`.

        Then the stream is without a leader for ``without_s``.
        """
        model, front, clock = self.front.model, self.front, self.clock
        front.say(model.cut_off_leader(stream, clock.now))
        clock.after(seconds, lambda: self.lose_leader(stream, without_s))
