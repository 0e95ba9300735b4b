"""The signals that end a process, for any number of applications that run in it and for the program around them.

Python has one handler for each signal. :func:`on_signals` installs its own in front of the present one, which it calls
as well, and removes it when the last application has ended. It does not use the event loop, which has only one callback
for each signal: the program's callbacks stay, and are called by the loop.

A program may install a handler of its own while an application runs, which calls this one; it stays when the
application has ended. The next application installs this one again, in front of it. So the handlers that were found are
a stack, which keeps its first entry: each call from inside of a call continues with the entry below.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TypeAlias

__all__ = ["on_signals"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

SignalHandler: TypeAlias = Callable[[int, FrameType | None], object] | int | signal.Handlers | None

_listeners: list[Callable[[], object]] = []
_before: dict[int, list[SignalHandler]] = {number: [] for number in _SIGNALS}
"""The handlers that were found when a first listener came, the newest last."""
_depths: dict[int, int] = dict.fromkeys(_SIGNALS, 0)
"""Calls of :func:`_on_signal` that have not returned."""


@contextmanager
def on_signals(ended: asyncio.Event) -> Iterator[None]:
    """Set the event when the process gets SIGTERM or Ctrl-C.

    Only the main thread gets signals: in another one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def notify() -> None:
        with suppress(RuntimeError):  # the event loop was closed around the application
            loop.call_soon_threadsafe(ended.set)

    if not _listeners:
        for number in _SIGNALS:
            _install(number)
    _listeners.append(notify)
    try:
        yield
    finally:
        _listeners.remove(notify)
        if not _listeners:
            for number in _SIGNALS:
                if signal.getsignal(number) is _on_signal:  # else the program has put its own there since
                    _restore(number)


def _install(number: int) -> None:
    found, before = signal.getsignal(number), _before[number]
    if found is _on_signal:  # the program has installed it again
        return
    if found in before:
        del before[before.index(found) :]
    before.append(found)
    signal.signal(number, _on_signal)


def _restore(number: int) -> None:
    found = _before[number]
    before = found.pop() if len(found) > 1 else found[0]
    signal.signal(number, before if before is not None else signal.SIG_DFL)


def _on_signal(number: int, frame: FrameType | None) -> None:
    for notify in _listeners.copy():
        notify()
    if not _listeners and signal.getsignal(number) is _on_signal:
        _restore(number)  # the program has installed it again since the last application ended
        signal.raise_signal(number)
        return
    depth, found = _depths[number], _before[number]
    before = found[-1 - depth] if depth < len(found) else None
    _depths[number] += 1
    try:
        if callable(before) and not (_listeners and _ends_at_once(before)):
            before(number, frame)
    finally:
        _depths[number] -= 1


def _ends_at_once(handler: object) -> bool:
    """True for a handler that would end the process at once; the orderly end replaces it."""
    if isinstance(handler, functools.partial):  # of asyncio.run: it cancels the main task
        return getattr(handler.func, "__func__", None) is getattr(asyncio.Runner, "_on_sigint", None)
    # That of the command line, too, which ends the program until an application is there to be ended.
    return handler is signal.default_int_handler or getattr(handler, "ends_at_once", False)
