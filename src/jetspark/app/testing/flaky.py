"""What handlers depend on, to be switched off: the objects that lifespans yield, each behind a stand-in."""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from jetspark.app.application import App, Lifespan
from jetspark.app.testing.copies import changed_app

__all__ = ["DependencySwitch", "with_switch"]

# Used by operators and statements, which look at the class: an object with one of these is left as it is.
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

    def stand_in(self, target: Any) -> Any:
        """An object that is used in place of another, of the same class as far as anybody can ask."""
        kind = type(target)
        if kind.__module__ == "builtins" or any(name in vars(base) for base in kind.__mro__ for name in _SPECIAL):
            return target
        # By its name a dependency is found where its type is only known inside of a function.
        return type(kind.__name__, (_StandIn,), {"_target": target, "_switch": self})()


class _StandIn:
    _target: Any
    _switch: DependencySwitch

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._target)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if name.startswith("_") or not callable(value):
            return value
        return _switched(value, self._switch, f"{type(self._target).__name__}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target, name, value)


def _switched(function: Callable[..., Any], switch: DependencySwitch, name: str) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def call_async(*arguments: Any, **named: Any) -> Any:
            switch.check(name)
            return await function(*arguments, **named)

        return call_async

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        switch.check(name)
        return function(*arguments, **named)

    return call


def with_switch(app: App, switch: DependencySwitch) -> App:
    """The same application, whose dependencies can be switched off."""
    return changed_app(app, lifespans=tuple(_switched_lifespan(each, switch) for each in app.spec.lifespans))


def _switched_lifespan(lifespan: Lifespan, switch: DependencySwitch) -> Lifespan:
    async def run() -> AsyncIterator[Any]:
        async with aclosing(lifespan()) as made:  # type: ignore[type-var]
            async for each in made:
                stand_ins = tuple(map(switch.stand_in, each)) if isinstance(each, tuple) else switch.stand_in(each)
                yield stand_ins

    return run
