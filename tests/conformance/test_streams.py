"""Streams, their messages, and publishing to them: what both drivers promise, on a real server."""

from __future__ import annotations

import asyncio
import datetime
import json
from typing import Any

import pytest
from support.drivers import Driver, on_both_drivers
from support.patience import PATIENCE_S
from support.peers import Proxy, scripted_server

import jetspark
from jetspark import ConsumerConfig, Expect, StreamConfig
from jetspark.jetstream.config import ConsumerLimits, Placement, Republish, StreamSource, SubjectTransform
from jetspark.server import NatsServer


async def _until_it_holds(stream: jetspark.Stream, messages: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await stream.info()).state.messages != messages:  # noqa: ASYNC110 - the server gives no signal
            await asyncio.sleep(0.02)


@on_both_drivers
async def test_the_account_tells_what_it_uses(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        await js.create_stream(StreamConfig(name="A"))
        info = await js.account_info()
        assert info.streams == 1
        assert info.api_level >= 2


@on_both_drivers
async def test_a_stream_lives_from_create_to_delete(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="ORDERS", subjects=["orders.>"], max_age_s=3600.5))
        assert stream.name == "ORDERS"
        config = (await stream.info()).config
        assert (config.subjects, config.max_age_s, config.storage) == (["orders.>"], 3600.5, "file")
        assert (await js.stream("ORDERS")).cached_info.config == config
        await stream.delete()
        with pytest.raises(jetspark.StreamNotFound) as missing:
            await js.stream("ORDERS")
        assert (missing.value.code, missing.value.err_code) == (404, 10059)


@on_both_drivers
async def test_creating_twice_is_fine_with_the_same_configuration_only(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        config = StreamConfig(name="TWICE", subjects=["twice"])
        await js.create_stream(config)
        await js.create_stream(config)
        with pytest.raises(jetspark.StreamNameInUse):
            await js.create_stream(StreamConfig(name="TWICE", subjects=["other"]))
        with pytest.raises(jetspark.ServerError, match="overlap") as overlap:
            await js.create_stream(StreamConfig(name="THIRD", subjects=["twice"]))
        assert overlap.value.err_code == 10065


@on_both_drivers
async def test_get_or_create_returns_what_exists_as_it_is(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        created = await js.get_or_create_stream(StreamConfig(name="KEPT", subjects=["kept.>"], max_messages=5))
        assert created.cached_info.config.max_messages == 5
        found = await js.get_or_create_stream(StreamConfig(name="KEPT", subjects=["other.>"], max_messages=7))
        assert found.cached_info.config.max_messages == 5
        assert (await js.get_or_create_stream("KEPT")).cached_info.config.subjects == ["kept.>"]

        consumer = await found.get_or_create_consumer(ConsumerConfig(durable_name="c", ack_wait_s=5))
        assert consumer.cached_info.config.ack_wait_s == 5
        consumer = await found.get_or_create_consumer(ConsumerConfig(durable_name="c", ack_wait_s=9))
        assert consumer.cached_info.config.ack_wait_s == 5
        with pytest.raises(jetspark.ConfigError, match="name or durable_name"):
            await found.get_or_create_consumer(ConsumerConfig())


@on_both_drivers
async def test_clients_that_get_or_create_the_same_at_a_time_all_get_it(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc, driver.connect(url) as other:
        for round in range(10):
            configs = (StreamConfig(name=f"RACE{round}", max_messages=each) for each in (5, 7))
            both = zip((nc, other), configs, strict=True)
            found = await asyncio.gather(*(each.jetstream().get_or_create_stream(config) for each, config in both))
            assert len({each.cached_info.config.max_messages for each in found}) == 1
            makers = ((5, found[0]), (7, found[1]))
            consumers = await asyncio.gather(
                *(
                    stream.get_or_create_consumer(ConsumerConfig(durable_name="c", max_deliver=most))
                    for most, stream in makers
                )
            )
            assert len({each.cached_info.config.max_deliver for each in consumers}) == 1


@on_both_drivers
async def test_infos_tell_the_time_of_the_server(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        stream = await nc.jetstream().create_stream(StreamConfig(name="CLOCK", subjects=["clock"]))
        ack = await nc.jetstream().publish("clock")
        stored = await stream.get_message(ack.sequence)
        consumer = await stream.create_consumer(ConsumerConfig(durable_name="c"))
        for info in (await stream.info(), await consumer.info()):
            assert info.timestamp is not None
            assert info.timestamp >= stored.timestamp
            assert abs((info.timestamp - stored.timestamp).total_seconds()) < 600


@on_both_drivers
async def test_an_update_changes_only_what_it_mentions(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(
            StreamConfig(name="KEPT", subjects=["kept"], max_messages=10, description="kept", metadata={"team": "a"})
        )
        before = stream.cached_info.config
        after = (await stream.update(max_messages=20)).config
        assert (after.max_messages, after.description, after.subjects) == (20, "kept", ["kept"])
        assert after.duplicate_window_s == before.duplicate_window_s
        assert after.metadata is not None
        assert after.metadata["team"] == "a"
        updated = await js.create_or_update_stream(StreamConfig(name="KEPT", max_bytes=10_000))
        assert (updated.cached_info.config.max_messages, updated.cached_info.config.max_bytes) == (20, 10_000)
        created = await js.create_or_update_stream(StreamConfig(name="NEW", subjects=["new"]))
        assert created.name == "NEW"
        with pytest.raises(jetspark.StreamNotFound):
            await js.update_stream(StreamConfig(name="MISSING", max_messages=1))


@on_both_drivers
async def test_every_field_of_a_stream_comes_back_as_it_was_sent(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        await js.create_stream(StreamConfig(name="SOURCE", subjects=["source.>"]))
        sent = StreamConfig(
            name="FULL",
            description="everything",
            subjects=["full.>"],
            retention="limits",
            storage="file",
            replicas=1,
            max_messages=1000,
            max_messages_per_subject=10,
            max_bytes=1 << 20,
            max_age_s=86_400,
            max_message_bytes=1000,
            max_consumers=7,
            discard="new",
            discard_new_per_subject=True,
            duplicate_window_s=12.5,
            allow_direct=True,
            allow_rollup=True,
            allow_message_ttl=True,
            subject_delete_marker_ttl_s=60,
            allow_atomic=True,
            allow_batched=True,
            deny_delete=True,
            sources=[
                StreamSource(
                    name="SOURCE",
                    start_time=datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
                    subject_transforms=[SubjectTransform(source="source.*", destination="full.from.{{wildcard(1)}}")],
                )
            ],
            subject_transform=SubjectTransform(source="full.old.>", destination="full.new.>"),
            republish=Republish(source="full.>", destination="copy.>", headers_only=True),
            placement=Placement(tags=[]),
            compression="s2",
            first_sequence=100,
            consumer_limits=ConsumerLimits(max_ack_pending=50, inactive_threshold_s=30),
            metadata={"owner": "us"},
        )
        got = (await js.create_stream(sent)).cached_info.config
        for name in StreamConfig.__dataclass_fields__:
            wanted = getattr(sent, name)
            if wanted is None or name in ("extra", "placement", "sources", "metadata"):
                continue
            assert getattr(got, name) == wanted, name
        assert got.sources is not None
        assert got.sources[0].start_time == datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
        assert got.sources[0].subject_transforms == sent.sources[0].subject_transforms  # type: ignore[index]
        assert got.metadata is not None
        assert got.metadata["owner"] == "us"
        assert got.extra == {}, "fields this server has and we do not know"


@on_both_drivers
async def test_fields_we_do_not_know_are_sent_and_kept(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        seen = []

        async def answer(message: jetspark.Message) -> None:
            body = json.loads(message.data) if message.data else {}
            seen.append(body)
            config = {"name": "FUTURE", "max_msgs": 5, "telepathy": {"on": True}} | body
            await message.respond(json.dumps({"config": config, "state": {}}).encode())

        await nc.subscribe("future.api.>", callback=answer)
        js = nc.jetstream(prefix="future.api")
        stream = await js.stream("FUTURE")
        assert stream.cached_info.config.extra == {"telepathy": {"on": True}}
        updated = await stream.update(max_messages=6)
        assert seen[-1] == {"name": "FUTURE", "max_msgs": 6, "telepathy": {"on": True}}
        assert updated.config.max_messages == 6


@on_both_drivers
async def test_streams_are_listed_page_by_page_and_by_subject(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        for number in range(300):  # the server's page has 256
            await nc.request(
                f"$JS.API.STREAM.CREATE.S{number}",
                json.dumps({"name": f"S{number}", "subjects": [f"s.{number}"], "storage": "memory"}).encode(),
            )
        names = [name async for name in js.stream_names()]
        assert sorted(names) == sorted(f"S{number}" for number in range(300))
        assert len({info.config.name async for info in js.streams()}) == 300
        assert [name async for name in js.stream_names("s.7")] == ["S7"]
        assert [info.config.name async for info in js.streams("s.8")] == ["S8"]


@on_both_drivers
async def test_publish_returns_when_the_stream_has_the_message(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="PUB", subjects=["pub.>"], allow_direct=True))
        first = await js.publish("pub.a", b"one", headers={"Kind": "test"})
        assert (first.stream, first.sequence, first.duplicate) == ("PUB", 1, False)
        second = await js.publish("pub.b", b"two", msg_id="id-1")
        again = await js.publish("pub.b", b"two", msg_id="id-1")
        assert (second.duplicate, again.duplicate, again.sequence) == (False, True, second.sequence)
        stored = await stream.get_message(1)
        assert (stored.subject, stored.data, stored.headers["kind"], stored.sequence) == ("pub.a", b"one", "test", 1)
        assert (await stream.info()).state.messages == 2


@on_both_drivers
async def test_a_plain_publish_is_stored_without_waiting_for_an_acknowledgement(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        stream = await nc.jetstream().create_stream(StreamConfig(name="PLAIN", subjects=["plain.>"]))
        for _ in range(2):
            await nc.publish("plain.a", b"one", headers={"Nats-Msg-Id": "1"})
        await nc.jetstream().publish("plain.b")  # of the same connection, so that the server has stored those before
        state = (await stream.info(subjects_filter=">")).state
        assert state.subjects == {"plain.a": 1, "plain.b": 1}


@on_both_drivers
async def test_expectations_are_checked_by_the_stream(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        await js.create_stream(StreamConfig(name="EXP", subjects=["exp.>"]))
        first = await js.publish("exp.a", expect=Expect(stream="EXP", last_sequence=0))
        await js.publish("exp.b", expect=Expect(last_subject_sequence=0))
        await js.publish("exp.a", expect=Expect(last_subject_sequence=first.sequence))
        await js.publish("exp.c", expect=Expect(last_subject_sequence=3, last_subject_sequence_subject="exp.a"))
        for expect in (Expect(last_sequence=1), Expect(last_subject_sequence=7)):
            with pytest.raises(jetspark.WrongLastSequence):
                await js.publish("exp.a", expect=expect)
        with pytest.raises(jetspark.ServerError, match="expected stream does not match"):
            await js.publish("exp.a", expect=Expect(stream="OTHER"))
        assert (await (await js.stream("EXP")).info()).state.messages == 4


@on_both_drivers
async def test_a_publish_nobody_stores_says_so_and_stores_nothing(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        with pytest.raises(jetspark.JetStreamUnavailable, match=r"no stream of this account stores it"):
            await nc.jetstream().publish("nowhere", b"lost?")


@on_both_drivers
async def test_a_publish_waits_out_a_short_time_without_a_stream(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        publishing = asyncio.ensure_future(js.publish("soon", b"patience"))
        await asyncio.sleep(0.1)
        await js.create_stream(StreamConfig(name="SOON", subjects=["soon"]))
        assert (await publishing).sequence == 1
        assert (await (await js.stream("SOON")).info()).state.messages == 1


@on_both_drivers
async def test_bad_input_is_refused_before_anything_is_sent(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        with pytest.raises(jetspark.ConfigError, match="stops a replicated stream for good"):
            await js.publish("a", headers={"Nats-Expected-Last-Msg-Id": "x"})
        with pytest.raises(jetspark.ConfigError, match=r"ttl=0\.5: expected seconds of 1 or more"):
            await js.publish("a", ttl=0.5)
        for name in ("", "a.b", "a b", "a/b", "*"):
            with pytest.raises(jetspark.ConfigError):
                await js.stream(name)
            with pytest.raises(jetspark.ConfigError):
                StreamConfig(name=name)
        with pytest.raises(jetspark.ConfigError, match="expected one of the two"):
            nc.jetstream(domain="hub", prefix="x")


@on_both_drivers
async def test_a_message_with_a_ttl_goes_away(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="TTL", subjects=["ttl"], allow_message_ttl=True))
        await js.publish("ttl", b"short", ttl=1)
        await js.publish("ttl", b"long")
        await _until_it_holds(stream, 1)
        assert (await stream.get_message(last_for="ttl")).data == b"long"


@on_both_drivers
@pytest.mark.parametrize("direct", [True, False])
async def test_single_messages_are_found_and_removed(driver: Driver, url: str, direct: bool) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="GET", subjects=["get.>"], allow_direct=direct))
        before = datetime.datetime.now(datetime.UTC)
        for subject in ("get.a", "get.b", "get.a", "get.c"):
            await js.publish(subject, subject.encode(), headers={"N": "1"})
        assert (await stream.get_message(2)).subject == "get.b"
        assert (await stream.get_message(last_for="get.a")).sequence == 3
        found = await stream.get_message(2, next_for="get.a")
        assert (found.sequence, found.data, dict(found.headers)) == (3, b"get.a", {"N": "1"})
        assert abs((found.timestamp - before).total_seconds()) < 60
        await stream.delete_message(2)
        await stream.delete_message(4, erase=True)
        for sequence in (2, 4, 99):
            with pytest.raises(jetspark.MessageNotFound):
                await stream.get_message(sequence)
        with pytest.raises(jetspark.MessageNotFound):
            await stream.get_message(last_for="get.nothing")
        info = await stream.info(deleted_details=True, subjects_filter="get.>")
        assert info.state.deleted == [2, 4]
        assert info.state.subjects == {"get.a": 2}


@on_both_drivers
async def test_a_purge_removes_what_it_says(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="PURGE", subjects=["purge.>"]))
        for number in range(10):
            await js.publish(f"purge.{number % 2}")
        assert await stream.purge(up_to_sequence=2) == 2
        assert await stream.purge(subject="purge.0", keep=1) == 3
        assert (await stream.info()).state.messages == 5
        assert await stream.purge() == 5
        assert (await stream.info()).state.last_sequence == 10


@on_both_drivers
async def test_a_sealed_stream_takes_nothing_more(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="SEAL", subjects=["seal"]))
        await js.publish("seal", b"kept")
        await stream.seal()
        with pytest.raises(jetspark.ServerError, match="sealed"):
            await js.publish("seal", b"refused")
        assert (await stream.get_message(1)).data == b"kept"


@on_both_drivers
async def test_consumers_are_made_changed_listed_and_deleted(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="CON", subjects=["con.>"]))
        sent = ConsumerConfig(
            durable_name="billing",
            description="bills",
            filter_subject="con.paid",
            ack_wait_s=12.5,
            max_deliver=4,
            backoff_s=[1, 2.5],
            max_ack_pending=77,
            max_waiting=5,
            max_batch=10,
            max_expires_s=9,
            max_batch_bytes=1000,
            headers_only=True,
            sample_frequency="50%",
            inactive_threshold_s=3600,
            memory_storage=True,
            metadata={"owner": "us"},
            start_sequence=1,
        )
        consumer = await stream.create_consumer(sent)
        got = consumer.cached_info.config
        assert (got.ack_policy, got.deliver_policy) == ("explicit", "by_start_sequence")
        for name in ConsumerConfig.__dataclass_fields__:
            wanted = getattr(sent, name)
            # With backoff the server takes its first step for ack_wait.
            if wanted is not None and name not in ("extra", "metadata", "ack_wait_s"):
                assert getattr(got, name) == wanted, name
        assert got.extra == {}
        await stream.create_consumer(sent)
        with pytest.raises(jetspark.ConsumerNameInUse):
            await stream.create_consumer(ConsumerConfig(durable_name="billing", max_deliver=9))
        changed = await stream.update_consumer(ConsumerConfig(durable_name="billing", max_ack_pending=88))
        assert changed.cached_info.config.max_ack_pending == 88
        assert changed.cached_info.config.filter_subject == "con.paid"
        ephemeral = await stream.create_consumer(ConsumerConfig(ack_policy="none", filter_subjects=["con.a", "con.b"]))
        assert ephemeral.cached_info.config.filter_subjects == ["con.a", "con.b"]
        assert sorted([name async for name in stream.consumer_names()]) == sorted(["billing", ephemeral.name])
        assert {info.name async for info in stream.consumers()} == {"billing", ephemeral.name}
        await consumer.delete()
        with pytest.raises(jetspark.ConsumerNotFound):
            await stream.consumer("billing")


@on_both_drivers
async def test_a_sample_frequency_is_a_text_of_percent(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        stream = await nc.jetstream().create_stream(StreamConfig(name="SAMPLED", subjects=["sampled"]))
        config = {"durable_name": "number", "ack_policy": "explicit", "sample_freq": 30}
        body = json.dumps({"stream_name": "SAMPLED", "config": config}).encode()
        answer = json.loads((await nc.request("$JS.API.CONSUMER.CREATE.SAMPLED.number", body)).data)
        assert "cannot unmarshal number" in answer["error"]["description"]
        with pytest.raises(jetspark.ConfigError, match="sample_frequency"):
            ConsumerConfig(durable_name="number", sample_frequency=30)  # type: ignore[arg-type]
        samples = await nc.subscribe("$JS.EVENT.METRIC.CONSUMER.ACK.SAMPLED.text")
        consumer = await stream.create_consumer(ConsumerConfig(durable_name="text", sample_frequency="100%"))
        await nc.jetstream().publish("sampled")
        [message] = await consumer.fetch(1)
        await message.ack()
        assert json.loads((await samples.next(30)).data)["stream_seq"] == 1


@on_both_drivers
async def test_a_consumer_can_be_paused_resumed_and_reset(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="PAUSE", subjects=["pause"]))
        consumer = await stream.create_consumer(ConsumerConfig(durable_name="c"))
        await consumer.pause(datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1))
        info = await consumer.info()
        assert info.is_paused
        assert 3000 < (info.pause_remaining_s or 0) <= 3600
        await consumer.resume()
        assert not (await consumer.info()).is_paused
        await js.publish("pause")
        assert (await consumer.reset()).name == "c"


@on_both_drivers
async def test_a_feature_the_server_lacks_is_named_with_the_version_it_needs(driver: Driver) -> None:
    async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b'INFO {"server_id":"old","version":"2.10.29","headers":true,"jetstream":true,"max_payload":1048576}\r\n'
        )
        while line := await reader.readline():
            if line == b"PING\r\n":
                writer.write(b"PONG\r\n")

    async with scripted_server(old) as old_url, driver.connect(old_url) as nc:
        with pytest.raises(
            jetspark.FeatureUnavailable, match=r"allow_batched needs nats-server 2\.14 .* this is 2\.10"
        ):
            await nc.jetstream().create_stream(StreamConfig(name="OLD", allow_batched=True))


@on_both_drivers
async def test_another_client_sees_what_we_made(driver: Driver, url: str) -> None:
    import nats

    theirs = await nats.connect(url)
    try:
        async with driver.connect(url) as nc:
            js = nc.jetstream()
            await js.create_stream(StreamConfig(name="INTEROP", subjects=["interop"], max_age_s=60))
            await js.publish("interop", b"ours", headers={"From": "us"})
            their_js = theirs.jetstream()
            info = await their_js.stream_info("INTEROP")
            assert (info.config.max_age, info.state.messages) == (60, 1)
            await their_js.publish("interop", b"theirs")
            assert (await (await js.stream("INTEROP")).get_message(2)).data == b"theirs"
    finally:
        await theirs.close()


@on_both_drivers
async def test_many_messages_are_read_in_order_without_a_consumer(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(
            StreamConfig(name="MANY", subjects=["many.>"], allow_direct=True, storage="memory")
        )
        for number in range(2500):
            await nc.publish(f"many.{number % 3}", b"%d" % number)
        await _until_it_holds(stream, 2500)
        await stream.delete_message(10)
        everything = [int(message.data) async for message in stream.get_messages()]
        assert everything == [number for number in range(2500) if number != 9]
        some = [message async for message in stream.get_messages(2001, subject="many.0", max_messages=5)]
        assert [message.sequence for message in some] == [2002, 2005, 2008, 2011, 2014]
        assert [message async for message in stream.get_messages(2501)] == []
        with pytest.raises(jetspark.ConfigError, match="start_sequence=0"):
            [message async for message in stream.get_messages(0)]


@on_both_drivers
async def test_the_last_messages_of_many_subjects_are_of_one_moment(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(
            StreamConfig(name="LAST", subjects=["last.>"], allow_direct=True, max_messages_per_subject=5)
        )
        for round_number in range(3):
            for key in "abc":
                await js.publish(f"last.{key}", b"%d" % round_number)
        newest = await stream.get_last_messages(["last.a", "last.c", "last.missing"])
        assert [(message.subject, message.data) for message in newest] == [("last.a", b"2"), ("last.c", b"2")]
        earlier = await stream.get_last_messages(["last.>"], up_to_sequence=5)
        assert [(message.subject, message.sequence) for message in earlier] == [
            ("last.c", 3),
            ("last.a", 4),
            ("last.b", 5),
        ]
        assert await stream.get_last_messages(["last.missing"]) == []
        for number in range(1030):
            await nc.publish(f"last.many.{number}")
        await _until_it_holds(stream, 9 + 1030)
        with pytest.raises(jetspark.ConfigError, match="more than 1024 subjects"):
            await stream.get_last_messages(["last.many.>"])


@on_both_drivers
async def test_reading_a_stream_that_does_not_allow_direct_gets_says_so(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        stream = await nc.jetstream().create_stream(
            StreamConfig(name="CLOSED", subjects=["closed"], allow_direct=False)
        )
        with pytest.raises(jetspark.JetStreamUnavailable):
            [message async for message in stream.get_messages()]


@on_both_drivers
async def test_a_bulk_read_asks_again_as_soon_as_the_connection_is_back(driver: Driver, server: NatsServer) -> None:
    """The time-out here is longer than the test may take."""
    name = f"CUT_{driver.name}"
    async with Proxy(server.port) as proxy, driver.connect(server.url) as other:
        js = other.jetstream()
        await js.create_stream(StreamConfig(name=name, subjects=[f"{name}.>"], allow_direct=True))
        for number in range(3000):
            await js.publish_async(f"{name}.{number % 1000}", b"%d" % number + bytes(1000))
        await js.publish_async_complete()
        options: dict[str, Any] = {"ignore_discovered_servers": True, "reconnect_wait_s": 0.01}
        async with driver.connect(proxy.url, **options) as nc, asyncio.timeout(30):
            stream = await nc.jetstream(timeout=60).stream(name)
            read: list[int] = []
            async for message in stream.get_messages():
                read.append(message.sequence)
                if len(read) in (10, 1500):
                    proxy.cut()
            assert read == list(range(1, 3001))
            asking = asyncio.ensure_future(stream.get_last_messages([f"{name}.>"]))
            await asyncio.sleep(0)
            proxy.cut()
            assert [message.sequence for message in await asking] == list(range(2001, 3001))
