"""Every argument of every public constructor, given as something that is not of its type.

What may come of it: an error of JetSpark that names the argument and says what is expected. Methods are in
``conformance/test_wrong_types.py``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
from support.type_hints import fits, hints_of
from support.wrong_types import VALUES, complaint

import jetspark
import jetspark.batcher
import jetspark.batcher.blocking
import jetspark.blocking
import jetspark.server
from jetspark import ConfigError, ConnectOptions, JetSparkError
from jetspark.server import NatsServer

# Nobody but the library makes these: they are told, returned or raised. What they are given comes from a server, and
# other tests damage that.
MADE_BY_US = {
    "AccountInfo",
    "AccountLimits",
    "AccountTier",
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
                complaints.append(complaint(what, name, value, outcome))
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
