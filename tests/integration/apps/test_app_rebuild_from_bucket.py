"""Rebuilding a projection of a stream that no longer has its first events, with the states of a bucket."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.apps import publish, running, set_up, until
from support.projections import Account, Balances, Closed, Moved, Opened, bank, folded, in_stream, some_events

from jetspark.aio.jetstream import JetStream
from jetspark.app import App
from jetspark.app.projections.bucket_refs import find_bucket, open_records
from jetspark.app.projections.router import Recorded
from jetspark.app.replay import RebuildOptions, read_records, rebuild, state_base, verify
from jetspark.app.replay.live_bucket import stored_position
from jetspark.app.replay.state_base import Copied, StateBase
from jetspark.errors import ConfigError, ConnectionLost, DataLoss, JetSparkError, UsageError
from jetspark.jetstream.kv import operation_of
from jetspark.server import NatsServer

Table = dict[str, tuple[bytes | None, int, str]]


async def table(js: JetStream, bucket: str) -> Table:
    found = {}
    async for message in (await js.stream(f"KV_{bucket}")).get_messages(1):
        key = message.subject.removeprefix(f"$KV.{bucket}.")
        if not key.startswith("_jetspark."):
            value = message.data if operation_of(message.headers) == "put" else None
            headers = message.headers
            found[key] = (value, int(headers["JetSpark-Sequence"]), headers["JetSpark-Projection"])
    return found


async def fold_live(server: NatsServer, js: JetStream, app: App, *events: Any) -> list[Recorded]:
    """Have a worker fold events, and return all there are in the stream."""
    await publish(js, app, *events)
    messages = await in_stream(js, app)
    async with running(app, server.url, only=["balances"]):
        await until(lambda: has_position(js, messages[-1].sequence))
    return messages


async def has_position(js: JetStream, sequence: int, bucket: str = "bank_balances") -> bool:
    return ((await stored_position(js, bucket)).sequence or 0) >= sequence


def right(app: App, messages: list[Recorded]) -> Table:
    return folded(app, messages)[0]["balances"]


async def cut(js: JetStream, app: App, first: int) -> None:
    """What a limit of the stream does: remove what is before a sequence."""
    await (await js.stream(app.stream)).purge(up_to_sequence=first - 1)


@asynccontextmanager
async def traffic(js: JetStream, app: App, seed: int = 9) -> Any:
    rng, is_over = random.Random(seed), False

    async def go() -> None:
        while not is_over:
            await publish(js, app, *some_events(rng, 5, is_bad=False))

    task = asyncio.create_task(go())
    try:
        yield
    finally:
        is_over = True
        await task


async def test_a_rebuild_begins_with_the_states_of_the_bucket_in_use_where_the_first_events_are_gone(
    server: NatsServer, js: JetStream
) -> None:
    app = bank()
    await set_up(js, app)
    messages = await fold_live(server, js, app, *some_events(random.Random(1), 300, is_bad=False))
    await cut(js, app, 250)
    with pytest.raises(DataLoss, match=r"jetspark rebuild --from-bucket"):
        await rebuild(js, app, "balances")
    await publish(js, app, *some_events(random.Random(2), 50, is_bad=False))
    messages += (await in_stream(js, app))[-50:]
    done = await rebuild(js, app, "balances", RebuildOptions(from_bucket="bank_balances", swap=True))
    assert await table(js, "bank_balances_v1") == right(app, messages)
    assert (done.record.base, done.record.first, done.record.last) == ("bank_balances", 301, 350)
    assert "bucket bank_balances_v1 with the states of bank_balances before 301" in str(done)
    [record] = [each for each in await read_records(await open_records(js, app.name), "balances") if each.base]
    assert (record.status, record.base, record.first) == ("swapped", "bank_balances", 301)
    await publish(js, app, *some_events(random.Random(3), 50, is_bad=False))
    messages += (await in_stream(js, app))[-50:]
    async with running(app, server.url, only=["balances"]):
        await until(lambda: has_position(js, 400, "bank_balances_v1"))
    assert await table(js, "bank_balances_v1") == right(app, messages)
    position = (await stored_position(js, "bank_balances_v1")).position
    assert position is not None
    assert (position.missed, position.repairs) == (None, 0)
    with pytest.raises(DataLoss, match="not all there"):
        await verify(js, app, "balances")


async def test_a_worker_may_fold_into_the_bucket_while_it_is_copied(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    messages = await fold_live(server, js, app, *some_events(random.Random(1), 300, 40, is_bad=False))
    await cut(js, app, 290)
    async with running(app, server.url, only=["balances"]), traffic(js, app):
        done = await rebuild(js, app, "balances", RebuildOptions(from_bucket="bank_balances", swap=True))
    assert done.is_swapped
    messages += [each for each in await in_stream(js, app) if each.sequence > 300]
    async with running(app, server.url, only=["balances"]):
        await until(lambda: has_position(js, messages[-1].sequence, "bank_balances_v1"))
    assert await table(js, "bank_balances_v1") == right(app, messages)


async def test_a_key_that_is_written_while_the_bucket_is_read_is_copied_all_the_same(
    server: NatsServer, js: JetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = bank()
    await set_up(js, app)
    names = [f"a{number}" for number in range(50)]
    messages = await fold_live(server, js, app, *(Opened(account=name) for name in names))
    plain, asked = StateBase._pieces, 0

    async def pieces(self: StateBase, after: int, *, wants_data: bool) -> Any:
        nonlocal asked
        asked += wants_data
        async for each in plain(self, after, wants_data=wants_data):
            yield each
        if wants_data and asked < 4:
            # Keys of what is read next are written behind it, before it is read.
            last = (await (await js.stream(app.stream)).info()).state.last_sequence
            await publish(js, app, *(Moved(source=name, target="a0", cents=1) for name in names))
            await until(lambda: has_position(js, last + len(names)))

    monkeypatch.setattr(StateBase, "_pieces", pieces)
    async with running(app, server.url, only=["balances"]):
        done = await rebuild(js, app, "balances", RebuildOptions(from_bucket="bank_balances"))
    assert asked == 5
    messages = [*messages, *(each for each in await in_stream(js, app) if each.sequence > 50)]
    assert await table(js, done.new.bucket) == right(app, messages)


async def test_a_bucket_that_others_write_without_end_is_told(
    server: NatsServer, js: JetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = bank()
    await set_up(js, app)
    await fold_live(server, js, app, Opened(account="a"), Opened(account="b"))
    plain, asked = StateBase._pieces, 0
    mark = {"JetSpark-Sequence": "2", "JetSpark-Projection": "1"}

    async def pieces(self: StateBase, after: int, *, wants_data: bool) -> Any:
        nonlocal asked
        asked += wants_data
        async for each in plain(self, after, wants_data=wants_data):
            yield each
        await js.publish("$KV.bank_balances.b", b'{"cents":0,"moves":0}', headers=mark)

    monkeypatch.setattr(StateBase, "_pieces", pieces)
    with pytest.raises(UsageError, match="written faster than it is copied, although the workers are paused"):
        await rebuild(js, app, "balances", RebuildOptions(from_bucket="bank_balances"))
    assert asked == state_base.MAX_ROUNDS


class Mended(Balances):
    def apply(self, state: Account | None, event: Any, key: str) -> Any:
        if isinstance(event, Moved) and event.cents == 666:
            return state
        return super().apply(state, event, key)


async def test_a_parked_key_goes_on_where_its_event_is_there_and_stays_parked_where_it_is_gone(
    server: NatsServer, js: JetStream
) -> None:
    app = bank()
    await set_up(js, app)
    events = [Opened(account=name) for name in "abc"]
    events += [Moved(source="a", target="a", cents=666), Moved(source="b", target="c", cents=3)]  # type: ignore[list-item]
    events += [Moved(source="b", target="b", cents=666), Moved(source="a", target="b", cents=5)]  # type: ignore[list-item]
    messages = await fold_live(server, js, app, *events)
    await cut(js, app, 6)
    mended = App("bank", stream=app.spec.stream_config)
    mended.projection("balances", events=[Opened, Moved, Closed], bucket="bank_balances")(Mended)
    done = await rebuild(js, mended, "balances", RebuildOptions(from_bucket="bank_balances"))
    assert (done.record.first, done.record.parked) == (6, 1)
    built = await table(js, done.new.bucket)
    before = right(app, messages)
    assert built["a"] == before["a"]
    assert built["a"][2].startswith("1 parked 4 ")
    assert built["b"] == (b'{"cents":2,"moves":2}', 7, "1")
    assert built["c"] == before["c"]


async def test_a_bucket_that_was_built_and_not_swapped_in_is_a_snapshot(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    messages = await fold_live(server, js, app, *some_events(random.Random(1), 200, is_bad=False))
    snapshot = (await rebuild(js, app, "balances", RebuildOptions(from_bucket="bank_balances"))).new.bucket
    messages = await fold_live(server, js, app, *some_events(random.Random(2), 100, is_bad=False))
    await cut(js, app, 201)
    await (await js.kv("bank_balances")).delete("a1")  # and nothing tells what it was
    done = await rebuild(js, app, "balances", RebuildOptions(from_bucket=snapshot, swap=True))
    assert done.record.first == 201
    assert await table(js, done.new.bucket) == right(app, messages)
    await cut(js, app, 202)
    with pytest.raises(DataLoss, match="the range 201 to 300 is not all there"):
        await rebuild(js, app, "balances", RebuildOptions(from_bucket=snapshot))
    alias = await find_bucket(await open_records(js, app.name), app.projections["balances"])
    assert alias.ref.bucket == done.new.bucket


@pytest.mark.parametrize("is_copied", [False, True])
async def test_a_rebuild_that_ends_while_it_copies_or_behind_that_is_resumed(
    server: NatsServer, js: JetStream, monkeypatch: pytest.MonkeyPatch, is_copied: bool
) -> None:
    app = bank()
    await set_up(js, app)
    messages = await fold_live(server, js, app, *some_events(random.Random(1), 200, is_bad=False))
    snapshot = (await rebuild(js, app, "balances", RebuildOptions(from_bucket="bank_balances"))).new.bucket
    messages = await fold_live(server, js, app, *some_events(random.Random(2), 100, is_bad=False))
    await cut(js, app, 201)
    copy = StateBase.copy

    async def ended(self: StateBase, *given: Any) -> Copied:
        await copy(self, *given)
        raise ConnectionLost("cut")

    async def lost(*given: Any) -> None:
        raise ConnectionLost("cut")

    with monkeypatch.context() as patch:
        if is_copied:
            patch.setattr("jetspark.app.replay.projection_rebuild._Rebuild.fold_to", lost)
        else:
            patch.setattr(StateBase, "copy", ended)
        with pytest.raises(ConnectionLost):
            await rebuild(js, app, "balances", RebuildOptions(from_bucket=snapshot))
    if is_copied:
        await js.delete_kv(snapshot)  # it is not needed any more
    [record] = [
        each for each in await read_records(await open_records(js, app.name), "balances") if each.status == "running"
    ]
    done = await rebuild(js, app, "balances", RebuildOptions(resume=record.id))
    assert (done.record.base, done.record.first) == (snapshot, 201)
    assert await table(js, done.new.bucket) == right(app, messages)
    with pytest.raises(ConfigError, match="check is not possible with from_bucket="):
        await rebuild(js, app, "balances", RebuildOptions(resume=record.id, check=True))


async def _put(js: JetStream, bucket: str, key: str, value: bytes, mark: str | None = None) -> None:
    headers = None if mark is None else {"JetSpark-Sequence": "1", "JetSpark-Projection": mark}
    await js.publish(f"$KV.{bucket}.{key}", value, headers=headers)


async def _position(js: JetStream, bucket: str, **changes: Any) -> None:
    position = (await stored_position(js, bucket)).position
    assert position is not None
    await (await js.kv(bucket)).put("_jetspark.position", position._replace(**changes).encode())


REFUSED: dict[str, tuple[Callable[[JetStream], Awaitable[Any]], type[JetSparkError], str]] = {
    "missing": (lambda js: js.delete_kv("base"), ConfigError, "from_bucket='base': there is no such bucket"),
    "no position": (
        lambda js: _purged(js, "_jetspark.position"),
        UsageError,
        "from_bucket='base': it has no position, so it is unknown which events are in it",
    ),
    "another version": (
        lambda js: _position(js, "base", version=2),
        UsageError,
        "it was made by version 2 of the fold, and this code is version 1: another fold needs the whole history",
    ),
    "another stream": (
        lambda js: _position(js, "base", created="2020-01-01T00:00:00Z"),
        UsageError,
        "its events have other sequences",
    ),
    "incomplete": (lambda js: _position(js, "base", missed=(2, 3)), DataLoss, "its state is incomplete"),
    "a foreign key": (lambda js: _put(js, "base", "x", b"1"), UsageError, "key 'x': not made by version 1 of"),
    "a key of another version": (
        lambda js: _put(js, "base", "x", b"{}", "2"),
        UsageError,
        "key 'x': not made by version 1",
    ),
    "keys with ids": (lambda js: _put(js, "base", "x", b"{}", "1 unique 3:"), UsageError, "key 'x': not made by"),
    "another state": (
        lambda js: _put(js, "base", "x", b'"text"', "1"),
        UsageError,
        "the state of key 'x' is not one of projection 'balances'",
    ),
    "behind": (lambda js: _position(js, "base", sequence=1), DataLoss, "the range 2 to 4 is not all there"),
}


async def _purged(js: JetStream, key: str) -> None:
    await (await js.stream("KV_base")).purge(subject=f"$KV.base.{key}")


@pytest.mark.parametrize("name", REFUSED)
async def test_states_that_may_be_wrong_are_not_begun_with(server: NatsServer, js: JetStream, name: str) -> None:
    app = bank()
    await set_up(js, app)
    await fold_live(server, js, app, *(Opened(account=key) for key in "abcd"))
    await js.create_kv("base")
    async for message in (await js.stream("KV_bank_balances")).get_messages(1):
        headers = {
            each: message.headers[each]
            for each in ("JetSpark-Sequence", "JetSpark-Projection")
            if each in message.headers
        }
        await js.publish(message.subject.replace("bank_balances", "base"), message.data, headers=headers)
    await cut(js, app, 3)
    damage, error, said = REFUSED[name]
    await damage(js)
    with pytest.raises(error, match=said):
        await rebuild(js, app, "balances", RebuildOptions(from_bucket="base"))
    assert await (await js.kv("bank_balances")).get("a")
    if name in ("missing", "no position", "behind"):
        assert await read_records(await open_records(js, app.name), "balances") == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"from_bucket": 5}, "from_bucket=5: expected the name of a bucket"),
        ({"from_bucket": "not a bucket"}, "not a bucket"),
        ({"from_bucket": "base", "check": True}, "check is not possible with from_bucket='base'"),
        ({"from_bucket": "base", "resume": "x"}, "resume and from_bucket exclude each other"),
    ],
)
async def test_wrong_arguments_are_told(server: NatsServer, js: JetStream, options: dict[str, Any], said: str) -> None:
    app = bank()
    await set_up(js, app)
    with pytest.raises(ConfigError, match=said):
        await rebuild(js, app, "balances", RebuildOptions(**options))
