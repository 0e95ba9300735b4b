"""Every argument of every public method, given as something that is not of its type.

What may come of it: an error of JetSpark that names the argument and says what is expected. A type checker tells the
same before the program runs; this is for those who use none. Methods and arguments are found by introspection, so that
a new one is in the table by itself. Constructors are in ``unit/test_wrong_types.py``.
"""

from __future__ import annotations

import asyncio
import datetime
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from support.drivers import Driver, on_both_drivers
from support.one_of_each import OneOfEach
from support.type_hints import fits, hints_of
from support.wrong_types import VALUES, complaint

import jetspark
import jetspark.aio.kv
import jetspark.batcher
import jetspark.batcher.blocking
import jetspark.blocking
import jetspark.server
from jetspark.server import NatsServer

# What else a method is called with, by the name of the argument.
BESIDES: dict[str, Any] = {
    "bucket": "b",
    "config": "S",
    "data": b"x",
    "filters": ["k"],
    "items": [],
    "key": "k",
    "keys": "k",
    "messages": [],
    "meta": jetspark.ObjectMeta(name="o"),
    "name": "o",
    "position": 1,
    "revision": 1,
    "sequence": 1,
    "source": b"x",
    "subject": "s.a",
    "target": jetspark.ObjectInfo(bucket="b", name="o", nuid="n"),
    "value": b"v",
}
# The same where the general answer does not do.
BESIDES_OF: dict[tuple[str, str], dict[str, Any]] = {
    ("Consumer", "fetch"): {"timeout": 0.1},
    ("Consumer", "pause"): {"until": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)},
    ("Consumer", "unpin"): {"group": "g"},
    ("FastBatch", "commit"): {"subject": "s.a"},
    ("AtomicBatch", "commit"): {"subject": "s.a"},
    ("Stream", "get_message"): {"sequence": 1},
}
# An argument beside which another one cannot stand.
ALONE = {("Stream", "get_message", "last_for")}

# None where the default is "nothing": it says the same.
NONE_IS_NOTHING = {("Client", "publish", "reply"), ("Client", "subscribe", "queue")}


def _kind(name: str) -> type:
    kind: type = getattr(jetspark.aio.kv if name == "Transaction" else jetspark, name)
    return kind


def _methods(kind: type) -> Iterator[str]:
    for name in dir(kind):
        if not name.startswith("_") and callable(getattr(kind, name)):
            yield name


async def _outcome(call: Callable[[], Any]) -> object:
    """What a call raises or returns; of an iterator, its first step."""
    try:
        async with asyncio.timeout(60):
            result = call()
            if inspect.isawaitable(result):
                result = await result
            if inspect.isasyncgen(result) or hasattr(result, "__anext__"):
                return await anext(result, None)
            return result
    except Exception as error:
        return error


async def _complaints(kind: str, target: Any) -> list[str]:
    found = []
    for method in _methods(_kind(kind)):
        arguments = hints_of(getattr(_kind(kind), method))
        arguments.pop("self", None)
        for name, (hint, _) in arguments.items():
            required = {each for each, (_, default) in arguments.items() if default is inspect.Parameter.empty}
            beside = {each: BESIDES[each] for each in required if each in BESIDES}
            beside |= BESIDES_OF.get((kind, method), {}) if (kind, method, name) not in ALONE else {}
            for value in VALUES:
                if fits(value, hint) or (value is None and (kind, method, name) in NONE_IS_NOTHING):
                    continue
                positional = [value] if name.startswith("*") else []
                given = beside | ({} if positional else {name: value})
                outcome = await _outcome(lambda: getattr(target, method)(*positional, **given))  # noqa: B023
                found.append(complaint(f"{kind}.{method}", name, value, outcome))
    assert found, f"{kind} has no method that takes anything"
    return [each for each in found if each]


# Those whose methods take nothing but ``self``.
WITHOUT_ARGUMENTS = {"OrderedConsumer"}


@on_both_drivers
async def test_a_method_refuses_an_argument_of_a_wrong_type_by_its_name(driver: Driver, server: NatsServer) -> None:
    complaints: list[str] = []
    async with driver.connect(server.url) as nc, OneOfEach(nc, driver) as world:
        for kind, target in world.objects.items():
            if kind not in WITHOUT_ARGUMENTS:
                complaints += await _complaints(kind, target)
        assert nc.is_connected
    assert complaints == []
