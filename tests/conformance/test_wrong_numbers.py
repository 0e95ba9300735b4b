"""Every number a public method takes, given as something that is none, or none that makes sense.

One table for all of them; that it has all of them is checked against the signatures.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from support.drivers import Driver, on_both_drivers
from support.one_of_each import OneOfEach

import jetspark
import jetspark.aio.kv
import jetspark.blocking
import jetspark.blocking.kv
from jetspark import ConfigError, Expect
from jetspark.server import NatsServer

# What no count, sequence, size or time can be. None is one of them where the signature does not have it.
WRONG: list[Any] = ["5", math.nan, math.inf, -1, True, [1], 1e300]
NOT_WHOLE: list[Any] = [1.5]

# Of each class: of each method, what else it is called with.
ARGUMENTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "Client": {
        "publish": ("a",),
        "subscribe": ("a",),
        "request": ("a",),
        "request_many": ("a",),
        "jetstream": (),
        "flush": (),
        "drain": (),
        "close": (),
    },
    "Subscription": {"next": (), "unsubscribe": (), "drain": ()},
    "JetStream": {
        "publish": ("s.a",),
        "publish_async": ("s.a",),
        "publish_async_complete": (),
        "atomic_batch": (),
    },
    "AtomicBatch": {"add": ("s.a",), "commit": ("s.a",)},
    "FastBatch": {"add": ("s.a",), "commit": ("s.a",)},
    "FastPublisher": {"publish": ("s.a",), "flush": (), "wait_published": (1,), "close": ()},
    "Stream": {
        "purge": (),
        "get_message": (),
        "get_messages": (),
        "get_last_messages": (["s.a"],),
        "delete_message": (),
        "ordered_consumer": (),
    },
    "Consumer": {"fetch": (), "next": (), "messages": (), "batches": (), "reset": ()},
    "JetStreamMessage": {"ack_sync": (), "nak": ()},
    "KeyValue": {
        "get": ("k",),
        "create": ("k", b""),
        "update": ("k", b""),
        "delete": ("k",),
        "purge": ("k",),
        "get_at": ("k",),
        "snapshot": (["k"],),
        "watch": (),
        "purge_deletes": (),
    },
    "Transaction": {"expect": ("k",), "create": ("k", b""), "update": ("k", b""), "delete": ("k",), "purge": ("k",)},
    "ObjectStore": {"put": ("o", b"data"), "purge_orphans": ()},
}
# What a method needs besides, for the number to be looked at.
BESIDES: dict[tuple[str, str], dict[str, Any]] = {
    ("update", "ttl"): {"revision": 1},
    ("fetch", "min_pending"): {"group": "g"},
    ("fetch", "min_ack_pending"): {"group": "g"},
    ("fetch", "priority"): {"group": "g"},
    ("messages", "min_pending"): {"group": "g"},
    ("messages", "min_ack_pending"): {"group": "g"},
    ("messages", "priority"): {"group": "g"},
    ("wait_published", "position"): {},
}
# What makes them, or configures: keywords of these are numbers, too.
OPTIONS: dict[str, list[str]] = {
    "fast_batch": ["flow", "max_outstanding_acks", "timeout", "ping_after_s", "keep_alive_s", "wait_for_stream_s"],
    "fast_publisher": [
        "max_pending_messages",
        "max_pending_bytes",
        "flow",
        "max_outstanding_acks",
        "patience_s",
        "batch_timeout_s",
        "wait_for_stream_s",
    ],
}
CONNECT_OPTIONS = [
    "connect_timeout_s",
    "request_timeout_s",
    "drain_timeout_s",
    "reconnect_wait_s",
    "reconnect_wait_max_s",
    "max_reconnect_attempts",
    "ping_interval_s",
    "max_outstanding_pings",
    "send_buffer_bytes",
    "max_pending_messages",
    "max_pending_bytes",
]

_IS_NUMBER = re.compile(r"\b(int|float)\b")


def _kind(module: Any, name: str) -> type:
    where = jetspark.aio.kv if module is jetspark else jetspark.blocking.kv
    kind: type = getattr(where if name == "Transaction" else module, name)
    return kind


def _numbers(kind: type, method: str) -> dict[str, inspect.Parameter]:
    """The arguments of a method that are numbers, those it takes by ``**options: Unpack[...]`` too."""
    function = getattr(kind, method)
    parameters = dict(inspect.signature(function).parameters)
    for each in list(parameters.values()):
        unpacked = re.fullmatch(r"Unpack\[(\w+)\]", str(each.annotation))
        if unpacked is not None and method not in OPTIONS:
            keywords = function.__globals__[unpacked[1]].__annotations__
            for name, hint in keywords.items():
                text = getattr(hint, "__forward_arg__", str(hint))
                parameters[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=text)
    return {name: each for name, each in parameters.items() if _IS_NUMBER.match(str(each.annotation))}


@pytest.mark.parametrize("module", [jetspark, jetspark.blocking], ids=["asyncio", "blocking"])
def test_the_table_has_every_method_that_takes_a_number(module: Any) -> None:
    for name, methods in ARGUMENTS.items():
        kind = _kind(module, name)
        public = [method for method in dir(kind) if not method.startswith("_") and callable(getattr(kind, method))]
        assert {method for method in public if _numbers(kind, method)} == methods.keys(), name


async def _outcome(call: Callable[[], Any]) -> object:
    """What a call raises, or the first step of what it returned."""
    try:
        async with asyncio.timeout(30):
            result = call()
            if inspect.isawaitable(result):
                result = await result
            if hasattr(result, "__aiter__"):
                async for entry in result:
                    return entry
            return result
    except Exception as error:
        return error


def _complaint(what: str, name: str, value: Any, outcome: object) -> str | None:
    """What is wrong with the answer to a wrong value; None when nothing is."""
    if not isinstance(outcome, ConfigError):
        return f"{what}({name}={value!r}): {outcome!r}"
    if not re.search(rf"\b{name}={re.escape(repr(value))}: expected ", str(outcome)):
        return f"{what}({name}={value!r}): says {outcome}"
    return None


def _wrong_values(annotation: str, default: object) -> list[Any]:
    wrong = WRONG + (NOT_WHOLE if annotation.startswith("int") else [])
    return wrong if "None" in annotation or default is None else [*wrong, None]


@pytest.mark.parametrize("kind", sorted(ARGUMENTS))
@on_both_drivers
async def test_a_wrong_number_is_refused_by_name_with_its_value_and_what_is_expected(
    driver: Driver, server: NatsServer, kind: str
) -> None:
    complaints: list[str | None] = []
    async with driver.connect(server.url) as nc, OneOfEach(nc, driver) as world:
        target = world.objects[kind]
        for method, arguments in ARGUMENTS[kind].items():
            for name, parameter in _numbers(_kind(jetspark, kind), method).items():
                for value in _wrong_values(str(parameter.annotation), parameter.default):
                    given = BESIDES.get((method, name), {}) | {name: value}
                    positional = () if method == "wait_published" and name == "position" else arguments
                    outcome = await _outcome(lambda: getattr(target, method)(*positional, **given))  # noqa: B023
                    complaints.append(_complaint(f"{kind}.{method}", name, value, outcome))
        assert nc.is_connected
    assert [complaint for complaint in complaints if complaint] == []


@on_both_drivers
async def test_a_wrong_number_among_the_options_of_a_publisher_is_refused(driver: Driver, server: NatsServer) -> None:
    complaints: list[str | None] = []
    async with driver.connect(server.url) as nc:
        js = nc.jetstream()
        for method, names in OPTIONS.items():
            for name in names:
                is_whole = not name.endswith(("_s", "timeout"))
                for value in [*WRONG, None, *(NOT_WHOLE if is_whole else [])]:
                    outcome = await _outcome(lambda: getattr(js, method)(**{name: value}))  # noqa: B023
                    complaints.append(_complaint(method, name, value, outcome))
        for name in ("last_sequence", "last_subject_sequence"):
            for value in WRONG + NOT_WHOLE:
                outcome = await _outcome(lambda: Expect(**{name: value}))  # noqa: B023
                complaints.append(_complaint("Expect", name, value, outcome))
    assert [complaint for complaint in complaints if complaint] == []


@on_both_drivers
async def test_a_wrong_number_among_the_options_of_a_connection_is_refused(driver: Driver) -> None:
    complaints: list[str | None] = []
    for name in CONNECT_OPTIONS:
        wrong = WRONG + (NOT_WHOLE if not name.endswith("_s") else [])
        for value in wrong if name == "max_reconnect_attempts" else [*wrong, None]:
            outcome = await _outcome(lambda: driver.connect("nats://127.0.0.1:1", **{name: value}))  # noqa: B023
            complaints.append(_complaint("connect", name, value, outcome))
    assert [complaint for complaint in complaints if complaint] == []
