"""Leaving the block of an application's client: what ended the block is what the program sees."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from support.apps import set_up, until

import jetspark
from jetspark.aio.client import Client
from jetspark.aio.context import context_of
from jetspark.app import App, Command, Event
from jetspark.app.client import AppClient
from jetspark.app.projections.views import Views
from jetspark.errors import CommandInDoubt, ConnectionLost
from jetspark.server import NatsServer

APP = App("leaving", stream="LEAVING", subjects=["leaving.>"])


class Left(Event, type="left", key="name", subject="leaving.{name}"):
    name: str


@APP.projection("names", events=[Left], bucket="leaving_names")
class Names:
    def key(self, event: Left) -> str:
        return event.name

    def apply(self, state: Any, event: Left) -> Any:
        return {"name": event.name}


@APP.command("leave")
class Leave(Command):
    name: str

    def reads(self) -> list[str]:
        return [f"leaving.{self.name}"]

    def decide(self, past: Any) -> list[Any]:
        return [Left(name=self.name)]


async def prepare(own: NatsServer) -> None:
    async with jetspark.connect(own.url) as client:
        await set_up(client.jetstream(), APP)


async def leave_in_doubt(own: NatsServer, client: AppClient) -> None:
    """Publish what closing cannot have confirmed: it waits for a session that does not come."""
    own.stop()
    nc = context_of(client.js).client
    await until(lambda: not nc.is_connected)
    await nc.publish("note", b"")


async def test_an_error_inside_is_not_replaced_by_the_one_from_closing(own: NatsServer) -> None:
    await prepare(own)

    async def call() -> None:
        async with APP.connect(own.url, decide_here=True, drain_timeout_s=0.5) as leaving:
            await leave_in_doubt(own, leaving)
            await leaving.call(Leave(name="a"), command_id="mine", timeout=0.5)

    with pytest.raises(CommandInDoubt) as raised:
        await call()
    assert raised.value.command_id == "mine"


async def test_a_cancelled_task_is_cancelled_although_closing_fails(own: NatsServer) -> None:
    await prepare(own)
    is_asking = asyncio.Event()

    async def ask() -> None:
        async with APP.connect(own.url, drain_timeout_s=0.5) as leaving:
            await leave_in_doubt(own, leaving)
            is_asking.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(ask())
    await is_asking.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_without_an_error_inside_the_one_from_closing_is_raised(own: NatsServer) -> None:
    await prepare(own)

    async def do_nothing() -> None:
        async with APP.connect(own.url, drain_timeout_s=0.5) as leaving:
            await leave_in_doubt(own, leaving)

    with pytest.raises(ConnectionLost):
        await do_nothing()


@pytest.mark.parametrize("part", [Views, Client], ids=["views", "connection"])
@pytest.mark.parametrize("inside", [KeyError("mine"), asyncio.CancelledError("mine")], ids=["error", "cancelled"])
async def test_an_error_inside_is_not_replaced_by_any_other_error_from_closing(
    server: NatsServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    part: type[Any],
    inside: BaseException,
) -> None:
    closing = part.close

    async def close(self: Any, *args: Any) -> None:
        await closing(self, *args)
        raise OSError("the disk is gone")

    connections: list[Client] = []

    async def leave(error: BaseException | None) -> None:
        async with APP.connect(server.url) as leaving:
            leaving.view("names")
            connections.append(context_of(leaving.js).client)
            monkeypatch.setattr(part, "close", close)
            if error is not None:
                raise error

    with pytest.raises(type(inside), match="mine"):
        await leave(inside)
    assert "client not closed cleanly (OSError: the disk is gone)" in caplog.text
    monkeypatch.setattr(part, "close", closing)
    with pytest.raises(OSError, match="the disk is gone"):
        await leave(None)
    assert all(each.is_closed for each in connections)
