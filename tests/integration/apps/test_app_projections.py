"""Live projections on a real server."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import random
import re
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any

import pytest
from support.apps import publish, running, set_up, until
from support.patience import PATIENCE_S
from support.projections import (
    Account,
    Balances,
    Closed,
    Moved,
    Moves,
    Opened,
    bank,
    folded,
    in_buckets,
    in_stream,
    parked,
    some_events,
)

import jetspark
from jetspark import ConfigError, DataLoss, KVConfig, RequestTimeout
from jetspark.aio.jetstream import JetStream
from jetspark.app import App, Event, Window
from jetspark.app.client import AppClient
from jetspark.app.dead_letters.redriving import DeadLetterFilter, read_dead_letters
from jetspark.app.projections.bucket_refs import BucketRef, open_records, swap
from jetspark.app.projections.live_options import LiveOptions
from jetspark.app.projections.projection_worker import ProjectionWorker
from jetspark.app.projections.views import View
from jetspark.app.replay import verify
from jetspark.errors import StateParked, StreamNotFound, UsageError
from jetspark.server import NatsServer
from jetspark.state.changes import SEQUENCE_HEADER


async def is_folded(js: JetStream, app: App) -> bool:
    """Every bucket has what a plain loop over the stream makes."""
    expected, _ = folded(app, await in_stream(js, app))
    return await in_buckets(js, app) == expected


async def test_events_are_folded_into_every_projection(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    events = some_events(random.Random(2), 300)
    await publish(js, app, *events[:150])
    async with running(app, server.url):
        await until(lambda: is_folded(js, app))
        await publish(js, app, *events[150:])
        await until(lambda: is_folded(js, app))
    expected, dead_letters = folded(app, await in_stream(js, app))
    assert await in_buckets(js, app) == expected
    assert parked(expected["balances"])  # some of the events cannot be applied
    found = await read_dead_letters(js, app, DeadLetterFilter())
    assert [each.dead_letter.origin.sequence for each in found] == dead_letters
    assert {each.dead_letter.handler for each in found} == {"projections"}


def filtered_bank() -> App:
    """Whose projections say that they are made of few of the events."""
    app = App("bank", stream="BANK", subjects=["bank.>"])
    app.projection("balances", events=[Opened, Moved, Closed], bucket="bank_balances", filtered=True)(Balances)
    app.projection("moves", events=[Moved], bucket="bank_moves", filtered=True)(Moves)
    return app


def reading_bank() -> App:
    """That reads the stream of another application."""
    app = App("bank", stream="BANK")
    app.projection("balances", events=[Opened, Moved, Closed], bucket="bank_balances")(Balances)
    app.projection("moves", events=[Moved], bucket="bank_moves")(Moves)
    return app


@pytest.mark.parametrize(
    ("make", "filters"),
    [(bank, None), (filtered_bank, "bank.*.*"), (reading_bank, "bank.*.*")],
    ids=["its own", "filtered", "another's"],
)
async def test_many_subjects_are_read_by_one_filter_or_none_and_the_rest_is_left_out(
    server: NatsServer, js: JetStream, make: Callable[[], App], filters: str | None
) -> None:
    """A server takes milliseconds for each message of a consumer with several filters, if there are many subjects."""
    await set_up(js, bank())
    app = make()
    await set_up(js, app)
    await js.publish("bank.ann.audited", b"not one of the events that the projections are made of")
    await publish(js, app, *some_events(random.Random(4), 50))
    audited = await js.publish("bank.bob.audited", b"nor this")
    async with running(app, server.url, live=LiveOptions(position_every_s=0.01)), app.connect(server.url) as client:
        await until(lambda: is_folded(js, app))
        stream = await js.stream(app.stream)
        [reading] = [info.config async for info in stream.consumers() if not info.config.durable_name]
        assert (reading.filter_subject, reading.filter_subjects) == (filters, None)
        view = client.view("balances")
        # The position passes by what is not for it, so readers that wait for that sequence do not wait for ever.
        await until(lambda: _is_at(view, audited.sequence))
        await view.get("nobody", at_least=audited.sequence, timeout=30)
    assert (await verify(js, app, "balances")).is_equal
    dead_letters = await read_dead_letters(js, app, DeadLetterFilter())
    assert not {1, audited.sequence} & {each.dead_letter.origin.sequence for each in dead_letters}


async def _is_at(view: Any, sequence: int) -> bool:
    return bool((await view.position()).sequence == sequence)


# ---- views -----------------------------------------------------------------------------------------------------------


async def test_a_view_shows_what_one_has_just_written(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    async with running(app, server.url), app.connect(server.url) as client:
        balances = client.view("balances")
        assert await balances.get("a") is None
        for number in range(1, 20):
            await client.publish(Opened(account=f"x{number}"))
            ack = await client.publish(Opened(account="a") if number == 1 else Moved(source="b", target="a", cents=1))
            state = await balances.get("a", at_least=ack.sequence)
            assert (state.cents, state.moves) == (number - 1, number - 1)
        # An event of another key, one that is ignored, and one that ends the key.
        other = await client.publish(Opened(account="other"))
        assert (await balances.get("a", at_least=other.sequence)).moves == 18
        ignored = await client.publish(Moved(source="never", target="opened", cents=1))
        assert await balances.get("never", "none", at_least=ignored.sequence) == "none"
        closed = await client.publish(Closed(account="a"))
        assert await balances.get("a", at_least=closed.sequence) is None
        entry = await balances.entry("a")
        assert (entry.key, entry.state, entry.sequence) == ("a", None, closed.sequence)


async def test_a_parked_key_is_visible_and_cannot_be_waited_for(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    async with running(app, server.url), app.connect(server.url) as client:
        balances = client.view("balances")
        await client.publish(Opened(account="a"))
        bad = await client.publish(Moved(source="a", target="b", cents=666))
        later = await client.publish(Moved(source="a", target="c", cents=1))
        with pytest.raises(StateParked, match="at event 2: ValueError: cannot be applied"):
            await balances.get("a", at_least=later.sequence)
        entry = await balances.entry("a")
        assert entry.parked is not None
        assert (entry.state.cents, entry.parked.sequence) == (0, bad.sequence)


async def test_a_key_that_is_parked_at_a_later_event_has_those_before_it(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    others = [Opened(account="b"), Opened(account="c")]
    await publish(js, app, Opened(account="a"), *others, Moved(source="a", target="b", cents=666), *others)
    async with running(app, server.url), app.connect(server.url) as client:
        view = client.view("balances")
        await view.get("c", at_least=6)
        for sequence in (1, 2, 3):
            assert await view.get("a", at_least=sequence) == Account()
        for sequence in (4, 5, 6):
            with pytest.raises(StateParked) as failure:
                await view.get("a", at_least=sequence)
            assert failure.value.sequence == 4


async def test_a_view_refuses_what_is_no_sequence_no_time_and_no_condition(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, Opened(account="a"))
    async with running(app, server.url), app.connect(server.url) as client:
        view = client.view("balances")
        assert await view.get("a", at_least=1) == Account()
        wrong: Any
        async with view.replica() as copy:
            for wrong in ("1", b"1", -1, 0.5, float("nan"), True, 2**64):
                for reading in (view.get("a", at_least=wrong), view.get("a", as_of=wrong)):
                    with pytest.raises(ConfigError, match=re.escape(f"={wrong!r}: expected")):
                        await reading
                with pytest.raises(ConfigError, match=re.escape(f"sequence={wrong!r}: expected")):
                    await copy.reached(wrong)
            for wrong in ("1", -1, float("nan"), True):
                waits = [
                    view.get("a", at_least=1, timeout=wrong),
                    view.entry("a", timeout=wrong),
                    view.wait_for("a", bool, timeout=wrong),
                    copy.reached(0, timeout=wrong),
                ]
                for wait in waits:
                    with pytest.raises(ConfigError, match=re.escape(f"timeout={wrong!r}: expected seconds")):
                        await wait
        for condition in (None, "paid", asyncio.sleep):
            with pytest.raises(ConfigError, match="expected a plain function of a state"):
                await view.wait_for("a", condition)  # type: ignore[arg-type]
        async with aclosing(view.watch("a", "a")) as entries:
            assert (await anext(entries)).key == "a"


@pytest.mark.parametrize("is_known", [True, False], ids=["it was read before", "it is read for the first time"])
async def test_who_has_time_waits_for_a_server_that_does_not_answer(is_known: bool) -> None:
    app = bank()
    async with NatsServer() as server, jetspark.connect(server.url) as own, jetspark.connect(server.url) as other:
        await set_up(other.jetstream(), app)
        await publish(other.jetstream(), app, Opened(account="a"))
        client = AppClient.on(app, own.jetstream(timeout=0.3))
        view = client.view("balances")
        if is_known:
            assert await view.get("a") is None
        async with running(app, server.url):
            reading = [
                asyncio.create_task(view.get("a", at_least=1, timeout=PATIENCE_S)),
                asyncio.create_task(view.wait_for("a", lambda state: state is not None, timeout=PATIENCE_S)),
            ]
            server.pause()
            try:
                with pytest.raises(RequestTimeout):
                    await view.get("a")
                with pytest.raises(RequestTimeout):
                    await view.get("a", at_least=1, timeout=0.5)
                await asyncio.sleep(1.0)
            finally:
                server.resume()
            assert await asyncio.gather(*reading) == [Account()] * 2
        await client.__aexit__(None, None, None)


async def test_a_view_is_named_by_its_projection_or_by_the_class_of_it(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    async with app.connect(server.url) as client:
        assert client.view(Balances).name == "balances"
        assert await client.view(Balances).get("a") is None
        with pytest.raises(ConfigError, match=r"view\(Account\): expected a projection of app 'bank': balances"):
            client.view(Account)  # type: ignore[arg-type]
    app.projection("beside", events=[Opened], bucket="beside")(Balances)
    async with app.connect(server.url) as client:
        with pytest.raises(ConfigError, match=r"view\(Balances\): projections 'balances', 'beside' are of this class"):
            client.view(Balances)
        assert client.view("beside").name == "beside"


async def test_waiting_for_a_projection_that_nobody_runs_says_so(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    async with app.connect(server.url) as client:
        ack = await client.publish(Opened(account="a"))
        beyond = rf"{ack.sequence + 5}: that sequence does not exist yet, stream BANK ends at {ack.sequence}: no answer"
        with pytest.raises(RequestTimeout, match=beyond):
            await client.view("balances").get("a", at_least=ack.sequence + 5, timeout=0.5)
        with pytest.raises(RequestTimeout, match="does a worker run it"):
            await client.view("balances").get("a", at_least=ack.sequence, timeout=0.3)
        with pytest.raises(ConfigError, match="expected a projection of app 'bank': balances, moves"):
            client.view("nothing")


async def test_changes_are_waited_for_watched_and_copied(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    async with running(app, server.url), app.connect(server.url) as client:
        balances = client.view("balances")
        rich = asyncio.create_task(balances.wait_for("a", lambda state: state is not None and state.cents >= 30))
        gone = asyncio.create_task(balances.wait_for("zz", lambda state: state is None))
        seen: list[int] = []

        async def follow() -> None:
            async for entry in balances.watch("a"):
                seen.append(-1 if entry.state is None else entry.state.cents)  # noqa: PERF401  it never ends

        following = asyncio.create_task(follow())
        await client.publish(Opened(account="a"))
        for _ in range(3):
            ack = await client.publish(Moved(source="b", target="a", cents=10))
            await asyncio.sleep(0.02)
        assert (await rich).cents == 30
        assert await gone is None
        await until(lambda: bool(seen) and seen[-1] == 30)
        assert seen == sorted(seen)
        following.cancel()
        async with balances.replica() as copy:
            await copy.reached(ack.sequence)
            assert copy.get("a").cents == 30
            assert copy.get("b", "none") == "none"
            ack = await client.publish(Moved(source="b", target="a", cents=5))
            await copy.reached(ack.sequence)
            assert copy.get("a").cents == 35
            assert (copy.keys(), len(copy)) == (["a"], 1)


@pytest.mark.parametrize("turns", [1, 3, 6, 12])
async def test_a_copy_that_is_cancelled_while_it_begins_leaves_nothing_behind(
    server: NatsServer, js: JetStream, turns: int
) -> None:
    app = bank()
    await set_up(js, app)

    async def use(view: View[Any]) -> None:
        async with view.replica():
            await asyncio.Event().wait()

    async with app.connect(server.url) as client:
        view = client.view("balances")
        await view.get("a")  # from now on it follows its projection
        before = asyncio.all_tasks()
        using = asyncio.create_task(use(view))
        for _ in range(turns):
            await asyncio.sleep(0)
        using.cancel()
        await asyncio.wait([using])
        await until(lambda: asyncio.all_tasks() == before)


async def test_a_copy_that_nobody_follows_says_so(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    async with jetspark.connect(server.url) as connection:
        view = AppClient.on(app, connection.jetstream()).view("balances")
        with pytest.raises(UsageError, match="is not open: read it within"):
            view.replica().get("a")
        async with view.replica() as copy:
            with pytest.raises(UsageError, match="is opened once"):
                await copy.__aenter__()
        with pytest.raises(UsageError, match="is not open"):
            copy.get("a")
        with pytest.raises(UsageError, match="is not open"):
            await copy.reached(0)
        async with view.replica() as copy:
            await connection.close()
            with pytest.raises(UsageError, match="the connection was closed"):
                await copy.reached(1, timeout=PATIENCE_S)
            with pytest.raises(UsageError, match="the connection was closed"):
                copy.get("a")
        with pytest.raises(UsageError, match="the connection was closed"):
            await view.replica().__aenter__()
    async with app.connect(server.url) as client, client.view("balances").replica() as copy:
        await js.delete_stream("KV_bank_balances")
        for _ in range(2):
            with pytest.raises(StreamNotFound):
                await copy.reached(1, timeout=PATIENCE_S)
        with pytest.raises(StreamNotFound):
            copy.get("a")


async def test_a_state_of_the_past_is_folded_from_the_stream(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    async with running(app, server.url), app.connect(server.url) as client:
        balances = client.view("balances")
        await client.publish(Opened(account="a"))
        for _ in range(5):
            last = await client.publish(Moved(source="b", target="a", cents=1))
        await balances.get("a", at_least=last.sequence)
        assert [getattr(await balances.get("a", as_of=sequence), "cents", None) for sequence in range(7)] == [
            None,
            0,
            1,
            2,
            3,
            4,
            5,
        ]
        await (await js.stream("BANK")).purge(up_to_sequence=3)
        with pytest.raises(DataLoss, match="sequences are gone"):
            await balances.get("a", as_of=2)


async def test_a_state_of_the_past_is_the_same_by_history_and_by_replay(server: NatsServer, js: JetStream) -> None:
    app = App("bank", stream="BANK", subjects=["bank.>"])
    for name, revisions in (("kept", 4), ("plain", 1)):
        bucket = KVConfig(bucket=f"bank_{name}", history=revisions)
        app.projection(name, events=[Opened, Moved, Closed], bucket=bucket)(Balances)
    await set_up(js, app)
    one, other = Moved(source="b", target="a", cents=1), Moved(source="b", target="c", cents=1)
    async with running(app, server.url), app.connect(server.url) as client:
        kept, plain = client.view("kept"), client.view("plain")
        # Those of a list are stored as one or as several revisions, and between lists as one at least.
        for events in (
            [other],
            [Opened(account="a")],
            [one, one, other, one],
            [other, one],
            [Closed(account="a"), other],
            [other, other],
            [Opened(account="a"), one],
            [one, other, one],
            [Moved(source="b", target="a", cents=666), one],
        ):
            for event in events:
                ack = await client.publish(event)
            for view in (kept, plain):
                with suppress(StateParked):
                    await view.get("a", at_least=ack.sequence)
        history = await in_stream(js, app)
        last = len(history)
        expected = []
        for count in range(last + 1):
            value = folded(bank(), history[:count])[0]["balances"].get("a", (None, 0, ""))[0]
            expected.append(None if value is None else plain.spec.decode_state(value))
        assert expected[:3] == [None, None, Account()]
        assert expected.count(None) > 4  # the tombstone, and what comes before the next event, among them
        for view in (kept, plain):
            assert [await view.get("a", as_of=sequence) for sequence in range(last + 1)] == expected
        of_a = (await js.stream("KV_bank_kept")).get_messages(subject="$KV.bank_kept.a")
        sequences = [int(each.headers[SEQUENCE_HEADER]) async for each in of_a]
        assert len(sequences) == 4
        # With a revision to begin with, the events before it are not needed; else they are, and are gone.
        begin = sequences[1]
        await (await js.stream("BANK")).purge(up_to_sequence=begin)
        for sequence in range(begin, last + 1):
            assert await kept.get("a", as_of=sequence) == expected[sequence]
        for view, sequence in ((kept, 2), (plain, begin)):
            with pytest.raises(DataLoss):
                await view.get("a", as_of=sequence)


async def test_a_sequence_that_the_stream_does_not_have_is_no_past(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, Opened(account="a"))
    async with app.connect(server.url) as client:
        with pytest.raises(ConfigError, match="as_of=2: expected a sequence that stream BANK has; its last is 1"):
            await client.view("balances").get("a", as_of=2)
        assert await client.view("balances").get("a", as_of=1) is not None


async def test_a_view_and_a_worker_follow_a_swap(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    spec = app.projections["balances"]
    await js.create_kv(dataclasses.replace(spec.bucket_config, bucket="bank_balances_2"))
    async with running(app, server.url), app.connect(server.url) as client:
        view = client.view("balances")
        ack = await client.publish(Opened(account="a"))
        await view.get("a", at_least=ack.sequence)
        records = await open_records(js, app.name)
        await swap(records, spec, BucketRef("bank_balances_2", 1), revision=0)
        ack = await client.publish(Moved(source="b", target="a", cents=7))
        assert (await view.wait_for("a", lambda state: state is not None and state.moves == 1, timeout=20)).cents == 7
        expected, _ = folded(app, await in_stream(js, app))

        async def is_there() -> bool:
            return (await in_buckets(js, app, {"balances": "bank_balances_2"}))["balances"] == expected["balances"]

        await until(is_there)
        await js.delete_kv("bank_balances")
        assert (await view.get("a")).cents == 7


class Sold(Event, type="window.sold", version=1, key="shop", subject="bank.{shop}.sold"):
    shop: str
    cents: int


@pytest.mark.parametrize("moment", ["when the bucket is looked for", "when it is read"])
async def test_who_watches_follows_a_swap_in_whose_midst_the_server_does_not_answer(moment: str) -> None:
    app = bank()
    async with NatsServer() as server, jetspark.connect(server.url) as own, jetspark.connect(server.url) as other:
        await set_up(other.jetstream(), app)
        await other.jetstream().create_kv(KVConfig(bucket="rebuilt"))
        js = own.jetstream(timeout=1.5)
        find = js.stream

        async def find_while_nobody_answers(name: str) -> jetspark.Stream:
            if name == "KV_rebuilt":
                js.stream = find  # type: ignore[method-assign]
                found = await find(name) if moment == "when it is read" else None
                server.pause()
                return found or await find(name)
            return await find(name)

        client = AppClient.on(app, js)
        try:
            async with client.view("balances").replica() as copy, aclosing(client.view("balances").watch()) as entries:
                first = asyncio.create_task(anext(entries))
                js.stream = find_while_nobody_answers  # type: ignore[assignment]
                records = await open_records(other.jetstream(), app.name)
                with suppress(RequestTimeout):  # it is noted, and the answer may come late
                    await swap(records, app.projections["balances"], BucketRef("rebuilt", 1), revision=0)
                await asyncio.sleep(4.0)  # by then the view has waited in vain
                server.resume()
                await (await other.jetstream().kv("rebuilt")).put("a", b'{"cents":7}')
                assert (await asyncio.wait_for(first, PATIENCE_S)).state == Account(cents=7)
                await until(lambda: copy.get("a") == Account(cents=7))
        finally:
            server.resume()
            await client.__aexit__(None, None, None)


async def test_windows_have_a_state_for_each_hour(server: NatsServer, js: JetStream) -> None:
    app = App("shops", stream="SHOPS", subjects=["bank.>"])
    hour = Window(size_s=3600)

    @app.projection("takings", events=[Sold], bucket="takings", window=hour)
    class Takings:
        def key(self, event: Sold) -> str:
            return event.shop

        def apply(self, state: int | None, event: Sold) -> int:
            return (state or 0) + event.cents

    await set_up(js, app)
    now = datetime.datetime.now(datetime.UTC)
    async with running(app, server.url), app.connect(server.url) as client:
        await client.publish(Sold(shop="s", cents=3), time=now)
        await client.publish(Sold(shop="s", cents=4), time=now - datetime.timedelta(hours=1))
        ack = await client.publish(Sold(shop="s", cents=5), time=now - datetime.timedelta(days=3))
        takings = client.view("takings")
        assert await takings.get(("s", "late"), at_least=ack.sequence) == 5
        assert await takings.get(("s", hour.name(now)), at_least=ack.sequence) == 3
        assert await takings.get(("s", hour.name(now - datetime.timedelta(hours=1)))) == 4


@pytest.mark.parametrize("option", ["position_every_s", "batch_wait_s"])
@pytest.mark.parametrize("count", [0, 50])
async def test_a_worker_ends_at_once_however_seldom_it_stores(
    server: NatsServer, js: JetStream, option: str, count: int
) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, *some_events(random.Random(3), count, is_bad=False))
    live = LiveOptions(**{option: 600.0})  # type: ignore[arg-type]
    worker = ProjectionWorker(app.spec, list(app.projections.values()), js, catalogue=app.catalogue, options=live)
    run = asyncio.create_task(worker.run())
    await until(lambda: worker.counts.events == count and worker.is_active)
    await asyncio.sleep(0.1)  # by then it waits
    await asyncio.wait_for(worker.stop(run, timeout=60.0), 30.0)
    assert await is_folded(js, app)
    async with app.connect(server.url) as client:
        assert (await client.view("balances").position()).sequence == count


@pytest.mark.parametrize("partitions", [1, 2])
async def test_a_worker_without_waits_stands_still_when_there_is_nothing_to_do(js: JetStream, partitions: int) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, *some_events(random.Random(3), 50, is_bad=False))
    live = LiveOptions(position_every_s=0, batch_wait_s=0, partitions=partitions)
    worker = ProjectionWorker(app.spec, list(app.projections.values()), js, catalogue=app.catalogue, options=live)
    run = asyncio.create_task(worker.run())
    await until(lambda: is_folded(js, app))
    before = worker.counts.batches
    await asyncio.sleep(0.5)
    assert worker.counts.batches - before <= 50  # and not as often as the processor can
    await worker.stop(run, timeout=60.0)
