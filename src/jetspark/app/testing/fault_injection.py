"""Faults by name: something goes wrong now, or when a worker comes to a step."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from jetspark.app.application import App, Lifespan
from jetspark.app.handlers.handler_spec import HandlerFunction
from jetspark.app.handlers.retry import Reject
from jetspark.app.testing.app_copies import changed_app, with_specs
from jetspark.app.testing.steps import SeenStep, StepMoment, StepReader, parse_moment
from jetspark.testing.network import Front, Publication

__all__ = ["DependencySwitch", "InjectedFault", "Injector", "watched_app", "with_switch"]


@dataclass(slots=True, kw_only=True)
class InjectedFault:
    """A fault that a test has ordered."""

    name: str
    happened: int = 0
    """How often the fault happened: a fault that never happened proves nothing."""


@dataclass(slots=True)
class _Trap:
    when: StepMoment
    step: str
    handler: str | None
    act: Callable[[], bool]
    """Returns whether the message of the step is lost."""
    fault: InjectedFault
    left: int


class Injector:
    """Sees every step of an application's workers, and springs what a test has set."""

    def __init__(self, app: App, front: Front, is_worker: Callable[[int], bool]) -> None:
        self.observers: list[Callable[[StepMoment, SeenStep, Any], None]] = []
        """Each is called with every step and its message; with ``RunHandler`` the message is the event."""
        self.run_hooks: list[Callable[[StepMoment, str, Any], Awaitable[None]]] = []
        """Each is awaited before and after the handler's own code, as a part of it: it may raise and may take time."""
        self._front, self._is_worker = front, is_worker
        self._reader = StepReader(app)
        self._traps: list[_Trap] = []
        front.gates.append(self._on_message)

    def set(self, at: str, act: Callable[[], bool], *, name: str, handler: str | None, times: int) -> InjectedFault:
        """Have ``act`` called when a worker comes to a step, the next ``times`` times."""
        when, step = parse_moment(at)
        fault = InjectedFault(name=f"{name} {at}")
        self._traps.append(_Trap(when, step, handler, act, fault, times))
        return fault

    def reject(self, times: int, handler: str | None, after: int) -> InjectedFault:
        """Have ``times`` runs of a handler, or of any, refuse their events for good, after some that do not."""
        fault, passed = InjectedFault(name="reject"), 0

        async def refuse(when: StepMoment, name: str, event: object) -> None:
            nonlocal passed
            if when != "before" or handler not in (None, name) or fault.happened == times:
                return
            if passed < after:
                passed += 1
                return
            fault.happened += 1
            raise Reject("by order of the test")

        self.run_hooks.append(refuse)
        return fault

    async def at_run(self, when: StepMoment, handler: str, event: object) -> None:
        """A worker comes to the handler's own code, or from it."""
        if self._spring(when, SeenStep("RunHandler", handler), event):
            await asyncio.get_running_loop().create_future()  # it died here
        for hook in self.run_hooks:
            await hook(when, handler, event)

    def _on_message(self, message: Publication) -> bool:
        if not self._is_worker(message.client):
            return True
        step = self._reader.read(message)
        if step is None:
            return True
        if self._spring("before", step, message):
            return False
        # Scheduled after the server has processed the message.
        self._front.clock.after(0.0, lambda: self._after(step, message))
        return True

    def _after(self, step: SeenStep, message: Publication) -> None:
        self._spring("after", step, message)

    def _spring(self, when: StepMoment, step: SeenStep, what: object) -> bool:
        for observer in self.observers:
            observer(when, step, what)
        is_lost = False
        for trap in [each for each in self._traps if (each.when, each.step) == (when, step.name)]:
            if trap.handler is None or step.handler is None or trap.handler == step.handler:
                trap.left -= 1
                if not trap.left:
                    self._traps.remove(trap)
                trap.fault.happened += 1
                is_lost = trap.act() or is_lost
        return is_lost


def watched_app(app: App, at_run: Callable[[StepMoment, str, Any], object]) -> App:
    """The same application with handlers that report their start and end."""
    return with_specs(app, lambda spec: dataclasses.replace(spec, function=_watched(spec.function, spec.name, at_run)))


def _watched(function: HandlerFunction, name: str, at_run: Callable[[StepMoment, str, Any], Any]) -> HandlerFunction:
    @functools.wraps(function)  # by its signature it is given what it wants
    async def run(event: object, *arguments: object, **named: object) -> object:
        await at_run("before", name, event)
        result = await function(event, *arguments, **named)
        await at_run("after", name, event)
        return result

    return run


# Operators and statements look these up on the class: an object with one of them is left as it is.
_SPECIAL = ("__call__", "__getitem__", "__iter__", "__aiter__", "__enter__", "__aenter__", "__await__", "__len__")


class DependencySwitch:
    """While it is down, every call of a method of a dependency raises ``ConnectionError``."""

    def __init__(self) -> None:
        self.is_down = False
        self.refused = 0
        """Calls that failed."""

    def check(self, name: str) -> None:
        if self.is_down:
            self.refused += 1
            raise ConnectionError(f"{name} is down, by order of the test")

    def stand_in(self, target: object) -> object:
        """An object that replaces another one and reports the same class."""
        kind = type(target)
        if kind.__module__ == "builtins" or any(name in vars(base) for base in kind.__mro__ for name in _SPECIAL):
            return target
        # By its name a dependency is found where its type is only known inside of a function.
        return type(kind.__name__, (_StandIn,), {"_target": target, "_switch": self})()


class _StandIn:
    _target: object
    _switch: DependencySwitch

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._target)

    def __getattr__(self, name: str) -> object:
        value = getattr(self._target, name)
        if name.startswith("_") or not callable(value):
            return value
        return _switched(value, self._switch, f"{type(self._target).__name__}.{name}")

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._target, name, value)


def _switched(function: Callable[..., object], switch: DependencySwitch, name: str) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*arguments: object, **named: object) -> object:
            switch.check(name)
            return await function(*arguments, **named)

        return call_async

    @functools.wraps(function)
    def call(*arguments: object, **named: object) -> object:
        switch.check(name)
        return function(*arguments, **named)

    return call


def with_switch(app: App, switch: DependencySwitch) -> App:
    """The same application, whose dependencies can be switched off."""
    return changed_app(app, lifespans=tuple(_switched_lifespan(each, switch) for each in app.spec.lifespans))


def _switched_lifespan(lifespan: Lifespan, switch: DependencySwitch) -> Lifespan:
    async def run() -> AsyncIterator[object]:
        async with aclosing(lifespan()) as made:  # type: ignore[type-var]
            async for each in made:
                stand_ins = tuple(map(switch.stand_in, each)) if isinstance(each, tuple) else switch.stand_in(each)
                yield stand_ins

    return run
