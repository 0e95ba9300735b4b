"""Every argument of every public method and constructor, given as something that is not of its type.

What may come of it: an error of JetSpark that names the argument and says what is expected. A type checker tells the
same before the program runs; this is for those who use none. Methods and arguments are found by introspection, so that
a new one is in the table by itself.
"""

from __future__ import annotations

import asyncio
import datetime
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.drivers import Driver, on_both_drivers
from support.one_of_each import OneOfEach
from support.type_hints import fits, hints_of

import jetspark
import jetspark.aio.kv
import jetspark.batcher
import jetspark.batcher.blocking
import jetspark.blocking
import jetspark.server
from jetspark import ConfigError, ConnectOptions, JetSparkError
from jetspark.server import NatsServer


class Odd:
    """Something that nobody expects."""

    def __repr__(self) -> str:
        return "<odd>"


# A value of every type that one may mistake for another; of each argument those are tried that its type does not allow.
VALUES: list[Any] = [
    None,
    True,
    5,
    1.5,
    "x",
    b"x",
    [5],
    ["x"],
    ("s.a",),
    [("s.a",)],
    [("s.a", b"", 5)],
    {5: 5},
    {"x": "y"},
    Odd(),
    Odd,
    datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC),
]

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


# What an argument may be called, where a part of it is at fault.
NAMES_OF = {
    "headers": "headers?",
    "items": "items|headers",
    "*filters": "filters|key",
    "*filter_subjects": "filter_subjects|subject",
    "filters": "filters|subject|key",
}


def _kind(name: str) -> type:
    kind: type = getattr(jetspark.aio.kv if name == "Transaction" else jetspark, name)
    return kind


def _methods(kind: type) -> Iterator[str]:
    for name in dir(kind):
        if not name.startswith("_") and callable(getattr(kind, name)):
            yield name


def _complaint(what: str, name: str, value: object, outcome: object) -> str | None:
    """What is wrong with the outcome of a wrong value; None when nothing is."""
    if not isinstance(outcome, ConfigError):
        return f"{what}({name}={value!r}): {outcome!r}"
    called = NAMES_OF.get(name, re.escape(name))
    if not (re.search(rf"\b({called})\b", str(outcome)) and re.search(r"\b(expected|must be)\b", str(outcome))):
        return f"{what}({name}={value!r}): says {outcome}"
    return None


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
                found.append(_complaint(f"{kind}.{method}", name, value, outcome))
    assert found, f"{kind} has no method that takes anything"
    return [each for each in found if each]


# Those whose methods take nothing but ``self``.
WITHOUT_ARGUMENTS = {"OrderedConsumer"}


@on_both_drivers
async def test_a_method_refuses_an_argument_of_a_wrong_type_by_its_name(driver: Driver, shared: NatsServer) -> None:
    complaints: list[str] = []
    async with driver.connect(shared.url) as nc, OneOfEach(nc, driver) as world:
        for kind, target in world.objects.items():
            if kind not in WITHOUT_ARGUMENTS:
                complaints += await _complaints(kind, target)
        assert nc.is_connected
    assert complaints == []


# ---- what is made ----------------------------------------------------------------------------------------------------

# Nobody but the library makes these: they are told, returned or raised. What they are given comes from a server, and
# other tests damage that.
MADE_BY_US = {
    "AccountInfo",
    "AtomicBatch",
    "BatchAbandoned",
    "Client",
    "Closed",
    "ClusterInfo",
    "Connected",
    "Consumer",
    "ConsumerInfo",
    "DeadLetter",
    "Disconnected",
    "ErrorReported",
    "FastBatch",
    "FastPublisher",
    "FastReceipt",
    "Flushed",
    "JetStream",
    "JetStreamMessage",
    "KVEntry",
    "KVStatus",
    "KeyValue",
    "LameDuck",
    "Message",
    "Metadata",
    "NatsServerBinary",
    "ObjectInfo",
    "ObjectLink",
    "ObjectStore",
    "ObjectStoreStatus",
    "OrderedConsumer",
    "PubAck",
    "ReconnectFailed",
    "Reconnected",
    "Refusal",
    "Refused",
    "SequencePair",
    "ServerInfo",
    "ServersDiscovered",
    "SinkStats",
    "SlowConsumer",
    "Stats",
    "Status",
    "StoredMessage",
    "Stream",
    "StreamInfo",
    "StreamState",
    "Subscription",
    "Written",
}


class _Sink:
    async def write(self, batch: object) -> None: ...


# What else a constructor is given.
BESIDES_MAKING: dict[str, dict[str, Any]] = {
    "AtomicSink": {"js": jetspark.JetStream(None), "subject": "s.a"},  # type: ignore[arg-type]
    "Batcher": {},
    "BatcherConfig": {"sink": _Sink(), "max_batch_size": 1, "max_batch_delay": 1.0},
    "ClusterRoutes": {"name": "c", "routes": []},
    "DeadLetterSink": {"sink": _Sink(), "dead_letters": _Sink()},
    "FastIngestSink": {"js": jetspark.JetStream(None), "subject": "s.a"},  # type: ignore[arg-type]
    "External": {"api_prefix": "a"},
    "FileSink": {"path": "letters"},
    "KVConfig": {"bucket": "b"},
    "ObjectMeta": {"name": "o"},
    "ObjectStoreConfig": {"bucket": "b"},
    "RateLimitSink": {"sink": _Sink(), "items_per_s": 1.0},
    "Republish": {"source": "a", "destination": "b"},
    "ServerTLS": {"cert_file": __file__, "key_file": __file__},
    "StreamConfig": {"name": "S"},
    "StreamSource": {"name": "S"},
    "SubjectTransform": {"source": "a", "destination": "b"},
    "User": {"user": "u", "password": "p"},
    "UserPassword": {"user": "u", "password": "p"},
    "find_nats_server": {},
}
BESIDES_MAKING |= {name: {"sink": _Sink()} for name in ("CircuitBreakerSink", "MeteredSink", "RetrySink")}


def _makers() -> Iterator[tuple[str, Any]]:
    seen = set()
    for module in (jetspark, jetspark.blocking, jetspark.server, jetspark.batcher, jetspark.batcher.blocking):
        for name in module.__all__:
            made = getattr(module, name)
            if made in seen:
                continue  # the drivers share it
            seen.add(made)
            is_class = inspect.isclass(made) and not issubclass(made, Exception)
            is_class = is_class and not getattr(made, "_is_protocol", False)
            if (is_class or inspect.isfunction(made)) and name not in MADE_BY_US:
                yield f"{module.__name__}.{name}", made


def _making(make: Any) -> dict[str, tuple[Any, Any]]:
    if inspect.isclass(make):
        hints = hints_of(make.__init__)
        hints.pop("self", None)
        return hints
    return hints_of(make)


@pytest.mark.parametrize(("what", "make"), [pytest.param(*each, id=each[0]) for each in _makers()])
def test_a_constructor_refuses_an_argument_of_a_wrong_type_by_its_name(what: str, make: Any) -> None:
    complaints = []
    beside = BESIDES_MAKING.get(what.rpartition(".")[2], {})
    for name, (hint, _) in _making(make).items():
        for value in VALUES:
            if not fits(value, hint):
                try:
                    outcome = make(**beside | {name: value})
                except Exception as error:
                    outcome = error
                complaints.append(_complaint(what, name, value, outcome))
    assert [each for each in complaints if each] == []


def test_nothing_is_listed_as_made_by_us_that_is_not_public() -> None:
    modules = (jetspark, jetspark.server, jetspark.batcher)
    assert MADE_BY_US - {name for module in modules for name in module.__all__} == set()


# ---- connect ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keyword", "meant"),
    [
        ("user", "auth=UserPassword(user, password)"),
        ("password", "auth=UserPassword(user, password)"),
        ("token", "auth=Token(token)"),
        ("user_credentials", "auth=Credentials(path)"),
        ("ssl", "tls=TLSConfig(...)"),
        ("verbose", "auth"),
    ],
)
@pytest.mark.parametrize("module", [jetspark, jetspark.blocking], ids=["asyncio", "blocking"])
def test_connect_says_what_an_option_of_other_clients_is_called_here(module: Any, keyword: str, meant: str) -> None:
    with pytest.raises(ConfigError) as caught:
        module.connect("nats://127.0.0.1:1", **{keyword: "x"})
    assert meant in str(caught.value)
    for known in ("auth", "tls", "on_event", *ConnectOptions.__dataclass_fields__):
        assert re.search(rf"\b{known}\b", str(caught.value)), known


def test_connect_with_the_value_of_a_variable_that_is_not_set_says_so() -> None:
    with pytest.raises(ConfigError, match=r"servers=None: expected .*is the variable set"):
        jetspark.blocking.connect(None)  # type: ignore[arg-type]


def test_an_error_of_a_secret_does_not_show_it() -> None:
    for make in (
        lambda: jetspark.UserPassword("u", ["hush"]),  # type: ignore[arg-type]
        lambda: jetspark.Token(["hush"]),  # type: ignore[arg-type]
        lambda: jetspark.NKey(["hush"]),  # type: ignore[arg-type]
        lambda: jetspark.Credentials(text=["hush"]),  # type: ignore[arg-type]
        lambda: jetspark.TLSConfig(key_password=["hush"]),  # type: ignore[arg-type]
        lambda: jetspark.blocking.connect("nats://127.0.0.1:1", auth=["hush"]),  # type: ignore[arg-type]
        lambda: NatsServer(token=["hush"]),  # type: ignore[arg-type]
    ):
        with pytest.raises(JetSparkError) as caught:
            make()
        assert "hush" not in str(caught.value)
