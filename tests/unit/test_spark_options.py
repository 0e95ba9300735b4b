"""Options as Spark hands them over."""

from __future__ import annotations

import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from jetspark.core.auth import Credentials, NKey, Token, UserPassword, create_seed
from jetspark.core.options import TLSConfig
from jetspark.errors import ConfigError
from jetspark.spark.kv.options import ReadOptions, WriteOptions
from jetspark.spark.options import (
    LOSS_REMEDY,
    Connecting,
    boolean,
    choice,
    count,
    describe,
    milliseconds,
    option,
    read_options,
    size,
)
from jetspark.spark.stream.sink import SinkOptions
from jetspark.spark.stream.source_options import SourceOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Example(Connecting):
    max_rows: int | None = option(count, "rows")
    chunk: int = option(size, "bytes", default=1)
    wait_s: float = option(milliseconds, "patience", default=1.0, name="waitMs")
    include_headers: bool = option(boolean, "headers", default=False)
    mode: str = option(choice("fast", "slow"), "how", default="fast")


def read(**given: str) -> Example:
    return read_options(Example, "example", given)


def test_names_are_read_in_any_case_and_values_become_what_they_mean() -> None:
    options = read(MAXROWS="10", chunk="64m", waitms="1500", includeHeaders="TRUE", mode="Slow", servers="a, b")
    assert (options.max_rows, options.chunk, options.wait_s) == (10, 64 << 20, 1.5)
    assert (options.include_headers, options.mode, options.servers) == (True, "slow", ("a", "b"))
    assert read() == Example()
    assert pickle.loads(pickle.dumps(options)) == options
    assert hash(options) != hash(read())


@pytest.mark.parametrize(
    ("given", "size_bytes"),
    [
        ("1", 1),
        ("7", 7),
        ("7b", 7),
        ("1k", 1024),
        ("512kb", 512 * 1024),
        ("1M", 1024 * 1024),
        ("2g", 2 * 1024 * 1024 * 1024),
    ],
)
def test_sizes_are_written_as_spark_writes_them(given: str, size_bytes: int) -> None:
    assert read(chunk=given).chunk == size_bytes


def test_the_least_of_each_number_is_one() -> None:
    least = read(maxRows="1", chunk="1", waitMs="1")
    assert (least.max_rows, least.chunk, least.wait_s) == (1, 1, 0.001)


@pytest.mark.parametrize("name", ["domain", "prefix"])
def test_the_api_may_be_elsewhere(name: str) -> None:
    assert getattr(read(**{name: "hub"}), name) == "hub"


def test_the_remedy_for_a_loss_is_an_option_of_the_source() -> None:
    found = re.fullmatch(r"set (\w+)=(\w+) to continue with the remaining messages", LOSS_REMEDY)
    assert found is not None
    assert not read_options(SourceOptions, "jetspark", {"stream": "S", found[1]: found[2]}).fail_on_data_loss


@pytest.mark.parametrize(
    ("given", "tls"),
    [
        ({}, None),
        ({"tlsCaFile": "ca"}, TLSConfig(ca_file="ca")),
        ({"tlsCertFile": "c", "tlsKeyFile": "k"}, TLSConfig(cert_file="c", key_file="k")),
        (
            {"tlsCaFile": "ca", "tlsCertFile": "c", "tlsKeyFile": "k"},
            TLSConfig(ca_file="ca", cert_file="c", key_file="k"),
        ),
    ],
)
def test_files_of_tls_are_used_as_they_are_given(given: dict[str, str], tls: TLSConfig | None) -> None:
    assert read(**given).tls() == tls


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"maxrow": "1"}, "unknown option 'maxrow'; did you mean 'maxRows'"),
        ({"zzz": "1"}, "expected one of chunk, credentialsFile"),
        ({"maxRows": "0"}, "maxRows='0': expected 1 or more"),
        ({"maxRows": "many"}, "a whole number"),
        ({"chunk": "big"}, "512k"),
        ({"chunk": "k"}, "512k"),
        ({"chunk": ""}, "512k"),
        ({"chunk": "0g"}, "512k"),
        ({"waitMs": "-1"}, "1 millisecond or more"),
        (
            {"waitMs": "9223372036001"},
            "waitMs='9223372036001': expected 1 millisecond or more, and at most 9223372036000",
        ),
        ({"waitMs": "9" * 400}, "at most 9223372036000"),
        ({"servers": "nats://[::1"}, ": expected nats://host:port"),
        ({"servers": "nats://me:secret@[::1"}, "servers: a URL that cannot be read"),
        ({"includeHeaders": "maybe"}, "true or false"),
        ({"mode": "turbo"}, "fast or slow"),
        ({"servers": " , "}, "one or more names"),
        ({"servers": "nats://me:secret@host"}, "passwordEnv"),
        ({"user": "me"}, "together with password"),
        ({"password": "p"}, "together with password"),
        ({"user": "me", "password": "p", "passwordEnv": "P"}, "password and passwordEnv"),
        ({"user": "me", "password": "p", "token": "t"}, "one way to authenticate"),
        ({"tlsCertFile": "c"}, "both, or neither"),
        ({"domain": "d", "prefix": "p"}, "one of the two"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_remedy(given: dict[str, str], what: str) -> None:
    with pytest.raises(ConfigError, match=what.replace("(", r"\(")) as failure:
        read(**given)
    assert "secret" not in str(failure.value)


def test_what_belongs_to_the_query_is_left_alone() -> None:
    assert read(checkpointLocation="/tmp/x", path="y", queryName="q") == Example()


def test_a_secret_is_read_where_it_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NATS_PASSWORD", "hidden")
    (tmp_path / "token").write_text("sesame\n")
    assert read(user="me", passwordEnv="NATS_PASSWORD").auth() == UserPassword("me", "hidden")
    assert read(tokenFile=str(tmp_path / "token")).auth() == Token("sesame")
    assert read(user="me", password="hidden").auth() == UserPassword("me", "hidden")
    assert read(token="sesame").auth() == Token("sesame")
    seed = create_seed("user", bytes(32))
    (tmp_path / "seed").write_text(f"{seed}\n")
    assert read(nkeySeedFile=str(tmp_path / "seed")).auth() == NKey(seed)
    assert read(credentialsFile="me.creds").auth() == Credentials("me.creds")
    assert read().auth() is None
    with pytest.raises(ConfigError, match="no such environment variable"):
        read(user="me", passwordEnv="NOT_THERE").auth()
    with pytest.raises(ConfigError, match="tokenFile="):
        read(tokenFile=str(tmp_path / "missing")).auth()


def test_no_secret_is_shown() -> None:
    options = read(user="me", password="hidden")
    assert "hidden" not in repr(options)
    with pytest.raises(ConfigError) as failure:
        read(user="me", password="hidden", token="sesame")
    assert "hidden" not in str(failure.value)
    assert "sesame" not in str(failure.value)
    with pytest.raises(ConfigError) as failure:
        read(user="me", password="")
    assert "password=..." in str(failure.value)


def test_every_option_says_what_it_is_for() -> None:
    described = describe(Example)
    assert [entry.name for entry in described[-5:]] == ["maxRows", "chunk", "waitMs", "includeHeaders", "mode"]
    assert all(entry.doc for entry in described)
    assert [entry.name for entry in described if entry.is_secret] == ["password", "token"]


@pytest.mark.parametrize(
    ("kind", "given", "meant"),
    [
        (SourceOptions, "subscribe", "stream"),
        (SourceOptions, "subscribePattern", "streamPattern"),
        (SourceOptions, "kafka.bootstrap.servers", "servers"),
        (SourceOptions, "topic", "stream"),
        (SourceOptions, "filter", "subjects"),
        (SourceOptions, "max_offsets_per_trigger", "maxOffsetsPerTrigger"),
        (SinkOptions, "topic", "subject"),
        (SinkOptions, "url", "servers"),
        (SinkOptions, "write_id", "writeId"),
        (ReadOptions, "filter", "keys"),
        (ReadOptions, "table", "bucket"),
        (WriteOptions, "on_conflict", "onConflict"),
    ],
)
def test_a_name_from_elsewhere_is_answered_with_the_one_it_has_here(kind: type, given: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown option '{given}'; did you mean '{meant}'"):
        read_options(kind, "jetstream", {given: "x"})
