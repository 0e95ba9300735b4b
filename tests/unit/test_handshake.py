"""The beginning of a session: who speaks, whether TLS is missing, and what the login says."""

from __future__ import annotations

import json

import pytest

from jetspark.core.auth import Token, UserPassword
from jetspark.core.handshake import Handshake, ServerInfo
from jetspark.core.options import ConnectOptions
from jetspark.core.parser import Info, Pong
from jetspark.core.reconnect import Server
from jetspark.errors import ProtocolError

SERVER = Server("a", 4222)


def _fields(login: bytes) -> dict[str, object]:
    line, ping, rest = login.split(b"\r\n")
    assert (ping, rest) == (b"PING", b"")
    fields: dict[str, object] = json.loads(line.removeprefix(b"CONNECT "))
    return fields


@pytest.mark.parametrize(
    ("wants", "requires", "is_secure", "awaits"),
    [
        (False, False, False, False),
        (True, False, False, True),
        (False, True, False, True),
        (True, True, True, False),
        (False, True, True, False),
    ],
)
def test_tls_is_awaited_when_either_side_wants_it_and_it_is_not_on(
    wants: bool, requires: bool, is_secure: bool, awaits: bool
) -> None:
    handshake = Handshake(wants_tls=wants, is_secure=is_secure)
    handshake.greeting = ServerInfo(requires_tls=requires)
    assert handshake.awaits_tls is awaits


def test_who_wants_tls_believes_nobody_before_it_is_on() -> None:
    assert not Handshake().may_be_forged
    handshake = Handshake(wants_tls=True)
    assert handshake.may_be_forged
    handshake.secured()
    assert not handshake.may_be_forged


def test_no_secret_is_written_before_tls_is_on() -> None:
    handshake = Handshake(wants_tls=True)
    with pytest.raises(ProtocolError, match="nats://a:4222: no login before TLS is on"):
        handshake.login(SERVER, Token("secret"), ConnectOptions())
    handshake.secured()
    assert _fields(handshake.login(SERVER, Token("secret"), ConnectOptions()))["auth_token"] == "secret"


def test_the_secret_of_the_call_is_before_the_one_of_the_address() -> None:
    server = Server("a", 4222, auth=UserPassword("u", "p"))
    assert _fields(Handshake().login(server, None, ConnectOptions()))["user"] == "u"
    fields = _fields(Handshake().login(server, Token("t"), ConnectOptions()))
    assert (fields.get("user"), fields["auth_token"]) == (None, "t")


def test_a_name_is_sent_only_if_there_is_one() -> None:
    assert "name" not in _fields(Handshake().login(SERVER, None, ConnectOptions()))
    assert _fields(Handshake().login(SERVER, None, ConnectOptions(name="billing")))["name"] == "billing"


def test_frames_come_one_by_one_and_the_rest_is_for_the_session() -> None:
    handshake = Handshake()
    handshake.receive_data(b'INFO {"a":1}\r\nPO')
    assert handshake.next_frame() == Info({"a": 1})
    assert handshake.next_frame() is None
    handshake.receive_data(b"NG\r\nMSG s 1 0\r\n")
    assert isinstance(handshake.next_frame(), Pong)
    assert (handshake.take_rest(), handshake.take_rest()) == (b"MSG s 1 0\r\n", b"")


def test_plain_text_is_found_only_where_tls_must_begin() -> None:
    handshake = Handshake(wants_tls=True)
    handshake.receive_data(b"INFO {}\r\n")
    assert handshake.next_frame() == Info({})
    assert handshake.early_plain_text() == b""
    handshake.receive_data(b"PONG\r\n")
    assert handshake.early_plain_text() == b"PONG\r\n"
    plain = Handshake()
    plain.receive_data(b"PONG\r\n")
    assert plain.early_plain_text() == b""
