"""Atomic batches: what both drivers promise, on a real server. The first half follows the design, clause by clause."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.drivers import Driver, Recorder, entered, inside, on_both_drivers, until
from support.lossy import LossyProxy
from support.servers import server_with_batch_limits

import jetspark
from jetspark import Expect, StreamConfig
from jetspark.server import NatsCluster, NatsServer

MAX_INFLIGHT = 5
LIMITS = f'max_inflight_per_stream: {MAX_INFLIGHT}, max_msgs: 20, timeout: "%s"'


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One that allows few and small batches, and not for long."""
    with server_with_batch_limits(tmp_path_factory.mktemp("limited"), LIMITS % "1s") as server:
        yield server


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One that allows few batches, for longer than any test takes: a place is free only when its batch is over."""
    with server_with_batch_limits(tmp_path_factory.mktemp("patient"), LIMITS % "5m") as server:
        yield server


_names = (f"S{number}" for number in range(1 << 30))


@asynccontextmanager
async def _stream(
    driver: Driver, server: NatsServer, *, timeout: float = 5, **config: Any
) -> AsyncIterator[tuple[jetspark.JetStream, jetspark.Stream, str]]:
    """A stream, a context, and the prefix of its subjects."""
    name = next(_names)
    usual: dict[str, Any] = {"allow_atomic": True, "storage": "memory", "allow_direct": True}
    async with driver.connect(server.url) as nc:
        js = nc.jetstream(timeout=timeout)
        yield js, await js.create_stream(StreamConfig(name=name, subjects=[f"{name}.>"], **(usual | config))), name


async def _stored(stream: Any) -> list[jetspark.StoredMessage]:
    return [message async for message in stream.get_messages()]


async def _count(stream: Any) -> int:
    return int((await stream.info()).state.messages)


# ---- the client's side of the design ---------------------------------------------------------------------------------


@on_both_drivers
async def test_a_batch_is_stored_as_a_whole_in_order_and_directly_after_one_another(
    driver: Driver, server: NatsServer
) -> None:
    async with _stream(driver, server) as (js, stream, name):
        await js.publish(f"{name}.before", b"")
        async with js.atomic_batch() as batch:
            for number in range(5):
                await batch.add(f"{name}.{number % 2}", b"%d" % number)
            assert (batch.outcome, batch.sequence, await _count(stream)) == ("open", 5, 1)
        assert (batch.outcome, batch.ack.stream, batch.ack.sequence) == ("stored", name, 6)
        assert (batch.ack.batch, batch.ack.batch_size) == (batch.id, 5)
        messages = (await _stored(stream))[1:]
        assert [message.data for message in messages] == [b"0", b"1", b"2", b"3", b"4"]
        assert [message.headers["Nats-Batch-Sequence"] for message in messages] == ["1", "2", "3", "4", "5"]
        assert {message.headers["Nats-Batch-Id"] for message in messages} == {batch.id}


@on_both_drivers
async def test_the_first_message_is_a_request_that_is_answered_with_zero_bytes_or_an_error(
    driver: Driver, server: NatsServer
) -> None:
    async with _stream(driver, server, allow_atomic=False) as (js, stream, name):
        batch = await entered(js.atomic_batch())
        with pytest.raises(jetspark.AtomicPublishDisabled, match="allow_atomic=True"):
            await batch.add(f"{name}.a", b"")
        assert batch.outcome == "not stored"
        with pytest.raises(jetspark.UsageError, match="atomic publish is disabled"):
            await batch.add(f"{name}.a", b"")
        # Without waiting for it the error comes with the commit.
        batch = await entered(js.atomic_batch(ack_first=False))
        await batch.add(f"{name}.a", b"")
        with pytest.raises(jetspark.AtomicPublishDisabled):
            await batch.commit()
        assert await _count(stream) == 0


@on_both_drivers
async def test_a_missing_stream_is_not_taken_for_an_answer_of_zero_bytes(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        batch = await entered(nc.jetstream(timeout=2).atomic_batch())
        with pytest.raises(jetspark.JetStreamUnavailable):
            await batch.add("no.stream.here", b"")
        assert batch.outcome == "not stored"


@on_both_drivers
async def test_an_id_has_at_most_64_characters_and_is_made_up_by_default(driver: Driver, server: NatsServer) -> None:
    async with _stream(driver, server) as (js, _, name):
        longest = "aZ09_-" * 10 + "xyz_"
        async with js.atomic_batch(longest) as batch:
            await batch.add(f"{name}.a", b"")
        assert batch.ack.batch == batch.id == longest
        for bad in ("x" * 65, "a b", "ü", ""):
            with pytest.raises(jetspark.ConfigError, match="batch_id="):
                js.atomic_batch(bad)
        ids = {js.atomic_batch().id for _ in range(50)}
        assert len(ids) == 50
        assert all(len(each) == 32 for each in ids)


@on_both_drivers
async def test_following_messages_are_acknowledged_when_asked_for(driver: Driver, server: NatsServer) -> None:
    async with _stream(driver, server, max_message_bytes=300) as (js, stream, name):
        batch = await entered(js.atomic_batch(ack_first=False, ack_every=3))
        await batch.add(f"{name}.a", b"1")
        await batch.add(f"{name}.a", b"x" * 400)  # refused, and nobody asked
        with pytest.raises(jetspark.BatchIncomplete):
            await batch.add(f"{name}.a", b"3")
        assert batch.outcome == "not stored"
        async with js.atomic_batch(ack_every=2) as batch:
            await batch.add_many((f"{name}.a", b"%d" % number) for number in range(9))
        assert [message.data for message in await _stored(stream)] == [b"%d" % number for number in range(9)]


@on_both_drivers
async def test_a_final_message_with_the_commit_is_stored_too(driver: Driver, server: NatsServer) -> None:
    async with _stream(driver, server) as (js, stream, name):
        async with js.atomic_batch() as batch:
            await batch.add(f"{name}.a", b"1")
            ack = await batch.commit(f"{name}.b", b"2", headers={"X": "y"})
            assert ack is batch.ack
        assert (ack.sequence, ack.batch_size, batch.sequence) == (2, 2, 2)
        last = (await _stored(stream))[-1]
        assert (last.data, last.headers["X"], last.headers["Nats-Batch-Commit"]) == (b"2", "y", "1")
        single = await entered(js.atomic_batch())
        assert (await single.commit(f"{name}.c", b"alone")).batch_size == 1


@on_both_drivers
async def test_an_end_of_batch_is_not_stored_and_marks_the_last_message(driver: Driver, server: NatsServer) -> None:
    async with _stream(driver, server) as (js, stream, name):
        batch = await entered(js.atomic_batch())
        await batch.add(f"{name}.a", b"1")
        await batch.add(f"{name}.b", b"2")
        assert (await batch.commit()).batch_size == 2
        messages = await _stored(stream)
        assert [message.headers.get("Nats-Batch-Commit") for message in messages] == [None, "1"]
        with pytest.raises(jetspark.UsageError, match="its 2 messages are stored"):
            await batch.commit()


@on_both_drivers
async def test_a_block_in_which_nothing_was_added_stores_nothing(driver: Driver, server: NatsServer) -> None:
    async with _stream(driver, server) as (js, stream, _):
        async with js.atomic_batch() as batch:
            pass
        assert (batch.outcome, await _count(stream)) == ("not stored", 0)
        with pytest.raises(jetspark.UsageError, match="its outcome is 'not stored'"):
            batch.ack  # noqa: B018
        with pytest.raises(jetspark.UsageError, match="no messages"):
            await (await entered(js.atomic_batch())).commit()


@on_both_drivers
async def test_options_are_those_of_publishing(driver: Driver, server: NatsServer) -> None:
    async with _stream(driver, server, allow_message_ttl=True) as (js, stream, name):
        async with js.atomic_batch() as batch:
            await batch.add(f"{name}.a", b"1", msg_id="one", headers={"X": ["1", "2"]})
            await batch.add(f"{name}.b", b"2", ttl=60, expect=Expect(stream=name, last_subject_sequence=0))
        first, second = await _stored(stream)
        assert (first.headers["Nats-Msg-Id"], first.headers.get_all("X")) == ("one", ["1", "2"])
        assert second.headers["Nats-TTL"] == "60s"
        assert (await js.publish(f"{name}.a", b"again", msg_id="one")).duplicate


# ---- the server's side -----------------------------------------------------------------------------------------------


@on_both_drivers
async def test_a_gap_refuses_the_whole_batch(driver: Driver, server: NatsServer) -> None:
    async with _stream(driver, server) as (js, stream, name):
        batch = await entered(js.atomic_batch())
        await batch.add(f"{name}.a", b"1")
        batch._machine.sequence += 1  # as if a message had been lost on the way
        await batch.add(f"{name}.a", b"3")
        with pytest.raises(jetspark.BatchIncomplete) as refused:
            await batch.commit()
        assert refused.value.err_code == 10176
        assert (batch.outcome, await _count(stream)) == ("not stored", 0)


@on_both_drivers
async def test_every_message_is_checked_for_the_level_it_requires(driver: Driver, server: NatsServer) -> None:
    async with _stream(driver, server) as (js, stream, name):
        reading = asyncio.ensure_future(anext(js.batch_advisories(name)))
        batch = await entered(js.atomic_batch(ack_every=2))
        await batch.add(f"{name}.a", b"1", headers={"Nats-Required-Api-Level": "2"})
        with pytest.raises(jetspark.ServerError) as refused:
            await batch.add(f"{name}.a", b"2", headers={"Nats-Required-Api-Level": "99"})
        assert (refused.value.err_code, batch.outcome) == (10185, "not stored")
        async with asyncio.timeout(60):
            advisory = await reading
        assert (advisory.batch, advisory.reason) == (batch.id, "unsupported")
        assert await _count(stream) == 0


@on_both_drivers
async def test_a_batch_the_server_does_not_know_is_refused(driver: Driver, server: NatsServer) -> None:
    async with _stream(driver, server) as (js, stream, name):
        batch = await entered(js.atomic_batch(ack_first=False))
        batch._machine.sequence = 1  # as if the first had been sent
        with pytest.raises(jetspark.BatchIncomplete):
            await batch.commit(f"{name}.a", b"2")
        assert await _count(stream) == 0


@on_both_drivers
async def test_expectations_are_checked_at_the_commit_against_the_stream_before_the_batch(
    driver: Driver, server: NatsServer
) -> None:
    async with _stream(driver, server) as (js, stream, name):
        seen = (await js.publish(f"{name}.a", b"0")).sequence
        async with js.atomic_batch() as batch:
            await batch.add(f"{name}.a", b"1", expect=Expect(last_sequence=seen))
            await batch.add(f"{name}.b", b"2", expect=Expect(last_subject_sequence=0))
            await batch.add(f"{name}.b", b"3")
        for expect in (
            Expect(last_sequence=seen),
            Expect(last_subject_sequence=seen),
            Expect(last_subject_sequence=0, last_subject_sequence_subject=f"{name}.*"),
        ):
            batch = await entered(js.atomic_batch())
            await batch.add(f"{name}.a", b"never", expect=expect)
            await batch.add(f"{name}.c", b"never")
            with pytest.raises(jetspark.WrongLastSequence):
                await batch.commit()
            assert batch.outcome == "not stored"
        assert await _count(stream) == 4


@on_both_drivers
async def test_what_cannot_be_checked_is_refused_before_it_is_sent_and_the_batch_goes_on(
    driver: Driver, server: NatsServer
) -> None:
    async with _stream(driver, server) as (js, _, name):
        async with js.atomic_batch() as batch:
            await batch.add(f"{name}.a", b"1", msg_id="m")
            for bad, complaint in (
                ({"expect": Expect(last_sequence=0)}, "on the first only"),
                ({"expect": Expect(last_subject_sequence=0)}, "has written"),
                ({"msg_id": "m"}, "another message of this batch has it"),
                ({"headers": {"Nats-Batch-Commit": "1"}}, "the batch sets it"),
                ({"headers": {"Nats-Expected-Last-Msg-Id": "m"}}, "Nats-Expected-Last-Msg-Id"),
            ):
                with pytest.raises(jetspark.ConfigError, match=complaint):
                    await batch.add(f"{name}.a", b"", **bad)
            with pytest.raises(jetspark.PayloadTooLarge):
                await batch.add(f"{name}.a", b"x" * (2 << 20))
            with pytest.raises(jetspark.InvalidSubject):
                await batch.add(f"{name}..a")
            await batch.add(f"{name}.a", b"2")
        assert batch.ack.batch_size == 2


@on_both_drivers
async def test_a_message_too_large_for_the_stream_ends_the_batch_and_frees_its_place(
    driver: Driver, patient: NatsServer
) -> None:
    async with _stream(driver, patient, max_message_bytes=300) as (js, stream, name):
        for _ in range(MAX_INFLIGHT + 2):
            batch = await entered(js.atomic_batch(ack_every=1, timeout=20))
            await batch.add(f"{name}.a", b"1")
            with pytest.raises(jetspark.ServerError) as refused:
                await batch.add(f"{name}.a", b"x" * 400)
            assert (refused.value.err_code, batch.outcome) == (10054, "not stored")
        assert await _count(stream) == 0


@on_both_drivers
async def test_a_batch_with_a_message_that_is_stored_already_is_refused(driver: Driver, server: NatsServer) -> None:
    async with _stream(driver, server) as (js, stream, name):
        await js.publish(f"{name}.a", b"1", msg_id="known")
        batch = await entered(js.atomic_batch())
        await batch.add(f"{name}.a", b"2", msg_id="new")
        await batch.add(f"{name}.a", b"1", msg_id="known")
        with pytest.raises(jetspark.DuplicateMessageId):
            await batch.commit()
        async with js.atomic_batch() as batch:
            await batch.add(f"{name}.a", b"2", msg_id="new")
        assert await _count(stream) == 2


@on_both_drivers
async def test_a_batch_idle_for_too_long_is_abandoned_with_an_advisory(driver: Driver, limited: NatsServer) -> None:
    async with _stream(driver, limited) as (js, stream, name):
        advisories = js.batch_advisories(name)
        batch = await entered(js.atomic_batch())
        reading = asyncio.ensure_future(anext(advisories))
        await batch.add(f"{name}.a", b"1")
        async with asyncio.timeout(60):
            advisory = await reading
        assert (advisory.stream, advisory.batch, advisory.reason) == (name, batch.id, "timeout")
        assert advisory.id
        assert advisory.time.tzinfo is not None
        with pytest.raises(jetspark.BatchIncomplete):
            await batch.commit()
        assert (batch.outcome, await _count(stream)) == ("not stored", 0)


@on_both_drivers
async def test_a_batch_may_have_as_many_messages_as_the_server_is_configured_for(
    driver: Driver, limited: NatsServer
) -> None:
    async with _stream(driver, limited) as (js, stream, name):
        advisories = js.batch_advisories()
        reading = asyncio.ensure_future(anext(advisories))
        async with js.atomic_batch() as batch:
            await batch.add_many((f"{name}.a", b"") for _ in range(20))
        assert batch.ack.batch_size == 20
        for ack_every in (None, 1):
            with pytest.raises(jetspark.BatchTooLarge) as large:  # noqa: PT012 - the block is the batch
                async with js.atomic_batch(ack_every=ack_every) as batch:
                    for _ in range(22):
                        await batch.add(f"{name}.a", b"")
            assert (large.value.limit, batch.outcome) == (20, "not stored")
        assert await _count(stream) == 20
        async with asyncio.timeout(60):
            assert (await reading).reason == "large"


@on_both_drivers
async def test_only_so_many_batches_are_open_at_a_time_and_a_new_one_waits_for_its_turn(
    driver: Driver, patient: NatsServer
) -> None:
    async with _stream(driver, patient) as (js, stream, name):
        open_ones = [await entered(js.atomic_batch()) for _ in range(MAX_INFLIGHT)]
        for batch in open_ones:
            await batch.add(f"{name}.a", b"")
        for is_commit in (False, True):
            batch = await entered(js.atomic_batch(timeout=0.1))
            with pytest.raises(jetspark.TooManyBatches) as refused:
                await (batch.commit if is_commit else batch.add)(f"{name}.b", b"")
            assert (refused.value.code, batch.outcome) == (429, "not stored")
        waiting = asyncio.ensure_future((await entered(js.atomic_batch(timeout=60))).commit(f"{name}.b", b""))
        await asyncio.sleep(0.05)
        await open_ones[0].discard()
        assert (await waiting).batch_size == 1
        for batch in open_ones[1:]:
            await batch.commit()
        assert await _count(stream) == MAX_INFLIGHT


@on_both_drivers
async def test_an_asynchronously_persisted_stream_takes_no_batches(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        js = nc.jetstream()
        name = next(_names)
        config: dict[str, Any] = {"name": name, "subjects": [f"{name}.>"], "storage": "file", "persist_mode": "async"}
        with pytest.raises(jetspark.ServerError, match="async persist mode is not supported with atomic"):
            await js.create_stream(StreamConfig(**config, allow_atomic=True))
        await js.create_stream(StreamConfig(**config))
        with pytest.raises(jetspark.AtomicPublishDisabled):
            await (await entered(js.atomic_batch())).add(f"{name}.a", b"")


@on_both_drivers
async def test_batches_beside_one_another_and_beside_single_messages_stay_in_one_piece(
    driver: Driver, server: NatsServer
) -> None:
    async with _stream(driver, server) as (js, stream, name):

        async def batches(writer: int) -> None:
            for _ in range(8):
                async with js.atomic_batch() as batch:
                    await batch.add_many((f"{name}.{writer}", b"%d" % number) for number in range(10))

        async def singles() -> None:
            for _ in range(60):
                await js.publish(f"{name}.single", b"")

        await asyncio.gather(*(batches(writer) for writer in range(4)), singles())
        messages = await _stored(stream)
        assert len(messages) == 4 * 8 * 10 + 60
        position = 0
        while position < len(messages):
            batch_id = messages[position].headers.get("Nats-Batch-Id")
            piece = messages[position : position + (10 if batch_id else 1)]
            assert {each.headers.get("Nats-Batch-Id") for each in piece} == {batch_id}
            position += len(piece)


# ---- leaving ---------------------------------------------------------------------------------------------------------


@on_both_drivers
async def test_leaving_by_an_exception_stores_nothing_and_frees_the_place_at_once(
    driver: Driver, limited: NatsServer, patient: NatsServer
) -> None:
    async def leave_one(js: jetspark.JetStream, name: str) -> None:
        with pytest.raises(ZeroDivisionError):  # noqa: PT012 - the block is the batch
            async with js.atomic_batch(timeout=20) as batch:
                await batch.add(f"{name}.a", b"")
                await batch.add(f"{name}.b", b"")
                raise ZeroDivisionError
        assert batch.outcome == "not stored"
        with pytest.raises(jetspark.UsageError, match="left by an exception"):
            await batch.add(f"{name}.a", b"")

    async with _stream(driver, patient) as (js, stream, name):
        for _ in range(2 * MAX_INFLIGHT):
            await leave_one(js, name)
        assert await _count(stream) == 0
    async with _stream(driver, limited) as (js, stream, name):
        reading = asyncio.ensure_future(anext(js.batch_advisories(name)))
        await leave_one(js, name)
        await asyncio.sleep(1.3)  # longer than the server would have kept them
        assert not reading.done()
        assert await _count(stream) == 0
        reading.cancel()
        await asyncio.wait([reading], timeout=0.1 if driver.name == "blocking" else 5)


@pytest.mark.parametrize("driver", ["asyncio", "uvloop"], indirect=True)
@on_both_drivers
async def test_a_cancelled_block_stores_nothing(driver: Driver, server: NatsServer) -> None:
    async with _stream(driver, server) as (js, stream, name):
        is_added = asyncio.Event()
        batch = js.atomic_batch()

        async def block() -> None:
            async with batch:
                await batch.add(f"{name}.a", b"")
                is_added.set()
                await asyncio.sleep(60)

        task = asyncio.ensure_future(block())
        await is_added.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (batch.outcome, await _count(stream)) == ("not stored", 0)


@pytest.mark.parametrize("driver", ["asyncio", "uvloop"], indirect=True)
@on_both_drivers
async def test_a_cancelled_commit_is_in_doubt_until_it_is_resolved(driver: Driver, server: NatsServer) -> None:
    async with _stream(driver, server) as (js, stream, name):
        for _ in range(20):
            batch = await entered(js.atomic_batch())
            await batch.add(f"{name}.a", b"")
            committing = asyncio.ensure_future(batch.commit())
            await asyncio.sleep(0)
            committing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await committing
            is_known, before = batch.outcome != "unknown", await _count(stream)
            outcome = await batch.resolve()
            assert not is_known
            assert outcome == batch.outcome != "unknown"
            stored = [each for each in await _stored(stream) if each.headers.get("Nats-Batch-Id") == batch.id]
            assert len(stored) == (outcome == "stored")
            assert before <= await _count(stream)


# ---- what happens to servers and streams in the middle of a batch ----------------------------------------------------


@on_both_drivers
async def test_a_stream_deleted_in_the_middle_takes_the_batch_with_it(driver: Driver, server: NatsServer) -> None:
    async with _stream(driver, server) as (js, stream, name):
        batch = await entered(js.atomic_batch())
        await batch.add(f"{name}.a", b"")
        await stream.delete()
        with pytest.raises(jetspark.JetStreamUnavailable):
            await batch.commit()
        assert batch.outcome == "not stored"


@on_both_drivers
async def test_switching_batches_off_in_the_middle_drops_the_batch(driver: Driver, server: NatsServer) -> None:
    async with _stream(driver, server) as (js, stream, name):
        first, second = await entered(js.atomic_batch()), await entered(js.atomic_batch())
        for batch in (first, second):
            await batch.add(f"{name}.a", b"")
        await stream.update(allow_atomic=False)
        with pytest.raises(jetspark.AtomicPublishDisabled):
            await first.commit()
        await stream.update(allow_atomic=True)
        with pytest.raises(jetspark.BatchIncomplete):
            await second.commit()
        assert (first.outcome, second.outcome, await _count(stream)) == ("not stored", "not stored", 0)


@on_both_drivers
async def test_a_killed_server_forgets_the_batch(driver: Driver, own: NatsServer) -> None:
    async with _stream(driver, own, storage="file") as (js, stream, name):
        batch = await entered(js.atomic_batch(timeout=20))
        await batch.add(f"{name}.a", b"")
        await asyncio.to_thread(own.kill)
        await asyncio.to_thread(own.start)
        await batch.add(f"{name}.b", b"")
        with pytest.raises(jetspark.BatchIncomplete):
            await batch.commit()
        assert (batch.outcome, await _count(stream)) == ("not stored", 0)


@on_both_drivers
async def test_a_batch_does_not_mind_a_connection_cut_between_its_messages(driver: Driver, server: NatsServer) -> None:
    async with (
        _stream(driver, server) as (_, stream, name),
        LossyProxy(server.port) as proxy,
        driver.connect(proxy.url, reconnect_wait_s=0.01, on_event=(events := Recorder())) as nc,
    ):
        js = nc.jetstream(timeout=5)
        async with js.atomic_batch() as batch:
            await batch.add(f"{name}.a", b"1")
            proxy.cut()
            await events.wait_for(jetspark.Reconnected)
            await batch.add(f"{name}.a", b"2")
        assert (batch.ack.batch_size, await _count(stream)) == (2, 2)


@on_both_drivers
async def test_a_message_lost_with_the_connection_refuses_the_batch(driver: Driver, server: NatsServer) -> None:
    async with (
        _stream(driver, server) as (_, stream, name),
        LossyProxy(server.port) as proxy,
        driver.connect(proxy.url, reconnect_wait_s=0.01, on_event=(events := Recorder())) as nc,
    ):
        batch = await entered(nc.jetstream(timeout=5).atomic_batch())
        await batch.add(f"{name}.a", b"1")
        proxy.lose_from(b"gone", "to_server")
        await batch.add(f"{name}.a", b"gone")
        await asyncio.sleep(0.1)
        proxy.cut()
        await events.wait_for(jetspark.Reconnected)
        await batch.add(f"{name}.a", b"3")
        with pytest.raises(jetspark.BatchIncomplete):
            await batch.commit()
        assert (batch.outcome, await _count(stream)) == ("not stored", 0)


# ---- doubt -----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _doubtful(driver: Driver, server: NatsServer, **config: Any) -> AsyncIterator[Any]:
    """A stream, and a way to make a batch on it whose commit is lost, or its answer."""
    async with (
        _stream(driver, server, **config) as (steady, stream, name),
        LossyProxy(server.port) as proxy,
        driver.connect(proxy.url, reconnect_wait_s=0.01, on_event=(events := Recorder())) as nc,
    ):
        js = nc.jetstream(timeout=1)

        async def doubt(lost: Any, *keys: str, single: bool = False, **options: Any) -> Any:
            batch = await entered(js.atomic_batch(**options))
            with pytest.raises(jetspark.BatchInDoubt) as doubt:  # noqa: PT012
                for key in keys[: len(keys) - single]:
                    await batch.add(f"{name}.{key}", b"ours")
                proxy.lose_from(b"Nats-Batch-Commit", lost)
                if single:
                    await batch.commit(f"{name}.{keys[-1]}", b"ours")
                else:
                    await batch.commit()
            assert (doubt.value.batch_id, batch.outcome) == (batch.id, "unknown")
            with pytest.raises(jetspark.UsageError, match="resolve"):
                await batch.commit()
            proxy.cut()
            await events.wait_for(jetspark.Reconnected, len(events.of(jetspark.Reconnected)) + 1)
            return batch

        yield steady, stream, name, doubt


@on_both_drivers
async def test_a_commit_whose_answer_is_lost_is_found(driver: Driver, server: NatsServer) -> None:
    async with _doubtful(driver, server) as (js, stream, name, doubt):
        batch = await doubt("to_client", "a", "b", "a")
        assert await batch.resolve() == batch.outcome == "stored"
        assert (batch.ack.stream, batch.ack.sequence, batch.ack.batch_size) == (name, 3, 3)
        assert await batch.resolve() == "stored"
        # A batch of one, behind messages of others.
        batch = await doubt("to_client", "a", single=True)
        for _ in range(3):
            await js.publish(f"{name}.a", b"theirs")
        assert await batch.resolve() == "stored"
        assert batch.ack.sequence == 4
        assert await _count(stream) == 7


@on_both_drivers
async def test_a_lost_commit_is_known_to_be_lost_for_good(driver: Driver, server: NatsServer) -> None:
    async with _doubtful(driver, server) as (js, stream, name, doubt):
        batch = await doubt("to_server", "a", "b")
        assert await batch.resolve() == batch.outcome == "not stored"
        with pytest.raises(jetspark.UsageError, match="had no effect"):
            await batch.add(f"{name}.a", b"")
        # The same commit, late: what it belonged to is gone.
        late = await entered(js.atomic_batch(batch.id, ack_first=False))
        late._machine.sequence = 1
        with pytest.raises(jetspark.BatchIncomplete):
            await late.commit(f"{name}.b", b"late")
        # Others write meanwhile.
        batch = await doubt("to_server", "a", "b")
        for key in ("a", "b"):
            await js.publish(f"{name}.{key}", b"theirs")
        assert await batch.resolve() == "not stored"
        assert [message.data for message in await _stored(stream)] == [b"theirs"] * 2


@on_both_drivers
async def test_what_is_overwritten_cannot_be_known_any_more(driver: Driver, server: NatsServer) -> None:
    async with _doubtful(driver, server, max_messages_per_subject=1) as (js, _, name, doubt):
        batch = await doubt("to_client", "a", "b")
        await js.publish(f"{name}.b", b"theirs")
        assert await batch.resolve() == "stored"  # a is left
        assert batch.ack.sequence == 2
        batch = await doubt("to_client", "a", "b")
        for key in ("a", "b"):
            await js.publish(f"{name}.{key}", b"theirs")
        with pytest.raises(jetspark.BatchInDoubt, match="no longer has all"):
            await batch.resolve()
        assert batch.outcome == "unknown"


@on_both_drivers
async def test_a_batch_whose_first_message_was_not_acknowledged_may_stay_in_doubt(
    driver: Driver, server: NatsServer
) -> None:
    async with _doubtful(driver, server) as (_, _, _, doubt):
        batch = await doubt("to_server", "a", single=True)
        with pytest.raises(jetspark.BatchInDoubt, match="still be on its way"):
            await batch.resolve()
        batch = await doubt("to_client", "a", "b", ack_first=False)
        assert await batch.resolve() == "stored"


@on_both_drivers
async def test_a_renamed_subject_hides_no_batch(driver: Driver, server: NatsServer) -> None:
    name = next(_names)
    transform = jetspark.SubjectTransform(source=f"{name}.>", destination="stored.>")
    async with driver.connect(server.url) as nc:
        js = nc.jetstream(timeout=2)
        stream = await js.create_stream(
            StreamConfig(name=name, subjects=[f"{name}.>"], allow_atomic=True, subject_transform=transform)
        )
        for is_committed in (True, False):
            batch = await entered(js.atomic_batch())
            await batch.add(f"{name}.a", b"1")
            if is_committed:
                await batch.commit()
            batch._machine.outcome, batch._machine.ack = "unknown", None  # as if its answer had been lost
            await js.publish(f"{name}.a", b"theirs")
            assert await batch.resolve() == ("stored" if is_committed else "not stored")
        await stream.delete()


@on_both_drivers
async def test_the_end_of_the_connection_leaves_a_commit_in_doubt(driver: Driver, server: NatsServer) -> None:
    async with _stream(driver, server) as (_, stream, name), LossyProxy(server.port) as proxy:
        nc = await driver.connect(proxy.url)
        batch = await entered(nc.jetstream(timeout=10).atomic_batch())
        await batch.add(f"{name}.a", b"1")
        proxy.lose_from(b"Nats-Batch-Commit", "to_client")
        committing = asyncio.ensure_future(batch.commit())
        async with asyncio.timeout(60):
            while not await _count(stream):  # noqa: ASYNC110 - the server gives no signal
                await asyncio.sleep(0.01)
        closing = asyncio.ensure_future(nc.close(timeout=0.2))
        with pytest.raises(jetspark.BatchInDoubt):
            await committing
        with pytest.raises(jetspark.JetSparkError):
            await closing
        assert batch.outcome == "unknown"
        with pytest.raises(jetspark.BatchInDoubt):
            await batch.resolve()


# ---- beside others ---------------------------------------------------------------------------------------------------


@on_both_drivers
async def test_advisories_end_with_the_connection(driver: Driver, server: NatsServer) -> None:
    nc = await driver.connect(server.url)
    js = nc.jetstream()
    with pytest.raises(jetspark.ConfigError):
        js.batch_advisories("a.b")
    advisories = js.batch_advisories()
    reading = asyncio.ensure_future(anext(advisories, None))
    await nc.flush()
    await nc.close()
    async with asyncio.timeout(60):
        assert await reading is None


@on_both_drivers
@pytest.mark.parametrize("way", ["closed", "dropped"])
async def test_advisories_nobody_read_end_their_subscription(way: str, driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        js = nc.jetstream()
        machine = nc._machine
        before = len(machine.subscriptions.all)
        advisories = inside(js).batch_advisories()
        assert len(machine.subscriptions.all) == before + 1
        if way == "dropped":
            del advisories
            gc.collect()
        elif driver.name == "blocking":
            advisories.close()
        else:
            await advisories.aclose()
        await until(lambda: len(machine.subscriptions.all) == before)  # what is dropped, the loop closes soon


@on_both_drivers
async def test_another_client_reads_what_a_batch_stored(driver: Driver, server: NatsServer) -> None:
    import nats

    async with _stream(driver, server) as (js, _, name):
        async with js.atomic_batch() as batch:
            await batch.add(f"{name}.a", b"1", headers={"X": "y"})
            await batch.add(f"{name}.b", b"2")
        theirs = await nats.connect(server.url)
        try:
            subscription = await theirs.jetstream().pull_subscribe(f"{name}.>", stream=name)
            messages = await subscription.fetch(2, timeout=30)
            assert [message.data for message in messages] == [b"1", b"2"]
            headers = [message.headers or {} for message in messages]
            assert headers[0]["X"] == "y"
            assert [each["Nats-Batch-Sequence"] for each in headers] == ["1", "2"]
            assert messages[1].metadata.sequence.stream == batch.ack.sequence
        finally:
            await theirs.close()


# ---- three nodes -----------------------------------------------------------------------------------------------------


async def _leader(stream: Any) -> str:
    async with asyncio.timeout(60):
        while True:
            try:
                info = await stream.info()
                if info.cluster is not None and info.cluster.leader:
                    return str(info.cluster.leader)
            except (jetspark.RequestTimeout, jetspark.JetStreamUnavailable, jetspark.ServerError):
                pass
            await asyncio.sleep(0.1)


async def _until_resolved(batch: Any) -> str:
    async with asyncio.timeout(60):
        while True:
            try:
                return str(await batch.resolve())
            except jetspark.BatchInDoubt:
                await asyncio.sleep(0.2)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("driver", ["asyncio", "blocking"], indirect=True)
@on_both_drivers
async def test_every_batch_is_whole_or_absent_and_known_to_be_when_leaders_go(driver: Driver) -> None:
    dice = random.Random(7)
    with NatsCluster(3) as cluster:
        async with driver.connect(cluster.urls, reconnect_wait_s=0.05) as nc, driver.connect(cluster.urls) as other:
            js, admin = nc.jetstream(timeout=1.5), other.jetstream(timeout=3)
            stream = await admin.create_stream(
                StreamConfig(name="R3", subjects=["r3.>"], replicas=3, allow_atomic=True, allow_direct=True)
            )
            outcomes: dict[str, tuple[str, int]] = {}
            doubts = 0
            is_over = asyncio.Event()

            async def write(writer: int) -> None:
                nonlocal doubts
                while not is_over.is_set():
                    size = dice.randrange(1, 12)
                    batch = js.atomic_batch()
                    try:
                        async with batch:
                            await batch.add_many((f"r3.{writer}.{number % 3}", b"") for number in range(size))
                    except jetspark.BatchInDoubt:
                        doubts += 1
                        await _until_resolved(batch)
                    except jetspark.JetSparkError:
                        await asyncio.sleep(0.02)
                    assert batch.outcome in ("stored", "not stored")
                    is_stored = batch.outcome == "stored"
                    outcomes[batch.id] = (batch.outcome, batch.ack.sequence if is_stored else 0)
                    assert not is_stored or batch.ack.batch_size == size

            writing = [asyncio.ensure_future(write(writer)) for writer in range(4)]
            for _ in range(6):
                await asyncio.sleep(0.5)
                await _leader(stream)
                await stream.step_down()
            for _ in range(2):
                await asyncio.sleep(0.5)
                leader = await _leader(stream)
                [node] = [node for node in cluster.nodes if node.config.server_name == leader]
                await asyncio.to_thread(node.kill)
                await asyncio.sleep(1.5)
                await asyncio.to_thread(node.start)
                await asyncio.to_thread(cluster.wait_until_ready)
            # A busy machine takes longer to store as many.
            await until(lambda: sum(outcome == "stored" for outcome, _ in outcomes.values()) > 100, timeout=60)
            is_over.set()
            await asyncio.gather(*writing)
            await _leader(stream)
            last = (await stream.info()).state.last_sequence
            messages: list[jetspark.StoredMessage] = []
            async with asyncio.timeout(30):
                while len(messages) < last:  # any replica may answer, and one may be a moment behind
                    messages = await _stored(stream)
            pieces: dict[str, list[jetspark.StoredMessage]] = {}
            for message in messages:
                pieces.setdefault(message.headers["Nats-Batch-Id"], []).append(message)
            for batch_id, piece in pieces.items():
                first = piece[0].sequence
                assert [each.sequence for each in piece] == list(range(first, first + len(piece)))
                assert [int(each.headers["Nats-Batch-Sequence"]) for each in piece] == list(range(1, len(piece) + 1))
                assert piece[-1].headers["Nats-Batch-Commit"] == "1"
                assert outcomes[batch_id] == ("stored", piece[-1].sequence)
            assert {each for each, (outcome, _) in outcomes.items() if outcome == "stored"} == set(pieces)
            assert len(pieces) > 100
            print(f"{len(pieces)} batches stored, {len(outcomes) - len(pieces)} not, {doubts} had been in doubt")
