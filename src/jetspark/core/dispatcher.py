"""Delivers the events of a connection to readers, waiting calls, machines and the program."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from jetspark.core.events import Closed, Connected, ConnectionEvent, ErrorReported, OnEvent, log_event
from jetspark.core.machine import Attached
from jetspark.core.subscription import Done, Event, Failed, Ready

__all__ = ["Dispatcher"]


class Dispatcher:
    """Delivers the events of one connection. Nothing here waits; the driver calls it without its lock."""

    def __init__(self, logger: logging.Logger, on_event: OnEvent | None) -> None:
        self._logger, self._on_event = logger, on_event
        self._was_connected = False
        self.attached: list[Attached] = []
        """Machines of our own; they get an event before the program does, so that the program finds them up to date."""

    def attach(self, attached: Attached) -> None:
        """Send it every connection event from now on, and call it at its ``next_deadline``.

        A second call has no effect.
        """
        if attached not in self.attached:
            self.attached.append(attached)

    def detach(self, attached: Attached) -> None:
        """Send it no more events. May be called twice: an interrupted caller leaves again."""
        if attached in self.attached:
            self.attached.remove(attached)

    def next_deadline(self) -> float | None:
        """The earliest deadline of all attached machines."""
        return min((at for each in self.attached if (at := each.next_deadline()) is not None), default=None)

    def due(self, now: float) -> list[Attached]:
        """The attached machines whose deadline has come."""
        return [each for each in self.attached if (at := each.next_deadline()) is not None and now >= at]

    def deliver(self, events: list[Event]) -> None:
        """Pass on what :meth:`Connection.events` returned, in order."""
        for event in events:
            match event:
                case Ready(subscription):
                    if subscription.reader is not None:
                        self.guard(subscription.reader.wake)
                case Done(handle, result):
                    if not handle.done():  # its waiter may have cancelled it
                        handle.set_result(result)
                case Failed(handle, error):
                    if not handle.done():
                        handle.set_exception(error)
                case _:
                    self._publish_event(event)

    def report(self, error: Exception) -> None:
        """Report an error that ends nothing, such as one raised by the program's own callback."""
        self._publish_event(ErrorReported(error))

    def guard(self, call: Callable[..., None], *args: Any) -> None:
        """Call one reader. An error is logged and reported, so that it ends neither the connection nor other
        readers."""
        try:
            call(*args)
        except Exception as error:
            self._logger.exception("%r failed; the connection and its other readers continue", call)
            self._call_program(ErrorReported(error))

    def _publish_event(self, event: ConnectionEvent) -> None:
        self._was_connected |= isinstance(event, Connected)
        # The caller of the first connect gets an exception; a log line would repeat it.
        if self._was_connected or not isinstance(event, Closed):
            log_event(self._logger, event)
        for attached in list(self.attached):  # a copy: an event may detach it
            self.guard(attached.on_event, event)
        self._call_program(event)

    def _call_program(self, event: ConnectionEvent) -> None:
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                self._logger.exception("on_event raised for %r; the connection continues", event)
