"""What docs/permissions.md grants is enough for each call and each worker, and each of it is needed."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from support.apps import until
from support.patience import PATIENCE_S
from support.permissions import ExactServer, Rights
from support.rights import (
    HELD,
    REJECTED,
    Overdue,
    Paid,
    Place,
    Placed,
    Remind,
    Repeat,
    Thing,
    WorkerRow,
    client_rows,
    filled,
    shop,
    worker_rows,
)

import jetspark
from jetspark.app import App, AppClient, CommandOptions, Refused, Settings
from jetspark.app.client import BulkPublisher
from jetspark.app.dead_letters.access import AppDeadLetters, ScheduledRetries
from jetspark.app.entities.entities import Entities, EntityChange, EntityChanges
from jetspark.app.projections.views import View, ViewReplica
from jetspark.app.replay import RebuildOptions, VerifyOptions, rebuild, verify
from jetspark.app.stored_events import StoredEvent
from jetspark.app.timers import Timers
from jetspark.app.topology.names import escape_token
from jetspark.app.workflows.runs import WorkflowRuns
from jetspark.server import NatsServer, Permissions, User

INBOX = ("_INBOX.>",)
TIDYING = (
    "$JS.API.CONSUMER.DELETE.ORDERS.*",
    "$JS.API.CONSUMER.DELETE.SHOP_DLQ.*",
    "$JS.API.CONSUMER.DELETE.KV_shop_handlers.*",
    "$JS.API.CONSUMER.DELETE.KV_status.*",
    "$JS.API.CONSUMER.DELETE.KV_shop_projections.*",
    "$JS.API.CONSUMER.DELETE.SHOP_RETRY.*",
    "$JS.API.CONSUMER.DELETE.KV_knobs.*",
    "$JS.API.CONSUMER.MSG.NEXT.KV_shop_projections.*",
)
"""What a call can do without, as the page says."""
BASES = {"view": "`view(name)`, all below", "settings": "`settings(bucket)`, `history(name)`, all below"}
"""Rows that hold for all calls of a kind."""


class Shop:
    """A server with the application, and users who may do hardly anything."""

    def __init__(self, server: ExactServer, app: App) -> None:
        self.server, self.app = server, app
        self.account = server.new_account()
        self.url = server.url_of(self.account)
        self._orders = 0

    def new_order(self) -> str:
        self._orders += 1
        return f"n-{self._orders}"

    def user(self, rights: Rights) -> str:
        """The address for a user with these rights."""
        [user] = self.server.new_users(self.account, [rights])
        return self.server.url_of(user)

    @contextlib.asynccontextmanager
    async def working(
        self, name: str, url: str | None = None, *, stop_timeout: float = 5.0
    ) -> AsyncIterator[asyncio.Task[None]]:
        """One handler, projection or command in a worker of its own."""
        task = asyncio.create_task(self.app.run(url or self.url, only=[name], stop_timeout=stop_timeout))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.wait([task])


@pytest.fixture(scope="module")
def exact() -> Iterator[ExactServer]:
    with ExactServer() as server:
        yield server


@pytest.fixture(scope="module")
def prepared(exact: ExactServer) -> Shop:
    """An application in which a bit of everything has happened."""
    found = Shop(exact, shop())

    async def prepare() -> None:
        await found.app.apply(found.url)
        async with (
            found.app.connect(found.url) as client,
            found.working("status"),
            found.working("flow"),
            found.working("failing"),
            found.working("later"),
        ):
            ack = await client.publish(Placed(order_id="o-1"))
            await client.entities("things").modify("k-1", lambda change: change.set(Thing(1)))
            await client.view("status").get("o-1", at_least=ack.sequence, timeout=30.0)
            await until(lambda: client.workflow("flow").get("o-1"))
            await until(lambda: is_stored(client, "dlq.shop.failing.o-1.>"))
            await until(lambda: all_of(client.retries.list()))
            async with client.settings("knobs") as settings:
                await settings.set("size", 1, by="test")

    asyncio.run(prepare())
    return found


def matches_right(right: str, subject: str) -> bool:
    """Whether a permission covers a subject, which may be that of a request with a filter in it."""
    ours, theirs = right.split("."), subject.split(".")
    for index, token in enumerate(ours):
        if token == ">":
            return len(theirs) > index
        if index >= len(theirs) or token not in ("*", theirs[index]):
            return False
    return len(ours) == len(theirs)


# ---- clients ---------------------------------------------------------------------------------------------------------

Act = Callable[[AppClient, str], Awaitable[Any]]


async def all_of(found: Any) -> list[Any]:
    return [each async for each in found]


async def first_of(found: Any) -> Any:
    async with contextlib.aclosing(found) as each:
        return await anext(each)


async def in_bulk(client: AppClient, order: str) -> None:
    async with client.bulk() as bulk:
        await bulk.publish(Placed(order_id=order))


async def set_and_tell(client: AppClient, order: str) -> None:
    def decide(change: Any) -> None:
        change.set(Thing(2))
        change.emit(Paid(order_id=order))
        change.set_timer(order, Overdue(order_id=order), after=3600)
        for name in ("t-2", "t-3", "t-4"):  # with the state, with the event, and with a message of its own
            change.cancel_timer(name)

    await client.entities("things").modify("k-1", decide)


async def change_two(client: AppClient, order: str) -> None:
    async with client.entities("things").changes("k-1", "k-2") as (one, two):
        one.set(Thing(3))
        two.set(Thing(4))


async def copied(client: AppClient, order: str) -> None:
    async with client.view("status").replica():
        pass


def of_settings(act: Callable[[Settings], Awaitable[Any]]) -> Act:
    async def opened(client: AppClient, order: str) -> None:
        async with client.settings("knobs") as settings:
            await act(settings)

    return opened


async def nothing(settings: Settings) -> None:
    """Follow the settings, no more."""


async def nothing_before(admin: AppClient) -> None:
    """The call needs nothing to act on, or it is there."""


async def fail_run(admin: AppClient) -> None:
    """Let the run end: it is cancelled if it is not over."""
    await admin.workflow("flow").cancel("o-1")


async def drop_rebuilt(admin: AppClient) -> None:
    """Remove the bucket that an earlier rebuild has created."""
    with contextlib.suppress(jetspark.StreamNotFound):
        await admin.js.delete_stream("KV_status_v1")


# The row of the page, what else it says in words, and the call.
CALLS: dict[str, tuple[str, tuple[str, ...], Act]] = {
    "publish": (
        "`publish(event)`, `bulk()`",
        ("orders.*.placed",),
        lambda client, order: client.publish(Placed(order_id=order)),
    ),
    "bulk": ("`publish(event)`, `bulk()`", ("orders.*.placed",), in_bulk),
    "publish cancels": (
        "`publish(event, cancels=name)`",
        ("orders.*.paid",),
        lambda client, order: client.publish(Paid(order_id=order), cancels="t-1"),
    ),
    "timers.set": (
        "`timers.set(name, event)`",
        ("$JS.API.STREAM.INFO.ORDERS",),
        lambda client, order: client.timers.set("t-1", Overdue(order_id=order), after=3600),
    ),
    "timers.get": ("`timers.get(name)`", (), lambda client, order: client.timers.get("t-1")),
    "timers.cancel": ("`timers.cancel(name)`", (), lambda client, order: client.timers.cancel("t-1")),
    "timers.list": ("`timers.list()`", (), lambda client, order: all_of(client.timers.list())),
    "entities.get": (
        "`entities(kind).get(key)`, `read(key)`",
        (),
        lambda client, order: client.entities("things").get("k-1"),
    ),
    "entities.modify": (
        "`entities(kind).change(key)`, `modify`, and of each key `changes`, `modify_many`",
        ("orders.*.paid", "timers.shop.*", "timers.shop.t-4.cancelled", "$JS.API.STREAM.INFO.ORDERS"),
        set_and_tell,
    ),
    "entities.changes": (
        "`entities(kind).change(key)`, `modify`, and of each key `changes`, `modify_many`",
        ("$JS.API.DIRECT.GET.ORDERS.states.shop.things.k-2", "states.shop.things.k-2"),
        change_two,
    ),
    "entities.read": (
        "`entities(kind).get(key)`, `read(key)`",
        (),
        lambda client, order: client.entities("things").read("k-1"),
    ),
    "entities.reconcile": (
        "`entities(kind).reconcile()`",
        (),
        lambda client, order: client.entities("things").reconcile(),
    ),
    "entities.list": (
        "`entities(kind).keys()`, `list()`, `list_all()`",
        (),
        lambda client, order: all_of(client.entities("things").list()),
    ),
    "entities.list_all": (
        "`entities(kind).keys()`, `list()`, `list_all()`",
        (),
        lambda client, order: all_of(client.entities("things").list_all()),
    ),
    "entities.keys": (
        "`entities(kind).keys()`, `list()`, `list_all()`",
        (),
        lambda client, order: all_of(client.entities("things").keys()),
    ),
    "entities.watch": (
        "`entities(kind).watch(key)`",
        (),
        lambda client, order: first_of(client.entities("things").watch("k-1")),
    ),
    "workflow.get": ("`workflow(name).get(key)`", (), lambda client, order: client.workflow("flow").get("o-1")),
    "workflow.wait_for_end": (
        "`workflow(name).wait_for_end(key)`",
        (),
        lambda client, order: client.workflow("flow").wait_for_end("o-1"),
    ),
    "workflow.retry": (
        "`workflow(name).retry(key)` of a failed run",
        ("timers.shop.>",),
        lambda client, order: client.workflow("flow").retry("o-1"),
    ),
    "workflow.list": ("`workflow(name).list()`", (), lambda client, order: all_of(client.workflow("flow").list())),
    "workflow.timeline": (
        "`workflow(name).timeline(key)`",
        (),
        lambda client, order: all_of(client.workflow("flow").timeline("o-1")),
    ),
    "view.get": ("`view(name).get(key)`, `entry(key)`", (), lambda client, order: client.view("status").get("o-1")),
    "view.entry": (
        "`view(name).get(key)`, `entry(key)`",
        (),
        lambda client, order: client.view("status").entry("o-1"),
    ),
    "view.wait_for": (
        "`view(name).watch(key)`, `wait_for(key)`",
        (),
        lambda client, order: client.view("status").wait_for("o-1", bool),
    ),
    "view.get at_least": (
        "`view(name).get(key, at_least=)`",
        (),
        lambda client, order: client.view("status").get("o-1", at_least=1),
    ),
    "view.get as_of": (
        "`view(name).get(key, as_of=)`",
        (),
        lambda client, order: client.view("status").get("o-1", as_of=1),
    ),
    "view.position": ("`view(name).position()`", (), lambda client, order: client.view("status").position()),
    "view.watch": (
        "`view(name).watch(key)`, `wait_for(key)`",
        (),
        lambda client, order: first_of(client.view("status").watch("o-1")),
    ),
    "view.replica": ("`view(name).replica()`", (), copied),
    "dead_letters.list": (
        "`dead_letters.list()`, `export()`",
        (),
        lambda client, order: all_of(client.dead_letters.list()),
    ),
    "settings": ("`settings(bucket)`, `history(name)`, all below", (), of_settings(nothing)),
    "settings.set": (
        "`settings(bucket).set(name)`, `delete(name)`",
        (),
        of_settings(lambda settings: settings.set("size", 2, by="test")),
    ),
    "settings.delete": (
        "`settings(bucket).set(name)`, `delete(name)`",
        (),
        of_settings(lambda settings: settings.delete("size", by="test")),
    ),
    "settings.history": (
        "`settings(bucket)`, `history(name)`, all below",
        (),
        of_settings(lambda settings: settings.history("size")),
    ),
    "dead_letters.export": (
        "`dead_letters.list()`, `export()`",
        (),
        lambda client, order: all_of(client.dead_letters.export()),
    ),
    "dead_letters.explain": (
        "`dead_letters.explain()`, `retries.explain()`",
        (),
        lambda client, order: client.dead_letters.explain(subject="none"),
    ),
    "retries.explain": (
        "`dead_letters.explain()`, `retries.explain()`",
        (),
        lambda client, order: client.retries.explain(subject="none"),
    ),
    "retries.list": ("`retries.list()`", (), lambda client, order: all_of(client.retries.list())),
    "verify": (
        "`verify(js, app, projection)`",
        (),
        lambda client, order: verify(client.js, shop(), "status", VerifyOptions(wait_s=0.0)),
    ),
    "rebuild": ("`rebuild(js, app, projection)`", (), lambda client, order: rebuild(client.js, shop(), "status")),
    "dead_letters.get": ("`dead_letters.get(number)`", (), lambda client, order: client.dead_letters.get(1)),
}
BEFORE = {"workflow.wait_for_end": fail_run, "workflow.retry": fail_run, "rebuild": drop_rebuilt}
"""Brings the application to where the call has something to do."""
OF_CALL = {"name": "t-1", "kind": "things", "workflow": "flow", "key": "o-1", "new": "status_v1"}
OF_KIND = {"entities": {"key": "k-1"}, "settings": {"name": "size", "bucket": "knobs"}}


def rights_of(call: str) -> tuple[str, ...]:
    row, more, _ = CALLS[call]
    table, kind = client_rows(), call.split(".")[0]
    subjects = dict.fromkeys((*(table[BASES[kind]] if kind in BASES else ()), *table[row]))
    return (*(filled(each, **(OF_CALL | OF_KIND.get(kind, {}))) for each in subjects), *more)


async def called_by(
    shop: Shop,
    rights: Sequence[str],
    act: Callable[[AppClient], Awaitable[Any]],
    missing: str | None = None,
    decide_here: bool | CommandOptions = False,
) -> Any:
    url = shop.user(Rights(tuple(each for each in (*rights, *TIDYING) if each != missing), INBOX))
    async with asyncio.timeout(20), shop.app.connect(url, decide_here=decide_here) as client:
        return await act(client)


async def denied(
    shop: Shop,
    rights: Sequence[str],
    missing: str,
    act: Callable[[AppClient], Awaitable[Any]],
    decide_here: bool | CommandOptions = False,
) -> None:
    with pytest.raises(jetspark.PermissionDenied) as raised:
        await called_by(shop, rights, act, missing, decide_here)
    assert matches_right(missing, raised.value.subject), (missing, raised.value.subject)


@pytest.mark.parametrize("call", CALLS)
async def test_a_client_needs_what_the_page_says_and_nothing_else(prepared: Shop, call: str) -> None:
    rights = rights_of(call)

    async def act(client: AppClient) -> Any:
        return await CALLS[call][2](client, prepared.new_order())

    async with prepared.app.connect(prepared.url) as admin:
        before = BEFORE.get(call, nothing_before)
        await before(admin)
        await called_by(prepared, rights, act)
        for missing in rights:
            await before(admin)
            await denied(prepared, rights, missing, act)


ELSEWHERE = {
    "call": "`call(command)`",
    "call here": "`call(command)` with `decide_here=`",
    "workflow.cancel": "`workflow(name).cancel(key)`",
    "lag": "`lag()`",  # tests/integration/apps/test_app_lag.py
    "dead_letters.discard": "`dead_letters.discard(handler=)`",
    "dead_letters.redrive": "`dead_letters.redrive(handler=)`",
    "retries.now": "`retries.now(handler=)`, `cancel(handler=)`",
    "retries.cancel": "`retries.now(handler=)`, `cancel(handler=)`",
    "rebuild swap": "`rebuild(js, app, projection, RebuildOptions(swap=True))`",
}
"""The rows of calls that have tests of their own below."""


def test_every_call_of_the_page_is_tried() -> None:
    assert client_rows().keys() == {row for row, _, _ in CALLS.values()} | {*ELSEWHERE.values(), *BASES.values()}


KINDS: dict[str, type] = {
    "": AppClient,
    "bulk": BulkPublisher,
    "view": View,
    "entities": Entities,
    "workflow": WorkflowRuns,
    "timers": Timers,
    "settings": Settings,
    "dead_letters": AppDeadLetters,
    "retries": ScheduledRetries,
}
"""What a client of an application has, by the first word of a call."""
OPENED = {kind.__name__ for kind in (BulkPublisher, EntityChange, EntityChanges, Settings, ViewReplica)}
"""What a method returns to be entered, which asks the server."""
NO_ROW = {
    "bulk.publish": "entering and leaving `bulk` is a publish of its events",
    "bulk.publish_many": "the same",
    "entities.change": "`modify` enters and leaves one",
    "entities.modify_many": "it enters and leaves `changes`",
    "timers.publish_ending": "of an encoded event; `publish(cancels=)` calls it",
    "timers.is_current": "of an event that a handler has; its worker's rights hold",
}
"""Public methods that need no row or no test of their own, with the reason."""


def asks(method: Any) -> bool:
    """Whether a method asks the server, or returns what does when it is entered."""
    if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        return True
    returned = getattr(method, "__annotations__", {}).get("return", "")
    return inspect.isfunction(method) and str(returned).split("[")[0] in OPENED


def test_every_public_call_of_a_client_has_a_row() -> None:
    rows = {call.split(" ")[0]: row for call, (row, _, _) in CALLS.items()} | ELSEWHERE
    public = {
        f"{kind}.{name}".lstrip(".")
        for kind, owner in KINDS.items()
        for name, method in vars(owner).items()
        if not name.startswith("_") and asks(method)
    }
    assert public - NO_ROW.keys() == {each for each in rows if each.split(".")[0] not in ("verify", "rebuild")} - {
        "call here",
        "rebuild swap",
    }
    assert NO_ROW.keys() <= public
    for call, row in rows.items():
        assert re.search(rf"\b{call.split(' ')[0].split('.')[-1]}\b", row), (call, row)


async def test_a_run_is_cancelled_with_the_rights_of_the_page_alone(prepared: Shop) -> None:
    rights = [filled(each, **(OF_CALL | {"key": "c-1"})) for each in client_rows()["`workflow(name).cancel(key)`"]]
    async with prepared.working("flow"), prepared.app.connect(prepared.url) as client:
        await client.publish(Placed(order_id="c-1"))
        await until(lambda: client.workflow("flow").get("c-1"))
    for missing in (*rights, None):
        url = prepared.user(Rights(tuple(each for each in rights if each != missing), INBOX))
        with contextlib.ExitStack() as expected:
            raised = None if missing is None else expected.enter_context(pytest.raises(jetspark.PermissionDenied))
            async with asyncio.timeout(20), prepared.app.connect(url) as client:
                assert await client.workflow("flow").cancel("c-1")
        assert raised is None or matches_right(missing or "", raised.value.subject)


async def an_open_dead_letter(admin: AppClient, order: str) -> None:
    """Have a dead letter that a redrive or a discard may take, and no redrive that was interrupted."""
    records = await admin.js.kv("shop_handlers")
    await records.put("redrive", b"")
    await records.purge("redrive")
    if not await all_of(admin.dead_letters.list(handler="failing", status="open")):
        await admin.publish(Placed(order_id=order))
        await until(lambda: all_of(admin.dead_letters.list(handler="failing", key=order, status="open")))


async def test_dead_letters_are_redriven_and_discarded_with_the_rights_of_the_page_alone(fresh: Shop) -> None:
    async def redrive(client: AppClient) -> int:
        return (await client.dead_letters.redrive(handler="failing")).requested

    async def discard(client: AppClient) -> int:
        return (await client.dead_letters.discard(handler="failing")).discarded

    async with fresh.app.connect(fresh.url) as admin, fresh.working("failing"):
        for act in (redrive, discard):
            row = client_rows()[f"`dead_letters.{act.__name__}(handler=)`"]
            rights = [filled(each, handler="failing") for each in row]
            for missing in rights:
                await an_open_dead_letter(admin, fresh.new_order())
                await denied(fresh, rights, missing, act)
            await an_open_dead_letter(admin, fresh.new_order())
            assert await called_by(fresh, rights, act) >= 1


async def a_retry(admin: AppClient, order: str) -> None:
    """Have a retry that is scheduled."""
    await admin.publish(Placed(order_id=order))
    await until(lambda: all_of(admin.retries.list(handler="later", key=order)))


async def test_retries_are_hurried_and_cancelled_with_the_rights_of_the_page_alone(fresh: Shop) -> None:
    rights = [filled(each, handler="later") for each in client_rows()["`retries.now(handler=)`, `cancel(handler=)`"]]
    acts: tuple[Callable[[AppClient], Awaitable[Any]], ...] = (
        lambda client: client.retries.now(handler="later"),
        lambda client: client.retries.cancel(handler="later"),
    )
    async with fresh.app.connect(fresh.url) as admin, fresh.working("later"):
        for act in acts:
            for missing in rights:
                await a_retry(admin, fresh.new_order())
                await denied(fresh, rights, missing, act)
            await a_retry(admin, fresh.new_order())
            assert (await called_by(fresh, rights, act)).changed


async def test_a_rebuild_is_swapped_in_with_the_rights_of_the_page_alone(fresh: Shop) -> None:
    table = client_rows()
    needed = [
        *table["`rebuild(js, app, projection)`"],
        *table["`rebuild(js, app, projection, RebuildOptions(swap=True))`"],
    ]
    rights = [filled(each, **OF_CALL) for each in needed]

    async def swap(client: AppClient) -> Any:
        return await rebuild(client.js, fresh.app, "status", RebuildOptions(swap=True))

    async with fresh.app.connect(fresh.url) as admin, fresh.working("status"):
        ack = await admin.publish(Placed(order_id="o-1"))
        await admin.view("status").get("o-1", at_least=ack.sequence, timeout=30.0)
        for missing in rights:
            await drop_rebuilt(admin)
            await denied(fresh, rights, missing, swap)
        await drop_rebuilt(admin)
        assert (await called_by(fresh, rights, swap)).record.bucket == "status_v1"


@pytest.mark.parametrize("missing", ["states.shop.things.k-1", "orders.*.paid", "timers.shop.*"])
async def test_a_change_that_is_denied_is_sent_once(prepared: Shop, missing: str) -> None:
    url = prepared.user(Rights(tuple(each for each in rights_of("entities.modify") if each != missing), INBOX))
    async with prepared.app.connect(url) as client:
        with pytest.raises(jetspark.PermissionDenied) as raised:
            await set_and_tell(client, prepared.new_order())
        assert matches_right(missing, raised.value.subject)
        assert client._committer is not None
        assert client._committer.sent == 1


async def test_a_user_of_one_entity_cannot_read_another(prepared: Shop) -> None:
    for subject in ("states.shop.things.k-1", "timers.shop.t-1"):
        url = prepared.user(Rights((f"$JS.API.DIRECT.GET.ORDERS.{subject}",), INBOX))
        async with prepared.app.connect(url) as client:
            for read in (
                client.entities("things").get("k-2"),
                client.timers.get("t-2"),
                client.view("status").get("x"),
            ):
                with pytest.raises(jetspark.PermissionDenied):
                    await read


# ---- workers ---------------------------------------------------------------------------------------------------------

Done = Callable[[Shop, AppClient, str], Awaitable[bool]]


async def is_stored(client: AppClient, subject: str) -> bool:
    stream = await client.js.stream("SHOP_DLQ" if subject.startswith("dlq.") else "ORDERS")
    return bool((await stream.info(subjects_filter=subject)).state.subjects)


async def is_settled(client: AppClient, consumer: str, stream: str = "ORDERS") -> bool:
    for name in (stream, "SHOP_RETRY"):
        info = await (await (await client.js.stream(name)).consumer(consumer)).info()
        if info.pending or info.ack_pending or not info.delivered.stream_sequence:
            return False
    return True


async def an_event_came_again(shop: Shop, client: AppClient, name: str, order: str) -> None:
    """Have another worker end while it handles an event."""
    HELD[order] = asyncio.Event()
    async with shop.working(name, stop_timeout=0.1):
        await client.publish(Placed(order_id=order))
        await HELD[order].wait()
    del HELD[order]


async def a_parked_key_continues(shop: Shop, client: AppClient, name: str, order: str) -> None:
    """Have a dead letter that is redriven, and another behind it."""
    REJECTED.add(order)
    async with shop.working(name):
        for number in (1, 2):
            await client.publish(Placed(order_id=order))
            await until(partial(has_dead_letters, client, name, order, number))
    REJECTED.remove(order)
    await client.dead_letters.redrive(handler=name, key=order)


async def the_breaker_is_closed(shop: Shop, client: AppClient, name: str, order: str) -> None:
    for stream, consumer in consumers_of(name):
        await (await (await client.js.stream(stream)).consumer(consumer)).resume()


async def an_event_cannot_be_read(shop: Shop, client: AppClient, name: str, order: str) -> None:
    await client.js.publish(f"orders.{order}.placed", b"{}", headers={"ce-type": "order.placed"})


async def another_worker_has_run(shop: Shop, client: AppClient, name: str, order: str) -> None:
    async with shop.working(name):
        await client.publish(Placed(order_id=order))
        await until(lambda: has_state(client, order))


def consumers_of(name: str) -> list[tuple[str, str]]:
    """Of a handler: those of its events and of its retries, with their streams."""
    if name.startswith("parted"):
        return [(f"SHOP_{name}_PARTITIONS", f"{name}-p0"), ("SHOP_RETRY", f"{name}-p0")]
    return [("ORDERS", name), ("SHOP_RETRY", name)]


async def has_dead_letters(client: AppClient, name: str, order: str, number: int) -> bool:
    return len(await all_of(client.dead_letters.list(handler=name, key=order))) == number


async def is_open(client: AppClient, name: str) -> bool:
    """Whether the breaker has paused both consumers."""
    consumers = [await (await client.js.stream(stream)).consumer(each) for stream, each in consumers_of(name)]
    return all([(await each.info()).is_paused for each in consumers])


async def is_acknowledged(client: AppClient, name: str) -> bool:
    """Whether there were events, and all of them are handled."""
    [(stream, consumer), _] = consumers_of(name)
    info = await (await (await client.js.stream(stream)).consumer(consumer)).info()
    return bool(info.ack_floor.stream_sequence) and not info.pending and not info.ack_pending


SCENES: dict[str, Callable[[Shop, AppClient, str, str], Awaitable[None]]] = {
    "again": an_event_came_again,
    "parked": a_parked_key_continues,
    "open": the_breaker_is_closed,
    "unreadable": an_event_cannot_be_read,
    "over": another_worker_has_run,
}
"""What has happened before a worker starts. The rights of its start are those of other workers, and tried there."""


# What each worker does besides, in words on the page, the situations that it gets into, and how that is seen.
WORKERS: dict[str, tuple[tuple[str, ...], tuple[str, ...], set[str], Done]] = {
    "billing": (
        ("any", "handler"),
        ("billed.>",),
        {"for each event"},
        lambda shop, client, order: is_stored(client, f"billed.{order}"),
    ),
    "failing": (
        ("any", "handler"),
        (),
        {"for each event", "an event failed; `ctx.once`", "an event failed", "a dead letter"},
        lambda shop, client, order: is_stored(client, f"dlq.shop.failing.{order}.>"),
    ),
    "waiting": (
        ("any", "handler"),
        (),
        {"for each event", "for each retry", "an event waits for its retry", "an event failed; `ctx.once`"},
        lambda shop, client, order: is_settled(client, "waiting"),
    ),
    "later": (
        ("any", "handler"),
        (),
        {"for each event", "an event waits for its retry", "an event failed; `ctx.once`"},
        lambda shop, client, order: has_retry(client, order),
    ),
    "parted": (
        ("any", "partitions"),
        (),
        {"for each event", "for each retry", "an event waits for its retry"},
        lambda shop, client, order: is_settled(client, "parted-p0", "SHOP_parted_PARTITIONS"),
    ),
    "oncer": (
        ("any", "handler"),
        ("timers.shop.>",),
        {"for each event", "an event failed; `ctx.once`"},
        lambda shop, client, order: is_stored(client, f"timers.shop.{escape_token(f'once {order}')}"),
    ),
    "flow": (
        ("any", "handler", "workflow"),
        (),
        {"for each event", "a step", "a step sets or ends a timer"},
        lambda shop, client, order: is_stored(client, f"states.shop.flow.{order}"),
    ),
    "status": (
        ("any", "projection"),
        (),
        {"a state is not in memory"},
        lambda shop, client, order: has_state(client, order),
    ),
    "picky, again": (
        ("any", "handler"),
        (),
        {
            "events came again",
            "an event came again",
            "another worker had events; an event does not fit in its dead letter",
        },
        lambda shop, client, order: is_acknowledged(client, "picky"),
    ),
    "picky, parked": (
        ("any", "handler"),
        (),
        {"a parked key continues"},
        lambda shop, client, order: has_dead_letters(client, "picky", order, 0),
    ),
    "breaking, open": (
        ("any", "handler"),
        (),
        {"its breaker opens"},
        lambda shop, client, order: is_open(client, "breaking"),
    ),
    "parted_picky, again": (
        ("any", "partitions"),
        (),
        {"events came again", "an event came again", "another worker had events"},
        lambda shop, client, order: is_acknowledged(client, "parted_picky"),
    ),
    "parted_picky, parked": (
        ("any", "partitions"),
        (),
        {"a parked key continues", "an event failed", "a dead letter"},
        lambda shop, client, order: has_dead_letters(client, "parted_picky", order, 0),
    ),
    "parted_breaking, open": (
        ("any", "partitions"),
        (),
        {"its breaker opens"},
        lambda shop, client, order: is_open(client, "parted_breaking"),
    ),
    "status, unreadable": (
        ("any", "projection"),
        (),
        {"an event cannot be read or applied"},
        lambda shop, client, order: is_stored(client, "dlq.shop.projections.>"),
    ),
    "status, over": (
        ("any", "projection"),
        (),
        {"another worker has run it"},
        lambda shop, client, order: has_state(client, order),
    ),
}


async def has_retry(client: AppClient, order: str) -> bool:
    return bool(await all_of(client.retries.list(handler="later", key=order)))


async def has_state(client: AppClient, order: str) -> bool:
    return await client.view("status").get(order) is not None


def rows_of(name: str) -> list[WorkerRow]:
    kinds, *_ = WORKERS[name]
    return worker_rows(*kinds)


def handler_of(name: str) -> str:
    return name.split(",")[0]


def subjects_of(name: str, rows: Sequence[WorkerRow]) -> list[str]:
    name = handler_of(name)
    names = {"handler": name, "workflow": name, "kind": "none", "n": "0"}
    # What its code publishes is given in words, with examples.
    plain = [row for row in rows if not row.when.startswith("its code")]
    return [filled(each, **names) for row in plain for each in row.subjects]


@pytest.fixture
async def fresh(exact: ExactServer) -> Shop:
    """An application of the test's own, in which nothing has happened."""
    found = Shop(exact, shop())
    await found.app.apply(found.url)
    return found


async def begin(shop: Shop, client: AppClient, name: str, order: str) -> None:
    handler, _, scene = name.partition(", ")
    if scene:
        await SCENES[scene](shop, client, handler, order)


@pytest.mark.parametrize("name", WORKERS)
async def test_a_worker_works_with_the_rights_of_the_page_alone(fresh: Shop, name: str) -> None:
    _, more, _, is_done = WORKERS[name]
    needed = [row for row in rows_of(name) if row.without != "continues"]
    url, order = fresh.user(Rights((*subjects_of(name, needed), *more), INBOX)), fresh.new_order()
    async with fresh.app.connect(fresh.url) as client:
        await begin(fresh, client, name, order)
        async with fresh.working(handler_of(name), url) as worker:
            await client.publish(Placed(order_id=order))
            await until(lambda: worker.done() or is_done(fresh, client, order))
            assert not worker.done(), worker.exception()


@pytest.mark.parametrize("name", WORKERS)
async def test_a_worker_ends_with_the_subject_that_it_may_not_use(fresh: Shop, name: str) -> None:
    _, more, situations, _ = WORKERS[name]
    rows = rows_of(name)
    everything = (*subjects_of(name, rows), *more)
    whens = situations if ", " in name else {"at its start", "always", *situations}
    tried = [row for row in rows if row.without == "ends" and row.when in whens]
    assert whens <= {row.when for row in rows}
    async with fresh.app.connect(fresh.url) as client:
        for missing in subjects_of(name, tried):
            order = fresh.new_order()
            await begin(fresh, client, name, order)
            url = fresh.user(Rights(tuple(each for each in everything if each != missing), INBOX))
            async with fresh.working(handler_of(name), url) as worker:
                await client.publish(Placed(order_id=order))
                # nats-server repeats a lost request for the copies of a partition after 40 s (2.15.1, under load).
                await asyncio.wait([worker], timeout=PATIENCE_S)
                assert worker.done(), f"lives without {missing}"
                error = worker.exception()
            assert isinstance(error, jetspark.PermissionDenied), (missing, error)
            assert matches_right(missing, error.subject), (missing, error.subject)


UNTRIED = {
    "an event was given up by the server": "the server gives up after deliveries that end without an answer",
    "an event was given up by the server; entities, timers, workflows": "the same; `flow` and `oncer` use the others",
}
"""Situations of the page in which no worker is tried, with the reason."""


def test_every_situation_of_the_page_is_tried() -> None:
    tried = {(kind, when) for kinds, _, situations, _ in WORKERS.values() for kind in kinds for when in situations}
    missing = {
        (row.worker, row.when)
        for row in worker_rows("any", "handler", "workflow", "projection", "partitions")
        if row.without == "ends" and row.when not in ("at its start", "always", *UNTRIED)
    } - tried
    assert missing == set()


async def test_a_plan_is_made_with_the_rights_of_the_page_alone(fresh: Shop) -> None:
    everything = {each: None for name in WORKERS for each in subjects_of(name, rows_of(name))}
    everything |= dict.fromkeys(["$JS.API.STREAM.INFO.KV_knobs"])  # of a declared bucket
    needed = [each for each in everything if ".INFO." in each or each.endswith(("STREAM.NAMES", "_schemas"))]
    assert (await fresh.app.plan(fresh.user(Rights(tuple(needed), INBOX)))).is_empty


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("billing", "billed.>"),
        ("oncer", "timers.shop.>"),
        ("flow", "states.shop.flow.>"),
        ("flow", "timers.shop.>"),
    ],
)
async def test_what_the_code_of_a_handler_may_not_publish_is_a_dead_letter_at_once(
    fresh: Shop, name: str, missing: str
) -> None:
    _, more, _, _ = WORKERS[name]
    everything = (*subjects_of(name, rows_of(name)), *more)
    url = fresh.user(Rights(tuple(each for each in everything if each != missing), INBOX))
    async with fresh.app.connect(fresh.url) as client, fresh.working(name, url) as worker:
        order = fresh.new_order()
        await client.publish(Placed(order_id=order))
        await until(lambda: worker.done() or is_stored(client, f"dlq.shop.{name}.{order}.>"))
        assert not worker.done(), worker.exception()
        dead_letters = await client.js.stream("SHOP_DLQ")
        [message] = [each async for each in dead_letters.get_messages(1, subject=f"dlq.shop.{name}.{order}.>")]
        dead_letter = StoredEvent.of(message.headers, message.data)
        assert dead_letter.cause is not None
        assert dead_letter.cause.error.endswith("PermissionDenied")
        assert f"'{missing[:-1]}" in dead_letter.cause.message
        assert dead_letter.attempts == 1


# ---- commands --------------------------------------------------------------------------------------------------------


async def asked(client: AppClient, worker: asyncio.Task[None] | None, order: str) -> Any:
    while True:
        try:
            return (await client.call(Place(order_id=order), timeout=10.0)).data
        except jetspark.NoWorkers:
            assert worker is None or not worker.done(), worker.exception()
            await asyncio.sleep(0.02)


COMMAND = {"command": "orders.place", "kind": "none"}


def command_rights(*without: str) -> Rights:
    rows = [row for row in worker_rows("any", "command") if row.without not in without]
    publish = [filled(each, **COMMAND) for row in rows if not row.is_subscribed for each in row.subjects]
    subscribe = [filled(each, **COMMAND) for row in rows if row.is_subscribed for each in row.subjects]
    return Rights((*publish, "orders.>", "_INBOX.>"), (*INBOX, *subscribe))


async def test_a_worker_of_commands_works_with_the_rights_of_the_page_alone(fresh: Shop) -> None:
    caller = fresh.user(Rights(("cmd.shop.orders.place",), INBOX))
    async with (
        fresh.app.connect(caller) as client,
        fresh.working("orders.place", fresh.user(command_rights("continues"))) as worker,
    ):
        assert await asked(client, worker, "o-1") == {"order": "o-1"}


@pytest.mark.parametrize("right", ["cmd.shop.orders.place", "$SRV.>", "$JS.EVENT.ADVISORY.STREAM.*.ORDERS"])
async def test_a_worker_of_commands_ends_where_it_may_not_serve_and_only_there(fresh: Shop, right: str) -> None:
    rights = command_rights()
    assert right in rights.subscribe
    url = fresh.user(Rights(rights.publish, tuple(each for each in rights.subscribe if each != right)))
    async with fresh.app.connect(fresh.url) as client, fresh.working("orders.place", url) as worker:
        if right.startswith("cmd."):
            with pytest.raises(jetspark.PermissionDenied) as raised:
                await asyncio.wait_for(worker, 30)
            assert (raised.value.operation, raised.value.subject) == ("subscribe", right)
        else:
            assert await asked(client, worker, "o-1") == {"order": "o-1"}


async def test_a_worker_of_commands_may_reply_by_allow_responses() -> None:
    rights, app = command_rights(), shop()
    publish = [each for each in rights.publish if each != "_INBOX.>"]
    permissions = Permissions(publish_allow=publish, subscribe_allow=rights.subscribe, allow_responses=True)
    users = [User(user="admin", password="a"), User(user="worker", password="w", permissions=permissions)]
    with NatsServer(users=users) as server:
        admin: Any = {"auth": jetspark.UserPassword("admin", "a")}
        await app.apply(server.url, **admin)
        worker = asyncio.create_task(
            app.run(server.url, only=["orders.place"], auth=jetspark.UserPassword("worker", "w"))
        )
        async with app.connect(server.url, **admin) as client:
            assert await asked(client, worker, "o-1") == {"order": "o-1"}
        worker.cancel()
        await asyncio.wait([worker])


async def test_a_worker_of_commands_ends_when_its_right_is_taken_away(fresh: Shop) -> None:
    rights = command_rights()
    [user] = fresh.server.new_users(fresh.account, [rights])
    async with (
        fresh.app.connect(fresh.url) as client,
        fresh.working("orders.place", fresh.server.url_of(user)) as worker,
    ):
        assert await asked(client, worker, "o-1") == {"order": "o-1"}
        kept = tuple(each for each in rights.subscribe if not each.startswith("cmd."))
        fresh.server.change_user(user, Rights(rights.publish, kept))
        with pytest.raises(jetspark.PermissionDenied, match=r"cmd\.shop\.orders\.place"):
            await asyncio.wait_for(worker, 60)


async def test_a_handler_ends_when_the_right_to_acknowledge_is_taken_away(fresh: Shop) -> None:
    _, more, _, is_done = WORKERS["billing"]
    rights = (*subjects_of("billing", rows_of("billing")), *more)
    [user] = fresh.server.new_users(fresh.account, [Rights(rights, INBOX)])
    async with fresh.app.connect(fresh.url) as client, fresh.working("billing", fresh.server.url_of(user)) as worker:
        order = fresh.new_order()
        await client.publish(Placed(order_id=order))
        await until(lambda: is_done(fresh, client, order))
        fresh.server.change_user(user, Rights(tuple(each for each in rights if "$JS.ACK.ORDERS" not in each), INBOX))
        await client.publish(Placed(order_id=fresh.new_order()))
        with pytest.raises(jetspark.PermissionDenied, match=r"\$JS\.ACK\.ORDERS\.billing"):
            await asyncio.wait_for(worker, 60)


@pytest.mark.parametrize("missing", ["$JS.API.DIRECT.GET.ORDERS", "orders.>"])
async def test_a_caller_is_told_what_the_worker_may_not_do(fresh: Shop, missing: str) -> None:
    rights = command_rights()
    url = fresh.user(Rights(tuple(each for each in rights.publish if each != missing), rights.subscribe))
    async with fresh.app.connect(fresh.url) as client, fresh.working("orders.place", url) as worker:
        with pytest.raises(jetspark.CommandFailed, match="permission denied") as raised:
            await asked(client, worker, "o-1")
        assert missing.rstrip(">") in raised.value.reason
        assert not worker.done()


DECIDED: dict[str, tuple[type[Any], set[str]]] = {
    "orders.place": (Place, set()),
    "orders.remind": (Remind, {"a decision with timers"}),
    "orders.repeat": (Repeat, {"`snapshot=`"}),
}
"""Commands, and the situations of the page that each gets into besides."""


@pytest.mark.parametrize("command", DECIDED)
async def test_a_program_that_decides_needs_what_the_page_says(fresh: Shop, command: str) -> None:
    kind, situations = DECIDED[command]
    rows = [row for row in worker_rows("any", "command") if not row.is_subscribed]
    marked = [row for row in rows if "ORDERS" in filled("".join(row.subjects), **COMMAND)]
    named = [filled(each, **COMMAND) for row in marked for each in row.subjects]
    assert set(named) == {f"$JS.API.{verb}.ORDERS" for verb in ("STREAM.INFO", "DIRECT.GET", "STREAM.MSG.GET")}
    more = [filled(each, **COMMAND) for row in rows if row.when in situations for each in row.subjects]
    if kind is Repeat:
        table = client_rows()
        view = (*table[BASES["view"]], *table["`view(name).get(key)`, `entry(key)`"])
        more += [filled(each, key="o-1") for each in view]
    assert {row.when for row in rows} >= situations
    rights = (*named, *more, "orders.>")

    async def decide(client: AppClient) -> Any:
        return await client.call(kind(order_id="o-1"), timeout=10.0)

    async def decide_twice(client: AppClient) -> None:
        """The second time it is refused, or decided on a boundary that ends with what the first one has stored."""
        await decide(client)
        if kind is Place:
            with pytest.raises(Refused):
                await decide(client)

    options = CommandOptions()
    for missing in rights:
        if kind is Repeat or missing != "$JS.API.STREAM.MSG.GET.ORDERS":
            await denied(fresh, rights, missing, decide, decide_here=options)
    await called_by(fresh, rights, decide_twice, decide_here=options)
    if kind is Place:
        await denied(fresh, rights, "$JS.API.STREAM.MSG.GET.ORDERS", decide, decide_here=options)


async def test_a_caller_needs_the_subject_of_its_command_alone(fresh: Shop) -> None:
    async with fresh.working("orders.place"), fresh.app.connect(fresh.url) as client:
        await asked(client, None, "o-1")
        none = fresh.user(Rights(("cmd.shop.other",), INBOX))
        async with fresh.app.connect(none) as stranger:
            with pytest.raises(jetspark.PermissionDenied, match=r"cmd\.shop\.orders\.place"):
                await stranger.call(Place(order_id="o-2"))
