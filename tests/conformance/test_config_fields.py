"""Every field of every configuration, through both drivers to a real server and back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.drivers import Driver, on_both_drivers

import jetspark
from jetspark import ConsumerConfig, StreamConfig
from jetspark.server import NatsServer

DOMAIN = "hub"


@pytest.fixture(scope="module")
def in_domain() -> Iterator[NatsServer]:
    """Its API is reached as ``$JS.API``, by its domain, and below the same prefix."""
    with NatsServer(jetstream=False, extra_config=f"jetstream {{ domain: {DOMAIN} }}") as server:
        yield server


def _name(driver: Driver, text: str) -> str:
    """Streams of their own keep the drivers apart on one server."""
    return f"{text}_{driver.name}"


# ---- filters with wildcards ------------------------------------------------------------------------------------------

CONTEXTS = [{}, {"domain": DOMAIN}, {"prefix": f"$JS.{DOMAIN}.API"}]


@pytest.mark.parametrize("context", CONTEXTS, ids=["default", "domain", "prefix"])
@on_both_drivers
async def test_a_named_consumer_may_filter_by_any_pattern(
    driver: Driver, in_domain: NatsServer, context: dict[str, str]
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
            for kind in ("durable_name", "name"):
                config = ConsumerConfig(**{kind: f"{kind}{number}"}, filter_subject=filter_subject)
                consumer = await stream.create_consumer(config)
                assert consumer.cached_info.config.filter_subject == filter_subject
                assert consumer.cached_info.pending == count
                assert len(await consumer.fetch(count, timeout=5)) == count
        # From one pattern to another, to several, and to none but the first again.
        one = ConsumerConfig(durable_name="moving", filter_subject=f"{root}.*")
        several = ConsumerConfig(durable_name="moving", filter_subjects=[f"{root}.*", f"{root}.*.c.>"])
        assert (await stream.create_or_update_consumer(one)).cached_info.pending == 2
        for change, pending in ((several, 3), (one, 2), (several, 3)):
            await stream.update_consumer(change)
            assert (await stream.consumer("moving")).cached_info.pending == pending
        again = await stream.update_consumer(ConsumerConfig(durable_name="durable_name0", description="kept filter"))
        assert again.cached_info.config.filter_subject == f"{root}.>"


@on_both_drivers
async def test_a_message_still_goes_to_exactly_one_subject(driver: Driver, shared: NatsServer) -> None:
    async with driver.connect(shared.url) as nc:
        js = nc.jetstream()
        name = _name(driver, "ONE")
        stream = await js.create_stream(StreamConfig(name=name, subjects=[f"{name}.>"], storage="memory"))
        await stream.create_consumer(ConsumerConfig(durable_name="c", filter_subject=f"{name}.>"))
        for subject in (f"{name}.>", f"{name}.*", f"$JS.API.CONSUMER.CREATE.{name}.c.{name}.>"):
            with pytest.raises(jetspark.InvalidSubject):
                await nc.request(subject, b"")
            with pytest.raises(jetspark.InvalidSubject):
                await js.publish(subject, b"")
