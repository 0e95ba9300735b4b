"""Every field of every configuration, through both drivers to a real server and back."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import nats
import pytest
from support.drivers import Driver, on_both_drivers
from support.servers import domain_config

import jetspark
from jetspark import (
    ConsumerConfig,
    ConsumerLimits,
    External,
    KVConfig,
    ObjectStoreConfig,
    Placement,
    Republish,
    StreamConfig,
    StreamSource,
    SubjectTransform,
)
from jetspark.server import NatsServer

DOMAIN = "hub"


@pytest.fixture(scope="module")
def in_domain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """Its API is reached as ``$JS.API``, by its domain, and below the same prefix."""
    with NatsServer(jetstream=False, extra_config=domain_config(DOMAIN, tmp_path_factory.mktemp(DOMAIN))) as server:
        yield server


def _name(driver: Driver, text: str) -> str:
    """Streams of their own keep the drivers apart on one server."""
    return f"{text}_{driver.name}"


# ---- filters with wildcards ------------------------------------------------------------------------------------------

CONTEXTS = [{}, {"domain": DOMAIN}, {"prefix": f"$JS.{DOMAIN}.API"}]


@pytest.mark.parametrize("context", CONTEXTS, ids=["default", "domain", "prefix"])
@on_both_drivers
async def test_a_named_consumer_may_filter_by_any_pattern(
    driver: Driver, in_domain: NatsServer, context: dict[str, Any]
) -> None:
    async with driver.connect(in_domain.url) as nc:
        js = nc.jetstream(**context)
        root = "-".join([driver.name, *context])
        stream = await js.create_stream(StreamConfig(name=f"W-{root}", subjects=[f"{root}.>"], storage="memory"))
        for subject in ("a", "b", "a.c", "b.c.d"):
            await js.publish(f"{root}.{subject}", subject.encode())
        wanted = {">": 4, "*": 2, "a.>": 1, "*.c": 1, "*.c.>": 1, "*.*.*": 1, "a": 1}
        for number, (pattern, count) in enumerate(wanted.items()):
            filter_subject = f"{root}.{pattern}"
            for config in (
                ConsumerConfig(durable_name=f"durable_name{number}", filter_subject=filter_subject),
                ConsumerConfig(name=f"name{number}", filter_subject=filter_subject),
            ):
                consumer = await stream.create_consumer(config)
                assert consumer.cached_info.config.filter_subject == filter_subject
                assert consumer.cached_info.pending == count
                assert len(await consumer.fetch(count, timeout=30)) == count
        # From one pattern to another, to several, and to none but the first again.
        one = ConsumerConfig(durable_name="moving", filter_subject=f"{root}.*")
        several = ConsumerConfig(durable_name="moving", filter_subjects=[f"{root}.*", f"{root}.*.c.>"])
        assert (await stream.create_or_update_consumer(one)).cached_info.pending == 2
        for change, pending in ((several, 3), (one, 2), (several, 3)):
            await stream.update_consumer(change)
            assert (await stream.consumer("moving")).cached_info.pending == pending
        again = await stream.update_consumer(ConsumerConfig(durable_name="durable_name0", description="kept filter"))
        assert again.cached_info.config.filter_subject == f"{root}.>"


@pytest.fixture(scope="module")
def leaf(tmp_path_factory: pytest.TempPathFactory, in_domain: NatsServer) -> Iterator[NatsServer]:
    """One with a domain of its own, from which the other's is reached."""
    config = domain_config("edge", tmp_path_factory.mktemp("edge"), in_domain)
    with NatsServer(jetstream=False, extra_config=config) as server:
        yield server


@on_both_drivers
async def test_a_bucket_of_another_domain_is_written_read_and_watched(driver: Driver, leaf: NatsServer) -> None:
    async with driver.connect(leaf.url) as nc:
        js = nc.jetstream(domain=DOMAIN)
        async with asyncio.timeout(30):
            while True:
                try:
                    await js.account_info()
                    kv = await js.create_kv(KVConfig(bucket=f"far-{driver.name}", history=3, storage="memory"))
                    break
                except jetspark.JetSparkError:  # the two servers have not found each other yet
                    await asyncio.sleep(0.05)
        first = await kv.put("a", b"1")
        await kv.update("a", b"2", revision=first)
        await kv.create("b", b"3")
        await kv.delete("b")
        async with kv.transaction() as tx:
            await tx.put("c", b"4")
            await tx.update("a", b"5", revision=2)
        with pytest.raises(jetspark.KeyExists):
            await kv.create("a", b"")
        assert [key async for key in kv.keys(">")] == ["c", "a"]
        assert [entry.value for entry in await kv.history("a")] == [b"1", b"2", b"5"]
        assert {key: entry.value for key, entry in (await kv.snapshot([">"])).items()} == {"a": b"5", "c": b"4"}
        # A copy on this side sends what is written to it over to the origin.
        here = nc.jetstream()
        origin = StreamSource(name=f"KV_{kv.bucket}", external=External(api_prefix=f"$JS.{DOMAIN}.API"))
        copy = await here.create_kv(KVConfig(bucket=f"near-{driver.name}", mirror=origin))
        await copy.put("d", b"6")
        assert (await kv.get("d")).value == b"6"


@on_both_drivers
async def test_a_message_still_goes_to_exactly_one_subject(driver: Driver, server: NatsServer) -> None:
    async with driver.connect(server.url) as nc:
        js = nc.jetstream()
        name = _name(driver, "ONE")
        stream = await js.create_stream(StreamConfig(name=name, subjects=[f"{name}.>"], storage="memory"))
        await stream.create_consumer(ConsumerConfig(durable_name="c", filter_subject=f"{name}.>"))
        for subject in (f"{name}.>", f"{name}.*", f"$JS.API.CONSUMER.CREATE.{name}.c.{name}.>"):
            with pytest.raises(jetspark.InvalidSubject):
                await nc.request(subject, b"")
            with pytest.raises(jetspark.InvalidSubject):
                await js.publish(subject, b"")


# ---- every field there and back ------------------------------------------------------------------------------------

NOON = datetime.datetime(2026, 1, 2, 12, 30, 15, 123456, tzinfo=datetime.UTC)
NEXT_YEAR = datetime.datetime.now(datetime.UTC).replace(microsecond=5) + datetime.timedelta(days=365)


@dataclass(frozen=True)
class Row:
    """A value that is not the server's default, and what has to be said beside it."""

    value: Any
    changed: Any = None
    """What an update may make of it; None where the server lets nobody change the field."""
    beside: dict[str, Any] = field(default_factory=dict)
    only_by_update: bool = False


# In a subject, NAME stands for the name of the stream.
SOURCE = StreamSource(
    name="ORIGIN",
    start_time=NOON,
    subject_transforms=[SubjectTransform(source="origin.*", destination="NAME.{{wildcard(1)}}")],
)
PUSHED = {"deliver_subject": "to.NAME"}
STREAM_ROWS = {
    "description": Row("what customers buy", "what they return"),
    "subjects": Row(["NAME.a.*", "NAME.b.>"], ["NAME.c"]),
    "retention": Row("interest", "limits"),
    "storage": Row("file"),
    "replicas": Row(1),  # more need a cluster
    "max_messages": Row(1000, -1),
    "max_messages_per_subject": Row(10, 20),
    "max_bytes": Row(1 << 20, 1 << 21),
    "max_age_s": Row(3600.5, 0),
    "max_message_bytes": Row(1000, 2**31 - 1),
    "max_consumers": Row(7),
    "discard": Row("new", "old"),
    "discard_new_per_subject": Row(True, False, {"discard": "new", "max_messages_per_subject": 5}),
    "duplicate_window_s": Row(12.5, 0.1),
    "allow_direct": Row(True, False),
    "mirror_direct": Row(True, None, {"mirror": StreamSource(name="ORIGIN"), "subjects": None}),
    "allow_rollup": Row(True, False),
    "allow_message_ttl": Row(True),
    "subject_delete_marker_ttl_s": Row(60, 1.5, {"allow_message_ttl": True}),
    "allow_atomic": Row(True, False),
    "allow_message_counter": Row(True),
    "allow_message_schedules": Row(True),
    "persist_mode": Row("async", None, {"storage": "file"}),
    "allow_batched": Row(True, False),
    "deny_delete": Row(True),
    "deny_purge": Row(True),
    "sealed": Row(True, None, only_by_update=True),
    "no_ack": Row(True, False),
    "mirror": Row(StreamSource(name="ORIGIN", start_sequence=17, filter_subject="origin.a"), None, {"subjects": None}),
    "sources": Row([SOURCE, StreamSource(name="OTHER", external=External(api_prefix="$JS.x.API"))], [SOURCE]),
    "subject_transform": Row(
        SubjectTransform(source="NAME.old.>", destination="NAME.new.>"),
        SubjectTransform(source="NAME.*", destination="NAME.x.{{wildcard(1)}}"),
    ),
    "republish": Row(
        Republish(source="NAME.>", destination="copy.NAME.>", headers_only=True),
        Republish(destination="all.NAME.>"),
    ),
    "placement": Row(Placement(cluster="east", tags=["ssd"])),
    "compression": Row("s2", "none", {"storage": "file"}),
    "first_sequence": Row(100),
    "consumer_limits": Row(
        ConsumerLimits(max_ack_pending=50, inactive_threshold_s=30), ConsumerLimits(max_ack_pending=60)
    ),
    "metadata": Row({"owner": "us"}, {"owner": "you", "more": ""}),
}
GROUP = {"priority_groups": ["jobs"], "priority_policy": "pinned_client"}
CONSUMER_ROWS = {
    "name": Row("NAME"),
    "durable_name": Row("NAME"),
    "description": Row("billing", "shipping"),
    "deliver_policy": Row("last_per_subject", None, {"filter_subject": "s.>"}),
    "start_sequence": Row(7),
    "start_time": Row(NOON),
    "filter_subject": Row("s.*.paid", "s.>"),
    "filter_subjects": Row(["s.a", "s.b.>"], ["s.c.*"]),
    "replay_policy": Row("original"),
    "headers_only": Row(True, False),
    "ack_policy": Row("all"),
    "ack_wait_s": Row(12.5, 60),
    "max_deliver": Row(4, 5),
    "backoff_s": Row([0.1, 1, 2.5], [1.0], {"max_deliver": 9}),
    "max_ack_pending": Row(77, -1),
    "sample_frequency": Row("50%", "100%"),
    "max_waiting": Row(5),
    "max_batch": Row(10, 20),
    "max_expires_s": Row(9, 0.001),
    "max_batch_bytes": Row(1000, 2000),
    "deliver_subject": Row("to.NAME", "to.NAME.too"),
    "deliver_group": Row("workers", None, PUSHED),
    "flow_control": Row(True, None, PUSHED | {"idle_heartbeat_s": 5}),
    "idle_heartbeat_s": Row(5, None, PUSHED),
    "rate_limit_bits_per_s": Row(1_000_000, 2_000_000, PUSHED),
    "inactive_threshold_s": Row(3600, 7200),
    "replicas": Row(1),  # more need a cluster
    "memory_storage": Row(True),
    "pause_until": Row(NEXT_YEAR),
    "priority_groups": Row(["jobs"], None, GROUP),
    "priority_policy": Row("overflow", None, {"priority_groups": ["jobs"]}),
    "priority_timeout_s": Row(7.25, None, GROUP),
    "metadata": Row({"owner": "us"}, {"owner": "you"}),
}
# The names of the same things in the stream behind a bucket, where they differ.
KV_NAMES = {
    "history": "max_messages_per_subject",
    "ttl_s": "max_age_s",
    "limit_marker_ttl_s": "subject_delete_marker_ttl_s",
    "max_value_bytes": "max_message_bytes",
}
KV_ROWS = {
    "description": Row("states", "more states"),
    "history": Row(5, 10),
    "ttl_s": Row(3600, 7200),
    "limit_marker_ttl_s": Row(60, 90),
    "max_bytes": Row(1 << 20, 1 << 21),
    "max_value_bytes": Row(1000, 2000),
    "storage": Row("memory"),
    "replicas": Row(1),
    "compression": Row("s2", "none"),
    "placement": Row(Placement(tags=["ssd"])),
    "republish": Row(Republish(source=">", destination="kvcopy.NAME.>")),
    "mirror": Row(StreamSource(name="KV_origin")),
    "sources": Row([StreamSource(name="KV_origin")]),
    "allow_atomic": Row(False, True),
    "allow_batched": Row(False, True),
    "metadata": Row({"owner": "us"}, {"owner": "you"}),
}
OBJECT_ROWS = {
    name: KV_ROWS[name]
    for name in ("description", "ttl_s", "max_bytes", "storage", "replicas", "compression", "placement", "metadata")
}


def holds(got: Any, sent: Any) -> bool:
    """Whether everything that was mentioned is there; the server may say more."""
    if dataclasses.is_dataclass(sent):
        values = {entry.name: getattr(sent, entry.name) for entry in dataclasses.fields(sent)}
        return got is not None and all(
            value in (None, {}, "") or holds(getattr(got, name), value) for name, value in values.items()
        )
    if isinstance(sent, Mapping):
        return all(got[key] == value for key, value in sent.items())
    if isinstance(sent, Sequence) and not isinstance(sent, str):
        return len(got) == len(sent) and all(map(holds, got, sent))
    # What is switched off, unlimited or zero, the server may leave out.
    return bool(got == sent or (got is None and sent in (False, 0, -1, "none", "limits", "old")))


def named(value: Any, name: str) -> Any:
    """The value with NAME replaced, however deep it stands."""
    if isinstance(value, str):
        return value.replace("NAME", name)
    if isinstance(value, list):
        return [named(each, name) for each in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {entry.name: getattr(value, entry.name) for entry in dataclasses.fields(value)}
        return dataclasses.replace(value, **{part: named(each, name) for part, each in parts.items() if part != "name"})
    return value


@pytest.mark.parametrize(
    ("kind", "rows", "key"),
    [
        (StreamConfig, STREAM_ROWS, "name"),
        (ConsumerConfig, CONSUMER_ROWS, ""),
        (KVConfig, KV_ROWS, "bucket"),
        (ObjectStoreConfig, OBJECT_ROWS, "bucket"),
    ],
)
def test_every_field_has_a_row(kind: Any, rows: dict[str, Row], key: str) -> None:
    assert set(rows) == {entry.name for entry in dataclasses.fields(kind)} - {"extra", key}


@on_both_drivers
async def test_every_field_of_a_stream_goes_there_and_back(driver: Driver, own: NatsServer) -> None:
    async with driver.connect(own.url) as nc:
        js = nc.jetstream()
        for name in ("ORIGIN", "OTHER"):
            # A mirror takes over whether its origin allows direct reading.
            await js.create_stream(StreamConfig(name=name, subjects=[f"{name.lower()}.>"], allow_direct=True))
        for entry, row in STREAM_ROWS.items():
            name = f"S-{entry}"
            value, changed = named(row.value, name), named(row.changed, name)
            beside = {"subjects": [f"{name}.>"], "storage": "memory"} | row.beside
            if row.only_by_update:
                stream = await js.create_stream(StreamConfig(name=name, **beside))
                await stream.update(**{entry: value})
            else:
                stream = await js.create_stream(StreamConfig(name=name, **(beside | {entry: value})))
            assert holds(getattr((await stream.info()).config, entry), value), entry
            if changed is not None:
                config = (await stream.update(**{entry: changed})).config
                assert holds(getattr(config, entry), changed), (entry, getattr(config, entry))
                assert (await stream.info()).config == config
            assert not (await stream.info()).config.extra, "a field this server has and StreamConfig has not"


@on_both_drivers
async def test_every_field_of_a_consumer_goes_there_and_back(driver: Driver, own: NatsServer) -> None:
    async with driver.connect(own.url) as nc:
        js = nc.jetstream()
        stream = await js.create_stream(StreamConfig(name="S", subjects=["s.>"], storage="memory"))
        for entry, row in CONSUMER_ROWS.items():
            name = f"c-{entry}"
            value, changed = named(row.value, name), named(row.changed, name)
            beside = {part: named(each, name) for part, each in row.beside.items()}
            fields = {"name": name} | beside | {entry: value}
            if entry == "durable_name":
                del fields["name"]
            await stream.create_consumer(ConsumerConfig(**fields))
            got = (await stream.consumer(name)).cached_info.config
            assert holds(getattr(got, entry), value), (entry, getattr(got, entry))
            if changed is not None:
                await stream.update_consumer(ConsumerConfig(name=name, **{entry: changed}))
                got = (await stream.consumer(name)).cached_info.config
                assert holds(getattr(got, entry), changed), (entry, getattr(got, entry))
            assert not got.extra, "a field this server has and ConsumerConfig has not"


@on_both_drivers
async def test_every_field_of_a_bucket_goes_there_and_back(driver: Driver, own: NatsServer) -> None:
    async with driver.connect(own.url) as nc:
        js = nc.jetstream()
        await js.create_kv(KVConfig(bucket="origin", storage="memory"))
        for entry, row in KV_ROWS.items():
            bucket = f"kv-{entry}"
            kv = await js.create_kv(KVConfig(bucket=bucket, **{entry: named(row.value, bucket)}))
            stored = KV_NAMES.get(entry, entry)
            got = getattr((await kv.status()).stream.config, stored)
            assert holds(got, named(row.value, bucket)), (entry, got)
            if row.changed is not None:
                kv = await js.create_or_update_kv(KVConfig(bucket=bucket, **{entry: row.changed}))
                assert holds(getattr((await kv.status()).stream.config, stored), row.changed), entry
        for entry, row in OBJECT_ROWS.items():
            bucket = f"obj-{entry}"
            await js.create_object_store(ObjectStoreConfig(bucket=bucket, **{entry: row.value}))
            got = getattr((await (await js.stream(f"OBJ_{bucket}")).info()).config, KV_NAMES.get(entry, entry))
            assert holds(got, row.value), (entry, got)


def test_another_client_reads_what_was_said(own: NatsServer) -> None:
    async def run() -> None:
        async with jetspark.connect(own.url) as nc:
            stream = await nc.jetstream().create_stream(
                StreamConfig(
                    name="SEEN",
                    subjects=["seen.>"],
                    retention="workqueue",
                    max_messages=17,
                    max_age_s=90.5,
                    duplicate_window_s=12.5,
                    republish=Republish(source="seen.>", destination="copy.>"),
                    compression="s2",
                    metadata={"owner": "us"},
                )
            )
            await stream.create_consumer(
                ConsumerConfig(
                    durable_name="c",
                    filter_subject="seen.*",
                    ack_wait_s=7.5,
                    max_deliver=5,
                    inactive_threshold_s=60,
                )
            )
        witness = await nats.connect(own.url)
        try:
            config = (await witness.jetstream().stream_info("SEEN")).config
            assert (config.retention, config.max_msgs, config.max_age) == ("workqueue", 17, 90.5)
            assert config.metadata is not None
            assert (config.duplicate_window, config.compression, config.metadata["owner"]) == (12.5, "s2", "us")
            assert config.republish is not None
            assert (config.republish.src, config.republish.dest) == ("seen.>", "copy.>")
            consumer = (await witness.jetstream().consumer_info("SEEN", "c")).config
            assert (consumer.filter_subject, consumer.ack_wait, consumer.max_deliver) == ("seen.*", 7.5, 5)
            assert (consumer.inactive_threshold, consumer.durable_name) == (60, "c")
        finally:
            await witness.close()

    asyncio.run(run())
