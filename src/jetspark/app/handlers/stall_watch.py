"""Held events without progress are reported, then recovered if possible; otherwise the worker ends.

======================================  ==============================================================================
waits for an earlier event of its key,  it is returned, and the pending events are looked up again, each time
which does not arrive
may begin, and no runner takes it       runners are woken; if still no event begins, the worker ends
its attempt does not end                the handler is cancelled again; if it still runs, or a step after it keeps
                                        failing, the worker ends
was pulled, and is not received         the worker ends: a look-up keeps failing
======================================  ==============================================================================

An event is reported after the machine's patience. The worker ends after twice that time, with an error: its supervisor
starts another one, and its events are redelivered to other workers. Time without a connection does not count.

A handler that swallows every cancellation cannot be ended. Its worker is *abandoned*: it keeps nothing in progress, and
the run of the application ends without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jetspark.app.clock import idle_s
from jetspark.app.handlers.lanes import WorkItem
from jetspark.app.handlers.machine import NAMED_STALLS, Stalled
from jetspark.app.telemetry import HeldEvents
from jetspark.errors import HandlerStalled

if TYPE_CHECKING:
    from jetspark.app.handlers.handler_worker import HandlerWorker

__all__ = ["CANCEL_AGAIN_S", "StallWatch"]

# Checks for progress within the machine's patience.
PROGRESS_LOOKS = 4
# A cancelled handler has this time for its clean-up.
CANCEL_AGAIN_S = 5.0
# A worker that has stalled cancels its handlers this many times, and then ends without them.
CANCEL_ROUNDS = 3


class StallWatch:
    """Watches the progress of the events that one worker holds."""

    def __init__(self, worker: HandlerWorker) -> None:
        self._worker, self._machine, self._log = worker, worker.machine, worker.log
        self._loop = asyncio.get_running_loop()
        self.has_stalled = False
        """The worker is to end, so that its events are redelivered to others."""
        self.abandoned: asyncio.Future[None] = self._loop.create_future()
        """Gets the error of a worker that stalled and cannot end, because its handler does not."""
        self._insisting: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Check until cancelled.

        Raises:
            HandlerStalled: Recovery did not help within another patience.
        """
        machine, patience_s = self._machine, self._machine.patience_s
        connected_at, before = self._loop.time(), set[WorkItem]()
        while True:
            await asyncio.sleep(idle_s(patience_s / PROGRESS_LOOKS))
            now = self._loop.time()
            if not self._worker.is_connected:
                connected_at = now
                machine.forget_stalls()
            stalled = machine.stalled(now)
            if stalled:
                self._log.error("%s", Stalled.text(stalled, machine.held))
            pulls = self._late_pulls(now, connected_at)
            for _, text in pulls:
                self._log.error("%s: the look-up of redelivered events does not end", text)
            self._report(now, [*map(str, stalled), *(text for _, text in pulls)])
            lost = [str(each) for each in stalled if each.seconds >= 2 * patience_s and _is_lost(each, before)]
            lost += [text for seconds, text in pulls if seconds >= 2 * patience_s]
            if lost:
                self.has_stalled = True
                what = "; ".join(lost[:NAMED_STALLS])
                self._insisting = self._loop.create_task(self._insist(what))
                raise HandlerStalled(self._worker.spec.name, what)
            before = {each.item for each in stalled}
            await self._recover(stalled)

    def close(self) -> None:
        """The worker has ended."""
        if self._insisting is not None:
            self._insisting.cancel()

    def _late_pulls(self, now: float, connected_at: float) -> list[tuple[float, str]]:
        found = []
        for intake in self._worker.intakes:
            count, seconds = intake.pulled(now)
            waited_s = min(seconds, now - connected_at)
            if waited_s >= self._machine.patience_s:
                text = f"{count} messages of {intake.consumer} were pulled {seconds:.0f} s ago and are not received"
                found.append((waited_s, text))
        return found

    async def _recover(self, stalled: Sequence[Stalled]) -> None:
        worker = self._worker
        if stalled:
            worker.wake_idle(worker.spec.concurrency)
        for each in stalled:
            if each.item.runner is not None and each.item.is_timed_out:
                each.item.runner.cancel()  # the handler has swallowed the first cancellation
        for intake in worker.intakes:
            waiting = [each.item for each in stalled if each.reason == "expected" and each.item.intake is intake]
            if waiting:
                self._log.error(
                    "%s: no progress for %d keys; pending events are looked up again", intake.consumer, len(waiting)
                )
                await intake.renew(waiting)

    async def _insist(self, what: str) -> None:
        """Cancel runners repeatedly; abandon handlers that swallow every cancellation."""
        for _ in range(CANCEL_ROUNDS):
            await asyncio.sleep(CANCEL_AGAIN_S)
            for task in self._worker.runners:
                task.cancel()
        error = HandlerStalled(self._worker.spec.name, what, still_runs=True)
        self._log.error("%s", error)
        self.abandoned.set_exception(error)

    def _report(self, now: float, stalled: Sequence[str]) -> None:
        machine = self._machine
        held = HeldEvents(
            app=self._worker.app.name,
            handler=self._worker.spec.name,
            events=machine.held,
            oldest_s=machine.oldest_s(now),
            running=machine.running,
            awaited=len(machine.lanes.expected),
            pulled=sum(intake.pulled(now)[0] for intake in self._worker.intakes),
            stalled=tuple(stalled),
        )
        self._log.debug("%s", held)
        if self._worker.reports is not None:
            self._worker.reports.held(held)


def _is_lost(stalled: Stalled, before: set[WorkItem]) -> bool:
    """True if recovery was tried and did not help, so the worker has to end."""
    item = stalled.item
    if (
        item not in before or stalled.reason == "expected"
    ):  # the next look-up may find that the earlier event is acknowledged
        return False
    return stalled.reason == "ready" or item.runner is None or item.is_timed_out
