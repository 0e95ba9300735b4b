"""Options as Spark hands them over."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import pytest

from jetspark.core.auth import Token, UserPassword
from jetspark.errors import ConfigError
from jetspark.spark.options import (
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
    ("given", "what"),
    [
        ({"maxrow": "1"}, "unknown option 'maxrow'; did you mean 'maxRows'"),
        ({"zzz": "1"}, "expected one of chunk, credentialsFile"),
        ({"maxRows": "0"}, "maxRows='0': expected 1 or more"),
        ({"maxRows": "many"}, "a whole number"),
        ({"chunk": "big"}, "512k"),
        ({"waitMs": "-1"}, "1 millisecond or more"),
        ({"includeHeaders": "maybe"}, "true or false"),
        ({"mode": "turbo"}, "fast or slow"),
        ({"servers": " , "}, "one or more names"),
        ({"servers": "nats://me:secret@host"}, "passwordEnv"),
        ({"user": "me"}, "together with password"),
        ({"password": "p"}, "together with password"),
        ({"user": "me", "password": "p", "passwordEnv": "P"}, "password and passwordEnv"),
        ({"user": "me", "password": "p", "token": "t"}, "one way to authenticate"),
        ({"tlsCertFile": "c"}, "both or none"),
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
