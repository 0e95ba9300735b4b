"""One real nats-server as a Python object: ``start()`` waits until it is ready, and it ends with the program."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar, Unpack

from jetspark.core.arguments import path
from jetspark.core.numbers import seconds_above_0, whole
from jetspark.errors import EmbeddedServerError, UsageError
from jetspark.server import probes
from jetspark.server.binary import find_nats_server
from jetspark.server.config import MAX_PORT, ServerConfig, ServerOptions, render_config, with_options
from jetspark.server.folder import ServerFolder, tail
from jetspark.server.run import POLL_S, ServerRun, reachable_host

__all__ = ["NatsServer"]

_T = TypeVar("_T")

# A server with little to do stops in some 10 ms; flushing large streams may take seconds.
STOP_TIMEOUT_S = 15.0

RELOAD_TIMEOUT_S = 10.0


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
        config: The server's configuration; the defaults when absent.
        port: The client port; ``None`` or 0 takes a free one.
        store_dir: Folder of the streams, kept on ``close()``. Two servers never share one: the second refuses to start.
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
        if port is not None:
            port = whole("port", port, low=0, high=MAX_PORT, instead="or None for a free one")
        self._port: int | None = port or None
        self._own_store_dir = None if store_dir is None else Path(path("store_dir", store_dir)).absolute()
        self._start_timeout_s = seconds_above_0("start_timeout_s", start_timeout_s)
        # The port in the configuration file, which a reload must repeat: the server refuses any other port, even the
        # one it chose itself.
        self._launch_port: int | None = None
        self._cluster_port: int | None = None
        self._folder: ServerFolder | None = None
        # The latest run, which may be over.
        self._run: ServerRun | None = None
        self._owner_pid = os.getpid()
        self._was_ready = False
        self._closed_log = ""
        # Two threads may both decide to stop a server; the second must find it stopped, not half stopped.
        self._lock = threading.RLock()

    # Facts

    @property
    def config(self) -> ServerConfig:
        return self._config

    @property
    def url(self) -> str:
        """Where clients connect: ``nats://host:port``, or ``tls://`` with TLS."""
        scheme = "nats" if self._config.tls is None else "tls"
        host = reachable_host(self._config)
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.port}"

    @property
    def port(self) -> int:
        """The client port; it does not change once the server has started for the first time."""
        return _known(self._port, "port")

    @property
    def monitoring_url(self) -> str:
        """Root of the HTTP monitoring pages (``/varz``, ``/jsz``, ``/healthz``); new at each start."""
        return f"http://127.0.0.1:{self._monitoring_port()}"

    @property
    def cluster_port(self) -> int:
        """Where other nodes of the cluster reach this one."""
        return _known(self._cluster_port, "cluster_port")

    @property
    def pid(self) -> int:
        """Process id of nats-server itself; new at each start."""
        return _known(None if self._run is None else self._run.pid, "pid")

    @property
    def is_running(self) -> bool:
        return self._run is not None and self._run.is_running

    @property
    def store_dir(self) -> Path:
        """Folder of the streams. A temporary one exists from the first ``start()`` to ``close()``."""
        if self._own_store_dir is not None:
            return self._own_store_dir
        return _known(self._folder, "store_dir").store

    def log(self) -> str:
        """Return the server's output since its first start: the last 64 KiB of it."""
        return self._folder.read_log() if self._folder is not None else self._closed_log

    def is_healthy(self) -> bool:
        """True if the server reports so: JetStream is up and, in a cluster, has caught up with its leader."""
        return self._run is not None and self._run.is_healthy()

    def monitor(self, page: str) -> tuple[int, bytes]:
        """Fetch a monitoring page such as ``/jsz?streams=true``: its HTTP status and body."""
        return probes.fetch_page(self._monitoring_port(), page)

    def _monitoring_port(self) -> int:
        ports = None if self._run is None else self._run.ports
        return _known(ports, "monitoring_url").monitoring

    # Start and stop

    def start(self) -> Self:
        """Start the server and wait until clients can connect; does nothing when it already runs.

        Raises:
            EmbeddedServerError: It did not become ready; ``log`` has the end of its log.
        """
        with self._lock:
            self._check_owner()
            if self.is_running:
                return self
            binary = find_nats_server()
            self._check_store()
            self._end_now()
            folder = self._make_folder()
            deadline = time.monotonic() + self._start_timeout_s
            while True:
                try:
                    self._launch(str(binary.path), folder, deadline)
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
            if self._run is not None and self._run.is_running:
                self._run.child.signal(signal.SIGTERM)
                self._run.child.signal(signal.SIGCONT)  # A paused server acts on SIGTERM only after it is resumed.
                self._run.child.wait(STOP_TIMEOUT_S)
            self._end_now()

    def kill(self) -> None:
        """End the server by SIGKILL, as a crash of its process would. Port and store are kept for ``start()``."""
        with self._lock:
            self._check_owner()
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
                self._folder.remove()
                self._folder = None

    def pause(self) -> None:
        """Freeze the process (SIGSTOP): connections stay open, requests are not answered. Undone by ``resume()``."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def lame_duck(self) -> None:
        """Enter lame duck mode: the server tells clients to leave, evicts them over two minutes, then ends.

        Clients see ``ldm: true`` in an INFO at once. ``lame_duck_duration`` in ``extra_config`` changes the
        two minutes. Until ``lame_duck_grace_period`` (10 s) is over, the server does not act on ``stop()`` either.
        """
        self._signal(signal.SIGUSR2)

    def reload(self, **options: Unpack[ServerOptions]) -> None:
        """Change ``options`` in the running server without closing its port, and wait until they hold.

        Raises:
            EmbeddedServerError: The server refused; it continues with its old configuration.
        """
        with self._lock:
            run, folder = self._running(), _known(self._folder, "reload")
            before, self._config = self._config, with_options(self._config, options)
            offset = folder.log_size()
            try:
                self._write_config(folder)
                run.child.signal(signal.SIGHUP)
                deadline = time.monotonic() + RELOAD_TIMEOUT_S
                while "Reloaded server configuration" not in (log := folder.read_log(offset)):
                    if "Failed to reload" in log or time.monotonic() > deadline or not self.is_running:
                        raise EmbeddedServerError("nats-server did not reload its configuration", tail(log))
                    time.sleep(POLL_S)
            except BaseException:
                self._config = before
                self._write_config(folder)
                raise

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()  # __exit__ will not be called.
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        try:
            await finish_in_thread(self.start)
        except BaseException:
            # __aexit__ will not be called, and a cancelled start may have succeeded.
            await finish_in_thread(self.close)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await finish_in_thread(self.close)

    def __repr__(self) -> str:
        state = f"running, pid {self._run.pid}" if self._run is not None and self.is_running else "not running"
        return f"<NatsServer {self.url if self._port else 'without a port yet'} ({state})>"

    # Launching

    def _make_folder(self) -> ServerFolder:
        if self._folder is None:
            self._folder = ServerFolder.make()
            atexit.register(self.close)
        return self._folder

    def _check_store(self) -> None:
        """Check that the folder can be written; the watchdog, which locks it, has no way to report the reason."""
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

    def _write_config(self, folder: ServerFolder) -> None:
        text = render_config(self._config, port=self._launch_port, store_dir=self.store_dir)
        folder.config.write_text(text, encoding="utf-8")

    def _launch(self, binary: str, folder: ServerFolder, deadline: float) -> None:
        self._launch_port = self._port
        self._write_config(folder)
        store_dir = self._own_store_dir if self._config.jetstream else None
        self._run = ServerRun(binary, folder, self._config, store_dir)
        self._owner_pid = os.getpid()
        ports = self._run.await_ready(deadline, self._start_timeout_s)
        self._port, self._cluster_port = ports.client, ports.cluster

    # Signals and ending

    def _signal(self, number: signal.Signals) -> None:
        with self._lock:
            self._running().child.signal(number)

    def _end_now(self) -> None:
        if self._run is not None:
            self._run.child.end()

    def _is_owner(self) -> bool:
        return self._owner_pid == os.getpid()

    def _check_owner(self) -> None:
        if self._folder is not None and not self._is_owner():
            raise UsageError(f"this nats-server belongs to process {self._owner_pid}, which forked this one")
        self._owner_pid = os.getpid()

    def _running(self) -> ServerRun:
        self._check_owner()
        if self._run is None or not self._run.is_running:
            raise UsageError("the nats-server is not running: call start() first")
        return self._run


async def finish_in_thread(work: Callable[[], object]) -> None:
    """Run blocking work in a thread and wait for its end even when cancelled, so that it is never half done."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        if not running.cancelled():
            running.exception()  # Read, or asyncio logs it as never retrieved: the cancellation has precedence.
        raise


def _known(value: _T | None, name: str) -> _T:
    if value is None:
        raise UsageError(f"{name} is not known before start()")
    return value
