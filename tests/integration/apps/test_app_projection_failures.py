"""What live projections promise when something dies, or others interfere."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import random
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest
from support.apps import publish, running, set_up, until
from support.projections import (
    Balances,
    Closed,
    Moved,
    Opened,
    bank,
    folded,
    in_buckets,
    in_stream,
    parked,
    some_events,
)

import jetspark
from jetspark import KVConfig, StreamRecreated
from jetspark.aio.jetstream import JetStream
from jetspark.app import App, Event
from jetspark.app.dead_letters.redriving import DeadLetterFilter, read_dead_letters
from jetspark.app.projections.bucket_refs import BucketRef, open_records, swap
from jetspark.app.projections.live_options import LiveOptions
from jetspark.app.projections.positions import FoldPosition, position_change
from jetspark.app.projections.projection_worker import ProjectionWorker
from jetspark.app.projections.state_header import FOREIGN, Mark, position_key
from jetspark.app.replay import RebuildOptions, rebuild, verify
from jetspark.errors import DataLoss, StateParked, UsageError, WrongLastSequence
from jetspark.server import NatsServer
from jetspark.state.changes import Change, header_fields

WORKER = Path(__file__).parent / "projection_worker.py"
QUICK = LiveOptions(position_every_s=0.01, lease_s=1.0)


async def is_folded(js: JetStream, app: App) -> bool:
    expected, _ = folded(app, await in_stream(js, app))
    return await in_buckets(js, app) == expected


async def start_worker(server: NatsServer, moment: str = "", number: int = 0) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(WORKER),
        server.url,
        moment,
        str(number),
        env={**os.environ, "PYTHONPATH": str(WORKER.parents[2])},
    )


async def end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["before", "within", "after"])
async def test_a_worker_that_is_killed_anywhere_changes_no_byte(server: NatsServer, js: JetStream, moment: str) -> None:
    app = bank()
    await set_up(js, app)
    events = some_events(random.Random(7), 400, accounts=40)
    for number in (1, 2, 3):
        await publish(js, app, *events[100 * number - 100 : 100 * number])
        process = await start_worker(server, moment, number)
        try:
            async with asyncio.timeout(30):
                assert await process.wait() == -signal.SIGKILL
        finally:
            await end(process)
    await publish(js, app, *events[300:])
    process = await start_worker(server)
    try:
        await until(lambda: is_folded(js, app))
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == 0
    finally:
        await end(process)
    assert await is_folded(js, app)
    _, dead_letters = folded(app, await in_stream(js, app))
    found = await read_dead_letters(js, app, DeadLetterFilter())
    assert [each.dead_letter.origin.sequence for each in found] == dead_letters


async def answers(client: jetspark.Client) -> bool:
    with suppress(jetspark.RequestTimeout):
        return bool(await client.request("$JS.API.INFO", timeout=0.5))
    return False


async def test_a_server_that_is_killed_and_comes_back_changes_no_byte() -> None:
    app = bank()
    with NatsServer() as server:
        async with jetspark.connect(server.url) as client:
            js = client.jetstream()
            await set_up(js, app)
            events = some_events(random.Random(8), 600, accounts=50)
            await publish(js, app, *events[:200])
            async with running(app, server.url, live=QUICK):
                for at in (200, 400):
                    await publish(js, app, *events[at : at + 100])
                    server.kill()
                    server.start()
                    await until(lambda: answers(client))
                    await publish(js, app, *events[at + 100 : at + 200])
                await until(lambda: is_folded(js, app))


async def test_another_process_takes_over_when_the_first_one_ends(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    specs = list(app.projections.values())
    workers = [
        ProjectionWorker(app.spec, specs, js, catalogue=app.catalogue, options=QUICK, owner=f"w{number}")
        for number in range(2)
    ]
    tasks = []
    for worker in workers:
        tasks.append(asyncio.create_task(worker.run()))
        await until(lambda: workers[0].is_active)
    await publish(js, app, *some_events(random.Random(9), 50))
    await until(lambda: is_folded(js, app))
    assert [worker.is_active for worker in workers] == [True, False]
    await workers[0].stop(tasks[0], 5.0)
    await until(lambda: workers[1].is_active)
    await publish(js, app, *some_events(random.Random(10), 50))
    await until(lambda: is_folded(js, app))
    assert workers[1].counts.conflicts == 0  # it began where the first one ended
    await workers[1].stop(tasks[1], 5.0)


async def test_two_engines_at_a_time_are_wasteful_and_never_wrong(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    balances, moves = app.projections.values()
    # Other selections have other leases: both fold the balances.
    workers = [
        ProjectionWorker(app.spec, specs, js, catalogue=app.catalogue, options=QUICK)
        for specs in ([balances, moves], [balances])
    ]
    tasks = [asyncio.create_task(worker.run()) for worker in workers]
    for seed in range(5):
        await publish(js, app, *some_events(random.Random(seed), 60, accounts=4))
    await until(lambda: is_folded(js, app))
    assert all(worker.is_active for worker in workers)
    for worker, task in zip(workers, tasks, strict=True):
        await worker.stop(task, 5.0)
        task.result()
    assert await is_folded(js, app)


async def test_a_stream_that_was_made_anew_is_an_error_that_says_what_to_do(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, Opened(account="a"))
    task = asyncio.create_task(app.run(server.url, live=QUICK))
    await until(lambda: is_folded(js, app))
    await js.delete_stream("BANK")
    await set_up(js, app)
    await publish(js, app, Opened(account="b"))
    async with asyncio.timeout(30):
        with pytest.raises((StreamRecreated, jetspark.StreamNotFound)):
            await task
    with pytest.raises(UsageError, match=r"its position is not valid there. Rebuild it .*, or delete the bucket"):
        await app.run(server.url, live=QUICK)


async def test_code_of_another_version_refuses_to_run(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    await swap(await open_records(js, app.name), app.projections["moves"], BucketRef("bank_moves", 2), revision=0)
    with pytest.raises(UsageError, match=r"'moves' is at version 2 .*this code is version 1: rebuild"):
        await app.run(server.url, live=QUICK)


async def test_a_value_of_another_program_is_left_alone_and_told(
    server: NatsServer, js: JetStream, caplog: pytest.LogCaptureFixture
) -> None:
    app = bank()
    await set_up(js, app)
    await (await js.kv("bank_balances")).put("a", b"mine")
    await publish(js, app, Opened(account="a"), Opened(account="b"))
    kv = await js.kv("bank_balances")
    with caplog.at_level(logging.ERROR, logger="jetspark.app"):
        async with running(app, server.url, live=QUICK):
            await until(lambda: _has(kv, "b"))
            await (await js.kv("bank_balances")).put("b", b"mine, too")
            await publish(js, app, Moved(source="c", target="b", cents=1), Opened(account="c"))
            await until(lambda: _has(kv, "c"))
            await until(lambda: "key b is stuck" in caplog.text)
    assert (await kv.get("a")).value == b"mine"
    assert (await kv.get("b")).value == b"mine, too"
    assert "written by another program" in caplog.text


@pytest.mark.parametrize("how", ["delete", "purge", "put"])
async def test_who_reads_a_key_that_another_program_changed_is_told(
    server: NatsServer, js: JetStream, how: Literal["delete", "purge", "put"]
) -> None:
    app = bank()
    await set_up(js, app)
    async with app.connect(server.url) as bank_client, running(app, server.url, live=QUICK):
        view = bank_client.view("balances")
        ack = await bank_client.publish(Opened(account="a"))
        assert (await view.get("a", at_least=ack.sequence)).cents == 0
        kv = await js.kv("bank_balances")
        await (kv.put("a", b'{"cents":99}') if how == "put" else getattr(kv, how)("a"))
        ack = await bank_client.publish(Moved(source="b", target="a", cents=1))
        with pytest.raises(StateParked, match=r"^key 'a' of projection 'balances' is parked: .*another program"):
            await view.get("a", at_least=ack.sequence)
        assert (await view.entry("a")).parked == FOREIGN


async def _has(kv: jetspark.KeyValue, key: str) -> bool:
    return any([each == key async for each in kv.keys(key)])


async def test_a_state_that_was_removed_parks_its_key_and_no_other(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, Opened(account="a"), Opened(account="b"))
    async with running(app, server.url, live=QUICK):
        await until(lambda: is_folded(js, app))
        await asyncio.sleep(0.1)  # by then the position is written
        bucket = await js.stream("KV_bank_balances")
        await bucket.purge(subject="$KV.bank_balances.a")
        await publish(js, app, Moved(source="a", target="b", cents=1))

        async def is_parked() -> bool:
            return parked((await in_buckets(js, app))["balances"]) == ["a"]

        await until(is_parked)
        table = (await in_buckets(js, app))["balances"]
        mark = Mark.read(table["a"][2])
        assert mark is not None
        assert mark.parked is not None
        assert "was removed" in mark.parked.reason
        await publish(js, app, Moved(source="a", target="b", cents=1))

        async def has_both() -> bool:
            return (await in_buckets(js, app))["balances"]["b"][:2] == (b'{"cents":2,"moves":2}', 4)

        await until(has_both)


async def test_a_bucket_that_was_emptied_is_folded_anew(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, *some_events(random.Random(11), 100))
    async with running(app, server.url, live=QUICK):
        await until(lambda: is_folded(js, app))
        await asyncio.sleep(0.1)  # by then the position is written
        await (await js.stream("KV_bank_balances")).purge()
        await publish(js, app, *some_events(random.Random(12), 100))
        await until(lambda: is_folded(js, app))


async def test_a_repair_in_one_batch_with_the_position_loses_no_event(server: NatsServer, js: JetStream) -> None:
    """What passes by a parked key is read again when the key is repaired, by an engine that runs as well."""
    app = bank()
    await set_up(js, app)
    async with running(app, server.url, live=QUICK), app.connect(server.url) as client:
        balances = client.view("balances")
        await client.publish(Opened(account="a"))
        bad = await client.publish(Moved(source="a", target="b", cents=666))
        waiting = await client.publish(Moved(source="c", target="a", cents=5))
        other = await client.publish(Opened(account="d"))
        await balances.get("nobody", at_least=other.sequence)  # by then the position is written
        entry = await balances.entry("a")
        assert entry.parked is not None
        # As if other code had applied the event: the state with it, and a position that is not beyond it.
        state = Change("a", b'{"cents":-666,"moves":1}', "put", bad.sequence, entry.revision, mark="1")
        bucket = await js.stream("KV_bank_balances")
        subject = f"$KV.bank_balances.{position_key()}"
        while True:
            stored = await bucket.get_message(last_for=subject, direct=False)
            position = FoldPosition.decode(stored.data).repaired(bad.sequence)
            assert position.sequence == bad.sequence < waiting.sequence
            try:
                async with js.atomic_batch() as batch:
                    for change in (state, position_change(position, stored.sequence)):
                        fields = header_fields(change, "")
                        await batch.add(f"$KV.bank_balances.{change.key}", change.value, headers=fields)
                break
            except WrongLastSequence:
                continue  # the worker has moved on
        last = await client.publish(Moved(source="c", target="a", cents=1))
        found = await balances.get("a", at_least=last.sequence, timeout=20)
        assert (found.cents, found.moves) == (-666 + 5 + 1, 3)


async def test_another_version_of_a_fold_touches_nothing_of_the_one_that_runs(
    server: NatsServer, js: JetStream
) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, Opened(account="a"), Moved(source="a", target="b", cents=3))
    async with running(app, server.url, live=QUICK):
        await until(lambda: is_folded(js, app))
    before = await in_buckets(js, app)
    newer = App(app.name, stream=app.stream, subjects=["bank.>"])
    for spec in app.projections.values():  # declared with a new version, and started without a rebuild
        newer.projection(spec.name, events=spec.events, bucket=spec.bucket, version=2)(spec.kind)
    await publish(js, app, Opened(account="new"))  # a key that has no state yet, which would say what version it is
    with pytest.raises(UsageError, match=r"is at version 1 .*this code is version 2: rebuild"):
        await newer.run(server.url, live=QUICK)
    assert await in_buckets(js, app) == before
    async with running(app, server.url, live=QUICK):
        await until(lambda: is_folded(js, app))


async def test_a_repaired_state_with_fewer_events_is_not_taken_for_one_that_was_lost(
    server: NatsServer, js: JetStream
) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, Opened(account="a"), Opened(account="b"), *(Moved(source="a", target="b", cents=2),) * 3)
    options = LiveOptions(position_every_s=0.5, lease_s=1.0)
    async with running(app, server.url, live=options), app.connect(server.url) as client:
        view = client.view("balances")
        await until(lambda: _view_is(view, 5))
        stream = await js.stream("KV_bank_balances")
        key, place = "$KV.bank_balances.a", f"$KV.bank_balances.{position_key()}"
        # As a repair with another code does, which ignores the last events: the state and the position, together.
        stored, position = [await stream.get_message(last_for=subject) for subject in (key, place)]
        state = Change("a", b'{"cents":-2,"moves":1}', "put", 3, stored.sequence, mark="1")
        repaired = FoldPosition.decode(position.data).repaired(3)
        async with js.atomic_batch() as batch:
            for subject, change in ((key, state), (place, position_change(repaired, position.sequence))):
                await batch.add(subject, change.value, headers=header_fields(change, ""))
        await publish(js, app, Moved(source="a", target="b", cents=2))
        await until(lambda: is_folded(js, app))  # not parked


async def test_events_that_the_stream_dropped_before_they_were_read_make_a_projection_incomplete(
    server: NatsServer, js: JetStream
) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, *some_events(random.Random(1), 20, is_bad=False))
    async with running(app, server.url, live=QUICK), app.connect(server.url) as client:
        view = client.view("balances")
        await until(lambda: is_folded(js, app))
        await until(lambda: _view_is(view, 20))
        assert (await view.position()).missed is None
        assert (await verify(js, app, "balances")).is_equal
        # What was read may go.
        await (await js.stream(app.stream)).purge(up_to_sequence=10)
        await publish(js, app, *some_events(random.Random(2), 5, is_bad=False))
        await until(lambda: _view_is(view, 25))
        assert (await view.position()).missed is None
    await publish(js, app, *some_events(random.Random(3), 20, is_bad=False))
    await (await js.stream(app.stream)).purge(up_to_sequence=40)
    async with running(app, server.url, live=QUICK), app.connect(server.url) as client:
        view = client.view("balances")
        await until(lambda: _view_is(view, 45))
        assert (await view.position()).missed == (26, 40)
    with pytest.raises(DataLoss, match=r"'balances' .* folded without what the stream had dropped between 26 and 40"):
        await verify(js, app, "balances")


async def test_events_that_go_while_a_worker_reads_make_a_projection_incomplete(
    server: NatsServer, js: JetStream
) -> None:
    app = bank()
    await set_up(js, app)
    async with running(app, server.url, live=QUICK), app.connect(server.url) as client:
        view = client.view("balances")
        await publish(js, app, *some_events(random.Random(1), 20, is_bad=False))
        await until(lambda: _view_is(view, 20))
        # The next sequence is a later one, as it is when a slow worker is passed by the limits of the stream.
        await (await js.stream(app.stream)).purge(up_to_sequence=99)
        await publish(js, app, Opened(account="z"))
        await until(lambda: _view_is(view, 100))
        assert (await view.position()).missed == (21, 99)


async def _view_is(view: Any, sequence: int) -> bool:
    return bool((await view.position()).sequence == sequence)


@pytest.mark.parametrize("partitions", [1, 2])
async def test_a_bucket_that_is_made_again_takes_no_position_of_the_one_before(
    partitions: int, server: NatsServer, js: JetStream
) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, *some_events(random.Random(1), 30, is_bad=False))
    # Seldom enough that the states are there, and the bucket goes, before the position moves for the first time.
    live = LiveOptions(position_every_s=1.0, lease_s=1.0, partitions=partitions)
    async with running(app, server.url, live=live):
        await until(lambda: is_folded(js, app))
        await js.delete_kv("bank_moves")
        await set_up(js, app)
        await publish(js, app, Opened(account="new"))  # of no key of it, so that only its position would be written
        await until(lambda: is_folded(js, app))


async def test_a_bucket_that_is_deleted_and_made_again_is_folded_anew(server: NatsServer, js: JetStream) -> None:
    app = bank()
    await set_up(js, app)
    await publish(js, app, *some_events(random.Random(1), 30, is_bad=False))
    async with running(app, server.url, live=QUICK):
        await until(lambda: is_folded(js, app))
        await js.delete_kv("bank_moves")
        await publish(js, app, *some_events(random.Random(2), 20, is_bad=False))
        await set_up(js, app)
        await until(lambda: is_folded(js, app))


async def test_a_worker_that_cannot_load_a_state_says_so(
    server: NatsServer, js: JetStream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "jetspark")  # a command line that ran in this process may have raised it
    app = bank()
    await set_up(js, app)
    async with running(app, server.url, live=QUICK):
        await publish(js, app, Opened(account="a"))
        await until(lambda: is_folded(js, app))
        await js.delete_kv("bank_balances")
        await publish(js, app, Opened(account="b"))
        await until(lambda: "cannot be loaded" in caplog.text)
        assert "bucket bank_balances: 1 state cannot be loaded: no answer on" in caplog.text
        assert "`jetspark apply`" in caplog.text
        await set_up(js, app)
        await until(lambda: is_folded(js, app))


class Written(Event, type="notes.written", version=1, key="book", subject="notes.{book}"):
    book: str
    text: str


class Notes:
    def key(self, event: Written) -> str:
        return event.book

    def apply(self, state: str | None, event: Written) -> str:
        return (state or "") + event.text


class Copies:
    def key(self, event: Written) -> str:
        return event.book

    def apply(self, state: int | None, event: Written, lookup: Any) -> int:
        return len(lookup["notes"] or "")


@pytest.mark.parametrize("max_payload_bytes", [8192, 65_536])
async def test_a_state_that_is_larger_than_this_server_takes_parks_its_key_and_no_other(max_payload_bytes: int) -> None:
    app = App("notes", stream="NOTES", subjects=["notes.>"])
    app.projection("notes", events=[Written], bucket="notes")(Notes)
    app.projection("copies", events=[Written], bucket="copies", lookups=["notes"])(Copies)
    piece = "x" * (max_payload_bytes // 3)
    async with NatsServer(max_payload_bytes=max_payload_bytes) as server, jetspark.connect(server.url) as client:
        js = client.jetstream()
        await set_up(js, app)
        await publish(js, app, *[Written(book="large", text=piece)] * 4, Written(book="small", text="x"))
        async with running(app, server.url, live=QUICK), app.connect(server.url) as notes:
            assert await notes.view("notes").get("small", at_least=5) == "x"
            assert await notes.view("copies").get("small", at_least=5) == 0
            for name in ("notes", "copies"):
                with pytest.raises(StateParked, match="StateTooLarge") as failure:
                    await notes.view(name).get("large", at_least=4)
                assert failure.value.sequence in (2, 3)
            kept = await notes.view("notes").get("large")
            assert piece in kept
            assert await notes.view("notes").get("large", as_of=4) == kept
        for name in ("notes", "copies"):
            assert (await verify(js, app, name)).is_equal
        await rebuild(js, app, "notes", RebuildOptions(swap=True))
        assert (await verify(js, app, "notes")).parked == 1


class Multiplied(Event, type="numbers.multiplied", version=1, key="name", subject="numbers.{name}"):
    name: str
    by: float


class Products:
    def key(self, event: Multiplied) -> str:
        return event.name

    def apply(self, state: float | None, event: Multiplied) -> float:
        return (1.0 if state is None else state) * event.by


class Beside(Products):
    def apply(self, state: float | None, event: Multiplied, lookup: Any) -> float:  # type: ignore[override]
        return Products().apply(state, event)


async def test_a_number_that_json_does_not_have_is_no_state(server: NatsServer, js: JetStream) -> None:
    app = App("numbers", stream="NUMBERS", subjects=["numbers.>"])
    app.projection("products", events=[Multiplied], bucket="products")(Products)
    app.projection("beside", events=[Multiplied], bucket="beside", lookups=["products"])(Beside)
    await set_up(js, app)
    await publish(js, app, *[Multiplied(name="a", by=by) for by in (1e300, 1e300, 0.5)], Multiplied(name="b", by=2.0))
    async with running(app, server.url, live=QUICK), app.connect(server.url) as numbers:
        for name in ("products", "beside"):
            view = numbers.view(name)
            assert await view.get("b", at_least=4) == 2.0
            with pytest.raises(
                StateParked, match="at event 2: ValueError: the state is inf, which JSON has no number for"
            ):
                await view.get("a", at_least=3)
            assert await view.get("a") == 1e300
            assert (await verify(js, app, name)).is_equal


async def test_a_worker_whose_bucket_is_full_says_so_and_goes_on_when_there_is_room(
    server: NatsServer, js: JetStream, caplog: pytest.LogCaptureFixture
) -> None:
    app = App("bank", stream="BANK", subjects=["bank.>"])
    bucket = KVConfig(bucket="bank_balances", max_bytes=4000)
    app.projection("balances", events=[Opened, Moved, Closed], bucket=bucket)(Balances)
    await set_up(js, app)
    await publish(js, app, *(Opened(account=f"a{number}") for number in range(60)))
    async with running(app, server.url, live=QUICK):
        await until(lambda: "changes wait to be stored" in caplog.text)
        assert "bucket bank_balances: " in caplog.text
        assert "maximum bytes exceeded (code 503, err_code 10077): raise max_bytes of the bucket" in caplog.text
        await asyncio.sleep(3.0)
        assert caplog.text.count("changes wait to be stored") == 1  # and not with every attempt
        stream = await js.stream("KV_bank_balances")
        await js.update_stream(dataclasses.replace(stream.cached_info.config, max_bytes=100_000))
        await until(lambda: is_folded(js, app))
