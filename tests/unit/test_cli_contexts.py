"""Contexts of the nats command line: each setting is used, or refused by its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.credentials import USER, credentials_text

from jetspark import ConfigError, Credentials, NKey, TLSConfig, Token, UserPassword
from jetspark.cli.contexts import context_options
from jetspark.cli.run_spark import spark_options

URL = {"url": "nats://one:4222, nats://two:4222"}
JWT = credentials_text(USER).splitlines()[1]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("NATS_CONTEXT", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "nats" / "context").mkdir(parents=True)
    return tmp_path / "nats"


def write(folder: Path, name: str, context: Any) -> None:
    (folder / "context" / f"{name}.json").write_text(json.dumps(context), encoding="utf-8")


def options_of(folder: Path, **context: Any) -> dict[str, Any]:
    (folder / "context.txt").write_text("here\n", encoding="utf-8")
    write(folder, "here", URL | context)
    return context_options()


def test_without_a_context_there_are_no_options(folder: Path) -> None:
    assert context_options() == {}
    (folder / "context.txt").write_text("\n", encoding="utf-8")
    assert context_options() == {}


def test_the_environment_names_a_context_before_the_selected_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert options_of(folder) == {"servers": ["nats://one:4222", "nats://two:4222"]}
    write(folder, "other", {"url": "nats://other:4222"})
    monkeypatch.setenv("NATS_CONTEXT", "other")
    assert context_options() == {"servers": ["nats://other:4222"]}
    monkeypatch.setenv("NATS_CONTEXT", "gone")
    with pytest.raises(ConfigError, match=r"nats context 'gone' .* give --servers"):
        context_options()


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ({"user": "u", "password": "p"}, {"auth": UserPassword("u", "p")}),
        ({"user": "u"}, {"auth": UserPassword("u", "")}),
        ({"token": "t"}, {"auth": Token("t")}),
        ({"creds": "/a/b.creds"}, {"auth": Credentials(Path("/a/b.creds"))}),
        ({"user_jwt": JWT, "user_seed": USER}, {"auth": Credentials(text=credentials_text(USER))}),
        ({"inbox_prefix": "_MINE"}, {"inbox_prefix": "_MINE"}),
        ({"jetstream_domain": "hub"}, {"jetstream_domain": "hub"}),
        ({"ca": "/ca.pem"}, {"tls": TLSConfig(ca_file=Path("/ca.pem"))}),
        ({"tls_first": True}, {"tls": TLSConfig(handshake_first=True)}),
        (
            {"cert": "/c.pem", "key": "/k.pem"},
            {"tls": TLSConfig(cert_file=Path("/c.pem"), key_file=Path("/k.pem"))},
        ),
        # As the nats command line writes them: with everything that there is not.
        ({"description": "mine", "color_scheme": "red", "nsc": "", "socks_proxy": "", "jetstream_domain": ""}, {}),
    ],
    ids=lambda value: ",".join(value) or "nothing",
)
def test_what_a_context_says_is_used(folder: Path, context: dict[str, Any], expected: dict[str, Any]) -> None:
    found = options_of(folder, **context)
    assert found == {"servers": ["nats://one:4222", "nats://two:4222"], **expected}


def test_files_are_found_below_the_home_folder(folder: Path) -> None:
    home = folder.parent / "home"
    home.mkdir()
    (home / "user.nk").write_text(f"{USER}\n", encoding="utf-8")
    assert options_of(folder, nkey="~/user.nk")["auth"] == NKey(USER)
    assert options_of(folder, creds="~/me.creds")["auth"] == Credentials(home / "me.creds")


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (
            {"jetstream_api_prefix": "x", "socks_proxy": "y"},
            "jetstream_api_prefix, socks_proxy: not supported by JetSpark",
        ),
        ({"nsc": "nsc://a/b/c"}, "nsc: not supported by JetSpark"),
        ({"windows_cert_store": "user"}, "windows_cert_store: not supported by JetSpark"),
        ({"user": "u", "creds": "c"}, "creds and user: expected one way to log in"),
        ({"user_jwt": JWT}, "user_seed is missing"),
        ({"user_seed": USER}, "user_jwt is missing"),
        ({"user_jwt": "no.jwt", "user_seed": "SUNO"}, "seed"),
        ({"nkey": "/no/such/file"}, "No such file"),
        ({"key": "/k.pem"}, "cert_file too"),
        ({"ca": 3}, "ca: expected a text"),
        ({"url": ""}, "it has no url"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(folder: Path, context: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"nats context 'here' .*{message}.*give --servers"):
        options_of(folder, **context)


def test_a_context_that_is_no_object_is_refused(folder: Path) -> None:
    (folder / "context.txt").write_text("here", encoding="utf-8")
    write(folder, "here", ["url"])
    with pytest.raises(ConfigError, match="expected a JSON object"):
        context_options()


def test_spark_gets_the_files_or_says_what_it_cannot_do(folder: Path) -> None:
    found = spark_options(
        options_of(folder, ca="/ca.pem", cert="/c.pem", key="/k.pem", creds="/b.creds", jetstream_domain="hub")
    )
    assert {key: value for key, value in found.items() if key != "servers"} == {
        "tlsCaFile": "/ca.pem",
        "tlsCertFile": "/c.pem",
        "tlsKeyFile": "/k.pem",
        "credentialsFile": "/b.creds",
        "domain": "hub",
    }
    for context, what in (
        ({"inbox_prefix": "_MINE"}, "inbox_prefix"),
        ({"tls_first": True}, "tls_first"),
        ({"user_jwt": JWT, "user_seed": USER}, "Credentials"),
    ):
        with pytest.raises(ConfigError, match=f"{what}.*give --servers"):
            spark_options(options_of(folder, **context))
