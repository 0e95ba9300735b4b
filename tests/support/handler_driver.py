"""Runs the procedures of handlers one step at a time, as unit tests and the simulator do."""

from __future__ import annotations

import types
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jetspark.app.handlers.handler_steps import Acknowledge, HandlerSteps
from jetspark.app.handlers.lanes import WorkItem
from jetspark.app.handlers.machine import HandlerMachine
from jetspark.app.handlers.retry import Decided

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class RunHandler:
    """Run the handler's own code. [the exception it ended with, or None]"""

    item: WorkItem


@dataclass(frozen=True, slots=True)
class RunBatch:
    """Run the handler's own code for these items. [the exception it ended with, or None]"""

    items: tuple[WorkItem, ...]


class SteppedDriver:
    """A :class:`~jetspark.app.handlers.procedures.HandlerDriver` that yields a step for each of its calls.

    ``handle(driver, item)`` is then a coroutine that is run with ``send(answer)``, as generators of steps are.
    """

    def __init__(self, machine: HandlerMachine, now: Callable[[], float] = lambda: 0.0) -> None:
        self.machine, self.now = machine, now
        self.ended: list[tuple[WorkItem, BaseException | None, Decided | None]] = []
        self.left: list[WorkItem] = []

    @types.coroutine
    def run_handler(self, item: WorkItem) -> Generator[Any, Any, BaseException | None]:
        error: BaseException | None = yield RunHandler(item)
        return error

    @types.coroutine
    def run_batch(self, items: Sequence[WorkItem]) -> Generator[Any, Any, BaseException | None]:
        error: BaseException | None = yield RunBatch(tuple(items))
        return error

    @types.coroutine
    def run_steps(self, steps: HandlerSteps[R]) -> Generator[Any, Any, R]:
        return (yield from steps)

    @types.coroutine
    def acknowledge(self, item: WorkItem) -> Generator[Any, Any, None]:
        yield Acknowledge(item)

    def attempt_failed(self, item: WorkItem, error: BaseException) -> None:
        pass

    def attempt_ended(self, item: WorkItem, error: BaseException | None, decided: Decided | None) -> None:
        self.ended.append((item, error, decided))

    def item_left(self, item: WorkItem) -> None:
        self.left.append(item)
