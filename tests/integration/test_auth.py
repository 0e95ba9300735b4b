"""Each way to log in, judged by nats-server itself over a bare socket."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jetspark.core.auth import (
    Auth,
    Credentials,
    NKey,
    Role,
    Token,
    UserPassword,
    connect_fields,
    create_seed,
    public_key,
    sign,
)
from jetspark.errors import ConfigError

USER = create_seed("user", b"u" * 32)
STRANGER = create_seed("user", b"x" * 32)
ACCOUNT = create_seed("account", b"a" * 32)
OPERATOR = create_seed("operator", b"o" * 32)


def _nats_server() -> str:
    beside_python = str(Path(sys.executable).parent)
    search_path = os.pathsep.join([os.environ.get("PATH", ""), beside_python])
    found = os.environ.get("JETSPARK_NATS_SERVER") or shutil.which("nats-server", path=search_path)
    assert found, "nats-server not found: set JETSPARK_NATS_SERVER or install the extra 'server'"
    return found


@contextlib.contextmanager
def _server(directory: Path, config: str) -> Iterator[int]:
    """A server with ``config``; yields its port, which it chose itself and reports in its log."""
    path = directory / "server.conf"
    path.write_text(f"listen: 127.0.0.1:-1\n{config}")
    with subprocess.Popen([_nats_server(), "-c", str(path)], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        log: list[str] = []
        try:
            port = None
            for line in process.stderr:
                log.append(line)
                if listening := re.search(r"client connections on 127\.0\.0\.1:(\d+)", line):
                    port = int(listening[1])
                if "Server is ready" in line:
                    break
            assert port is not None, "".join(log)
            yield port
        finally:
            process.terminate()
            # Its last words, so that it never blocks on a full pipe.
            process.stderr.read()


def _login(port: int, auth: Auth | None) -> str:
    """The server's answer to CONNECT and PING: ``PONG``, or its error."""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=5) as connection,
        connection.makefile("rwb") as stream,
    ):
        info: dict[str, Any] = json.loads(stream.readline().removeprefix(b"INFO "))
        fields = connect_fields(auth, info.get("nonce"))
        connect = {
            "verbose": False,
            "pedantic": True,
            "lang": "python",
            "version": "0",
            "protocol": 1,
        } | fields
        stream.write(b"CONNECT " + json.dumps(connect).encode() + b"\r\nPING\r\n")
        stream.flush()
        for line in stream:
            if not line.startswith(b"INFO"):
                return line.decode().strip()
    return "closed"


def _jwt(issuer: str, subject: str, name: str, role: Role, **claims: Any) -> str:
    def part(value: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    body = {
        "jti": name,
        "iat": 1_700_000_000,
        "iss": public_key(issuer),
        "name": name,
        "sub": public_key(subject),
        "nats": {"type": role, "version": 2, **claims},
    }
    signed = f"{part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{part(body)}"
    return f"{signed}.{base64.urlsafe_b64encode(sign(issuer, signed.encode())).rstrip(b'=').decode()}"


def _creds(seed: str, jwt_subject: str = USER) -> str:
    unlimited = {"subs": -1, "data": -1, "payload": -1, "pub": {}, "sub": {}}
    jwt = _jwt(ACCOUNT, jwt_subject, "app", "user", **unlimited)
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


@pytest.fixture
def operator_config() -> str:
    limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    account = _jwt(OPERATOR, ACCOUNT, "team", "account", limits=limits | {"wildcards": True})
    operator = _jwt(OPERATOR, OPERATOR, "us", "operator")
    return f"operator: {operator}\nresolver: MEMORY\nresolver_preload: {{ {public_key(ACCOUNT)}: {account} }}\n"


def test_the_server_lets_a_user_in_by_the_right_password_only(tmp_path: Path) -> None:
    with _server(tmp_path, "authorization { user: ada, password: hunter2 }") as port:
        assert _login(port, UserPassword("ada", "hunter2")) == "PONG"
        assert "Authorization Violation" in _login(port, UserPassword("ada", "wrong"))
        assert "Authorization Violation" in _login(port, None)


def test_the_server_lets_the_right_token_in(tmp_path: Path) -> None:
    with _server(tmp_path, "authorization { token: t0ps3cret }") as port:
        assert _login(port, Token("t0ps3cret")) == "PONG"
        assert "Authorization Violation" in _login(port, Token("wrong"))


def test_the_server_verifies_the_signature_of_an_nkey(tmp_path: Path) -> None:
    with _server(tmp_path, f"authorization {{ users: [ {{ nkey: {public_key(USER)} }} ] }}") as port:
        assert _login(port, NKey(USER)) == "PONG"
        assert "Authorization Violation" in _login(port, NKey(STRANGER))


def test_the_server_verifies_a_credentials_file_and_sees_its_rotation(tmp_path: Path, operator_config: str) -> None:
    path = tmp_path / "app.creds"
    auth = Credentials(path)
    with _server(tmp_path, operator_config) as port:
        path.write_text(_creds(USER))
        assert _login(port, auth) == "PONG"
        path.write_text(_creds(STRANGER))
        assert "Authorization Violation" in _login(port, auth)
        path.write_text(_creds(STRANGER, jwt_subject=STRANGER))
        assert _login(port, auth) == "PONG"


def test_a_server_that_checks_no_keys_is_noticed_before_anything_is_sent(tmp_path: Path) -> None:
    with _server(tmp_path, "") as port, pytest.raises(ConfigError, match="sent no nonce"):
        _login(port, NKey(USER))
