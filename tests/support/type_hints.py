"""Whether a value is of the type that an annotation names: what a type checker would say, at run time."""

from __future__ import annotations

import builtins
import collections.abc
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, Literal


def fits(value: object, hint: Any) -> bool:
    """True where a type checker would let ``value`` pass for ``hint``, and where this cannot tell."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or isinstance(hint, typing.TypeVar | str):
        return True
    if hint is None or hint is type(None):
        return value is None
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is Literal:
        return any(value is each or (type(value) is type(each) and value == each) for each in inner)
    if origin is tuple:
        return isinstance(value, tuple) and (
            all(fits(each, inner[0]) for each in value)
            if inner[1:] == (...,)
            else len(value) == len(inner) and all(map(fits, value, inner))
        )
    if origin is collections.abc.Callable or hint in (Callable, typing.Callable):
        return callable(value)
    if origin is type:
        return isinstance(value, type)
    if isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
        return isinstance(value, origin) and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items())
    if isinstance(origin, type):  # of an iterable; one that is read by looking at it is not looked into
        elements = value if isinstance(value, list | tuple | set | str | bytes) else ()
        return isinstance(value, origin) and (not inner or all(fits(each, inner[-1]) for each in elements))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is bytes:
        return isinstance(value, bytes | bytearray | memoryview)
    if getattr(hint, "_is_protocol", False):
        if "__call__" in vars(hint):
            return callable(value)
        wanted = {name for kind in hint.__mro__ if getattr(kind, "_is_protocol", False) for name in vars(kind)}
        return not isinstance(value, type) and all(hasattr(value, name) for name in wanted if not name.startswith("_"))
    return not isinstance(hint, type) or isinstance(value, hint)


class _Otherwise(dict[str, Any]):
    """Names that a module imports for type checkers only: nothing is known of those types."""

    def __init__(self, known: dict[str, Any]) -> None:
        super().__init__()
        self._known = known

    def __missing__(self, name: str) -> Any:
        if name in self._known or hasattr(builtins, name):
            raise KeyError(name)
        return Any


def hints_of(call: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """The arguments that a function takes, each with its type and its default.

    Keywords that are declared as a ``TypedDict`` count as arguments; ``*args`` is called that, and its type is that of
    each.
    """
    module = inspect.getmodule(call)
    names = vars(typing) | (vars(module) if module else {})
    hints = typing.get_type_hints(call, names, _Otherwise(names))
    found: dict[str, tuple[Any, Any]] = {}
    for name, parameter in inspect.signature(call).parameters.items():
        hint = hints.get(name, Any)
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            if typing.get_origin(hint) is typing.Unpack:
                keywords = typing.get_type_hints(typing.get_args(hint)[0])
                found |= {each: (kind, None) for each, kind in keywords.items()}
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            found[f"*{name}"] = (hint, None)
        else:
            found[name] = (hint, parameter.default)
    return found


def fields_of(kind: type) -> dict[str, Any]:
    """The fields of a dataclass that its constructor takes, with their types."""
    hints = typing.get_type_hints(kind)
    return {each.name: hints[each.name] for each in dataclasses.fields(kind) if each.init}
