from __future__ import annotations

import dataclasses
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jetspark.app import App, Breaker, Retry
from jetspark.core.arguments import MAX_SHOWN, flag, function, instance, iterate, octets, path, text, texts, unfit
from jetspark.errors import ConfigError
from jetspark.jetstream.config import ConsumerConfig, StreamConfig
from jetspark.jetstream.kv import KVConfig
from jetspark.jetstream.objects import ObjectStoreConfig


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (text, ""),
        (text, "a"),
        (flag, True),
        (flag, False),
        (function, len),
        (octets, b"a"),
        (path, "a"),
        (path, Path("a")),
    ],
)
def test_what_is_of_the_type_is_returned_as_it_is(check: Callable[[str, Any], Any], value: Any) -> None:
    assert check("n", value) is value


@pytest.mark.parametrize(
    ("check", "value", "message"),
    [
        (text, 5, "n=5: expected a str"),
        (text, None, "n=None: expected a str"),
        (text, b"a", "n=b'a': expected a str"),
        (flag, 1, "n=1: expected True or False"),
        (flag, 0, "n=0: expected True or False"),
        (flag, "False", "n='False': expected True or False"),
        (flag, None, "n=None: expected True or False"),
        (function, 5, "n=5: expected a function"),
        (octets, "a", "n of type str: expected bytes; encode text with .encode()"),
        (octets, [1], "n of type list: expected bytes; encode text with .encode()"),
        (path, 5, "n=5: expected a path"),
        (path, b"a", "n=b'a': expected a path"),
    ],
)
def test_what_is_not_is_refused_with_its_value_and_what_is_expected(
    check: Callable[[str, Any], Any], value: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        check("n", value)
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [bytearray(b"ab"), memoryview(b"ab")])
def test_data_of_other_types_become_bytes(value: Any) -> None:
    assert octets("n", value) == b"ab"
    assert type(octets("n", value)) is bytes


def test_texts_may_come_from_anything_that_is_iterated_over_and_are_read_once() -> None:
    assert texts("n", ["a", "b"]) == ["a", "b"]
    assert texts("n", iter(("a",))) == ["a"]
    assert texts("n", {"a"}) == ["a"]
    assert texts("n", ()) == []


@pytest.mark.parametrize("values", ["ab", 5, None, b"ab", [5], ["a", None], {"a": "b"}])
def test_one_text_is_not_several(values: Any) -> None:
    with pytest.raises(ConfigError, match=r"^n=.*: expected a list of keys$"):
        texts("n", values, "a list of keys")


def test_an_instance_of_a_subclass_is_one() -> None:
    assert instance("n", True, int) is True


@pytest.mark.parametrize(("kind", "expected"), [(int, "a int"), (OSError, "an OSError")])
def test_another_class_is_refused_by_the_name_of_the_right_one(kind: type, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"^n='a': expected {expected}$"):
        instance("n", "a", kind)
    with pytest.raises(ConfigError, match=r"^n='a': expected what makes sense$"):
        instance("n", "a", kind, "what makes sense")


def test_what_cannot_be_iterated_over_is_refused() -> None:
    assert list(iterate("n", [1], "numbers")) == [1]
    with pytest.raises(ConfigError, match=r"^n=5: expected numbers$"):
        iterate("n", 5, "numbers")


def test_an_error_of_the_iterable_itself_is_its_own() -> None:
    failing = (int([]) for _ in range(1))  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="int"):
        list(iterate("n", failing, "numbers"))


def test_a_long_value_is_shown_in_part() -> None:
    assert str(unfit("n", "a" * MAX_SHOWN, "less")) == f"n='{'a' * (MAX_SHOWN - 1)}...: expected less"
    assert str(unfit("n", "a" * (MAX_SHOWN - 2), "less")) == f"n='{'a' * (MAX_SHOWN - 2)}': expected less"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: StreamConfig(max_age=60), "StreamConfig(max_age=...): no such field; did you mean max_age_s?"),  # type: ignore[call-arg]
        (lambda: StreamConfig(name="S", max_msgs=5), "(max_msgs=...): no such field; did you mean max_messages?"),  # type: ignore[call-arg]
        (lambda: StreamConfig(name="S", num_replicas=3), "did you mean replicas?"),  # type: ignore[call-arg]
        (lambda: StreamConfig(name="S", replica=3), "did you mean replicas?"),  # type: ignore[call-arg]
        (lambda: ConsumerConfig(ack_wait=3), "ConsumerConfig(ack_wait=...): no such field; did you mean ack_wait_s?"),  # type: ignore[call-arg]
        (lambda: KVConfig(bucket="b", ttl=3), "KVConfig(ttl=...): no such field; did you mean ttl_s?"),  # type: ignore[call-arg]
        (lambda: ObjectStoreConfig(bucket="b", ttl=3), "did you mean ttl_s?"),  # type: ignore[call-arg]
        (lambda: Retry(attempt=3), "RetryPolicy(attempt=...): no such field; did you mean attempts?"),  # type: ignore[call-arg]
        (lambda: Breaker(xyz=3), "Breaker(xyz=...): no such field; it has failures, open_s"),  # type: ignore[call-arg]
        (lambda: dataclasses.replace(Breaker(), open=3), "did you mean open_s?"),  # type: ignore[call-arg]
    ],
    ids=range(10),
)
def test_a_field_that_does_not_exist_is_told_with_the_one_that_was_meant(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError) as raised:
        make()
    assert said in str(raised.value)


def test_an_explained_dataclass_is_a_dataclass_like_others() -> None:
    config = StreamConfig(name="S", max_age_s=5)
    assert dataclasses.replace(config, max_age_s=6) == StreamConfig(name="S", max_age_s=6)
    assert pickle.loads(pickle.dumps(config)) == config
    assert "max_age_s" in inspect.signature(StreamConfig).parameters
    with pytest.raises(ConfigError, match=r"concurency: expected some of .*; did you mean concurrency\?"):
        App("a", stream="S").handler(durable="h", concurency=3)  # type: ignore[call-arg]
