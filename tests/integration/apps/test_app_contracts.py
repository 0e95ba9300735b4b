"""An application and a real server: what it declares is made or refused, what it publishes is read by others."""

from __future__ import annotations

import asyncio
import importlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
from support.certificates import make_certificates
from support.credentials import USER
from support.patience import PATIENCE_S
from typer.testing import CliRunner

from jetspark import ConsumerConfig, JetStream, KVConfig, StreamConfig, errors
from jetspark.app import App, Event, decode, unchanged, upcast
from jetspark.app.causes import Cause, current_cause
from jetspark.app.contracts.contract_records import record_of
from jetspark.app.contracts.registry import ContractRegistry, read_registry
from jetspark.app.provisioning import apply_topology, check_for_drift, make_plan
from jetspark.cli.commands import app as commands
from jetspark.core.auth import public_key
from jetspark.jetstream.config import ConsumerLimits, Republish, StreamSource
from jetspark.server import NatsServer, Permissions, ServerTLS, User

# Connections of tests that are not about time: a server on a busy machine may answer late.
PATIENT: Any = {"connect_timeout_s": PATIENCE_S, "request_timeout_s": PATIENCE_S}


class OrderPaid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    amount_cents: int


class OrderPlaced(Event, type="order.placed", key="order_id", subject="orders.{order_id}.placed"):
    order_id: str

    def event_id(self) -> str:
        return f"placed-{self.order_id}"


class Paid2(Event, type="order.paid", version=2, key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    amount_cents: int
    currency: str = "EUR"


upcast(Paid2, from_version=1)(unchanged)


class Changed(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    amount: str


def make_app(*events: type[Event], **options: Any) -> App:
    app = App(
        "orders", **{"stream": "ORDERS", "subjects": ["orders.>"], "source": "/shop", "events": events, **options}
    )

    @app.handler(*(events or (OrderPaid,)), durable="billing")
    async def bill(event: Any) -> None: ...

    return app


async def test_what_an_app_declares_is_made_once(server: NatsServer, js: JetStream) -> None:
    app = make_app(OrderPaid)
    planned = await app.plan(server.url)
    assert {step.action for step in planned.steps} == {"create"}
    assert [name async for name in js.stream_names()] == []
    assert await app.apply(server.url) == planned
    assert (await app.plan(server.url)).is_empty
    assert (await app.apply(server.url)).is_empty
    await check_for_drift(js, app)
    consumer = await (await js.stream("ORDERS")).consumer("billing")
    assert consumer.cached_info.config.filter_subject == "orders.*.paid"
    assert sorted(await read_registry(js, "orders_schemas")) == [("order.paid", 1)]


async def test_versions_with_other_handlers_run_side_by_side(server: NatsServer, js: JetStream) -> None:
    old, new = make_app(OrderPaid), App("orders", stream="ORDERS", subjects=["orders.>"], source="/shop")

    @new.handler(OrderPaid, durable="mail")
    async def mail(event: Any) -> None: ...

    await old.apply(server.url)
    assert [step.name for step in (await new.apply(server.url)).steps] == [
        "ORDERS_ADVISORIES",
        "mail of ORDERS",
        "mail of ORDERS_RETRY",
        "orders-mail of ORDERS_ADVISORIES",
    ]
    for app in (old, new):
        await check_for_drift(js, app)  # one that ends while the other is rolled out starts again
        assert (await app.apply(server.url)).is_empty
    subjects = (await js.stream("ORDERS_ADVISORIES")).cached_info.config.subjects or []
    assert {each.rsplit(".", 1)[-1] for each in subjects} == {"billing", "mail", "*"}


async def test_two_that_apply_at_the_same_time_agree(js: JetStream) -> None:
    app = make_app(OrderPaid)
    await asyncio.gather(*(apply_topology(js, app) for _ in range(4)))
    assert (await make_plan(js, app)).is_empty


class Place(msgspec.Struct, frozen=True):
    at: tuple[int, int] = (0, 0)


class OrderPacked(Event, type="order.packed", key="order_id", subject="orders.{order_id}.packed"):
    order_id: str
    labels: tuple[str, ...] = ()
    sizes: tuple[tuple[int, ...], ...] = ((1, 2),)
    place: Place = Place()


async def test_defaults_that_json_has_in_another_form_are_no_change(server: NatsServer, js: JetStream) -> None:
    app = make_app(OrderPacked)
    await app.apply(server.url)
    await check_for_drift(js, app)
    assert (await app.plan(server.url)).is_empty


async def test_a_change_by_hand_is_drift_and_is_mended(server: NatsServer, js: JetStream) -> None:
    app = make_app(OrderPaid, stream=StreamConfig(name="ORDERS", max_age_s=3600))
    await apply_topology(js, app)
    stream = await js.stream("ORDERS")
    await stream.update(max_age_s=600)
    await stream.update_consumer(ConsumerConfig(durable_name="billing", ack_wait_s=5))
    with pytest.raises(errors.TopologyDrift) as caught:
        await check_for_drift(js, app)
    assert caught.value.steps == (
        "~ stream ORDERS\n    max_age_s: 600.0 -> 3600",
        "~ consumer billing of ORDERS\n    ack_wait_s: 5.0 -> 30.0",
    )
    assert len((await app.apply(server.url)).steps) == 2
    await check_for_drift(js, app)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_age_s": 3600 / 7},
        {"duplicate_window_s": 0.1 + 0.2},
        {"description": ""},
        {"republish": Republish(destination="copies.>")},
        {"republish": Republish(source="orders.>", destination="copies.>", headers_only=False)},
        {"consumer_limits": ConsumerLimits(inactive_threshold_s=0)},
        {"consumer_limits": ConsumerLimits(max_ack_pending=50_000)},
        {"sources": [StreamSource(name="OTHER", filter_subject="")]},
    ],
    ids=str,
)
async def test_what_the_server_writes_in_another_way_is_no_difference(
    server: NatsServer, js: JetStream, fields: dict[str, Any]
) -> None:
    await js.create_stream(StreamConfig(name="OTHER", subjects=["other.>"]))
    app = make_app(OrderPaid, stream=StreamConfig(name="ORDERS", **fields))
    await app.apply(server.url)
    assert (await app.plan(server.url)).is_empty
    changed = {"description": "by hand", "duplicate_window_s": 60, "max_age_s": 60}
    await (await js.stream("ORDERS")).update(consumer_limits=ConsumerLimits(inactive_threshold_s=60), **changed)
    await app.apply(server.url, allow=True)
    await check_for_drift(js, app)


async def test_a_wait_for_acknowledgements_that_is_no_whole_nanosecond_is_no_difference(
    server: NatsServer, js: JetStream
) -> None:
    app = App("orders", stream="ORDERS", subjects=["orders.>"])

    @app.handler(OrderPaid, durable="billing", ack_wait_s=100 / 3)
    async def bill(event: OrderPaid) -> None: ...

    await app.apply(server.url)
    await check_for_drift(js, app)


async def test_metadata_of_others_stays_when_something_else_is_changed(server: NatsServer, js: JetStream) -> None:
    await make_app(OrderPaid, buckets=["prices"]).apply(server.url)
    orders, prices = await js.stream("ORDERS"), await js.stream("KV_prices")
    consumer = await orders.consumer("billing")
    for stream in (orders, prices):
        await stream.update(metadata={**(stream.cached_info.config.metadata or {}), "team": "shop"})
    metadata = {**(consumer.cached_info.config.metadata or {}), "team": "shop"}
    await orders.update_consumer(ConsumerConfig(durable_name="billing", ack_wait_s=5, metadata=metadata))
    changed = StreamConfig(name="ORDERS", description="Orders.", metadata={"mine": "1"})
    app = make_app(OrderPaid, stream=changed, buckets=[KVConfig(bucket="prices", history=5)])
    assert len((await app.apply(server.url)).steps) == 3
    found: list[Any] = [await js.stream("ORDERS"), await js.stream("KV_prices"), await orders.consumer("billing")]
    assert [(each.cached_info.config.metadata or {}).get("team") for each in found] == ["shop"] * 3
    assert (found[0].cached_info.config.metadata or {})["mine"] == "1"


async def test_what_can_lose_something_needs_to_be_allowed(server: NatsServer, js: JetStream) -> None:
    await make_app(OrderPaid).apply(server.url)
    shorter = make_app(OrderPaid, stream=StreamConfig(name="ORDERS", max_age_s=600))
    with pytest.raises(errors.TopologyRefused, match=r"max_age_s: .*what is beyond the new limit is deleted"):
        await shorter.apply(server.url)
    assert not (await js.stream("ORDERS")).cached_info.config.max_age_s
    await shorter.apply(server.url, allow=True)
    assert (await js.stream("ORDERS")).cached_info.config.max_age_s == 600


async def test_an_age_below_the_duplicate_window_shortens_the_window(server: NatsServer, js: JetStream) -> None:
    await make_app(OrderPaid).apply(server.url)
    shortest = make_app(OrderPaid, stream=StreamConfig(name="ORDERS", max_age_s=60))
    with pytest.raises(errors.TopologyRefused, match="ids are forgotten earlier"):
        await shortest.apply(server.url)
    await shortest.apply(server.url, allow=True)
    assert (await js.stream("ORDERS")).cached_info.config.duplicate_window_s == 60
    assert (await shortest.plan(server.url)).is_empty


async def test_what_the_server_cannot_change_is_refused_before_anything_is_done(
    server: NatsServer, js: JetStream
) -> None:
    await make_app(OrderPaid).apply(server.url)
    memory = make_app(OrderPaid, OrderPlaced, stream=StreamConfig(name="ORDERS", storage="memory"))
    with pytest.raises(errors.TopologyRefused, match=r"storage: file -> memory  \[impossible"):
        await memory.apply(server.url, allow=True)
    assert sorted(await read_registry(js, "orders_schemas")) == [("order.paid", 1)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"retention": "limits"}, {"retention": "workqueue"}),
        ({"retention": "workqueue"}, {"retention": "limits"}),
        ({"deny_delete": True}, {"deny_delete": False}),
        ({"deny_purge": True}, {"deny_purge": False}),
        ({"allow_message_ttl": True}, {"allow_message_ttl": False}),
        ({"allow_message_schedules": True}, {"allow_message_schedules": False}),
    ],
    ids=str,
)
async def test_what_the_server_never_takes_back_is_refused_by_the_plan(
    server: NatsServer, js: JetStream, before: dict[str, Any], after: dict[str, Any]
) -> None:
    await make_app(OrderPaid, stream=StreamConfig(name="ORDERS", **before)).apply(server.url)
    changed = make_app(OrderPaid, stream=StreamConfig(name="ORDERS", **after))
    with pytest.raises(errors.TopologyRefused, match=rf"{next(iter(after))}: .*\[impossible: .*another name"):
        await changed.apply(server.url, allow=True)


async def test_a_subject_of_another_stream_is_told_before_the_server_refuses(server: NatsServer, js: JetStream) -> None:
    await js.create_stream(StreamConfig(name="SHOP", subjects=["orders.new.>"]))
    with pytest.raises(errors.TopologyRefused, match=r"stream SHOP stores 'orders.>' already"):
        await make_app(OrderPaid).apply(server.url)


async def test_an_app_does_not_start_on_a_server_that_differs(server: NatsServer, js: JetStream) -> None:
    app = App("orders", stream="ORDERS", subjects=["orders.>"])
    handled = asyncio.Event()

    @app.handler(OrderPaid, durable="billing")
    async def bill(event: OrderPaid) -> None:
        assert current_cause.get() is not None
        handled.set()

    with pytest.raises(errors.TopologyDrift, match=r"(?s)jetspark apply.*\+ stream ORDERS"):
        await app.run(server.url)
    running = asyncio.create_task(app.run(server.url, apply=True))
    try:
        async with app.connect(server.url) as orders:
            while not handled.is_set():
                try:
                    await orders.publish(OrderPaid(order_id="o-1", amount_cents=1))
                except errors.JetStreamUnavailable:
                    continue  # the stream is being made
                await asyncio.wait_for(handled.wait(), 60)
    finally:
        running.cancel()
        await asyncio.wait([running])


# ---- contracts -------------------------------------------------------------------------------------------------------


async def test_a_recorded_contract_never_changes(server: NatsServer, js: JetStream) -> None:
    await make_app(OrderPaid).apply(server.url)
    with pytest.raises(errors.TopologyRefused, match=r"! contract order.paid version 1: .*make it version 2"):
        await make_app(Changed).apply(server.url, allow=True)
    registry = ContractRegistry(await js.kv("orders_schemas"))
    assert await registry.add(record_of(OrderPaid.__contract__, "/other")) is False
    with pytest.raises(errors.ContractFrozen, match=r"'order.paid' version 1 .*\n.* properties.amount"):
        await registry.add(record_of(Changed.__contract__, "/shop"))


async def test_a_new_version_is_recorded_if_the_old_one_can_be_read(server: NatsServer, js: JetStream) -> None:
    await make_app(OrderPaid).apply(server.url)
    await make_app(Paid2).apply(server.url)
    assert sorted(await read_registry(js, "orders_schemas")) == [("order.paid", 1), ("order.paid", 2)]
    with pytest.raises(errors.TopologyRefused, match="its largest example cannot be read"):
        await make_app(OrderPaid).apply(server.url)  # older code than what is recorded


async def test_a_bucket_that_is_not_there_holds_no_contracts(js: JetStream) -> None:
    assert await read_registry(js, "nothing") == {}


# ---- publishing ------------------------------------------------------------------------------------------------------


async def test_an_event_is_published_and_read_by_another_client(server: NatsServer, js: JetStream) -> None:
    app = make_app(OrderPaid)
    await app.apply(server.url)
    async with app.connect(server.url) as orders:
        ack = await orders.publish(OrderPaid(order_id="o.1", amount_cents=500))
        again = await orders.publish(OrderPaid(order_id="o.1", amount_cents=500), id="evt-1", correlation_id="req-1")
        twice = await orders.publish(OrderPaid(order_id="o.1", amount_cents=500), id="evt-1")
    assert (ack.sequence, again.sequence, twice.sequence, twice.duplicate) == (1, 2, 2, True)
    nc = await nats.connect(server.url)
    try:
        message = await nc.jetstream().get_msg("ORDERS", 2)
    finally:
        await nc.close()
    assert message.subject == "orders.o=2E1.paid"
    body = json.loads(message.data or b"")
    assert body.pop("time").endswith("Z")
    assert body == {
        "specversion": "1.0",
        "id": "evt-1",
        "source": "/shop",
        "type": "order.paid",
        "subject": "o.1",
        "datacontenttype": "application/json",
        "schemaversion": 1,
        "correlationid": "req-1",
        "data": {"order_id": "o.1", "amount_cents": 500},
    }
    assert sorted(message.headers or {}) == ["Nats-Msg-Id", "traceparent"]


async def test_an_event_of_another_client_is_read(js: JetStream, server: NatsServer) -> None:
    app = make_app(OrderPaid)
    await app.apply(server.url)
    nc = await nats.connect(server.url)
    try:
        headers = {"ce-specversion": "1.0", "ce-id": "evt-9", "ce-source": "/else", "ce-type": "order.paid"}
        await nc.jetstream().publish("orders.o-1.paid", b'{"order_id":"o-1","amount_cents":5}', headers=headers)
    finally:
        await nc.close()
    [message] = await (await (await js.stream("ORDERS")).consumer("billing")).fetch(1, timeout=30)
    decoded = decode(message.subject, message.data, message.raw_headers, app.catalogue)
    assert (decoded.event, decoded.id) == (OrderPaid(order_id="o-1", amount_cents=5), "evt-9")


async def test_what_is_published_while_handling_names_its_cause(server: NatsServer, js: JetStream) -> None:
    app = make_app(OrderPaid, OrderPlaced)
    await app.apply(server.url, **PATIENT)
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with app.connect(server.url, **PATIENT) as orders:
        token = current_cause.set(Cause("evt-1", "req-1", trace))
        await orders.publish(OrderPlaced(order_id="o-1"))
        async with orders.bulk() as bulk:
            await bulk.publish_many([OrderPlaced(order_id="o-2"), OrderPaid(order_id="o-2", amount_cents=1)])
            await bulk.publish(OrderPlaced(order_id="o-3"), id="given")
        current_cause.reset(token)
        stored = [message async for message in _messages(orders.js, 4)]
    read = [decode(message.subject, message.data, message.raw_headers, app.catalogue) for message in stored]
    assert [each.id for each in read][:2] == ["placed-o-1", "placed-o-2"]
    assert read[3].id == "given"
    for each in read:
        assert (each.causation_id, each.correlation_id) == ("evt-1", "req-1")
        assert each.traceparent is not None
        assert each.traceparent.startswith(trace[:36])
        assert each.traceparent != trace


async def _messages(js: JetStream, count: int) -> AsyncIterator[Any]:
    # An ephemeral consumer is gone after five seconds in which a busy machine had no time for it.
    config = ConsumerConfig(ack_policy="none", inactive_threshold_s=PATIENCE_S)
    consumer = await (await js.stream("ORDERS")).create_consumer(config)
    for message in await consumer.fetch(count, timeout=PATIENCE_S, fill=True):
        yield message


async def test_a_bulk_is_stored_in_order_and_each_event_once(server: NatsServer, js: JetStream) -> None:
    app = make_app(OrderPaid)
    await app.apply(server.url)
    events = [OrderPaid(order_id=f"o-{number}", amount_cents=number) for number in range(1000)]

    async def coming() -> AsyncIterator[OrderPaid]:
        for each in events[500:]:
            yield each

    async with app.connect(server.url) as orders:
        async with orders.bulk() as bulk:
            assert await bulk.publish_many(events[:500]) == 500
            assert await bulk.publish_many(coming()) == 1000
        with pytest.raises(errors.InvalidEvent):
            async with orders.bulk() as bulk:
                await bulk.publish_many([OrderPaid(order_id="o-1", amount_cents="many")])  # type: ignore[arg-type]
    read = [decode(each.subject, each.data, each.raw_headers, app.catalogue) async for each in _messages(js, 1000)]
    assert [each.event for each in read] == events
    assert len({each.id for each in read}) == 1000


async def test_what_cannot_be_published_is_refused_before_it_is_sent(server: NatsServer, js: JetStream) -> None:
    class Elsewhere(Event, type="else.where"):
        name: str

    app = make_app(OrderPaid)
    await app.apply(server.url)
    client = app.connect(server.url)
    with pytest.raises(errors.UsageError, match=r"async with app.connect"):
        await client.publish(OrderPaid(order_id="o-1", amount_cents=1))
    async with client as orders:
        with pytest.raises(errors.InvalidEvent, match="field 'amount_cents'"):
            await orders.publish(OrderPaid(order_id="o-1", amount_cents=None))  # type: ignore[arg-type]
        with pytest.raises(errors.ConfigError, match="Elsewhere is not declared"):
            await orders.publish(Elsewhere(name="a"))
    assert (await js.stream("ORDERS")).cached_info.state.messages == 0


# ---- the command line ------------------------------------------------------------------------------------------------

MODULE = """
from jetspark.app import App, Event

class OrderPaid(Event, type="order.paid", key="order_id", subject="orders.paid.{order_id}"):
    order_id: str
    amount_cents: int

app = App("orders", stream="ORDERS", subjects=["orders.>"], source="/shop", events=[OrderPaid])
"""


@pytest.fixture
def shell(server: NatsServer, js: JetStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The command in this process: exit code, and what it printed. ``module`` replaces the application."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments: str, module: str | None = None, **environment: str) -> tuple[int, str]:
        if module is not None or not (tmp_path / "orders.py").exists():
            (tmp_path / "orders.py").write_text(module or MODULE, encoding="utf-8")
        sys.modules.pop("orders", None)
        importlib.invalidate_caches()
        for folder in tmp_path.glob("__pycache__/*"):
            folder.unlink()
        done = CliRunner().invoke(commands, list(arguments), env={"JETSPARK_SERVERS": server.url, **environment})
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, done.output

    yield run
    sys.modules.pop("orders", None)


def test_plan_and_apply_from_the_shell(shell: Any) -> None:
    code, text = shell("plan", "orders:app")
    assert code == 3
    assert "+ stream ORDERS" in text
    code, text = shell("apply", "orders:app", "--json")
    assert code == 0
    assert {step["action"] for step in json.loads(text)["steps"]} == {"create"}
    assert shell("plan", "orders:app") == (0, "nothing to do: the server has what 'orders' declares\n")
    code, text = shell(
        "apply", "orders:app", module=MODULE.replace('subjects=["orders.>"]', 'subjects=["orders.paid.*"]')
    )
    assert code == 3
    assert "orders.> is no longer stored" in text
    for name, reason in (
        ("orders:nothing", "'nothing' was not found; apps in orders: app"),
        ("orders:OrderPaid", "'OrderPaid' is not an App"),
        ("nothing:app", "module 'nothing' was not found"),
        ("orders", "expected MODULE:APP"),
    ):
        with pytest.raises(errors.ConfigError, match=reason):
            shell("plan", name)


def test_an_error_of_the_command_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jetspark", "plan", "nothing:app"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        f"jetspark: 'nothing:app': module 'nothing' was not found in {tmp_path} or on Python's path"
    ]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("import nothing_there\n", ["ModuleNotFoundError: No module named 'nothing_there'"]),
        ("def broken(:\n", ["SyntaxError: invalid syntax"]),
        ("import sys\nsys.exit()\n", ["SystemExit"]),
        ("raise SystemExit(7)\n", ["SystemExit: 7"]),
        ("app.stream_of_dreams\n", ["AttributeError: 'App' object has no attribute 'stream_of_dreams'"]),
        (
            "class Paid(app_module.Event, type='paid', key='id', subject='o.{id}'):\n    id: str\n    price: float\n",
            ["price", "float"],
        ),
    ],
)
def test_a_module_that_cannot_be_imported_is_told_where_the_user_wrote_it(
    shell: Any, wrong: str, told: list[str]
) -> None:
    with pytest.raises(errors.ConfigError) as info:
        shell("check", "orders:app", module=f"import jetspark.app as app_module\n{MODULE}\n{wrong}")
    first, *lines = str(info.value).splitlines()
    assert first == "'orders:app': importing it failed:"
    assert [each for each in lines if "orders.py" in each], lines
    assert not [each for each in lines if "importlib" in each or "jetspark/cli" in each or "typer" in each], lines
    assert all(each in "\n".join(lines[1:]) for each in told), lines


def test_schemas_from_the_shell(shell: Any, tmp_path: Path) -> None:
    assert shell("schema", "fixtures", "orders:app", "golden")[0] == 0
    golden = (tmp_path / "golden" / "order.paid.v1.json").read_bytes()
    assert shell("schema", "check", "orders:app", "--golden", "golden")[0] == 0
    code, text = shell("schema", "check", "orders:app")
    assert (code, text.splitlines()[-1]) == (0, "1 contract, BACKWARD_TRANSITIVE: 0 broken, 1 not recorded yet")
    assert json.loads(shell("schema", "asyncapi", "orders:app")[1])["asyncapi"] == "3.0.0"
    changed = MODULE.replace("amount_cents: int", "amount_cents: str")
    code, text = shell("schema", "diff", "orders:app", "--golden", "golden", module=changed)
    assert code == 3
    assert '~ properties.amount_cents.type: "integer" -> "string"' in text
    code, text = shell("schema", "check", "orders:app", "--golden", "golden", "--json")
    assert code == 3
    assert {finding["rule"] for finding in json.loads(text)} == {"changed", "not_readable"}
    assert shell("schema", "fixtures", "orders:app", "golden")[0] == 3
    assert (tmp_path / "golden" / "order.paid.v1.json").read_bytes() == golden


def test_a_folder_of_golden_files_that_cannot_be_used_is_told(shell: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for command in ("check", "diff"):
        for folder in ("goldn", "file"):
            with pytest.raises(errors.ConfigError, match=f"--golden {folder}: the folder does not exist"):
                shell("schema", command, "orders:app", "--golden", folder)
    with pytest.raises(errors.ConfigError, match="file/golden: expected a folder that can be written to: Not a dir"):
        shell("schema", "fixtures", "orders:app", "file/golden")
    (tmp_path / "golden" / "order.paid.v1.json").mkdir(parents=True)
    with pytest.raises(errors.ConfigError, match="expected a golden file that can be read: Is a directory"):
        shell("schema", "check", "orders:app", "--golden", "golden")


def test_check_from_the_shell(shell: Any) -> None:
    assert shell("check", "orders:app") == (0, "0 errors, 0 warnings\n")
    code, text = shell("check", "orders:app", module=MODULE.replace('"order.paid"', '"order.pay"'))
    assert (code, text.splitlines()[-1]) == (0, "0 errors, 1 warning")
    assert shell("check", "orders:app", "--strict")[0] == 3
    assert json.loads(shell("check", "orders:app", "--json")[1])[0]["rule"] == "imperative_type"


def test_the_server_of_the_selected_nats_context_is_used(shell: Any, server: NatsServer, tmp_path: Path) -> None:
    folder = tmp_path / "config" / "nats"
    (folder / "context").mkdir(parents=True)
    (folder / "context.txt").write_text("here", encoding="utf-8")
    (folder / "context" / "here.json").write_text(json.dumps({"url": server.url}), encoding="utf-8")
    options = {"JETSPARK_SERVERS": "", "XDG_CONFIG_HOME": str(tmp_path / "config")}
    assert shell("plan", "orders:app", **options)[0] == 3
    (folder / "context" / "here.json").write_text("{}", encoding="utf-8")
    with pytest.raises(errors.ConfigError, match=r"nats context 'here' .* it has no url"):
        shell("plan", "orders:app", **options)


def test_a_nats_context_says_how_to_connect(shell: Any, tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path)
    (tmp_path / "user.nk").write_text(f"{USER}\n", encoding="utf-8")
    context = {
        "ca": str(certificates.ca_file),
        "cert": str(certificates.client_cert),
        "key": str(certificates.client_key),
        "nkey": str(tmp_path / "user.nk"),
        "inbox_prefix": "_MINE",
    }
    tls = ServerTLS(
        cert_file=certificates.server_cert, key_file=certificates.server_key, ca_file=certificates.ca_file, verify=True
    )
    folder = tmp_path / "config" / "nats" / "context"
    folder.mkdir(parents=True)
    permissions = Permissions(subscribe_allow=["_MINE.>"])
    with NatsServer(jetstream=True, tls=tls, nkeys=[User(nkey=public_key(USER), permissions=permissions)]) as secured:
        (folder / "safe.json").write_text(json.dumps(context | {"url": secured.url}), encoding="utf-8")
        options = {"JETSPARK_SERVERS": "", "NATS_CONTEXT": "safe", "XDG_CONFIG_HOME": str(tmp_path / "config")}
        assert shell("plan", "orders:app", **options)[0] == 3
        for missing in ("ca", "cert", "nkey"):
            fewer = {key: value for key, value in context.items() if key not in {missing, "key" * (missing == "cert")}}
            (folder / "safe.json").write_text(json.dumps(fewer | {"url": secured.url}), encoding="utf-8")
            with pytest.raises(errors.JetSparkError):
                shell("plan", "orders:app", **options)
