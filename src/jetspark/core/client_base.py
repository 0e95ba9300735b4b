"""What both drivers' clients and subscriptions have in common: facts, and nothing that waits."""

from __future__ import annotations

from jetspark.core.connection import Connection
from jetspark.core.info import ServerInfo
from jetspark.core.link import Crowd, DriverLink
from jetspark.core.options import ConnectOptions
from jetspark.core.subscription import SubscriptionState

__all__ = ["ClientBase", "SubscriptionBase", "SubscriptionReaderBase"]


class ClientBase:
    """The facts of a connection."""

    _machine: Connection

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

    def _is_readable(self) -> bool:
        """Whether nobody has to wait any more: for a message, or for the end."""
        return bool(self._state.pending) or self._state.is_finished


class SubscriptionReaderBase:
    """The reader of a subscription, but for the waiting."""

    state: SubscriptionState

    def __init__(self, link: DriverLink, changed: Crowd) -> None:
        """``changed`` are those who wait for messages."""
        self._link, self.changed = link, changed

    def wake(self) -> None:
        with self._link.lock:
            self.changed.notify_all()

    @property
    def pending_messages(self) -> int:
        return len(self.state.pending)
