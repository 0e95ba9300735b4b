"""Stage: list the dead letters, and redrive one of them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from jetspark.app.dead_letters.redriving import DeadLetterFilter, read_dead_letters, run_redrive
from jetspark.app.handlers.dead_letter_box import StoredDeadLetter
from jetspark.demo.screen import DemoStage
from jetspark.demo.stages import Demo
from jetspark.errors import MessageNotFound, RequestTimeout

__all__ = ["list_and_redrive"]

HANDLER, PROJECTIONS = "refunds", "projections"
WAIT_S = 45.0
"""Events of a killed worker are redelivered after five seconds; a busy machine takes longer."""
POLL_S = 0.1


async def list_and_redrive(demo: Demo) -> None:
    shop = demo.shop
    refused = sum(event.amount_cents > shop.max_refund_cents for event in demo.tally.cancelled)
    wanted = {HANDLER: refused, PROJECTIONS: len(shop.traffic.UNREADABLE)}
    with demo.screen.stage("dead letters") as stage:
        dead_letters = await _await_dead_letters(demo, wanted)
        found = Counter(each.dead_letter.handler for each in dead_letters)
        stage.say(f"{len(dead_letters)} dead letters")
    result = f"found {dict(found)}, expected {wanted}"
    if found == wanted:
        result = (
            f"{found[HANDLER]} refunds refused, {found[PROJECTIONS]} events unreadable: one dead letter each, though "
            "two engines read them"
        )
    demo.screen.found("dead letters", result, is_good=found == wanted)
    chosen = next((each for each in dead_letters if each.dead_letter.handler == HANDLER), None)
    if chosen is None:
        demo.screen.found("redrive one", "not tried: no refund has a dead letter", is_good=None)
        return
    with demo.screen.stage("redrive one") as stage:
        await _redrive(demo, stage, chosen)


async def _await_dead_letters(demo: Demo, wanted: dict[str, int]) -> list[StoredDeadLetter]:
    """Wait for the expected number of dead letters; returns the present ones after ``WAIT_S`` seconds."""
    give_up_at = time.perf_counter() + WAIT_S
    while True:
        dead_letters = await read_dead_letters(demo.environment.js, demo.shop.release2, DeadLetterFilter())
        if Counter(each.dead_letter.handler for each in dead_letters) == wanted or time.perf_counter() > give_up_at:
            return dead_letters
        await asyncio.sleep(POLL_S)


async def _redrive(demo: Demo, stage: DemoStage, chosen: StoredDeadLetter) -> None:
    """Redrive one dead letter with the handler of release 2, and wait for the event it publishes."""
    app, js, dead_letter = demo.shop.release2, demo.environment.js, chosen.dead_letter
    began = time.perf_counter()
    sequence = str(dead_letter.origin.sequence)
    await run_redrive(js, app, DeadLetterFilter.parse(HANDLER, [f"sequence={sequence}"]))
    stream = await js.stream(app.stream)
    while True:
        left = await read_dead_letters(js, app, DeadLetterFilter.parse(HANDLER, [f"sequence={sequence}"]))
        try:
            await stream.get_message(last_for=f"demo.orders.refunded.{dead_letter.key}")
            if not left:
                break
        except MessageNotFound:
            pass
        if time.perf_counter() - began > WAIT_S:
            raise RequestTimeout(f"redrive of the dead letter of event {sequence}", WAIT_S)
        await asyncio.sleep(POLL_S)
    took_s = time.perf_counter() - began
    stage.say(f"{dead_letter.key} refunded")
    demo.screen.found(
        "redrive one",
        f"order {dead_letter.key}, refused by release 1, was refunded by release 2 after {took_s:.1f} s",
    )
