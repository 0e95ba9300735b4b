"""What dead letters cost, in requests and messages: they may grow with what is asked for, and with nothing else."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.apps import set_up

import jetspark
from jetspark.aio.jetstream import JetStream
from jetspark.app import App, Event
from jetspark.app.dead_letters.redriving import DeadLetterFilter, discard_dead_letters, each_dead_letter, run_redrive
from jetspark.app.handlers.handler_store import HandlerStore
from jetspark.app.stored_events import FailureCause, Origin, StoredEvent, dead_letter_subject
from jetspark.core.headers import Headers
from jetspark.server import NatsServer

FEW, MANY = 20, 120


class Filed(Event, type="filed", key="name", subject="files.{name}"):
    name: str
    number: int


def make_app() -> App:
    app = App("files", stream="FILES", subjects=["files.>"])

    @app.handler(Filed, durable="work")
    async def work(event: Filed) -> None: ...

    return app


async def write_letters(js: JetStream, app: App, keys: int, behind: int = 0) -> None:
    """As workers write them: of each key one that is open, some behind it, and the record that it is parked."""
    store = await HandlerStore.open(js, app.name, "work")
    dead_letters, sequence = [], 0
    for number in range(keys):
        for place in range(behind + 1):
            sequence += 1
            head = sequence - place
            dead_letters.append(
                StoredEvent(
                    handler="work",
                    key=f"k{number}",
                    origin=Origin(app.stream, sequence, 1_000_000 + sequence),
                    subject=f"files.k{number}",
                    data=b"x" * 1000,
                    headers=Headers(),
                    attempts=1,
                    status="behind" if place else "open",
                    cause=None if place else FailureCause.of_crash(),
                    behind=head if place else None,
                )
            )
            if not place:
                record = json.dumps({"key": f"k{number}", "head": head, "waiting": [head]}).encode()
                await store.records.create(store.parked_key(f"k{number}"), record)
    for dead_letter in dead_letters:
        subject = dead_letter_subject(app.name, "work", dead_letter.key, dead_letter.origin)
        await js.publish(subject, dead_letter.data, headers=dead_letter.to_headers())


class Seen:
    """What was asked of the server, by the last word of the request's kind, and what was decoded of the answers."""

    def __init__(self) -> None:
        self.requests = Counter[str]()
        self.described = 0


@asynccontextmanager
async def watching(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Seen]:
    """Count requests with a subscription on all of them, and dead letters that are taken apart."""
    seen, describe = Seen(), StoredEvent.described.__func__  # type: ignore[attr-defined]  # a class method

    def counted(kind: type[StoredEvent], block: bytes | None) -> StoredEvent:
        seen.described += 1
        event: StoredEvent = describe(kind, block)
        return event

    async with jetspark.connect(server.url) as other:
        requests = await other.subscribe("$JS.API.>")
        await other.flush()
        with monkeypatch.context() as patch:
            patch.setattr(StoredEvent, "described", classmethod(counted))
            yield seen
        await other.publish("$JS.API.the.end")
        await other.flush()
        async with asyncio.timeout(60):
            async for message in requests:
                if message.subject == "$JS.API.the.end":
                    break
                seen.requests[".".join(message.subject.split(".")[2:4])] += 1


async def test_a_list_asks_as_often_for_many_dead_letters_as_for_few(
    server: NatsServer, js: JetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for count in (FEW, MANY):
        app = make_app()
        await set_up(js, app)
        await write_letters(js, app, count)
        async with watching(server, monkeypatch) as seen:
            assert (
                len([each async for each in each_dead_letter(js, app, DeadLetterFilter(), with_events=False)]) == count
            )
        assert seen.described == count
        found[count] = seen.requests.total()
        for name in [name async for name in js.stream_names()]:
            await js.delete_stream(name)
    # A few more where a request was used up, none for each dead letter.
    assert found[MANY] <= found[FEW] + 3


async def test_of_one_key_nothing_else_is_read(
    server: NatsServer, js: JetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app()
    await set_up(js, app)
    await write_letters(js, app, MANY, behind=1)
    for where, count in ((["key=k7"], 2), (["sequence=15"], 1), (["key=none"], 0)):
        chosen = DeadLetterFilter.parse(None, where)
        async with watching(server, monkeypatch) as seen:
            assert len([each async for each in each_dead_letter(js, app, chosen, with_events=False)]) == count
        assert seen.described == count
    # A redrive of one key sees those of the key, the chosen one and the one behind it.
    async with watching(server, monkeypatch) as seen:
        progress = await run_redrive(js, app, DeadLetterFilter.parse(None, ["key=k7"]))
    assert (progress.requested, progress.behind, seen.described) == (1, 1, 2)


async def test_a_dry_run_asks_for_nothing_by_the_dead_letter_and_a_redrive_reads_each_once(
    server: NatsServer, js: JetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {}
    for count in (FEW, MANY):
        app = make_app()
        await set_up(js, app)
        await write_letters(js, app, count, behind=1)
        for is_dry_run in (True, False):
            async with watching(server, monkeypatch) as seen:
                progress = await run_redrive(js, app, DeadLetterFilter(), is_dry_run=is_dry_run)
            assert (progress.requested, progress.behind) == (count, count)
            found[count, is_dry_run] = seen.requests
        retries = await js.stream(app.spec.retry_stream)
        assert retries.cached_info.state.messages == count  # one request each, and no other message
        for name in [name async for name in js.stream_names()]:
            await js.delete_stream(name)
    assert found[MANY, True].total() <= found[FEW, True].total() + 4
    assert (found[FEW, False]["DIRECT.GET"], found[MANY, False]["DIRECT.GET"]) == (FEW, MANY)
    grown = found[MANY, False] - found[FEW, False]
    del grown["DIRECT.GET"]
    assert grown.total() <= 4


async def test_a_discard_reads_no_event(server: NatsServer, js: JetStream, monkeypatch: pytest.MonkeyPatch) -> None:
    app = make_app()
    await set_up(js, app)
    await write_letters(js, app, FEW)
    async with watching(server, monkeypatch) as seen:
        assert (await discard_dead_letters(js, app, DeadLetterFilter())).discarded == FEW
    # Of each: the record that its key is parked, and the next dead letter of the key.
    assert seen.requests["DIRECT.GET"] + seen.requests["STREAM.MSG"] <= 2 * FEW
