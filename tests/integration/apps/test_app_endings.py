"""How the process of an application ends: at signals, beside other applications, and without a server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from integration.apps.ending_worker import LONG_S, ONE, TWO, Note
from support.apps import publish, set_up, until

import jetspark
from jetspark.aio.jetstream import JetStream
from jetspark.server import NatsServer

WORKER = Path(__file__).parent / "ending_worker.py"
# Much less than the time that workers and connections have to end.
PATIENCE_S = LONG_S / 6


@asynccontextmanager
async def worker(case: str, url: str, *handled: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A process whose applications have handled an event."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(WORKER),
        case,
        url,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        lines = {await line_of(process) for _ in handled}
        assert lines == {f"handled {name}" for name in handled}
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        return (await process.stdout.readline()).decode().strip()


async def rest_of(process: asyncio.subprocess.Process) -> list[str]:
    """What a process says until it ends."""
    async with asyncio.timeout(PATIENCE_S):
        output, _ = await process.communicate()
    return output.decode().split("\n")[:-1]


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
async def test_every_application_of_a_process_ends_and_its_program_hears_of_the_signal(
    server: NatsServer, js: JetStream, name: str
) -> None:
    await set_up(js, ONE)
    await set_up(js, TWO)
    await publish(js, ONE, Note(name="a"))
    async with worker("host", server.url, "one", "two") as process:
        process.send_signal(signal.Signals[name])
        said = await rest_of(process)
    assert process.returncode == 0
    assert sorted(said[:3]) == sorted([f"{'host' if name == 'SIGTERM' else 'loop'} {name}", "ended one", "ended two"])
    # Afterwards the program has its handlers again.
    assert said[3:] == ["restored True", "loop SIGINT"]


async def test_a_program_that_keeps_its_signals_ends_the_application_by_cancelling_it(
    server: NatsServer, js: JetStream
) -> None:
    await set_up(js, ONE)
    await publish(js, ONE, Note(name="a"))
    async with worker("own", server.url, "one") as process:
        process.send_signal(signal.SIGTERM)
        assert await rest_of(process) == ["ended one", "cancelled True"]
    assert process.returncode == 0


HOSTS = """
import asyncio, signal
from jetspark.app.signals import on_signals

calls = []

def install(name):
    before = signal.getsignal(signal.SIGTERM)

    def handle(number, frame):
        calls.append(name)
        before(number, frame)

    signal.signal(signal.SIGTERM, handle)
    return before

async def run(name=None):
    ended, before = asyncio.Event(), None
    with on_signals(ended):
        if name is not None:
            before = install(name)
        signal.raise_signal(signal.SIGTERM)
        await ended.wait()
        print(*calls, "ended")
        calls.clear()
    return before

def raised():
    signal.raise_signal(signal.SIGTERM)
    print(*calls)
    calls.clear()

signal.signal(signal.SIGTERM, lambda number, frame: calls.append("first"))
asyncio.run(run("one"))  # its handler calls ours, and stays
raised()
asyncio.run(run())
asyncio.run(run("two"))
raised()
signal.signal(signal.SIGTERM, asyncio.run(run("three")))  # ours, while no application runs
raised()
asyncio.run(run())
signal.signal(signal.SIGTERM, signal.SIG_DFL)
before = asyncio.run(run("four"))
signal.signal(signal.SIGTERM, before)
print("last", flush=True)
raised()
"""
HEARD = [
    "one first ended",
    "one first",
    "one first ended",
    "two one first ended",
    "two one first",
    "three two one first ended",
    "two one first",
    "two one first ended",
    "four ended",
    "last",
]


def test_handlers_of_a_program_that_call_ours_are_called_once_by_each_signal() -> None:
    ended = subprocess.run([sys.executable, "-c", HOSTS], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.stdout.splitlines(), ended.stderr, ended.returncode) == (HEARD, "", -signal.SIGTERM)


@pytest.mark.parametrize("leave", [NatsServer.stop, NatsServer.pause], ids=["stopped", "silent"])
@pytest.mark.parametrize("is_asked_twice", [False, True], ids=["", "asked twice"])
async def test_a_process_ends_soon_and_with_0_while_its_server_is_away(
    own: NatsServer, leave: Callable[[NatsServer], None], is_asked_twice: bool
) -> None:
    async with jetspark.connect(own.url) as client:
        js = client.jetstream()
        await set_up(js, ONE)
        await publish(js, ONE, Note(name="a"))
    async with worker("one", own.url, "one") as process:
        leave(own)
        process.send_signal(signal.SIGTERM)
        if is_asked_twice:
            await asyncio.sleep(1.0)
            process.send_signal(signal.SIGTERM)
        assert await rest_of(process) == ["ended one"]
    assert process.returncode == 0
    if own.is_running:
        own.resume()


@pytest.mark.parametrize("leave", [NatsServer.stop, NatsServer.pause], ids=["stopped", "silent"])
async def test_two_applications_in_a_program_with_handlers_end_soon_while_their_server_is_away(
    own: NatsServer, leave: Callable[[NatsServer], None]
) -> None:
    async with jetspark.connect(own.url) as client:
        js = client.jetstream()
        await set_up(js, ONE)
        await set_up(js, TWO)
        await publish(js, ONE, Note(name="a"))
    async with worker("host", own.url, "one", "two") as process:
        leave(own)
        process.send_signal(signal.SIGTERM)
        said = await rest_of(process)
    assert process.returncode == 0
    assert sorted(said[:3]) == ["ended one", "ended two", "host SIGTERM"]
    assert said[3:] == ["restored True", "loop SIGINT"]
    if own.is_running:
        own.resume()


# The last thing that the server hears of a starting application, in the order of the start.
PHASES = {
    "accepting": b"",
    "connecting": b"CONNECT ",
    "applying": b"$JS.API.STREAM.CREATE.NOTES ",
    "making consumers": b"$JS.API.CONSUMER.CREATE.",
    "reading records": b"$JS.API.CONSUMER.CREATE.KV_one_handlers.",
    "catching up": b"$JS.API.CONSUMER.MSG.NEXT.ONE_ADVISORIES.",
    "pulling": b"$JS.API.CONSUMER.MSG.NEXT.NOTES.",
}


@asynccontextmanager
async def silent_from(url: str, last: bytes) -> AsyncIterator[tuple[str, asyncio.Event]]:
    """The URL of a proxy whose server falls silent once a client has sent ``last``; the event is set then."""
    server = urlsplit(url)
    is_silent = asyncio.Event()
    opened: list[asyncio.StreamWriter] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_asking: bool) -> None:
        heard = b""
        while data := await reader.read(1 << 16):
            if is_asking:
                heard = heard[-100:] + data
                if last in heard:
                    is_silent.set()
            if not is_silent.is_set():
                writer.write(data)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        if not last:
            is_silent.set()
        there, back = await asyncio.open_connection(server.hostname, server.port)
        opened.append(back)
        with suppress(ConnectionError, asyncio.CancelledError):  # of the loop's end, which would be logged
            await asyncio.gather(pump(reader, back, is_asking=True), pump(there, writer, is_asking=False))

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as proxy:
        port = proxy.sockets[0].getsockname()[1]
        yield server._replace(netloc=f"{server.netloc.rpartition(':')[0]}:{port}").geturl(), is_silent
        for writer in opened:
            writer.close()


@asynccontextmanager
async def started(way: str, url: str, **environment: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """The process of an application that is applied and started, as a program or by the command."""
    command = ["-m", "jetspark", "run", "integration.apps.ending_worker:ONE", "--apply"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *([*command, "--stop-timeout", str(LONG_S), "--servers", url] if way == "run" else [str(WORKER), "apply", url]),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "phase"),
    [*(("program", phase) for phase in PHASES), ("run", "accepting"), ("run", "applying"), ("run", "reading records")],
)
async def test_sigterm_ends_a_start_whose_server_falls_silent_with_0(nats_url: str, way: str, phase: str) -> None:
    async with silent_from(nats_url, PHASES[phase]) as (url, is_silent), started(way, url) as process:
        async with asyncio.timeout(PATIENCE_S):
            await is_silent.wait()
        process.send_signal(signal.SIGTERM)
        assert await rest_of(process) == ([] if phase in ("accepting", "connecting") else ["ended one"])
    assert process.returncode == 0


@pytest.mark.parametrize("way", ["program", "run"])
async def test_sigterm_ends_a_start_whose_lifespan_is_opening_with_0(nats_url: str, way: str) -> None:
    async with started(way, nats_url, JETSPARK_TESTS_OPENING="1") as process:
        assert await line_of(process) == "opening"
        process.send_signal(signal.SIGTERM)
        assert await rest_of(process) == []
    assert process.returncode == 0


async def test_sigterm_while_the_application_is_imported_ends_the_command_with_0(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\nopen('imports', 'w').close()\ntime.sleep(600)\n")
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "jetspark", "run", "slow:app", cwd=tmp_path)
    try:
        await until((tmp_path / "imports").exists)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
