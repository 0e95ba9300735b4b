"""``client.dead_letters``: what a program does with dead letters."""

from __future__ import annotations

import pytest
from support.apps import is_settled, publish, running, set_up, until

from jetspark.aio.jetstream import JetStream
from jetspark.app import App, AppClient, Event, Reject
from jetspark.errors import ConfigError, ServerError, UsageError
from jetspark.server import NatsServer

KEYS = 40


class Filed(Event, type="filed", key="name", subject="files.{name}"):
    name: str
    number: int


class Files:
    """An application whose handler fails with the first event of each key until it is repaired."""

    def __init__(self) -> None:
        self.app = App("files", stream="FILES", subjects=["files.>"])
        self.done: list[tuple[str, int]] = []
        self.is_repaired = False
        self.app.handler(Filed, durable="work")(self.work)

    async def work(self, event: Filed) -> None:
        if event.number == 0 and not self.is_repaired:
            raise Reject("not yet")
        self.done.append((event.name, event.number))

    async def fail(self, js: JetStream, url: str, keys: int, each: int) -> AppClient:
        """Have the handler fail, and the rest of each key become dead letters behind the first."""
        await set_up(js, self.app)
        await publish(js, self.app, *(Filed(name=f"k{key}", number=n) for n in range(each) for key in range(keys)))
        async with running(self.app, url):
            await until(lambda: is_settled(js, self.app, "work"))
        return AppClient.on(self.app, js)


async def test_a_list_has_no_events_and_one_dead_letter_has_its_own(server: NatsServer, js: JetStream) -> None:
    files = Files()
    client = await files.fail(js, server.url, keys=2, each=2)
    dead_letters = {(each.key, each.sequence): each async for each in client.dead_letters.list()}
    assert sorted(dead_letters) == [("k0", 1), ("k0", 3), ("k1", 2), ("k1", 4)]
    first, second = dead_letters["k0", 1], dead_letters["k0", 3]
    assert (first.status, first.behind, first.handler, first.subject) == ("open", None, "work", "files.k0")
    assert first.cause is not None
    assert (first.cause.message, first.attempts, first.redrives, first.stream) == ("not yet", 1, 0, "FILES")
    assert (second.status, second.behind, second.cause) == ("behind", 1, None)
    assert (first.data, first.headers) == (None, None)
    stored = await (await js.stream("FILES")).get_message(1)
    whole = await client.dead_letters.get(first.number)
    assert (whole.data, whole.headers) == (stored.data, stored.headers)
    exported = {each.sequence: each.data async for each in client.dead_letters.export(handler="work", key="k0")}
    assert exported[1] == stored.data
    assert sorted(exported) == [1, 3]
    assert [each.sequence async for each in client.dead_letters.list(status="behind", sequence=4)] == [4]
    assert [each async for each in client.dead_letters.list(error="ValueError")] == []
    assert await client.dead_letters.explain(key="k9") == "no dead letter matches; `jetspark dlq ls` lists all"


async def test_conditions_that_no_dead_letter_can_have_are_told(server: NatsServer, js: JetStream) -> None:
    client = await Files().fail(js, server.url, keys=0, each=0)
    for wrong, told in (
        ({"handler": "wrk"}, "handler 'wrk': app 'files' has no such handler, and no dead letters of one; it has work"),
        ({"handler": 1}, "handler=1: expected the name of a handler"),
        ({"status": "closed"}, "status='closed': expected status=open or status=behind"),
        ({"sequence": "x"}, "sequence='x': expected a whole number"),
        ({"sequence": 1.5}, "sequence=1.5: expected"),
        (
            {"keys": "a"},
            "keys='a': expected one of handler, error, fingerprint, key, number, sequence, status, subject",
        ),
    ):
        with pytest.raises(ConfigError, match=told):
            assert [each async for each in client.dead_letters.list(**wrong)]
        with pytest.raises(ConfigError, match=told):
            await client.dead_letters.discard(**wrong)
    for number in (0, "1", True):
        with pytest.raises(ConfigError, match=f"number={number!r}"):
            await client.dead_letters.get(number)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="app 'files' has no dead letter 7"):
        await client.dead_letters.get(7)
    with pytest.raises(UsageError, match="the app is not connected"):
        _ = AppClient(client.app, (), {}).dead_letters


async def test_a_discard_lets_each_key_continue_in_order(server: NatsServer, js: JetStream) -> None:
    files = Files()
    client = await files.fail(js, server.url, keys=KEYS, each=3)
    counted = await client.dead_letters.discard(dry_run=True)
    assert (counted.discarded, counted.behind) == (KEYS, 2 * KEYS)
    one = await client.dead_letters.discard(key="k3", status="behind")
    assert (one.discarded, one.behind) == (0, 2)
    assert one.reason.startswith("2 dead letters wait behind an earlier event of their key and follow it; redrive or")
    done = await client.dead_letters.discard()
    assert (done.discarded, done.behind) == (KEYS, 2 * KEYS)
    async with running(files.app, server.url):
        await until(lambda: len(files.done) == 2 * KEYS)
        await until(lambda: is_settled(js, files.app, "work"))
    for key in range(KEYS):
        assert [number for name, number in files.done if name == f"k{key}"] == [1, 2]
    assert [each async for each in client.dead_letters.list()] == []


async def test_a_redrive_that_the_server_refuses_is_resumed_when_there_is_room(
    server: NatsServer, js: JetStream
) -> None:
    files = Files()
    client = await files.fail(js, server.url, keys=KEYS, each=2)
    files.is_repaired = True
    retries = await js.stream(files.app.spec.retry_stream)
    await retries.update(max_message_bytes=100)
    with pytest.raises(ServerError):
        await client.dead_letters.redrive()
    with pytest.raises(UsageError, match=r"redrive r\w+ is under way .*--resume r\w+") as told:
        await client.dead_letters.redrive()
    assert len([each async for each in client.dead_letters.list()]) == 2 * KEYS
    await retries.update(max_message_bytes=-1)
    async with running(files.app, server.url):
        id = str(told.value).split()[1]
        progress = await client.dead_letters.redrive(resume=id, wait_s=60)
    assert (progress.requested, str(progress.results)) == (KEYS, f"{2 * KEYS} handled, 0 failed again, 0 waiting")
    for key in range(KEYS):
        assert [number for name, number in files.done if name == f"k{key}"] == [0, 1]
