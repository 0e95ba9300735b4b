"""The state machine against the bytes a server would send, written by hand."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.interrupts import Interrupt, count_places
from support.readers import SilentReader

from jetspark.core import outbox
from jetspark.core.auth import Auth, NKey, Token, UserPassword, create_seed
from jetspark.core.confirmations import LINGER_S
from jetspark.core.connection import Connection, Done, Event, Failed, Ready, State
from jetspark.core.events import (
    Closed,
    Connected,
    Disconnected,
    ErrorReported,
    LameDuck,
    Reconnected,
    ServersDiscovered,
    SlowConsumer,
)
from jetspark.core.handshake import ServerInfo
from jetspark.core.message import CoreMessage
from jetspark.core.options import ConnectOptions
from jetspark.core.reconnect import Server
from jetspark.core.subjects import ApiSubject
from jetspark.core.subscription import SubscriptionState
from jetspark.core.version import VERSION
from jetspark.errors import (
    AuthenticationFailed,
    BufferFull,
    ConfigError,
    ConnectionClosed,
    ConnectionLost,
    InvalidHeader,
    InvalidSubject,
    JetSparkError,
    NoResponders,
    PayloadTooLarge,
    PermissionDenied,
    ProtocolError,
    ServerRefused,
)

A = Server("a", 4222)
URL = "nats://a:4222"
READER = SilentReader()
INBOX = "_INBOX.me"


def new(server: Server = A, **options: Any) -> Connection:
    return Connection(ConnectOptions(**options), [server], inbox=INBOX, jitter=lambda: 0.0)


def info(**fields: Any) -> bytes:
    return b"INFO %b\r\n" % json.dumps({"server_name": "a", "max_payload": 1024, **fields}).encode()


def log_in(connection: Connection, server: Server = A, auth: Auth | None = None, **fields: Any) -> dict[str, Any]:
    """Up to CONNECTED; returns the fields of CONNECT."""
    connection.begin(server)
    connection.receive_data(info(**fields))
    if connection.handshake.awaits_tls:
        connection.handshake.secured()
    connection.login(auth)
    sent = connection.data_to_send()
    connection.receive_data(b"PONG\r\n")
    line, ping, rest = sent.split(b"\r\n")
    assert line.startswith(b"CONNECT ")
    assert (ping, rest) == (b"PING", b"")
    return dict(json.loads(line[8:]))


def connected(**options: Any) -> Connection:
    connection = new(**options)
    log_in(connection)
    assert connection.events() == [Connected(URL)]
    return connection


def reconnect(connection: Connection, reason: str = "gone") -> bytes:
    """Lose the session and get a new one; returns what is sent first in it."""
    connection.end(reason)
    log_in(connection)
    return connection.data_to_send()


def message(sid: int, payload: bytes = b"x", subject: str = "a") -> bytes:
    return b"MSG %b %d %d\r\n%b\r\n" % (subject.encode(), sid, len(payload), payload)


def answer(token: str, payload: bytes = b"x", block: bytes = b"") -> bytes:
    subject = f"{INBOX}.{token}".encode()
    if not block:
        return b"MSG %b 1 %d\r\n%b\r\n" % (subject, len(payload), payload)
    return b"HMSG %b 1 %d %d\r\n%b%b\r\n" % (subject, len(block), len(block) + len(payload), block, payload)


def failures(events: list[Event]) -> dict[Any, Exception]:
    return {event.handle: event.error for event in events if isinstance(event, Failed)}


def done(events: list[Event]) -> list[Any]:
    return [event.handle for event in events if isinstance(event, Done)]


def ready(events: list[Event]) -> list[SubscriptionState]:
    return [event.subscription for event in events if isinstance(event, Ready)]


def unread(subscription: SubscriptionState) -> list[bytes]:
    return [subscription.take().data for _ in range(len(subscription.pending))]


# ---- the handshake ---------------------------------------------------------------------------------------------


def test_a_session_goes_through_its_states() -> None:
    connection = new()
    states = [connection.state]
    connection.begin(A)
    states.append(connection.state)
    assert connection.data_to_send() == b""
    connection.receive_data(info(version="2.14.0", client_id=7, cluster="C", jetstream=True)[:-1])
    states.append(connection.state)
    connection.receive_data(b"\n")
    states.append(connection.state)
    connection.login(None)
    states.append(connection.state)
    assert connection.data_to_send().endswith(b"}\r\nPING\r\n")
    assert connection.data_to_send() == b""
    was_connected = connection.is_connected
    connection.receive_data(b"PONG\r\n")
    assert (was_connected, connection.is_connected) == (False, True)
    assert states == [State.IDLE, State.GREETING, State.GREETING, State.READY, State.LOGGING_IN]
    assert connection.events() == [Connected(URL)]
    assert connection.events() == []
    assert connection.info == ServerInfo(
        fields=connection.info.fields,
        name="a",
        version="2.14.0",
        max_payload_bytes=1024,
        client_id=7,
        cluster="C",
        has_jetstream=True,
    )


def test_connect_says_who_we_are() -> None:
    assert log_in(new()) == {
        "verbose": False,
        "pedantic": False,
        "lang": "python-jetspark",
        "version": VERSION,
        "protocol": 1,
        "headers": True,
        "no_responders": True,
        "echo": True,
        "tls_required": False,
    }
    fields = log_in(new(name="billing", echo=False), tls_required=True)
    assert (fields["name"], fields["echo"], fields["tls_required"]) == ("billing", False, True)


def test_the_secret_given_at_login_wins_over_the_one_in_the_url() -> None:
    server = Server.parse("nats://url-user:url-pass@a")
    assert log_in(new(server), server)["user"] == "url-user"
    fields = log_in(new(server), server, Token("t"))
    assert fields["auth_token"] == "t"
    assert "user" not in fields


def test_a_key_signs_the_nonce_of_the_greeting() -> None:
    fields = log_in(new(), auth=NKey(create_seed("user", bytes(32))), nonce="abc")
    assert fields["nkey"].startswith("U")
    assert fields["sig"]


def test_a_key_without_a_nonce_is_a_config_error() -> None:
    connection = new()
    connection.begin(A)
    connection.receive_data(info())
    with pytest.raises(ConfigError, match="nonce"):
        connection.login(NKey(create_seed("user", bytes(32))))


@pytest.mark.parametrize(
    "fields",
    [
        {"max_payload": "many"},
        {"max_payload": None},
        {"max_payload": float("inf")},
        {"client_id": []},
        {"nonce": 5},
    ],
)
def test_a_greeting_that_makes_no_sense_is_refused(fields: dict[str, Any]) -> None:
    connection = new()
    connection.begin(A)
    with pytest.raises(JetSparkError):
        connection.receive_data(info(**fields))


@pytest.mark.parametrize("urls", [5, [5], ["http://x"], "b:4222", [None, "c:1"]])
def test_addresses_that_make_no_sense_cost_only_themselves(urls: Any) -> None:
    connection = new()
    connection.begin(A)
    connection.receive_data(info(connect_urls=urls))
    assert connection.state is State.READY
    assert {server.host for server in connection.pool.servers} <= {"a", "c"}


def test_what_is_not_nats_is_a_protocol_error() -> None:
    connection = new()
    connection.begin(A)
    with pytest.raises(ProtocolError):
        connection.receive_data(b"HTTP/1.1 400 Bad Request\r\n")


@pytest.mark.parametrize("text", ["Authorization Violation", "User Authentication Expired"])
@pytest.mark.parametrize("logged_in", [False, True])
def test_refused_credentials_are_told_apart_before_the_login_is_complete(text: str, logged_in: bool) -> None:
    connection = new()
    connection.begin(A)
    connection.receive_data(info())
    if logged_in:
        connection.login(None)
    with pytest.raises(AuthenticationFailed) as failure:
        connection.receive_data(f"-ERR '{text}'\r\n".encode())
    assert (failure.value.server, failure.value.reason) == (URL, text)


def test_any_other_error_before_the_login_is_complete_is_a_refusal() -> None:
    connection = new()
    connection.begin(A)
    with pytest.raises(ServerRefused, match="maximum connections exceeded") as failure:
        connection.receive_data(info() + b"-ERR 'maximum connections exceeded'\r\n")
    assert failure.value.server == URL


# ---- before the session is established -------------------------------------------------------------------------

TLS = Server("a", 4222, requires_tls=True)
FORGED = [b"MSG orders 1 6\r\nFORGED\r\n", b"HMSG orders 1 12 18\r\nNATS/1.0\r\n\r\nFORGED\r\n"]


def feed(connection: Connection, data: bytes, *, byte_by_byte: bool) -> None:
    for chunk in [data[place : place + 1] for place in range(len(data))] if byte_by_byte else [data]:
        connection.receive_data(chunk)


@pytest.mark.parametrize("byte_by_byte", [False, True])
@pytest.mark.parametrize("state", [State.GREETING, State.READY, State.LOGGING_IN])
@pytest.mark.parametrize("forged", FORGED)
def test_no_message_is_believed_before_the_session_is_established(
    forged: bytes, state: State, byte_by_byte: bool
) -> None:
    connection = connected()
    subscription = connection.subscribe("orders")
    connection.request("asked", "question", b"", None)
    connection.end("gone")
    connection.events()
    connection.begin(A)
    before = b"PING\r\n+OK\r\n"
    if state is State.READY:
        before += info()
    elif state is State.LOGGING_IN:
        connection.receive_data(info())
        connection.login(None)
    answered = forged.replace(b"orders 1 ", f"{INBOX}.1 2 ".encode())
    for stream in (before + forged, before + answered):
        with pytest.raises(ProtocolError, match="a message before the session is established"):
            feed(connection, stream, byte_by_byte=byte_by_byte)
        assert connection.events() == []
        assert subscription.received == 0
        connection.end("not NATS")
        connection.begin(A)
        if state is State.LOGGING_IN:
            connection.receive_data(info())
            connection.login(None)


@pytest.mark.parametrize("byte_by_byte", [False, True])
def test_what_may_come_before_the_session_is_read_in_any_pieces(byte_by_byte: bool) -> None:
    connection = new()
    connection.begin(A)
    feed(connection, b"PING\r\n+OK\r\nPONG\r\n" + info() + b"PONG\r\n", byte_by_byte=byte_by_byte)
    assert connection.state is State.READY
    connection.login(None)
    assert connection.data_to_send().startswith(b"CONNECT ")
    subscription = connection.subscribe("orders")
    feed(connection, b"PING\r\nPONG\r\nPING\r\n" + FORGED[0], byte_by_byte=byte_by_byte)
    assert connection.is_connected
    # Behind the server's answer to our login a message is as good as any later one.
    assert unread(subscription) == [b"FORGED"]


@pytest.mark.parametrize("byte_by_byte", [False, True])
@pytest.mark.parametrize(
    "behind",
    [
        b"PING\r\n",
        b"PONG\r\n",
        b"+OK\r\n",
        b"-ERR 'Authorization Violation'\r\n",
        info(connect_urls=["evil:4222"]),
        b"\x16\x03",
        *FORGED,
    ],
)
@pytest.mark.parametrize("server", [A, TLS])
def test_any_byte_behind_the_greeting_is_refused_when_tls_follows(
    server: Server, behind: bytes, byte_by_byte: bool
) -> None:
    connection = new(server)
    connection.begin(server)
    with pytest.raises(ProtocolError, match="in plain text, where TLS must begin"):
        feed(connection, info(tls_required=True) + behind, byte_by_byte=byte_by_byte)
    assert connection.events() == []
    assert connection.data_to_send() == b""
    assert connection.state is State.GREETING  # and not READY, where a login would be next


@pytest.mark.parametrize("server", [A, TLS])
def test_a_login_is_never_made_before_tls_is_up(server: Server) -> None:
    connection = new(server)
    connection.begin(server)
    connection.receive_data(info(tls_required=True))
    assert connection.handshake.awaits_tls
    with pytest.raises(ProtocolError, match="TLS"):
        connection.login(Token("secret"))
    assert connection.data_to_send() == b""
    connection.handshake.secured()
    connection.login(Token("secret"))
    assert b"secret" in connection.data_to_send()


def test_a_tls_config_makes_any_server_one_that_must_speak_tls() -> None:
    connection = new()
    connection.begin(A, wants_tls=True)
    connection.receive_data(info())
    assert connection.handshake.awaits_tls
    connection.end("it does not offer TLS")
    connection.begin(A, wants_tls=True, is_secure=True)  # from the first byte
    connection.receive_data(info())
    assert not connection.handshake.awaits_tls


def test_a_refusal_in_plain_text_is_nobodys_refusal_of_our_credentials() -> None:
    """Or anybody on the way could make us believe that our secret is no longer good, and give up."""
    connection = new(TLS)
    connection.begin(TLS)
    with pytest.raises(ServerRefused, match="Authorization Violation"):
        connection.receive_data(b"-ERR 'Authorization Violation'\r\n")


def test_nothing_of_a_greeting_counts_before_the_session_is_established() -> None:
    connection = connected()
    connection.end("gone")
    connection.events()
    connection.begin(TLS)
    connection.receive_data(info(max_payload=1, tls_required=True, connect_urls=["evil:4222"], server_name="evil"))
    connection.end("its certificate is not good")
    assert connection.info.name == "a"
    connection.publish("a", b"more than one byte")
    assert connection.pool.servers == [A]
    assert connection.events() == []


def test_servers_named_in_plain_text_are_dialled_only_after_a_session_over_tls() -> None:
    connection = new(TLS)
    connection.begin(TLS)
    connection.receive_data(info(tls_required=True, connect_urls=["b:4222"]))
    connection.handshake.secured()
    connection.login(None)
    assert connection.pool.servers == [TLS]
    connection.receive_data(b"PONG\r\n")
    assert connection.events() == [ServersDiscovered(("tls://b:4222",)), Connected("tls://a:4222")]


def test_an_answer_on_another_subject_is_no_answer() -> None:
    connection = connected()
    connection.request("asked", "question", b"", None)
    other = "_INBOX.mx.1"
    connection.receive_data(b"MSG %b 1 1\r\nx\r\n" % other.encode())
    assert done(connection.events()) == []
    connection.receive_data(answer("1"))
    assert done(connection.events()) == ["asked"]


def test_a_failed_attempt_leaves_the_machine_ready_for_the_next_one() -> None:
    connection = new()
    connection.publish("a", b"1")
    connection.begin(A)
    connection.receive_data(info())
    connection.login(None)
    connection.end("refused")
    assert connection.state is State.IDLE
    assert connection.events() == []
    assert connection.data_to_send() == b""
    log_in(connection)
    assert connection.data_to_send() == b"PUB a 1\r\n1\r\n"


# ---- what is buffered for a server that accepts less ----------------------------------------------------------------


def test_a_message_too_large_for_the_next_server_is_dropped_alone() -> None:
    connection = connected()
    connection.end("gone")
    connection.publish("small", b"1")
    connection.flush("covers the small one only")
    connection.publish("large", bytes(100), headers={"A": "1"})
    connection.publish_frames([b"PUB small 1\r\n2\r\n", b"PUB large.too 11\r\n12345678901\r\n", b"PUB s 1\r\n3\r\n"])
    connection.flush("covers all")
    connection.events()
    log_in(connection, max_payload=10)
    events = connection.events()
    dropped = [event.error for event in events if isinstance(event, ErrorReported)]
    assert [(error.subject, error.size_bytes) for error in dropped if isinstance(error, PayloadTooLarge)] == [
        ("large", 118),
        ("large.too", 11),
    ]
    assert connection.out_bytes == len(data := connection.data_to_send())
    assert data == b"PUB small 1\r\n1\r\nPUB small 1\r\n2\r\nPUB s 1\r\n3\r\nPING\r\nPING\r\n"
    connection.receive_data(b"PONG\r\nPONG\r\n")
    events = connection.events()
    assert done(events) == ["covers the small one only"]
    assert failures(events) == {"covers all": dropped[0]}
    connection.flush("later")
    connection.receive_data(b"PONG\r\n")
    assert done(connection.events()) == ["later"]
    assert connection.in_doubt == 0


def test_without_a_flush_that_waits_the_next_one_tells_of_a_dropped_message() -> None:
    connection = connected()
    connection.end("gone")
    connection.publish("large", bytes(100))
    log_in(connection, max_payload=10)
    assert connection.data_to_send() == b""
    connection.flush("first")
    connection.flush("second")
    connection.receive_data(b"PONG\r\nPONG\r\n")
    events = connection.events()
    assert isinstance(failures(events)["first"], PayloadTooLarge)
    assert done(events) == ["second"]


def test_a_request_too_large_for_the_next_server_fails() -> None:
    connection = connected()
    connection.end("gone")
    connection.request("asked", "question", bytes(100), None)
    connection.publish("other", bytes(100), reply="1")
    log_in(connection, max_payload=10)
    error = failures(connection.events())["asked"]
    assert isinstance(error, PayloadTooLarge)
    assert "message to 'question' of 100 bytes" in str(error)


def test_what_waits_is_measured_again_when_the_server_lowers_its_limit() -> None:
    connection = connected()
    connection.data_to_send()
    subscription = connection.subscribe("a")
    connection.publish("large", bytes(100))
    connection.receive_data(info(max_payload=10))
    assert connection.data_to_send() == b"SUB a %d\r\n" % subscription.sid


def test_a_server_that_lets_us_in_and_then_ends_our_credentials_has_refused_us() -> None:
    connection = new()
    connection.pool.secret_is_fixed = True
    for _ in range(2):
        assert connection.pool.next()[0] == A
        log_in(connection)
        connection.pool.succeeded()
        connection.receive_data(b"-ERR 'User Authentication Expired'\r\n")
        connection.end("gone")
    with pytest.raises(AuthenticationFailed, match="User Authentication Expired"):
        connection.pool.next()


def test_failed_attempts_of_a_connection_that_is_closed_are_not_told() -> None:
    connection = connected()
    connection.close()
    connection.events()
    connection.attempt_failed(A, OSError("no route"), 1)
    assert connection.events() == []


# ---- a server that is about to shut down -----------------------------------------------------------------------------


def leaving(**options: Any) -> Connection:
    connection = Connection(ConnectOptions(**options), [A, Server("b", 4222)], inbox=INBOX, jitter=lambda: 0.0)
    log_in(connection)
    connection.events()
    return connection


def test_a_lame_duck_is_left_as_soon_as_it_has_confirmed_what_it_got() -> None:
    connection = leaving()
    subscription = connection.subscribe("a")
    connection.publish("a", b"1")
    assert connection.data_to_send() == b"SUB a 1\r\nPUB a 1\r\n1\r\n"
    connection.publish("a", b"2")
    connection.flush("before")
    connection.receive_data(info(ldm=True))
    assert connection.events() == [LameDuck(URL)]
    connection.publish("a", b"3")
    connection.flush("meanwhile")
    late = connection.subscribe("b")
    connection.receive_data(b"PING\r\n")
    assert connection.data_to_send() == b"PUB a 1\r\n2\r\nPING\r\nPING\r\nPONG\r\n"
    assert connection.data_to_send() == b""
    assert connection.out_bytes == len(b"PUB a 1\r\n3\r\n")
    assert (connection.unconfirmed_messages, connection.in_doubt) == (2, 3)
    connection.receive_data(message(1, b"still here") + b"PONG\r\n")
    assert done(connection.events()) == ["before"]
    connection.receive_data(b"PONG\r\n")
    assert connection.next_deadline() == 0.0  # as soon as possible: how long to linger needs a clock
    connection.on_time(100.0)
    assert connection.next_deadline() == 100.0 + LINGER_S
    connection.receive_data(message(1, b"and here"))
    assert connection.data_to_send() == b""
    connection.on_time(100.3)
    assert connection.data_to_send() == b"UNSUB 1\r\nUNSUB %d\r\nPING\r\n" % late.sid
    assert connection.out_bytes == len(b"PUB a 1\r\n3\r\n")
    with pytest.raises(ConnectionLost, match="about to shut down"):
        connection.receive_data(b"PONG\r\n")
    connection.end("left")
    assert connection.events()[-1] == Disconnected(URL, "left", 0, 1, 3)
    assert unread(subscription) == [b"still here", b"and here"]
    assert not connection.is_leaving
    log_in(connection, Server("b", 4222))
    assert connection.data_to_send() == b"SUB a 1\r\nSUB b %d\r\nPUB a 1\r\n3\r\nPING\r\n" % late.sid
    connection.receive_data(b"PONG\r\n")
    assert done(connection.events()) == ["meanwhile"]


def test_a_lame_duck_that_hangs_up_first_leaves_only_what_it_did_not_confirm_in_doubt() -> None:
    connection = leaving()
    connection.publish("a", b"1")
    connection.data_to_send()
    connection.publish("a", b"2")
    connection.receive_data(info(ldm=True))
    connection.publish("a", b"3")
    connection.end("gone")
    assert connection.events()[-1] == Disconnected(URL, "gone", 1, 2, 3)
    log_in(connection, Server("b", 4222))
    assert connection.data_to_send() == b"PUB a 1\r\n2\r\nPUB a 1\r\n3\r\n"
    assert connection.out_bytes == 0


def test_a_lame_duck_that_hangs_up_while_its_answers_are_waited_for_leaves_no_deadline_behind() -> None:
    connection = leaving(ping_interval_s=10)
    connection.receive_data(info(ldm=True))
    connection.data_to_send()
    connection.receive_data(b"PONG\r\n")
    assert connection.next_deadline() == 0.0
    connection.end("gone")
    log_in(connection, Server("b", 4222))
    connection.on_time(100.0)
    connection.on_time(101.0)
    assert (connection.next_deadline(), connection.data_to_send()) == (110.0, b"")


def test_a_lame_duck_that_no_longer_answers_is_left_when_its_time_is_up() -> None:
    connection = leaving(ping_interval_s=10, max_outstanding_pings=2)
    connection.on_time(0.0)
    connection.receive_data(info(ldm=True))
    connection.data_to_send()
    connection.on_time(10.0)
    connection.on_time(20.0)
    assert connection.data_to_send() == b""
    with pytest.raises(ConnectionLost, match="pings without an answer"):
        connection.on_time(30.0)


@pytest.mark.parametrize("why", ["no other", "no reconnect", "out of reach"])
def test_a_lame_duck_is_kept_when_there_is_nowhere_to_go(why: str) -> None:
    connection = connected() if why == "no other" else leaving(reconnect=why != "no reconnect")
    if why == "out of reach":
        connection.pool._candidates[1].failures = 1
    connection.receive_data(info(ldm=True))
    assert connection.events() == [LameDuck(URL)]
    connection.publish("a", b"1")
    assert connection.data_to_send() == b"PUB a 1\r\n1\r\n"


def test_a_subscription_drained_while_the_server_is_left_is_drained() -> None:
    connection = leaving()
    subscription = connection.subscribe("a")
    connection.data_to_send()
    connection.receive_data(info(ldm=True))
    connection.drain(subscription, "drained")
    connection.data_to_send()
    connection.receive_data(b"PONG\r\n")
    connection.on_time(1.0)
    connection.on_time(2.0)
    connection.data_to_send()
    with pytest.raises(ConnectionLost):
        connection.receive_data(message(1, b"last") + b"PONG\r\n")
    connection.end("left")
    assert done(connection.events()) == ["drained"]
    assert unread(subscription) == [b"last"]
    assert subscription.is_finished


# ---- a network that takes nothing ------------------------------------------------------------------------------------


def test_answers_to_pings_that_are_not_taken_are_bounded() -> None:
    connection = connected(send_buffer_bytes=1000)
    limit = outbox.MIN_CONTROL_ROOM_BYTES
    with pytest.raises(ConnectionLost, match="sends PINGs and takes no answers"):
        connection.receive_data(b"PING\r\n" * (limit // 6 + 10))
    assert limit < connection.out_bytes <= limit + 6
    connection.end("unresponsive")
    log_in(connection)
    assert connection.data_to_send() == b""


def test_a_ping_is_answered_while_no_more_waits_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MIN_CONTROL_ROOM_BYTES", 10 * len(b"PONG\r\n"))
    connection = connected(send_buffer_bytes=50)
    connection.receive_data(b"PING\r\n" * 11)
    assert connection.data_to_send() == b"PONG\r\n" * 11


def test_subscriptions_and_flushes_that_are_not_taken_are_bounded() -> None:
    connection = connected(send_buffer_bytes=1000)
    subscription = connection.subscribe("first")
    subscribed = 0
    with contextlib.suppress(BufferFull):
        while subscribed < 1 << 20:
            connection.unsubscribe(connection.subscribe("a"))
            subscribed += 1
    assert subscribed < 1 << 20
    assert connection.out_bytes <= outbox.MIN_CONTROL_ROOM_BYTES + 100
    before = len(connection.subscriptions.all)
    with pytest.raises(BufferFull):
        connection.subscribe("a")
    assert len(connection.subscriptions.all) == before
    with pytest.raises(BufferFull):
        connection.flush("flush")
    with pytest.raises(BufferFull):
        connection.unsubscribe(subscription, 10)
    assert subscription.max_messages == 0
    connection.unsubscribe(subscription)
    assert subscription.is_finished
    connection.data_to_send()
    connection.subscribe("a")
    connection.flush("flush")


def test_restoring_any_number_of_subscriptions_is_not_bounded() -> None:
    connection = connected(send_buffer_bytes=1000)
    for number in range(40_000):
        connection.subscribe(f"some.subject.{number}")
        if number % 1000 == 0:
            connection.data_to_send()
    assert reconnect(connection).count(b"SUB ") == 40_000
    connection.receive_data(b"PING\r\n")
    assert connection.data_to_send() == b"PONG\r\n"


def test_end_is_safe_in_any_state() -> None:
    connection = new()
    connection.end("nothing there")
    assert connection.events() == []
    connection.begin(A)
    connection.end("no greeting")
    connection.close()
    connection.events()
    connection.end("after close")
    assert connection.events() == []
    assert connection.is_closed


def test_a_ping_is_answered() -> None:
    connection = connected()
    connection.receive_data(b"PING\r\nPING\r\n")
    assert connection.data_to_send() == b"PONG\r\nPONG\r\n"


def test_an_unasked_pong_is_ignored() -> None:
    connection = connected()
    connection.publish("a", b"1")
    connection.data_to_send()
    connection.receive_data(b"PONG\r\n")
    assert connection.events() == []
    assert connection.unconfirmed_messages == 1


@pytest.mark.parametrize("early", [b"PONG\r\n", info() + b"PONG\r\n"])
def test_a_pong_before_the_login_confirms_nothing(early: bytes) -> None:
    connection = new()
    connection.publish("a", b"1")
    connection.flush("flush")
    connection.begin(A)
    try:
        connection.receive_data(early)
    except JetSparkError:
        pass  # refusing such a peer is as good
    assert connection.events() == []
    assert connection.unconfirmed_messages == 0
    assert connection.in_doubt == 1


# ---- publish ---------------------------------------------------------------------------------------------------


def test_publishes_become_exactly_these_frames() -> None:
    connection = connected()
    connection.publish("a.b", b"hello")
    connection.publish("a.b")
    connection.publish("é", b"\r\n", "reply.to")
    connection.publish("a", b"hi", headers={"A": "1"})
    connection.publish("a", b"", "r", [("A", "1"), ("A", "2")])
    connection.publish("a", b"no headers", headers={})
    assert connection.published == 6
    expected = (
        b"PUB a.b 5\r\nhello\r\n"
        b"PUB a.b 0\r\n\r\n"
        b"PUB \xc3\xa9 reply.to 2\r\n\r\n\r\n"
        b"HPUB a 18 20\r\nNATS/1.0\r\nA: 1\r\n\r\nhi\r\n"
        b"HPUB a r 24 24\r\nNATS/1.0\r\nA: 1\r\nA: 2\r\n\r\n\r\n"
        b"PUB a 10\r\nno headers\r\n"
    )
    assert connection.out_bytes == len(expected)
    assert connection.data_to_send() == expected
    assert connection.out_bytes == 0
    assert connection.data_to_send() == b""


@pytest.mark.parametrize("data", [bytearray(b"abc"), memoryview(b"abc"), memoryview(b"a-b-c")[::2]])
def test_other_kinds_of_bytes_are_copied(data: Any) -> None:
    connection = connected()
    connection.publish("a", data)
    if isinstance(data, bytearray):
        data[:] = b"xyz"
    assert connection.data_to_send() == b"PUB a 3\r\nabc\r\n"


@pytest.mark.parametrize("data", ["text", None, 5, [1, 2]])
def test_data_that_is_not_bytes_is_refused(data: Any) -> None:
    connection = connected()
    with pytest.raises(ConfigError, match=r"expected bytes; encode text with \.encode\(\)"):
        connection.publish("a", data)
    assert (connection.published, connection.data_to_send()) == (0, b"")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("a b", b""), InvalidSubject),
        (("a.*", b""), InvalidSubject),
        (("a\r\nPUB", b""), InvalidSubject),
        (("a", b"", "r r"), InvalidSubject),
        (("a", b"", "", {"A": "1\r\n2"}), InvalidHeader),
    ],
)
def test_what_would_break_the_frame_is_refused(arguments: tuple[Any, ...], error: type[Exception]) -> None:
    connection = connected()
    with pytest.raises(error):
        connection.publish(*arguments)
    assert (connection.published, connection.data_to_send()) == (0, b"")


def test_wildcards_are_sent_in_a_subject_of_the_api_only() -> None:
    connection = connected()
    text = "$JS.API.CONSUMER.CREATE.S.c.a.*.>"
    for _ in range(2):
        connection.publish(ApiSubject(text), b"")
        with pytest.raises(InvalidSubject):
            connection.publish(text, b"")
    assert connection.data_to_send() == b"PUB %b 0\r\n\r\n" % text.encode() * 2
    for bad in ("a b", "a..b", "a.>.b", "a\r\nPUB"):
        with pytest.raises(InvalidSubject):
            connection.publish(ApiSubject(f"$JS.API.{bad}"), b"")


def test_the_payload_may_be_as_large_as_the_server_says_and_headers_count() -> None:
    connection = new()
    log_in(connection, max_payload=30)
    connection.publish("a", b"x" * 30)
    connection.publish("a", b"x" * 12, headers={"A": "1"})
    with pytest.raises(PayloadTooLarge) as failure:
        connection.publish("a", b"x" * 31)
    assert (failure.value.size_bytes, failure.value.max_payload_bytes) == (31, 30)
    with pytest.raises(PayloadTooLarge) as failure:
        connection.publish("a", b"x" * 13, headers={"A": "1"})
    assert failure.value.size_bytes == 31
    connection.receive_data(info(max_payload=31))
    connection.publish("a", b"x" * 31)
    assert connection.published == 3


@pytest.mark.parametrize("is_connected", [False, True])
def test_the_send_buffer_is_bounded_to_the_byte(is_connected: bool) -> None:
    frame = b"PUB a 10\r\n0123456789\r\n"
    connection = new(send_buffer_bytes=3 * len(frame))
    if is_connected:
        log_in(connection)
    for _ in range(3):
        connection.publish("a", b"0123456789")
    with pytest.raises(BufferFull) as failure:
        connection.publish("a", b"")
    assert (failure.value.buffered_bytes, failure.value.limit_bytes) == (3 * len(frame), 3 * len(frame))
    assert connection.published == 3
    if not is_connected:
        log_in(connection)
    assert connection.data_to_send() == 3 * frame
    connection.publish("a", b"0123456789")


def test_a_message_larger_than_the_buffer_goes_through_an_empty_one_only() -> None:
    connection = new(send_buffer_bytes=10)
    connection.publish("a", b"x" * 100)
    with pytest.raises(BufferFull):
        connection.publish("a", b"")
    log_in(connection)
    assert connection.data_to_send() == b"PUB a 100\r\n%b\r\n" % (b"x" * 100)
    connection.publish("a", b"x" * 100)
    with pytest.raises(BufferFull):
        connection.publish("a", b"x" * 100)
    assert connection.published == 2


def test_frames_built_elsewhere_are_accepted_together_or_not_at_all() -> None:
    frame = b"PUB a 1\r\nx\r\n"
    connection = new(send_buffer_bytes=3 * len(frame))
    connection.publish_frames([frame, frame])
    with pytest.raises(BufferFull):
        connection.publish_frames([frame, frame])
    connection.publish_frames([frame])
    assert connection.published == 3
    connection.publish_frames([b"PUB ping 0\r\n\r\n"], is_urgent=True)  # what is small and rare does not wait
    log_in(connection)
    assert connection.data_to_send() == 3 * frame + b"PUB ping 0\r\n\r\n"
    assert connection.published == 4
    connection.close()
    for is_urgent in (False, True):
        with pytest.raises(ConnectionClosed):
            connection.publish_frames([frame], is_urgent=is_urgent)


def test_frames_that_had_not_left_wait_for_the_next_session_in_order() -> None:
    connection = connected()
    connection.publish_frames([b"PUB a 1\r\n1\r\n", b"PUB a 1\r\n2\r\n"])
    connection.publish("a", b"3")
    connection.end("gone")
    log_in(connection)
    assert connection.data_to_send() == b"PUB a 1\r\n1\r\nPUB a 1\r\n2\r\nPUB a 1\r\n3\r\n"


def test_what_goes_into_a_frame_is_checked_where_it_is_built() -> None:
    connection = connected()
    assert connection.address("é.b") == b"\xc3\xa9.b"
    with pytest.raises(InvalidSubject):
        connection.address("a b")
    assert connection.payload(bytearray(b"abc")) == b"abc"  # type: ignore[arg-type]
    limit = connection.info.max_payload_bytes
    with pytest.raises(PayloadTooLarge) as failure:
        connection.payload(b"x" * limit, header_bytes=1)
    assert failure.value.size_bytes == limit + 1
    with pytest.raises(ConfigError, match="expected bytes"):
        connection.payload("text")  # type: ignore[arg-type]


def test_every_batch_has_an_id_and_a_prefix_that_are_nobody_elses() -> None:
    connection, other = new(), new()
    places = [connection.names.new_batch(), connection.names.new_batch(), other.names.new_batch()]
    assert places[0] != places[1]
    prefix, batch_id = places[0]
    assert "." not in batch_id
    assert connection.names.new_inbox().startswith(f"{prefix}.")


def test_a_reply_subject_of_our_own_goes_into_the_frame_as_it_is() -> None:
    connection = connected()
    nothing: Any = bytearray()
    connection.publish_with_reply("orders", b"_INBOX.me.1", b"hi")
    connection.publish_with_reply(ApiSubject("$JS.API.X.*"), b"_INBOX.me.2", nothing)
    assert connection.published == connection.buffered_messages == 2
    assert connection.data_to_send() == b"PUB orders _INBOX.me.1 2\r\nhi\r\nPUB $JS.API.X.* _INBOX.me.2 0\r\n\r\n"


@pytest.mark.parametrize(
    ("subject", "data", "error"),
    [
        ("no blanks", b"", InvalidSubject),
        ("$JS.API.X.*", b"", InvalidSubject),
        (["a"], b"", InvalidSubject),
        ("a", "text", ConfigError),
        ("a", b"x" * (1 << 21), PayloadTooLarge),
    ],
)
def test_what_cannot_be_published_is_refused_with_a_reply_subject_too(
    subject: Any, data: Any, error: type[Exception]
) -> None:
    connection = connected()
    for publish in (
        functools.partial(connection.publish_with_reply, subject, b"_INBOX.me.1", data),
        functools.partial(connection.publish, subject, data, "_INBOX.me.1"),
        functools.partial(connection.publish, subject, data),
    ):
        with pytest.raises(error):
            publish()
    assert connection.published == connection.out_bytes == 0


def test_headers_go_before_the_data_also_with_a_reply_subject_of_our_own() -> None:
    connection = connected()
    block = b"NATS/1.0\r\nA: 1\r\n\r\n"
    connection.publish_with_reply("a", b"_INBOX.me.1", b"hi", {"A": "1"})
    ours = connection.data_to_send()
    connection.publish("a", b"hi", "_INBOX.me.1", {"A": "1"})
    assert (
        ours
        == connection.data_to_send()
        == b"HPUB a _INBOX.me.1 %d %d\r\n%bhi\r\n" % (len(block), len(block) + 2, block)
    )
    connection.publish_with_reply("a", b"_INBOX.me.1", b"hi", {})
    assert connection.data_to_send() == b"PUB a _INBOX.me.1 2\r\nhi\r\n"
    with pytest.raises(InvalidHeader):
        connection.publish_with_reply("a", b"_INBOX.me.1", b"hi", {"A": "1\n2"})
    room = connection.info.max_payload_bytes - len(block)
    connection.publish_with_reply("a", b"_INBOX.me.1", b"x" * room, {"A": "1"})
    with pytest.raises(PayloadTooLarge) as failure:
        connection.publish_with_reply("a", b"_INBOX.me.1", b"x" * (room + 1), {"A": "1"})
    assert failure.value.size_bytes == connection.info.max_payload_bytes + 1


def test_a_message_with_a_reply_subject_has_to_find_room() -> None:
    connection = connected(send_buffer_bytes=64)
    connection.publish_with_reply("a", b"_INBOX.me.1", b"x" * 30)
    with pytest.raises(BufferFull):
        connection.publish_with_reply("a", b"_INBOX.me.2", b"x" * 30)
    assert connection.published == 1
    connection.close()
    with pytest.raises(ConnectionClosed):
        connection.publish_with_reply("a", b"_INBOX.me.3", b"")


def test_the_memory_of_subjects_is_bounded() -> None:
    connection = connected(send_buffer_bytes=1 << 30)
    largest = 0
    for number in range(2 * outbox.MAX_KNOWN_HEADS + 3):
        connection.publish(f"s.{number}")
        largest = max(largest, len(connection._heads))
    assert largest == outbox.MAX_KNOWN_HEADS
    connection.data_to_send()
    connection.publish("s.1", b"x")
    assert connection.data_to_send() == b"PUB s.1 1\r\nx\r\n"


# ---- flush, and what a lost session leaves in doubt ------------------------------------------------------------


def test_a_flush_is_done_when_its_own_pong_comes() -> None:
    connection = connected()
    connection.publish("a", b"1")
    connection.flush("first")
    connection.publish("a", b"2")
    connection.flush("second")
    assert connection.data_to_send() == b"PUB a 1\r\n1\r\nPING\r\nPUB a 1\r\n2\r\nPING\r\n"
    assert (connection.unconfirmed_messages, connection.in_doubt) == (2, 2)
    connection.receive_data(b"PONG\r\n")
    assert connection.events() == [Done("first")]
    assert (connection.unconfirmed_messages, connection.in_doubt) == (1, 1)
    connection.receive_data(b"PONG\r\n")
    assert connection.events() == [Done("second")]
    assert (connection.unconfirmed_messages, connection.in_doubt) == (0, 0)


def test_a_flush_fails_with_the_number_in_doubt_when_the_session_ends() -> None:
    connection = connected()
    for _ in range(3):
        connection.publish("a", b"")
    connection.flush("flush")
    connection.data_to_send()
    connection.publish("a", b"later")
    connection.end("reset by peer")
    failed, disconnected = connection.events()
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, ConnectionLost)
    assert (failed.handle, failed.error.reason, failed.error.unconfirmed_messages) == ("flush", "reset by peer", 3)
    assert disconnected == Disconnected(URL, "reset by peer", 3, 1, 4)
    assert connection.unconfirmed_messages == 0


def test_a_flush_whose_messages_never_left_waits_for_the_next_session() -> None:
    connection = connected()
    connection.publish("a", b"1")
    connection.flush("flush")
    connection.end("gone")
    assert connection.events() == [Disconnected(URL, "gone", 0, 1, 1)]
    log_in(connection)
    assert connection.data_to_send() == b"PUB a 1\r\n1\r\nPING\r\n"
    connection.receive_data(b"PONG\r\n")
    assert connection.events() == [Reconnected(URL), Done("flush")]
    assert connection.in_doubt == 0


def test_a_flush_does_not_fail_for_messages_published_after_it() -> None:
    connection = connected()
    connection.flush("flush")
    for _ in range(3):
        connection.publish("a", b"")
    connection.data_to_send()
    connection.end("gone")
    events = connection.events()
    assert failures(events) == {}
    assert Disconnected(URL, "gone", 3, 0, 3) in events


def test_a_flush_while_disconnected_is_done_in_the_next_session_after_everything_before_it() -> None:
    connection = new()
    connection.publish("a", b"1")
    connection.flush("flush")
    connection.publish("a", b"2")
    log_in(connection)
    assert connection.data_to_send() == b"PUB a 1\r\n1\r\nPUB a 1\r\n2\r\nPING\r\n"
    connection.receive_data(b"PONG\r\n")
    assert connection.events() == [Connected(URL), Done("flush")]


def test_a_pong_confirms_everything_sent_before_its_ping() -> None:
    connection = new()
    connection.flush("flush")
    connection.publish("a", b"1")
    log_in(connection)
    assert connection.data_to_send() == b"PUB a 1\r\n1\r\nPING\r\n"
    connection.receive_data(b"PONG\r\n")
    assert (connection.unconfirmed_messages, connection.in_doubt) == (0, 0)


def test_a_flush_survives_attempts_that_fail() -> None:
    connection = new()
    connection.flush("flush")
    for _ in range(3):
        connection.begin(A)
        connection.receive_data(info())
        connection.login(None)
        connection.end("refused")
    log_in(connection)
    assert connection.data_to_send() == b"PING\r\n"
    connection.receive_data(b"PONG\r\n")
    assert done(connection.events()) == ["flush"]


def test_what_was_confirmed_is_not_in_doubt() -> None:
    connection = connected()
    connection.publish("a", b"1")
    connection.publish("a", b"2")
    connection.flush("flush")
    connection.data_to_send()
    connection.publish("a", b"3")
    connection.data_to_send()
    connection.receive_data(b"PONG\r\n")
    connection.publish("a", b"4")
    connection.publish("a", b"5")
    connection.events()
    connection.end("gone")
    assert connection.events() == [Disconnected(URL, "gone", 1, 2, 5)]


def test_nothing_is_counted_twice_over_several_sessions() -> None:
    connection = connected()
    connection.publish("a", b"1")
    connection.data_to_send()
    connection.publish("a", b"2")
    connection.end("first")
    connection.publish("a", b"3")
    log_in(connection)
    assert connection.data_to_send() == b"PUB a 1\r\n2\r\nPUB a 1\r\n3\r\n"
    connection.end("second")
    log_in(connection)
    assert connection.data_to_send() == b""
    connection.end("third")
    assert [event for event in connection.events() if isinstance(event, Disconnected)] == [
        Disconnected(URL, "first", 1, 1, 2),
        Disconnected(URL, "second", 2, 0, 3),
        Disconnected(URL, "third", 0, 0, 3),
    ]


def test_our_own_pings_confirm_too() -> None:
    connection = connected(ping_interval_s=10)
    connection.on_time(100)
    connection.publish("a", b"1")
    connection.on_time(110)
    assert connection.data_to_send() == b"PUB a 1\r\n1\r\nPING\r\n"
    connection.receive_data(b"PONG\r\n")
    assert connection.events() == []
    assert connection.in_doubt == 0


def test_only_publishes_wait_for_the_next_session() -> None:
    connection = connected()
    subscription = connection.subscribe("PUB")
    connection.publish("a", b"1")
    connection.flush("flush")
    connection.publish("b", b"2", headers={"A": "1"})
    connection.receive_data(b"PING\r\n")
    connection.unsubscribe(subscription)
    connection.end("gone")
    assert connection.out_bytes == len(b"PUB a 1\r\n1\r\nHPUB b 18 19\r\nNATS/1.0\r\nA: 1\r\n\r\n2\r\n")
    log_in(connection)
    sent = b"PUB a 1\r\n1\r\nHPUB b 18 19\r\nNATS/1.0\r\nA: 1\r\n\r\n2\r\nPING\r\n"
    assert connection.out_bytes == len(sent)
    assert connection.data_to_send() == sent


# ---- subscriptions ---------------------------------------------------------------------------------------------


def test_subscribing_sends_the_frame_and_messages_arrive() -> None:
    connection = connected()
    first = connection.subscribe("a.*", reader=READER)
    second = connection.subscribe("b.>", "workers")
    assert connection.data_to_send() == b"SUB a.* 1\r\nSUB b.> workers 2\r\n"
    assert connection.subscriptions.all == [first, second]
    assert first.reader is READER
    connection.receive_data(message(1, b"1", "a.x") + message(2, b"2", "b.x") + message(1, b"3", "a.x"))
    assert {id(each) for each in ready(connection.events())} == {id(first), id(second)}
    assert (unread(first), unread(second)) == ([b"1", b"3"], [b"2"])


def test_a_subscription_is_of_the_kind_it_was_asked_for() -> None:
    class Special(CoreMessage):
        pass

    connection = connected()
    plain = connection.subscribe("a")
    special = connection.subscribe("b", reader=READER, message_class=Special, is_inbox=True, follows_sessions=True)
    assert (plain.reader, plain.message_class, plain.is_inbox, plain.follows_sessions) == (None, None, False, False)
    assert (special.reader, special.is_inbox, special.follows_sessions) == (READER, True, True)
    connection.receive_data(message(special.sid, b"1", "b") + message(plain.sid, b"2", "a"))
    assert [type(each.take()) for each in (special, plain)] == [Special, CoreMessage]


def test_an_unbounded_subscription_drops_nothing() -> None:
    connection = connected(max_pending_messages=2, max_pending_bytes=10)
    bounded, unbounded = connection.subscribe("a"), connection.subscribe("b", is_unbounded=True)
    for subscription in (bounded, unbounded):
        connection.receive_data(b"".join(message(subscription.sid, b"x" * 100) for _ in range(5)))
    assert (bounded.dropped, unbounded.dropped, len(unbounded.pending)) == (5, 0, 5)


def test_a_subscription_that_ends_with_its_session_is_over_when_the_next_begins() -> None:
    connection = connected()
    answers = connection.subscribe("answers", ends_with_session=True)
    others = connection.subscribe("others")
    connection.receive_data(message(answers.sid, b"1", "answers"))
    connection.events()
    connection.end("gone")
    assert (answers.is_finished, ready(connection.events())) == (False, [])
    log_in(connection)
    assert ready(connection.events()) == [answers]
    assert (answers.is_finished, answers.error, unread(answers)) == (True, None, [b"1"])
    assert connection.subscriptions.all == [others]
    assert connection.data_to_send() == b"SUB others 2\r\n"


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("a b",), {}),
        (("a.",), {}),
        (("a", "two words"), {}),
        (("a",), {"max_pending_messages": 0}),
        (("a",), {"max_pending_bytes": -1}),
    ],
)
def test_a_bad_subscription_is_refused(arguments: tuple[str, ...], options: dict[str, Any]) -> None:
    connection = connected()
    with pytest.raises(ConfigError):
        connection.subscribe(*arguments, **options)
    assert (connection.subscriptions.all, connection.data_to_send()) == ([], b"")


def test_bounds_come_from_the_options_unless_given() -> None:
    connection = connected(max_pending_messages=5, max_pending_bytes=50)
    first, second = connection.subscribe("a"), connection.subscribe("a", max_pending_messages=1, max_pending_bytes=2)
    assert (first.max_pending_messages, first.max_pending_bytes) == (5, 50)
    assert (second.max_pending_messages, second.max_pending_bytes) == (1, 2)


def test_unsubscribing_ends_it_at_once_and_later_messages_are_dropped() -> None:
    connection = connected()
    subscription = connection.subscribe("a")
    connection.receive_data(message(1, b"1"))
    connection.data_to_send()
    connection.events()
    connection.unsubscribe(subscription)
    assert connection.data_to_send() == b"UNSUB 1\r\n"
    assert ready(connection.events()) == [subscription]
    connection.receive_data(message(1, b"1"))
    assert connection.events() == []
    assert subscription.is_finished
    assert unread(subscription) == [b"1"]
    connection.unsubscribe(subscription)
    assert connection.data_to_send() == b""
    assert connection.subscriptions.all == []


def test_a_limit_ends_it_after_so_many_in_all() -> None:
    connection = connected()
    subscription = connection.subscribe("a")
    connection.receive_data(message(1, b"1"))
    connection.unsubscribe(subscription, 3)
    assert connection.data_to_send() == b"SUB a 1\r\nUNSUB 1 3\r\n"
    connection.receive_data(message(1, b"2"))
    was_finished = subscription.is_finished
    connection.receive_data(message(1, b"3") + message(1, b"4"))
    assert (was_finished, subscription.is_finished) == (False, True)
    assert connection.subscriptions.all == []
    assert unread(subscription) == [b"1", b"2", b"3"]
    assert ready(connection.events())[-1] is subscription


@pytest.mark.parametrize("limit", [1, 2])
def test_a_limit_already_reached_ends_it_at_once(limit: int) -> None:
    connection = connected()
    subscription = connection.subscribe("a")
    connection.receive_data(message(1) * 2)
    connection.data_to_send()
    connection.events()
    connection.unsubscribe(subscription, limit)
    assert connection.data_to_send() == b"UNSUB 1\r\n"
    assert subscription.is_finished
    assert ready(connection.events()) == [subscription]


def test_a_negative_limit_is_refused() -> None:
    connection = connected()
    with pytest.raises(ConfigError, match="max_messages=-1"):
        connection.unsubscribe(connection.subscribe("a"), -1)


def test_reconnecting_subscribes_again_with_what_is_left_of_the_limit() -> None:
    connection = connected()
    plain, limited = connection.subscribe("a", "q"), connection.subscribe("b")
    connection.unsubscribe(limited, 5)
    connection.publish("p", b"")
    connection.receive_data(message(2, b"1") + message(2, b"2"))
    connection.end("gone")
    log_in(connection)
    assert connection.data_to_send() == b"SUB a q 1\r\nSUB b 2\r\nUNSUB 2 3\r\nPUB p 0\r\n\r\n"
    connection.receive_data(message(2, b"3"))
    assert reconnect(connection) == b"SUB a q 1\r\nSUB b 2\r\nUNSUB 2 2\r\n"
    assert reconnect(connection) == b"SUB a q 1\r\nSUB b 2\r\nUNSUB 2 2\r\n"
    connection.receive_data(message(2, b"4") + message(2, b"5"))
    assert limited.is_finished
    assert not plain.is_finished
    assert reconnect(connection) == b"SUB a q 1\r\n"
    assert unread(limited) == [b"1", b"2", b"3", b"4", b"5"]


def test_a_limit_set_after_a_reconnect_is_told_in_the_servers_count() -> None:
    connection = connected()
    subscription = connection.subscribe("a")
    connection.receive_data(message(1) * 4)
    reconnect(connection)
    connection.receive_data(message(1))
    connection.unsubscribe(subscription, 7)
    # Four came before this session: the server has counted one and must send two more.
    assert connection.data_to_send() == b"UNSUB 1 3\r\n"
    connection.receive_data(message(1))
    with pytest.raises(ConfigError, match="max_messages=8: the limit is 7 and can only be lowered"):
        connection.unsubscribe(subscription, 8)
    connection.receive_data(message(1) * 2)
    assert subscription.is_finished
    assert subscription.received == 7


def test_a_limit_of_one_message_cannot_be_raised_either() -> None:
    connection = connected()
    subscription = connection.subscribe("a")
    connection.unsubscribe(subscription, 1)
    with pytest.raises(ConfigError, match="max_messages=2: the limit is 1 and can only be lowered"):
        connection.unsubscribe(subscription, 2)


def test_an_unsubscribe_that_is_interrupted_ends_with_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = connected()
    subscription = connection.subscribe("a")
    connection.data_to_send()

    def interrupt(frame: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(connection, "_send_control", interrupt)
        with pytest.raises(KeyboardInterrupt):
            connection.unsubscribe(subscription)
    assert subscription.is_finished
    assert reconnect(connection) == b""  # it is not subscribed to again


def test_a_chunk_is_delivered_once_and_nothing_of_it_is_remembered() -> None:
    connection = connected()
    connection.subscribe("a")
    connection.receive_data(message(1))
    assert not connection.subscriptions.parser.touched


def test_answers_are_messages_unless_they_are_asked_for_in_runs() -> None:
    connection = connected()
    assert connection.subscribe("a", is_inbox=True).answer_runs is None
    assert connection.subscribe("b", is_inbox=True, takes_runs=True).answer_runs is not None


def test_a_message_with_a_reply_subject_may_fill_the_buffer_to_the_last_byte() -> None:
    frame = b"PUB a _INBOX.me.1 2\r\nhi\r\n"
    connection = connected(send_buffer_bytes=2 * len(frame))
    connection.publish_with_reply("a", b"_INBOX.me.1", b"hi")
    connection.publish_with_reply("a", b"_INBOX.me.1", b"hi")
    with pytest.raises(BufferFull):
        connection.publish_with_reply("a", b"_INBOX.me.1", b"hi")
    assert connection.data_to_send() == 2 * frame


def test_answers_to_requests_have_no_bound_of_their_own_and_are_not_remembered() -> None:
    connection = connected(max_pending_messages=2)
    tokens = [connection.request(number, "ask", b"", None) for number in range(5)]
    connection.data_to_send()
    connection.receive_data(b"".join(answer(token) for token in tokens))
    assert done(connection.events()) == [0, 1, 2, 3, 4]
    replies = connection.requests.replies
    assert replies is not None
    assert (replies.dropped, replies.is_inbox) == (0, True)


def test_who_follows_sessions_is_told_of_each() -> None:
    connection = connected()
    connection.subscribe("a")
    following = connection.subscribe("b", follows_sessions=True)
    reconnect(connection)
    assert ready(connection.events()) == [following]


def test_a_close_that_is_interrupted_tells_a_flush_once(monkeypatch: pytest.MonkeyPatch) -> None:
    connection = connected()
    connection.flush("flushed")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(connection.requests, "fail_all", interrupt)
        with pytest.raises(KeyboardInterrupt):
            connection.close()
    connection.close()
    assert [event.handle for event in connection.events() if isinstance(event, Failed)] == ["flushed"]


def test_a_session_that_answered_a_ping_is_followed_by_the_next_at_once() -> None:
    connection = new()
    pauses = []
    for answers in (False, False, True, False):
        pauses.append(connection.pool.next()[1])
        connection.pool.succeeded()
        log_in(connection)
        if answers:
            connection.flush("flushed")
            connection.data_to_send()
            connection.receive_data(b"PONG\r\n")
        connection.end("gone")
    first, second, third, fourth = pauses
    assert first == fourth == 0.0 < second < third  # one that lets us in and drops us is not dialled in a tight loop


def test_a_flush_nobody_waits_for_is_forgotten() -> None:
    connection = connected()
    connection.end("gone")
    for _ in range(100):
        handle = object()
        connection.flush(handle)
        connection.forget_flush(handle)
    log_in(connection)
    assert connection.data_to_send() == b""


def test_a_forgotten_flush_under_way_still_takes_its_answer() -> None:
    connection = connected()
    connection.flush(1)
    connection.flush(2)
    connection.forget_flush(1)
    connection.events()
    connection.receive_data(b"PONG\r\n")
    assert connection.events() == []
    connection.receive_data(b"PONG\r\n")
    assert connection.events() == [Done(2)]


def test_a_complaint_the_session_survived_is_not_the_reason_of_its_end() -> None:
    connection = connected()
    connection.receive_data(b"-ERR 'Invalid Subject'\r\n")
    connection.flush(1)
    connection.receive_data(b"PONG\r\n")
    connection.events()
    connection.end("reset by peer")
    assert [event.reason for event in connection.events() if isinstance(event, Disconnected)] == ["reset by peer"]


def test_subscriptions_made_or_ended_while_disconnected_are_right_in_the_next_session() -> None:
    connection = connected()
    first, second = connection.subscribe("a"), connection.subscribe("b")
    connection.receive_data(message(2))
    connection.data_to_send()
    connection.end("gone")
    connection.unsubscribe(first)
    connection.unsubscribe(second, 4)
    connection.subscribe("c")
    assert connection.data_to_send() == b""
    log_in(connection)
    assert connection.data_to_send() == b"SUB b 2\r\nUNSUB 2 3\r\nSUB c 3\r\n"


def test_a_subscription_made_before_the_first_session_is_sent_in_it() -> None:
    connection = new()
    connection.subscribe("a")
    connection.begin(A)
    connection.receive_data(info())
    connection.login(None)
    connection.subscribe("b")
    connection.data_to_send()
    connection.receive_data(b"PONG\r\n")
    assert connection.data_to_send() == b"SUB a 1\r\nSUB b 2\r\n"


def test_a_message_half_received_in_a_lost_session_leaves_no_trace() -> None:
    connection = connected()
    subscription = connection.subscribe("a")
    connection.receive_data(b"MSG a 1 5\r\nhe")
    reconnect(connection)
    connection.receive_data(message(1, b"whole"))
    assert unread(subscription) == [b"whole"]


def test_messages_before_garbage_in_one_chunk_still_reach_their_reader() -> None:
    connection = connected()
    subscription = connection.subscribe("a")
    with pytest.raises(ProtocolError):
        connection.receive_data(message(1, b"1") + b"garbage\r\n")
    assert ready(connection.events()) == [subscription]
    assert unread(subscription) == [b"1"]


def test_draining_waits_for_everything_the_server_had_sent() -> None:
    connection = connected()
    subscription = connection.subscribe("a")
    connection.data_to_send()
    connection.drain(subscription, "drain")
    assert connection.data_to_send() == b"UNSUB 1\r\nPING\r\n"
    was_finished = subscription.is_finished
    connection.receive_data(message(1, b"1"))
    connection.receive_data(message(1, b"2") + b"PONG\r\n")
    events = connection.events()
    assert done(events) == ["drain"]
    assert ready(events)[-1] is subscription
    assert (was_finished, subscription.is_finished) == (False, True)
    assert unread(subscription) == [b"1", b"2"]
    assert connection.subscriptions.all == []


@pytest.mark.parametrize("how", ["disconnected", "finished", "closed"])
def test_draining_what_gets_nothing_more_is_done_at_once(how: str) -> None:
    connection = connected()
    subscription = connection.subscribe("a")
    if how == "disconnected":
        connection.end("gone")
    elif how == "finished":
        connection.unsubscribe(subscription)
    else:
        connection.close()
    connection.events()
    connection.drain(subscription, "drain")
    assert done(connection.events()) == ["drain"]
    assert subscription.is_finished


def test_a_session_that_ends_during_a_drain_completes_it() -> None:
    connection = connected()
    subscription = connection.subscribe("a")
    connection.publish("p", b"")
    connection.drain(subscription, "drain")
    connection.data_to_send()
    connection.end("gone")
    events = connection.events()
    assert done(events) == ["drain"]
    assert ready(events) == [subscription]
    assert Disconnected(URL, "gone", 1, 0, 1) in events
    log_in(connection)
    assert connection.data_to_send() == b""


def test_a_slow_reader_is_reported_at_the_start_and_at_each_doubling() -> None:
    connection = connected()
    subscription = connection.subscribe("a", max_pending_messages=2)
    reported = []
    for _ in range(20):
        connection.receive_data(message(1))
        reported += [event for event in connection.events() if isinstance(event, SlowConsumer)]
    assert reported == [SlowConsumer("a", dropped) for dropped in (1, 2, 4, 8, 16)]
    assert subscription.is_slow
    assert (subscription.received, subscription.dropped) == (20, 18)


def test_a_slow_reader_that_caught_up_is_reported_again() -> None:
    connection = connected()
    subscription = connection.subscribe("a", max_pending_messages=2)
    connection.receive_data(message(1) * 7)
    assert SlowConsumer("a", 5) in connection.events()
    unread(subscription)
    connection.receive_data(message(1))
    connection.receive_data(message(1))
    connection.receive_data(message(1))
    assert SlowConsumer("a", 6) in connection.events()


def test_a_reader_slow_in_bytes_is_not_reported_for_every_loss() -> None:
    connection = connected()
    connection.subscribe("a", max_pending_bytes=100_000)
    connection.receive_data(message(1, b"x" * 90_000))
    reported = []
    for _ in range(100):
        connection.receive_data(message(1, b"x"))
        connection.receive_data(message(1, b"x" * 50_000))
        reported += [event for event in connection.events() if isinstance(event, SlowConsumer)]
    assert [event.dropped for event in reported] == [1, 2, 4, 8, 16, 32, 64]


# ---- requests --------------------------------------------------------------------------------------------------


def test_a_request_is_done_with_its_answer() -> None:
    connection = connected()
    first = connection.request("first", "svc", b"?", None)
    second = connection.request("second", "svc", b"?", {"A": "1"})
    assert connection.data_to_send() == (
        b"SUB _INBOX.me.* 1\r\n"
        b"PUB svc _INBOX.me.1 1\r\n?\r\n"
        b"HPUB svc _INBOX.me.2 18 19\r\nNATS/1.0\r\nA: 1\r\n\r\n?\r\n"
    )
    connection.receive_data(answer(second, b"two") + answer(first, b"one") + answer(first, b"again"))
    events = connection.events()
    assert [(event.handle, event.result.data) for event in events if isinstance(event, Done)] == [
        ("second", b"two"),
        ("first", b"one"),
    ]
    assert len(events) == 2


def test_nobody_listening_fails_the_request_at_once() -> None:
    connection = connected()
    token = connection.request("request", "svc", b"", None)
    connection.receive_data(answer(token, b"", b"NATS/1.0 503\r\n\r\n"))
    error = failures(connection.events())["request"]
    assert isinstance(error, NoResponders)
    assert error.subject == "svc"


@pytest.mark.parametrize(
    ("payload", "block"),
    [(b"x", b"NATS/1.0 503\r\n\r\n"), (b"", b"NATS/1.0 100 Idle\r\n\r\n"), (b"", b"NATS/1.0\r\nA: 1\r\n\r\n")],
)
def test_other_statuses_and_payloads_are_answers(payload: bytes, block: bytes) -> None:
    connection = connected()
    token = connection.request("request", "svc", b"", None)
    connection.receive_data(answer(token, payload, block))
    assert done(connection.events()) == ["request"]


@pytest.mark.parametrize("block", [b"garbage\r\n\r\n", b"NATS/1.0 5031\r\n\r\n", b"x"])
def test_an_answer_with_damaged_headers_is_the_askers_problem_not_the_connections(block: bytes) -> None:
    connection = connected()
    damaged = connection.request("damaged", "svc", b"", None)
    other = connection.request("other", "svc", b"", None)
    connection.receive_data(answer(damaged, b"", block) + answer(other))
    events = connection.events()
    assert "other" in done(events)
    assert "damaged" in [*done(events), *failures(events)]


def test_a_late_answer_is_dropped() -> None:
    connection = connected()
    token = connection.request("request", "svc", b"", None)
    connection.requests.forget(token)
    connection.requests.forget(token)
    connection.receive_data(answer(token) + answer("unknown"))
    assert connection.events() == []
    assert len(connection.requests) == 0


def test_a_request_that_was_not_accepted_leaves_nothing_behind() -> None:
    connection = new(send_buffer_bytes=10)
    connection.publish("a", b"0123456789")
    with pytest.raises(BufferFull):
        connection.request("request", "svc", b"", None)
    with pytest.raises(InvalidSubject):
        connection.request("request", "s v c", b"", None)
    assert len(connection.requests) == 0


def test_a_request_survives_a_reconnect_on_the_same_inbox() -> None:
    connection = connected()
    token = connection.request("request", "svc", b"", None)
    assert reconnect(connection) == b"SUB _INBOX.me.* 1\r\nPUB svc _INBOX.me.1 0\r\n\r\n"
    connection.receive_data(answer(token))
    assert done(connection.events()) == ["request"]


def test_inboxes_for_many_answers_are_not_the_shared_one() -> None:
    connection = connected()
    inboxes = {connection.names.new_inbox() for _ in range(100)}
    assert len(inboxes) == 100
    assert all(inbox.startswith(f"{INBOX}.many.") for inbox in inboxes)


# ---- what the server does not allow ----------------------------------------------------------------------------


def denied(kind: str, subject: str, rest: str = "") -> bytes:
    return f"-ERR 'Permissions Violation for {kind} to \"{subject}\"{rest}'\r\n".encode()


def reported(events: list[Event]) -> list[tuple[str, str]]:
    errors = [event.error for event in events if isinstance(event, ErrorReported)]
    return [(error.operation, error.subject) for error in errors if isinstance(error, PermissionDenied)]


def test_a_request_we_may_not_publish_fails_and_others_go_on() -> None:
    connection = connected()
    connection.request("refused", "secret", b"", None)
    fine = connection.request("fine", "svc", b"", None)
    connection.receive_data(denied("Publish", "secret"))
    events = connection.events()
    error = failures(events)["refused"]
    assert isinstance(error, PermissionDenied)
    assert (error.operation, error.subject) == ("publish", "secret")
    assert reported(events) == [("publish", "secret")]
    connection.flush("flush")
    connection.receive_data(answer(fine) + b"PONG\r\n" * 2)  # the first one confirms what the denial was of
    assert done(connection.events()) == ["fine", "flush"]


@pytest.mark.parametrize(("subject", "quoted"), [('a"b', r"a\"b"), (r"a\b", r"a\\b")])
def test_a_subject_that_the_server_had_to_quote_is_recognised(subject: str, quoted: str) -> None:
    connection = connected()
    connection.request("request", subject, b"", None)
    subscription = connection.subscribe(subject)
    connection.receive_data(denied("Publish", quoted) + denied("Subscription", quoted))
    assert list(failures(connection.events())) == ["request"]
    assert subscription.is_finished


def test_a_publish_we_may_not_make_fails_the_next_flush_only() -> None:
    connection = connected()
    connection.publish("secret", b"")
    connection.publish("secret2", b"")
    connection.flush("first")
    connection.flush("second")
    connection.receive_data(denied("Publish", "secret") + denied("Publish", "secret2") + b"PONG\r\nPONG\r\n")
    events = connection.events()
    assert reported(events) == [("publish", "secret"), ("publish", "secret2")]
    assert str(failures(events)["first"]) == str(PermissionDenied("publish", "secret"))
    assert done(events) == ["second"]
    assert connection.in_doubt == 0


def test_a_refused_publish_does_not_fail_a_drain() -> None:
    connection = connected()
    subscription = connection.subscribe("a")
    connection.publish("secret", b"")
    connection.drain(subscription, "drain")
    connection.flush("flush")
    connection.receive_data(denied("Publish", "secret") + b"PONG\r\nPONG\r\n")
    events = connection.events()
    assert done(events) == ["drain"]
    assert list(failures(events)) == ["flush"]


def test_a_subscription_we_may_not_make_ends_with_the_error() -> None:
    connection = connected()
    refused, fine = connection.subscribe("secret"), connection.subscribe("a")
    connection.receive_data(denied("Subscription", "secret"))
    events = connection.events()
    assert ready(events) == [refused]
    assert reported(events) == [("subscribe", "secret")]
    assert refused.is_finished
    assert isinstance(refused.error, PermissionDenied)
    assert connection.subscriptions.all == [fine]
    assert reconnect(connection) == b"SUB a 2\r\n"


def test_a_refused_queue_subscription_leaves_the_plain_one_on_the_same_subject_alone() -> None:
    connection = connected()
    plain, queued = connection.subscribe("a"), connection.subscribe("a", "q")
    connection.receive_data(denied("Subscription", "a", ' using queue "q"'))
    assert queued.is_finished
    assert not plain.is_finished
    connection.receive_data(message(1, b"still"))
    assert unread(plain) == [b"still"]


def test_a_refused_inbox_fails_every_request_and_the_next_one_tries_again() -> None:
    connection = connected()
    connection.request("first", "svc", b"", None)
    connection.request("second", "svc", b"", None)
    connection.data_to_send()
    connection.receive_data(denied("Subscription", f"{INBOX}.*"))
    events = connection.events()
    assert sorted(failures(events)) == ["first", "second"]
    assert all(isinstance(error, PermissionDenied) for error in failures(events).values())
    connection.request("third", "svc", b"", None)
    assert connection.data_to_send().startswith(b"SUB _INBOX.me.* 2\r\n")


def test_a_refused_request_for_many_answers_ends_its_subscription_here_and_at_the_server() -> None:
    connection = connected()
    answers = connection.subscribe(connection.names.new_inbox(), answers_to="secret")
    connection.publish("secret", b"", answers.subject)
    connection.data_to_send()
    connection.receive_data(denied("Publish", "secret"))
    assert answers.is_finished
    assert isinstance(answers.error, PermissionDenied)
    assert ready(connection.events()) == [answers]
    connection.unsubscribe(answers)
    connection.flush("flush")
    connection.receive_data(b"PONG\r\n" * 2)  # the first one confirms what the denial was of
    assert done(connection.events()) == ["flush"]
    assert connection.data_to_send() == b"UNSUB 1\r\nPING\r\nPING\r\n"


def test_an_error_while_connected_is_reported_and_is_the_reason_if_the_session_ends() -> None:
    connection = connected()
    connection.receive_data(b"-ERR 'Stale Connection'\r\n")
    (event,) = connection.events()
    assert isinstance(event, ErrorReported)
    assert isinstance(event.error, ServerRefused)
    assert (event.error.server, event.error.text) == (URL, "Stale Connection")
    assert connection.is_connected
    connection.end("the server closed the connection")
    assert connection.events() == [Disconnected(URL, "Stale Connection", 0, 0, 0)]
    log_in(connection)
    connection.events()
    connection.end("something else")
    assert connection.events() == [Disconnected(URL, "something else", 0, 0, 0)]


# ---- what the server announces ---------------------------------------------------------------------------------


def test_a_lame_duck_is_announced_once() -> None:
    connection = connected()
    connection.receive_data(info(ldm=True))
    connection.receive_data(info(ldm=True))
    assert connection.events() == [LameDuck(URL)]
    assert connection.info.is_lame_duck
    reconnect(connection)
    connection.events()
    connection.receive_data(info(ldm=True))
    assert connection.events() == [LameDuck(URL)]


def test_servers_the_cluster_announces_are_learned_once() -> None:
    connection = new()
    log_in(connection, connect_urls=["a:4222", "b:4222"])
    assert connection.events() == [ServersDiscovered(("nats://b:4222",)), Connected(URL)]
    connection.receive_data(info(connect_urls=["a:4222", "b:4222", "[::1]:5"]))
    assert connection.events() == [ServersDiscovered(("nats://[::1]:5",))]
    assert [str(server) for server in connection.pool.servers] == [URL, "nats://b:4222", "nats://[::1]:5"]


def test_announced_servers_can_be_ignored() -> None:
    connection = new(ignore_discovered_servers=True)
    log_in(connection, connect_urls=["b:4222"])
    assert connection.events() == [Connected(URL)]
    assert connection.pool.servers == [A]


def test_the_secret_in_the_url_is_used_for_announced_servers_too() -> None:
    server = Server.parse("nats://ada:hunter2@a")
    connection = new(server)
    log_in(connection, server, connect_urls=["b:4222"])
    connection.end("gone")
    announced = connection.pool.servers[1]
    assert announced.host == "b"
    assert log_in(connection, announced)["user"] == "ada"


def test_a_tls_address_is_not_left_for_plain_text_on_announced_servers() -> None:
    connection = new(Server.parse("tls://a"))
    log_in(connection, connection.pool.servers[0], tls_available=True, connect_urls=["b:4222"])
    assert connection.events()[0] == ServersDiscovered(("tls://b:4222",))


def test_an_announced_address_has_the_name_of_the_server_that_announced_it() -> None:
    connection = new(Server.parse("tls://a"))
    log_in(connection, connection.pool.servers[0], tls_available=True, connect_urls=["10.0.0.2:4222"])
    announced = connection.pool.servers[1]
    assert (announced.host, announced.tls_name) == ("10.0.0.2", "a")
    # The name goes on to what that one announces, which has none to give.
    connection.end("gone")
    log_in(connection, announced, tls_available=True, connect_urls=["10.0.0.3:4222"])
    assert [(server.host, server.tls_name) for server in connection.pool.servers[1:]] == [("10.0.0.3", "a")]


# ---- time ------------------------------------------------------------------------------------------------------


def test_pings_are_sent_at_their_interval() -> None:
    connection = new(ping_interval_s=10)
    connection.on_time(0)
    assert connection.next_deadline() is None
    log_in(connection)
    assert connection.next_deadline() is None
    connection.on_time(100)
    assert connection.next_deadline() == 110
    assert connection.data_to_send() == b""
    connection.on_time(109.9)
    assert connection.data_to_send() == b""
    connection.on_time(110)
    assert connection.data_to_send() == b"PING\r\n"
    assert connection.next_deadline() == 120


def test_too_many_unanswered_pings_mean_a_lost_connection() -> None:
    connection = connected(ping_interval_s=10, max_outstanding_pings=2)
    for now in (100, 110, 120):
        connection.on_time(now)
    with pytest.raises(ConnectionLost, match="2 pings without an answer"):
        connection.on_time(130)
    connection.end("pings")
    assert connection.next_deadline() is None
    log_in(connection)
    for now in (131, 141, 151):
        connection.on_time(now)


def test_an_answered_ping_does_not_count() -> None:
    connection = connected(ping_interval_s=10, max_outstanding_pings=1)
    connection.on_time(100)
    for now in range(110, 200, 10):
        connection.on_time(now)
        connection.receive_data(b"PONG\r\n")
    assert connection.events() == []


def test_flushes_that_were_just_sent_are_no_sign_of_a_dead_connection() -> None:
    connection = connected(ping_interval_s=10, max_outstanding_pings=2)
    connection.on_time(100)
    for number in range(5):
        connection.flush(number)
    connection.on_time(110)
    assert connection.data_to_send() == b"PING\r\n" * 6


# ---- close -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [None, ConnectionLost("no more servers")])
@pytest.mark.parametrize("is_connected", [True, False])
def test_closing_tells_everyone_who_waits(error: Exception | None, is_connected: bool) -> None:
    connection = connected()
    subscription, draining = connection.subscribe("a"), connection.subscribe("b")
    connection.receive_data(message(1, b"1"))
    if not is_connected:
        connection.end("gone")
    else:
        connection.drain(draining, "drain")
    connection.flush("flush")
    connection.request("request", "svc", b"", None)
    connection.events()
    connection.close(error)
    events = connection.events()
    failed = failures(events)
    assert sorted(failed) == (["drain", "flush", "request"] if is_connected else ["flush", "request"])
    assert all(isinstance(each, ConnectionClosed) if error is None else each is error for each in failed.values())
    assert subscription in ready(events)
    assert draining in ready(events)
    assert subscription.is_finished
    assert subscription.error is error
    assert unread(subscription) == [b"1"]
    assert events[-1] == Closed(error, unsent_messages=1)
    assert connection.subscriptions.all == []
    assert connection.next_deadline() is None
    assert connection.data_to_send() == b""


def test_one_that_belongs_to_another_process_is_closed_without_a_word_and_owes_nothing() -> None:
    connection = connected()
    subscription = connection.subscribe("a")
    connection.publish("a", b"1")
    connection.data_to_send()
    connection.publish("a", b"2")
    connection.flush("flush")
    connection.disown(ConnectionLost("not ours"))
    assert connection.is_closed
    assert (connection.events(), connection.data_to_send()) == ([], b"")
    assert (connection.buffered_messages, connection.unconfirmed_messages, connection.in_doubt) == (0, 0, 0)
    assert subscription.is_finished
    with pytest.raises(ConnectionClosed, match="not ours"):
        connection.publish("a")


def test_messages_that_were_in_doubt_are_counted_over_all_sessions() -> None:
    connection = connected()
    for session in (1, 2):
        connection.publish("a", b"1")
        connection.data_to_send()
        connection.end("gone")
        assert connection.lost_messages == session
        log_in(connection)


def test_a_closed_connection_waits_for_no_ping() -> None:
    connection = connected(ping_interval_s=10)
    connection.on_time(100.0)
    assert connection.next_deadline() == 110.0
    connection.close()
    assert connection.next_deadline() is None


def test_closing_twice_is_closing_once() -> None:
    connection = connected()
    connection.close()
    assert connection.events() == [Closed(None)]
    connection.close(ConnectionLost("late"))
    assert connection.events() == []


def test_closing_during_the_login_sends_no_secret_afterwards() -> None:
    connection = new()
    connection.begin(A)
    connection.receive_data(info())
    connection.login(UserPassword("ada", "hunter2"))
    connection.close()
    assert connection.data_to_send() == b""


@pytest.mark.parametrize("error", [None, ConnectionLost("no more servers")])
def test_use_after_close_says_that_and_why(error: Exception | None) -> None:
    connection = connected()
    subscription = connection.subscribe("a")
    connection.close(error)
    connection.unsubscribe(subscription)
    why = "no more servers" if error else "the connection is closed"
    with pytest.raises(ConnectionClosed, match=why):
        connection.publish("a")
    with pytest.raises(ConnectionClosed, match=why):
        connection.subscribe("a")
    with pytest.raises(ConnectionClosed, match=why):
        connection.flush("flush")
    with pytest.raises(ConnectionClosed, match=why):
        connection.request("request", "a", b"", None)


def test_a_request_after_close_on_a_connection_that_made_one_before_is_refused() -> None:
    connection = connected()
    connection.request("before", "a", b"", None)
    connection.close()
    with pytest.raises(ConnectionClosed):
        connection.request("after", "a", b"", None)
    assert len(connection.requests) == 0


def test_a_chunk_after_close_is_ignored() -> None:
    connection = connected()
    subscription = connection.subscribe("a")
    connection.close()
    connection.events()
    connection.receive_data(message(1) + b"PING\r\nPONG\r\n")
    connection.on_time(1000)
    assert connection.events() == []
    assert unread(subscription) == []
    assert connection.is_closed


# ---- any order of things, against a model of the server --------------------------------------------------------


class ModelServer:
    """One session at the server: reads what we send, and knows what it would answer."""

    def __init__(self, published: list[int]) -> None:
        self.published = published
        """The payloads of all publishes, over all sessions."""
        self.pongs: list[int] = []
        """How many publishes each PING came after that is not yet answered."""
        self.subscriptions: dict[int, list[int]] = {}
        """Delivered, and the limit or 0, by id."""

    def process(self, data: bytes) -> None:
        lines = data.split(b"\r\n")
        while len(lines) > 1:
            operation, *arguments = lines.pop(0).split(b" ")
            if operation == b"PUB":
                self.published.append(int(lines.pop(0)))
            elif operation == b"PING":
                self.pongs.append(len(self.published))
            elif operation == b"SUB":
                self.subscriptions[int(arguments[-1])] = [0, 0]
            else:
                assert operation == b"UNSUB"
                self.unsubscribe(*map(int, arguments))

    def unsubscribe(self, sid: int, limit: int = 0) -> None:
        if sid in self.subscriptions:
            self.subscriptions[sid][1] = limit
            if self.subscriptions[sid][0] >= limit:
                del self.subscriptions[sid]

    def deliver(self, sid: int) -> bytes:
        if sid not in self.subscriptions:
            return b""
        counts = self.subscriptions[sid]
        counts[0] += 1
        if counts[0] == counts[1]:
            del self.subscriptions[sid]
        return message(sid)


PUBLISHING = ["publish", "publish", "flush", "send", "send", "pong", "lose", "connect"]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(PUBLISHING), max_size=25))
def test_every_publish_leaves_once_and_what_is_in_doubt_is_known_exactly(steps: list[str]) -> None:
    connection = new()
    left: list[int] = []
    server = ModelServer(left)
    published = flushes = confirmed = 0
    resolved: list[int] = []
    for step in [*steps, "connect", "send", *["pong"] * (len(steps) + 1)]:
        if step == "publish":
            published += 1
            connection.publish("a", b"%d" % published)
        elif step == "flush":
            flushes += 1
            connection.flush(flushes)
        elif step == "connect" and not connection.is_connected:
            log_in(connection)
            server = ModelServer(left)
        elif step == "send" and connection.is_connected:
            server.process(connection.data_to_send())
        elif step == "pong" and server.pongs:
            confirmed = max(confirmed, server.pongs.pop(0))
            connection.receive_data(b"PONG\r\n")
        elif step == "lose" and connection.is_connected:
            connection.end("gone")
            server.pongs.clear()
        events = connection.events()
        if step == "lose" and events:
            in_doubt = len(left) - confirmed
            assert events[-1] == Disconnected(URL, "gone", in_doubt, published - len(left), published)
            lost = [error for error in failures(events).values() if isinstance(error, ConnectionLost)]
            assert all(error.unconfirmed_messages == in_doubt > 0 for error in lost)
            confirmed = len(left)
        resolved += [*done(events), *failures(events)]
        assert connection.unconfirmed_messages == len(left) - confirmed
        assert connection.in_doubt == published - confirmed
    assert left == list(range(1, published + 1))
    assert sorted(resolved) == list(range(1, flushes + 1))


RECEIVING = ["deliver", "deliver", "deliver", "arrive", "arrive", "send", "lose", "connect", "limit"]


@settings(deadline=None, max_examples=200)
@given(st.lists(st.sampled_from(RECEIVING), max_size=40), st.lists(st.integers(1, 12), max_size=40))
def test_a_limit_is_kept_over_any_number_of_sessions_and_never_waits_in_vain(
    steps: list[str], limits: list[int]
) -> None:
    connection = new()
    server = ModelServer([])
    subscription = connection.subscribe("a")
    wire = b""
    limit = most = received = 0
    was_finished = False
    limits.sort()  # each is lower than the one before: the server may have acted on that one already
    for step in [*steps, "connect", "send", *["deliver"] * 13, "arrive"]:
        if step == "deliver":
            wire += server.deliver(1)
        elif step == "arrive" and connection.is_connected:
            connection.receive_data(wire)
            wire = b""
        elif step == "send" and connection.is_connected:
            server.process(connection.data_to_send())
        elif step == "lose" and connection.is_connected:
            connection.end("gone")
            server, wire = ModelServer([]), b""
        elif step == "connect" and not connection.is_connected:
            log_in(connection)
        elif step == "limit" and limits and not subscription.is_finished:
            limit = limits.pop()
            most = max(limit, received)
            connection.unsubscribe(subscription, limit)
        has_news = subscription.received > received or subscription.is_finished != was_finished
        assert (subscription in ready(connection.events())) == has_news
        received, was_finished = subscription.received, subscription.is_finished
        if limit:
            assert received <= most
            assert subscription.is_finished == (received >= limit)
    assert subscription.is_finished == bool(limit)
    if limit:
        assert len(subscription.pending) == received
        assert 1 not in server.subscriptions or connection.data_to_send() == b"UNSUB 1\r\n"


def test_a_drain_nobody_waits_for_does_not_come_back_with_the_next_session() -> None:
    connection = connected()
    subscription = connection.subscribe("a")
    handle = object()
    connection.drain(subscription, handle)
    connection.forget_flush(handle)
    assert b"SUB" not in reconnect(connection)
    assert subscription.is_finished


def test_closing_tells_how_many_messages_never_left() -> None:
    connection = connected()
    connection.publish("a")
    connection.data_to_send()
    connection.end("gone")
    connection.publish("a")
    connection.publish("a")
    connection.events()
    connection.close(ConnectionLost("given up"))
    [closed] = [event for event in connection.events() if isinstance(event, Closed)]
    assert closed.unsent_messages == 2


# ---- interrupted by the user ---------------------------------------------------------------------------------------


def test_a_message_is_never_there_without_being_counted() -> None:
    """Otherwise nobody would wait for it before closing."""
    for number in range(count_places(lambda: connected().publish("a", b"x"), at="any")):
        connection = connected()
        with suppress(KeyboardInterrupt), Interrupt(number, at="any"):
            connection.publish("a", b"x")
        assert connection.published >= len(connection._out)


def test_messages_that_are_handed_over_are_never_forgotten() -> None:
    for number in range(count_places(connected().data_to_send, at="any") + 40):
        connection = connected()
        connection.publish("a", b"x")
        with suppress(KeyboardInterrupt), Interrupt(number, at="any"):
            connection.data_to_send()
        connection.end("interrupted")
        [told] = [event for event in connection.events() if isinstance(event, Disconnected)]
        assert told.unconfirmed_messages + told.buffered_messages >= 1


def test_a_close_that_was_interrupted_is_completed_by_the_next() -> None:
    def prepared() -> Connection:
        connection = connected()
        connection.subscribe("a", reader=READER)
        connection.request("asking", "b", b"", None)
        connection.flush("flushing")
        return connection

    for number in range(count_places(prepared().close, at="any")):
        connection = prepared()
        with suppress(KeyboardInterrupt), Interrupt(number, at="any"):
            connection.close()
        connection.close()
        events = connection.events()
        assert {event.handle for event in events if isinstance(event, Failed)} == {"asking", "flushing"}
        assert READER in [event.subscription.reader for event in events if isinstance(event, Ready)]
        assert len([event for event in events if isinstance(event, Closed)]) >= 1
        assert connection.is_closed


def test_a_request_after_one_that_was_interrupted_is_answered() -> None:
    def request(connection: Connection) -> None:
        connection.request("first", "a", b"", None)

    for number in range(count_places(lambda: request(connected()), at="any")):
        connection = connected()
        with suppress(KeyboardInterrupt), Interrupt(number, at="any"):
            request(connection)
        token = connection.request("second", "a", b"", None)
        assert connection.requests.replies is not None
        inboxes = [route for route in connection.subscriptions.all if route.subject == f"{INBOX}.*"]
        assert inboxes == [connection.requests.replies]
        sid = connection.requests.replies.sid
        connection.receive_data(b"MSG %b.%b %d 1\r\nx\r\n" % (INBOX.encode(), token.encode(), sid))
        assert "second" in [event.handle for event in connection.events() if isinstance(event, Done)]


@pytest.mark.parametrize("again", ["unsubscribe", "end"])
def test_a_subscription_whose_end_was_interrupted_is_ended_by_the_next_step(again: str) -> None:
    """By whoever unsubscribes once more, or by the end of the session, which is given up after an interrupt."""

    def drained(connection: Connection, subscription: SubscriptionState) -> None:
        connection.drain(subscription, "draining")
        connection.receive_data(b"PONG\r\n")

    def prepared() -> tuple[Connection, SubscriptionState]:
        connection = connected()
        return connection, connection.subscribe("a", reader=SilentReader())

    works: list[Callable[[Connection, SubscriptionState], None]] = [Connection.unsubscribe, drained]
    for work in works:
        for number in range(count_places(functools.partial(work, *prepared()), at="any")):
            connection, subscription = prepared()
            with suppress(KeyboardInterrupt), Interrupt(number, at="any"):
                work(connection, subscription)
            if again == "unsubscribe":
                connection.unsubscribe(subscription)
            else:
                was_ending = subscription.is_finished
                connection.end("interrupted")
                if not was_ending:
                    continue
            assert list(connection.subscriptions.all) == []
            assert subscription in [event.subscription for event in connection.events() if isinstance(event, Ready)]


def test_events_that_are_put_back_come_first() -> None:
    connection = connected()
    connection.flush("first")
    connection.receive_data(b"PONG\r\n")
    taken = connection.events()
    connection.flush("second")
    connection.receive_data(b"PONG\r\n")
    connection.put_back(taken)
    assert connection.events() == [Done("first"), Done("second")]
