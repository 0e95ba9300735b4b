"""Results of a connection, and their way to readers, waiting calls, machines and the program.

``Connection.events()`` returns answers for waiting calls (``Done``, ``Failed``), subscriptions to read (``Ready``) and
connection events. ``handle`` is the driver's (a future, a waiter): it was given with the call, comes back here, and the
connection never looks at it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from jetspark.core.events import Closed, Connected, ConnectionEvent, ErrorReported, OnEvent, log_event
from jetspark.core.machine import Attached
from jetspark.core.subscription import SubscriptionState

__all__ = ["Dispatcher", "Done", "Event", "Failed", "Ready"]


@dataclass(slots=True)
class Done:
    """An operation succeeded."""

    handle: Any
    result: Any = None


@dataclass(slots=True)
class Failed:
    """An operation failed."""

    handle: Any
    error: Exception


@dataclass(slots=True)
class Ready:
    """A subscription has messages to read, or is over."""

    subscription: SubscriptionState


Event: TypeAlias = Done | Failed | Ready | ConnectionEvent


class Dispatcher:
    """Who is told what happens to one connection. Nothing here waits; the driver calls it without its lock."""

    def __init__(self, logger: logging.Logger, on_event: OnEvent | None) -> None:
        self._logger, self._on_event = logger, on_event
        self._was_connected = False
        self.attached: list[Attached] = []
        """Our own machines; told before the program is, so that it finds them up to date."""

    def attach(self, attached: Attached) -> None:
        """Tell it every connection event from now on, and when the moment of its ``next_deadline`` has come.

        Attaching twice is attaching once.
        """
        if attached not in self.attached:
            self.attached.append(attached)

    def detach(self, attached: Attached) -> None:
        """Tell it nothing more. May be called twice: a caller that was interrupted leaves again."""
        if attached in self.attached:
            self.attached.remove(attached)

    def next_deadline(self) -> float | None:
        """The nearest of what is attached."""
        return min((at for each in self.attached if (at := each.next_deadline()) is not None), default=None)

    def due(self, now: float) -> list[Attached]:
        """Whose time has come."""
        return [each for each in self.attached if (at := each.next_deadline()) is not None and now >= at]

    def deliver(self, events: list[Event]) -> None:
        """Pass on what :meth:`Connection.events` returned, in order."""
        for event in events:
            match event:
                case Ready(subscription):
                    if subscription.reader is not None:
                        self.guard(subscription.reader.wake)
                case Done(handle, result):
                    if not handle.done():  # it may have been cancelled meanwhile
                        handle.set_result(result)
                case Failed(handle, error):
                    if not handle.done():
                        handle.set_exception(error)
                case _:
                    self._tell(event)

    def report(self, error: Exception) -> None:
        """Tell the program of a mistake that ends nothing: a callback of its own raised."""
        self._tell(ErrorReported(error))

    def guard(self, call: Callable[..., None], *args: Any) -> None:
        """Call one reader. The connection is everybody's: what goes wrong there must not end it for the others."""
        try:
            call(*args)
        except Exception as error:
            self._logger.exception("%r failed; the connection goes on", call)
            self._tell_program(ErrorReported(error))

    def _tell(self, event: ConnectionEvent) -> None:
        self._was_connected |= isinstance(event, Connected)
        # Who connects for the first time is told by an exception; a log would say it twice.
        if self._was_connected or not isinstance(event, Closed):
            log_event(self._logger, event)
        for attached in list(self.attached):  # a copy: being told may detach it
            self.guard(attached.on_event, event)
        self._tell_program(event)

    def _tell_program(self, event: ConnectionEvent) -> None:
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                self._logger.exception("on_event raised for %r", event)
