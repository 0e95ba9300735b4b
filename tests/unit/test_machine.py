"""The contract of core/machine.py, kept by every machine and by both drivers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from support.readers import SilentReader

import jetspark.aio.transport
import jetspark.blocking.transport
from jetspark.core.connection import Connection
from jetspark.core.events import (
    Closed,
    Connected,
    ConnectionEvent,
    Disconnected,
    ErrorReported,
    LameDuck,
    Reconnected,
    ReconnectFailed,
    ServersDiscovered,
    SlowConsumer,
)
from jetspark.core.machine import Machine
from jetspark.core.options import ConnectOptions
from jetspark.core.reconnect import Server
from jetspark.errors import ConnectionLost, PermissionDenied
from jetspark.publish.fast_batch import FastMachine
from jetspark.publish.fast_options import FastBatchOptions, FastPublisherOptions
from jetspark.publish.fast_publisher import FastPublisherMachine
from jetspark.publish.window import PublishWindow

A = Server("a", 4222)
NOW = 100.0

EVENTS: list[ConnectionEvent] = [
    Connected("a"),
    Disconnected("a", "gone", 0, 0, 0),
    Reconnected("a"),
    ReconnectFailed("a", ConnectionLost("gone"), 1),
    SlowConsumer("a", 1),
    ErrorReported(PermissionDenied("publish", "a")),
    LameDuck("a"),
    ServersDiscovered(("b",)),
    Closed(None),
]


def connected() -> Connection:
    connection = Connection(ConnectOptions(), [A], inbox="_INBOX.me", jitter=lambda: 0.0)
    connection.begin(A)
    connection.receive_data(b'INFO {"max_payload": 1024}\r\n')
    connection.login(None)
    connection.data_to_send()
    connection.receive_data(b"PONG\r\n")
    return connection


def fast_batch(connection: Connection) -> Machine:
    return FastMachine(connection, SilentReader(), FastBatchOptions())


def fast_publisher(connection: Connection) -> Machine:
    return FastPublisherMachine(connection, SilentReader(), FastPublisherOptions(), now=NOW)


def window(connection: Connection) -> Machine:
    return PublishWindow(connection, SilentReader())


MACHINES = [fast_batch, fast_publisher, window]


@pytest.mark.parametrize("make", MACHINES)
def test_a_machine_without_work_may_be_called_in_any_way_and_waits_for_nothing(
    make: Callable[[Connection], Machine],
) -> None:
    connection = connected()
    machine = make(connection)
    machine.on_replies(NOW)
    machine.on_time(NOW)
    for event in EVENTS:
        machine.on_event(event, NOW)
        machine.on_time(NOW)
    assert machine.next_deadline() is None
    assert connection.out_bytes == 0


@pytest.mark.parametrize("make", MACHINES)
def test_a_machine_that_gave_up_waits_for_nothing_and_may_still_be_called(
    make: Callable[[Connection], Machine],
) -> None:
    machine = make(connected())
    machine.fail(AssertionError("a mistake"))
    machine.fail(AssertionError("another"))
    assert machine.next_deadline() is None
    for event in EVENTS:
        machine.on_event(event, NOW)
    machine.on_replies(NOW)
    machine.on_time(NOW + 1000)


# ---- what the two drivers have in common -----------------------------------------------------------------------------

# What only one of them needs, and why.
ONLY_ASYNCIO = {
    "on_data",  # its sessions call back
    "on_lost",
    "on_writable",
    "unsent",  # a loop that ended cannot send what is left
}
ONLY_BLOCKING = {
    "give_up_session",  # interrupts
    "is_over",
    "read_for",  # a thread that waits may read
    "take_over",
    "wake",  # the connection's thread
}
# Attributes of each transport there: its loop's, or its own.
OF_EACH_LINK_OF_ASYNCIO = {"flush_is_scheduled", "idle_s", "new_waiter", "now"}


def public(cls: type[Any]) -> set[str]:
    return {name for name, _ in inspect.getmembers(cls) if not name.startswith("_")}


def test_both_links_have_the_same_methods() -> None:
    aio, blocking = public(jetspark.aio.transport.Transport), public(jetspark.blocking.transport.Transport)
    assert aio - blocking == ONLY_ASYNCIO
    assert blocking - aio == ONLY_BLOCKING | OF_EACH_LINK_OF_ASYNCIO
