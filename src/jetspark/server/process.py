"""One real nats-server as a Python object: started when it is ready, ended when we are."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import http.client
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, Unpack

from jetspark.errors import ConfigError, EmbeddedServerError, UsageError
from jetspark.server.binary import find_nats_server
from jetspark.server.config import ServerConfig, ServerOptions, render_config, with_options
from jetspark.server.watchdog import STORE_LOCKED

__all__ = ["NatsServer"]

_T = TypeVar("_T")

# A server with little to do stops in some 10 ms; flushing large streams may take seconds.
STOP_TIMEOUT_S = 15.0

# How long the watchdog may take to pass a signal on: it does nothing else, but the machine may be busy.
SIGNAL_TIMEOUT_S = 10.0

RELOAD_TIMEOUT_S = 10.0

MONITOR_TIMEOUT_S = 3.0

POLL_S = 0.005
LOG_TAIL_BYTES = 64 * 1024
LOG_TAIL_LINES = 30


class NatsServer:
    """A nats-server that belongs to this program.

    It listens on a free port of 127.0.0.1 and keeps its streams in a temporary folder unless told otherwise::

        with NatsServer() as server:            # or: async with NatsServer() as server
            print(server.url)                   # nats://127.0.0.1:40123

    Guarantees:

    * ``start()`` returns when clients can connect and, outside a cluster, when every stream is recovered.
    * The server ends with this program, however that ends: normally, by an exception, or by SIGKILL.
    * Port and store stay the same over ``stop()``, ``kill()`` and ``start()``. A temporary store is removed
      by ``close()``, which leaving the ``with`` block and the end of the program call.

    Every method blocks for some milliseconds (``start`` for about a hundred); only ``async with`` leaves the
    event loop running. Use ``await asyncio.to_thread(server.restart)`` for the others where that matters.

    Args:
        config: What the server is told; the defaults when absent.
        port: The client port; ``None`` or 0 takes a free one.
        store_dir: Where streams live and survive. Two servers never share one: the second refuses to start.
        start_timeout_s: Longest time to become ready.
        options: Fields of ``ServerConfig``, in place of those in ``config``.
    """

    def __init__(
        self,
        config: ServerConfig | None = None,
        *,
        port: int | None = None,
        store_dir: Path | str | None = None,
        start_timeout_s: float = 30.0,
        **options: Unpack[ServerOptions],
    ) -> None:
        self._config = with_options(config, options)
        if port is not None and not 0 <= port <= 65535:
            raise ConfigError(f"port={port!r}: expected 0 to 65535, or None for a free one")
        if not start_timeout_s > 0:
            raise ConfigError(f"start_timeout_s={start_timeout_s!r}: expected more than 0")
        self._port: int | None = port or None
        self._own_store_dir = None if store_dir is None else Path(store_dir).absolute()
        self._start_timeout_s = start_timeout_s
        # What the configuration file says, which a reload must repeat: the server refuses any other port,
        # even the one it chose itself.
        self._launch_port: int | None = None
        self._monitoring_port: int | None = None
        self._cluster_port: int | None = None
        self._folder: Path | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._pid: int | None = None
        self._owner_pid = os.getpid()
        self._was_ready = False
        self._run_log_offset = 0
        self._closed_log = ""
        # Two threads may both decide to stop a server; the second must find it stopped, not half stopped.
        self._lock = threading.RLock()

    # What it is

    @property
    def config(self) -> ServerConfig:
        return self._config

    @property
    def url(self) -> str:
        """Where clients connect: ``nats://host:port``, or ``tls://`` with TLS."""
        scheme = "nats" if self._config.tls is None else "tls"
        host = self._reachable_host()
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def port(self) -> int:
        """The client port; it does not change once the server has started for the first time."""
        return _known(self._port, "port")

    @property
    def monitoring_url(self) -> str:
        """Root of the HTTP monitoring pages (``/varz``, ``/jsz``, ``/healthz``); new at each start."""
        return f"http://127.0.0.1:{_known(self._monitoring_port, 'monitoring_url')}"

    @property
    def cluster_port(self) -> int:
        """Where other nodes of the cluster reach this one."""
        return _known(self._cluster_port, "cluster_port")

    @property
    def pid(self) -> int:
        """Process id of nats-server itself; new at each start."""
        return _known(self._pid, "pid")

    @property
    def is_running(self) -> bool:
        return self._watchdog is not None and self._watchdog.poll() is None

    @property
    def store_dir(self) -> Path:
        """Folder of the streams. A temporary one exists from the first ``start()`` to ``close()``."""
        if self._own_store_dir is not None:
            return self._own_store_dir
        return _known(self._folder, "store_dir") / "store"

    def log(self) -> str:
        """Return what the server has said since its first start: the last 64 KiB of it."""
        return self._read_log(0) if self._folder is not None else self._closed_log

    def is_healthy(self) -> bool:
        """Whether the server says so itself: JetStream is up and, in a cluster, has caught up with its leader."""
        if not self.is_running or self._monitoring_port is None:
            return False
        try:
            return self.monitor("/healthz")[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def monitor(self, page: str) -> tuple[int, bytes]:
        """Fetch a monitoring page such as ``/jsz?streams=true``: its HTTP status and body."""
        # Not urllib: that would send a question to 127.0.0.1 through the proxy named in HTTP_PROXY.
        connection = http.client.HTTPConnection(
            "127.0.0.1", _known(self._monitoring_port, "monitoring_url"), timeout=MONITOR_TIMEOUT_S
        )
        with contextlib.closing(connection):
            connection.request("GET", page)
            answer = connection.getresponse()
            return answer.status, answer.read()

    # Its life

    def start(self) -> Self:
        """Start the server and wait until clients can connect; does nothing when it already runs.

        Raises:
            EmbeddedServerError: It did not become ready; ``log`` has its last words.
        """
        with self._lock:
            self._check_owner()
            if self.is_running:
                return self
            binary = find_nats_server()
            self._check_store()
            self._reap()
            self._make_folder()
            deadline = time.monotonic() + self._start_timeout_s
            while True:
                try:
                    self._launch(str(binary.path))
                    self._await_ready(deadline)
                    self._was_ready = True
                    return self
                except BaseException as failure:
                    self._end_now()
                    # A port that was ours a moment ago may be some client's for a moment: on loopback,
                    # connecting to a free local port can succeed by connecting to itself, and clients that
                    # reconnect do try it.
                    is_taken = isinstance(failure, EmbeddedServerError) and "already in use" in failure.log
                    if not (self._was_ready and is_taken and time.monotonic() < deadline):
                        raise
                    time.sleep(0.05)

    def stop(self) -> None:
        """End the server in order, by SIGTERM, and after 15 s by SIGKILL. Port and store are kept for ``start()``."""
        if not self._is_owner():
            return
        with self._lock:
            if self._watchdog is None:
                return
            self._signal(signal.SIGTERM)
            self._signal(signal.SIGCONT)  # A paused server acts on SIGTERM only once it goes on.
            try:
                self._watchdog.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                pass  # _end_now kills.
            self._end_now()

    def kill(self) -> None:
        """End the server by SIGKILL, as a crash of its process would. Port and store are kept for ``start()``."""
        with self._lock:
            self._check_owner()
            self._signal(signal.SIGKILL)
            self._end_now()

    def restart(self) -> Self:
        """Stop in order, then start on the same port and store."""
        with self._lock:
            self.stop()
            return self.start()

    def close(self) -> None:
        """Stop and remove everything temporary. The last 64 KiB of the log stay readable."""
        # In a forked copy of the program this object still exists, but the server is the original's, and the
        # lock may be held forever by a thread that was not copied.
        if not self._is_owner():
            return
        with self._lock:
            self.stop()
            atexit.unregister(self.close)
            if self._folder is not None:
                self._closed_log = self.log()
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder = None

    def pause(self) -> None:
        """Freeze the process (SIGSTOP): connections stay open, nothing answers. Undone by ``resume()``."""
        self._signal_running(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal_running(signal.SIGCONT)

    def lame_duck(self) -> None:
        """Enter lame duck mode: the server tells clients to leave, evicts them over two minutes, then ends.

        Clients see ``ldm: true`` in an INFO at once. ``lame_duck_duration`` in ``extra_config`` changes the
        two minutes. Until ``lame_duck_grace_period`` (10 s) is over, the server does not act on ``stop()`` either.
        """
        self._signal_running(signal.SIGUSR2)

    def reload(self, **options: Unpack[ServerOptions]) -> None:
        """Change ``options`` in the running server without closing its port, and wait until they hold.

        Raises:
            EmbeddedServerError: The server refused; it goes on with its old configuration.
        """
        with self._lock:
            self._check_running()
            before, self._config = self._config, with_options(self._config, options)
            offset = self._log_size()
            try:
                self._write_config()
                self._signal(signal.SIGHUP)
                deadline = time.monotonic() + RELOAD_TIMEOUT_S
                while "Reloaded server configuration" not in (log := self._read_log(offset)):
                    if "Failed to reload" in log or time.monotonic() > deadline or not self.is_running:
                        raise EmbeddedServerError("nats-server did not reload its configuration", _tail(log))
                    time.sleep(POLL_S)
            except BaseException:
                self._config = before
                self._write_config()
                raise

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()  # Nobody will call __exit__.
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        try:
            await finish_in_thread(self.start)
        except BaseException:
            # Nobody will call __aexit__, and a cancelled start may have gone through.
            await finish_in_thread(self.close)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await finish_in_thread(self.close)

    def __repr__(self) -> str:
        state = f"running, pid {self._pid}" if self.is_running else "not running"
        return f"<NatsServer {self.url if self._port else 'without a port yet'} ({state})>"

    # Launching

    def _make_folder(self) -> None:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="jetspark-nats-"))  # Mode 0700: the configuration has secrets.
            (self._folder / "ports").mkdir()
            atexit.register(self.close)

    def _check_store(self) -> None:
        """The watchdog locks the folder, and all it could say is that it cannot."""
        folder = self._own_store_dir
        if folder is None or not self._config.jetstream:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ".jetspark.lock").touch()
        except OSError as error:
            raise EmbeddedServerError(
                f"store_dir={str(folder)!r}: {error.strerror}; expected a folder that can be written"
            ) from error

    def _write_config(self) -> None:
        text = render_config(self._config, port=self._launch_port, store_dir=self.store_dir)
        self._path("nats.conf").write_text(text, encoding="utf-8")

    def _launch(self, binary: str) -> None:
        if not sys.executable or os.name != "posix":
            raise EmbeddedServerError(
                "the embedded server needs a POSIX system and a Python interpreter (sys.executable); "
                "start nats-server by other means here"
            )
        assert self._folder is not None
        for old in self._path("ports").iterdir():
            old.unlink()
        self._monitoring_port = None
        self._launch_port = self._port
        self._write_config()
        command = [binary, "-c", str(self._path("nats.conf")), "--ports_file_dir", str(self._path("ports"))]
        task = {
            "command": command,
            "parent_pid": os.getpid(),
            "store_dir": str(self._own_store_dir) if self._own_store_dir and self._config.jetstream else None,
            "remove_dir": str(self._folder),
        }
        watchdog = Path(__file__).with_name("watchdog.py")
        self._run_log_offset = self._log_size()
        with self._path("nats.log").open("ab") as log:
            # A session of its own: Ctrl-C in a terminal reaches every process of the program's group, and the
            # server must still be there while the program drains its connections. -I -S keeps the start at
            # some 20 ms.
            self._watchdog = subprocess.Popen(
                [sys.executable, "-I", "-S", str(watchdog), json.dumps(task)],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self._owner_pid = os.getpid()

    def _await_ready(self, deadline: float) -> None:
        self._pid = self._read_pid(deadline)
        is_listening = False
        while True:
            self._check_alive()
            if not is_listening:
                is_listening = self._read_ports() and self._greets()
            # In a cluster a node is healthy only once the others are there: that is for the cluster to await.
            if is_listening and (self._config.cluster is not None or self.is_healthy()):
                return
            if time.monotonic() > deadline:
                raise EmbeddedServerError(
                    f"nats-server was not ready within {self._start_timeout_s:g} s", self._run_log_tail()
                )
            time.sleep(POLL_S)

    def _read_pid(self, deadline: float) -> int:
        assert self._watchdog is not None
        assert self._watchdog.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            wait_s = max(0.0, deadline - time.monotonic())
            readable, _, _ = select.select([self._watchdog.stdout], [], [], wait_s)
            piece = self._watchdog.stdout.read(1) if readable else b""
            if not piece:
                code = self._watchdog.wait(SIGNAL_TIMEOUT_S) if readable else None
                if code == STORE_LOCKED:
                    raise EmbeddedServerError(
                        f"store_dir={str(self._own_store_dir)!r} is in use by another server: "
                        "stop that one, or give this one a folder of its own"
                    )
                raise EmbeddedServerError("nats-server could not be started", self._run_log_tail())
            line += piece
        return int(line)

    def _check_alive(self) -> None:
        assert self._watchdog is not None
        code = self._watchdog.poll()
        if code is not None:
            log = self._run_log_tail()
            taken = re.search(r":(\d+): bind: address already in use", log)
            if taken:
                reason = f"nats-server could not listen: port {taken[1]} is already in use"
            else:
                reason = f"nats-server ended while starting, with exit code {code}"
            raise EmbeddedServerError(reason, log)

    def _read_ports(self) -> bool:
        """Take the ports from the file the server writes once it listens, the only account free of races."""
        # Named after the executable, which JETSPARK_NATS_SERVER may call anything.
        found = list(self._path("ports").glob(f"*_{self._pid}.ports"))
        if not found:
            return False
        try:
            ports: dict[str, list[str]] = json.loads(found[0].read_text())
        except ValueError:
            return False  # Seen half written.
        self._port = _port_of(ports["nats"])
        if "monitoring" not in ports:
            raise EmbeddedServerError("extra_config turns monitoring off (http), which tells when the server is ready")
        self._monitoring_port = _port_of(ports["monitoring"])
        if "cluster" in ports:
            self._cluster_port = _port_of(ports["cluster"])
        return True

    def _greets(self) -> bool:
        """Whether a client that connects now is greeted with the server's INFO."""
        assert self._port is not None
        try:
            with socket.create_connection((self._reachable_host(), self._port), timeout=2.0) as client:
                if self._config.tls is not None and self._config.tls.handshake_first:
                    return True  # It waits for our handshake before it says anything.
                return client.recv(5) == b"INFO "
        except OSError:
            return False

    def _reachable_host(self) -> str:
        # "All addresses" is where a server listens, not where a client connects.
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._config.host, self._config.host)

    # Signals and ending

    def _signal_running(self, number: signal.Signals) -> None:
        with self._lock:
            self._check_running()
            self._signal(number)

    def _signal(self, number: signal.Signals) -> None:
        """Have the watchdog pass a signal on, and return when it has (or when the server is gone)."""
        if self._watchdog is None:
            return
        assert self._watchdog.stdin is not None
        assert self._watchdog.stdout is not None
        try:
            self._watchdog.stdin.write(bytes([number]))
        except BrokenPipeError:
            return
        if select.select([self._watchdog.stdout], [], [], SIGNAL_TIMEOUT_S)[0]:
            self._watchdog.stdout.read(1)

    def _end_now(self) -> None:
        """Leave no process behind, whatever state a start or stop was in."""
        if self._watchdog is None:
            return
        if self._watchdog.poll() is None:
            self._signal(signal.SIGKILL)
            try:
                self._watchdog.wait(SIGNAL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._watchdog.kill()  # The kernel then ends the server, which has PR_SET_PDEATHSIG.
        self._reap()

    def _reap(self) -> None:
        if self._watchdog is None:
            return
        self._watchdog.wait()
        for pipe in (self._watchdog.stdin, self._watchdog.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._watchdog = None

    def _is_owner(self) -> bool:
        return self._owner_pid == os.getpid()

    def _check_owner(self) -> None:
        if self._folder is not None and not self._is_owner():
            raise UsageError(f"this nats-server belongs to process {self._owner_pid}, which forked this one")
        self._owner_pid = os.getpid()

    def _check_running(self) -> None:
        self._check_owner()
        if not self.is_running:
            raise UsageError("the nats-server is not running: call start() first")

    # Log

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / name

    def _log_size(self) -> int:
        log = self._path("nats.log")
        return log.stat().st_size if log.exists() else 0

    def _read_log(self, offset: int) -> str:
        with self._path("nats.log").open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(offset, size - LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")

    def _run_log_tail(self) -> str:
        return _tail(self._read_log(self._run_log_offset))


async def finish_in_thread(work: Callable[[], object]) -> None:
    """Run blocking work in a thread and wait for its end even when cancelled, so that nothing is left half done."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # Read, or asyncio reports it as forgotten: the cancellation goes first.
        raise


def _known(value: _T | None, name: str) -> _T:
    if value is None:
        raise UsageError(f"{name} is not known before start()")
    return value


def _port_of(urls: list[str]) -> int:
    return int(urls[0].rpartition(":")[2])


def _tail(log: str) -> str:
    return "\n".join(log.splitlines()[-LOG_TAIL_LINES:])
