"""A real nats-server through its whole life, seen by a client that is nothing but a socket."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jetspark.errors import EmbeddedServerError, UsageError
from jetspark.server import NatsServer, Permissions, ServerTLS, User
from jetspark.server.process import STOP_TIMEOUT_S

NKEY = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"


class RawClient:
    """The NATS protocol by hand, so that these tests depend on no client library."""

    def __init__(self, port: int, **connect: Any) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60.0)
        self._file = self._socket.makefile("rb")
        self.info = self.next_info()
        options = {"verbose": False, "headers": True, "no_responders": True, **connect}
        self.send(f"CONNECT {json.dumps(options)}\r\nPING\r\n")

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._socket.close()

    def send(self, text: str) -> None:
        self._socket.sendall(text.encode())

    def line(self) -> str:
        """The next line that is not the server's own PING, which may come at any time."""
        while (line := self._file.readline().decode().rstrip("\r\n")) == "PING":
            self.send("PONG\r\n")
        return line

    def next_info(self) -> dict[str, Any]:
        info: dict[str, Any] = json.loads(self.line().removeprefix("INFO "))
        return info

    def ping(self) -> list[str]:
        """Send PING and return what the server had to say before its PONG."""
        self.send("PING\r\n")
        said: list[str] = []
        while (line := self.line()) != "PONG":
            assert line, "the server closed the connection"
            said.append(line)
        return said

    def request(self, subject: str, payload: object = "") -> Any:
        body = payload if isinstance(payload, str) else json.dumps(payload)
        self.send(f"SUB answer 9\r\nUNSUB 9 1\r\nPUB {subject} answer {len(body.encode())}\r\n{body}\r\n")
        while not (line := self.line()).startswith("MSG answer"):
            assert line == "PONG", line
        answer = self._file.read(int(line.split()[-1]) + 2)
        return json.loads(answer)


def connected(server: NatsServer, **connect: Any) -> RawClient:
    client = RawClient(server.port, **connect)
    assert client.line() == "PONG"
    return client


def store_messages(server: NatsServer, count: int) -> None:
    with connected(server) as client:
        created = client.request("$JS.API.STREAM.CREATE.S", {"name": "S", "subjects": ["s"]})
        assert "error" not in created
        for number in range(1, count + 1):
            assert client.request("s", "x")["seq"] == number


def stored_messages(server: NatsServer) -> int:
    with connected(server) as client:
        messages = client.request("$JS.API.STREAM.INFO.S")["state"]["messages"]
        assert isinstance(messages, int)
        return messages


def eventually(claim: Callable[[], bool], within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while not claim():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def process_state(pid: int) -> str | None:
    """The kernel's letter for the process: S sleeps, T is stopped, Z is dead; ``None`` when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def thread_states(pid: int) -> set[str | None]:
    return {process_state(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()}


def process_exists(pid: int) -> bool:
    return process_state(pid) not in (None, "Z")


# Starting


def test_a_started_server_greets_stores_and_says_where_it_is(own: NatsServer) -> None:
    assert own.url == f"nats://127.0.0.1:{own.port}"
    assert own.is_running
    assert own.is_healthy()
    assert f"pid {own.pid}" in repr(own)
    with connected(own) as client:
        assert client.info["port"] == own.port
        assert client.info["jetstream"] is True
    store_messages(own, 3)
    assert stored_messages(own) == 3
    assert "Server is ready" in own.log()
    assert json.loads(own.monitor("/varz")[1])["port"] == own.port


async def test_the_event_loop_runs_on_while_a_server_starts_and_stops() -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)  # not a time, of which a quick stop on a busy machine has little
            turns += 1

    counting = asyncio.create_task(count())
    async with NatsServer() as server:
        was_running, turns_while_starting = server.is_running, turns
    counting.cancel()
    assert (was_running, server.is_running) == (True, False)
    # A blocking start or stop would leave room for one turn at most, before or after it.
    assert turns_while_starting > 3
    assert turns - turns_while_starting > 3


async def test_a_cancelled_start_leaves_no_process_behind() -> None:
    server = NatsServer()
    starting = asyncio.create_task(server.__aenter__())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not server.is_running


def test_two_servers_run_side_by_side() -> None:
    with NatsServer() as one, NatsServer() as two:
        assert one.port != two.port
        store_messages(one, 1)
        store_messages(two, 2)
        assert (stored_messages(one), stored_messages(two)) == (1, 2)


def test_starting_twice_is_starting_once(own: NatsServer) -> None:
    pid = own.pid
    assert own.start() is own
    assert own.pid == pid


def test_a_port_can_be_chosen() -> None:
    with NatsServer() as server:
        port = server.port
    with NatsServer(port=port) as again:
        assert again.port == port


def test_a_taken_port_is_refused_at_once_by_name(own: NatsServer) -> None:
    began = time.monotonic()
    with pytest.raises(EmbeddedServerError, match=f"port {own.port} is already in use") as failure:
        NatsServer(port=own.port, start_timeout_s=120).start()
    assert "address already in use" in failure.value.log
    assert time.monotonic() - began < 60.0


def test_the_log_of_a_broken_configuration_is_shown() -> None:
    with (
        pytest.raises(EmbeddedServerError, match="ended while starting, with exit code 1") as failure,
        NatsServer(extra_config="foo: bar {"),
    ):
        pass
    assert "Parse error on line" in failure.value.log


def test_a_server_that_never_gets_ready_is_ended_at_the_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mute = tmp_path / "mute"
    mute.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "nats-server: v2.15.0" && exit\nexec sleep 600\n')
    mute.chmod(0o755)
    monkeypatch.setenv("JETSPARK_NATS_SERVER", str(mute))
    server = NatsServer(start_timeout_s=0.5)
    with pytest.raises(EmbeddedServerError, match=r"not ready within 0\.5 s"):
        server.start()
    assert not process_exists(server.pid)
    server.close()


def test_facts_unknown_before_the_start_are_errors_that_say_so() -> None:
    server = NatsServer()
    for name in ("url", "port", "pid", "monitoring_url", "store_dir"):
        with pytest.raises(UsageError, match=r"not known before start\(\)"):
            getattr(server, name)
    with pytest.raises(UsageError, match=r"not running: call start\(\)"):
        server.pause()
    assert server.log() == ""
    server.stop()
    server.close()


# Stopping, killing, coming back


def test_acknowledged_messages_survive_kill_and_start_on_the_same_port(own: NatsServer) -> None:
    store_messages(own, 50)
    port, pid = own.port, own.pid
    own.kill()
    assert not own.is_running
    assert not process_exists(pid)
    own.start()
    assert own.port == port
    assert own.pid != pid
    assert stored_messages(own) == 50


def test_restart_keeps_port_and_store(own: NatsServer) -> None:
    store_messages(own, 5)
    port = own.port
    for _ in range(3):
        own.restart()
        assert own.port == port
    assert stored_messages(own) == 5
    assert own.log().count("Server is ready") == 4


def test_a_restart_waits_for_its_port_to_be_given_back(own: NatsServer) -> None:
    own.stop()
    squatter = socket.create_server(("127.0.0.1", own.port))
    giving_back = threading.Timer(0.5, squatter.close)
    giving_back.start()
    own.start()
    giving_back.join()
    with connected(own) as client:
        assert client.ping() == []


def test_a_temporary_store_is_removed_and_the_log_kept() -> None:
    with NatsServer() as server:
        store_messages(server, 1)
        folder = server.store_dir.parent
        assert (server.store_dir / "jetstream").is_dir()
    assert not folder.exists()
    assert "Server Exiting" in server.log()


def test_a_store_of_ones_own_survives_and_nothing_else_does(tmp_path: Path) -> None:
    with NatsServer(store_dir=tmp_path / "deep" / "store") as server:
        store_messages(server, 7)
        folder = server._folder
    assert folder is not None
    assert not folder.path.exists()
    with NatsServer(store_dir=tmp_path / "deep" / "store") as again:
        assert stored_messages(again) == 7


def test_two_servers_never_share_a_store(tmp_path: Path) -> None:
    with NatsServer(store_dir=tmp_path) as server:
        with (
            pytest.raises(EmbeddedServerError, match="is in use by another server"),
            NatsServer(store_dir=tmp_path),
        ):
            pass
        server.kill()
        with NatsServer(store_dir=tmp_path) as heir:
            assert heir.is_running


def test_a_server_that_died_by_itself_can_be_started_again(own: NatsServer) -> None:
    store_messages(own, 2)
    os.kill(own.pid, signal.SIGKILL)
    assert eventually(lambda: not own.is_running)
    own.start()
    assert stored_messages(own) == 2


def test_a_paused_server_is_silent_until_resumed(own: NatsServer) -> None:
    with connected(own) as client:
        for _ in range(2):  # the second one changes nothing
            own.pause()
            assert thread_states(own.pid) == {"T"}
        client._socket.settimeout(0.2)
        client.send("PING\r\n")
        with pytest.raises(TimeoutError):
            client._socket.recv(1)
        own.resume()
        client._socket.settimeout(10.0)
        assert client._socket.recv(6) == b"PONG\r\n"


def test_a_paused_server_still_stops(own: NatsServer) -> None:
    own.pause()
    began = time.monotonic()
    own.stop()
    assert time.monotonic() - began < STOP_TIMEOUT_S
    assert not process_exists(own.pid)


def test_lame_duck_mode_is_announced_and_ends_when_the_clients_are_gone() -> None:
    # 30 s is the shortest duration the server accepts; it ends at once when no client is left.
    settings = 'lame_duck_duration: "30s"\nlame_duck_grace_period: "100ms"'
    with NatsServer(extra_config=settings) as server:
        with connected(server, protocol=1) as client:
            client.next_info()  # The first one, sent to every client of protocol 1 that has connected.
            server.lame_duck()
            assert client.next_info()["ldm"] is True
        assert eventually(lambda: not server.is_running)
        server.start()
        assert server.is_healthy()


def test_reload_changes_a_running_server_and_closes_no_connection(own: NatsServer) -> None:
    with connected(own) as client:
        own.reload(max_payload_bytes=4321)
        assert own.config.max_payload_bytes == 4321
        with connected(own) as later:
            assert later.info["max_payload"] == 4321
        assert client.ping() == []


def test_a_refused_reload_changes_nothing(own: NatsServer) -> None:
    before = own.config
    with pytest.raises(EmbeddedServerError, match="did not reload") as failure:
        own.reload(extra_config="foo: bar {")
    assert "Failed to reload" in failure.value.log
    assert own.config == before
    own.reload(max_connections=100)
    with connected(own) as client:
        assert client.ping() == []


# Never outliving the program

CHILD = """
    import os, sys, time
    from jetspark.server import NatsServer
    server = NatsServer().start()
    print(server.pid, server.store_dir.parent, flush=True)
"""


@contextlib.contextmanager
def program(rest: str) -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
    """Another Python program with its own server: the program, the server's pid, its temporary folder."""
    code = textwrap.dedent(CHILD) + textwrap.dedent(rest)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            pid, folder = child.stdout.readline().split()
            yield child, int(pid), Path(folder)
        finally:
            child.kill()


def test_the_server_ends_when_the_program_is_killed() -> None:
    with program("time.sleep(600)") as (child, pid, folder):
        assert process_exists(pid)
        child.kill()
        assert eventually(lambda: not process_exists(pid))
        assert eventually(lambda: not folder.exists())


def test_the_server_ends_when_the_program_is_killed_though_a_forked_copy_lives_on() -> None:
    rest = """
        copy = os.fork()
        if copy == 0:
            os.close(1)
            time.sleep(600)
        print(copy, flush=True)
        time.sleep(600)
    """
    with program(rest) as (child, pid, folder):
        assert child.stdout is not None
        copy = int(child.stdout.readline())
        try:
            child.kill()
            assert eventually(lambda: not process_exists(pid))
            assert eventually(lambda: not folder.exists())
            assert process_exists(copy)
        finally:
            os.kill(copy, signal.SIGKILL)


@pytest.mark.parametrize("rest", ["", "raise SystemExit(3)", "os.execv('/bin/true', ['true'])"])
def test_the_server_ends_when_the_program_forgets_it(rest: str) -> None:
    with program(rest) as (child, pid, folder):
        child.wait(timeout=30.0)
        assert eventually(lambda: not process_exists(pid))
        assert eventually(lambda: not folder.exists())


def test_the_server_ends_when_its_watchdog_is_killed(own: NatsServer) -> None:
    assert own._run is not None
    own._run.child.watchdog.kill()
    assert eventually(lambda: not process_exists(own.pid))
    own.start()
    assert own.is_healthy()


def test_a_server_started_in_a_thread_outlives_the_thread() -> None:
    server = NatsServer()
    starter = threading.Thread(target=server.start)
    starter.start()
    starter.join()
    try:
        store_messages(server, 1)
    finally:
        server.close()


def _close_in_copy(server: NatsServer) -> None:
    server.close()
    try:
        server.restart()
    except UsageError:
        os._exit(42)


def test_a_forked_copy_of_the_program_cannot_end_the_server(own: NatsServer) -> None:
    copy = multiprocessing.get_context("fork").Process(target=_close_in_copy, args=(own,))
    copy.start()
    copy.join(30.0)
    assert copy.exitcode == 42
    assert own.store_dir.exists()
    with connected(own) as client:
        assert client.ping() == []


def test_ctrl_c_in_the_terminal_does_not_reach_the_server(own: NatsServer) -> None:
    assert os.getpgid(own.pid) != os.getpgid(0)


# Options, as the server understands them


def test_an_odd_password_lets_in_who_knows_it_and_nobody_else() -> None:
    password = "a\"b\\c$X\t\n{}#ü'"
    with NatsServer(users=[User(user="me", password=password)]) as server:
        with connected(server, user="me", **{"pass": password}) as client:
            assert client.ping() == []
        with RawClient(server.port, user="me", **{"pass": "wrong"}) as client:
            assert client.line() == "-ERR 'Authorization Violation'"


def test_a_token_is_asked_for() -> None:
    with NatsServer(token="s3cret") as server:
        with connected(server, auth_token="s3cret") as client:
            assert client.ping() == []
        with RawClient(server.port) as client:
            assert client.line() == "-ERR 'Authorization Violation'"


def test_an_nkey_user_is_given_a_nonce() -> None:
    with NatsServer(nkeys=[User(nkey=NKEY)]) as server, RawClient(server.port) as client:
        assert client.info["nonce"]


@pytest.mark.parametrize(
    ("permissions", "refused"),
    [
        (Permissions(), []),
        (Permissions(publish_allow=["a"]), ["b"]),
        (Permissions(publish_deny=["a"]), ["a"]),
        (Permissions(publish_allow=[]), ["a", "b"]),
        (Permissions(allow_responses=True), []),
        (Permissions(publish_allow=[], allow_responses=True), ["a", "b"]),
    ],
)
def test_permissions_mean_what_they_say(permissions: Permissions, refused: list[str]) -> None:
    user = User(user="u", password="p", permissions=permissions)
    with NatsServer(users=[user]) as server, connected(server, user="u", **{"pass": "p"}) as client:
        client.send("PUB a 0\r\n\r\nPUB b 0\r\n\r\n")
        assert client.ping() == [f"-ERR 'Permissions Violation for Publish to \"{each}\"'" for each in refused]


def test_durable_and_limits_reach_the_server() -> None:
    with NatsServer(
        durable=True,
        max_memory_bytes=1 << 20,
        max_file_bytes=2 << 20,
        max_payload_bytes=1000,
        max_connections=7,
        max_pending_bytes=5000,
        ping_interval_s=1.5,
        write_deadline_s=2.5,
    ) as server:
        said = json.loads(server.monitor("/varz")[1])
    storage = said["jetstream"]["config"]
    assert storage["sync_always"] is True
    assert (storage["max_memory"], storage["max_storage"]) == (1 << 20, 2 << 20)
    assert (said["max_payload"], said["max_connections"], said["max_pending"]) == (1000, 7, 5000)
    assert (said["ping_interval"], said["write_deadline"]) == (1_500_000_000, 2_500_000_000)


def test_the_default_flushes_every_two_minutes_and_can_be_set(own: NatsServer) -> None:
    config = json.loads(own.monitor("/varz")[1])["jetstream"]["config"]
    assert config["sync_interval"] == 120_000_000_000
    assert "sync_always" not in config
    with NatsServer(sync_interval_s=0.5) as other:
        config = json.loads(other.monitor("/varz")[1])["jetstream"]["config"]
        assert config["sync_interval"] == 500_000_000


def test_without_jetstream_nothing_answers_its_api() -> None:
    with NatsServer(jetstream=False) as server, connected(server) as client:
        assert "jetstream" not in client.info
        assert server.is_healthy()


class NKey:
    """A fresh Ed25519 key pair in NATS's spelling, with just enough of JWT to play operator, account and user."""

    def __init__(self, kind: str) -> None:
        self._private = pytest.importorskip(
            "cryptography.hazmat.primitives.asymmetric.ed25519"
        ).Ed25519PrivateKey.generate()
        raw = bytes(["ABCDEFGHIJKLMNOPQRSTUVWXYZ".index(kind) << 3]) + self._private.public_key().public_bytes_raw()
        checksum = binascii.crc_hqx(raw, 0).to_bytes(2, "little")
        self.public = base64.b32encode(raw + checksum).decode().rstrip("=")

    def sign(self, text: str) -> str:
        return _base64url(self._private.sign(text.encode()))

    def jwt(self, subject: str, claims: dict[str, Any]) -> str:
        header = {"typ": "JWT", "alg": "ed25519-nkey"}
        body = {"jti": "x", "iat": int(time.time()), "iss": self.public, "sub": subject, "nats": claims}
        text = ".".join(_base64url(json.dumps(part).encode()) for part in (header, body))
        return f"{text}.{self.sign(text)}"


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def test_an_operator_lets_in_the_users_its_accounts_signed() -> None:
    operator, system, account, user, stranger = (NKey(kind) for kind in "OAAUA")
    unlimited = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    storage = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
    claims = {"type": "account", "version": 2, "limits": {**unlimited, "wildcards": True}}
    with_storage = {**claims, "limits": {**unlimited, **storage, "wildcards": True}}
    operator_claims = {"type": "operator", "version": 2, "system_account": system.public}
    user_claims = {"type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1}
    with NatsServer(
        operator_jwt=operator.jwt(operator.public, operator_claims),
        system_account=system.public,
        resolver_preload={
            system.public: operator.jwt(system.public, claims),
            account.public: operator.jwt(account.public, with_storage),
        },
    ) as server:
        for signer, expected in ((account, "PONG"), (stranger, "-ERR 'Authorization Violation'")):
            with (
                socket.create_connection(("127.0.0.1", server.port), timeout=60.0) as plain,
                plain.makefile("rb") as file,
            ):
                nonce = json.loads(file.readline().removeprefix(b"INFO "))["nonce"]
                connect = {"verbose": False, "jwt": signer.jwt(user.public, user_claims), "sig": user.sign(nonce)}
                plain.sendall(f"CONNECT {json.dumps(connect)}\r\nPING\r\n".encode())
                assert file.readline().decode().rstrip() == expected


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost", "-days", "2"]
    try:
        subprocess.run([*command, *names, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return cert, key


@pytest.mark.parametrize("handshake_first", [False, True])
def test_tls_before_or_after_the_greeting(certificate: tuple[Path, Path], handshake_first: bool) -> None:
    cert, key = certificate
    context = ssl.create_default_context(cafile=str(cert))
    tls = ServerTLS(cert_file=cert, key_file=key, handshake_first=handshake_first)
    with NatsServer(tls=tls) as server:
        assert server.url == f"tls://127.0.0.1:{server.port}"
        with socket.create_connection(("127.0.0.1", server.port), timeout=60.0) as plain:
            if not handshake_first:
                assert json.loads(plain.recv(65536).removeprefix(b"INFO "))["tls_required"] is True
            with context.wrap_socket(plain, server_hostname="127.0.0.1") as secure:
                if handshake_first:
                    assert secure.recv(5) == b"INFO "
                secure.sendall(b'CONNECT {"verbose":false}\r\nPING\r\n')
                received = b""
                while b"PONG\r\n" not in received:
                    received += secure.recv(65536)


def test_a_server_on_all_addresses_is_reached_on_this_machine() -> None:
    with NatsServer(host="0.0.0.0") as server:
        assert server.url == f"nats://127.0.0.1:{server.port}"
        with connected(server) as client:
            assert client.ping() == []


def test_a_binary_of_any_name_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from jetspark.server import find_nats_server

    renamed = tmp_path / "my nats"
    renamed.symlink_to(find_nats_server().path)
    monkeypatch.setenv("JETSPARK_NATS_SERVER", str(renamed))
    with NatsServer() as server:
        assert server.is_healthy()
