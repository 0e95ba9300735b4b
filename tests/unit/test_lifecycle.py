"""``establish`` driven by hand: each step is checked, and answered as the world might."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable
from typing import Any

import pytest

from jetspark.core.auth import Auth, Credentials, NKey, Token, UserPassword, create_seed
from jetspark.core.connection import Connection, State
from jetspark.core.events import Connected, Reconnected, ReconnectFailed
from jetspark.core.lifecycle import (
    AskSecret,
    AuthSource,
    Converse,
    Dial,
    Hangup,
    Step,
    UpgradeToTLS,
    establish,
)
from jetspark.core.options import ConnectOptions, TLSConfig
from jetspark.core.reconnect import Server, parse_servers
from jetspark.core.step_runner import Sleep
from jetspark.core.tls import OUR_CERTIFICATE
from jetspark.errors import (
    AuthenticationFailed,
    ConfigError,
    ConnectionLost,
    NoServersAvailable,
    RequestTimeout,
    ServerRefused,
)

A, B, C = (Server(host, 4222) for host in "abc")
REFUSED = b"-ERR 'Authorization Violation'\r\n"


def new(servers: str = "a", **options: Any) -> Connection:
    return Connection(ConnectOptions(**options), parse_servers(servers), inbox="_INBOX.me", jitter=lambda: 1.0)


class World:
    """Performs steps: what each server does when dialled, and a record of every step."""

    def __init__(self, connection: Connection, **servers: Exception | tuple[dict[str, Any], bytes]) -> None:
        """A server is the error of dialling it, or the fields of its INFO and its answer to our login."""
        self.connection = connection
        self.servers = servers
        self.log: list[str] = []
        self.logins: list[dict[str, Any]] = []
        self.is_open = False
        self._host = ""

    def run(
        self, auth: AuthSource = None, tls: TLSConfig | None = None, *, is_first: bool = True, max_steps: int = 100
    ) -> None:
        steps = establish(self.connection, auth, tls, is_first=is_first)
        answer: Any = None
        problem: Exception | None = None
        for _ in range(max_steps):
            try:
                step = steps.send(answer) if problem is None else steps.throw(problem)
            except StopIteration:
                return
            answer = problem = None
            try:
                answer = self.perform(step)
            except Exception as error:
                problem = error
        raise EnoughSteps

    def perform(self, step: Step) -> Any:
        match step:
            case Sleep(seconds):
                self.log.append(f"pause {seconds:g}")
            case Dial(server, tls):
                assert not self.is_open
                self.log.append(f"dial {server.host}{' tls' if tls else ''}")
                self._host = server.host
                if isinstance(behaviour := self.servers[server.host], Exception):
                    raise behaviour
                self.is_open = True
            case UpgradeToTLS(tls_name):
                self.log.append(f"upgrade {tls_name}")
            case AskSecret(source):
                self.log.append("ask")
                return source()
            case Hangup():
                self.log.append("hang up")
                self.is_open = False
            case Converse(is_done, _):
                self.converse(is_done)

    def converse(self, is_done: Callable[[], bool]) -> None:
        behaviour = self.servers[self._host]
        assert isinstance(behaviour, tuple)
        fields, reply = behaviour
        if self.connection.state is State.GREETING:
            self.connection.receive_data(b"INFO %b\r\n" % json.dumps(fields).encode())
        else:
            sent = self.connection.data_to_send()
            self.logins.append(json.loads(sent.split(b"\r\n")[0].removeprefix(b"CONNECT ")))
            self.connection.receive_data(reply)
        assert is_done()


class EnoughSteps(Exception):
    """The generator would go on."""


GOOD: tuple[dict[str, Any], bytes] = ({}, b"PONG\r\n")
BAD: tuple[dict[str, Any], bytes] = ({}, REFUSED)


def lose(world: World) -> None:
    world.connection.end("gone")
    world.connection.events()
    world.is_open = False


def test_a_session_comes_about_in_these_steps() -> None:
    connection = new()
    steps = establish(connection, None, None, is_first=True)
    assert next(steps) == Dial(A, None)
    assert connection.state is State.GREETING
    greeting = next(steps)
    assert isinstance(greeting, Converse)
    assert not greeting.is_done()
    connection.receive_data(b"INFO {}\r\n")
    assert greeting.is_done()
    login = next(steps)
    assert isinstance(login, Converse)
    assert connection.data_to_send().startswith(b"CONNECT ")
    assert not login.is_done()
    connection.receive_data(b"PONG\r\n")
    assert login.is_done()
    with pytest.raises(StopIteration):
        next(steps)
    assert connection.events() == [Connected("nats://a:4222")]


def test_the_next_server_is_tried_when_one_fails() -> None:
    world = World(new("a,b,c"), a=OSError("refused"), b=({}, b"-ERR 'maximum connections exceeded'\r\n"), c=GOOD)
    world.run()
    assert world.log == ["dial a", "hang up", "dial b", "hang up", "dial c"]
    assert world.connection.is_connected
    assert world.connection.server == C


@pytest.mark.parametrize("max_attempts", [None, 1, 2])
@pytest.mark.parametrize("servers", ["a", "a,b", "a,b,c", "a,b,c,d"])
def test_the_first_time_each_server_gets_one_attempt(servers: str, max_attempts: int | None) -> None:
    hosts = servers.split(",")
    world = World(
        new(servers, max_reconnect_attempts=max_attempts), **{host: OSError(f"{host} refused") for host in hosts}
    )
    with pytest.raises(NoServersAvailable) as failure:
        world.run()
    assert world.log == [step for host in hosts for step in (f"dial {host}", "hang up")]
    assert failure.value.failures == {f"nats://{host}:4222": f"{host} refused" for host in hosts}
    assert world.connection.state is State.IDLE


def test_servers_announced_by_one_that_refuses_are_tried_too() -> None:
    world = World(new("a"), a=({"connect_urls": ["b:4222"]}, REFUSED), b=GOOD)
    world.run()
    assert world.log == ["dial a", "hang up", "dial b"]


def test_later_it_goes_on_with_growing_pauses_until_a_server_is_back() -> None:
    world = World(new("a", reconnect_wait_s=1, reconnect_wait_max_s=3), a=GOOD)
    world.run()
    world.connection.pool.proven()
    lose(world)
    world.servers["a"] = OSError("refused")
    world.log.clear()
    with pytest.raises(EnoughSteps):
        world.run(is_first=False, max_steps=13)
    assert [step for step in world.log if step.startswith("pause")] == ["pause 1", "pause 2", "pause 3", "pause 3"]


def test_later_success_is_a_reconnect() -> None:
    world = World(new("a"), a=GOOD)
    world.run()
    world.connection.pool.proven()
    lose(world)
    world.run(is_first=False)
    assert world.connection.events() == [Reconnected("nats://a:4222")]
    assert world.log == ["dial a", "dial a"]


def test_a_server_that_lets_us_in_and_drops_us_is_dialled_ever_more_rarely() -> None:
    world = World(new("a", reconnect_wait_s=1, reconnect_wait_max_s=3), a=GOOD)
    world.run()
    for _ in range(4):
        lose(world)
        world.run(is_first=False)
    assert [step for step in world.log if step.startswith("pause")] == ["pause 1", "pause 2", "pause 3", "pause 3"]


def test_later_it_ends_when_every_server_is_given_up() -> None:
    world = World(new("a,b", max_reconnect_attempts=2), a=OSError("refused"), b=OSError("refused"))
    with pytest.raises(NoServersAvailable):
        world.run(is_first=False)
    assert [step for step in world.log if step.startswith("dial")] == ["dial a", "dial b"] * 2


@pytest.mark.parametrize(
    "problem",
    [OSError("x"), ConnectionLost("x"), TimeoutError("x"), ServerRefused("a", "x"), UnicodeError("label too long")],
    ids=lambda problem: type(problem).__name__,
)
def test_whatever_dialling_raises_ends_only_the_attempt(problem: Exception) -> None:
    world = World(new("a,b"), a=problem, b=GOOD)
    world.run()
    assert world.log == ["dial a", "hang up", "dial b"]


# ---- TLS -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "tls", "fields", "upgrades"),
    [
        ("nats://a", None, {}, False),
        ("nats://a", None, {"tls_available": True}, False),
        ("nats://a", None, {"tls_required": True}, True),
        ("nats://a", TLSConfig(), {"tls_required": True}, True),
        ("nats://a", TLSConfig(), {"tls_available": True}, True),
        ("tls://a", None, {"tls_required": True}, True),
        ("tls://a", None, {"tls_available": True}, True),
    ],
)
def test_tls_is_spoken_when_either_side_wants_it(
    url: str, tls: TLSConfig | None, fields: dict[str, Any], upgrades: bool
) -> None:
    world = World(new(url), a=(fields, b"PONG\r\n"))
    world.run(tls=tls)
    assert world.log == (["dial a", "upgrade a"] if upgrades else ["dial a"])


@pytest.mark.parametrize(("url", "tls"), [("tls://a", None), ("nats://a", TLSConfig())])
def test_a_server_without_tls_is_not_spoken_to_in_plain_text(url: str, tls: TLSConfig | None) -> None:
    world = World(new(url), a=GOOD)
    with pytest.raises(NoServersAvailable, match="does not offer TLS"):
        world.run(UserPassword("ada", "hunter2"), tls)
    assert world.logins == []


def test_tls_from_the_first_byte_needs_no_upgrade() -> None:
    world = World(new("a"), a=({"tls_required": True}, b"PONG\r\n"))
    world.run(tls=TLSConfig(handshake_first=True))
    assert world.log == ["dial a tls"]


def test_the_secret_is_asked_for_after_the_upgrade() -> None:
    world = World(new("a"), a=({"tls_required": True}, b"PONG\r\n"))
    world.run(lambda: Token("t"))
    assert world.log == ["dial a", "upgrade a", "ask"]


class Nodes(World):
    """Whose certificates have these names."""

    names: tuple[str, ...] = ()

    def perform(self, step: Step) -> Any:
        answer = super().perform(step)
        if isinstance(step, UpgradeToTLS) and step.tls_name not in self.names:
            error = ssl.SSLCertVerificationError(1, "mismatch")
            error.verify_code, error.verify_message = 64, "mismatch"
            raise error
        return answer


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (("nats.example",), ["upgrade nats.example"]),
        (("10.0.0.1",), ["upgrade nats.example", "hang up", "dial 10.0.0.1", "upgrade 10.0.0.1"]),
        (("other",), ["upgrade nats.example", "hang up", "dial 10.0.0.1", "upgrade 10.0.0.1", "hang up"]),
    ],
)
def test_a_server_announced_by_address_is_known_by_the_clusters_name_or_its_address(
    names: tuple[str, ...], steps: list[str]
) -> None:
    connection = new("tls://10.0.0.1")
    connection.pool._candidates[0].server = Server("10.0.0.1", 4222, True, tls_name="nats.example")
    world = Nodes(connection, **{"10.0.0.1": ({"tls_required": True}, b"PONG\r\n")})
    world.names = names
    if names == ("other",):
        with pytest.raises(NoServersAvailable, match="its certificate was not accepted: mismatch"):
            world.run()
    else:
        world.run()
    assert world.log == ["dial 10.0.0.1", *steps]


def test_the_name_in_a_tls_config_is_the_only_one() -> None:
    connection = new("tls://10.0.0.1")
    connection.pool._candidates[0].server = Server("10.0.0.1", 4222, True, tls_name="nats.example")
    world = World(connection, **{"10.0.0.1": ({"tls_required": True}, b"PONG\r\n")})
    world.run(tls=TLSConfig(hostname="given"))
    assert world.log == ["dial 10.0.0.1", "upgrade given"]


class Broken(World):
    """A connection that breaks in one of its conversations."""

    breaks_in = State.GREETING

    def converse(self, is_done: Callable[[], bool]) -> None:
        if self.connection.state is self.breaks_in:
            raise ConnectionResetError("reset by peer")
        super().converse(is_done)


@pytest.mark.parametrize("is_first_byte", [True, False])
def test_a_server_that_does_not_greet_may_want_tls_first_unless_it_has_that(is_first_byte: bool) -> None:
    world = Broken(new("a"), a=GOOD)
    with pytest.raises(NoServersAvailable, match="reset by peer") as caught:
        world.run(tls=TLSConfig(handshake_first=is_first_byte))
    assert ("pass tls=TLSConfig(handshake_first=True)" in str(caught.value)) is not is_first_byte


def wrong_version() -> ssl.SSLError:
    error = ssl.SSLError(1, "wrong version number")
    error.reason = "WRONG_VERSION_NUMBER"
    return error


@pytest.mark.parametrize(
    ("problem", "is_first_byte", "is_told"),
    [
        (wrong_version(), True, True),
        (wrong_version(), False, False),
        (ConnectionRefusedError("refused"), True, False),
    ],
)
def test_a_server_that_answers_in_plain_text_wants_no_tls_first(
    problem: Exception, is_first_byte: bool, is_told: bool
) -> None:
    world = World(new("a"), a=problem)
    with pytest.raises(NoServersAvailable) as caught:
        world.run(tls=TLSConfig(handshake_first=is_first_byte))
    assert ("leave out handshake_first=True" in str(caught.value)) is is_told


@pytest.mark.parametrize(
    ("tls", "verifies", "is_told"),
    [
        (TLSConfig(), True, True),
        (TLSConfig(), False, False),
        (TLSConfig(cert_file="our.pem"), True, False),
        (TLSConfig(context=ssl.create_default_context()), True, False),
    ],
    ids=["none", "not asked for", "file", "context"],
)
def test_a_login_that_breaks_where_certificates_are_wanted_is_for_lack_of_ours(
    tls: TLSConfig, verifies: bool, is_told: bool
) -> None:
    world = Broken(new("a"), a=({"tls_required": True, "tls_verify": verifies}, b"PONG\r\n"))
    world.breaks_in = State.LOGGING_IN
    with pytest.raises(NoServersAvailable) as caught:
        world.run(tls=tls)
    assert (OUR_CERTIFICATE in str(caught.value)) is is_told


# ---- secrets ---------------------------------------------------------------------------------------------------


def test_a_secret_function_is_called_for_each_attempt() -> None:
    numbers = iter(range(10))
    world = World(new("a,b"), a=BAD, b=GOOD)
    world.run(lambda: Token(f"t{next(numbers)}"))
    assert [fields["auth_token"] for fields in world.logins] == ["t0", "t1"]


def broken() -> Auth:
    raise KeyError("vault")


def no_secret() -> Any:
    return "a string"


@pytest.mark.parametrize(
    ("source", "words"), [(broken, r"failed: KeyError\('vault'\)"), (no_secret, "returned str: expected UserPassword")]
)
def test_a_secret_function_that_fails_ends_the_first_connect_at_once(source: Callable[[], Auth], words: str) -> None:
    world = World(new("a,b"), a=GOOD, b=GOOD)
    with pytest.raises(ConfigError, match=words):
        world.run(source)
    assert world.log == ["dial a", "ask", "hang up"]
    assert world.connection.state is State.IDLE


def test_a_secret_function_that_fails_later_is_asked_again() -> None:
    calls = 0

    def flaky() -> Auth:
        nonlocal calls
        calls += 1
        if calls < 5:
            raise KeyError("vault")
        return Token("t")

    world = World(new("a"), a=GOOD)
    world.run(flaky, is_first=False)
    assert calls == 5
    assert world.connection.is_connected


@pytest.mark.parametrize("auth", [NKey(create_seed("user", bytes(32))), "not an auth"])
def test_credentials_that_cannot_be_used_end_the_first_connect_at_once(auth: Any) -> None:
    world = World(new("a,b"), a=GOOD, b=GOOD)
    with pytest.raises(ConfigError):
        world.run(auth)
    assert world.log == ["dial a", "hang up"]


def test_credentials_refused_by_all_are_an_authentication_failure_the_first_time() -> None:
    world = World(new("a,b"), a=BAD, b=BAD)
    with pytest.raises(AuthenticationFailed):
        world.run(Token("t"))
    assert world.log == ["dial a", "hang up", "dial b", "hang up"]


def test_credentials_refused_by_some_and_the_rest_unreachable_is_no_server_available() -> None:
    world = World(new("a,b"), a=BAD, b=OSError("refused"))
    with pytest.raises(NoServersAvailable):
        world.run(Token("t"))


def test_later_failed_attempts_are_told_without_flooding_anybody() -> None:
    world = World(new("a"), a=OSError("no route"))
    with pytest.raises(EnoughSteps):
        world.run(is_first=False, max_steps=100)
    events = world.connection.events()
    assert [event.attempts for event in events if isinstance(event, ReconnectFailed)] == [1, 2, 4, 8, 16, 32]
    assert str(events[0]) == "ReconnectFailed(server='nats://a:4222', error=ConnectionLost('no route', 0), attempts=1)"


def test_the_first_time_failed_attempts_are_the_callers_alone() -> None:
    world = World(new("a,b"), a=OSError("no route"), b=GOOD)
    world.run()
    assert world.connection.events() == [Connected("nats://b:4222")]


def test_a_secret_function_that_takes_too_long_ends_the_attempt_only() -> None:
    def slow() -> Auth:
        raise RequestTimeout("the function that gives the credentials", 5.0)

    world = World(new("a"), a=GOOD)
    with pytest.raises(NoServersAvailable, match="the function that gives the credentials: no answer within 5 s"):
        world.run(slow)
    with pytest.raises(EnoughSteps):
        world.run(slow, is_first=False)


CREDENTIALS = Credentials(
    text="-----BEGIN NATS USER JWT-----\njwt\n------END NATS USER JWT------\n"
    f"-----BEGIN USER NKEY SEED-----\n{create_seed('user', bytes(32))}\n------END USER NKEY SEED------\n"
)


@pytest.mark.parametrize("auth", [Token("t"), UserPassword("ada", "x"), None, CREDENTIALS])
def test_later_a_fixed_secret_refused_twice_by_every_server_is_the_end(auth: Auth | None) -> None:
    refusing = ({"nonce": "n"}, REFUSED)
    world = World(new("a,b"), a=refusing, b=refusing)
    with pytest.raises(AuthenticationFailed):
        world.run(auth, is_first=False)
    assert [step for step in world.log if step.startswith("dial")] == ["dial a", "dial b"] * 2


def test_later_a_fixed_secret_goes_on_while_one_server_is_only_unreachable() -> None:
    world = World(new("a,b"), a=BAD, b=OSError("refused"))
    with pytest.raises(EnoughSteps):
        world.run(Token("t"), is_first=False)
    assert world.log.count("dial a") == 2


@pytest.mark.parametrize("source", [lambda: Token("t"), Credentials(path="/nowhere/user.creds")])
def test_later_a_secret_that_can_change_is_tried_for_ever(source: AuthSource) -> None:
    world = World(new("a"), a=({"nonce": "n"}, REFUSED))
    with pytest.raises(EnoughSteps):
        world.run(source, is_first=False)
    assert world.log.count("dial a") > 10
