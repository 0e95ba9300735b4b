"""Finds calls that make a function return another result the next time: clocks, random numbers, new ids.

Folds, decisions and upcasts run again on the same events and must return the same result. The bytecode is read, not
run: names that lead to an impure function through globals, closures, imports inside the function (which are imported
here too), methods of the class, decorators, and functions of the application's own modules. A function that is called
through anything else, such as an object in an attribute, is not found.
"""

from __future__ import annotations

import datetime
import dis
import functools
import os
import random
import re
import secrets
import sysconfig
import time
import types
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["impure_names"]

_MODULES = (random, secrets)
"""Everything in them is random."""
_OF_TIME = {"sleep", "strftime", "strptime", "mktime", "struct_time"}
"""Functions of ``time`` that read no clock, or do nothing but wait."""
_NAMES: dict[object, set[str]] = {
    datetime.datetime: {"now", "utcnow", "today"},
    datetime.date: {"today", "fromtimestamp"},
    uuid: {"uuid1", "uuid4", "uuid6", "uuid7", "getnode"},
    os: {"urandom", "getrandom", "getpid", "environ", "getenv"},
}
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
_ATTRIBUTES = {"LOAD_ATTR", "LOAD_METHOD"}
_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME"}
# From a fold through helpers of helpers: bounds the recursion.
_MAX_DEPTH = 20


def impure_names(function: object, owner: type | None = None) -> list[str]:
    """The names a function uses whose result differs from call to call, such as ``datetime.now``; each once.

    Args:
        owner: The class whose method it is; methods that it calls of ``self`` are read as well.
    """
    return list(dict.fromkeys(_found(function, owner, set(), 0)))


def _found(function: object, owner: type | None, seen: set[types.CodeType], depth: int) -> Iterator[str]:
    for plain in _layers(function):
        if depth > _MAX_DEPTH or (depth and not _is_of_application(plain)):
            continue
        code = plain.__code__
        known: dict[str, object] = {code.co_varnames[0]: owner} if code.co_argcount and owner is not None else {}
        for name, cell in zip(code.co_freevars, plain.__closure__ or (), strict=True):
            if cell != types.CellType():  # one that is still empty
                known[name] = cell.cell_contents
        yield from _in_code(code, plain.__globals__, known, seen, depth)


def _layers(function: object) -> Iterator[types.FunctionType]:
    """The functions that a call runs: of a method, of a partial, and what decorators have wrapped."""
    while function is not None:
        if isinstance(function, types.MethodType):
            function = function.__func__
        if isinstance(function, types.FunctionType):
            yield function
        if isinstance(function, functools.partial):
            function = function.func
        else:
            function = getattr(function, "__dict__", {}).get("__wrapped__")


def _is_of_application(function: types.FunctionType) -> bool:
    """True for a function that is not part of the standard library, an installed package, or JetSpark.

    The file decides, not the module's name: an application may have a module ``calendar`` or ``statistics``.
    """
    package = (function.__module__ or "").partition(".")[0]
    file = Path(function.__code__.co_filename)
    is_of_python = str(file).startswith("<frozen ") or file.is_relative_to(_STANDARD_LIBRARY)
    is_installed = bool({"site-packages", "dist-packages"} & {*file.parts})
    return package != __name__.partition(".")[0] and not is_of_python and not is_installed


def _in_code(
    code: types.CodeType, names: dict[str, object], known: dict[str, object], seen: set[types.CodeType], depth: int
) -> Iterator[str]:
    if code in seen:
        return
    seen.add(code)
    for holder, found, path in _loads(code, names, known):
        if _is_impure(found):
            yield path
        elif callable(found) and not isinstance(found, type):
            yield from _found(found, holder if isinstance(holder, type) else None, seen, depth + 1)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _in_code(inner, names, dict(known), seen, depth)


def _loads(code: types.CodeType, names: dict[str, object], known: dict[str, object]) -> Iterator[tuple[Any, Any, str]]:
    """Everything that is loaded and known before the code runs: its holder, itself, and its name.

    ``known`` are such names besides globals: ``self``, closures, and imports, which are added.
    """
    holder: object = None
    found: object = None
    module: object = None
    path = ""
    steps = list(dis.get_instructions(code))
    for at, step in enumerate(steps):
        for kind, name in _parts(step):
            if kind in ("SWAP", "POP_TOP"):  # between an import and its name
                continue
            holder, found = found, None
            if kind == "IMPORT_NAME":
                found = module = _imported(name, names, steps[at - 2].argval, steps[at - 1].argval)
            elif kind == "IMPORT_FROM":
                found = _attribute(module, name)
                if isinstance(found, types.ModuleType):  # import a.b.c as d
                    module = found
            elif kind == "STORE" and holder is not None:
                known[name] = holder
            elif kind == "LOAD" or kind in _GLOBALS:
                found, path = (names if kind in _GLOBALS else known).get(name), str(name)
                yield None, found, path
            elif kind in _ATTRIBUTES and holder is not None:
                found, path = _attribute(holder, name), f"{path}.{name}"
                if holder is datetime.datetime and name == "fromtimestamp" and not _has_zone(steps[at:]):
                    yield holder, time.localtime, f"{path} without a time zone"
                yield holder, found, path


def _parts(step: dis.Instruction) -> Iterable[tuple[str, Any]]:
    """Local names are loaded and stored by one of many instructions, from Python 3.13 on also two by one."""
    kinds = re.findall(r"(LOAD|STORE)_(?:FAST|DEREF)", step.opname)
    return zip(kinds or [step.opname], step.argval if len(kinds) > 1 else [step.argval], strict=True)


def _imported(name: str, names: dict[str, object], level: int, fromlist: Any) -> object:
    try:
        return __import__(name, names, None, fromlist or (), level)
    except Exception:  # any code may run; the function would fail as well
        return None


def _has_zone(steps: Sequence[dis.Instruction]) -> bool:
    """True if the call that begins with this attribute has more than one argument, or an unknown number."""
    begins = _beginning(steps[0])
    calls = (each for each in steps if each.opname.startswith("CALL") and _beginning(each) == begins)
    call = next(calls, None)
    return call is None or call.argval != 1


def _beginning(step: dis.Instruction) -> tuple[int | None, int | None]:
    place = step.positions
    return (place.lineno, place.col_offset) if place is not None else (None, None)


def _attribute(holder: object, name: str) -> object:
    """An attribute of a module or class; of anything else it would be read by code of its own."""
    return getattr(holder, name, None) if isinstance(holder, types.ModuleType | type | random.Random) else None


def _is_impure(found: object) -> bool:
    """True for functions that read a clock or a random generator."""
    holder, name = getattr(found, "__self__", None), getattr(found, "__name__", "")
    if isinstance(holder, random.Random) or (isinstance(holder, type) and name in _NAMES.get(holder, ())):
        return True
    if any(found is not None and found is getattr(known, each, None) for known in (os, uuid) for each in _NAMES[known]):
        return True
    if not callable(found) or isinstance(found, type):
        return False
    module = getattr(found, "__module__", None)
    return (module == time.__name__ and name not in _OF_TIME) or module in {each.__name__ for each in _MODULES}
