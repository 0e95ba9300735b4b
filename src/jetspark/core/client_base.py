"""What both drivers' clients and subscriptions have in common: facts, and passing events on; nothing that waits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from jetspark.core.connection import Connection, Done, Event, Failed, Ready
from jetspark.core.events import Closed, Connected, ConnectionEvent, ErrorReported, OnEvent
from jetspark.core.info import ServerInfo
from jetspark.core.logs import log_event
from jetspark.core.options import ConnectOptions
from jetspark.core.subscription import SubscriptionState

__all__ = ["ClientBase", "SubscriptionBase"]


class ClientBase:
    """The facts of a connection, and who is told what happens to it."""

    _machine: Connection
    _logger: logging.Logger
    _on_event: OnEvent | None
    _listeners: list[OnEvent]
    """Our own modules that have to know; told before ``on_event``."""
    _was_connected = False

    @property
    def options(self) -> ConnectOptions:
        return self._machine.options

    @property
    def is_connected(self) -> bool:
        return self._machine.is_connected

    @property
    def is_closed(self) -> bool:
        return self._machine.is_closed

    @property
    def server(self) -> str:
        """The server of the present session, or of the last one."""
        return str(self._machine.server)

    @property
    def servers(self) -> list[str]:
        """Every server known: those named to ``connect`` and those the cluster announced."""
        return [str(server) for server in self._machine.pool.servers]

    @property
    def server_info(self) -> ServerInfo:
        return self._machine.info

    @property
    def max_payload_bytes(self) -> int:
        """The largest message, headers included, that the server accepts."""
        return self._machine.info.max_payload_bytes

    @property
    def buffered_bytes(self) -> int:
        """Published and not yet handed to the network."""
        return self._machine.out_bytes

    @property
    def unconfirmed_messages(self) -> int:
        """Published and handed to the network, but not confirmed by the server; ``flush`` makes it 0."""
        return self._machine.unconfirmed_messages

    def _report(self, error: Exception) -> None:
        self._pass_on([ErrorReported(error)])

    def _pass_on(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Ready(subscription):
                    if subscription.handle is not None:
                        self._guard(subscription.handle._wake)
                case Done(handle, result):
                    if not handle.done():  # it may have been cancelled meanwhile
                        handle.set_result(result)
                case Failed(handle, error):
                    if not handle.done():
                        handle.set_exception(error)
                case _:
                    self._was_connected |= isinstance(event, Connected)
                    # Who connects for the first time is told by an exception; a log would say it twice.
                    if self._was_connected or not isinstance(event, Closed):
                        log_event(self._logger, event)
                    for listener in list(self._listeners):
                        self._guard(listener, event)
                    self._tell_user(event)

    def _guard(self, call: Callable[..., None], *args: Any) -> None:
        """Call one reader. The connection is everybody's: what goes wrong there must not end it for the others."""
        try:
            call(*args)
        except Exception as error:
            self._logger.exception("%r failed; the connection goes on", call)
            self._tell_user(ErrorReported(error))

    def _tell_user(self, event: ConnectionEvent) -> None:
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                self._logger.exception("on_event raised for %r", event)


class SubscriptionBase:
    """The facts of a subscription."""

    _state: SubscriptionState

    @property
    def subject(self) -> str:
        return self._state.subject

    @property
    def queue(self) -> str:
        return self._state.queue

    @property
    def pending_messages(self) -> int:
        """Received and not yet read."""
        return len(self._state.pending)

    @property
    def pending_bytes(self) -> int:
        return self._state.pending_bytes

    @property
    def received(self) -> int:
        """Received in all, dropped ones included."""
        return self._state.received

    @property
    def dropped(self) -> int:
        """Lost because the reader was too slow."""
        return self._state.dropped

    @property
    def is_finished(self) -> bool:
        """Nothing more will arrive. Unread messages may still be there."""
        return self._state.is_finished
