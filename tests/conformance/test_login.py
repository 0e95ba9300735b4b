"""Every way to be let in, on a real server: addresses, secrets, TLS."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from support.certificates import Certificates
from support.credentials import STRANGER, USER, credentials_text, operator_config
from support.drivers import Driver, Recorder, on_both_drivers, until
from support.patience import PATIENCE_S
from support.peers import INFO, Proxy, behave, greet, scripted_server, stay_silent

import jetspark
from jetspark.core.auth import public_key
from jetspark.server import NatsCluster, NatsServer, ServerTLS, User


@pytest.fixture
def url(core_server: NatsServer) -> str:
    """Without a user: who connects, and how, is what these tests are about."""
    return core_server.url


async def _works(driver: Driver, url: str, **options: Any) -> None:
    async with driver.connect(url, **options) as nc:
        subscription = await nc.subscribe("hello")
        await nc.publish("hello", b"world")
        assert (await subscription.next(30)).data == b"world"


@on_both_drivers
async def test_connect_can_be_awaited_or_entered(driver: Driver, url: str) -> None:
    nc = await driver.connect(url)
    assert nc.is_connected
    assert nc.server == url
    assert nc.server_info.version.startswith("2.")
    await nc.close()
    assert nc.is_closed


@on_both_drivers
async def test_an_address_may_come_without_its_scheme(driver: Driver, url: str) -> None:
    await _works(driver, url.removeprefix("nats://"))


@on_both_drivers
async def test_the_first_server_that_answers_is_used(driver: Driver, url: str) -> None:
    dead = f"nats://127.0.0.1:{_unused_port()}"
    async with driver.connect([dead, url]) as nc:
        assert nc.server == url
        assert nc.servers == [dead, url]


@on_both_drivers
async def test_without_any_server_each_failure_is_named_once(driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    ports = [_unused_port(), _unused_port()]
    with pytest.raises(jetspark.NoServersAvailable) as failure:
        await driver.connect(",".join(f"nats://127.0.0.1:{port}" for port in ports))
    assert set(failure.value.failures) == {f"nats://127.0.0.1:{port}" for port in ports}
    assert all("refused" in reason for reason in failure.value.failures.values())
    assert caplog.messages == []  # by the exception; a log would say it again


@on_both_drivers
async def test_a_host_that_does_not_exist_is_named(driver: Driver) -> None:
    with pytest.raises(jetspark.NoServersAvailable, match=r"nats://no-such-host\.invalid:4222"):
        await driver.connect("nats://no-such-host.invalid")


@on_both_drivers
@pytest.mark.parametrize("address", ["http://127.0.0.1:4222", "ws://127.0.0.1", "nats://", "nats://host:port", ""])
async def test_an_address_that_makes_no_sense_is_refused_before_anything_is_sent(driver: Driver, address: str) -> None:
    with pytest.raises(jetspark.ConfigError, match=r"expected|Port"):
        await driver.connect(address)


@on_both_drivers
async def test_an_unknown_option_is_an_error_that_lists_the_known_ones(driver: Driver, url: str) -> None:
    with pytest.raises(jetspark.ConfigError, match=r"unknown connect option reconect: expected one of .*reconnect"):
        await driver.connect(url, reconect=False)  # type: ignore[call-arg]


@on_both_drivers
async def test_a_server_that_says_nothing_is_given_up_in_time(driver: Driver) -> None:
    async with scripted_server(stay_silent) as url:
        with pytest.raises(jetspark.NoServersAvailable, match=r"the server's greeting: no answer within 0\.1 s"):
            await driver.connect(url, connect_timeout_s=0.1)


@on_both_drivers
async def test_a_server_that_never_confirms_the_login_is_given_up_in_time(driver: Driver) -> None:
    async def greet_only(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(INFO)
        await reader.read()

    async with scripted_server(greet_only) as url:
        with pytest.raises(jetspark.NoServersAvailable, match=r"answer to our login: no answer within 0\.1 s"):
            await driver.connect(url, connect_timeout_s=0.1)


@on_both_drivers
@pytest.mark.parametrize(
    ("greeting", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", r"HTTP.*b'HTTP/1\.1 400 Bad Request'.*4222"),
        (b"\x15\x03\x01\x00\x02\x02F", r"TLS.*b'\\x15\\x03.*handshake_first=True"),
        (b"SSH-2.0-x\r\n", r"b'SSH-2\.0-x'.*4222"),
        (b"+OK POP3 ready\r\n", r"b'\+OK POP3 ready'.*4222"),
        (b"INFO nonsense\r\n", r"b'INFO nonsense'.*4222"),
        (b"\0" * 50, r"b'\\x00.*4222"),
    ],
)
async def test_a_peer_that_is_not_nats_is_recognised(driver: Driver, greeting: bytes, said: str) -> None:
    async def talk_nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await reader.read()

    async with scripted_server(talk_nonsense) as url:
        with pytest.raises(jetspark.NoServersAvailable, match=rf"not a NATS server: .*{said}"):
            await driver.connect(url)


@on_both_drivers
async def test_the_monitoring_port_is_thought_of_when_a_peer_stays_silent(
    driver: Driver, core_server: NatsServer
) -> None:
    url = core_server.monitoring_url.replace("http://", "nats://")
    with pytest.raises(jetspark.NoServersAvailable, match=r"a NATS server greets first.*monitoring port.*4222"):
        await driver.connect(url, connect_timeout_s=0.3)
    with pytest.raises(jetspark.ConfigError, match=r"'http'.*nats://.*4222"):
        await driver.connect(core_server.monitoring_url)


@pytest.mark.parametrize("driver", ["asyncio", "uvloop"], indirect=True)  # a thread that dials cannot be cancelled
@on_both_drivers
async def test_cancelling_a_connect_leaves_nothing_behind(driver: Driver) -> None:
    async with scripted_server(stay_silent) as url:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(_awaited(driver.connect(url)), 0.1)


async def _awaited(connecting: object) -> object:
    return await connecting  # type: ignore[misc]


# ---- secrets ----------------------------------------------------------------------------------------------------


@on_both_drivers
async def test_user_and_password(driver: Driver) -> None:
    with NatsServer(jetstream=False, users=[User(user="ada", password="p@ss w/rd")]) as server:
        await _works(driver, server.url, auth=jetspark.UserPassword("ada", "p@ss w/rd"))
        await _works(driver, server.url.replace("//", "//ada:p%40ss%20w%2Frd@"))
        with pytest.raises(jetspark.AuthenticationFailed, match="Authorization Violation") as refused:
            await driver.connect(server.url, auth=jetspark.UserPassword("ada", "wrong"))
        assert "wrong" not in str(refused.value)
        with pytest.raises(jetspark.AuthenticationFailed):
            await driver.connect(server.url)


@on_both_drivers
async def test_token(driver: Driver) -> None:
    with NatsServer(jetstream=False, token="s3cret") as server:
        await _works(driver, server.url, auth=jetspark.Token("s3cret"))
        await _works(driver, server.url.replace("//", "//s3cret@"))
        with pytest.raises(jetspark.AuthenticationFailed):
            await driver.connect(server.url, auth=jetspark.Token("wrong"))


@on_both_drivers
async def test_nkey(driver: Driver) -> None:
    with NatsServer(jetstream=False, nkeys=[User(nkey=public_key(USER))]) as server:
        await _works(driver, server.url, auth=jetspark.NKey(USER))
        with pytest.raises(jetspark.AuthenticationFailed):
            await driver.connect(server.url, auth=jetspark.NKey(STRANGER))


@on_both_drivers
async def test_credentials_file_is_read_anew_each_time(driver: Driver, tmp_path: Path) -> None:
    path = tmp_path / "app.creds"
    with NatsServer(operator_config()) as server:
        auth = jetspark.Credentials(path)
        with pytest.raises(jetspark.ConfigError, match=r"app\.creds"):
            await driver.connect(server.url, auth=auth)
        path.write_text(credentials_text(USER))
        await _works(driver, server.url, auth=auth)
        path.write_text(credentials_text(STRANGER))
        with pytest.raises(jetspark.AuthenticationFailed):
            await driver.connect(server.url, auth=auth)
        path.write_text(credentials_text(STRANGER, jwt_subject=STRANGER))
        await _works(driver, server.url, auth=auth)


@on_both_drivers
async def test_a_function_gives_the_secret_of_the_day(driver: Driver) -> None:
    with NatsServer(jetstream=False, token="monday") as server:
        today = "monday"
        events = Recorder()
        async with driver.connect(server.url, auth=lambda: jetspark.Token(today), on_event=events) as nc:
            subscription = await nc.subscribe("days")
            server.kill()
            await events.wait_for(jetspark.Disconnected)
            with NatsServer(jetstream=False, token="tuesday", port=server.port):
                # The old secret is refused again and again, and the function is asked again and again.
                today = "tuesday"
                await events.wait_for(jetspark.Reconnected)
                await nc.publish("days", b"tuesday")
                assert (await subscription.next(30)).data == b"tuesday"
                await nc.flush()


@pytest.mark.parametrize("driver", ["asyncio", "uvloop"], indirect=True)  # blocking has no loop to run it in
@on_both_drivers
async def test_an_async_function_may_give_the_secret(driver: Driver) -> None:
    async def secret() -> jetspark.Auth:
        await asyncio.sleep(0)
        return jetspark.Token("s3cret")

    with NatsServer(jetstream=False, token="s3cret") as server:
        await _works(driver, server.url, auth=secret)


@on_both_drivers
async def test_a_function_that_fails_or_returns_nonsense_is_named(driver: Driver, url: str) -> None:
    def broken() -> jetspark.Auth:
        raise LookupError("vault is sealed")

    with pytest.raises(jetspark.ConfigError, match="vault is sealed"):
        await driver.connect(url, auth=broken)
    with pytest.raises(jetspark.ConfigError, match="returned str: expected UserPassword"):
        await driver.connect(url, auth=lambda: "password")  # type: ignore[arg-type,return-value]


@on_both_drivers
async def test_a_fixed_secret_that_is_no_longer_good_ends_the_connection(driver: Driver) -> None:
    with NatsServer(jetstream=False, token="monday") as server:
        events = Recorder()
        auth = jetspark.Token("monday")
        nc = await driver.connect(server.url, auth=auth, on_event=events, reconnect_wait_s=0.01)
        subscription = await nc.subscribe("days")
        server.kill()
        with NatsServer(jetstream=False, token="tuesday", port=server.port):
            closed = await events.wait_for(jetspark.Closed)
            assert isinstance(closed.error, jetspark.AuthenticationFailed)
            with pytest.raises(jetspark.AuthenticationFailed):
                await subscription.next(30)
            with pytest.raises(jetspark.ConnectionClosed, match="refused the credentials"):
                await nc.publish("days")


@on_both_drivers
async def test_credentials_from_text_that_are_no_longer_good_end_the_connection(driver: Driver) -> None:
    with NatsServer(operator_config()) as server:
        events = Recorder()
        auth = jetspark.Credentials(text=credentials_text(USER))
        nc = await driver.connect(server.url, auth=auth, on_event=events, reconnect_wait_s=0.01)
        await asyncio.to_thread(server.kill)
        with NatsServer(jetstream=False, nkeys=[User(nkey=public_key(STRANGER))], port=server.port):
            closed = await events.wait_for(jetspark.Closed)
            assert isinstance(closed.error, jetspark.AuthenticationFailed)
            told = events.of(jetspark.ReconnectFailed)
            assert {failed.server for failed in told} == {server.url}
            assert any(isinstance(failed.error, jetspark.AuthenticationFailed) for failed in told)
            with pytest.raises(jetspark.ConnectionClosed, match="refused the credentials"):
                await nc.publish("days")


@on_both_drivers
async def test_failed_attempts_to_reconnect_are_told(driver: Driver) -> None:
    """Of a secret that can change: it is tried for ever, and nobody is left in the dark."""
    with NatsServer(jetstream=False, token="monday") as server:
        events = Recorder()
        options: dict[str, Any] = {"on_event": events, "reconnect_wait_s": 0.01, "reconnect_wait_max_s": 0.02}
        nc = await driver.connect(server.url, auth=lambda: jetspark.Token("monday"), **options)
        await asyncio.to_thread(server.kill)
        with NatsServer(jetstream=False, token="tuesday", port=server.port):
            await until(
                lambda: any(
                    isinstance(failed.error, jetspark.AuthenticationFailed)
                    for failed in events.of(jetspark.ReconnectFailed)
                )
            )
            assert not nc.is_closed
            await nc.close(timeout=0)


@on_both_drivers
async def test_a_function_that_hangs_ends_its_attempt_and_is_asked_again(driver: Driver) -> None:
    calls = 0
    release = threading.Event()

    def hang_at_first() -> jetspark.Auth:
        nonlocal calls
        calls += 1
        if calls == 2:
            release.wait(PATIENCE_S)
        return jetspark.Token("s3cret")

    async def hang_asynchronously() -> jetspark.Auth:
        nonlocal calls
        calls += 1
        if calls == 2:
            await asyncio.sleep(60)
        return jetspark.Token("s3cret")

    async with scripted_server(behave, behave) as url:
        events = Recorder()
        options: dict[str, Any] = {"on_event": events, "reconnect_wait_s": 0.01, "connect_timeout_s": 1.0}
        auth = hang_at_first if driver.name == "blocking" else hang_asynchronously
        async with Proxy(int(url.rpartition(":")[2])) as proxy, driver.connect(proxy.url, auth=auth, **options) as nc:
            proxy.cut()
            failed = await events.wait_for(jetspark.ReconnectFailed)
            assert "the function that gives the credentials: no answer within 1 s" in str(failed.error)
            release.set()
            await events.wait_for(jetspark.Reconnected)
            await nc.flush()
            assert calls in (2, 3)


# ---- TLS --------------------------------------------------------------------------------------------------------


@on_both_drivers
async def test_tls_after_the_greeting(driver: Driver, certificates: Certificates) -> None:
    tls = ServerTLS(cert_file=certificates.server_cert, key_file=certificates.server_key)
    with NatsServer(jetstream=False, tls=tls) as server:
        trusting = jetspark.TLSConfig(ca_file=certificates.ca_file)
        await _works(driver, server.url, tls=trusting)
        await _works(driver, server.url.replace("tls://", "nats://"), tls=trusting)
        await _works(driver, server.url.replace("127.0.0.1", "localhost"), tls=trusting)


@on_both_drivers
async def test_tls_carries_many_large_messages_both_ways(driver: Driver, certificates: Certificates) -> None:
    tls = ServerTLS(cert_file=certificates.server_cert, key_file=certificates.server_key)
    with NatsServer(jetstream=False, tls=tls) as server:
        async with driver.connect(server.url, tls=jetspark.TLSConfig(ca_file=certificates.ca_file)) as nc:
            subscription = await nc.subscribe("bulk")
            payload = bytes(range(256)) * 512
            for number in range(100):
                await nc.publish("bulk", b"%d:" % number + payload)
            for number in range(100):
                assert (await subscription.next(30)).data == b"%d:" % number + payload


@on_both_drivers
async def test_tls_from_the_first_byte(driver: Driver, certificates: Certificates) -> None:
    tls = ServerTLS(cert_file=certificates.server_cert, key_file=certificates.server_key, handshake_first=True)
    with NatsServer(jetstream=False, tls=tls) as server:
        await _works(driver, server.url, tls=jetspark.TLSConfig(ca_file=certificates.ca_file, handshake_first=True))


@on_both_drivers
async def test_a_certificate_nobody_vouches_for_is_refused(driver: Driver, certificates: Certificates) -> None:
    tls = ServerTLS(cert_file=certificates.server_cert, key_file=certificates.server_key)
    with NatsServer(jetstream=False, tls=tls) as server:
        for trusting in (None, jetspark.TLSConfig(ca_file=certificates.other_ca_file)):
            with pytest.raises(jetspark.NoServersAvailable, match=r"TLS handshake|certificate"):
                await driver.connect(server.url, tls=trusting)
        wrong_name = jetspark.TLSConfig(ca_file=certificates.ca_file, hostname="nats.example.org")
        with pytest.raises(jetspark.NoServersAvailable, match=r"nats\.example\.org"):
            await driver.connect(server.url, tls=wrong_name)


@on_both_drivers
async def test_a_certificate_of_our_own(driver: Driver, certificates: Certificates) -> None:
    tls = ServerTLS(
        cert_file=certificates.server_cert,
        key_file=certificates.server_key,
        ca_file=certificates.ca_file,
        verify=True,
    )
    with NatsServer(jetstream=False, tls=tls) as server:
        with_certificate = jetspark.TLSConfig(
            ca_file=certificates.ca_file, cert_file=certificates.client_cert, key_file=certificates.client_key
        )
        await _works(driver, server.url, tls=with_certificate)
        without = jetspark.TLSConfig(ca_file=certificates.ca_file)
        with pytest.raises(jetspark.NoServersAvailable, match=r"requires a certificate of ours: pass tls=") as missing:
            await driver.connect(server.url, tls=without)
        assert "_ssl.c" not in str(missing.value)


@on_both_drivers
async def test_who_speaks_first_is_told_when_both_wait_or_both_speak(
    driver: Driver, certificates: Certificates, url: str
) -> None:
    after = jetspark.TLSConfig(ca_file=certificates.ca_file)
    first = jetspark.TLSConfig(ca_file=certificates.ca_file, handshake_first=True)
    tls = ServerTLS(cert_file=certificates.server_cert, key_file=certificates.server_key, handshake_first=True)
    with NatsServer(jetstream=False, tls=tls) as server:
        for config in (after, None):
            with pytest.raises(jetspark.NoServersAvailable, match=r"TLSConfig\(handshake_first=True\)"):
                await driver.connect(server.url, tls=config, connect_timeout_s=0.8)
    tls = ServerTLS(cert_file=certificates.server_cert, key_file=certificates.server_key)
    with NatsServer(jetstream=False, tls=tls) as server:
        for address in (server.url, url):
            with pytest.raises(jetspark.NoServersAvailable, match="leave out handshake_first=True") as failure:
                await driver.connect(address, tls=first)
            assert "_ssl.c" not in str(failure.value)


@on_both_drivers
async def test_discovered_servers_are_known_by_the_name_first_dialled(
    driver: Driver, certificates: Certificates
) -> None:
    tls = ServerTLS(cert_file=certificates.named_cert, key_file=certificates.named_key)
    with NatsCluster(2, jetstream=False, tls=tls) as cluster:
        first, second = cluster.nodes
        events = Recorder()
        trusting = jetspark.TLSConfig(ca_file=certificates.ca_file)
        address = f"tls://localhost:{first.port}"
        async with driver.connect(address, tls=trusting, on_event=events, reconnect_wait_s=0.01) as nc:
            # With the first INFO, or with one a little later: the nodes tell each other when they have met.
            await until(lambda: f"tls://127.0.0.1:{second.port}" in nc.servers)
            await asyncio.to_thread(first.kill)
            again = await events.wait_for(jetspark.Reconnected)
            assert again.server == f"tls://127.0.0.1:{second.port}"
            await nc.flush()


@on_both_drivers
async def test_wanting_tls_never_falls_back_to_plain_text(driver: Driver, url: str) -> None:
    for address, tls in ((url.replace("nats://", "tls://"), None), (url, jetspark.TLSConfig())):
        with pytest.raises(jetspark.NoServersAvailable, match="does not offer TLS"):
            await driver.connect(address, tls=tls)


@on_both_drivers
@pytest.mark.parametrize("pieces", ["one write", "two writes"])
async def test_a_peer_without_a_certificate_is_believed_nothing(
    driver: Driver, certificates: Certificates, pieces: str
) -> None:
    """It takes the server's place, speaks first and in plain text, and cannot do TLS."""
    heard = bytearray()
    connections = 0

    async def forge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        greeting = b'INFO {"tls_required":true,"max_payload":1,"connect_urls":["127.0.0.1:1"]}\r\n'
        # 1 is the sid of the subscription and 3 that of the inbox, whose name the peer may have seen before.
        forged = b"MSG orders.paid 1 6\r\nFORGED\r\nMSG %b.1 3 6\r\nFORGED\r\nPONG\r\n" % nc_inbox.encode()
        writer.write(greeting if pieces == "two writes" else greeting + forged)
        if pieces == "two writes":
            await writer.drain()
            await asyncio.sleep(0.02)
            writer.write(forged)
        while data := await reader.read(4096):
            heard.extend(data)

    tls = ServerTLS(cert_file=certificates.server_cert, key_file=certificates.server_key)
    with NatsServer(jetstream=False, tls=tls, token="s3cret") as server:
        events = Recorder()
        trust, secret = jetspark.TLSConfig(ca_file=certificates.ca_file), jetspark.Token("s3cret")
        options: dict[str, Any] = {"on_event": events, "reconnect_wait_s": 0.01}
        async with driver.connect(server.url, tls=trust, auth=secret, **options) as nc:
            nc_inbox = nc._machine.names.inbox
            paid = await nc.subscribe("orders.paid")
            service = await nc.subscribe("price")
            await service.unsubscribe(1)
            await nc.flush()
            asking = asyncio.ensure_future(nc.request("price", timeout=60))
            await until(lambda: service.received == 1)
            await asyncio.to_thread(server.kill)
            await events.wait_for(jetspark.Disconnected)
            async with scripted_server(forge, port=server.port):
                await until(lambda: connections >= 3)
            assert paid.received == 0
            assert not asking.done()
            assert b"CONNECT" not in heard
            assert b"s3cret" not in heard
            assert nc.servers == [server.url]
            assert nc.max_payload_bytes > 1
            await asyncio.to_thread(server.start)
            await events.wait_for(jetspark.Reconnected)
            await nc.publish("orders.paid", b"genuine")
            assert (await paid.next(30)).data == b"genuine"
            await nc.publish(f"{nc_inbox}.1", b"genuine")
            assert (await asking).data == b"genuine"


@on_both_drivers
async def test_secrets_in_an_address_never_show_up_in_errors(driver: Driver) -> None:
    port = _unused_port()
    for address in (f"nats://ada:hunter2@127.0.0.1:{port}", "ftp://ada:hunter2@127.0.0.1"):
        with pytest.raises(jetspark.JetSparkError) as failure:
            await driver.connect(address)
        assert "hunter2" not in str(failure.value)


@on_both_drivers
async def test_the_same_handshake_works_with_a_scripted_server(driver: Driver) -> None:
    async with scripted_server(behave) as url, driver.connect(url) as nc:
        await nc.publish("anything")
        await nc.flush()


@on_both_drivers
async def test_a_peer_that_sends_garbage_later_is_dropped_and_dialled_again(driver: Driver) -> None:
    async def turn_bad(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await greet(reader, writer)
        await reader.readline()
        writer.write(b"GARBAGE\r\n")
        await reader.read()

    async with scripted_server(turn_bad, behave) as url:
        events = Recorder()
        async with driver.connect(url, on_event=events) as nc:
            await nc.subscribe("anything")
            lost = await events.wait_for(jetspark.Disconnected)
            assert "unknown operation: b'GARBAGE'" in lost.reason
            await events.wait_for(jetspark.Reconnected)
            await nc.flush()


def _unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
