"""The demo as a shell sees it, and what it does when a message goes astray."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys

import pytest

import jetspark
from jetspark.cli import demo
from jetspark.server import NatsServer

COMMAND = [sys.executable, "-c", "import typer; from jetspark.cli.demo import demo; typer.run(demo)"]


def test_it_moves_every_message_and_says_so_in_plain_lines() -> None:
    finished = subprocess.run([*COMMAND, "--count", "20_500"], capture_output=True, text=True, timeout=50, check=False)
    assert (finished.returncode, finished.stderr) == (0, "")
    assert "\x1b" not in finished.stdout
    assert "\r" not in finished.stdout
    lines = finished.stdout.splitlines()
    assert lines[0] == "20,500 messages of 128 bytes, published and received by this one Python process"
    words = [line.split()[0] for line in lines[1:]]
    assert words == ["embedded", "published", "received", "verified", "paced", "stopped", "This"]
    assert all(re.search(r"20,500 in \d+\.\d\d s = [\d,]+ messages/s", line) for line in lines[2:4])
    assert "core messaging" in lines[-1]


def test_a_count_below_one_is_refused() -> None:
    finished = subprocess.run([*COMMAND, "--count", "0"], capture_output=True, text=True, timeout=50, check=False)
    assert finished.returncode == 2
    assert "Traceback" not in finished.stderr


async def test_the_publisher_waits_for_a_window_smaller_than_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "WINDOW", 2_000)
    seen: list[int] = []
    async with NatsServer(jetstream=False) as server:
        outcome = await demo.move(server.url, 10_000, seen.append)
    assert seen[-1] == 10_000
    assert seen == sorted(seen)
    assert outcome.received_s > 0


@pytest.mark.parametrize("intruder", [b"%012d" % 0, b"%012d%b" % (0, b"." * 116)])
async def test_a_foreign_or_doubled_message_is_noticed(intruder: bytes) -> None:
    async with NatsServer(jetstream=False) as server, jetspark.connect(server.url) as nc:
        await nc.publish(demo.SUBJECT, b"before anyone subscribed: no harm")

        async def intrude() -> None:
            while True:
                await nc.publish(demo.SUBJECT, intruder)
                await asyncio.sleep(0.001)

        intruding = asyncio.create_task(intrude())
        with pytest.raises(demo.Mismatch):
            await demo.move(server.url, 100_000)
        intruding.cancel()
