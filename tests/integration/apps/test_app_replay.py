"""Replaying, repairing and verifying projections on a real server, beside live engines."""

from __future__ import annotations

import asyncio
import datetime
import json
import random
import re
from collections.abc import Awaitable
from typing import Any

import pytest
from support.apps import publish, running, set_up, until
from support.projections import (
    Account,
    Balances,
    Closed,
    Moved,
    Opened,
    Row,
    bank,
    folded,
    in_buckets,
    in_stream,
    route_one,
    some_events,
)

import jetspark
from jetspark import StreamConfig
from jetspark.aio.jetstream import JetStream
from jetspark.aio.steps import ProcedureRunner
from jetspark.app import App, encode
from jetspark.app.projections.bucket_refs import open_records
from jetspark.app.projections.positions import FoldPosition, position_change
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.projections.router import Router
from jetspark.app.replay import (
    RebuildOptions,
    ReplayOptions,
    ReplayRequest,
    VerifyOptions,
    plan_replay,
    preview_rebuild,
    read_records,
    rebuild,
    repair_keys,
    run_replay,
    verification,
    verify,
)
from jetspark.app.replay.comparison import KeyContent
from jetspark.app.replay.history import Events
from jetspark.app.replay.live_bucket import stored_position
from jetspark.errors import ConfigError, DataLoss, UsageError
from jetspark.server import NatsServer
from jetspark.state.changes import NOTHING, Change
from jetspark.state.store import load, store


async def is_folded(js: JetStream, app: App, buckets: dict[str, str] | None = None) -> bool:
    expected, _ = folded(app, await in_stream(js, app))
    return await in_buckets(js, app, buckets) == expected


async def fold_live(server: NatsServer, js: JetStream, app: App, count: int = 200, seed: int = 5) -> None:
    """Events, and an engine that has folded them and ended."""
    await set_up(js, app)
    await publish(js, app, *some_events(random.Random(seed), count))
    async with running(app, server.url):
        await until(lambda: is_folded(js, app))


async def test_a_range_replay_of_state_that_is_up_to_date_changes_nothing_and_says_so(
    server: NatsServer, js: JetStream
) -> None:
    app = bank()
    await fold_live(server, js, app)
    before = await in_buckets(js, app)
    async with running(app, server.url):
        plan = await plan_replay(js, app, "balances", ReplayRequest(from_seq=20, to_seq=90))
        assert "would change nothing" in str(plan)
        assert (plan.extent.first, plan.extent.last) == (20, 90)
        assert 0 < len(plan.last_of) <= 6
        done = await run_replay(js, app, "balances", ReplayRequest(from_seq=20, to_seq=90))
    assert (done.changed, done.status) == (0, "done")
    assert "nothing changed" in str(done)
    assert await in_buckets(js, app) == before
    [record] = await read_records(await open_records(js, app.name), "balances")
    assert (record.id, record.first, record.last, record.status) == (done.id, 20, 90, "done")
    with pytest.raises(ConfigError, match="it is done already"):
        await run_replay(js, app, "balances", options=ReplayOptions(resume=done.id))
    with pytest.raises(ConfigError, match="has no projection of this name; it has balances, moves"):
        await run_replay(js, app, "other")


@pytest.mark.parametrize("hours", [-14, 0, 14])
@pytest.mark.parametrize(("year", "is_past"), [(1, True), (1601, True), (1969, True), (2262, False), (9999, False)])
async def test_a_time_that_is_far_away_is_before_or_after_every_event(
    js: JetStream, year: int, is_past: bool, hours: int
) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, *(Opened(account=f"k{number}") for number in range(3)))
    zone = datetime.timezone(datetime.timedelta(hours=hours))
    moment = datetime.datetime(year, 1 if is_past else 12, 1 if is_past else 31, tzinfo=zone)
    since = await plan_replay(js, app, "balances", ReplayRequest(since=moment))
    before = await plan_replay(js, app, "balances", ReplayRequest(until=moment))
    assert (since.events, before.events) == ((3, 0) if is_past else (0, 3))


async def test_a_plan_and_its_record_say_what_is_read_when_it_was_stored_and_what_is_gone(
    server: NatsServer, js: JetStream
) -> None:
    app = bank()
    await fold_live(server, js, app, 100)
    stream = await js.stream(app.stream)
    times = {sequence: (await stream.get_message(sequence)).timestamp for sequence in (20, 87)}
    for sequence in (5, 30, 31, 88, 89, 90):
        await stream.delete_message(sequence)
    request = ReplayRequest(from_seq=20, to_seq=90)
    outline = (await plan_replay(js, app, "balances", request)).outline
    assert (outline.first_time, outline.last_time) == (times[20], times[87])
    assert (outline.deleted, outline.gaps, outline.gap_count) == (6, ((30, 31), (88, 90)), 2)
    assert set(outline.subjects) == {"bank.*.opened", "bank.*.moved", "bank.*.closed"}
    plan = str(await plan_replay(js, app, "balances", request))
    assert f"stored from {times[20]:%Y-%m-%dT%H:%M:%S}Z to {times[87]:%Y-%m-%dT%H:%M:%S}Z, on bank." in plan
    assert (
        "6 messages were deleted from the middle of the stream: no fold sees them; in this range 30 to 31, 88 to 90"
        in plan
    )
    await run_replay(js, app, "balances", request)
    [record] = await read_records(await open_records(js, app.name), "balances")
    assert record.outline == outline.to_dict()
    only = (await plan_replay(js, app, "balances", ReplayRequest(from_seq=40, to_seq=50, subject="bank.a1.*"))).outline
    assert (only.subjects, only.gaps, only.gap_count) == (("bank.a1.*",), (), 0)
    nothing = (await plan_replay(js, app, "balances", ReplayRequest(from_seq=88, to_seq=90))).outline
    assert (nothing.first_time, nothing.last_time, nothing.gaps) == (None, None, ((88, 90),))


async def test_a_replay_gives_keys_what_they_lack_from_their_own_next_event_on(
    server: NatsServer, js: JetStream
) -> None:
    app = bank()
    await fold_live(server, js, app)
    right = await in_buckets(js, app)
    healthy = [key for key, (value, _, mark) in right["balances"].items() if value is not None and "parked" not in mark]
    lost, behind = healthy[:2]
    bucket = await js.stream("KV_bank_balances")
    await bucket.purge(subject=f"$KV.bank_balances.{lost}")
    # As it was in the middle of the history.
    states, _ = folded(app, (await in_stream(js, app))[:60])
    value, sequence, mark = states["balances"][behind]
    assert value is not None
    current = await ProcedureRunner(js).run(load("bank_balances", [behind]))
    change = Change(behind, value, "put", sequence, current[behind].revision, mark=mark)
    await ProcedureRunner(js).run(store("bank_balances", [change]))

    only_late = ReplayRequest(from_seq=190)
    plan = await plan_replay(js, app, "balances", only_late)
    assert set(plan.behind) <= {lost, behind}
    everything = await plan_replay(js, app, "balances", ReplayRequest())
    assert set(everything.behind) == {lost, behind}
    async with running(app, server.url):
        done = await run_replay(js, app, "balances", ReplayRequest(keys=(lost, behind)))
        assert done.changed == 2
        assert (await in_buckets(js, app)) == right
    assert (await verify(js, app, "balances")).is_equal


async def test_a_range_that_is_not_all_there_is_data_loss_that_names_it(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await fold_live(server, js, app, 100)
    stream = await js.stream(app.stream)
    moment = (await stream.get_message(50)).timestamp
    since = await plan_replay(js, app, "balances", ReplayRequest(since=moment))
    assert since.extent.first == 50
    until_then = await plan_replay(js, app, "balances", ReplayRequest(until=moment))
    assert (until_then.extent.first, until_then.extent.last) == (1, 49)
    await stream.purge(up_to_sequence=39)
    with pytest.raises(DataLoss, match=r"range 30 to 60 is not all there"):
        await run_replay(js, app, "balances", ReplayRequest(from_seq=30, to_seq=60))
    assert (await run_replay(js, app, "balances", ReplayRequest(from_seq=40, to_seq=60))).changed == 0
    # Nobody knows what was before the first message there is.
    with pytest.raises(DataLoss):
        await plan_replay(js, app, "balances", ReplayRequest(since=moment - datetime.timedelta(hours=1)))
    with pytest.raises(DataLoss):
        await verify(js, app, "balances")
    with pytest.raises(DataLoss):
        await repair_keys(js, app, "balances", ["a1"])


@pytest.mark.parametrize("events", [0, 20, 150])
async def test_a_stream_that_was_made_anew_is_not_folded_into_states_of_the_old_one(
    server: NatsServer, js: JetStream, events: int
) -> None:
    app = bank()
    await fold_live(server, js, app, 60)
    before = await in_buckets(js, app)
    old = (await (await js.stream("BANK")).info()).created
    await js.delete_stream("BANK")
    await set_up(js, app)
    await publish(js, app, *some_events(random.Random(8), events, 6))
    new = (await (await js.stream("BANK")).info()).created
    assert old is not None
    assert new is not None
    both = f"created at {re.escape(old.isoformat())}, and stream 'BANK' was created at {re.escape(new.isoformat())}"
    with pytest.raises(UsageError, match=both):
        await verify(js, app, "balances")
    with pytest.raises(UsageError, match=both):
        await plan_replay(js, app, "balances", ReplayRequest())
    with pytest.raises(UsageError, match=both):
        await run_replay(js, app, "balances")
    with pytest.raises(UsageError, match=both):
        await repair_keys(js, app, "balances", ["a1"])
    assert await in_buckets(js, app) == before
    assert (await rebuild(js, app, "balances", RebuildOptions(check=True, swap=True))).is_swapped
    assert (await verify(js, app, "balances")).is_equal


async def test_verifying_beside_live_traffic_finds_nothing_where_nothing_is_wrong(
    server: NatsServer, js: JetStream
) -> None:
    app = bank()
    await fold_live(server, js, app)
    rng = random.Random(8)
    is_over = False

    async def traffic() -> None:
        while not is_over:
            await publish(js, app, *some_events(rng, 20))

    async with running(app, server.url):
        task = asyncio.create_task(traffic())
        for cache_keys in (1000, 2):
            found = await verify(js, app, "balances", VerifyOptions(cache_keys=cache_keys))
            assert found.is_equal, found.differences
            assert found.digest == found.expected_digest
            assert found.boundary >= 200
        is_over = True
        await task
        await until(lambda: is_folded(js, app))
        whole, spilled = [await verify(js, app, "balances", VerifyOptions(cache_keys=size)) for size in (1000, 2)]
    assert (whole.digest, whole.keys, whole.parked) == (spilled.digest, spilled.keys, spilled.parked)


async def sent_by(server: NatsServer, work: Awaitable[Any]) -> tuple[Any, int]:
    """How many messages a server that does nothing else sends meanwhile."""

    async def sent() -> int:
        _, page = await asyncio.to_thread(server.monitor, "/varz")
        return int(json.loads(page)["out_msgs"])

    before = await sent()
    return await work, await sent() - before


async def many_keys(server: NatsServer, js: JetStream, app: App, keys: int) -> int:
    """Three events of each key, and a bucket that has them all; returns how many events there are."""
    await set_up(js, app)
    async with js.fast_batch() as batch:
        for number in range(3):
            for key in range(keys):
                event = Opened(account=f"k{key}") if not number else Moved(source=f"k{key}", target="all", cents=number)
                now = datetime.datetime(2026, 3, 31, tzinfo=datetime.UTC)
                sent = encode(event, id=f"{number}-{key}", source=app.source, time=now)
                await batch.add(sent.subject, sent.data)
    async with running(app, server.url):
        await until(lambda: is_at(js, "bank_balances", 3 * keys))
    return 3 * keys


async def is_at(js: JetStream, bucket: str, sequence: int) -> bool:
    return (await stored_position(js, bucket)).sequence == sequence


async def test_verifying_reads_each_event_and_each_key_once_however_few_states_fit_memory(own: NatsServer) -> None:
    app, keys = bank(), 2_000
    async with jetspark.connect(own.url) as client:
        js = client.jetstream()
        events = await many_keys(own, js, app, keys)
        read = 0

        async def count(some: Events) -> None:
            nonlocal read
            read += some.messages

        for cache_keys in (1_000_000, 100):
            read = 0
            found, sent = await sent_by(
                own, verify(js, app, "balances", VerifyOptions(cache_keys=cache_keys), on_events=count)
            )
            assert (found.is_equal, found.keys, found.events) == (True, keys, 3 * keys + 2 * keys)
            assert read == events
            assert events + keys < sent < 1.1 * (events + keys)


async def test_verifying_at_an_early_boundary_reads_what_came_after_it_once_for_all_keys(
    own: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verification, "RECHECK_KEYS", 50)
    app, keys = bank(), 2_000
    async with jetspark.connect(own.url) as client:
        js = client.jetstream()
        events = await many_keys(own, js, app, keys)
        digests = set()
        for cache_keys in (1_000_000, 20):
            work = verify(js, app, "balances", VerifyOptions(to_seq=keys, cache_keys=cache_keys))
            found, sent = await sent_by(own, work)
            assert (found.is_equal, found.boundary, found.keys) == (True, keys, keys), found.differences
            # The events, the bucket, and each key once more.
            assert events + 2 * keys < sent < 1.1 * (events + 2 * keys)
            digests |= {found.digest, found.expected_digest}
        assert len(digests) == 1
        await write(js, "bank_balances", "k7", KeyContent(b'{"cents":1,"moves":1}', 2 * keys + 8))
        await write(js, "bank_balances", "k8", KeyContent(b'{"cents":0,"moves":0}', 9))
        await write(js, "bank_balances", "k9", KeyContent(b'{"cents":0,"moves":0}', 10**30))
        for cache_keys in (1_000_000, 20):
            found = await verify(js, app, "balances", VerifyOptions(to_seq=keys, cache_keys=cache_keys))
            assert [(each.key, each.kind) for each in found.differences] == [("k7", "value"), ("k9", "value")]
            assert (found.keys, found.difference_count) == (keys, 2)


class Owned:
    """Its keys are those of the events."""

    def apply(self, state: int | None, event: Opened | Closed) -> int:
        return (state or 0) + (1 if isinstance(event, Opened) else 10)


def owned() -> App:
    app = App("bank", stream=StreamConfig(name="BANK", subjects=["bank.>"]))
    app.projection("owned", events=[Opened, Closed], bucket="bank_owned")(Owned)
    return app


@pytest.mark.parametrize("damage", ["none", "empty", "foreign", "parked"])
@pytest.mark.parametrize("last", ["own", "other"])
async def test_a_repair_takes_an_event_of_the_key_that_is_on_the_subject_of_another(
    server: NatsServer, js: JetStream, last: str, damage: str
) -> None:
    app = owned()
    await set_up(js, app)
    await publish(js, app, Opened(account="k1"), Opened(account="k2"))
    now = datetime.datetime(2026, 3, 31, tzinfo=datetime.UTC)
    await js.publish("bank.k2.closed", encode(Closed(account="k1"), id="c-1", source="/elsewhere", time=now).data)
    if last == "own":
        await publish(js, app, Opened(account="k1"))
    async with running(app, server.url):
        await until(lambda: is_at(js, "bank_owned", 3 + (last == "own")))
    right = (await in_buckets(js, app))["owned"]
    assert right["k1"][:2] == ((b"12", 4) if last == "own" else (b"11", 3))
    if damage == "empty":
        await (await js.stream("KV_bank_owned")).purge(subject="$KV.bank_owned.k1")
    elif damage == "foreign":
        await (await js.kv("bank_owned")).put("k1", b"999")
    elif damage == "parked":
        await write(js, "bank_owned", "k1", KeyContent(b"1", 1), "1 parked 3 why")
    done = await repair_keys(js, app, "owned", ["k1"])
    assert (done.changed, done.status) == (int(damage != "none"), "done")
    assert (await in_buckets(js, app))["owned"] == right
    assert (await verify(js, app, "owned")).is_equal


async def test_a_preview_of_a_fold_that_changes_every_key_reads_the_history_once(own: NatsServer) -> None:
    app, keys = bank(), 2_000
    async with jetspark.connect(own.url) as client:
        js = client.jetstream()
        events = await many_keys(own, js, app, keys)
        changed = App("bank", stream=app.spec.stream_config)

        class Other(Balances):
            def apply(self, state: Account | None, event: Any, key: str) -> Any:
                found = super().apply(state, event, key)
                if isinstance(found, Account):
                    found.moves += 1
                return found

        changed.projection("balances", events=[Opened, Moved, Closed], bucket="bank_balances", version=2)(Other)
        found, sent = await sent_by(own, preview_rebuild(js, changed, "balances"))
        assert found.comparison.difference_count == keys
        assert sent < 1.1 * (events + 2 * keys)  # a key that differs is read once more


async def test_a_key_that_is_written_while_it_is_verified_is_folded_on_and_the_tail_is_read_once(
    own: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, keys = bank(), 500
    async with jetspark.connect(own.url) as client:
        js = client.jetstream()
        await many_keys(own, js, app, keys)
        late = [Moved(source=f"k{number}", target="all", cents=7) for number in range(keys)]
        is_late = False

        async def meanwhile(some: Events) -> None:
            nonlocal is_late
            if not is_late:
                is_late = True
                await publish(js, app, *late)
                await until(lambda: is_at(js, "bank_balances", 4 * keys))

        async with running(app, own.url):
            found = await verify(js, app, "balances", VerifyOptions(cache_keys=50), on_events=meanwhile)
        assert (found.is_equal, found.boundary, found.keys) == (True, 3 * keys, keys)
        assert found.digest == found.expected_digest == (await verify(js, app, "balances")).digest


async def write(js: JetStream, bucket: str, key: str, content: KeyContent, mark: str = "1") -> None:
    runner = ProcedureRunner(js)
    revision = (await runner.run(load(bucket, [key]))).get(key, NOTHING).revision
    operation: Any = "delete" if content.value is None else "put"
    change = Change(key, content.value or b"", operation, content.sequence, revision, mark=mark)
    await runner.run(store(bucket, [change]))


async def test_verify_lists_what_differs_by_key(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    names = [f"k{number}" for number in range(8)]
    await publish(js, app, *(Opened(account=name) for name in names))
    await publish(js, app, *(Moved(source=name, target="k0", cents=3) for name in names[1:]))
    await publish(js, app, Closed(account="k7"))
    async with running(app, server.url):
        await until(lambda: is_folded(js, app))
    bucket = "bank_balances"
    await write(js, bucket, "k1", KeyContent(b'{"cents":1,"moves":1}', 9))
    await write(js, bucket, "k2", KeyContent(b'{"cents":-3,"moves":1}', 9))
    await write(js, bucket, "k3", KeyContent(None, 11))
    await write(js, bucket, "k4", KeyContent(b'{"cents":-3,"moves":1}', 12), "1 parked 13 why")
    await write(js, bucket, "k5", KeyContent(b'{"cents":-3,"moves":1}', 13), "2")
    await (await js.kv(bucket)).put("k6", b"{}")
    await write(js, bucket, "k7", KeyContent(b'{"cents":-3,"moves":1}', 15))
    await (await js.stream(f"KV_{bucket}")).purge(subject=f"$KV.{bucket}.k0")
    found = await verify(js, app, "balances")
    kinds = {each.key: each.kind for each in found.differences}
    assert kinds == {
        "k0": "missing",
        "k1": "value",
        "k2": "sequence",
        "k3": "missing",
        "k4": "parked",
        "k5": "version",
        "k6": "foreign",
        "k7": "extra",
    }
    assert found.digest != found.expected_digest
    done = await repair_keys(js, app, "balances", names)
    assert done.changed == 8
    assert (await verify(js, app, "balances")).is_equal
    again = await repair_keys(js, app, "balances", names)
    assert again.changed == 0


async def test_another_version_is_refused(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await fold_live(server, js, app, 20)
    newer = App("bank", stream="BANK", subjects=["bank.>"])
    spec = app.projections["balances"]
    newer.projection("balances", events=spec.events, bucket=spec.bucket, version=2)(spec.kind)
    with pytest.raises(UsageError, match=r"is at version 1 .*, and this code is version 2: rebuild"):
        await verify(js, newer, "balances")
    with pytest.raises(UsageError, match="was made by its version 1"):
        await run_replay(js, newer, "balances")


# ---- engines that are wrong ------------------------------------------------------------------------------------------

Rows = list[Row]


class Engine:
    """A simple engine: a state and a sequence for each key. This one is right, the others are not."""

    def __init__(self, spec: ProjectionSpec) -> None:
        self.spec = spec
        self.values: dict[str, tuple[bytes | None, int]] = {}

    def apply(self, row: Row) -> None:
        value, sequence = self.values.get(row.key, (None, 0))
        if row.sequence <= sequence:
            return
        new = self.spec.fold(row.key, value, row.event)
        if new is not None or value is not None:
            self.values[row.key] = (new, row.sequence)

    def run(self, rows: Rows) -> None:
        for row in rows:
            self.apply(row)


class SkipsAfterANak(Engine):
    """One event fails and comes again, behind later ones of its key."""

    def run(self, rows: Rows) -> None:
        at = next(index for index, row in enumerate(rows) if index > 30 and row.key == "a2")
        super().run([*rows[:at], *rows[at + 1 : at + 40], rows[at], *rows[at + 40 :]])


class AppliesTwice(Engine):
    """It dies after it has stored, and begins before that, without looking at the sequence of the state."""

    def run(self, rows: Rows) -> None:
        super().run(rows[:60])
        self.values = {key: (value, 0) for key, (value, _) in self.values.items()}
        super().run(rows[50:])


class ForgetsATombstone(Engine):
    """A deleted key is forgotten with its sequence; what comes again makes it anew."""

    def apply(self, row: Row) -> None:
        super().apply(row)
        if row.key in self.values and self.values[row.key][0] is None:
            del self.values[row.key]

    def run(self, rows: Rows) -> None:
        super().run(rows)
        at = next(index for index, row in enumerate(rows) if row.key not in self.values)
        super().run(rows[at : at + 1])


class MixesTwoSnapshots(Engine):
    """Half of the keys as they were earlier."""

    def run(self, rows: Rows) -> None:
        super().run(rows[:60])
        early = dict(self.values)
        super().run(rows[60:])
        self.values |= dict(sorted(early.items())[:3])


@pytest.mark.parametrize("kind", [Engine, SkipsAfterANak, AppliesTwice, ForgetsATombstone, MixesTwoSnapshots])
async def test_an_engine_that_is_wrong_is_caught(js: JetStream, kind: type[Engine]) -> None:
    app = bank()
    await set_up(js, app)
    rng = random.Random(11)
    names = [f"a{number}" for number in range(6)]
    await publish(js, app, *(Opened(account=name) for name in names))
    pairs = [rng.sample(names, 2) for _ in range(60)]
    await publish(js, app, *(Moved(source=one, target=other, cents=1) for one, other in pairs), Closed(account="a1"))
    spec = app.projections["balances"]
    messages = await in_stream(js, app)
    router = Router([spec], app.catalogue)
    engine = kind(spec)
    engine.run([row for message in messages for row in route_one(router, message).rows])
    stream = await js.stream(app.stream)
    position = FoldPosition.beginning(app.stream, stream.cached_info.created)._replace(sequence=len(messages))
    changes = [position_change(position, 0)]
    for key, (value, sequence) in engine.values.items():
        operation: Any = "delete" if value is None else "put"
        changes.append(Change(key, value or b"", operation, sequence, 0, mark="1"))
    await ProcedureRunner(js).run(store("bank_balances", changes))
    found = await verify(js, app, "balances")
    expected, _ = folded(app, messages)
    is_right = kind is Engine
    assert found.is_equal == is_right, found.differences
    assert (found.digest == found.expected_digest) == is_right
    assert ((await in_buckets(js, app))["balances"] == expected["balances"]) == is_right
