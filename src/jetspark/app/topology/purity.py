"""Find what makes a function give another answer the next time: clocks, chance, new ids.

Folds, decisions and upcasts are run again on the same events, and have to come to the same result. The bytecode is
read, not run: names that lead to such a function, also through methods of the class and functions of its module. What
is called through anything else, such as an object in an attribute, is not seen.
"""

from __future__ import annotations

import datetime
import dis
import os
import random
import secrets
import time
import types
import uuid
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["impure_names"]

_MODULES = (random, secrets)
"""Everything in them is chance."""
_OF_TIME = {"sleep", "strftime", "strptime", "mktime", "struct_time"}
"""Functions of ``time`` that read no clock, or do nothing but wait."""
_NAMES = {
    datetime.datetime: {"now", "utcnow", "today"},
    datetime.date: {"today"},
    uuid: {"uuid1", "uuid4", "uuid6", "uuid7", "getnode"},
    os: {"urandom", "getrandom", "getpid", "environ", "getenv"},
}
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME"}


def impure_names(function: Any, owner: type[Any] | None = None) -> list[str]:
    """What a function uses that has another answer each time, such as ``datetime.now``; each once.

    Args:
        owner: The class whose method it is; methods that it calls of ``self`` are read as well.
    """
    return list(dict.fromkeys(_found(function, owner, set())))


def _found(function: Any, owner: type[Any] | None, seen: set[types.CodeType]) -> Iterator[str]:
    plain = getattr(function, "__func__", function)
    code = getattr(plain, "__code__", None)
    if isinstance(code, types.CodeType):
        yield from _in_code(code, plain, owner, seen)


def _in_code(
    code: types.CodeType, function: Callable[..., Any], owner: type[Any] | None, seen: set[types.CodeType]
) -> Iterator[str]:
    if code in seen:
        return
    seen.add(code)
    names = getattr(function, "__globals__", {})
    first = code.co_varnames[0] if code.co_argcount else None
    current: Any = None
    path = ""
    for step in dis.get_instructions(code):
        if step.opname in _GLOBALS:
            current, path = names.get(step.argval), str(step.argval)
        elif step.opname in _ATTRIBUTES and current is not None:
            if _is_impure_name(current, step.argval):
                yield f"{path}.{step.argval}"
            current, path = _attribute(current, step.argval), f"{path}.{step.argval}"
        elif step.opname.startswith("LOAD_FAST") and step.argval == first and owner is not None:
            current, path = owner, str(first)
            continue
        else:
            current = None
        if _is_impure(current):
            yield path
        elif isinstance(current, types.FunctionType) and current.__module__ == getattr(function, "__module__", None):
            yield from _found(current, owner if path.startswith(f"{first}.") else None, seen)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _in_code(inner, function, owner, seen)


def _attribute(holder: Any, name: str) -> Any:
    """An attribute of a module or class; of anything else it would be read by code of its own."""
    return getattr(holder, name, None) if isinstance(holder, types.ModuleType | type | random.Random) else None


def _is_impure_name(holder: Any, name: str) -> bool:
    return any(name in names for known, names in _NAMES.items() if holder is known)


def _is_impure(found: Any) -> bool:
    """Whether something is a function of a clock or of chance."""
    if isinstance(getattr(found, "__self__", None), random.Random):
        return True
    module, name = getattr(found, "__module__", None), getattr(found, "__name__", "")
    if not callable(found) or isinstance(found, type):
        return False
    if module == time.__name__:
        return name not in _OF_TIME
    if module in {each.__name__ for each in _MODULES}:
        return True
    return module == uuid.__name__ and name in _NAMES[uuid]
