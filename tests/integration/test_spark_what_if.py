"""What another version of a workflow would have decided, on Spark: what the live engine says, for real history."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import fulfilment as shop
from support.apps import until
from support.archive_ranges import archive_stream
from support.brief_shop import PAYMENT_S, app
from support.fulfilment import Paid, Placed
from typer.testing import CliRunner

from jetspark.blocking import JetStream
from jetspark.cli.commands import app as cli
from jetspark.server import NatsServer

pytest.importorskip("pyspark")
pytest.importorskip("pandas")

from jetspark.spark import what_if

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest_plugins = ["support.sparks"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

RUNS = 30
SAME = Path(shop.__file__).read_text().replace("PAYMENT_S = 1800.0", f"PAYMENT_S = {PAYMENT_S}")


async def live_through(url: str) -> None:
    """Two of three orders are paid at once, the third never: it is reminded of, and given up."""
    await app.apply(url)
    workers = asyncio.create_task(app.run(url))
    try:
        async with app.connect(url) as client:
            for number in range(RUNS):
                await client.publish(Placed(order_id=f"o-{number:02}"))
                if number % 3:
                    await client.publish(Paid(order_id=f"o-{number:02}"))

            async def all_have_ended() -> bool:
                return (
                    len([run async for run in client.workflow("fulfilment").list() if run.status != "running"]) == RUNS
                )

            await until(all_have_ended, 120)
    finally:
        workers.cancel()
        await asyncio.wait([workers])


def test_spark_lists_what_the_live_engine_lists_and_nothing_for_the_same_code(
    spark: SparkSession, server: NatsServer, js: JetStream, tmp_path: Path
) -> None:
    asyncio.run(live_through(server.url))
    before = js.stream(app.stream).info().state.last_sequence
    where = ["what-if", "support.brief_shop:app", "fulfilment", "--servers", server.url, "--json"]

    def ask(text: str, *more: str) -> dict[str, Any]:
        """By both engines, which say the same."""
        (tmp_path / "new.py").write_text(text)
        answers: list[dict[str, Any]] = []
        for engine in ("live", "spark"):
            result = CliRunner().invoke(cli, [*where, "--code", str(tmp_path / "new.py"), "--engine", engine, *more])
            assert result.exit_code in (0, 3), (result.output, result.exception)
            answers.append(json.loads(result.stdout))
            assert (result.exit_code == 3) == bool(answers[-1]["different"])
        assert answers[0] == answers[1]
        return answers[0]

    same = ask(SAME)
    assert (same["runs"], same["equal"], same["runs_that_differ"]) == (RUNS, RUNS, [])
    planted = ask(
        SAME.replace('Flow("shipped")', 'Flow("sent")').replace("state.reminders == 0", "state.reminders == 9")
    )
    paid = [f"o-{number:02}" for number in range(RUNS) if number % 3]
    assert [run["key"] for run in planted["runs_that_differ"]] == [f"o-{number:02}" for number in range(RUNS)]
    for run in planted["runs_that_differ"]:
        kinds = [step["kinds"] for step in run["differences"]]
        given_up = [["end", "events", "state", "timers"], ["end", "events"]]
        assert kinds == ([["state"]] if run["key"] in paid else given_up), run
    shorter = SAME.replace(f"PAYMENT_S = {PAYMENT_S}", f"PAYMENT_S = {PAYMENT_S / 2}")
    diverging = ask(shorter, "--key", "o-00")
    assert (diverging["runs"], diverging["diverged"], diverging["by_kind"]) == (1, 1, {"diverged": 1, "timers": 1})
    frame = what_if(app, spark, server.url, workflow="fulfilment", code=tmp_path / "new.py")
    assert frame.where("diverged is not null").count() >= RUNS // 3
    assert js.stream(app.stream).info().state.last_sequence == before  # nothing was written


def test_a_what_if_compares_the_past_of_the_archive_on_both_engines(
    spark: SparkSession, server: NatsServer, js: JetStream, tmp_path: Path
) -> None:
    asyncio.run(live_through(server.url))
    lake = str(tmp_path / "lake")
    (tmp_path / "new.py").write_text(SAME.replace('Flow("shipped")', 'Flow("sent")'))

    def ask_both(*more: str) -> list[Any]:
        where = ["what-if", "support.brief_shop:app", "fulfilment", "--servers", server.url, "--json"]
        answers = []
        for engine in ("live", "spark"):
            words = [*where, "--code", str(tmp_path / "new.py"), "--engine", engine, *more]
            result = CliRunner().invoke(cli, words)
            assert result.exit_code in (0, 3), (result.output, result.exception)
            answers.append(json.loads(result.stdout))
        return answers

    stream = js.stream(app.stream)
    last = stream.info().state.last_sequence
    middle, end = str(last // 3), str(2 * last // 3)
    [before, _] = ask_both("--from-seq", middle, "--to-seq", end)
    archive_stream(js, lake, app.stream, until=last // 2, files=2)
    stream.purge(up_to_sequence=last // 2 - 1)
    assert ask_both("--from-seq", middle, "--to-seq", end, "--archive", lake) == [before, before]
    archive_stream(js, lake, app.stream)
    js.delete_stream(app.stream)
    assert ask_both("--from-seq", middle, "--to-seq", end, "--archive", lake) == [before, before]
