"""What an application declares, how that differs from a server, and what is worth a look before there is one."""

import dataclasses
import random
import re
from typing import Any

import pytest

from jetspark.app import App, Command, Decision, Event, Past, Private, Setting, contract_of
from jetspark.app.causes import child_of, new_trace
from jetspark.app.checks.asyncapi import asyncapi
from jetspark.app.checks.lints import lint_apps
from jetspark.app.commands.command_spec import CommandMeta
from jetspark.app.contracts.event_ids import NewIds
from jetspark.app.handlers.consumers import handler_filters
from jetspark.app.topology.declared import (
    OWNER,
    DeclaredConsumer,
    Found,
    Step,
    Topology,
    TopologyPlan,
    inherit_advisories,
    inherit_replicas,
    plan_changes,
)
from jetspark.app.topology.names import is_bookkeeping
from jetspark.errors import ConfigError
from jetspark.jetstream.config import (
    ConsumerConfig,
    ConsumerLimits,
    External,
    StreamConfig,
    StreamSource,
    SubjectTransform,
)
from jetspark.jetstream.kv import KVConfig

# Classes that are made, not written: their metaclass, whose keywords mypy does not know.
EVENT_META: Any = type(Event)


class OrderPaid(Event, type="order.paid", key="order_id", subject="orders.paid.{order_id}"):
    order_id: str


class OrderPlaced(Event, type="order.placed", key="order_id", subject="orders.placed.{order_id}"):
    order_id: str


class OrderBilled(Event, type="order.billed", key="order_id", subject="orders.billed.{order_id}"):
    order_id: str


class Elsewhere(Event, type="else.where", subject="elsewhere.{name}"):
    name: str


def declared(**options: Any) -> App:
    return App("orders", **{"stream": "ORDERS", "subjects": ["orders.>"], **options})


# ---- declarations ----------------------------------------------------------------------------------------------------


def test_an_app_knows_the_events_it_is_given_and_those_of_its_handlers() -> None:
    app = declared(events=[OrderPlaced])

    @app.handler(OrderPaid, durable="billing")
    async def bill(event: OrderPaid) -> OrderBilled | None: ...

    assert [contract.kind for contract in app.catalogue] == [OrderBilled, OrderPaid, OrderPlaced]
    assert app.register(OrderPaid) is OrderPaid


def test_an_event_that_the_stream_does_not_store_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Elsewhere is published to 'elsewhere.\*', which stream ORDERS does not"):
        declared(events=[Elsewhere])
    app = declared()
    with pytest.raises(ConfigError, match="does not store"):
        app.register(Elsewhere)
    App("reader", stream="ORDERS").register(Elsewhere)  # the stream of somebody else


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"stream": StreamConfig(name="ORDERS", subjects=["a"])}, "with those of the StreamConfig"),
        ({"source": ""}, "expected a URI reference"),
        ({"stream": StreamConfig(name="ORDERS", duplicate_window_s=0)}, r"duplicate_window_s=0: .* 0.1 or more"),
        ({"compatibility": "SOME"}, "expected one of NONE"),
        ({"events": [int]}, "int is not an event type"),
    ],
)
def test_a_declaration_that_cannot_be_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        declared(**options)


def test_a_topology_follows_from_what_is_declared() -> None:
    app = declared(stream=StreamConfig(name="ORDERS", max_age_s=3600, allow_atomic=False), buckets=["prices"])
    bare = app.topology()
    assert [stream.name for stream in bare.streams] == ["ORDERS"]
    assert [bucket.bucket for bucket in bare.buckets] == ["prices", "orders_schemas"]
    main = bare.streams[0]
    assert (main.max_age_s, main.allow_atomic, main.allow_batched, main.allow_direct) == (3600, False, True, True)
    assert main.metadata == bare.buckets[0].metadata == {OWNER: "orders"}

    @app.handler(OrderPaid, OrderPlaced, durable="billing", ack_wait_s=10, max_messages=7)
    async def bill(event: OrderPaid | OrderPlaced) -> None: ...

    @app.handler(OrderPaid, durable="mail")
    async def mail(event: OrderPaid) -> None: ...

    full = app.topology()
    assert [stream.name for stream in full.streams] == ["ORDERS", "ORDERS_DLQ", "ORDERS_RETRY", "ORDERS_ADVISORIES"]
    assert [bucket.bucket for bucket in full.buckets] == ["prices", "orders_schemas", "orders_handlers"]
    consumers = {(place.stream, place.name): place.config for place in full.consumers}
    assert sorted(consumers) == [
        ("ORDERS", "billing"),
        ("ORDERS", "mail"),
        ("ORDERS_ADVISORIES", "orders-billing"),
        ("ORDERS_ADVISORIES", "orders-mail"),
        ("ORDERS_RETRY", "billing"),
        ("ORDERS_RETRY", "mail"),
    ]
    billing = consumers["ORDERS", "billing"]
    # Several filters with wildcards would cost the server milliseconds for each message.
    assert (billing.filter_subject, billing.filter_subjects) == (">", None)
    assert (billing.ack_wait_s, billing.max_ack_pending, billing.ack_policy) == (10, 56, "explicit")
    assert consumers["ORDERS", "mail"].filter_subject == "orders.paid.*"


def test_the_stream_of_another_app_is_read_and_not_made() -> None:
    app = App("billing", stream="ORDERS")
    assert not app.spec.owns_stream

    @app.handler(OrderPaid, durable="billing")
    async def bill(event: OrderPaid) -> None: ...

    topology = app.topology()
    assert [stream.name for stream in topology.streams] == ["BILLING_DLQ", "BILLING_RETRY", "BILLING_ADVISORIES"]
    assert [bucket.bucket for bucket in topology.buckets] == ["billing_handlers"]


class Statuses:
    def key(self, event: OrderPaid) -> str:
        return event.order_id

    def apply(self, state: dict[str, Any] | None, event: OrderPaid) -> dict[str, Any]:
        return {"paid": True}


class Noting:
    def react(self, state: dict[str, Any] | None, event: OrderPaid) -> Decision:
        return Decision(state={})


def everything(**config: Any) -> App:
    """An application with one of everything that needs something of its own on the server."""
    stream = StreamConfig(name="KV_shop", subjects=["orders.>"], **config)
    own = KVConfig(bucket="own", replicas=5)
    app = App("orders", stream=stream, buckets=["prices", own], timers=True)

    @app.handler(OrderPaid, durable="billing", idempotent="transaction", bucket="balances")
    async def bill(event: OrderPaid) -> None: ...

    @app.handler(OrderPaid, durable="parts", partitions=2)
    async def divide(event: OrderPaid) -> None: ...

    app.projection("statuses", events=[OrderPaid], bucket="states")(Statuses)
    app.settings("flags", currency=Setting(str, "USD"))
    app.workflow("noting", key="order_id", events=[OrderPaid])(Noting)
    return app


def test_everything_an_app_declares_is_as_safe_as_its_stream() -> None:
    topology = everything(replicas=3).topology()
    replicas = {each.name: each.replicas for each in topology.streams}
    replicas |= {each.bucket: each.replicas for each in topology.buckets}
    assert replicas == {
        **dict.fromkeys(["KV_shop", "ORDERS_DLQ", "ORDERS_RETRY", "ORDERS_ADVISORIES", "ORDERS_parts_PARTITIONS"], 3),
        **dict.fromkeys(["prices", "flags", "balances", "states"], 3),
        **dict.fromkeys(["orders_schemas", "orders_handlers", "orders_projections"], 3),
        "own": 5,  # its owner said so
    }
    # Not mentioned is the server's default, a disk.
    assert {each.storage for each in topology.streams} == {each.storage for each in topology.buckets} == {None}
    unsaid = everything().topology()
    assert {each.replicas for each in unsaid.streams} | {each.replicas for each in unsaid.buckets} == {None, 5}


def test_more_replicas_are_a_safe_change_of_everything() -> None:
    def server_has(app: App) -> dict[str, StreamConfig]:
        made = [*app.topology().streams, *(each.to_stream() for each in app.topology().buckets)]
        return {each.name: dataclasses.replace(each, storage="file", replicas=each.replicas or 1) for each in made}

    found, declared = Found(streams=server_has(everything())), everything(replicas=3).topology()
    steps = [step for step in plan_changes(declared, found).steps if step.kind != "consumer"]
    assert len(steps) == len(declared.streams) + len(declared.buckets) - 1
    assert {str(change) for step in steps for change in step.changes} == {"replicas: 1 -> 3"}
    assert {step.safety for step in steps} == {"safe"}


def test_where_the_app_says_nothing_of_replicas_the_servers_stream_counts() -> None:
    app = App("billing", stream="ORDERS", buckets=["prices", KVConfig(bucket="own", replicas=1)])

    @app.handler(OrderPaid, durable="billing")
    async def bill(event: OrderPaid) -> None: ...

    found = Found(streams={"ORDERS": STREAM, "KV_prices": StreamConfig(name="KV_prices", replicas=5)})
    inherited = inherit_replicas(app.topology(), found)
    assert {each.name: each.replicas for each in inherited.streams} == dict.fromkeys(
        ["BILLING_DLQ", "BILLING_RETRY", "BILLING_ADVISORIES"], 3
    )
    # What has more, or was said, stays as it is.
    assert {each.bucket: each.replicas for each in inherited.buckets} == {
        "prices": None,
        "own": 1,
        "billing_handlers": 3,
    }
    assert inherit_replicas(app.topology(), Found()) == app.topology()
    alone, two = (Found(streams={"ORDERS": dataclasses.replace(STREAM, replicas=count)}) for count in (1, 2))
    assert {each.replicas for each in inherit_replicas(app.topology(), alone).streams} == {None}
    assert {each.replicas for each in inherit_replicas(app.topology(), two).streams} == {2}
    own = declared()
    assert inherit_replicas(own.topology(), found).streams[0].replicas is None  # the stream itself is as it is


def test_an_app_stores_the_advisories_about_its_own_consumers() -> None:
    app = App("billing", stream="ORDERS")

    @app.handler(OrderPaid, durable="mail")
    async def mail(event: OrderPaid) -> None: ...

    @app.handler(OrderPaid, durable="parts", partitions=2)
    async def divide(event: OrderPaid) -> None: ...

    def about(stream: str, consumer: str) -> set[str]:
        prefix = "$JS.EVENT.ADVISORY.CONSUMER"
        return {f"{prefix}.{kind}.{stream}.{consumer}" for kind in ("MSG_TERMINATED", "MAX_DELIVERIES")}

    topology = app.topology()
    [stream] = [each for each in topology.streams if each.name == "BILLING_ADVISORIES"]
    # Of the stream that others read too, its own consumer alone: another app stores those of its own.
    of_mail, of_parts = about("ORDERS", "mail"), about("BILLING_parts_PARTITIONS", "*")
    retries = about("BILLING_RETRY", "*")
    assert set(stream.subjects or ()) == of_mail | of_parts | retries
    assert (stream.max_age_s, stream.max_bytes, stream.discard) == (30 * 86400, 32 << 20, "old")
    consumers = {place.name: place.config for place in topology.consumers if place.stream == stream.name}
    assert {name: set(each.filter_subjects or ()) for name, each in consumers.items()} == {
        "billing-mail": of_mail | retries,
        "billing-parts": of_parts | retries,
    }


def test_the_stream_of_advisories_keeps_those_of_the_handlers_of_other_versions() -> None:
    of_mail, of_old = (f"$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.ORDERS.{name}" for name in ("mail", "old"))
    advisories = StreamConfig(name="ADVISORIES", subjects=[of_mail], max_age_s=5)
    others = [
        StreamConfig(name="ORDERS", subjects=["orders.>"]),
        StreamConfig(name="MIXED", subjects=["mixed.>", of_mail]),
        StreamConfig(name="COPY"),
        StreamConfig(name="NEW", subjects=["$JS.EVENT.NEW"]),
    ]
    declared = Topology(app="billing", streams=[advisories, *others])

    def found(subjects: list[str] | None) -> Found:
        names = ("ADVISORIES", "ORDERS", "MIXED", "COPY")
        return Found(streams={name: StreamConfig(name=name, subjects=subjects) for name in names})

    inherited = inherit_advisories(declared, found([of_old, of_mail, "letters.>"]))
    assert inherited.streams == [dataclasses.replace(advisories, subjects=[of_mail, of_old]), *others]
    assert inherit_advisories(declared, found(None)).streams == declared.streams
    assert inherit_advisories(declared, Found()).streams == declared.streams


def test_advisories_that_another_stream_stores_are_read_there() -> None:
    def app(**options: Any) -> App:
        app = App("billing", stream="ORDERS", **options)
        app.handler(OrderPaid, durable="mail")(_nothing)
        return app

    audit = StreamConfig(name="AUDIT", subjects=["$JS.EVENT.ADVISORY.>"])
    topology = app().topology()
    taken = {subject: ["AUDIT"] for each in topology.streams for subject in each.subjects or () if "$JS." in subject}
    found = Found(streams={"ORDERS": STREAM, "AUDIT": audit}, others=taken)
    [conflict] = plan_changes(topology, found).refused(allow=True)
    assert (conflict.kind, conflict.name) == ("stream", "BILLING_ADVISORIES")
    assert "App(advisories='AUDIT') reads them there" in str(conflict)

    there = app(advisories="AUDIT").topology()
    assert "BILLING_ADVISORIES" not in [each.name for each in there.streams]
    assert plan_changes(there, found).refused(allow=True) == []
    deaf = dataclasses.replace(audit, subjects=["$JS.EVENT.ADVISORY.STREAM.>"])
    [conflict] = plan_changes(there, Found(streams={"ORDERS": STREAM, "AUDIT": deaf})).refused(allow=True)
    assert "AUDIT does not store '$JS.EVENT.ADVISORY.CONSUMER.MSG_TERMINATED.ORDERS.mail'" in str(conflict)


PARTS: dict[tuple[str, ...], tuple[set[str], set[str], set[str]]] = {
    ("billing",): (
        {"ORDERS", "SHOP_DLQ", "SHOP_RETRY", "SHOP_ADVISORIES"},
        {"shop_schemas", "shop_handlers"},
        {"billing", "shop-billing"},
    ),
    ("paying",): (
        {"ORDERS", "SHOP_DLQ", "SHOP_RETRY", "SHOP_ADVISORIES", "SHOP_paying_PARTITIONS"},
        {"shop_schemas", "shop_handlers", "effects"},
        {"paying-p0", "paying-p1", "shop-paying"},
    ),
    ("status",): ({"ORDERS", "SHOP_DLQ"}, {"shop_schemas", "shop_projections", "status"}, set()),
    ("orders.place",): ({"ORDERS"}, {"shop_schemas"}, set()),
    ("orders.look",): (
        {"ORDERS", "SHOP_DLQ"},
        {"shop_schemas", "shop_projections", "status"},
        set(),
    ),
}


@pytest.mark.parametrize("only", PARTS)
def test_some_of_an_application_need_only_what_is_theirs(only: tuple[str, ...]) -> None:
    app = App("shop", stream="ORDERS", subjects=["orders.>"], buckets=["other"])

    @app.handler(OrderPaid, durable="billing")
    async def bill(event: OrderPaid) -> None: ...

    @app.handler(OrderPaid, durable="paying", idempotent="transaction", bucket="effects", partitions=2)
    async def pay(event: OrderPaid) -> None: ...

    @app.projection("status", events=[OrderPaid], bucket="status")
    class Status:
        def key(self, event: OrderPaid) -> str:
            return event.order_id

        def apply(self, state: Any, event: OrderPaid) -> Any:
            return {}

    class Place(Command):
        def reads(self) -> list[str]:
            return ["orders.x.>"]

        def decide(self, past: Past) -> None: ...

    class Look(Place):
        def snapshot_key(self) -> str:
            return "x"

    app.command("orders.place")(Place)
    app.command("orders.look", snapshot="status")(Look)
    whole, part = app.topology(), app.topology(only)
    streams, buckets, consumers = PARTS[only]
    assert {each.name for each in part.streams} == streams
    assert {each.bucket for each in part.buckets} == buckets
    assert {each.name for each in part.consumers} == consumers
    for found, every in (
        (part.streams, whole.streams),
        (part.buckets, whole.buckets),
        (part.consumers, whole.consumers),
    ):
        assert all(each in every for each in found)
    assert {each.bucket for each in whole.buckets} >= {"other", "effects", "status"}


@pytest.mark.parametrize(
    ("subject", "is_ours"),
    [
        ("$KV.shop_handlers.parked.billing.o-1", True),
        ("dlq.shop.billing.o-1.ORDERS.1.1", True),
        ("retry.shop.billing.wait.ORDERS.1.1", True),
        ("$JS.ACK.ORDERS.billing.1.1.1.1.0", True),
        ("$JS.ACK.hub.x7.ORDERS.billing.1.1.1.1.0", True),
        ("$JS.ACK.ORDERS2.billing.1.1.1.1.0", False),
        ("$KV.shop_handlers2.x", False),
        ("dlq.shopping.x", False),
        ("orders.o-1.billed", False),
        ("timers.shop.x", False),
    ],
)
def test_what_a_worker_publishes_for_itself_is_told_from_what_its_handler_does(subject: str, is_ours: bool) -> None:
    assert is_bookkeeping("shop", ["ORDERS", "SHOP_RETRY"], subject) == is_ours


def test_nothing_is_declared_twice() -> None:
    with pytest.raises(ConfigError, match="app 'orders' declares bucket orders_schemas twice"):
        declared(buckets=["orders_schemas"]).topology()


# ---- the difference --------------------------------------------------------------------------------------------------

STREAM = StreamConfig(
    name="ORDERS",
    subjects=["orders.>"],
    storage="file",
    max_age_s=3600,
    max_bytes=-1,
    replicas=3,
    allow_direct=True,
    deny_delete=True,
    retention="limits",
    metadata={OWNER: "orders"},
)
CONSUMER = ConsumerConfig(
    durable_name="billing",
    filter_subjects=["orders.paid.*", "orders.placed.*"],
    ack_policy="explicit",
    deliver_policy="all",
    max_deliver=-1,
    ack_wait_s=30,
)


PARTITIONS = SubjectTransform(source="orders.*", destination="orders.{{partition(4,1)}}")


def differ(found: StreamConfig | None, others: dict[str, list[str]] | None = None, **changes: Any) -> TopologyPlan:
    wanted = dataclasses.replace(STREAM, **changes)
    return plan_changes(
        Topology(app="orders", streams=[wanted]),
        Found(streams={} if found is None else {found.name: found}, others=others or {}),
    )


def test_what_is_as_declared_needs_nothing() -> None:
    plan = differ(STREAM)
    assert plan.is_empty
    assert str(plan) == "nothing to do: the server has what 'orders' declares"
    assert differ(
        dataclasses.replace(STREAM, description="by hand", metadata={OWNER: "orders", "_nats.ver": "2"})
    ).is_empty


def test_what_is_missing_is_made() -> None:
    [step] = differ(None, storage=None, max_bytes=None, replicas=None, deny_delete=None, retention=None).steps
    assert (step.action, step.safety) == ("create", "safe")
    assert str(step).splitlines() == [
        "+ stream ORDERS",
        "    subjects: [orders.>]",
        "    max_age_s: 3600",
        "    allow_direct: True",
        "    metadata: {jetspark-app=orders}",
    ]


@pytest.mark.parametrize(
    ("changes", "safety"),
    [
        ({"subjects": ["orders.>", "more.>"]}, "safe"),
        ({"subjects": ["orders.new.>"]}, "destructive"),
        ({"max_age_s": 7200}, "safe"),
        ({"max_age_s": 60}, "destructive"),
        ({"max_age_s": 0}, "safe"),
        ({"max_bytes": 100}, "destructive"),
        ({"max_messages": 1}, "destructive"),
        ({"replicas": 5}, "safe"),
        ({"replicas": 1}, "destructive"),
        ({"storage": "memory"}, "impossible"),
        ({"retention": "workqueue"}, "impossible"),
        ({"retention": "interest"}, "destructive"),
        ({"allow_direct": False}, "destructive"),
        ({"allow_batched": True}, "safe"),
        ({"deny_delete": False}, "impossible"),
        ({"deny_purge": True}, "safe"),
        ({"duplicate_window_s": 60}, "destructive"),
        ({"duplicate_window_s": 600}, "safe"),
        ({"description": "Orders."}, "safe"),
        ({"metadata": {OWNER: "orders", "team": "shop"}}, "safe"),
        ({"compression": "s2"}, "safe"),
        ({"allow_message_schedules": True}, "safe"),
        ({"sealed": True}, "destructive"),
        ({"sources": [StreamSource(name="ORDERS")]}, "safe"),
        ({"sources": [StreamSource(name="ORDERS", subject_transforms=[PARTITIONS])]}, "impossible"),
        ({"subject_transform": PARTITIONS}, "safe"),
    ],
)
def test_a_change_of_a_stream_is_safe_destructive_or_impossible(changes: dict[str, Any], safety: str) -> None:
    existing = dataclasses.replace(STREAM, duplicate_window_s=120.0)
    plan = differ(existing, **changes)
    [step] = plan.steps
    assert (step.action, step.safety) == ("update", safety)
    assert [change.name for change in step.changes] == list(changes)
    assert plan.refused(allow=False) == ([] if safety == "safe" else [step])
    assert plan.refused(allow=True) == ([step] if safety == "impossible" else [])
    if safety != "safe":
        assert f"[{safety}: " in str(plan)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_bytes": 0},
        {"allow_batched": False},
        {"compression": "none"},
        {"subjects": ["orders.>"]},
        {"max_age_s": 3600.0},
        {"max_messages": 0},
        {"max_messages": -1},
        {"sources": []},
        {"description": ""},
        {"max_age_s": 3600.0000000001},
        {"consumer_limits": ConsumerLimits(inactive_threshold_s=0)},
    ],
)
def test_what_only_looks_different_needs_nothing(changes: dict[str, Any]) -> None:
    assert differ(STREAM, **changes).is_empty


def test_the_order_of_subjects_makes_no_difference() -> None:
    assert differ(dataclasses.replace(STREAM, subjects=["b", "a"]), subjects=["a", "b"]).is_empty


@pytest.mark.parametrize(("found", "changed"), [((1, 5), []), ([5, 1], ["backoff_s"]), (None, ["backoff_s"])])
def test_the_order_of_pauses_makes_a_difference(found: Any, changed: list[str]) -> None:
    place = DeclaredConsumer("ORDERS", dataclasses.replace(CONSUMER, max_deliver=5, backoff_s=[1, 5]))
    existing = dataclasses.replace(place.config, backoff_s=found)
    steps = plan_changes(
        Topology(app="orders", consumers=[place]),
        Found(streams={"ORDERS": STREAM}, consumers={("ORDERS", "billing"): existing}),
    ).steps
    assert [change.name for step in steps for change in step.changes] == changed


@pytest.mark.parametrize("source", [StreamSource(name="SHOP"), StreamSource(name="TILL")])
def test_a_source_that_nobody_made_is_a_conflict(source: StreamSource) -> None:
    [step] = differ(STREAM, sources=[source]).refused(allow=True)
    assert f"stream {source.name} to copy from does not exist; apply the app that declares it first" in str(step)
    elsewhere = dataclasses.replace(source, external=External(api_prefix="$JS.shop.API"))
    assert differ(STREAM, sources=[elsewhere]).refused(allow=True) == []


def test_what_a_handler_would_read_from_the_beginning_again_is_a_conflict() -> None:
    topology = Topology(app="orders", streams=[STREAM], consumers=[DeclaredConsumer("ORDERS", CONSUMER)])
    former = {"ORDERS": "consumer a of A", "billing of ORDERS": "stream B"}
    steps = plan_changes(topology, Found(former=former)).refused(allow=True)
    assert [str(step) for step in steps] == [
        f"! {name}: until now the handler read {before}: it would handle every event of the stream again. Give it "
        "another durable, or delete what it read once that is wanted"
        for name, before in (
            ("stream ORDERS", "consumer a of A"),
            ("consumer billing of ORDERS", "stream B"),
        )
    ]
    there = Found(streams={"ORDERS": STREAM}, consumers={("ORDERS", "billing"): CONSUMER}, former=former)
    assert plan_changes(topology, there).is_empty


def test_a_subject_of_another_stream_is_a_conflict() -> None:
    plan = differ(None, {"orders.>": ["SHOP"]})
    [step] = plan.refused(allow=True)
    assert str(step) == "! stream ORDERS: stream SHOP stores 'orders.>' already: a subject belongs to one stream"
    assert differ(STREAM, {"orders.>": ["ORDERS"]}).is_empty


def test_what_belongs_to_another_app_is_a_conflict() -> None:
    [step] = differ(dataclasses.replace(STREAM, metadata={OWNER: "shop"})).refused(allow=True)
    assert "it belongs to app 'shop'" in str(step)


@pytest.mark.parametrize(
    ("changes", "safety"),
    [
        ({"filter_subjects": ["orders.paid.*", "orders.placed.*", "orders.lost.*"]}, "safe"),
        ({"filter_subjects": ["orders.paid.*"]}, "destructive"),
        ({"ack_wait_s": 60}, "safe"),
        ({"ack_wait_s": 10}, "safe"),
        ({"deliver_policy": "new"}, "impossible"),
        ({"ack_policy": "none"}, "impossible"),
        ({"max_deliver": 5}, "destructive"),
    ],
)
def test_a_change_of_a_consumer_is_safe_destructive_or_impossible(changes: dict[str, Any], safety: str) -> None:
    place = DeclaredConsumer("ORDERS", dataclasses.replace(CONSUMER, **changes))
    [step] = plan_changes(
        Topology(app="orders", consumers=[place]),
        Found(streams={"ORDERS": STREAM}, consumers={("ORDERS", "billing"): CONSUMER}),
    ).steps
    assert (step.kind, step.name, step.safety) == ("consumer", "billing of ORDERS", safety)


@pytest.mark.parametrize(
    ("stream", "options", "filters"),
    [
        ({}, {"filtered": True}, ["orders.paid.*", "orders.placed.*"]),
        ({}, {"filtered": False}, [">"]),
        ({}, {"partitions": 2}, ["orders.paid.*", "orders.placed.*"]),
        ({"retention": "workqueue"}, {}, ["orders.paid.*", "orders.placed.*"]),
        ({"subjects": None}, {}, ["orders.paid.*", "orders.placed.*"]),
        ({"subjects": None}, {"filtered": False}, [">"]),
    ],
)
def test_a_handler_reads_the_whole_stream_only_where_that_takes_nothing_from_others(
    stream: dict[str, Any], options: Any, filters: list[str]
) -> None:
    app = App("orders", stream=StreamConfig(**({"name": "ORDERS", "subjects": ["orders.>"]} | stream)))

    @app.handler(OrderPaid, OrderPlaced, durable="billing", **options)
    async def bill(event: OrderPaid | OrderPlaced) -> None: ...

    @app.handler(OrderPaid, durable="mail")
    async def mail(event: OrderPaid) -> None: ...

    assert handler_filters(app.spec, app.handlers["billing"]) == filters
    assert handler_filters(app.spec, app.handlers["mail"]) == ["orders.paid.*"]


def test_passing_by_messages_of_others_must_not_remove_them() -> None:
    app = App("orders", stream=StreamConfig(name="ORDERS", subjects=["orders.>"], retention="interest"))
    with pytest.raises(ConfigError, match="retention='interest': passing by"):
        app.handler(OrderPaid, durable="billing", filtered=False)(_nothing)
    with pytest.raises(ConfigError, match="filtered=False with partitions="):
        app.handler(OrderPaid, durable="billing", filtered=False, partitions=2)(_nothing)


async def _nothing(event: OrderPaid) -> None: ...


def test_a_wider_filter_loses_nothing() -> None:
    place = DeclaredConsumer("ORDERS", ConsumerConfig(durable_name="billing", filter_subject=">"))
    existing = ConsumerConfig(durable_name="billing", filter_subject="orders.placed.*")
    for found in (existing, ConsumerConfig(durable_name="billing", filter_subjects=["orders.paid.*", "orders.a"])):
        [step] = plan_changes(
            Topology(app="orders", consumers=[place]),
            Found(streams={"ORDERS": StreamConfig(name="ORDERS")}, consumers={("ORDERS", "billing"): found}),
        ).steps
        assert [change.safety for change in step.changes] == ["safe"]


def test_one_filter_for_several_is_a_change() -> None:
    place = DeclaredConsumer("ORDERS", ConsumerConfig(durable_name="billing", filter_subject="orders.paid.*"))
    existing = ConsumerConfig(durable_name="billing", filter_subject="orders.placed.*")
    found = Found(streams={"ORDERS": STREAM}, consumers={("ORDERS", "billing"): existing})
    [step] = plan_changes(Topology(app="orders", consumers=[place]), found).steps
    assert step.safety == "destructive"


def test_a_consumer_of_a_stream_that_nobody_made_is_a_conflict() -> None:
    place = DeclaredConsumer("ORDERS", CONSUMER)
    [step] = plan_changes(Topology(app="billing", consumers=[place]), Found()).refused(allow=True)
    assert "stream ORDERS does not exist and is not this app's" in str(step)
    [step] = plan_changes(Topology(app="billing", consumers=[place]), Found(streams={"ORDERS": STREAM})).steps
    assert step.action == "create"


def test_a_bucket_is_compared_by_what_is_said_of_it() -> None:
    def plan(wanted: KVConfig, existing: KVConfig) -> tuple[Step, ...]:
        found = Found(streams={f"KV_{existing.bucket}": existing.to_stream()})
        return plan_changes(Topology(app="orders", buckets=[wanted]), found).steps

    state = KVConfig(bucket="state", history=5, ttl_s=60)
    assert plan(state, state) == ()
    assert plan(KVConfig(bucket="state"), state) == ()
    # As a client of another language makes them.
    old = dataclasses.replace(state.to_stream(), allow_direct=False, discard="old", duplicate_window_s=120)
    assert plan_changes(Topology(app="orders", buckets=[state]), Found(streams={"KV_state": old})).is_empty
    [step] = plan(KVConfig(bucket="state", history=1), state)
    assert (step.kind, step.safety, step.changes[0].name) == ("bucket", "destructive", "max_messages_per_subject")
    [step] = plan(KVConfig(bucket="other"), state)
    assert step.action == "create"


# ---- lints -----------------------------------------------------------------------------------------------------------


def define(
    type_: str = "order.paid", subject: str = "orders.paid.{order_id}", key: str | None = "order_id", **fields: Any
) -> Any:
    annotations = fields or {"order_id": str}
    namespace = {"__annotations__": annotations, "__module__": __name__}
    return EVENT_META("Defined", (Event,), namespace, type=type_, key=key, subject=subject)


def rules(*apps: App) -> list[tuple[str, str]]:
    return [(lint.level, lint.rule) for lint in lint_apps(apps)]


def test_an_app_without_mistakes_has_no_lints() -> None:
    assert lint_apps([declared(events=[OrderPaid, OrderPlaced])]) == []


@pytest.mark.parametrize(
    ("event", "rule"),
    [
        (define("order.pay"), ("warning", "imperative_type")),
        (define("order.processed"), ("warning", "ambiguous_type")),
        (define("Order.paid"), ("warning", "type_case")),
        (define(subject="orders.Paid.{order_id}"), ("warning", "subject_case")),
        (define(key=None), ("warning", "no_key")),
        (define(order_id=int), ("warning", "number_id")),
        (define(order_id=str, someName=str, other_name=str), ("warning", "field_style")),
        (define(order_id=Private[str]), ("error", "private_in_subject")),
    ],
)
def test_a_mistake_in_an_event_is_found(event: Any, rule: tuple[str, str]) -> None:
    assert rules(declared(events=[event])) == [rule]


def test_events_that_no_filter_tells_apart_are_found() -> None:
    found = lint_apps(
        [declared(events=[OrderPaid, define("order.settled", "orders.paid.x", None), define("a.b", "orders.x")])]
    )
    assert {lint.rule for lint in found} == {"subject_depth", "no_key", "subject_overlap"}
    assert any("no filter tells them apart" in str(lint) for lint in found)


def test_a_stream_that_takes_everything_or_keeps_nothing_is_found() -> None:
    assert rules(App("orders", stream="ORDERS", subjects=[">"])) == [("warning", "broad_subject")]
    queue = StreamConfig(name="ORDERS", subjects=["orders.>"], retention="workqueue")
    assert rules(App("orders", stream=queue)) == [("warning", "no_history")]


class Place(Command):
    def reads(self) -> list[str]:
        return ["orders.x"]

    def decide(self, past: Past) -> None: ...


def test_what_commands_should_not_be_is_found() -> None:
    def with_command(name: str, kind: type[Command], **fields: Any) -> App:
        app = App("orders", stream=StreamConfig(name="ORDERS", subjects=["orders.>"], **fields), events=[OrderPaid])
        app.command(name)(CommandMeta(kind.__name__, (kind,), {}))
        return app

    assert rules(with_command("orders.place", Place)) == []
    assert rules(with_command("orders.placed", Place)) == [("warning", "past_tense_command")]
    assert rules(with_command("order.paid", Place)) == [("error", "command_and_event")]
    assert rules(with_command("orders.place", Place, max_age_s=3600)) == [("warning", "commands_forget")]
    assert rules(with_command("orders.place", Place, allow_atomic=False)) == [("error", "no_atomic")]
    other = App("audit", stream="AUDIT", subjects=["cmd.>"])
    found = [lint.rule for lint in lint_apps([with_command("orders.place", Place), other])]
    assert found == ["command_stored"]


def test_a_declaration_that_does_not_hold_is_found() -> None:
    app = declared()

    @app.handler(Elsewhere, durable="billing")
    async def bill(event: Elsewhere) -> None: ...

    assert rules(app) == [("error", "declaration")]
    assert rules(App("orders", stream="ORDERS", subjects=["dlq.orders.x"])) == []
    other = App("orders", stream="ORDERS", subjects=["dlq.>", "orders.>"])

    @other.handler(OrderPaid, durable="billing")
    async def bill_too(event: OrderPaid) -> None: ...

    assert rules(other) == [("error", "stream_overlap")]


def test_what_two_apps_both_claim_is_found() -> None:
    assert rules(declared(), declared()) == [("error", "app_name"), ("error", "stream_owner")]
    shop = App("shop", stream="SHOP", subjects=["orders.paid.*"], buckets=["prices"], events=[define()])
    assert rules(declared(buckets=["prices"], events=[OrderPaid]), shop) == [
        ("error", "bucket_owner"),
        ("error", "stream_overlap"),
        ("error", "type_owner"),
    ]
    assert rules(declared(events=[OrderPaid]), App("reader", stream="ORDERS", events=[OrderPaid])) == []


# ---- AsyncAPI --------------------------------------------------------------------------------------------------------


class Tree(Event, type="tree.grown", key="name", subject="orders.trees.{name}"):
    name: str
    children: "list[Tree]" = []


def _references(value: Any) -> list[str]:
    if isinstance(value, dict):
        own = [value["$ref"]] if isinstance(value.get("$ref"), str) else []
        return own + [each for inner in value.values() for each in _references(inner)]
    return [each for inner in value for each in _references(inner)] if isinstance(value, list) else []


def test_the_asyncapi_document_describes_channels_messages_and_operations() -> None:
    app = declared(events=[OrderPlaced, Tree])

    @app.handler(OrderPaid, durable="billing")
    async def bill(event: OrderPaid) -> None: ...

    document = asyncapi(app, version="2.1.0")
    assert document["asyncapi"] == "3.0.0"
    assert document["info"] == {"title": "orders", "version": "2.1.0"}
    assert asyncapi(App("orders", stream="ORDERS", version="3.2.1"))["info"]["version"] == "3.2.1"
    assert document["channels"]["orders.paid.order_id"]["address"] == "orders.paid.{order_id}"
    assert sorted(document["operations"]) == [
        "receive.billing.order.paid.v1",
        "send.order.paid.v1",
        "send.order.placed.v1",
        "send.tree.grown.v1",
    ]
    message = document["components"]["messages"]["order.paid.v1"]
    assert message["payload"]["properties"]["type"] == {"const": "order.paid"}
    references = _references(document)
    assert "#/components/schemas/tree.grown.v1.Tree" in references
    for reference in references:
        found: Any = document
        for name in reference.removeprefix("#/").split("/"):
            found = found[name]
    keys = [*document["channels"], *document["operations"], *document["components"]["schemas"]]
    assert all(re.fullmatch(r"[a-zA-Z0-9._-]+", key) for key in keys)


# ---- ids and causes --------------------------------------------------------------------------------------------------


def test_ids_are_uuids_that_grow() -> None:
    ids = NewIds(random.Random(1).getrandbits)
    now = 1_774_000_000_000_000_000
    made = [ids.new(now + step * 300_000) for step in range(200)]
    made += [ids.new(now) for _ in range(10)]  # the clock goes back
    assert made == sorted(set(made))
    assert all(
        re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", each) for each in made
    )
    assert int(made[0].replace("-", "")[:12], 16) == 1_774_000_000_000


def test_a_trace_goes_on_and_a_wrong_one_begins_anew() -> None:
    bits = random.Random(1).getrandbits
    form = r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]"
    begun = new_trace(bits)
    assert re.fullmatch(form, begun)
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    child = child_of(trace, bits)
    assert re.fullmatch(form, child)
    assert (child[:36], child[-3:]) == (trace[:36], "-01")
    assert child != trace
    for wrong in (None, "", "trace", trace.upper(), "00-" + "0" * 32 + "-00f067aa0ba902b7-01"):
        assert re.fullmatch(form, child_of(wrong, bits))


def test_a_contract_knows_the_id_that_a_class_gives() -> None:
    class Natural(Event, type="natural"):
        name: str

        def event_id(self) -> str:
            return f"natural-{self.name}"

    found = contract_of(Natural).id_of
    assert found is not None
    assert found(Natural(name="a")) == "natural-a"
    assert contract_of(OrderPaid).id_of is None
    assert OrderPaid(order_id="o-1").event_id() is None
