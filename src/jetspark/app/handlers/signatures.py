"""Check what a handler is declared with: its events, its function's parameters, and its key.

A mistake in a declaration would fail for every event, and make each of them a dead letter. Types that exist only inside
a function, or for type checkers, cannot be resolved here: they are checked when the application starts.
"""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import msgspec

from jetspark.app.contracts.catalogue import contract_of
from jetspark.app.contracts.field_rules import field_names
from jetspark.app.handlers.context import Context, injected_parameters
from jetspark.core.arguments import instance, unfit
from jetspark.errors import ConfigError

__all__ = ["check_events", "check_function", "check_key"]

_POSITIONAL = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
)
_NEVER_EVENTS = {bool, int, float, complex, str, bytes, bytearray, dict, set, frozenset}
_CONTAINERS = (list, tuple, set, frozenset, dict, msgspec.Struct)


def check_events(where: str, events: Sequence[object]) -> None:
    """Check the types of events that a handler takes.

    Raises:
        ConfigError: The sequence is empty, or contains something other than a type of event.
    """
    if not events:
        raise ConfigError(f"{where}: expected at least one event type")
    for kind in events:
        instance("event", kind, type, "a type of event")
        contract_of(kind)


def check_key(where: str, key: object, events: Sequence[type[object]]) -> None:
    """Check a key: a field that every event has, or a function that takes an event.

    Raises:
        ConfigError: It is neither.
    """
    if callable(key):
        _check_key_function(where, key)
        return
    if not isinstance(key, str):
        raise unfit(f"{where}: key", key, "the name of a field, a function of the event, or None for the event's own")
    if "{" in key:
        raise ConfigError(
            f"{where}: key={key!r}: a template is for the key= of an event's class; expected the name of a field, or a "
            f"function such as key=lambda event: f{key.replace('{', '{event.')!r}"
        )
    for kind in events:
        names = field_names(kind)
        if key not in names:
            raise ConfigError(
                f"{where}: key={key!r}: {kind.__name__} has no such field; its fields are "
                f"{', '.join(names) or 'none'}. Without key= it is the event's own"
            )
        _check_key_field(where, key, kind)


def _check_key_function(where: str, key: Callable[..., Any]) -> None:
    name = getattr(key, "__qualname__", repr(key))
    if inspect.iscoroutinefunction(key):
        raise ConfigError(f"{where}: key={name}: expected a plain function, and it is async")
    if not _takes(key, 1):
        raise ConfigError(
            f"{where}: key={name}{inspect.signature(key)}: expected a function that is called with the event alone"
        )


def _check_key_field(where: str, key: str, kind: type[object]) -> None:
    hint = _hints(kind).get(key, Any)
    for each in _alternatives(hint):
        plain = typing.get_origin(each) or each
        if isinstance(plain, type) and (issubclass(plain, _CONTAINERS) or dataclasses.is_dataclass(plain)):
            shown = getattr(each, "__name__", str(each))
            raise ConfigError(
                f"{where}: key={key!r}: {kind.__name__}.{key} is a {shown}; expected a field of one value, such as a "
                "text or a number, or a function that makes one of it"
            )


def check_function(
    where: str, function: Callable[..., object], events: Sequence[type[object]], *, is_batch: bool
) -> None:
    """Check a handler's function: an async function of the event, with a type for each other parameter.

    Raises:
        ConfigError: A parameter or the annotation of its result does not fit.
    """
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"{where}: expected an async function")
    first = next(iter(inspect.signature(function).parameters.values()), None)
    what = "a list of events" if is_batch else "the event"
    if first is None or first.kind not in _POSITIONAL:
        raise ConfigError(f"{where}: expected {what} as its first parameter")
    for name, wanted in injected_parameters(function, where).items():
        if wanted is Context and is_batch:
            raise ConfigError(f"{where}: a batch handler has no context, since its events have no one cause: {name!r}")
        if not isinstance(wanted, type | str):
            raise ConfigError(
                f"{where}: parameter {name!r} is annotated {wanted}: expected a class, of which a lifespan yields one "
                "object"
            )
    if first.kind is not inspect.Parameter.VAR_POSITIONAL:
        _check_first(where, function, first, events, is_batch)
    if not is_batch:
        _check_result(where, function)


def _check_first(
    where: str,
    function: Callable[..., object],
    first: inspect.Parameter,
    events: Sequence[type[object]],
    is_batch: bool,
) -> None:
    """Check that the first parameter's annotation, as far as it can be looked up, allows every event."""
    hint = _hints(function).get(first.name, Any)
    names = " | ".join(kind.__name__ for kind in events)
    expected = f"{first.name}: list[{names}]" if is_batch else f"{first.name}: {names}"
    shown = getattr(hint, "__name__", str(hint)) if isinstance(hint, type) else str(hint)
    wrong = ConfigError(f"{where}: its first parameter is `{first.name}: {shown}`: expected `{expected}`")
    kinds = [typing.get_origin(each) or each for each in _alternatives(hint)]
    if is_batch:
        if Any not in kinds and all(isinstance(kind, type) and not _is_subclass(list, kind) for kind in kinds):
            raise wrong
        items = typing.get_args(hint)
        if len(kinds) > 1 or len(items) != 1:
            return
        kinds = [typing.get_origin(each) or each for each in _alternatives(items[0])]
    if Any in kinds or not all(isinstance(kind, type) for kind in kinds):
        return  # Any, a type variable: whatever it takes
    for event in events:
        if not any(_is_subclass(event, kind) for kind in kinds):
            raise wrong


def _check_result(where: str, function: Callable[..., object]) -> None:
    """Check that the annotation of the result, as far as it can be looked up, allows what can be published.

    A wrong result fails only after the handler has done its work, for every event. Classes without a contract pass:
    they may be bases of events, or become events later.
    """
    for each in _alternatives(_hints(function).get("return", Any)):
        plain = typing.get_origin(each) or each
        is_list = isinstance(plain, type) and issubclass(plain, list | tuple)
        for kind in _item_kinds(each) if is_list else [plain]:
            if isinstance(kind, type) and (
                kind in _NEVER_EVENTS or issubclass(kind, list | tuple | Iterator | AsyncIterator)
            ):
                shown = getattr(each, "__name__", str(each)) if isinstance(each, type) else str(each)
                raise ConfigError(f"{where}: it returns `{shown}`: expected an event, a list of events, or None")


def _item_kinds(hint: object) -> list[Any]:
    """The classes of the items of a list or tuple."""
    items = [inner for item in typing.get_args(hint) for inner in _alternatives(item)]
    return [typing.get_origin(item) or item for item in items]


def _is_subclass(event: type[object], kind: type[object]) -> bool:
    try:
        return issubclass(event, kind)
    except TypeError:  # a protocol with attributes
        return True


def _takes(function: Callable[..., object], count: int) -> bool:
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # of a builtin, which has no signature
        pass
    return True


def _hints(thing: object) -> dict[str, Any]:
    try:
        return typing.get_type_hints(thing)
    except (NameError, TypeError):
        return {}


def _alternatives(hint: object) -> list[Any]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return [inner for each in typing.get_args(hint) for inner in _alternatives(each)]
    return [hint]
