"""Stage: compare the states of Spark and of the live workers key by key, and their sums with the publisher's counts."""

from __future__ import annotations

import json
from collections.abc import Mapping

from jetspark.app.replay import Verification, VerifyOptions, verify
from jetspark.app.replay.verification import read_states
from jetspark.demo.stages import Demo
from jetspark.state.changes import Current

__all__ = ["compare"]


async def compare(demo: Demo) -> None:
    names = list(demo.spark_buckets)
    with demo.screen.stage("compare", len(names)) as stage:
        results = []
        states: dict[str, Mapping[str, Current]] = {}
        for number, name in enumerate(names, 1):
            results.append(await _compared(demo, name, states))
            stage.reached(number)
        keys = sum(found.keys for found in results)
        digests = ", ".join(found.digest.partition(":")[2][:8] for found in results)
        is_equal = all(found.is_equal and found.digest == found.expected_digest for found in results)
        stage.say(f"{keys:,} keys: {'equal' if is_equal else 'NOT EQUAL'}")
    differing = "; ".join(f"{found.projection}: {found.difference_count} keys differ" for found in results)
    result = f"{keys:,} keys of {len(names)} projections, the same bytes on both: digests {digests}"
    demo.screen.found("Spark = live", result if is_equal else differing, is_good=is_equal)
    _check_sums(demo, states)
    for bucket in demo.spark_buckets.values():
        await demo.environment.js.delete_kv(bucket)


async def _compared(demo: Demo, name: str, states: dict[str, Mapping[str, Current]]) -> Verification:
    """Compare the live bucket with Spark's at the last common event; adds Spark's states to ``states``."""

    async def fresh(boundary: int) -> Mapping[str, Current]:
        states[name] = await read_states(demo.environment.js, demo.spark_buckets[name])
        return states[name]

    return await verify(demo.environment.js, demo.shop.release1, name, VerifyOptions(to_seq=demo.last), fresh=fresh)


def _check_sums(demo: Demo, states: Mapping[str, Mapping[str, Current]]) -> None:
    """Compare the sums of the states with the publisher's counts, which do not depend on any fold.

    Spark's states suffice, because the live ones were compared with them before.
    """
    status, revenue, parcels = [
        [json.loads(each.value) for each in states[name].values() if each.value]
        for name in ("order_status", "daily_revenue", "parcels")
    ]
    tally = demo.tally
    found = (len(status), sum(day["orders"] for day in revenue), sum(day["cents"] for day in revenue), sum(parcels))
    wanted = (tally.orders, tally.paid, tally.paid_cents, tally.scans)
    text = "{:,} orders, {:,} paid, {:,} cents, {:,} parcels scanned"
    result = f"{text.format(*found)}: as counted by the publisher"
    if found != wanted:
        result = f"{text.format(*found)}; the publisher counted {text.format(*wanted)}"
    demo.screen.found("state = events", result, is_good=found == wanted)
