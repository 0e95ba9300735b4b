"""``jetspark run`` and ``jetspark dlq``, as an operator uses them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import jetspark.blocking
from jetspark.app.dead_letters.letters import DeadEvent, FailureCause, Origin, letter_subject
from jetspark.cli import commands
from jetspark.core.headers import Headers
from jetspark.errors import JetSparkError
from jetspark.server import NatsServer

APP = """
from pathlib import Path
from jetspark.app import App, Event, Reject

class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    number: int

app = App("shop", stream="SHOP", subjects=["orders.>"])

@app.handler(Paid, durable="billing", ack_wait_s=5.0)
async def bill(event: Paid) -> None:
    if event.number == 1 and not Path("mended").exists():
        raise Reject("no such card")
    with open("done", "a") as file:
        file.write(f"{event.order_id}{event.number} ")
"""

PUBLISH = """
import asyncio, sys
from shop import Paid, app

async def main():
    async with app.connect(sys.argv[1]) as shop:
        for number in range(3):
            for key in "ab":
                await shop.publish(Paid(order_id=key, number=number))

asyncio.run(main())
"""


class Shell:
    def __init__(self, folder: Path, server: NatsServer) -> None:
        self.folder = folder
        self.environment = {**os.environ, "JETSPARK_SERVERS": server.url, "PYTHONPATH": str(folder)}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "jetspark", *arguments], cwd=self.folder, env=self.environment, text=True
        )

    def run(self, *arguments: str, code: int = 0) -> str:
        """A command in this process: a new one for each would take most of the test's time."""
        done = CliRunner().invoke(commands.app, list(arguments))
        error = done.exception if not isinstance(done.exception, SystemExit) else None
        if isinstance(error, JetSparkError):  # as the entry point prints it
            assert code == 1, error
            return str(error)
        assert done.exit_code == code, f"{done.output} {error!r}"
        return done.output

    def letters(self, *arguments: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.run("dlq", "ls", "shop:app", "--json", *arguments))
        return found

    def letter(self, handler: str, sequence: int, key: str | None = "a") -> None:
        """Write one as a worker does that has ended since."""
        each = DeadEvent(
            handler=handler,
            key=key,
            origin=Origin("SHOP", sequence, 1),
            subject="orders.a.paid",
            data=b"{}",
            headers=Headers(),
            attempts=1,
            status="open",
            cause=FailureCause.of(ValueError("no"), is_transient=False),
        )
        with jetspark.blocking.connect(self.environment["JETSPARK_SERVERS"]) as client:
            subject = letter_subject("shop", handler, each.key, each.origin)
            client.jetstream().publish(subject, each.data, headers=each.to_headers())

    def wait_for(self, condition: Any) -> None:
        give_up_at = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < give_up_at
            time.sleep(0.1)

    def done(self) -> list[str]:
        file = self.folder / "done"
        return file.read_text().split() if file.exists() else []


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    (tmp_path / "shop.py").write_text(APP)
    (tmp_path / "publish.py").write_text(PUBLISH)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with NatsServer() as server:
        monkeypatch.setenv("JETSPARK_SERVERS", server.url)
        yield Shell(tmp_path, server)
    sys.modules.pop("shop", None)


@pytest.mark.slow
def test_letters_are_listed_redriven_and_discarded(shell: Shell) -> None:
    assert "stream SHOP" in shell.run("run", "shop:app", code=1)  # not applied
    shell.run("apply", "shop:app")
    worker = shell.start("run", "shop:app", "--apply")
    try:
        url = shell.environment["JETSPARK_SERVERS"]
        subprocess.run([sys.executable, "publish.py", url], cwd=shell.folder, env=shell.environment, check=True)
        shell.wait_for(lambda: len(shell.letters()) == 4)
        assert "2  jetspark.app.handlers.retry.Reject" in shell.run("dlq", "ls", "shop:app", "--by", "error")
        assert json.loads(shell.run("dlq", "ls", "shop:app", "--by", "key", "--json")) == {"a": 2, "b": 2}
        [head] = shell.letters("--where", "key=a", "--where", "status=open")
        shown = json.loads(shell.run("dlq", "show", "shop:app", str(head["letter"]), "--json"))
        assert (shown["reason"], json.loads(shown["data"])["data"]["number"]) == ("no such card", 1)
        assert "there is none" in shell.run("dlq", "show", "shop:app", "999", code=1)
        assert len(shell.run("dlq", "export", "shop:app").splitlines()) == 4

        (shell.folder / "mended").touch()
        dry = json.loads(shell.run("dlq", "redrive", "shop:app", "--where", "key=a", "--dry-run", "--json"))
        assert (dry["requested"], dry["behind"], dry["dry_run"]) == (1, 1, True)
        assert len(shell.letters()) == 4
        assert "2 handled, 0 failed again, 0 waiting" in shell.run("dlq", "redrive", "shop:app", "--where", "key=a")
        assert len(shell.letters()) == 2
        assert "expected --handler or --where" in shell.run("dlq", "discard", "shop:app", "--yes", code=1)
        assert "1 letters; --yes" in shell.run("dlq", "discard", "shop:app", "--where", "key=b")
        shell.run("dlq", "discard", "shop:app", "--where", "key=b", "--yes")
        shell.wait_for(lambda: shell.letters() == [])
        shell.wait_for(lambda: len(shell.done()) == 5)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(timeout=250) == 0
    finally:
        worker.kill()
        worker.wait()
    assert [each for each in shell.done() if each[0] == "a"] == ["a0", "a1", "a2"]
    assert [each for each in shell.done() if each[0] == "b"] == ["b0", "b2"]


@pytest.mark.parametrize(
    "command",
    [
        ["dlq", "ls", "shop:app"],
        ["dlq", "show", "shop:app", "1"],
        ["dlq", "export", "shop:app"],
        ["dlq", "redrive", "shop:app", "--dry-run"],
        ["dlq", "discard", "shop:app", "--where", "key=a"],
        ["dlq", "discard", "shop:app", "--where", "key=a", "--yes"],
        ["replay", "shop:app", "billing"],
    ],
)
def test_a_command_before_the_application_is_applied_names_the_remedy(shell: Shell, command: list[str]) -> None:
    told = shell.run(*command, code=1)
    assert "app 'shop'" in told
    assert "`jetspark apply`" in told
    assert re.search(r"there is no (stream|bucket) '\w+'", told)


def test_a_handler_that_is_none_is_refused_unless_there_are_letters_of_it(shell: Shell) -> None:
    shell.run("apply", "shop:app")
    shell.letter("former", 1)
    ways = (["ls"], ["ls", "--json"], ["ls", "--by", "key"], ["export"], ["discard"], ["discard", "--yes"])
    for name in ("biling", "a.b", "*", ">", "a b", "totals"):
        for way, *more in ways:
            told = shell.run("dlq", way, "shop:app", *more, "--handler", name, code=1)
            assert told.startswith(f"handler {name!r}: app 'shop' has no such handler"), told
            assert told.endswith("it has billing, and projections for letters of projections"), told
    for name, count in (("billing", 0), ("projections", 0), ("former", 1)):
        assert len(shell.letters("--handler", name)) == count
        assert f"{count} letters; --yes" in shell.run("dlq", "discard", "shop:app", "--handler", name)
        discarded = shell.run("dlq", "discard", "shop:app", "--handler", name, "--yes")
        assert discarded == f"{count} letters discarded\n"


PROJECTING = """
from jetspark.app import App
from shop import Paid

app = App("shop", stream="SHOP", subjects=["orders.>"])

@app.projection("totals", events=[Paid], bucket="totals")
class Totals:
    def key(self, event: Paid) -> str:
        return event.order_id

    def apply(self, state: int | None, event: Paid) -> int:
        return (state or 0) + event.number
"""


def test_letters_of_an_application_without_handlers_are_discarded(shell: Shell) -> None:
    (shell.folder / "projecting.py").write_text(PROJECTING)
    shell.run("apply", "projecting:app")
    for number in (1, 2):
        shell.letter("projections", number, key=None)
    for more in ([], ["--handler", "projections"], ["--dry-run"]):
        told = shell.run("dlq", "redrive", "projecting:app", *more, code=1)
        assert told == (
            "redrive: app 'shop' has no handlers, so nobody would handle its letters; `jetspark dlq discard` gives "
            "them up"
        )
    assert "2 letters\n" in shell.run("dlq", "ls", "projecting:app")
    discard = ["dlq", "discard", "projecting:app", "--handler", "projections"]
    assert "2 letters; --yes" in shell.run(*discard)
    assert shell.run(*discard, "--yes") == "2 letters discarded\n"
    assert shell.run("dlq", "ls", "projecting:app") == "0 letters\n"
    sys.modules.pop("projecting", None)


def test_letters_are_shown_whatever_is_in_them(shell: Shell) -> None:
    shell.run("apply", "shop:app")
    odd = DeadEvent(
        handler="notes",
        key="a\nb",
        origin=Origin("SHOP", 1, 1),
        subject="shop.\udcff",
        data=b"\xff",
        headers=Headers([("Shade", "red"), ("Shade", "blue"), ("Half", "\udcff")]),
        attempts=1,
        status="open",
        cause=FailureCause.of(ValueError("\ud800 \x1b[31m red"), is_transient=False),
    )
    with jetspark.blocking.connect(shell.environment["JETSPARK_SERVERS"]) as client:
        js = client.jetstream()
        for number in (1, 2):
            each = dataclasses.replace(odd, origin=Origin("SHOP", number, 1))
            subject = letter_subject("shop", "notes", each.key, each.origin)
            js.publish(subject, each.data, headers=each.to_headers())
    assert shell.run("dlq", "ls", "shop:app").splitlines() == [
        r"       1  open    notes  a\nb  SHOP:1  ValueError: \ud800 \x1b[31m red",
        r"       2  open    notes  a\nb  SHOP:2  ValueError: \ud800 \x1b[31m red",
        "2 letters",
    ]
    assert shell.run("dlq", "ls", "shop:app", "--by", "key").split() == ["2", r"a\nb"]
    assert r"subject: shop.\udcff" in shell.run("dlq", "show", "shop:app", "1")
    shown = json.loads(shell.run("dlq", "show", "shop:app", "1", "--json"))
    assert (shown["headers"], shown["data_base64"]) == ({"Shade": ["red", "blue"], "Half": "\udcff"}, "/w==")
    assert len(shell.run("dlq", "export", "shop:app").splitlines()) == 2
