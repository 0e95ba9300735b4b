from __future__ import annotations

import dataclasses
import inspect
import ssl
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

import jetspark
from jetspark.app.client import ConnectArguments
from jetspark.core.options import ConnectKeywords, ConnectOptions, TLSConfig
from jetspark.errors import ConfigError
from jetspark.publish.fast_options import (
    FastBatchKeywords,
    FastBatchOptions,
    FastPublisherKeywords,
    FastPublisherOptions,
)
from jetspark.spark.engine.projection_options import ProjectionKeywords, ProjectionOptions, ReadingKeywords
from jetspark.spark.options import describe
from jetspark.spark.stream.source_options import SourceOptions

SECONDS = [
    "connect_timeout_s",
    "request_timeout_s",
    "drain_timeout_s",
    "reconnect_wait_s",
    "reconnect_wait_max_s",
    "ping_interval_s",
]
COUNTS = ["max_outstanding_pings", "send_buffer_bytes", "max_pending_messages", "max_pending_bytes"]


@pytest.mark.parametrize("name", SECONDS)
@pytest.mark.parametrize("value", [0, -1, 0.0, float("nan"), "5", None])
def test_durations_are_seconds_above_zero(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value!r}: expected seconds above 0"):
        ConnectOptions(**{name: value})
    one: Any = 1
    assert getattr(ConnectOptions(**{name: one}), name) == 1


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 1.5, "5", None])
def test_counts_and_sizes_are_one_or_more(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value!r}: expected (a whole number, )?1 or more"):
        ConnectOptions(**{name: value})
    one: Any = 1
    assert getattr(ConnectOptions(**{name: one}), name) == 1


@pytest.mark.parametrize("value", [0, -1, "3", 1.5])
def test_reconnect_attempts_are_one_or_more_or_without_end(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"max_reconnect_attempts=.*: expected (a whole number, )?1 or more, or None"):
        ConnectOptions(max_reconnect_attempts=value)
    assert ConnectOptions(max_reconnect_attempts=1).max_reconnect_attempts == 1
    assert ConnectOptions().max_reconnect_attempts is None


def test_a_full_buffer_waits_or_raises() -> None:
    assert ConnectOptions(when_full="raise").when_full == "raise"
    with pytest.raises(ConfigError, match="when_full='drop': expected 'wait' or 'raise'"):
        ConnectOptions(when_full="drop")  # type: ignore[arg-type]


def test_options_do_not_change() -> None:
    with pytest.raises(FrozenInstanceError):
        ConnectOptions().name = "x"  # type: ignore[misc]


def test_overrides_go_on_top_of_options() -> None:
    base = ConnectOptions(name="base", ping_interval_s=1)
    assert ConnectOptions.of(base, {"name": "mine"}) == ConnectOptions(name="mine", ping_interval_s=1)
    assert ConnectOptions.of(base, {}) == base
    assert ConnectOptions.of(None, {"name": "mine"}) == ConnectOptions(name="mine")
    assert ConnectOptions.of(None, {}) == ConnectOptions()


def test_overrides_are_checked_too() -> None:
    with pytest.raises(ConfigError, match="ping_interval_s=0"):
        ConnectOptions.of(ConnectOptions(), {"ping_interval_s": 0})


def test_an_unknown_option_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown connect option nmae, tiemout: expected one of") as failure:
        ConnectOptions.of(None, {"nmae": "x", "tiemout": 1, "name": "y"})  # type: ignore[typeddict-unknown-key]
    for entry in fields(ConnectOptions):
        assert entry.name in str(failure.value)


@pytest.mark.parametrize("file", ["ca_file", "cert_file"])
def test_a_context_of_ones_own_excludes_files(file: str) -> None:
    files: dict[str, Any] = {file: "x.pem"}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with pytest.raises(ConfigError, match="load them into the context"):
        TLSConfig(context=context, **files)
    TLSConfig(context=context, hostname="a", handshake_first=True)


def test_a_key_needs_its_certificate() -> None:
    with pytest.raises(ConfigError, match=r"key_file='key.pem': expected cert_file too"):
        TLSConfig(key_file="key.pem")
    TLSConfig(cert_file="cert.pem")
    TLSConfig(cert_file="cert.pem", key_file="key.pem")


def test_the_key_password_is_not_shown() -> None:
    config = TLSConfig(cert_file="cert.pem", key_file="key.pem", key_password="hunter2")
    assert "hunter2" not in repr(config)
    assert "cert.pem" in repr(config)


@pytest.mark.parametrize(
    ("options", "keywords", "named"),
    [
        (ConnectOptions, ConnectKeywords, set()),
        (FastBatchOptions, FastBatchKeywords, {"gap"}),
        (FastPublisherOptions, FastPublisherKeywords, {"message_ids"}),
    ],
)
def test_keywords_are_the_fields_of_their_options(options: type[Any], keywords: type[Any], named: set[str]) -> None:
    """``named`` are arguments of their own in the signature."""
    expected = {field.name: field.type for field in dataclasses.fields(options) if field.name not in named}
    # The annotations of a typed dict are forward references, which keep their text.
    assert {name: hint.__forward_arg__ for name, hint in keywords.__annotations__.items()} == expected


def test_applications_take_the_arguments_of_connect() -> None:
    arguments = inspect.signature(jetspark.connect).parameters.keys() - {"servers", "overrides"}
    assert {*ConnectArguments.__annotations__} == arguments | {*ConnectKeywords.__annotations__}


def test_projections_on_spark_take_the_options_of_the_format_that_no_argument_says() -> None:
    said = {"servers", "stream", "streamPattern", "subjects"}
    said |= {"startingOffsets", "endingOffsets", "startingTimestamp", "endingTimestamp"}
    reading = {each.name for each in describe(SourceOptions)} - said
    assert {*ReadingKeywords.__annotations__} == reading
    internal = {"app", "appFolder", "outline", "projections", "buckets", "events", "versions"}
    internal |= {"letters", "stored", "report", "records", "placed", "maxPayloadBytes"}
    folding = {each.name for each in describe(ProjectionOptions)} - said - internal
    assert {*ProjectionKeywords.__annotations__} == folding
