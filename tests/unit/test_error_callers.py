"""Every error and everybody who meets it: who tries again, and who gives up.

``may_pass`` decides everywhere. The exceptions are below, each with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.error_examples import EXAMPLES

from jetspark import errors
from jetspark.aio.jetstream import JetStream
from jetspark.app import App
from jetspark.app.commands.decider import CommandStep
from jetspark.app.commands.decision_store import CommandStore, judge
from jetspark.app.contracts.catalogue import Catalogue
from jetspark.app.entities.committer import asking_again
from jetspark.app.handlers.retry import GiveUp, RetryPolicy, decide
from jetspark.app.patience import patiently
from jetspark.app.projections.leases import Lease
from jetspark.app.projections.projection_worker import ProjectionWorker
from jetspark.batcher.retry import is_retryable
from jetspark.core.step_runner import ReadClock
from jetspark.errors import JetSparkError
from jetspark.jetstream.ordered import OrderedOptions, OrderedReader
from jetspark.publish.steps import Procedure
from jetspark.spark.connections import will_pass
from jetspark.state.patience import Persistence
from jetspark.testing import run_in_virtual_time


class FailsOnce:
    """Raises the error, and succeeds after that."""

    def __init__(self, error: JetSparkError) -> None:
        self.error, self.calls = error, 0

    def __call__(self) -> int:
        self.calls += 1
        if self.calls == 1:
            raise self.error
        return 1

    async def later(self, *args: Any, **options: Any) -> int:
        return self()


def procedure(error: JetSparkError) -> bool:
    def act() -> Procedure[int]:
        yield ReadClock()
        return once()

    once = FailsOnce(error)
    steps = Persistence(10.0).attempt(act)
    try:
        step = next(steps)
        while True:
            step = steps.send(1.0 if isinstance(step, ReadClock) else None)
    except StopIteration:
        return True
    except JetSparkError:
        return False


def _in_virtual_time(call: Callable[[FailsOnce], Any], error: JetSparkError) -> bool:
    async def attempt() -> None:
        await call(FailsOnce(error))

    try:
        run_in_virtual_time(attempt())
    except JetSparkError:
        return False
    return True


def app_patience(error: JetSparkError) -> bool:
    return _in_virtual_time(lambda once: patiently(once.later), error)


def entity(error: JetSparkError) -> bool:
    return _in_virtual_time(lambda once: asking_again(once.later), error)


def command_read(error: JetSparkError) -> bool:
    class Store(CommandStore):
        def __init__(self, once: FailsOnce) -> None:
            self.once = once

        async def _read(self, step: CommandStep) -> Any:
            return self.once()

    return _in_virtual_time(lambda once: Store(once)._perform(None), error)  # type: ignore[arg-type]


def command_append(error: JetSparkError) -> bool:
    try:
        judge(error)
    except JetSparkError:
        return False
    return True


def projection(error: JetSparkError) -> bool:
    app = App("orders", stream="ORDERS", subjects=["orders.>"])

    class Worker(ProjectionWorker):
        def __init__(self, once: FailsOnce) -> None:
            js: JetStream = None  # type: ignore[assignment]
            super().__init__(app.spec, [], js, catalogue=Catalogue())
            self.once = once

        async def _run_once(self, *args: object) -> None:
            self.once()

    return _in_virtual_time(lambda once: Worker(once)._work(None, None), error)  # type: ignore[arg-type]


def lease(error: JetSparkError) -> bool:
    class Records:
        def __init__(self, once: FailsOnce) -> None:
            self.create = once.later

    class FreeSoon(Lease):
        async def _until_free(self) -> None:
            """The other process ends."""

    return _in_virtual_time(lambda once: FreeSoon(Records(once), "key", "owner").acquire(), error)  # type: ignore[arg-type]


def handler(error: JetSparkError) -> bool:
    return not isinstance(decide(RetryPolicy(), 1, error, 0.5), GiveUp)


def ordered(error: JetSparkError) -> bool:
    return OrderedReader(OrderedOptions()).may_pass(error)


CALLERS: dict[str, Callable[[JetSparkError], bool]] = {
    "procedure": procedure,
    "app patience": app_patience,
    "entity": entity,
    "command read": command_read,
    "command append": command_append,
    "projection": projection,
    "lease": lease,
    "handler": handler,
    "ordered": ordered,
    "batcher": is_retryable,
    "spark": will_pass,
}

CONTRACTS = {
    cls.__name__ for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, errors.ContractViolation)
}

# Caller -> errors that it treats otherwise than `may_pass` says.
OTHERWISE: dict[str, dict[str, str]] = {
    "spark": {"ConnectionClosed": "the next attempt has another connection"},
    "ordered": {
        "NoServersAvailable": "the client itself has given up",
        "StreamWentBack": "a replica that is behind may answer; a few times, then it is final",
    },
    "command append": {
        "WrongLastSequence": "others have written: the command is decided again",
        "DroppedOnShutdown": "of a batcher, which says that its items may be stored: it is looked up",
        "DuplicateMessageId": "an earlier attempt is stored: its reply is read",
    },
    "lease": {"KeyExists": "another process has it, and will end"},
    # A handler's own code raises these, and what is wrong for one call of a server may be right for the next event.
    # Only what can never succeed is given up: an event that breaks its contract, and what this user may not publish.
    "handler": {
        type(error).__name__: "the policy says that unknown errors are tried again"
        for error in EXAMPLES
        if not error.may_pass and type(error).__name__ not in CONTRACTS | {"PermissionDenied"}
    },
}


@pytest.mark.parametrize("caller", CALLERS)
def test_who_tries_again(caller: str) -> None:
    assert EXAMPLES
    otherwise = OTHERWISE.get(caller, {})
    expected = {type(error).__name__: error.may_pass is not (type(error).__name__ in otherwise) for error in EXAMPLES}
    assert {type(error).__name__: CALLERS[caller](error) for error in EXAMPLES} == expected


def test_the_exceptions_are_of_callers_and_errors_that_exist() -> None:
    names = {type(error).__name__ for error in EXAMPLES}
    assert OTHERWISE.keys() <= CALLERS.keys()
    assert {name for exceptions in OTHERWISE.values() for name in exceptions} <= names
