"""Whether the runs of ``support.fulfilment`` are right: each ended once, by what its end says, with timers in time."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from jetspark.app import AppClient, WorkflowRun

SHIPPED, RELEASED, RESERVED = "order.shipped", "stock.release", "stock.reserve"
PLACED, PAID, OVERDUE = "order.placed", "order.paid", "order.payment_overdue"


class WrongRun(AssertionError):
    """What the events say of a run does not fit its record."""


class SeenEvent(NamedTuple):
    """An event in the stream."""

    sequence: int
    type: str
    order: str
    stored: datetime.datetime
    time: datetime.datetime
    """Of a timer's event, when it was due."""


class CheckedRuns(NamedTuple):
    ends: Counter[str]
    late: int
    """Timers that fired although the run was over: harmless, and not lost."""


async def read_events(shop: AppClient) -> list[SeenEvent]:
    stream, found = await shop.js.stream(shop.app.stream), []
    async for message in stream.get_messages(1, subject="orders.>"):
        body = msgspec.json.decode(message.data)
        time = datetime.datetime.fromisoformat(body["time"])
        found.append(SeenEvent(message.sequence, body["type"], body["data"]["order_id"], message.timestamp, time))
    return found


def check_runs(runs: Mapping[str, WorkflowRun], events: Iterable[SeenEvent]) -> CheckedRuns:
    """
    Raises:
        WrongRun: A run has not ended, or not once, or not as its events say; or a timer was early, or is lost.
    """
    by_order: dict[str, list[SeenEvent]] = {}
    for event in events:
        by_order.setdefault(event.order, []).append(event)
        if event.type == OVERDUE and event.stored < event.time:
            raise WrongRun(f"{event}: a timer was early")
    if by_order.keys() != runs.keys():
        raise WrongRun(f"orders without a run, or runs without an order: {sorted(by_order.keys() ^ runs.keys())}")
    late = sum(_check_run(run, by_order[key]) for key, run in runs.items())
    return CheckedRuns(Counter(run.status for run in runs.values()), late)


def _check_run(run: WorkflowRun, events: list[SeenEvent]) -> int:
    """How many timers fired too late."""
    count = Counter(event.type for event in events)
    if run.status == "running" or run.timers:
        raise WrongRun(f"{run}: it has not ended")
    ends = {"done": (1, 0), "failed": (0, 1)}[run.status]
    if (count[SHIPPED], count[RELEASED], count[RESERVED]) != (*ends, 1):
        raise WrongRun(f"{run}: expected one end and one reservation, found {dict(count)}")
    end = next(event.sequence for event in events if event.type in (SHIPPED, RELEASED))
    in_time = sum(event.type == OVERDUE and event.sequence < end for event in events)
    late = count[OVERDUE] - in_time
    if run.status == "failed":
        # Reminded by the first timer, and given up by the second, which is its last.
        if (in_time, late) != (2, 0):
            raise WrongRun(f"{run}: expected two timers before its end, found {in_time}, and {late} after it")
    elif count[PAID] != 1:
        raise WrongRun(f"{run}: shipped, and paid {count[PAID]} times")
    elif in_time + late > 2:
        raise WrongRun(f"{run}: {in_time + late} timers fired, and it sets two")
    return late
