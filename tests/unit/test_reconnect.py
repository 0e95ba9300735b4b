from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from jetspark.core.auth import Token, UserPassword
from jetspark.core.reconnect import MAX_DISCOVERED_SERVERS, Server, ServerPool, parse_servers
from jetspark.errors import AuthenticationFailed, ConfigError, NoServersAvailable

A, B, C = (Server(host, 4222) for host in "abc")
SECRET = "hunter2"


def pool(
    *servers: Server,
    wait_s: float = 1.0,
    wait_max_s: float = 8.0,
    max_attempts: int | None = None,
    jitter: Callable[[], float] = lambda: 0.0,
) -> ServerPool:
    return ServerPool(servers, wait_s=wait_s, wait_max_s=wait_max_s, max_attempts=max_attempts, jitter=jitter)


def refused(server: Server = A) -> AuthenticationFailed:
    return AuthenticationFailed(str(server), "Authorization Violation")


# ---- addresses -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "server", "shown"),
    [
        ("nats://a", A, "nats://a:4222"),
        ("nats://a:4222/", A, "nats://a:4222"),
        ("a", A, "nats://a:4222"),
        ("a:", A, "nats://a:4222"),
        ("  a:4222\n", A, "nats://a:4222"),
        ("NATS://A:4222", A, "nats://a:4222"),
        ("127.0.0.1:5", Server("127.0.0.1", 5), "nats://127.0.0.1:5"),
        ("tls://a:5", Server("a", 5, True), "tls://a:5"),
        ("nats://[::1]", Server("::1", 4222), "nats://[::1]:4222"),
        ("[::1]:5", Server("::1", 5), "nats://[::1]:5"),
    ],
)
def test_an_address_is_read(url: str, server: Server, shown: str) -> None:
    parsed = Server.parse(url)
    assert parsed == server
    assert parsed.auth is None
    assert str(parsed) == shown


@pytest.mark.parametrize(
    ("url", "auth"),
    [
        (f"nats://ada:{SECRET}@a", UserPassword("ada", SECRET)),
        ("nats://ada:p%40ss%2Fw%3Ard@a", UserPassword("ada", "p@ss/w:rd")),
        ("nats://ada:with@sign@a", UserPassword("ada", "with@sign")),
        ("nats://ada:@a", UserPassword("ada", "")),
        (f"{SECRET}@a", Token(SECRET)),
        ("nats://t%40ken@a", Token("t@ken")),
        (f"tls://ada:{SECRET}@[::1]:5", UserPassword("ada", SECRET)),
    ],
)
def test_the_secret_in_an_address_is_read_and_never_shown(url: str, auth: object) -> None:
    server = Server.parse(url)
    assert server.auth == auth
    assert SECRET not in f"{server} {server!r}"
    assert "ada" not in str(server)


@pytest.mark.parametrize(
    "url",
    [
        "ws://a",
        "wss://a",
        "http://a",
        "nats://",
        "nats://:4222",
        "nats://a:port",
        "nats://a:65536",
        "nats://a:-1",
        "nats://a b",
        "a b:4222",
        "nats://a/path",
        "nats://a?query",
        "nats://a#fragment",
        "nats://[::1",
        "nats://[nonsense]",
        "nats://a:1:2",
    ],
)
def test_a_bad_address_is_refused_and_named(url: str) -> None:
    with pytest.raises(ConfigError, match="server '") as failure:
        Server.parse(url)
    assert repr(url) in str(failure.value)


def test_a_foreign_scheme_is_told_what_would_work() -> None:
    with pytest.raises(ConfigError, match=r"scheme 'ws' is not supported; expected nats:// or tls://$"):
        Server.parse("ws://a")
    expected = r"tls://, and the port for clients \(4222 by default\), not the monitoring port$"
    with pytest.raises(ConfigError, match=expected):
        Server.parse("http://a:8222")


@pytest.mark.parametrize(
    "url",
    [
        f"http://ada:{SECRET}@a",
        f"nats://ada:{SECRET}@a:port",
        f"nats://ada:{SECRET}@a b",
        f"nats://ada:{SECRET}@a/path",
        f"nats://ada:{SECRET}@",
        f"nats://ada:{SECRET}@[::1",
        f"nats://ada:{SECRET}@[nonsense]",
        f"nats://ada:{SECRET}@ho\u2100st",
        f"nats://ada:{SECRET}/x@a",
        f"nats://ada:{SECRET}#x@a",
        f"nats://ada:{SECRET}?x@a",
        f"nats://ada:x/{SECRET}@a",
        f"nats://{SECRET}/x@a",
        f"nats://ada:12#{SECRET}@a",
        f"nats://ada:12?{SECRET}@a",
    ],
)
def test_a_bad_address_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(ConfigError) as failure:
        Server.parse(url)
    assert SECRET not in str(failure.value)
    assert SECRET not in repr(failure.value)


@pytest.mark.parametrize(
    "servers", ["nats://a,b:4222, tls://c ,", ["nats://a", "b", " tls://c", ""], ("a", "b", "tls://c")]
)
def test_several_addresses_come_as_text_or_as_an_iterable(servers: str | list[str]) -> None:
    assert parse_servers(servers) == [A, B, Server("c", 4222, True)]
    assert parse_servers(iter(["a"])) == [A]


@pytest.mark.parametrize("servers", ["", " , ", [], [""]])
def test_no_address_at_all_is_refused(servers: str | list[str]) -> None:
    with pytest.raises(ConfigError, match="expected at least one"):
        parse_servers(servers)


# ---- the pool --------------------------------------------------------------------------------------------------


def attempts(servers: ServerPool, count: int) -> list[tuple[str, float]]:
    """The next so many attempts, all of which fail."""
    made = []
    for _ in range(count):
        server, delay = servers.next()
        made.append((server.host, delay))
        servers.failed(OSError("refused"))
    return made


def test_a_round_visits_every_server_once_and_the_pause_between_rounds_doubles() -> None:
    servers = pool(A, B, wait_s=1, wait_max_s=3, jitter=lambda: 1.0)
    assert attempts(servers, 9) == [
        ("a", 0.0),
        ("b", 0.0),
        ("a", 1.0),
        ("b", 0.0),
        ("a", 2.0),
        ("b", 0.0),
        ("a", 3.0),
        ("b", 0.0),
        ("a", 3.0),
    ]


def test_pauses_are_jittered_over_their_upper_half() -> None:
    drawn = itertools.cycle([0.0, 0.5, 0.999])
    delays = [delay for _, delay in attempts(pool(A, wait_s=1, wait_max_s=1, jitter=lambda: next(drawn)), 4)]
    assert delays == pytest.approx([0.0, 0.5, 0.75, 0.9995])


def test_the_pause_stays_within_its_maximum_for_ever() -> None:
    servers = pool(A, wait_s=0.1, wait_max_s=5, jitter=lambda: 1.0)
    assert max(delay for _, delay in attempts(servers, 3000)) == 5


def test_the_same_server_twice_is_one() -> None:
    assert pool(A, B, A, Server.parse("nats://ada:x@a")).servers == [A, B]


def test_after_a_success_that_was_of_no_use_yet_the_round_goes_on() -> None:
    servers = pool(A, B, wait_s=1, wait_max_s=3, jitter=lambda: 1.0)
    assert servers.next() == (A, 0.0)
    servers.succeeded()
    assert attempts(servers, 2) == [("b", 0.0), ("a", 1.0)]


def test_another_server_is_one_that_is_not_known_to_be_out_of_reach() -> None:
    assert pool(A).has_other_than(A) is False
    assert pool(A).has_other_than(None) is pool(A).has_other_than(B) is True
    servers = pool(A, B)
    assert servers.has_other_than(A) is True
    attempts(servers, 2)
    assert servers.has_other_than(A) is servers.has_other_than(None) is False


def test_a_kind_of_failure_is_news_again_after_a_success() -> None:
    servers = pool(A)
    kinds = (OSError, OSError, ValueError)
    for _ in range(2):
        assert [(servers.next(), servers.failed(kind("away")))[1] for kind in kinds] == [
            (1, True),
            (2, True),
            (3, True),
        ]
        servers.next()
        servers.succeeded()


def test_where_a_server_listens_makes_it_what_it_is() -> None:
    assert Server("a", 1, tls_name="x") == Server("a", 1)
    assert Server("a", 1) != Server("a", 1, requires_tls=True)
    assert (Server("a", 1).has_name, Server("127.0.0.1", 1).has_name, Server("fe80::1%eth0", 1).has_name) == (
        True,
        False,
        False,
    )


def test_after_success_the_others_get_their_turn_first_and_at_once() -> None:
    servers = pool(A, B, C)
    attempts(servers, 4)
    assert servers.next() == (B, 0.0)
    servers.succeeded()
    servers.proven()
    assert attempts(servers, 4) == [("c", 0.0), ("a", 0.0), ("b", 0.0), ("c", 0.5)]


def test_a_server_is_given_up_after_so_many_failures() -> None:
    servers = pool(A, B, max_attempts=2)
    assert [host for host, _ in attempts(servers, 3)] == ["a", "b", "a"]
    assert servers.servers == [B]
    assert servers.next()[0] == B
    servers.succeeded()
    assert [host for host, _ in attempts(servers, 2)] == ["b", "b"]
    with pytest.raises(NoServersAvailable) as failure:
        servers.next()
    assert failure.value.failures == {"nats://a:4222": "refused", "nats://b:4222": "refused"}


def test_a_round_in_which_servers_are_given_up_has_no_extra_pause() -> None:
    servers = pool(A, B, C, max_attempts=2, jitter=lambda: 1.0)
    assert attempts(servers, 6) == [("a", 0.0), ("b", 0.0), ("c", 0.0), ("a", 1.0), ("b", 0.0), ("c", 0.0)]
    with pytest.raises(NoServersAvailable):
        servers.next()


def test_without_a_limit_no_server_is_given_up() -> None:
    servers = pool(A)
    attempts(servers, 1000)
    assert servers.servers == [A]


def test_the_error_names_what_each_server_said() -> None:
    servers = pool(A, B)
    servers.next()
    servers.failed(OSError("no route"))
    servers.next()
    servers.failed(TimeoutError())
    error = servers.exhausted()
    assert isinstance(error, NoServersAvailable)
    assert error.failures == {"nats://a:4222": "no route", "nats://b:4222": "TimeoutError"}


def test_the_error_is_about_credentials_only_when_every_server_refused_them() -> None:
    servers = pool(A, B)
    servers.next()
    servers.failed(refused(A))
    assert isinstance(servers.exhausted(), AuthenticationFailed)
    servers.next()
    servers.failed(OSError("refused"))
    assert isinstance(servers.exhausted(), NoServersAvailable)
    for server in (A, B):
        servers.next()
        servers.failed(refused(server))
    assert isinstance(servers.exhausted(), AuthenticationFailed)


def test_a_server_that_refuses_a_fixed_secret_twice_in_succession_is_not_shown_it_again() -> None:
    servers = pool(A, B)
    servers.secret_is_fixed = True
    dialled = []
    for error in (refused(A), OSError("away"), OSError("away"), refused(B), refused(A), refused(B)):
        dialled.append(servers.next()[0].host)
        servers.failed(error)
    assert dialled == ["a", "b"] * 3
    assert servers.servers == [A]
    servers.next()
    servers.failed(refused(A))
    with pytest.raises(AuthenticationFailed):
        servers.next()


def test_a_secret_that_can_change_is_shown_any_number_of_times() -> None:
    servers = pool(A)
    for _ in range(100):
        servers.next()
        servers.failed(refused(A))
    assert servers.servers == [A]


def test_a_server_that_refused_comes_back_when_another_has_been_of_use() -> None:
    servers = pool(A, B)
    servers.secret_is_fixed = True
    for error in (refused(A), OSError("away"), refused(A)):
        servers.next()
        servers.failed(error)
    assert servers.next()[0] == B
    servers.succeeded()
    assert servers.servers == [B]
    servers.discovered(["a:4222", "b:4222"], requires_tls=False)
    assert servers.servers == [B]
    for _ in range(2):
        servers.proven()
        assert servers.servers == [A, B]
    for _ in range(2):
        assert servers.next()[0] == A
        servers.failed(refused(A))
        servers.next()
        servers.failed(OSError("away"))
    assert servers.servers == [B]


def test_a_server_that_lets_us_in_and_then_refuses_us_has_refused_us() -> None:
    servers = pool(A)
    servers.secret_is_fixed = True
    for _ in range(2):
        servers.next()
        servers.succeeded()
        servers.refused_in_use(refused(A))
    with pytest.raises(AuthenticationFailed):
        servers.next()
    servers = pool(A)
    servers.secret_is_fixed = True
    for _ in range(10):
        servers.next()
        servers.succeeded()
        servers.proven()  # the secret was good for a while
        servers.refused_in_use(refused(A))
    assert servers.next()[0] == A


def test_a_refusal_before_a_session_counts_once() -> None:
    servers = pool(A)
    servers.secret_is_fixed = True
    servers.next()
    servers.refused_in_use(refused(A))  # there is no session yet: the attempt that fails is what counts
    servers.failed(refused(A))
    assert servers.next()[0] == A


def test_a_server_that_refused_is_not_dialled_again_because_the_cluster_announces_others() -> None:
    servers = pool(A)
    servers.secret_is_fixed = True
    for _ in range(2):
        servers.next()
        servers.succeeded()
        servers.refused_in_use(refused(A))
    servers.discovered(["a:4222", "b:4222"], requires_tls=False)
    assert servers.servers == [B]
    servers.proven()
    assert servers.servers == [A, B]


def test_failures_are_news_when_they_are_the_first_of_their_kind_or_twice_as_many() -> None:
    servers = pool(A)
    told = []
    for number in range(1, 70):
        servers.next()
        count, is_news = servers.failed(refused(A) if number in (3, 5) else OSError("away"))
        assert count == number
        if is_news:
            told.append(number)
    assert told == [1, 2, 3, 4, 8, 16, 32, 64]
    servers.next()
    servers.succeeded()
    servers.next()
    assert servers.failed(OSError("away")) == (1, True)


def test_announced_servers_join_at_the_end_once() -> None:
    servers = pool(A)
    assert servers.discovered(["a:4222", "b:4222", "[::1]:5"], requires_tls=True) == ("tls://b:4222", "tls://[::1]:5")
    assert servers.discovered(["b:4222", "[::1]:5"], requires_tls=True) == ()
    assert servers.servers == [A, Server("b", 4222, True), Server("::1", 5, True)]


def test_a_server_announced_twice_in_one_breath_joins_once() -> None:
    servers = pool(A)
    assert servers.discovered(["b:4222", "b:4222"], requires_tls=False) == ("nats://b:4222",)
    assert servers.servers == [A, B]


def test_a_new_server_makes_the_round_longer_though_others_that_were_tried_are_gone() -> None:
    servers = pool(A)
    servers.discovered(["b:4222", "c:4222"], requires_tls=False)
    assert attempts(servers, 2) == [("a", 0.0), ("b", 0.0)]
    servers.next()
    servers.succeeded()  # c, which ends the session before it was of use
    servers.discovered(["c:4222", "d:4222"], requires_tls=False)
    assert attempts(servers, 2) == [("a", 0.0), ("d", 0.5)]


def test_a_server_announced_during_an_attempt_does_not_disturb_it() -> None:
    servers = pool(A)
    servers.next()
    servers.discovered(["b:4222"], requires_tls=False)
    servers.succeeded()
    servers.proven()
    assert attempts(servers, 2) == [("b", 0.0), ("a", 0.0)]


def test_an_announcement_is_the_whole_list_so_servers_that_are_gone_are_forgotten() -> None:
    servers = pool(A)
    servers.next()
    servers.succeeded()
    servers.discovered(["a:4222", "b:4222", "c:4222"], requires_tls=False)
    assert servers.servers == [B, C, A]
    assert servers.discovered(["c:4222", "d:4222"], requires_tls=False) == ("nats://d:4222",)
    assert servers.servers == [C, Server("d", 4222), A]


def test_the_server_in_use_is_not_forgotten_before_it_is_left() -> None:
    servers = pool(A)
    servers.next()
    servers.succeeded()
    servers.discovered(["b:4222"], requires_tls=False)
    assert servers.next()[0] == B
    servers.discovered(["c:4222"], requires_tls=False)  # by B, during the attempt
    servers.succeeded()
    assert servers.servers == [A, C, B]
    servers.discovered(["c:4222"], requires_tls=False)
    assert servers.servers == [A, C, B]
    assert servers.next()[0] == A
    servers.succeeded()
    servers.discovered(["c:4222"], requires_tls=False)
    assert servers.servers == [C, A]


@pytest.mark.parametrize("urls", [[], ["http://nonsense"], [None, 5]])
def test_a_server_that_announces_nobody_says_nothing_about_the_others(urls: list[object]) -> None:
    servers = pool(A)
    servers.discovered(["b:4222"], requires_tls=False)
    assert servers.discovered(urls, requires_tls=False) == ()
    assert servers.servers == [A, B]


def test_the_number_of_announced_servers_is_bounded_however_often_they_change() -> None:
    servers = pool(A, max_attempts=1)
    for number in range(50):
        addresses = [f"10.{number}.{high}.{low}:4222" for high in range(4) for low in range(256)]
        assert len(servers.discovered(addresses, requires_tls=False)) == MAX_DISCOVERED_SERVERS
        assert len(servers.servers) <= 1 + MAX_DISCOVERED_SERVERS
        attempts(servers, 1 if number == 0 else 10)
    assert len(servers._given_up) <= 1 + 10
    servers.discovered(["b:4222"], requires_tls=False)
    assert servers.servers == [B]
    assert list(servers._given_up) == ["nats://a:4222"]


def test_an_address_is_looked_for_under_the_name_it_was_discovered_through() -> None:
    servers = pool(A)
    servers.discovered(["10.0.0.1:4222", "[fe80::1%25eth0]:4222", "b:4222"], requires_tls=True, tls_name="nats.example")
    assert [server.tls_name for server in servers.servers] == [None, "nats.example", "nats.example", None]
