"""Redriving: frozen, resumable, one at a time."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import typer
from integration.apps import redrive_killed
from integration.apps.redrive_killed import PLACES
from support.apps import is_settled, publish, running, set_up, until
from typer.testing import CliRunner

from jetspark.aio.consumer import Consumer
from jetspark.aio.jetstream import JetStream
from jetspark.aio.stream import Stream
from jetspark.app import App, Context, Event, Reject, Retry, RetryIn
from jetspark.app.dead_letters import redriving
from jetspark.app.dead_letters.listing import number_list
from jetspark.app.dead_letters.redriving import (
    DeadLetterFilter,
    RedriveProgress,
    RedriveResults,
    discard_dead_letters,
    read_dead_letter,
    read_dead_letters,
    run_redrive,
)
from jetspark.app.handlers.consumers import consumers_of
from jetspark.app.handlers.dead_letter_box import StoredDeadLetter
from jetspark.app.handlers.handler_steps import ParkedRecord, ReadParked, WriteParked
from jetspark.app.handlers.handler_store import HandlerStore
from jetspark.app.stored_events import FailureCause, Origin, StoredEvent, dead_letter_subject
from jetspark.cli import commands
from jetspark.core.headers import Headers
from jetspark.errors import ConfigError, KeyNotFound, UsageError
from jetspark.server import NatsServer


class Noted(Event, type="noted", subject="notes.noted"):
    number: int


class Notes:
    """An application whose handler fails until it is mended."""

    def __init__(self) -> None:
        self.app = App("notes", stream="NOTES", subjects=["notes.>"])
        self.done: list[int] = []
        self.is_mended = False
        self.app.handler(Noted, durable="n")(self.note)

    async def note(self, event: Noted) -> None:
        if not self.is_mended:
            raise Reject("not yet")
        self.done.append(event.number)


def test_what_a_redrive_notes_of_itself_comes_back() -> None:
    progress = RedriveProgress(
        id="r1",
        chosen=DeadLetterFilter.parse("h", ["key=a"]),
        up_to=9,
        last=4,
        requested=3,
        behind=2,
        freed=1,
        unhandled=5,
    )
    assert RedriveProgress.decode(progress.encode()) == progress


def test_conditions_name_the_fields_there_are() -> None:
    with pytest.raises(ConfigError, match="expected FIELD=VALUE with one of error"):
        DeadLetterFilter.parse(None, ["reason=x"])
    with pytest.raises(ConfigError, match="expected FIELD=VALUE"):
        DeadLetterFilter.parse(None, ["key"])
    for wrong in ("closed", "opn", ""):
        with pytest.raises(ConfigError, match=f"'status={wrong}': expected status=open or status=behind"):
            DeadLetterFilter.parse(None, [f"status={wrong}"])
    for wrong in ("abc", "-1", "1.5", "", "²"):
        with pytest.raises(ConfigError, match=f"'sequence={wrong}': expected a whole number"):
            DeadLetterFilter.parse(None, [f"sequence={wrong}"])


def test_numbers_of_dead_letters_are_one_condition_of_any_length() -> None:
    assert number_list([]) == ""
    assert number_list([7, 3, 8, 9, 12, 12]) == "3,7-9,12"
    with pytest.raises(ConfigError, match="number=3-': expected numbers of dead letters, such as number=7 or"):
        DeadLetterFilter.parse(None, ["number=3-"])
    chosen = DeadLetterFilter.parse(None, ["number=3,7-9,8", "key=a"])
    assert DeadLetterFilter.of(None, {"number": 3}).where == (("number", "3"),)

    def letter(number: int, key: str) -> StoredDeadLetter:
        origin = Origin("NOTES", number, 0)
        event = StoredEvent(
            handler="n", key=key, origin=origin, subject="s", data=b"", headers=Headers(), attempts=1, status="open"
        )
        return StoredDeadLetter(event, "dlq", number)

    assert [number for number in range(12) if chosen.accepts(letter(number, "a"))] == [3, 7, 8, 9]
    assert not chosen.accepts(letter(3, "b"))
    assert not chosen.accepts_key("a")  # of a key without dead letters none is chosen


async def test_a_dead_letter_by_a_number_that_is_none_is_told(js: JetStream) -> None:
    app = Notes().app
    await set_up(js, app)
    for number in (-1, 0, 1, 2**64):
        with pytest.raises(ConfigError, match=f"app .* has no dead letter {number}; `jetspark dlq ls`"):
            await read_dead_letter(js, app, number)


async def test_a_redrive_is_frozen_resumable_and_alone(server: NatsServer, js: JetStream) -> None:
    notes = Notes()
    app, done = notes.app, notes.done
    await set_up(js, app)
    everything = DeadLetterFilter()
    store = await HandlerStore.open(js, app.name, "n")
    async with running(app, server.url):
        await publish(js, app, *(Noted(number=number) for number in range(5)))
        await until(lambda: is_settled(js, app, "n"))
        dead_letters = await read_dead_letters(js, app, everything)
        assert len(dead_letters) == 5

        # One that was interrupted after three letters.
        interrupted = RedriveProgress(
            id="r1", chosen=everything, up_to=dead_letters[-1].revision, last=dead_letters[2].revision
        )
        await store.records.create("redrive", json.dumps(interrupted.to_dict()).encode())
        with pytest.raises(UsageError, match=r"redrive r1 is under way .*--resume r1"):
            await run_redrive(js, app, everything)
        with pytest.raises(ConfigError, match="'r2': no job has this id; redrive r1 is under way"):
            await run_redrive(js, app, everything, resume="r2")
        await publish(js, app, Noted(number=5))
        await until(lambda: is_settled(js, app, "n"))
        notes.is_mended = True
        progress = await run_redrive(js, app, everything, resume="r1", rate=1000)
        assert (progress.requested, progress.is_done) == (2, True)
        await until(lambda: len(done) == 2)
        await until(lambda: is_settled(js, app, "n"))
        assert sorted(done) == [3, 4]
        with pytest.raises(ConfigError, match="no redrive is under way"):
            await run_redrive(js, app, everything, resume="r1")

        progress = await run_redrive(js, app, DeadLetterFilter.parse("n", ["error=Reject"]))
        assert progress.requested == 4
        await until(lambda: len(done) == 6)
        await until(lambda: is_settled(js, app, "n"))
        assert (await discard_dead_letters(js, app, everything)).discarded == 0


@pytest.mark.parametrize("action", ["redrive", "discard"])
@pytest.mark.parametrize("chosen", [DeadLetterFilter(), DeadLetterFilter.parse("n", [])], ids=["all", "one handler"])
@pytest.mark.parametrize("later", [0, 1])
async def test_dead_letters_that_another_process_takes_first_are_counted_in_the_reason(
    server: NatsServer,
    js: JetStream,
    monkeypatch: pytest.MonkeyPatch,
    later: int,
    chosen: DeadLetterFilter,
    action: str,
) -> None:
    app = Notes().app
    await set_up(js, app)
    async with running(app, server.url):
        await publish(js, app, *(Noted(number=number) for number in range(2)))
        await until(lambda: is_settled(js, app, "n"))

        listed = redriving.each_dead_letter

        async def each_that_is_gone_then(*which: Any, **options: Any) -> AsyncIterator[StoredDeadLetter]:
            monkeypatch.undo()
            async for stored in listed(*which, **options):
                yield stored
            assert (await discard_dead_letters(js, app, DeadLetterFilter())).discarded == 2
            await publish(js, app, *(Noted(number=number) for number in range(later)))
            await until(lambda: is_settled(js, app, "n"))

        monkeypatch.setattr(redriving, "each_dead_letter", each_that_is_gone_then)
        done = await (run_redrive if action == "redrive" else discard_dead_letters)(js, app, chosen)
        assert done.reason == "2 dead letters were handled, redriven or discarded in the meantime"


async def test_dead_letters_that_are_stored_after_a_redrive_began_are_not_denied(
    server: NatsServer, js: JetStream
) -> None:
    app = Notes().app
    await set_up(js, app)
    records = (await HandlerStore.open(js, app.name, "n")).records
    async with running(app, server.url):
        interrupted = RedriveProgress(id="r1", chosen=DeadLetterFilter(), up_to=0)
        await records.create("redrive", json.dumps(interrupted.to_dict()).encode())
        await publish(js, app, Noted(number=0))
        await until(lambda: is_settled(js, app, "n"))
        progress = await run_redrive(js, app, DeadLetterFilter(), resume="r1")
        assert str(progress) == "nothing to redrive: the dead letters that match were written in the meantime"


async def test_dead_letters_that_nobody_would_handle_are_left_alone_and_told(server: NatsServer, js: JetStream) -> None:
    notes, later = Notes(), App("notes", stream="NOTES", subjects=["notes.>"])
    await set_up(js, notes.app)
    async with running(notes.app, server.url):
        await publish(js, notes.app, Noted(number=1))
        await until(lambda: is_settled(js, notes.app, "n"))

    @later.handler(Noted, durable="renamed")
    async def note(event: Noted) -> None: ...

    await set_up(js, later)
    assert later.name == notes.app.name
    with pytest.raises(ConfigError, match="handler 'n': app 'notes' has no such handler; it has renamed"):
        await run_redrive(js, later, DeadLetterFilter(handler="n"))
    for wrong in (0, -1, "5"):
        with pytest.raises(ConfigError, match=f"rate={wrong!r}: expected a number above 0"):
            await run_redrive(js, later, DeadLetterFilter(), rate=wrong)  # type: ignore[arg-type]  # what users do
    progress = await run_redrive(js, later, DeadLetterFilter(), wait_s=1.0)
    assert (progress.requested, progress.unhandled, progress.is_done) == (0, 1, True)
    assert str(progress) == (
        "nothing to redrive: 1 dead letter left alone because the application has no handler of their name"
    )
    assert len(await read_dead_letters(js, later, DeadLetterFilter())) == 1


class Kept(Event, type="kept", key="name", subject="kept.{name}"):
    name: str
    number: int


class Spare(Event, type="spare", key="name", subject="kept.spare.{name}"):
    name: str


async def test_a_redrive_says_what_became_of_its_dead_letters(server: NatsServer, js: JetStream) -> None:
    app = App("kept", stream="KEPT", subjects=["kept.>"])
    failing = {("a", 0), ("b", 0), ("b", 2), ("c", 0)}

    @app.handler(Kept, durable="k")
    async def keep(event: Kept) -> None:
        if (event.name, event.number) in failing:
            raise Reject("not yet")

    await set_up(js, app)
    everything = DeadLetterFilter()
    async with running(app, server.url):
        await publish(js, app, *(Kept(name=name, number=number) for number in range(4) for name in "abc"))
        await until(lambda: is_settled(js, app, "k"))
        assert len(await read_dead_letters(js, app, everything)) == 12
        failing = {("b", 2), ("c", 0)}
        # Chosen by their error: what waits behind them has none, and follows all the same.
        progress = await run_redrive(js, app, DeadLetterFilter.parse(None, ["error=Reject"]), wait_s=60)
        assert (progress.requested, progress.behind) == (3, 0)
        assert progress.results == RedriveResults(handled=4 + 2, failed=2, waiting=1 + 3)
        assert "6 handled, 2 failed again, 4 waiting" in str(progress)
        assert progress.to_dict()["results"] == {"handled": 6, "failed": 2, "waiting": 4}
        assert len(await read_dead_letters(js, app, everything)) == 6
    # Nobody runs the handlers.
    progress = await run_redrive(js, app, everything, wait_s=0.1)
    assert progress.results == RedriveResults(waiting=6)
    assert (await run_redrive(js, app, everything)).results is None


@pytest.mark.parametrize("partitions", [None, 2])
@pytest.mark.parametrize("how", ["purged", "made anew"])
async def test_keys_whose_dead_letters_are_gone_go_on_with_the_next_redrive(
    server: NatsServer, js: JetStream, partitions: int | None, how: str
) -> None:
    app, done, is_mended = App("kept", stream="KEPT", subjects=["kept.>"]), list[tuple[str, int]](), False

    @app.handler(Kept, durable="k", partitions=partitions)
    async def keep(event: Kept) -> None:
        if event.number == 0 and not is_mended:
            raise Reject("not yet")
        done.append((event.name, event.number))

    @app.handler(Spare, durable="other")
    async def spare(event: Spare) -> None: ...

    await set_up(js, app)
    everything = DeadLetterFilter()
    async with running(app, server.url):
        await publish(js, app, *(Kept(name=name, number=number) for number in range(2) for name in "abc"))
        await until(lambda: _has_dead_letters(js, app, 6))
        dead_letters = await js.stream(app.spec.dead_letter_stream)
        if how == "purged":
            await dead_letters.purge()
        else:
            await js.delete_stream(app.spec.dead_letter_stream)
            await set_up(js, app)
        await publish(js, app, *(Kept(name=name, number=2) for name in "ab"))
        await until(lambda: _has_dead_letters(js, app, 2))
        await until(lambda: _is_acknowledged(js, app))
        is_mended = True
        # Of what somebody has chosen otherwise, no key is a part.
        assert (await run_redrive(js, app, DeadLetterFilter.parse(None, ["error=Reject"]))).freed == 0
        assert (await run_redrive(js, app, DeadLetterFilter.parse("other", []))).freed == 0
        told = await run_redrive(js, app, everything, is_dry_run=True)
        assert (told.freed, "3 keys whose dead letters are gone would continue" in str(told), done) == (3, True, [])
        assert (await run_redrive(js, app, DeadLetterFilter.parse("k", ["key=a"]), wait_s=60)).freed == 1
        progress = await run_redrive(js, app, everything, wait_s=60)
        assert (progress.freed, progress.results) == (2, RedriveResults(handled=1))
        assert "2 keys whose dead letters are gone continue: 1 handled" in str(progress)
        await publish(js, app, *(Kept(name=name, number=3) for name in "abc"))
        await until(lambda: len(done) == 5)
        assert {name: [number for each, number in done if each == name] for name in "abc"} == {
            "a": [2, 3],
            "b": [2, 3],
            "c": [3],
        }
        assert (await run_redrive(js, app, everything)).freed == 0


async def test_a_key_whose_event_is_on_its_way_is_not_let_go_on(server: NatsServer, js: JetStream) -> None:
    app, done, may_end = App("kept", stream="KEPT", subjects=["kept.>"]), list[tuple[str, int]](), asyncio.Event()

    @app.handler(Kept, durable="k", ack_wait_s=60, retry=Retry(first_s=60, in_lane_s=0, jitter=0))
    async def keep(event: Kept, ctx: Context) -> None:
        if event.number == 0:
            if event.name == "scheduled" or ctx.attempt == 1:
                raise RetryIn(60 if event.name == "scheduled" else 0.1)
            await may_end.wait()
        done.append((event.name, event.number))

    await set_up(js, app)
    everything = DeadLetterFilter()
    async with running(app, server.url):
        names = ["scheduled", "at work"]
        await publish(js, app, *(Kept(name=name, number=number) for number in range(2) for name in names))
        await until(lambda: _has_dead_letters(js, app, 2))
        retries = await (await js.stream(app.spec.retry_stream)).consumer("k")
        await until(lambda: _has_unacknowledged(retries))
        assert (await run_redrive(js, app, everything)).freed == 0
        # Parked, and killed before its letter was written: the server delivers it again.
        store = await HandlerStore.open(js, app.name, "k")
        ahead = (await (await js.stream(app.stream)).info()).state.last_sequence + 1
        await store.perform(WriteParked("begun", ahead, 0, (ahead,)))
        may_end.set()
        await until(lambda: len(done) == 2)
        assert done == [("at work", 0), ("at work", 1)]
    await publish(js, app, Kept(name="begun", number=0))
    assert (await run_redrive(js, app, everything)).freed == 0


@pytest.mark.parametrize("partitions", [None, 2])
@pytest.mark.parametrize("how", ["purged", "made anew"])
async def test_dead_letters_behind_another_follow_it_also_if_the_records_are_gone(
    server: NatsServer, js: JetStream, partitions: int | None, how: str
) -> None:
    app, done, is_mended = App("kept", stream="KEPT", subjects=["kept.>"]), list[tuple[str, int]](), False

    @app.handler(Kept, durable="k", partitions=partitions)
    async def keep(event: Kept) -> None:
        if event.number == 0 and not is_mended:
            raise Reject("not yet")
        done.append((event.name, event.number))

    await set_up(js, app)
    await publish(js, app, *(Kept(name=name, number=number) for number in range(3) for name in "abc"))
    async with running(app, server.url):
        await until(lambda: _has_dead_letters(js, app, 9))
        await until(lambda: _is_acknowledged(js, app))
    if how == "purged":
        await (await js.stream(f"KV_{app.spec.handler_bucket}")).purge()
    else:
        await js.delete_stream(f"KV_{app.spec.handler_bucket}")
        await set_up(js, app)
    is_mended = True
    chosen = DeadLetterFilter.parse(None, ["key=c", "status=open"])
    assert (await discard_dead_letters(js, app, chosen)).discarded == 1
    async with running(app, server.url):
        told = await run_redrive(js, app, DeadLetterFilter(), is_dry_run=True)
        assert (told.restored, "3 keys whose records are gone would follow again" in str(told)) == (3, True)
        # Of what somebody has chosen otherwise, no key is a part.
        assert (await run_redrive(js, app, DeadLetterFilter.parse(None, ["status=behind"]))).restored == 0
        progress = await run_redrive(js, app, DeadLetterFilter.parse(None, ["key=a"]), wait_s=60)
        assert (progress.restored, progress.results) == (1, RedriveResults(handled=3))
        progress = await run_redrive(js, app, DeadLetterFilter(), wait_s=60)
        assert (progress.restored, progress.results) == (2, RedriveResults(handled=3 + 2))
        assert await _has_dead_letters(js, app, 0)
    assert {name: [number for each, number in done if each == name] for name in "abc"} == {
        "a": [0, 1, 2],
        "b": [0, 1, 2],
        "c": [1, 2],
    }


async def test_a_key_goes_on_with_dead_letters_that_were_left_before_the_event_it_waited_for(
    server: NatsServer, js: JetStream
) -> None:
    app, done, is_mended = App("kept", stream="KEPT", subjects=["kept.>"]), list[int](), False

    @app.handler(Kept, durable="k")
    async def keep(event: Kept) -> None:
        if not is_mended:
            raise Reject("not yet")
        done.append(event.number)

    await set_up(js, app)
    await publish(js, app, *(Kept(name="a", number=number) for number in range(2)))
    async with running(app, server.url):
        await until(lambda: _has_dead_letters(js, app, 2))
        await until(lambda: _is_acknowledged(js, app))
    # As a worker that died leaves it: it wrote a letter while another one let the key go on, to an event that failed.
    store, is_mended = await HandlerStore.open(js, app.name, "k"), True
    parked = await store.perform(ReadParked("a"))
    assert isinstance(parked, ParkedRecord)
    assert await store.perform(WriteParked("a", 3, parked.revision, (3,)))
    async with running(app, server.url) as worker:
        await publish(js, app, Kept(name="a", number=2))
        await until(lambda: len(done) == 3 or worker.done())
        assert done == [2, 0, 1]
        await until(lambda: _has_dead_letters(js, app, 0))
        await publish(js, app, Kept(name="a", number=3))
        await until(lambda: len(done) == 4 or worker.done())
    assert done[3:] == [3]
    assert await store.perform(ReadParked("a")) is None


async def _has_dead_letters(js: JetStream, app: App, count: int) -> bool:
    return len(await read_dead_letters(js, app, DeadLetterFilter())) == count


async def _is_acknowledged(js: JetStream, app: App) -> bool:
    infos = [
        await (await (await js.stream(place.stream)).consumer(place.name)).info()
        for spec in app.handlers.values()
        for place in consumers_of(app.spec, spec)
    ]
    return not any(info.ack_pending for info in infos)


async def _has_unacknowledged(consumer: Consumer) -> bool:
    return (await consumer.info()).ack_pending > 0


async def test_a_redrive_that_was_killed_is_resumed_and_handles_each_dead_letter_once(
    server: NatsServer, js: JetStream, tmp_path: Path
) -> None:
    notes = Notes()
    app, done = notes.app, notes.done
    await set_up(js, app)
    async with running(app, server.url):
        await publish(js, app, *(Noted(number=number) for number in range(20)))
        await until(lambda: is_settled(js, app, "n"))
    (tmp_path / "notes_app.py").write_text(NOTES, encoding="utf-8")
    command = ["-m", "jetspark", "dlq", "redrive", "notes_app:app", "--rate", "1", "--servers", server.url]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=tmp_path)
    retries = await js.stream(app.spec.retry_stream)
    try:
        await until(lambda: _has_requests(retries, 2))
    finally:
        process.kill()
        await process.wait()
    assert 2 <= (await retries.info()).state.messages < 20
    store = await HandlerStore.open(js, app.name, "n")
    id = json.loads((await store.records.get("redrive")).value)["id"]
    with pytest.raises(UsageError, match=rf"redrive {id} is under way .*--resume {id}"):
        await run_redrive(js, app, DeadLetterFilter())
    notes.is_mended = True
    async with running(app, server.url):
        progress = await run_redrive(js, app, DeadLetterFilter(), resume=id, wait_s=60)
        assert progress.is_done
        await until(lambda: is_settled(js, app, "n"))
    assert sorted(done) == list(range(20))
    assert await read_dead_letters(js, app, DeadLetterFilter()) == []


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
async def test_a_redrive_killed_at_any_place_is_resumed_and_handles_each_dead_letter_once(
    server: NatsServer, js: JetStream, place: str
) -> None:
    notes = Notes()
    app, done = notes.app, notes.done
    await set_up(js, app)
    async with running(app, server.url):
        await publish(js, app, *(Noted(number=number) for number in range(7)))
        await until(lambda: is_settled(js, app, "n"))
        notes.is_mended = True
        process = await asyncio.create_subprocess_exec(sys.executable, redrive_killed.__file__, server.url, place)
        assert await process.wait() == -signal.SIGKILL
        store = await HandlerStore.open(js, app.name, "n")
        id = json.loads((await store.records.get("redrive")).value)["id"]
        assert (await run_redrive(js, app, DeadLetterFilter(), resume=id)).is_done
        await until(lambda: is_settled(js, app, "n"))
    assert sorted(done) == list(range(7))
    assert await read_dead_letters(js, app, DeadLetterFilter()) == []
    with pytest.raises(KeyNotFound):
        await store.records.get("redrive")


async def _has_requests(retries: Stream, count: int) -> bool:
    return (await retries.info()).state.messages >= count


async def test_of_two_handlers_of_an_event_the_one_that_failed_gets_it_again(server: NatsServer, js: JetStream) -> None:
    app, done, is_mended = App("notes", stream="NOTES", subjects=["notes.>"]), list[tuple[str, int]](), False

    @app.handler(Noted, durable="well")
    async def work(event: Noted) -> None:
        done.append(("well", event.number))

    @app.handler(Noted, durable="badly")
    async def fail(event: Noted) -> None:
        if not is_mended:
            raise Reject("not yet")
        done.append(("badly", event.number))

    await set_up(js, app)
    async with running(app, server.url):
        await publish(js, app, *(Noted(number=number) for number in range(3)))
        for name in ("well", "badly"):
            await until(lambda name=name: is_settled(js, app, name))  # type: ignore[misc]
        is_mended = True
        progress = await run_redrive(js, app, DeadLetterFilter(), wait_s=60)
        assert progress.results == RedriveResults(handled=3)
        await publish(js, app, Noted(number=3))  # what comes after the redrive has come to both
        await until(lambda: {("well", 3), ("badly", 3)} <= set(done))
        for name in ("well", "badly"):
            await until(lambda name=name: is_settled(js, app, name))  # type: ignore[misc]
    assert sorted(done) == sorted((name, number) for name in ("well", "badly") for number in range(4))


async def test_a_slow_redrive_tells_how_far_it_is_by_time(
    server: NatsServer, js: JetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redriving, "SAVE_EVERY_S", 0.05)
    app = App("notes", stream="NOTES", subjects=["notes.>"])

    @app.handler(Noted, durable="n")
    async def note(event: Noted) -> None:
        raise Reject("never")

    await set_up(js, app)
    async with running(app, server.url):
        await publish(js, app, *(Noted(number=number) for number in range(3)))
        await until(lambda: is_settled(js, app, "n"))
    told: list[tuple[int, bool]] = []
    await run_redrive(
        js,
        app,
        DeadLetterFilter(),
        rate=5,
        on_progress=lambda progress: told.append((progress.requested, progress.is_done)),
    )
    assert told == [(0, False), (1, False), (2, False), (3, False), (3, True)]


DEAD_LETTERS, LETTER_BYTES = 400, 100_000


async def test_many_large_dead_letters_are_never_in_memory_at_once(
    server: NatsServer, js: JetStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of forty megabytes, 16 MiB are read ahead and 4 MiB requested at a time, whatever is done with them."""
    app = App("notes", stream="NOTES", subjects=["notes.>"])
    app.handler(Noted, durable="n")(_nothing)
    await set_up(js, app)
    for number in range(DEAD_LETTERS):
        dead_letter = StoredEvent(
            handler="n",
            key=None,
            origin=Origin("NOTES", number + 1, 1_000_000 + number),
            subject="notes.noted",
            data=b"x" * LETTER_BYTES,
            headers=Headers(),
            attempts=1,
            status="open",
            cause=FailureCause.of_crash(),
        )
        subject = dead_letter_subject("notes", "n", None, dead_letter.origin)
        await js.publish(subject, dead_letter.data, headers=dead_letter.to_headers())
    (tmp_path / "notes_app.py").write_text(NOTES, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def shell(*arguments: str) -> int:
        """In another thread, because the command has a loop of its own; returns how many characters it printed."""
        printed = 0

        def echo(text: Any = "", **options: Any) -> None:
            nonlocal printed
            printed += len(text)

        with monkeypatch.context() as patch:
            patch.setattr(typer, "echo", echo)
            done = CliRunner().invoke(commands.app, ["dlq", *arguments, "--servers", server.url])
        assert done.exit_code == 0, done.exception
        return printed

    assert await asyncio.to_thread(shell, "ls", "notes_app:app") > DEAD_LETTERS  # with this all modules are loaded
    tracemalloc.start()
    try:
        printed = await asyncio.to_thread(shell, "export", "notes_app:app")
        progress = await run_redrive(js, app, DeadLetterFilter())
        discarded = await discard_dead_letters(js, app, DeadLetterFilter())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert printed > DEAD_LETTERS * LETTER_BYTES
    assert progress.requested == discarded.discarded == DEAD_LETTERS
    assert peak < DEAD_LETTERS * LETTER_BYTES * 0.6
    assert await read_dead_letters(js, app, DeadLetterFilter()) == []


async def _nothing(event: Noted) -> None: ...


NOTES = """
from jetspark.app import App, Event

class Noted(Event, type="noted", subject="notes.noted"):
    number: int

app = App("notes", stream="NOTES", subjects=["notes.>"])

@app.handler(Noted, durable="n")
async def note(event: Noted) -> None: ...
"""
