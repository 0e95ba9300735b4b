"""The official JavaScript clients as independent witnesses: a process that does what it is told over a pipe."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import IO, Any

import pytest
from support.drivers import Driver
from support.patience import PATIENCE_S

from jetspark.server import NatsServer

HERE = Path(__file__).parent

# npm has its own retries; this is for a network that lets nothing through.
INSTALL_TIMEOUT_S = 100.0
COMMAND_TIMEOUT_S = 30.0


class WitnessError(Exception):
    """What the JavaScript client threw; ``code`` is the server's error code, if that is where it came from."""

    def __init__(self, name: str, message: str, code: int | None) -> None:
        super().__init__(name, message, code)
        self.name, self.message, self.code = name, message, code


class Witness:
    """``await witness("kvGet", bucket="b", key="k")``. The commands are those of witness.mjs.

    Used from many event loops, one after the other: a thread reads the answers. Bytes are sent as base64.
    """

    Error = WitnessError  # tests cannot import from a conftest.py

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._numbers = itertools.count(1)
        self._waiting: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._is_over = False
        self._reader = threading.Thread(target=self._read, args=[process.stdout], name="witness", daemon=True)
        self._reader.start()

    async def __call__(self, command: str, **arguments: Any) -> Any:
        """Do it, and return what the client returned.

        Raises:
            WitnessError: The client threw.
        """
        async with asyncio.timeout(COMMAND_TIMEOUT_S):
            return await asyncio.wrap_future(self._send(command, arguments))

    def connect(self, url: str) -> str:
        """The version of the server it found."""
        version: str = self._send("connect", {"url": url}).result(COMMAND_TIMEOUT_S)
        return version

    def close(self) -> None:
        """The end of its input is the end of it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=PATIENCE_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._reader.join(timeout=PATIENCE_S)
        self._process.stdout.close()

    def _send(self, command: str, arguments: dict[str, Any]) -> Future[Any]:
        answer: Future[Any] = Future()
        number = next(self._numbers)
        line = json.dumps({"id": number, "do": command, **arguments}, default=_base64)
        with self._lock:
            if self._is_over:
                raise RuntimeError("the witness process has ended; its last words are in witness.log")
            self._waiting[number] = answer
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return answer

    def _read(self, answers: IO[str]) -> None:
        for line in answers:
            answer = json.loads(line)
            waiting = self._waiting.pop(answer["id"])
            if not waiting.set_running_or_notify_cancel():
                continue  # nobody waits any more
            if error := answer.get("error"):
                waiting.set_exception(WitnessError(**error))
            else:
                waiting.set_result(answer["result"])
        with self._lock:
            self._is_over = True
            left = list(self._waiting.values())
        for waiting in left:
            if waiting.set_running_or_notify_cancel():
                waiting.set_exception(RuntimeError("the witness process has ended; see witness.log"))


def _base64(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} is not for JSON")


@pytest.fixture(scope="session")
def interop_server() -> Iterator[NatsServer]:
    """One for all; tests use names of their own."""
    with NatsServer(jetstream=True) as server:
        yield server


@pytest.fixture(scope="session")
def witness(tmp_path_factory: pytest.TempPathFactory, interop_server: NatsServer) -> Iterator[Witness]:
    """Connected to the server."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("the JavaScript clients need node and npm on the PATH")
    folder = tmp_path_factory.mktemp("witness")
    for name in ("package.json", "witness.mjs"):
        shutil.copy(HERE / name, folder)
    quietly = ["--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", "--no-update-notifier"]
    installed = subprocess.run(
        [npm, "install", *quietly, "--prefix", str(folder)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=INSTALL_TIMEOUT_S,
        check=False,
    )
    assert installed.returncode == 0, f"npm install failed:\n{installed.stdout}{installed.stderr}"
    with (folder / "witness.log").open("wb") as log:
        process = subprocess.Popen(
            [node, "witness.mjs"],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            encoding="utf-8",
        )
        witness = Witness(process)
        try:
            witness.connect(interop_server.url)
            yield witness
        finally:
            witness.close()


@pytest.fixture
def url(interop_server: NatsServer) -> str:
    return interop_server.url


@pytest.fixture(params=["asyncio", "blocking"])
def driver(request: pytest.FixtureRequest) -> Driver:
    return Driver(request.param)


_numbers = itertools.count(1)


@pytest.fixture
def name() -> str:
    """A name nobody else uses, for a stream, a bucket or a subject."""
    return f"T{next(_numbers)}"
