"""A program that ends without closing its client: what was published is sent within a bound, or the loss is told."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator

import pytest

import jetspark.blocking
from jetspark import StreamConfig
from jetspark.server import NatsServer

COUNT = 1000

BLOCKING = """
import os, sys, warnings
import jetspark.blocking as jetspark
warnings.simplefilter("ignore", DeprecationWarning)  # of forking with threads
url, how = sys.argv[1:]
nc = jetspark.connect(url)
for number in range(1000):
    if how == "async":
        nc.jetstream().publish_async("s", b"%d" % number)
    else:
        nc.publish("s", b"%d" % number)
if how == "fork":
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
if how == "error":
    raise SystemExit(3)
if how == "interrupt":
    raise KeyboardInterrupt
"""

ASYNCIO = """
import asyncio, gc, sys
import jetspark

async def main():
    nc = await jetspark.connect(sys.argv[1])
    count = 0
    try:
        while True:
            await nc.publish("s", bytes(100_000), timeout=1)
            count += 1
    except jetspark.RequestTimeout:
        print(count)
    return nc

if sys.argv[2] == "kept":
    kept = asyncio.run(main())
else:
    asyncio.run(main())
    gc.collect()
    print("collected", file=sys.stderr)
"""


WAIT = "print(flush=True)\ninput()\n"


@pytest.fixture
def server() -> Iterator[NatsServer]:
    with NatsServer() as server:
        with jetspark.blocking.connect(server.url) as nc:
            nc.jetstream().create_stream(StreamConfig(name="S", subjects=["s"]))
        yield server


def run(program: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *args], capture_output=True, text=True, timeout=250, check=False
    )


def run_on_stopped(server: NatsServer, program: str, how: str) -> subprocess.CompletedProcess[str]:
    """Run a program that waits when it is connected; from then on the server does not answer."""
    command = [sys.executable, "-c", program, server.url, how]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        server.pause()
        try:
            stdout, stderr = process.communicate("\n", timeout=250)
        finally:
            server.resume()
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def stored(server: NatsServer) -> int:
    with jetspark.blocking.connect(server.url) as nc:
        return nc.jetstream().stream("S").info().state.messages


@pytest.mark.parametrize("how", ["plain", "async", "error", "interrupt"])
def test_what_a_blocking_client_published_is_sent_before_the_program_ends(how: str, server: NatsServer) -> None:
    result = run(BLOCKING, server.url, how)
    assert result.returncode == {"error": 3, "interrupt": -2}.get(how, 0)
    assert "in doubt" not in result.stderr
    assert stored(server) == COUNT


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork()")
def test_a_child_that_ends_does_not_send_what_its_parent_published(server: NatsServer) -> None:
    result = run(BLOCKING, server.url, "fork")
    assert (result.returncode, result.stderr) == (0, "")
    assert stored(server) == COUNT


@pytest.mark.slow
def test_a_program_ends_in_time_and_tells_what_is_in_doubt_when_the_server_does_not_answer(server: NatsServer) -> None:
    connected = "nc = jetspark.connect(url)\n"
    program = BLOCKING.replace(connected, connected + WAIT)
    began = time.monotonic()
    result = run_on_stopped(server, program, "plain")
    assert time.monotonic() - began < 30
    in_doubt = re.search(r"(\d+) published messages are in doubt", result.stderr)
    assert in_doubt is not None, result.stderr
    assert int(in_doubt[1]) == COUNT
    assert result.returncode == 0


@pytest.mark.parametrize("how", ["kept", "forgotten"])
def test_an_asyncio_client_that_outlives_its_loop_tells_what_was_never_sent(how: str, server: NatsServer) -> None:
    program = ASYNCIO.replace("    count = 0\n", textwrap.indent(WAIT, "    ") + "    count = 0\n")
    result = run_on_stopped(server, program, how)
    told = re.findall(r"(\d+) published messages were never sent, (\d+) are in doubt", result.stderr)
    assert len(told) == 1, result.stderr
    assert sum(map(int, told[0])) == int(result.stdout)
    if how == "forgotten":
        assert "never sent" in result.stderr[: result.stderr.index("collected")]
