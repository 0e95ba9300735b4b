"""How keys are divided, who reads which part, and what room each reader has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspark.app import App, Event
from jetspark.app.handlers.lanes import WorkItem
from jetspark.app.handlers.machine import Credit, HandlerLimits, HandlerMachine
from jetspark.app.handlers.partitions import assign, copied_from, partition_transforms, without_server_headers
from jetspark.app.handlers.retry import RetryPolicy
from jetspark.app.handlers.room import Room
from jetspark.core.headers import Headers
from jetspark.errors import ConfigError, ProtocolError
from jetspark.testing.model.sourcing import partition_of

names = st.sets(st.text("abcdef0123456789", min_size=1, max_size=8), min_size=1, max_size=9)


@given(names, st.integers(1, 64))
def test_every_partition_has_one_reader_and_shares_differ_by_one(members: set[str], partitions: int) -> None:
    shares = assign(members, partitions)
    assert sorted(each for share in shares.values() for each in share) == list(range(partitions))
    sizes = [len(share) for share in shares.values()]
    assert len(sizes) == len(members)
    assert max(sizes) - min(sizes) <= 1


@given(names, st.integers(1, 64))
def test_who_reads_what_depends_on_the_names_alone(members: set[str], partitions: int) -> None:
    assert assign(sorted(members), partitions) == assign(sorted(members, reverse=True), partitions)


def test_a_worker_that_joins_moves_few_partitions() -> None:
    before = assign(["a", "b", "c"], 60)
    after = assign(["a", "b", "c", "d"], 60)
    stayed = sum(len(set(before[name]) & set(after[name])) for name in before)
    assert stayed >= 35  # 45 is what an omniscient mover would leave where it is


def test_nobody_reads_where_nobody_is() -> None:
    assert assign([], 4) == {}


class Placed(Event, type="placed", key="order_id", subject="orders.{order_id}.placed"):
    order_id: str


class Paid(Event, type="paid", key="{tenant}.{order_id}", subject="pay.{tenant}.of.{order_id}"):
    tenant: str
    order_id: str


class Bare(Event, type="bare", key="name", subject="bare"):
    name: str


def test_subjects_get_the_partition_of_their_key() -> None:
    [placed, paid] = partition_transforms("shop", "h", 8, [Placed, Paid], None)
    assert (placed.source, placed.destination) == (
        "orders.*.placed",
        "parts.shop.h.{{partition(8,1)}}.orders.{{wildcard(1)}}.placed",
    )
    assert paid.destination == "parts.shop.h.{{partition(8,1,2)}}.pay.{{wildcard(1)}}.of.{{wildcard(2)}}"
    [by_order] = partition_transforms("shop", "h", 8, [Paid], "order_id")
    assert "partition(8,2)" in by_order.destination


def test_a_key_that_the_server_cannot_see_is_refused_at_once() -> None:
    app = App("shop", stream="SHOP", subjects=["orders.>", "pay.>", "bare"])

    async def handle(event: Bare) -> None: ...

    with pytest.raises(ConfigError, match=r"needs the key of Bare in its subject 'bare'.*its key is name"):
        app.handler(Bare, durable="h", partitions=4)(handle)

    async def place(event: Placed) -> None: ...

    with pytest.raises(ConfigError, match="a function as key"):
        app.handler(Placed, durable="h", partitions=4, key=lambda event: event.order_id)(place)
    with pytest.raises(ConfigError, match="in_order=True"):
        app.handler(Placed, durable="h", partitions=4, in_order=False)(place)
    with pytest.raises(ConfigError, match="partitions=0: expected 1 to 256"):
        app.handler(Placed, durable="h", partitions=0)(place)
    with pytest.raises(ConfigError, match=r"takeover_s=0\.5: expected seconds, 1 or more"):
        app.handler(Placed, durable="h", partitions=4, takeover_s=0.5)(place)
    with pytest.raises(ConfigError, match="max_messages=63 with partitions=4: expected 64 or more"):
        app.handler(Placed, durable="h", partitions=4, max_messages=63)(place)


def test_a_copy_says_where_it_comes_from() -> None:
    headers = Headers(
        {"Nats-Stream-Source": "SHOP 12 orders.*.placed x orders.o-1.placed h", "Nats-Pin-Id": "p", "a": "b"}
    )
    assert copied_from(headers, "parts.shop.h.3.orders.o-1.placed") == ("SHOP", 12, "orders.o-1.placed")
    assert without_server_headers(headers) == Headers({"a": "b"})
    with pytest.raises(ProtocolError, match="no Nats-Stream-Source"):
        copied_from(Headers(), "parts.shop.h.3.orders.o-1.placed")


def test_the_hash_is_the_servers() -> None:
    assert [partition_of(text, 8) for text in ("k1", "", "o-1")] == [1, 5, 0]


# ---- room ------------------------------------------------------------------------------------------------------------


def machine_of(**limits: object) -> HandlerMachine:
    return HandlerMachine(HandlerLimits(**limits), RetryPolicy(), lambda: 0.5)  # type: ignore[arg-type]


def test_a_retry_that_is_released_twice_gives_its_room_back_once() -> None:
    machine = HandlerMachine(HandlerLimits(max_messages=16), RetryPolicy(), lambda: 0.0)
    room, retry = Room(machine), WorkItem(None, 1, size_bytes=10)
    room.add_retry(retry)
    room.drop_retry(retry)
    free = room.free("retries", 1)
    room.drop_retry(retry)
    assert room.free("retries", 1) == free
    assert room.of_stream == 0


def test_pulls_never_ask_for_the_same_room() -> None:
    machine = machine_of(max_messages=80, max_bytes=8000)
    room = Room(machine)
    assert room.free("stream", 1) == Credit(70, 7000)
    assert room.free("stream", 2) == Credit(35, 3500)
    with room.taken("stream", Credit(60, 6000)) as hold:
        assert room.free("stream", 2) == Credit(10, 1000)
        hold.resize(Credit(1, 100))
        assert room.free("stream", 2) == Credit(35, 3500)
    assert room.free("retries", 1) == Credit(10, 1000)


# ---- what is no longer ours ------------------------------------------------------------------------------------------


def test_an_item_the_server_has_not_heard_of_is_let_go_and_waited_for() -> None:
    machine = machine_of(ack_wait_s=30.0)
    first, second, other = WorkItem("a", 1), WorkItem("a", 2), WorkItem("b", 3)
    for item in (first, second, other):
        machine.receive(item, 100.0)
    second.heard_at = other.heard_at = 125.0
    assert machine.take(131.0) is other
    assert machine.lapsed == [first]
    assert machine.lanes.expected == [1]
    machine.receive(WorkItem("a", 1, delivered=2), 132.0)
    taken = machine.take(132.0)
    assert taken is not None
    assert taken.sequence == 1


def test_what_waits_for_a_retry_can_be_let_go() -> None:
    machine = machine_of(concurrency=4)
    first, second = WorkItem("a", 1), WorkItem("a", 2)
    machine.receive(first, 0.0)
    machine.receive(second, 0.0)
    assert machine.take(0.0) is first
    machine.wait_here(first, 5.0, 0.0)
    machine.release(first)
    assert machine.held == 1
    assert machine.take(6.0) is second
