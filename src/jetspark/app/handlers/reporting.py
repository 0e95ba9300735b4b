"""Reports to the observers of an application. A handler without observers has none of this."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from jetspark.app.contracts.envelope import Decoded
from jetspark.app.handlers.handler_steps import CloseDeadLetter, HandlerStep, ReportDropped, WriteDeadLetter
from jetspark.app.handlers.retry import Decided, GiveUp, Skip, WaitHere, WaitLong
from jetspark.app.telemetry import (
    AttemptOutcome,
    AttemptResult,
    DeadLetterChange,
    HandlerAttempt,
    HandlerObserver,
    HeldEvents,
)

if TYPE_CHECKING:
    from jetspark.app.handlers.handler_spec import HandlerSpec
    from jetspark.app.handlers.lanes import WorkItem
    from jetspark.app.spec import AppSpec

__all__ = ["HandlerReports"]


class HandlerReports:
    """The reports of one handler in one process."""

    def __init__(
        self, app: AppSpec, spec: HandlerSpec, observers: Sequence[HandlerObserver], log: logging.Logger
    ) -> None:
        self._app, self._spec, self._observers, self._log = app, spec, observers, log
        self._loop = asyncio.get_running_loop()
        self._running: dict[WorkItem, tuple[HandlerAttempt, float]] = {}
        self._ended: dict[WorkItem, tuple[float, BaseException | None]] = {}
        """When the handler's code ended, and its error."""
        self._wrong: set[tuple[int, str]] = set()
        """Observers and methods that have raised an error."""

    def started(self, item: WorkItem) -> None:
        event = item.event if isinstance(item.event, Decoded) else None
        attempt = HandlerAttempt(
            app=self._app.name,
            handler=self._spec.name,
            event_type=None if event is None else event.type,
            event_id=None if event is None else event.id,
            key=item.key,
            stream=self._app.stream,
            sequence=item.sequence,
            attempt=item.attempts,
            redrives=item.redrives,
            correlation_id=None if event is None else event.correlation_id,
            decoded=event,
        )
        self._running[item] = attempt, self._loop.time()
        self._call("on_started", attempt)

    async def observe(self, item: WorkItem, call: Awaitable[BaseException | None]) -> BaseException | None:
        """Await a call of the handler's own code, and report its start; returns the call's result."""
        self.started(item)
        error = await call
        self._ended[item] = self._loop.time(), error
        return error

    def batch_started(self, items: Iterable[WorkItem]) -> None:
        for item in items:
            if item not in self._running:  # else it was started with its batch, and is tried alone now
                self.started(item)

    def batch_ended(self, items: Iterable[WorkItem], error: BaseException | None) -> None:
        """The handler's own code ended. The time of an event that is tried alone later is that of its batch."""
        now = self._loop.time()
        for item in items:
            since, _ = self._ended.get(item, (now, None))
            self._ended[item] = since, error

    def concluded(self, item: WorkItem, error: BaseException | None, decided: Decided | None) -> None:
        """The outcome of an attempt is stored; None: another worker decides."""
        if error is None:
            self.finished(item, "done")
        elif decided is None:
            self.finished(item, "given_back", error)
        elif isinstance(decided, WaitHere | WaitLong):
            self.finished(item, "retry", error, decided.seconds)
        elif isinstance(decided, GiveUp):
            self.finished(item, "dead_letter" if self._spec.dead_letter else "dropped", error)
        else:
            self.finished(item, "skipped" if isinstance(error, Skip) else "done", error)

    def finished(
        self,
        item: WorkItem,
        outcome: AttemptOutcome,
        error: BaseException | None = None,
        retry_in_s: float | None = None,
    ) -> None:
        ended = self._ended.pop(item, None)
        running = self._running.pop(item, None)
        if running is not None:
            attempt, began = running
            ended_at, last_error = (self._loop.time(), None) if ended is None else ended
            result = AttemptResult(
                outcome=outcome,
                seconds=ended_at - began,
                error=last_error if error is None else error,
                retry_in_s=retry_in_s,
            )
            self._call("on_finished", attempt, result)

    def step(self, step: HandlerStep) -> None:
        """A step was performed that changed a dead letter, or dropped an event."""
        if not isinstance(step, WriteDeadLetter | CloseDeadLetter | ReportDropped):
            return
        item, cause = step.item, None if isinstance(step, CloseDeadLetter) else step.cause
        status: Literal["open", "behind", "closed", "dropped"] = "dropped"
        if isinstance(step, CloseDeadLetter):
            status = "closed"
        elif isinstance(step, WriteDeadLetter):
            status = "open" if step.behind is None else "behind"
        change = DeadLetterChange(
            app=self._app.name,
            handler=self._spec.name,
            key=item.key,
            stream=self._app.stream,
            sequence=item.sequence,
            status=status,
            error=None if cause is None else cause.error,
            attempts=item.attempts,
        )
        self._call("on_dead_letter", change)

    def held(self, held: HeldEvents) -> None:
        self._call("on_held", held)

    def paused(self, seconds: float) -> None:
        self._call("on_paused", self._spec.name, seconds)

    def _call(self, method: str, *arguments: object) -> None:
        for index, observer in enumerate(self._observers):
            try:
                getattr(observer, method)(*arguments)
            except Exception:
                if (index, method) not in self._wrong:
                    self._wrong.add((index, method))
                    self._log.exception(
                        "observer %r: %s failed; it is called again, and not logged again", observer, method
                    )
