"""What docs/permissions.md grants is enough for each call and each worker, and each of it is needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from support.apps import until
from support.permissions import ExactServer, Rights
from support.rights import (
    Overdue,
    Paid,
    Place,
    Placed,
    Thing,
    WorkerRow,
    client_rows,
    filled,
    shop,
    worker_rows,
)

import jetspark
from jetspark.app import App, AppClient, CommandOptions
from jetspark.app.dead_letters.letters import DeadEvent
from jetspark.app.topology.names import escape_token
from jetspark.server import NatsServer, Permissions, User

INBOX = ("_INBOX.>",)
TIDYING = (
    "$JS.API.CONSUMER.DELETE.ORDERS.*",
    "$JS.API.CONSUMER.DELETE.SHOP_DLQ.*",
    "$JS.API.CONSUMER.DELETE.KV_shop_handlers.*",
    "$JS.API.CONSUMER.DELETE.KV_status.*",
    "$JS.API.CONSUMER.DELETE.KV_shop_projections.*",
    "$JS.API.CONSUMER.MSG.NEXT.KV_shop_projections.*",
)
"""What a call can do without, as the page says."""
PLACES = "`view(name)`, all below"


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
    async def working(self, name: str, url: str | None = None) -> AsyncIterator[asyncio.Task[None]]:
        """One handler, projection or command in a worker of its own."""
        task = asyncio.create_task(self.app.run(url or self.url, only=[name], stop_timeout=5.0))
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
        ):
            ack = await client.publish(Placed(order_id="o-1"))
            await client.entities("things").modify("k-1", lambda change: change.set(Thing(1)))
            await client.view("status").get("o-1", at_least=ack.sequence, timeout=30.0)
            await until(lambda: client.workflow("flow").get("o-1"))
            await until(lambda: is_stored(client, "dlq.shop.failing.o-1.>"))

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


async def copied(client: AppClient, order: str) -> None:
    async with client.view("status").replica():
        pass


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
        "`entities(kind).get(key)`",
        (),
        lambda client, order: client.entities("things").get("k-1"),
    ),
    "entities.modify": (
        "`entities(kind).change(key)`, `modify`",
        ("orders.*.paid", "timers.shop.*", "timers.shop.t-4.cancelled", "$JS.API.STREAM.INFO.ORDERS"),
        set_and_tell,
    ),
    "entities.list": (
        "`entities(kind).keys()`, `list()`",
        (),
        lambda client, order: all_of(client.entities("things").list()),
    ),
    "entities.keys": (
        "`entities(kind).keys()`, `list()`",
        (),
        lambda client, order: all_of(client.entities("things").keys()),
    ),
    "entities.watch": (
        "`entities(kind).watch(key)`",
        (),
        lambda client, order: first_of(client.entities("things").watch("k-1")),
    ),
    "workflow.get": ("`workflow(name).get(key)`", (), lambda client, order: client.workflow("flow").get("o-1")),
    "workflow.list": ("`workflow(name).list()`", (), lambda client, order: all_of(client.workflow("flow").list())),
    "workflow.timeline": (
        "`workflow(name).timeline(key)`",
        (),
        lambda client, order: all_of(client.workflow("flow").timeline("o-1")),
    ),
    "view.get": ("`view(name).get(key)`", (), lambda client, order: client.view("status").get("o-1")),
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
    "view.watch": ("`view(name).watch(key)`", (), lambda client, order: first_of(client.view("status").watch("o-1"))),
    "view.replica": ("`view(name).replica()`", (), copied),
    "dead_letters.list": ("`dead_letters.list()`", (), lambda client, order: all_of(client.dead_letters.list())),
    "dead_letters.get": ("`dead_letters.get(number)`", (), lambda client, order: client.dead_letters.get(1)),
}
OF_CALL = {"name": "t-1", "kind": "things", "workflow": "flow"}
KEYS = {"entities": "k-1"}


def rights_of(call: str) -> tuple[str, ...]:
    row, more, _ = CALLS[call]
    table = client_rows()
    subjects = (*(table[PLACES] if call.startswith("view") else ()), *table[row])
    return (*(filled(each, **OF_CALL, key=KEYS.get(call.split(".")[0], "o-1")) for each in subjects), *more)


async def called(shop: Shop, call: str, rights: Sequence[str]) -> Any:
    url = shop.user(Rights((*rights, *TIDYING), INBOX))
    async with asyncio.timeout(20), shop.app.connect(url) as client:
        return await CALLS[call][2](client, shop.new_order())


@pytest.mark.parametrize("call", CALLS)
async def test_a_client_needs_what_the_page_says_and_nothing_else(prepared: Shop, call: str) -> None:
    rights = rights_of(call)
    await called(prepared, call, rights)
    for missing in rights:
        with pytest.raises(jetspark.PermissionDenied) as raised:
            await called(prepared, call, [each for each in rights if each != missing])
        assert matches_right(missing, raised.value.subject), (missing, raised.value.subject)


def test_every_call_of_the_page_is_tried() -> None:
    tried = {row for row, _, _ in CALLS.values()} | {PLACES}
    elsewhere = {
        "`call(command)`",
        "`call(command)` with `decide_here=`",
        "`workflow(name).cancel(key)`",  # below, and the next two
        "`dead_letters.discard(handler=)`",
        "`dead_letters.redrive(handler=)`",
    }
    assert client_rows().keys() == tried | elsewhere


async def test_a_run_is_cancelled_with_the_rights_of_the_page_alone(prepared: Shop) -> None:
    rights = [filled(each, **OF_CALL, key="c-1") for each in client_rows()["`workflow(name).cancel(key)`"]]
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


async def test_dead_letters_are_handled_again_and_discarded_with_the_rights_of_the_page_alone(fresh: Shop) -> None:
    table = client_rows()
    reading = {*table["`dead_letters.list()`"], *table["`dead_letters.get(number)`"]}
    async with fresh.app.connect(fresh.url) as admin, fresh.working("failing"):
        for order in ("o-1", "o-2"):
            await admin.publish(Placed(order_id=order))
            await until(partial(is_stored, admin, f"dlq.shop.failing.{order}.>"))

    def user(call: str) -> str:
        rights = [filled(each) for each in (*reading, *table[call])]
        return fresh.user(Rights((*rights, *TIDYING), INBOX))

    async with fresh.app.connect(user("`dead_letters.redrive(handler=)`")) as client:
        assert (await client.dead_letters.redrive(handler="failing")).requested == 2
    async with fresh.app.connect(user("`dead_letters.discard(handler=)`")) as client:
        assert await client.dead_letters.discard(handler="failing")
        assert await all_of(client.dead_letters.list()) == []


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
    "parted": (
        ("any", "partitions"),
        (),
        {"for each event", "for each retry", "an event waits for its retry", "another worker had events"},
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
}
DEAD_LETTER_OF_WORDS = {"billing": "billed.>", "oncer": "timers.shop.>"}


async def has_state(client: AppClient, order: str) -> bool:
    return await client.view("status").get(order) is not None


def rows_of(name: str) -> list[WorkerRow]:
    kinds, *_ = WORKERS[name]
    return worker_rows(*kinds)


def subjects_of(name: str, rows: Sequence[WorkerRow]) -> list[str]:
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


@pytest.mark.parametrize("name", WORKERS)
async def test_a_worker_works_with_the_rights_of_the_page_alone(fresh: Shop, name: str) -> None:
    _, more, _, is_done = WORKERS[name]
    needed = [row for row in rows_of(name) if row.without != "continues"]
    url = fresh.user(Rights((*subjects_of(name, needed), *more), INBOX))
    async with fresh.app.connect(fresh.url) as client, fresh.working(name, url) as worker:
        order = fresh.new_order()
        await client.publish(Placed(order_id=order))
        await until(lambda: worker.done() or is_done(fresh, client, order))
        assert not worker.done(), worker.exception()


@pytest.mark.parametrize("name", WORKERS)
async def test_a_worker_ends_with_the_subject_that_it_may_not_use(fresh: Shop, name: str) -> None:
    _, more, situations, _ = WORKERS[name]
    rows = rows_of(name)
    everything = (*subjects_of(name, rows), *more)
    tried = [row for row in rows if row.without == "ends" and row.when in {"at its start", "always", *situations}]
    assert len(tried) > 10
    async with fresh.app.connect(fresh.url) as client:
        for missing in subjects_of(name, tried):
            url = fresh.user(Rights(tuple(each for each in everything if each != missing), INBOX))
            async with fresh.working(name, url) as worker:
                await client.publish(Placed(order_id=fresh.new_order()))
                await asyncio.wait([worker], timeout=30)
                assert worker.done(), f"lives without {missing}"
                error = worker.exception()
            assert isinstance(error, jetspark.PermissionDenied), (missing, error)
            assert matches_right(missing, error.subject), (missing, error.subject)


async def test_a_plan_is_made_with_the_rights_of_the_page_alone(fresh: Shop) -> None:
    everything = {each: None for name in WORKERS for each in subjects_of(name, rows_of(name))}
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
        letters = await client.js.stream("SHOP_DLQ")
        [message] = [each async for each in letters.get_messages(1, subject=f"dlq.shop.{name}.{order}.>")]
        letter = DeadEvent.of(message.headers, message.data)
        assert letter.cause is not None
        assert letter.cause.error.endswith("PermissionDenied")
        assert f"'{missing[:-1]}" in letter.cause.message
        assert letter.attempts == 1


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


@pytest.mark.parametrize("missing", [None, "$JS.API.STREAM.INFO.ORDERS", "$JS.API.DIRECT.GET.ORDERS", "orders.>"])
async def test_a_program_that_decides_needs_what_is_marked(fresh: Shop, missing: str | None) -> None:
    marked = [
        filled(row.subjects[0], **COMMAND)
        for row in worker_rows("any", "command")
        if row.subjects and not row.is_subscribed and "ORDERS" in filled(row.subjects[0], **COMMAND)
    ]
    assert set(marked) == {f"$JS.API.{verb}.ORDERS" for verb in ("STREAM.INFO", "DIRECT.GET", "STREAM.MSG.GET")}
    url = fresh.user(Rights(tuple(each for each in (*marked, "orders.>") if each != missing), INBOX))
    async with fresh.app.connect(url, decide_here=CommandOptions()) as client:
        if missing is None:
            assert await asked(client, None, "o-1") == {"order": "o-1"}
        else:
            with pytest.raises(jetspark.PermissionDenied) as raised:
                await asked(client, None, "o-1")
            assert matches_right(missing, raised.value.subject)


async def test_a_caller_needs_the_subject_of_its_command_alone(fresh: Shop) -> None:
    async with fresh.working("orders.place"), fresh.app.connect(fresh.url) as client:
        await asked(client, None, "o-1")
        none = fresh.user(Rights(("cmd.shop.other",), INBOX))
        async with fresh.app.connect(none) as stranger:
            with pytest.raises(jetspark.PermissionDenied, match=r"cmd\.shop\.orders\.place"):
                await stranger.call(Place(order_id="o-2"))
