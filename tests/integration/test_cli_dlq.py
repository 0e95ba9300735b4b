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
from jetspark.app.stored_events import FailureCause, Origin, StoredEvent, dead_letter_subject
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

    def dead_letters(self, *arguments: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.run("dlq", "ls", "shop:app", "--json", *arguments))
        return found

    def dead_letter(self, handler: str, sequence: int, key: str | None = "a") -> None:
        """Write one as a worker does that has ended since."""
        each = StoredEvent(
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
            subject = dead_letter_subject("shop", handler, each.key, each.origin)
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
def test_dead_letters_are_listed_redriven_and_discarded(shell: Shell) -> None:
    assert "stream SHOP" in shell.run("run", "shop:app", code=1)  # not applied
    shell.run("apply", "shop:app")
    worker = shell.start("run", "shop:app", "--apply")
    try:
        url = shell.environment["JETSPARK_SERVERS"]
        subprocess.run([sys.executable, "publish.py", url], cwd=shell.folder, env=shell.environment, check=True)
        shell.wait_for(lambda: len(shell.dead_letters()) == 4)
        assert "2  jetspark.app.handlers.retry.Reject" in shell.run("dlq", "ls", "shop:app", "--by", "error")
        assert json.loads(shell.run("dlq", "ls", "shop:app", "--by", "key", "--json")) == {"a": 2, "b": 2}
        [head] = shell.dead_letters("--where", "key=a", "--where", "status=open")
        shown = json.loads(shell.run("dlq", "show", "shop:app", str(head["number"]), "--json"))
        assert (shown["reason"], json.loads(shown["data"])["data"]["number"]) == ("no such card", 1)
        assert "has no dead letter 999" in shell.run("dlq", "show", "shop:app", "999", code=1)
        assert len(shell.run("dlq", "export", "shop:app").splitlines()) == 4

        (shell.folder / "mended").touch()
        dry = json.loads(shell.run("dlq", "redrive", "shop:app", "--where", "key=a", "--dry-run", "--json"))
        assert (dry["requested"], dry["behind"], dry["dry_run"]) == (1, 1, True)
        assert len(shell.dead_letters()) == 4
        assert "2 handled, 0 failed again, 0 waiting" in shell.run("dlq", "redrive", "shop:app", "--where", "key=a")
        assert len(shell.dead_letters()) == 2
        assert "expected --handler or --where" in shell.run("dlq", "discard", "shop:app", "--yes", code=1)
        told = shell.run("dlq", "discard", "shop:app", "--where", "key=b")
        assert told == "1 dead letter would be discarded; kept, because they are behind another: 1; --yes discards\n"
        shell.run("dlq", "discard", "shop:app", "--where", "key=b", "--yes")
        shell.wait_for(lambda: shell.dead_letters() == [])
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


def test_a_handler_that_is_none_is_refused_unless_there_are_dead_letters_of_it(shell: Shell) -> None:
    shell.run("apply", "shop:app")
    shell.dead_letter("former", 1)
    ways = (["ls"], ["ls", "--json"], ["ls", "--by", "key"], ["export"], ["discard"], ["discard", "--yes"])
    for name in ("biling", "a.b", "*", ">", "a b", "totals"):
        for way, *more in ways:
            told = shell.run("dlq", way, "shop:app", *more, "--handler", name, code=1)
            assert told.startswith(f"handler {name!r}: app 'shop' has no such handler"), told
            assert told.endswith("it has billing, and projections for dead letters of projections"), told
    for name, count in (("billing", 0), ("projections", 0), ("former", 1)):
        assert len(shell.dead_letters("--handler", name)) == count
        both = [shell.run("dlq", "discard", "shop:app", "--handler", name, *yes) for yes in ([], ["--yes"])]
        if count:
            assert both == ["1 dead letter would be discarded; --yes discards\n", "1 dead letter discarded\n"]
        else:
            assert both == ["nothing to discard: no dead letter matches; `jetspark dlq ls` lists all\n"] * 2


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


def test_dead_letters_of_an_application_without_handlers_are_discarded(shell: Shell) -> None:
    (shell.folder / "projecting.py").write_text(PROJECTING)
    shell.run("apply", "projecting:app")
    for number in (1, 2):
        shell.dead_letter("projections", number, key=None)
    for more in ([], ["--handler", "projections"], ["--dry-run"]):
        told = shell.run("dlq", "redrive", "projecting:app", *more, code=1)
        assert told == (
            "redrive: app 'shop' has no handlers, so nothing would handle its dead letters; `jetspark dlq discard` "
            "gives them up"
        )
    assert "2 dead letters\n" in shell.run("dlq", "ls", "projecting:app")
    discard = ["dlq", "discard", "projecting:app", "--handler", "projections"]
    assert shell.run(*discard) == "2 dead letters would be discarded; --yes discards\n"
    assert shell.run(*discard, "--yes") == "2 dead letters discarded\n"
    assert shell.run("dlq", "ls", "projecting:app") == "there are no dead letters\n"
    sys.modules.pop("projecting", None)


def test_dead_letters_are_shown_whatever_is_in_them(shell: Shell) -> None:
    shell.run("apply", "shop:app")
    odd = StoredEvent(
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
            subject = dead_letter_subject("shop", "notes", each.key, each.origin)
            js.publish(subject, each.data, headers=each.to_headers())
    assert shell.run("dlq", "ls", "shop:app").splitlines() == [
        "NUMBER  STATUS  HANDLER  KEY   EVENT   REASON",
        r"1       open    notes    a\nb  SHOP:1  ValueError: \ud800 \x1b[31m red",
        r"2       open    notes    a\nb  SHOP:2  ValueError: \ud800 \x1b[31m red",
        "2 dead letters",
    ]
    assert shell.run("dlq", "ls", "shop:app", "--by", "key").split() == [
        "COUNT",
        "KEY",
        "2",
        r"a\nb",
        *["2", "dead", "letters"],
    ]
    assert r"subject: shop.\udcff" in shell.run("dlq", "show", "shop:app", "1")
    shown = json.loads(shell.run("dlq", "show", "shop:app", "1", "--json"))
    assert (shown["headers"], shown["data_base64"]) == ({"Shade": ["red", "blue"], "Half": "\udcff"}, "/w==")
    assert len(shell.run("dlq", "export", "shop:app").splitlines()) == 2


WAITING = """
from pathlib import Path
from jetspark.app import App, Retry
from shop import Paid

app = App("shop", stream="SHOP", subjects=["orders.>"])

@app.handler(Paid, durable="billing", retry=Retry(first_s=3600, in_lane_s=0, jitter=0))
async def bill(event: Paid) -> None:
    if event.number == 0 and not Path("mended").exists():
        raise ConnectionError("the bank is away, and what it says is long: " + "x" * 300)
    with open("done", "a") as file:
        file.write(f"{event.order_id}{event.number} ")
"""


@pytest.mark.slow
def test_retries_are_listed_tried_now_and_cancelled(shell: Shell) -> None:
    (shell.folder / "waiting.py").write_text(WAITING)
    app = "waiting:app"
    assert "`jetspark apply`" in shell.run("retry", "ls", app, code=1)
    shell.run("apply", app)
    assert shell.run("retry", "ls", app) == "no retries are scheduled\n"
    assert json.loads(shell.run("retry", "ls", app, "--json")) == []
    assert shell.run("dlq", "redrive", app) == "nothing to redrive: there are no dead letters\n"
    worker = shell.start("run", app, "--apply")
    try:
        url = shell.environment["JETSPARK_SERVERS"]
        subprocess.run([sys.executable, "publish.py", url], cwd=shell.folder, env=shell.environment, check=True)
        shell.wait_for(lambda: len(shell.dead_letters()) == 4)  # behind the two that wait
        rows = shell.run("retry", "ls", app).splitlines()
        assert rows[0].split() == ["DUE", "HANDLER", "KEY", "EVENT", "ATTEMPTS", "REASON"]
        assert [row.split()[1:5] for row in rows[1:3]] == [
            ["billing", key, f"SHOP:{n}", "1"] for n, key in ((1, "a"), (2, "b"))
        ]
        assert all("ConnectionError: the bank is away" in row and row.endswith("x…") for row in rows[1:3])
        assert rows[3:] == ["2 retries"]
        [one] = json.loads(shell.run("retry", "ls", app, "--json", "--where", "key=a"))
        assert (one["sequence"], one["attempts"], one["error"], one["cancelled"]) == (1, 1, "ConnectionError", False)
        # Nothing to redrive: all that is there waits for a retry, and the commands say so.
        told = shell.run("dlq", "redrive", app, "--where", "key=a")
        assert re.fullmatch(
            r"nothing to redrive: 2 dead letters wait behind an earlier event of their key and follow it; "
            r"1 retry is scheduled, the first for \S+Z \(`jetspark retry ls`; .*\)\n",
            told,
        ), told
        assert "nothing to discard: 2 dead letters wait behind" in shell.run("dlq", "discard", app, "--where", "key=a")
        assert "with one of error, fingerprint, key, sequence, subject" in shell.run(
            "retry", "now", app, "--where", "status=open", code=1
        )
        assert "key is given twice" in shell.run("retry", "now", app, "--where", "key=a", "--where", "key=b", code=1)
        assert "no scheduled retry matches; `jetspark retry ls` lists all" in shell.run(
            "retry", "now", app, "--where", "key=c"
        )
        told = shell.run("retry", "cancel", app, "--where", "key=b")
        assert told == "1 retry would be cancelled and become dead letters; --yes cancels\n"
        assert "expected --handler or --where" in shell.run("retry", "cancel", app, "--yes", code=1)
        told = shell.run("retry", "cancel", app, "--where", "key=b", "--yes")
        assert told.startswith("1 retry cancelled; a worker writes the dead letters")
        shell.wait_for(lambda: len(shell.dead_letters("--where", "status=open")) == 1)
        (shell.folder / "mended").touch()
        assert shell.run("retry", "now", app) == "1 retry due now\n"
        shell.wait_for(lambda: len(shell.done()) == 3)
        told = shell.run("retry", "ls", app)
        assert told == "no retries are scheduled; 3 dead letters (`jetspark dlq ls`)\n"
        assert "3 handled, 0 failed again, 0 waiting" in shell.run("dlq", "redrive", app)
    finally:
        worker.kill()
        worker.wait()
        sys.modules.pop("waiting", None)
    assert shell.done() == ["a0", "a1", "a2", "b0", "b1", "b2"]
