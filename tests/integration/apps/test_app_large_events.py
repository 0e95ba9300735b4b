"""Events that are too large to be stored together with what a handler has to say of them."""

from __future__ import annotations

import dataclasses
from typing import Literal

import pytest
from support.apps import is_settled, publish, running, set_up, until

import jetspark
from jetspark import StreamConfig
from jetspark.aio.jetstream import JetStream
from jetspark.app import App, Context, Event, Reject, Retry, RetryIn
from jetspark.app.dead_letters.redriving import (
    DeadLetterFilter,
    discard_dead_letters,
    read_dead_letters,
    run_redrive,
    with_event,
)
from jetspark.app.handlers.handler_store import HandlerStore
from jetspark.server import NatsServer

MAX_PAYLOAD = 1 << 20


class Large(Event, type="large", key="name", subject="large.{name}"):
    name: str
    text: str


def new_app(retention: Literal["limits", "workqueue"] = "limits") -> App:
    return App("large", stream=StreamConfig(name="LARGE", subjects=["large.>"], retention=retention))


async def left(js: JetStream, app: App) -> dict[str, int]:
    """What the dead-letter stream has besides the marks of closed letters."""
    subjects = (await (await js.stream(app.spec.dead_letter_stream)).info(subjects_filter=">")).state.subjects or {}
    open_ones = {each.subject for each in await read_dead_letters(js, app, DeadLetterFilter())}
    return {name: count for name, count in subjects.items() if name.endswith(".event") or name in open_ones}


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
@pytest.mark.parametrize("spare", [0, 20, 500], ids=lambda spare: f"{spare} bytes to spare")
async def test_a_dead_letter_keeps_an_event_of_any_size(
    server: NatsServer, js: JetStream, retention: Literal["limits", "workqueue"], spare: int
) -> None:
    app, done, is_mended = new_app(retention), list[int](), False

    @app.handler(Large, durable="large")
    async def handle(event: Large) -> None:
        if not is_mended:
            raise Reject("not yet")
        done.append(len(event.text))

    await set_up(js, app)
    body = b'{"specversion":"1.0","id":"e-1","source":"/","type":"large","data":{"name":"a","text":"%b"}}'
    block = len(b"NATS/1.0\r\nShade: red\r\nShade: blue\r\n\r\n")
    text = b"x" * (MAX_PAYLOAD - block - len(body) + 2 - spare)
    await js.publish("large.a", body % text, headers={"Shade": ["red", "blue"]})
    async with running(app, server.url):
        await until(lambda: is_settled(js, app, "large"))
        [stored] = await read_dead_letters(js, app, DeadLetterFilter())
        assert (stored.dead_letter.status, stored.dead_letter.data) == ("open", b"")
        whole = (await with_event(js, app, stored)).dead_letter
        assert (whole.data, whole.headers.get_all("Shade")) == (body % text, ["red", "blue"])
        assert len(await left(js, app)) == 2
        await run_redrive(js, app, DeadLetterFilter(), wait_s=60.0)  # it fails again
        is_mended = True
        await run_redrive(js, app, DeadLetterFilter(), wait_s=60.0)
        await until(lambda: is_settled(js, app, "large"))
    assert done == [len(text)]
    assert await left(js, app) == {}


@pytest.mark.parametrize("outcome", ["done", "discarded"])
async def test_a_retry_keeps_an_event_of_any_size(server: NatsServer, js: JetStream, outcome: str) -> None:
    app, sizes = new_app("workqueue"), list[int]()

    @app.handler(Large, durable="large", retry=Retry(attempts=3, in_lane_s=0))
    async def handle(event: Large, ctx: Context) -> None:
        sizes.append(len(event.text))
        if ctx.attempt < 3 or outcome == "discarded":
            raise RetryIn(1)

    await set_up(js, app)
    text = "x" * (MAX_PAYLOAD - 450)
    await publish(js, app, Large(name="a", text=text))
    async with running(app, server.url):
        await until(lambda: len(sizes) == 3)
        await until(lambda: is_settled(js, app, "large"))
        assert len(await left(js, app)) == (2 if outcome == "discarded" else 0)
        await discard_dead_letters(js, app, DeadLetterFilter())
    assert sizes == [len(text)] * 3
    assert await left(js, app) == {}


async def test_headers_as_large_as_the_server_takes_them_are_kept(server: NatsServer, js: JetStream) -> None:
    app = new_app("workqueue")

    @app.handler(Large, durable="large")
    async def handle(event: Large) -> None: ...

    await set_up(js, app)
    shade = "x" * 65_000
    await js.publish("large.a", b"junk", headers={"Shade": shade})
    async with running(app, server.url):
        await until(lambda: is_settled(js, app, "large"))
    [stored] = await read_dead_letters(js, app, DeadLetterFilter())
    whole = (await with_event(js, app, stored)).dead_letter
    assert (whole.data, whole.headers["Shade"], whole.key) == (b"junk", shade, "a")


async def test_a_dead_letter_is_stored_where_the_server_takes_little() -> None:
    app = new_app()

    @app.handler(Large, durable="large")
    async def handle(event: Large) -> None:
        raise Reject("\U0001f600" * 2000)  # ten bytes each, as it is written into a header

    async with NatsServer(max_payload_bytes=4096) as server, jetspark.connect(server.url) as client:
        js = client.jetstream()
        await set_up(js, app)
        await publish(js, app, Large(name="a", text="x" * 3500))
        async with running(app, server.url):
            await until(lambda: is_settled(js, app, "large"))
        [stored] = await read_dead_letters(js, app, DeadLetterFilter())
        assert stored.dead_letter.cause is not None
        assert stored.dead_letter.cause.message.startswith("\U0001f600")
        assert len((await with_event(js, app, stored)).dead_letter.data) > 3500


async def test_an_event_that_is_nowhere_any_more_stays_a_dead_letter_that_says_so(
    server: NatsServer, js: JetStream
) -> None:
    # Letters of versions that did not keep events apart: their bodies are in the stream alone.
    app, done = new_app(), list[str]()

    @app.handler(Large, durable="large")
    async def handle(event: Large) -> None:
        if event.name == "first":
            raise Reject("not yet")
        done.append(event.name)

    await set_up(js, app)
    await publish(js, app, Large(name="first", text="x" * (MAX_PAYLOAD - 450)))
    async with running(app, server.url):
        await until(lambda: is_settled(js, app, "large"))
    [stored] = await read_dead_letters(js, app, DeadLetterFilter())
    store = await HandlerStore.open(js, app.name, "large")
    old = dataclasses.replace(stored.dead_letter, apart=None)
    await store.dead_letters.purge()
    await js.publish(stored.subject, b"", headers=old.to_headers())
    await js.delete_stream("LARGE")
    await set_up(js, app)
    await publish(js, app, Large(name="second", text=""))  # in the place of the first
    async with running(app, server.url):
        await until(lambda: done == ["second"])
        progress = await run_redrive(js, app, DeadLetterFilter(), wait_s=60.0)
    assert progress.results is not None
    assert progress.results.failed == 1
    [again] = await read_dead_letters(js, app, DeadLetterFilter())
    assert again.dead_letter.cause is not None
    assert "its body is lost" in again.dead_letter.cause.message
    assert done == ["second"]
