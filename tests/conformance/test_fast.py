"""Fast ingest against the real server: each rule of the design's client side, and everything that can go wrong.

Where the released server and the design document differ, the server is right; docs/batches.md lists the differences.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from support.drivers import Driver, Recorder, entered, on_both_drivers, until
from support.lossy import LossyProxy
from support.peers import Proxy
from support.servers import server_with_batch_limits

import jetspark
from jetspark import (
    BatchCutShort,
    BatchInDoubt,
    BatchPublishDisabled,
    BatchUnknown,
    ConfigError,
    Expect,
    ServerError,
    StreamConfig,
    UsageError,
    WrongLastSequence,
)
from jetspark.publish.fast_options import GapMode
from jetspark.server import NatsServer

_names = iter(f"FAST{number}" for number in range(1_000_000))


@pytest.fixture(scope="module")
def js_server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture
def url(js_server: NatsServer) -> str:
    return js_server.url


@pytest.fixture(scope="module")
def impatient_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Forgets a batch after one idle second, and allows one at a time."""
    limits = "max_inflight_per_stream: 1, timeout: 1s"
    with server_with_batch_limits(tmp_path_factory.mktemp("impatient"), limits) as server:
        yield server


async def new_stream(js: jetspark.JetStream, **config: Any) -> jetspark.Stream:
    name = next(_names)
    usual: dict[str, Any] = {"name": name, "subjects": [f"{name}.>"], "allow_batched": True, "allow_direct": True}
    return await js.create_stream(StreamConfig(**(usual | config)))


@contextlib.asynccontextmanager
async def losing(driver: Driver, server: NatsServer) -> AsyncIterator[Any]:
    """A client whose messages to ``*.lost`` do not reach the server."""
    async with LossyProxy(server.port) as proxy:
        proxy.lose_each(b".lost ")
        async with driver.connect(proxy.url) as nc:
            yield nc


async def now(value: Any) -> Any:
    """What one driver returns and the other, here, has to be asked for."""
    return await value if asyncio.iscoroutine(value) else value


async def add_and_commit(fast: Any, messages: list[tuple[Any, ...]]) -> None:
    await fast.add_many(messages)
    await fast.commit()


async def stored(stream: Any) -> list[bytes]:
    return [message.data async for message in stream.get_messages()]


# ---- a full buffer ---------------------------------------------------------------------------------------------


class Polled:
    """Waits that end by themselves."""

    def __init__(self, waits: Any) -> None:
        self._waits = waits

    def wait(self, timeout_s: float | None = None) -> Any:
        return self._waits.wait(0.01 if timeout_s is None else min(timeout_s, 0.01))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._waits, name)


class FullBuffer:
    """A connection whose buffer has no room for the first messages, for some seconds."""

    def __init__(self, nc: jetspark.Client, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
        client = getattr(nc, "_target", nc)
        self._loop, self.is_full_until, self._seconds = asyncio.get_running_loop(), 0.0, seconds
        for name in ("publish_frame", "publish_frames"):
            monkeypatch.setattr(client._machine, name, self._limited(getattr(client._machine, name)))
        # Nobody is told that there is room in what only seems to be full.
        monkeypatch.setattr(client._transport, "room", Polled(client._transport.room))

    def fill(self) -> None:
        self.is_full_until = self._loop.time() + self._seconds

    def _limited(self, publish: Any) -> Any:
        def attempt(frames: Any, *, is_urgent: bool = False) -> None:
            if not is_urgent and self._loop.time() < self.is_full_until:
                raise jetspark.BufferFull(1, 1)
            publish(frames, is_urgent=True) if is_urgent else publish(frames)

        return attempt


@dataclass
class Crowded:
    """A batch with one message, and no room for what is asked next."""

    stream: Any
    fast: Any
    buffer: FullBuffer
    asked: asyncio.Future[Any]

    @classmethod
    @contextlib.asynccontextmanager
    async def batch(
        cls, driver: Driver, url: str, asks: str, monkeypatch: pytest.MonkeyPatch, full_s: float, **options: Any
    ) -> AsyncIterator[Crowded]:
        async with driver.connect(url) as nc:
            js = nc.jetstream()
            stream = await new_stream(js)
            subject = f"{stream.name}.a"
            fast = await entered(js.fast_batch(**options))
            await fast.add(subject, b"1")
            buffer = FullBuffer(nc, monkeypatch, full_s)
            buffer.fill()
            asked: Coroutine[Any, Any, object]
            match asks:
                case "add":
                    asked = fast.add(subject, b"2")
                case "add_many":
                    asked = fast.add_many([(subject, b"2"), (subject, b"3"), (subject, b"4")], commit=True)
                case _:
                    asked = fast.commit(subject, b"2")
            yield cls(stream, fast, buffer, asyncio.ensure_future(asked))


ASKS = pytest.mark.parametrize("asks", ["add", "add_many", "commit"])


@on_both_drivers
async def test_what_only_has_to_be_written_to_make_room_is_not_waited_for(driver: Driver, url: str) -> None:
    async with driver.connect(url, send_buffer_bytes=64 << 10) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        # One that waited would wait for the next ping, which finds the room that nobody was told of.
        options: dict[str, Any] = {"flow": 5000, "timeout": 80, "keep_alive_s": 60, "ping_after_s": 60}
        async with asyncio.timeout(100), js.fast_batch(**options) as fast:
            for _ in range(20):
                await fast.add(f"{stream.name}.a", bytes(30_000))
        assert len(await stored(stream)) == 20


@ASKS
@on_both_drivers
async def test_a_batch_does_not_age_while_its_messages_wait_for_room(
    driver: Driver, url: str, asks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"flow": 2, "max_outstanding_acks": 1, "timeout": 20, "keep_alive_s": 60}
    async with Crowded.batch(driver, url, asks, monkeypatch, 0.3, **options) as crowded:
        fast = crowded.fast
        await crowded.asked
        # What is given up after `timeout` counts from here. All drivers' clocks are the same; uvloop's is rounded.
        assert getattr(fast, "_target", fast)._batch.sender.sent_at >= crowded.buffer.is_full_until - 0.05
        await fast.__aexit__(None, None, None)
        assert fast.ack.batch_size == len(await stored(crowded.stream)) >= 2


@ASKS
@on_both_drivers
async def test_a_batch_gives_up_when_there_is_no_room_for_as_long_as_its_timeout(
    driver: Driver, url: str, asks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Crowded.batch(driver, url, asks, monkeypatch, 60.0, timeout=0.3) as crowded:
        with pytest.raises(jetspark.BatchInDoubt, match="no room in the send buffer"):
            await asyncio.wait_for(crowded.asked, 30)


@ASKS
@on_both_drivers
async def test_a_batch_that_ends_while_messages_wait_for_room_says_so(
    driver: Driver, url: str, asks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Crowded.batch(driver, url, asks, monkeypatch, 5.0) as crowded:
        await asyncio.sleep(0.1)
        await crowded.fast.__aexit__(ZeroDivisionError, None, None)
        with pytest.raises(jetspark.UsageError, match="left"):
            await asyncio.wait_for(crowded.asked, 30)
        crowded.buffer.is_full_until = 0.0  # reading needs room, too, and has no more patience than that
        assert await stored(crowded.stream) == [b"1"]


# ---- the control channel ---------------------------------------------------------------------------------------


@on_both_drivers
async def test_the_client_uses_an_inbox_of_its_own_and_drops_it_with_the_batch(driver: Driver, own: NatsServer) -> None:
    async with driver.connect(own.url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)

        def inboxes() -> list[str]:
            _, body = own.monitor("/connz?subs=1")
            return [
                subject
                for entry in json.loads(body)["connections"]
                for subject in entry.get("subscriptions_list", [])
                if fast.id and fast.id in subject
            ]

        fast = js.fast_batch()
        async with fast:
            await fast.add(f"{stream.name}.a", b"1")
            [inbox] = inboxes()
            assert inbox.endswith(f".{fast.id}.>")
        await until(lambda: not inboxes())


@on_both_drivers
async def test_a_batch_waits_for_the_first_answer_which_tells_whether_the_stream_allows_it(
    driver: Driver, url: str
) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js, allow_batched=False)
        fast = await entered(js.fast_batch())
        with pytest.raises(BatchPublishDisabled, match="allow_batched=True"):
            await fast.add(f"{stream.name}.a", b"1")
        with pytest.raises(BatchPublishDisabled):
            await fast.add(f"{stream.name}.a", b"2")
        assert await stored(stream) == []


@on_both_drivers
async def test_messages_are_stored_in_order_and_receipts_only_grow(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        async with js.fast_batch(flow=10) as fast:
            receipts = [await fast.add(f"{stream.name}.a", b"%d" % number) for number in range(100)]
            assert fast.flow == 10
        assert [receipt.sequence for receipt in receipts] == list(range(1, 101))
        acknowledged = [receipt.acknowledged for receipt in receipts]
        assert acknowledged == sorted(acknowledged)
        # With two acknowledgements of ten messages outstanding, and ten messages that may come early.
        assert all(receipt.sequence - receipt.acknowledged <= 30 for receipt in receipts)
        assert (fast.ack.batch_size, fast.stored, fast.acknowledged) == (100, 100, 100)
        assert fast.ack.batch == fast.id
        assert await stored(stream) == [b"%d" % number for number in range(100)]


@on_both_drivers
async def test_a_commit_with_the_final_message_stores_it_without_a_trace_of_the_batch(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        fast = await entered(js.fast_batch())
        await fast.add(f"{stream.name}.a", b"1")
        ack = await fast.commit(f"{stream.name}.b", b"2", headers={"Color": "red"})
        assert (ack.batch_size, ack.sequence) == (2, 2)
        last = await stream.get_message(2)
        assert (last.data, last.subject, last.headers.get("Color")) == (b"2", f"{stream.name}.b", "red")
        assert not [name for name in last.headers if name.startswith("Nats-Batch")]
        with pytest.raises(UsageError, match="committed"):
            await fast.add(f"{stream.name}.a", b"3")


@on_both_drivers
async def test_a_single_message_may_be_the_whole_batch(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        for gap in ("fail", "ok"):
            fast = await entered(js.fast_batch(gap))
            ack = await fast.commit(f"{stream.name}.a", b"only")
            assert (ack.batch_size, fast.stored) == (1, 1)
        assert await stored(stream) == [b"only"] * 2


@on_both_drivers
async def test_an_end_of_batch_stores_nothing_itself_and_an_empty_batch_nothing_at_all(
    driver: Driver, url: str
) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        fast = await entered(js.fast_batch())
        await fast.add(f"{stream.name}.a", b"1")
        assert (await fast.commit()).batch_size == 1
        async with js.fast_batch() as empty:
            pass
        with pytest.raises(UsageError, match="no final acknowledgement"):
            empty.ack  # noqa: B018
        with pytest.raises(UsageError, match="nothing was added"):
            await (await entered(js.fast_batch())).commit()
        assert await stored(stream) == [b"1"]


@on_both_drivers
async def test_the_pace_follows_the_servers_down_and_up_again(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc, driver.connect(url) as other:
        js = nc.jetstream()
        stream = await new_stream(js)
        async with js.fast_batch() as fast:
            await fast.add_many([(f"{stream.name}.a", b"")] * 1000)
            assert fast.flow == 500
            async with other.jetstream().fast_batch() as second:
                await second.add(f"{stream.name}.b", b"")
                assert second.flow <= 2  # who comes later begins with 1
                await fast.add_many([(f"{stream.name}.a", b"")] * 3000)
                assert fast.flow == 250
                await second.add_many([(f"{stream.name}.b", b"")] * 2000)
                assert second.flow == 250
            await fast.add_many([(f"{stream.name}.a", b"")] * 5000)
            assert fast.flow == 500
        assert fast.stored == 9000
        assert second.stored == 2001


async def test_a_flow_shrunk_to_one_by_others_goes_on(url: str) -> None:
    async with jetspark.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        fast = await entered(js.fast_batch())
        await fast.add_many([(f"{stream.name}.a", b"x")] * 1000)
        others = [await entered(js.fast_batch()) for _ in range(300)]
        await asyncio.gather(*(other.add(f"{stream.name}.b", b"y") for other in others))
        async with asyncio.timeout(30):
            await fast.add_many([(f"{stream.name}.a", b"x")] * 3000)
        assert fast.flow == 1
        assert (await fast.commit()).batch_size == 4000
        await asyncio.gather(*(other.commit() for other in others))
        assert len(await stored(stream)) == 4300


@on_both_drivers
async def test_a_batch_is_kept_alive_while_its_producer_thinks(driver: Driver, impatient_server: NatsServer) -> None:
    async with driver.connect(impatient_server.url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        async with js.fast_batch(keep_alive_s=0.3) as fast:
            await fast.add(f"{stream.name}.a", b"1")
            await asyncio.sleep(2.5)
            await fast.add(f"{stream.name}.a", b"2")
        assert fast.ack.batch_size == 2


@on_both_drivers
async def test_a_batch_that_was_idle_for_too_long_ends_in_doubt_about_what_is_not_acknowledged(
    driver: Driver, impatient_server: NatsServer
) -> None:
    async with driver.connect(impatient_server.url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        fast = await entered(js.fast_batch(flow=2, keep_alive_s=60))
        for number in range(3):
            await fast.add(f"{stream.name}.a", b"%d" % number)
        await until(lambda: fast.acknowledged == 2)
        await asyncio.sleep(2)
        with pytest.raises(BatchInDoubt) as caught:
            await fast.commit()
        assert caught.value.stored == 2
        assert isinstance(caught.value.__cause__, BatchUnknown)
        assert await stored(stream) == [b"0", b"1", b"2"]  # the third was stored, but nobody could know


@on_both_drivers
async def test_too_many_batches_are_waited_for_within_the_timeout(driver: Driver, impatient_server: NatsServer) -> None:
    async with driver.connect(impatient_server.url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        first = await entered(js.fast_batch())
        await first.add(f"{stream.name}.a", b"1")
        with pytest.raises(ServerError) as caught:
            await (await entered(js.fast_batch(timeout=0.3))).add(f"{stream.name}.a", b"refused")
        assert caught.value.err_code == 10211
        waiting = asyncio.ensure_future((await entered(js.fast_batch())).commit(f"{stream.name}.a", b"2"))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await first.commit()
        assert (await waiting).batch_size == 1
        assert await stored(stream) == [b"1", b"2"]


@pytest.mark.parametrize("batch_id", ["", "a" * 65, "a.b", "ä"])
@on_both_drivers
async def test_an_id_the_server_could_not_use_is_refused_here(driver: Driver, url: str, batch_id: str) -> None:
    async with driver.connect(url) as nc:
        with pytest.raises(ConfigError, match="1 to 64"):
            nc.jetstream().fast_batch(batch_id=batch_id)


@on_both_drivers
async def test_an_id_may_be_given(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        async with js.fast_batch(batch_id="b" * 64) as fast:
            await fast.add(f"{stream.name}.a", b"1")
            await fast.add(f"{stream.name}.a", b"2")
        assert fast.ack.batch == fast.id == "b" * 64


@on_both_drivers
async def test_unknown_options_are_refused_with_the_known_ones(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        with pytest.raises(ConfigError, match="max_outstanding_acks"):
            js.fast_batch(max_outstanding=2)  # type: ignore[call-arg]
        with pytest.raises(ConfigError, match="expected 1 to 3"):
            js.fast_batch(max_outstanding_acks=4)
        with pytest.raises(ConfigError, match="message_ids"):
            js.fast_publisher(ids=True)  # type: ignore[call-arg]


# ---- gaps and refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gap", ["ok", "fail"])
@on_both_drivers
async def test_a_lost_message_is_a_gap(driver: Driver, js_server: NatsServer, gap: GapMode) -> None:
    async with losing(driver, js_server) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        told: list[range] = []
        fast = await entered(js.fast_batch(gap, on_gap=told.append))

        async def publish() -> Any:
            for number in range(1, 11):
                await fast.add(f"{stream.name}.{'lost' if number in (4, 5, 8) else 'a'}", b"%d" % number)
            return await fast.commit()

        if gap == "ok":
            ack = await publish()
            assert (ack.batch_size, fast.stored) == (10, 7)
            assert fast.gaps == [range(4, 6), range(8, 9)]
            assert await stored(stream) == [b"1", b"2", b"3", b"6", b"7", b"9", b"10"]
        else:
            with pytest.raises(BatchCutShort) as caught:
                await publish()
            assert (caught.value.stored, fast.ack.batch_size, fast.stored) == (3, 3, 3)
            assert fast.gaps[0] in (range(4, 5), range(4, 6))  # a ping may come between the two
            assert await stored(stream) == [b"1", b"2", b"3"]
        assert told == fast.gaps


@pytest.mark.parametrize("gap", ["ok", "fail"])
@on_both_drivers
async def test_a_lost_tail_is_found_by_asking(driver: Driver, js_server: NatsServer, gap: GapMode) -> None:
    async with losing(driver, js_server) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        fast = await entered(js.fast_batch(gap, flow=5, max_outstanding_acks=1, ping_after_s=0.1))
        await fast.add(f"{stream.name}.a", b"1")
        # Five are wanted and five may come early: the last has to wait for an answer.
        others = [(f"{stream.name}.a", b"%d" % number) for number in range(6, 12)]
        adding = fast.add_many([(f"{stream.name}.lost", b"lost")] * 4 + others)
        if gap == "ok":
            await adding
            await fast.commit()
            assert fast.gaps == [range(2, 6)]
            assert await stored(stream) == [b"1", b"6", b"7", b"8", b"9", b"10", b"11"]
        else:
            with pytest.raises(BatchCutShort) as caught:
                await adding
            assert caught.value.stored == 1
            assert await stored(stream) == [b"1"]


@on_both_drivers
async def test_a_lost_final_message_does_not_pass_for_stored(driver: Driver, js_server: NatsServer) -> None:
    async with losing(driver, js_server) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        for gap in ("ok", "fail"):
            fast = await entered(js.fast_batch(gap, ping_after_s=0.1))
            await fast.add(f"{stream.name}.a", b"1")
            if gap == "ok":
                await fast.commit(f"{stream.name}.lost", b"lost")
                assert fast.gaps == [range(2, 3)]
                assert fast.stored == 1
            else:
                with pytest.raises(BatchCutShort) as caught:
                    await fast.commit(f"{stream.name}.lost", b"lost")
                assert caught.value.stored == 1
        assert await stored(stream) == [b"1", b"1"]


@pytest.mark.parametrize("gap", ["ok", "fail"])
@on_both_drivers
async def test_a_refused_message_is_reported_with_its_sequence(driver: Driver, url: str, gap: GapMode) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        told: list[Any] = []
        fast = await entered(js.fast_batch(gap, on_error=told.append))
        await fast.add(f"{stream.name}.a", b"1", expect=Expect(last_sequence=0))
        await fast.add(f"{stream.name}.a", b"2", expect=Expect(last_sequence=1))
        await fast.add(f"{stream.name}.a", b"3", expect=Expect(last_sequence=77))
        if gap == "ok":
            await fast.add(f"{stream.name}.a", b"4")
            ack = await fast.commit()
            assert (ack.batch_size, fast.stored) == (4, 3)
            assert await stored(stream) == [b"1", b"2", b"4"]
        else:
            with pytest.raises(BatchCutShort) as caught:
                await fast.commit()
            assert caught.value.stored == 2
            assert await stored(stream) == [b"1", b"2"]
        [refusal] = fast.errors
        assert refusal.sequence == 3
        assert isinstance(refusal.error, WrongLastSequence)
        assert told == [refusal]


@pytest.mark.parametrize("gap", ["ok", "fail"])
@on_both_drivers
async def test_a_first_message_that_is_refused(driver: Driver, url: str, gap: GapMode) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        fast = await entered(js.fast_batch(gap))
        if gap == "ok":
            await fast.add(f"{stream.name}.a", b"1", expect=Expect(last_sequence=77))
            await fast.add(f"{stream.name}.a", b"2")
            await fast.commit()
            assert [refusal.sequence for refusal in fast.errors] == [1]
            assert await stored(stream) == [b"2"]
        else:
            with pytest.raises(WrongLastSequence):
                await add_and_commit(
                    fast,
                    [
                        (f"{stream.name}.a", b"1", {"Nats-Expected-Last-Sequence": "77"}),
                        (f"{stream.name}.a", b"2"),
                    ],
                )
            assert await stored(stream) == []


@on_both_drivers
async def test_a_window_in_which_every_message_is_refused_does_not_stall(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        async with asyncio.timeout(20):
            async with js.fast_batch("ok", flow=1, max_outstanding_acks=1) as fast:
                for _ in range(50):
                    await fast.add(f"{stream.name}.a", b"x", expect=Expect(last_sequence=77))
        assert [refusal.sequence for refusal in fast.errors] == list(range(1, 51))
        assert fast.stored == 0
        assert await stored(stream) == []


@pytest.mark.parametrize("gap", ["ok", "fail"])
@on_both_drivers
async def test_a_message_too_large_for_the_stream(driver: Driver, url: str, gap: GapMode) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js, max_message_bytes=100)
        fast = await entered(js.fast_batch(gap, ping_after_s=0.1))
        await fast.add(f"{stream.name}.a", b"1")
        await fast.add(f"{stream.name}.a", b"2" * 200)
        if gap == "ok":
            await fast.add(f"{stream.name}.a", b"3")
            await fast.commit()
            assert fast.stored == 2
            assert await stored(stream) == [b"1", b"3"]
        else:
            with pytest.raises(BatchCutShort, match="message size exceeds") as caught:
                await fast.commit()
            assert caught.value.stored == 1
        assert [(refusal.sequence, refusal.error.err_code) for refusal in fast.errors] == [(2, 10054)]


@on_both_drivers
async def test_a_duplicate_is_skipped_without_a_word(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        async with js.fast_batch() as fast:
            for msg_id in ("a", "b", "a", "c"):
                await fast.add(f"{stream.name}.x", msg_id.encode(), msg_id=msg_id)
        assert fast.ack.batch_size == 4  # the server counts it
        assert await stored(stream) == [b"a", b"b", b"c"]


@on_both_drivers
async def test_what_cannot_be_sent_is_refused_here_and_the_batch_goes_on(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        async with js.fast_batch() as fast:
            await fast.add(f"{stream.name}.a", b"1")
            with pytest.raises(jetspark.InvalidSubject):
                await fast.add("bad subject", b"")
            with pytest.raises(jetspark.PayloadTooLarge):
                await fast.add(f"{stream.name}.a", bytes(2 << 20))
            with pytest.raises(ConfigError, match="Nats-Expected-Last-Msg-Id"):
                await fast.add(f"{stream.name}.a", b"", headers={"nats-expected-last-msg-id": "x"})
            with pytest.raises(ConfigError, match="Nats-Expected-Last-Msg-Id"):
                await fast.add_many(
                    [(f"{stream.name}.a", b"2"), (f"{stream.name}.a", b"", {"Nats-Expected-Last-Msg-Id": "x"})]
                )
            with pytest.raises(jetspark.InvalidSubject):
                await fast.add_many([(f"{stream.name}.a", b"3"), ("bad subject", b""), (f"{stream.name}.a", b"4")])
            assert fast.sequence == 3  # what came before the bad one was sent
        assert await stored(stream) == [b"1", b"2", b"3"]


@on_both_drivers
async def test_an_iterable_that_fails_loses_nothing_it_gave_before(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)

        def items() -> Iterator[tuple[str, bytes]]:
            for number in range(700):
                yield f"{stream.name}.a", b"%d" % number
            raise ValueError("the source broke")

        async with js.fast_batch() as fast:
            with pytest.raises(ValueError, match="the source broke"):
                await fast.add_many(items())
        assert await stored(stream) == [b"%d" % number for number in range(700)]


@on_both_drivers
async def test_the_last_of_many_may_have_headers_encoded_beforehand(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        block = b"NATS/1.0\r\nColor: red\r\n\r\n"
        async with js.fast_batch() as fast:
            await fast.add_many([(f"{stream.name}.a", b"1", block), (f"{stream.name}.a", b"2", block)], commit=True)
        assert [message.headers["Color"] async for message in stream.get_messages()] == ["red", "red"]


async def test_a_cancelled_add_many_leaves_the_truth_in_sequence(own: NatsServer) -> None:
    async with jetspark.connect(own.url, send_buffer_bytes=1 << 20) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        fast = await entered(js.fast_batch())
        await fast.add(f"{stream.name}.a", b"first")
        own.pause()
        try:
            with pytest.raises(TimeoutError):  # after half a second the network has long taken all it can
                async with asyncio.timeout(0.5):
                    await fast.add_many((f"{stream.name}.a", b"x" * 100_000) for _ in range(900))
            sent = fast.sequence
        finally:
            own.resume()
        assert (await fast.commit()).batch_size == sent  # nothing is sent that was not counted
        assert len(await stored(stream)) == sent


@pytest.mark.parametrize("count", [0, 1, 2, 499, 500, 501, 1700])
@on_both_drivers
async def test_adding_many_may_commit_with_the_last_one(driver: Driver, url: str, count: int) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        async with js.fast_batch() as fast:
            receipt = await fast.add_many(((f"{stream.name}.a", b"%d" % n) for n in range(count)), commit=True)
        assert receipt.sequence == count
        assert (fast.ack.batch_size if count else 0) == count
        assert await stored(stream) == [b"%d" % number for number in range(count)]


async def test_adding_many_takes_an_async_iterable(url: str) -> None:
    async def items(name: str, count: int) -> Any:
        for number in range(count):
            await asyncio.sleep(0)
            yield (f"{name}.a", b"%d" % number, {"N": str(number)})

    async with jetspark.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        async with js.fast_batch() as fast:
            await fast.add_many(items(stream.name, 30))
            await fast.add_many(items(stream.name, 2), commit=True)
        assert len(await stored(stream)) == 32
        async with js.fast_publisher() as publisher:
            assert await publisher.publish_many(items(stream.name, 5)) == 5


@on_both_drivers
async def test_leaving_by_an_exception_ends_the_batch_and_keeps_what_was_added(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        fast = js.fast_batch()

        async def leave() -> None:
            async with fast:
                await fast.add(f"{stream.name}.a", b"1")
                raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            await leave()
        with pytest.raises(UsageError, match="left"):
            await fast.add(f"{stream.name}.a", b"2")
        async with js.fast_batch() as second:
            await second.add(f"{stream.name}.a", b"3")
            assert second.flow == 500  # the first does not slow it down any more
        assert await stored(stream) == [b"1", b"3"]


@on_both_drivers
async def test_several_may_add_to_one_batch_at_a_time(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        async with js.fast_batch(flow=7) as fast:

            async def add(name: str) -> list[int]:
                return [(await fast.add(f"{stream.name}.{name}", b"")).sequence for _ in range(100)]

            places = await asyncio.gather(*(add(name) for name in "abcd"))
        assert sorted(place for each in places for place in each) == list(range(1, 401))
        assert len(await stored(stream)) == fast.ack.batch_size == 400


# ---- what happens to servers, streams and connections ----------------------------------------------------------


@on_both_drivers
async def test_a_stream_deleted_under_a_batch(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        fast = await entered(js.fast_batch(flow=2, timeout=1, ping_after_s=0.1))
        await fast.add(f"{stream.name}.a", b"1")
        await stream.delete()
        with pytest.raises(BatchInDoubt, match="no answer within 1 s"):
            await add_and_commit(fast, [(f"{stream.name}.a", b"2")] * 10)


@on_both_drivers
async def test_the_feature_switched_off_under_a_batch(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        fast = await entered(js.fast_batch(flow=2))
        for number in range(4):
            await fast.add(f"{stream.name}.a", b"%d" % number)
        await until(lambda: fast.acknowledged == 4)
        await stream.update(allow_batched=False)
        with pytest.raises(BatchInDoubt, match="batch publish is disabled") as caught:
            await add_and_commit(fast, [(f"{stream.name}.a", b"4")])
        assert caught.value.stored == 4
        assert await stored(stream) == [b"0", b"1", b"2", b"3"]


@on_both_drivers
async def test_a_server_that_dies_under_a_batch(driver: Driver, own: NatsServer) -> None:
    async with driver.connect(own.url, reconnect_wait_s=0.01) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        fast = await entered(js.fast_batch(flow=5))
        for number in range(12):
            await fast.add(f"{stream.name}.a", b"%d" % number)
        await until(lambda: fast.acknowledged == 10)
        await asyncio.to_thread(own.kill)
        await asyncio.to_thread(own.start)
        with pytest.raises(BatchInDoubt, match="batch publish ID unknown") as caught:
            await fast.commit()
        assert caught.value.stored == 10
        assert (await stored(stream))[:10] == [b"%d" % number for number in range(10)]


class _CutToServer(Proxy):
    """Cuts a connection when so many more bytes have gone to the server, in the middle of whatever it is."""

    to_server_bytes: int | None = None

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_to_client: bool) -> None:
        try:
            while data := await reader.read(65536):
                if not is_to_client and self.to_server_bytes is not None:
                    self.to_server_bytes -= len(data)
                    if self.to_server_bytes < 0:
                        data, self.to_server_bytes = data[: self.to_server_bytes], None
                        writer.write(data)
                        await writer.drain()
                        return
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass


@pytest.mark.parametrize("gap", ["ok", "fail"])
@on_both_drivers
async def test_a_connection_cut_in_the_middle_of_a_frame(
    driver: Driver, js_server: NatsServer, url: str, gap: GapMode
) -> None:
    async with (
        _CutToServer(js_server.port) as proxy,
        driver.connect(
            proxy.url,
            reconnect_wait_s=0.01,
            ignore_discovered_servers=True,
            on_event=(events := Recorder()),
        ) as nc,
    ):
        js = nc.jetstream()
        stream = await new_stream(js)
        fast = await entered(js.fast_batch(gap, ping_after_s=0.1))
        await fast.add_many([(f"{stream.name}.a", b"%d" % number) for number in range(1, 101)])
        proxy.to_server_bytes = 20_001
        more = [(f"{stream.name}.a", b"%d" % number) for number in range(101, 5001)]
        if gap == "ok":
            await fast.add_many(more)
            await fast.commit()
            assert events.of(jetspark.Disconnected)
            lost = {number for missing in fast.gaps for number in missing}
            assert lost
            assert len(lost) == sum(map(len, fast.gaps))  # each once
            expected = [number for number in range(1, 5001) if number not in lost]
            # Nothing was refused, so all that is missing is in the gaps. The client cannot know that: what was under
            # way when the connection broke, and was not reported since, is in doubt.
            in_doubt = {number for doubt in fast.doubts for number in doubt}
            assert not in_doubt & lost
            assert fast.stored == len(set(expected) - in_doubt)
        else:
            with pytest.raises(BatchCutShort) as caught:
                await add_and_commit(fast, more)
            expected = list(range(1, caught.value.stored + 1))
        assert [int(data) for data in await stored(stream)] == expected


@on_both_drivers
async def test_a_refusal_that_was_lost_with_the_connection_is_in_doubt_and_publishing_it_again_repairs_it(
    driver: Driver, js_server: NatsServer, url: str
) -> None:
    """What the documentation tells users to do about ``doubts``."""
    async with (
        LossyProxy(js_server.port) as proxy,
        driver.connect(url) as witness,
        driver.connect(
            proxy.url,
            reconnect_wait_s=0.01,
            ignore_discovered_servers=True,
            on_event=(events := Recorder()),
        ) as nc,
    ):
        js = nc.jetstream()
        stream = await new_stream(js)
        there = await witness.jetstream().stream(stream.name)
        subject, values = f"{stream.name}.a", [b"value-%d" % number for number in range(1, 11)]
        proxy.lose_from(b"value-3", "to_client")
        async with js.fast_batch("ok", flow=5, ping_after_s=0.1) as fast:
            for number, value in enumerate(values, 1):
                expect = Expect(last_sequence=999) if number == 3 else None
                await fast.add(subject, value, msg_id=f"id-{number}", expect=expect)
                if number == 5:
                    while (await there.info()).state.messages < 4:
                        pass
                    proxy.cut()
                    await until(lambda: events.of(jetspark.Reconnected))
        assert (fast.gaps, fast.errors, fast.doubts) == ([], [], [range(1, 6)])
        assert fast.stored == 5
        assert await stored(stream) == [value for value in values if value != b"value-3"]
        again = [
            await js.publish(subject, values[sequence - 1], msg_id=f"id-{sequence}")
            for sequence in itertools.chain(*fast.doubts)
        ]
        assert [ack.duplicate for ack in again] == [True, True, False, True, True]
        assert sorted(await stored(stream)) == sorted(values)


# ---- the endless publisher -------------------------------------------------------------------------------------


@on_both_drivers
async def test_a_publisher_stores_everything_once_through_restarts_of_the_server(
    driver: Driver, own: NatsServer
) -> None:
    async with driver.connect(own.url, reconnect_wait_s=0.01) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        positions: list[int] = []
        async with js.fast_publisher(message_ids=True) as publisher:
            for chunk in range(60):
                last = await publisher.publish_many(
                    [(f"{stream.name}.a", b"%d" % n) for n in range(chunk * 400, chunk * 400 + 400)]
                )
                assert last == (chunk + 1) * 400
                positions.append(await now(publisher.published()))
                if chunk in (20, 40):
                    await asyncio.to_thread(own.kill)
                    await asyncio.to_thread(own.start)
        assert positions == sorted(positions)
        assert publisher.pending == 0
        assert publisher.possibly_doubled == 0
        assert publisher.batches >= 3
        assert [int(data) for data in await stored(stream)] == list(range(24_000))


@on_both_drivers
async def test_without_ids_what_may_be_doubled_is_counted(driver: Driver, own: NatsServer) -> None:
    async with driver.connect(own.url, reconnect_wait_s=0.01) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        async with js.fast_publisher() as publisher:
            for number in range(30):
                await publisher.publish(f"{stream.name}.a", b"%d" % number)
            # All stored, none acknowledged: the server promised to say so after 500.
            await until(lambda: publisher.batches == 1)
            async with asyncio.timeout(60):
                while len(await stored(stream)) < 30:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            await asyncio.to_thread(own.kill)
            await asyncio.to_thread(own.start)
        numbers = [int(data) for data in await stored(stream)]
        assert list(dict.fromkeys(numbers)) == list(range(30))
        assert len(numbers) - 30 <= publisher.possibly_doubled == 30


@on_both_drivers
async def test_a_flush_returns_when_everything_is_stored_and_publishing_goes_on(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        async with js.fast_publisher() as publisher:
            for number in range(3):
                for _ in range(10):
                    await publisher.publish(f"{stream.name}.a", b"%d" % number)
                await publisher.flush()
                assert publisher.pending == 0
                assert len(await stored(stream)) == (number + 1) * 10
            await publisher.flush()
        assert publisher.batches == 3
        with pytest.raises(UsageError, match="closed"):
            await publisher.publish(f"{stream.name}.a", b"")


@on_both_drivers
async def test_a_refused_message_stops_the_publisher_which_keeps_what_is_not_stored(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js, max_message_bytes=100)
        publisher = await entered(js.fast_publisher())
        for data in (b"1", b"2" * 200, b"3"):
            await publisher.publish(f"{stream.name}.a", data)
        with pytest.raises(ServerError, match="message size exceeds"):
            await publisher.flush()
        with pytest.raises(ServerError, match="message size exceeds"):
            await publisher.publish(f"{stream.name}.a", b"4")
        left = publisher.unpublished()
        assert [item[1] for item in (await now(left))] == [b"2" * 200, b"3"]
        assert await stored(stream) == [b"1"]


@on_both_drivers
async def test_a_refused_message_may_be_handed_back_and_skipped(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js, max_message_bytes=100)
        refused: list[Any] = []
        async with js.fast_publisher(on_refused=refused.append) as publisher:
            for number in range(1, 2001):
                large = number in (1, 700, 701, 2000)
                await publisher.publish(f"{stream.name}.a", b"x" * 200 if large else b"%d" % number)
        assert [(entry.position, entry.error.err_code) for entry in refused] == [
            (1, 10054),
            (700, 10054),
            (701, 10054),
            (2000, 10054),
        ]
        assert [int(data) for data in await stored(stream)] == [
            number for number in range(1, 2001) if number not in (1, 700, 701, 2000)
        ]


@on_both_drivers
async def test_a_publisher_accepts_no_more_than_its_bounds(driver: Driver, own: NatsServer) -> None:
    async with driver.connect(own.url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        publisher = await entered(js.fast_publisher(max_pending_messages=10))
        await publisher.publish(f"{stream.name}.a", b"")
        await publisher.flush()
        own.pause()
        try:
            for _ in range(10):
                await publisher.publish(f"{stream.name}.a", b"")
            waiting = asyncio.ensure_future(publisher.publish(f"{stream.name}.a", b""))
            await asyncio.sleep(0.2)
            assert not waiting.done()
            assert publisher.pending == 10
            with pytest.raises(jetspark.RequestTimeout, match="10 messages"):
                await publisher.flush(timeout=0.1)
        finally:
            own.resume()
        assert await waiting == 12
        await publisher.close()
        assert len(await stored(stream)) == 12


@on_both_drivers
async def test_a_publisher_gives_up_after_its_patience(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        publisher = await entered(js.fast_publisher(patience_s=0.5))
        await publisher.publish("no.stream.has.this", b"kept")
        with pytest.raises(jetspark.JetSparkError):
            await publisher.flush()
        left = publisher.unpublished()
        assert [item[1] for item in (await now(left))] == [b"kept"]


@on_both_drivers
async def test_a_stream_that_does_not_allow_it_is_told_at_once(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js, allow_batched=False)
        publisher = await entered(js.fast_publisher())
        await publisher.publish(f"{stream.name}.a", b"")
        with pytest.raises(BatchPublishDisabled, match="allow_batched=True"):
            await publisher.flush(timeout=10)


@on_both_drivers
async def test_a_connection_that_is_closed_leaves_the_rest_to_be_read(driver: Driver, own: NatsServer) -> None:
    nc = await driver.connect(own.url)
    js = nc.jetstream()
    stream = await new_stream(js)
    publisher = await entered(js.fast_publisher())
    fast = await entered(js.fast_batch())
    await publisher.publish(f"{stream.name}.a", b"1")
    await fast.add(f"{stream.name}.a", b"2")
    await nc.close()
    with pytest.raises(jetspark.JetSparkError):
        await publisher.flush()
    left = publisher.unpublished()
    assert len(await now(left)) == 1
    with pytest.raises(BatchInDoubt):
        await fast.commit()


@on_both_drivers
async def test_ids_may_be_the_same_in_every_run(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await new_stream(js)
        for _ in range(2):
            async with js.fast_publisher(message_ids=True, id_prefix="import-7") as publisher:
                await publisher.publish(f"{stream.name}.a", b"1")
                await publisher.publish(f"{stream.name}.a", b"2", headers={"Color": "red"})
                await publisher.publish(f"{stream.name}.a", b"3", msg_id="own")
        assert await stored(stream) == [b"1", b"2", b"3"]
        ids = [message.headers["Nats-Msg-Id"] async for message in stream.get_messages()]
        assert ids == ["import-7-1", "import-7-2", "own"]
