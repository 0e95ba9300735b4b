"""The signals that end a process, for any number of applications that run in it and for the program around them.

Python has one handler for each signal. :func:`on_signals` puts its own in front of the one that is there, which is
called as well, and takes it away when the last application has ended. It does not go through the event loop, which has
one callback for each signal, too: those of the program stay, and are called by the loop.
"""

from __future__ import annotations

import asyncio
import functools
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

__all__ = ["on_signals"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_listeners: list[Callable[[], object]] = []
_before: dict[int, Any] = {}
"""The handlers that were there when the first listener came."""


@contextmanager
def on_signals(ended: asyncio.Event) -> Iterator[None]:
    """Set the event when the process is asked to end, by SIGTERM or Ctrl-C.

    Only the main thread can be asked: in another one this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()

    def tell() -> None:
        with suppress(RuntimeError):  # the event loop was closed around the application
            loop.call_soon_threadsafe(ended.set)

    if not _listeners:
        for number in _SIGNALS:
            _before[number] = signal.getsignal(number)
            signal.signal(number, _on_signal)
    _listeners.append(tell)
    try:
        yield
    finally:
        _listeners.remove(tell)
        if not _listeners:
            for number in _SIGNALS:
                before = _before.pop(number)
                if signal.getsignal(number) is _on_signal:  # else the program has put its own there since
                    signal.signal(number, before if before is not None else signal.SIG_DFL)


def _on_signal(number: int, frame: FrameType | None) -> None:
    for tell in _listeners.copy():
        tell()
    before = _before.get(number)
    if callable(before) and not _ends_at_once(before):
        before(number, frame)


def _ends_at_once(handler: Any) -> bool:
    """Whether the orderly end takes its place."""
    if isinstance(handler, functools.partial):  # of asyncio.run: it cancels the main task
        return getattr(handler.func, "__func__", None) is getattr(asyncio.Runner, "_on_sigint", None)
    # That of the command line, too, which ends the program until an application is there to be ended.
    return handler is signal.default_int_handler or getattr(handler, "ends_at_once", False)
