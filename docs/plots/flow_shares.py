"""How a stream's flow is shared: from one publisher to a thousand, in virtual time. Writes flow-shares.md and .svg.

    python docs/plots/flow_shares.py

Needs JetSpark and the standard library. The machines are the ones the drivers run; the server is the model of
``jetspark.testing``, which hands out the flow as nats-server 2.15 does, with a time added that it needs for each
message. Nothing is random, so the numbers are the same wherever this runs; ``tests/simulation/test_flow_shares.py``
looks after that.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jetspark import StreamConfig
from jetspark.core.events import ConnectionEvent
from jetspark.publish.fast_batch import FastMachine
from jetspark.publish.fast_options import FastBatchOptions
from jetspark.testing import ModelServer
from jetspark.testing.network import Front, Network, Publication, VirtualClock
from jetspark.testing.simulation import SimulatedTransport

HERE = Path(__file__).parent

CAPACITY = 100_000
"""Messages per second: about what nats-server stores of 128 bytes, in a file, on two cores."""
ROUND_TRIPS_S = (0.001, 0.02)
PUBLISHERS = (1, 2, 5, 10, 25, 50, 100, 166, 167, 250, 251, 334, 500, 750, 1000)

# Flow doubles once a window, so nine windows lead from 1 to 500; the rest is for those who came first to slow down.
WARM_UP_ROUND_TRIPS = 16
MEASURED_ROUND_TRIPS = 8
# What a server with a full queue needs, however short the way is.
WARM_UP_S, MEASURED_S = 0.1, 0.08


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement."""

    round_trip_s: float
    publishers: int
    msgs_per_ack: tuple[int, int]
    """The lowest and the highest at the end."""
    messages_per_s: float
    slowest: float
    """What the slowest publisher got, in shares of the mean; 1 is fair."""
    fastest: float

    @property
    def utilisation(self) -> float:
        return self.messages_per_s / CAPACITY


class Publisher:
    """Has always something to send, and sends whatever there is room for."""

    def __init__(self, network: Network, name: str) -> None:
        self._transport = SimulatedTransport(network, name=name)
        self._clock = network.clock
        self._item = (f"events.{name}", b"x" * 128)
        self.batch = FastMachine(self._transport.machine, self, FastBatchOptions())
        self._transport.listeners.append(self._on_event)
        self._transport.open()

    def _on_event(self, event: ConnectionEvent) -> None:
        if self.batch.is_new:
            self.batch.start(self._item, self._clock.now)
            self._transport.schedule_flush()

    pending_messages = 0

    def read_up(self, deadline: float) -> bool:
        return True

    def wake(self) -> None:
        self.batch.on_replies(self._clock.now)
        if room := self.batch.sender.room:
            self.batch.sender.add_many([self._item] * room, self._clock.now)
            self._transport.schedule_flush()


def measure(publishers: int, round_trip_s: float) -> Row:
    clock = VirtualClock()
    model = ModelServer()
    model.create_stream(StreamConfig(name="EVENTS", subjects=["events.>"], allow_batched=True, storage="memory"))
    front = Front(model, clock, service_s=1 / CAPACITY)
    way_s = round_trip_s / 2
    network = Network(front, random.Random(0), delay_s=(way_s, way_s), max_in_flight_bytes=1 << 30)
    counts: Counter[str] = Counter()

    def count(message: Publication) -> None:
        counts[message.subject] += 1

    front.watchers.append(count)
    everyone = [Publisher(network, f"p{number}") for number in range(publishers)]
    clock.run(clock.now + WARM_UP_ROUND_TRIPS * round_trip_s + WARM_UP_S)
    counts.clear()
    measured_s = max(MEASURED_ROUND_TRIPS * round_trip_s, MEASURED_S)
    clock.run(clock.now + measured_s)
    flows = [each.batch.sender.msgs_per_ack for each in everyone]
    shares = [counts[f"events.p{number}"] for number in range(publishers)]
    mean = sum(shares) / publishers
    return Row(
        round_trip_s,
        publishers,
        (min(flows), max(flows)),
        sum(shares) / measured_s,
        min(shares) / mean,
        max(shares) / mean,
    )


def measure_all() -> list[Row]:
    return [measure(publishers, round_trip) for round_trip in ROUND_TRIPS_S for publishers in PUBLISHERS]


# ---- words -----------------------------------------------------------------------------------------------------------

_TEXT = """\
# Sharing the flow of a stream

![Messages per second against publishers](flow-shares.svg)

Every open fast batch of a stream gets an equal share: the server acknowledges after 500 messages divided by the number
of open batches, rounded down, at least after each, and a publisher keeps two acknowledgements outstanding. All together
therefore have a thousand messages under way, or less where the division leaves a rest, whether they are one or five
hundred; beyond that two each, which is more.

Modelled: {capacity} messages per second, one after the other in the order of arrival; a way there and back of constant
length; publishers that always have something to send, each on its own connection, default options. Not modelled:
replication, the server's own bookkeeping for each connection and acknowledgement, bandwidth.

What follows from it:

- Where a round trip is short, a few publishers and a thousand get the same out of the server, and share it equally.
  (Shares beside 1 are windows that were counted on one side of the measurement's beginning or end.)
- Where it is long, a thousand messages for each round trip is all there is: {limit} messages per second at
  {long_ms:.0f} ms, whatever the server could do.
- Rounding down costs: with {worst} publishers, each has one message for an acknowledgement where 500 divided by their
  number is nearly two, and half the flow is unused. This matters only where the way is long.

| Round trip | Publishers | Messages per ack | Messages/s | Of capacity | Slowest share | Fastest share |
|---:|---:|---:|---:|---:|---:|---:|
"""


def table(rows: Sequence[Row]) -> str:
    text = _TEXT.format(
        capacity=f"{CAPACITY:,}".replace(",", " "),
        limit=f"{1000 / ROUND_TRIPS_S[-1]:,.0f}".replace(",", " "),
        long_ms=ROUND_TRIPS_S[-1] * 1000,
        worst=251,
    )
    for row in rows:
        low, high = row.msgs_per_ack
        flow = str(low) if low == high else f"{low} to {high}"
        text += (
            f"| {row.round_trip_s * 1000:.0f} ms | {row.publishers} | {flow} | {row.messages_per_s:.0f} "
            f"| {row.utilisation:.0%} | {row.slowest:.2f} | {row.fastest:.2f} |\n"
        )
    return f"{text}\nMade by `python docs/plots/flow_shares.py`.\n"


# ---- picture ---------------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT = 720, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 20, 40, 50
_COLOURS = ("#1b6ca8", "#c8553d")


def _x(publishers: int) -> float:
    return _LEFT + (_WIDTH - _LEFT - _RIGHT) * math.log10(publishers) / 3


def _y(messages_per_s: float) -> float:
    return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * messages_per_s / (1.1 * CAPACITY)


def picture(rows: Sequence[Row]) -> str:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">Messages per second of one stream, by its publishers</text>',
    ]
    for thousands in range(0, 101, 25):
        y = _y(thousands * 1000)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{thousands * 1000}</text>')
    for publishers in (1, 10, 100, 1000):
        x = _x(publishers)
        parts.append(f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{publishers}</text>')
    parts.append(f'<text x="{(_LEFT + right) / 2:.1f}" y="{_HEIGHT - 10}" text-anchor="middle">publishers</text>')
    for number, (round_trip_s, colour) in enumerate(zip(ROUND_TRIPS_S, _COLOURS, strict=True)):
        points = [(_x(row.publishers), _y(row.messages_per_s)) for row in rows if row.round_trip_s == round_trip_s]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
        y = bottom - 40 + 18 * number
        parts.append(f'<rect x="{_LEFT + 14}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{_LEFT + 30}" y="{y}">round trip of {round_trip_s * 1000:.0f} ms</text>')
    parts.append("</svg>\n")
    return "\n".join(parts)


def main() -> None:
    rows = measure_all()
    (HERE / "flow-shares.md").write_text(table(rows))
    (HERE / "flow-shares.svg").write_text(picture(rows))


if __name__ == "__main__":
    main()
