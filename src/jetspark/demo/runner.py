"""Runs the stages in order, and removes everything at the end."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from jetspark.demo.environment import DemoEnvironment, open_environment, remove_all
from jetspark.demo.live_stages import compare, fold_live, list_and_redrive, publish, replay_range
from jetspark.demo.rebuild_stage import rebuild_beside_traffic
from jetspark.demo.screen import Screen
from jetspark.demo.shop import RELEASE_1, RELEASE_2, Shop, load_shop
from jetspark.demo.spark_fold import fold_on_spark
from jetspark.demo.stages import Demo
from jetspark.errors import JetSparkError

__all__ = ["DemoOptions", "run_demo"]

# How long a signal that ended another process of the demo takes at the most to reach this one.
SIGNAL_S = 0.1
STAGES = (publish, fold_on_spark, fold_live, compare, replay_range, rebuild_beside_traffic, list_and_redrive)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """The options of the command line."""

    events: int = 500_000
    servers: str | None = None
    """Servers to use instead of starting one."""
    is_kept: bool = False
    """Keep everything running until Enter is pressed, and show commands to inspect it."""
    is_removal: bool = False
    """Only remove the streams and buckets that a killed demo left on ``servers``."""


def run_demo(options: DemoOptions, screen: Screen | None = None) -> int:
    """Run the demo; returns the exit code: 0, 1 if a stage or a check failed, 128 plus the number of a signal."""
    return asyncio.run(_with_signals(options, screen or Screen()))


async def _with_signals(options: DemoOptions, screen: Screen) -> int:
    """End in order on Ctrl-C, SIGTERM or a closed terminal; further signals are ignored."""
    received: list[signal.Signals] = []
    work = asyncio.create_task(_run(options, screen))

    def end(number: signal.Signals) -> None:
        if not received:
            work.cancel()
        received.append(number)

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, number)
    try:
        return await work
    except asyncio.CancelledError:
        return _interrupted(screen, received)
    except Exception as error:
        # A terminal signals every process of the demo. The end of one of them may be noticed before the signal is.
        await asyncio.sleep(SIGNAL_S)
        if received:
            return _interrupted(screen, received)
        if not isinstance(error, JetSparkError | TimeoutError | OSError):
            raise
        reason = str(error) or type(error).__name__
        if not screen.stage_name:  # no server, or one that must not be used: the error has the remedy
            screen.line(reason, style="red")
            return 1
        screen.line(f"stage {screen.stage_name!r} failed: {reason}", style="red")
        screen.line("Nothing is left behind. If the machine is busy, try --events 50000.")
        return 1


def _interrupted(screen: Screen, received: list[signal.Signals]) -> int:
    with suppress(OSError):  # the terminal may be closed
        screen.line("interrupted")
    return 128 + (received[0] if received else signal.SIGINT)


async def _run(options: DemoOptions, screen: Screen) -> int:
    shop = load_shop()
    if options.is_removal:
        return await _remove(options, screen, shop)
    began = time.perf_counter()
    async with _opened(options, screen, shop) as demo:
        screen.line(f"{options.events:,} events through {RELEASE_1}, on {demo.environment.url}")
        with screen.bars():
            for stage in STAGES:
                await stage(demo)
        screen.table()
        screen.line(f"\n{time.perf_counter() - began:.1f} s in all; {_verdict(screen)}")
        _show_commands(options, screen, shop, demo.environment)
        if options.is_kept:
            await _until_enter(screen)
    return 0 if screen.is_good else 1


def _verdict(screen: Screen) -> str:
    wrong = [finding.what for finding in screen.findings if finding.is_good is False]
    if not wrong:
        return f"{sum(bool(finding.is_good) for finding in screen.findings)} checks, all passed."
    return f"failed: {', '.join(wrong)}. Please report it, with the table above."


@asynccontextmanager
async def _opened(options: DemoOptions, screen: Screen, shop: Shop) -> AsyncIterator[Demo]:
    with tempfile.TemporaryDirectory(prefix="jetspark-demo-", ignore_cleanup_errors=True) as folder:
        async with open_environment(shop.release1, options.servers) as environment, AsyncExitStack() as stack:
            yield Demo(
                screen=screen,
                shop=shop,
                environment=environment,
                folder=Path(folder),
                stack=stack,
                count=options.events,
                tally=shop.traffic.Tally(),
            )


async def _remove(options: DemoOptions, screen: Screen, shop: Shop) -> int:
    from jetspark.aio.connector import connect

    assert options.servers is not None
    async with connect(options.servers) as client:
        names = await remove_all(client.jetstream(), shop.release1)
    screen.line(f"removed {', '.join(names)}" if names else "there was nothing to remove")
    return 0


# ---- suggested commands ----------------------------------------------------------------------------------------------


def _show_commands(options: DemoOptions, screen: Screen, shop: Shop, environment: DemoEnvironment) -> None:
    jetspark = _command()
    # Set once, so that the commands below are short enough for a line of a terminal.
    here = f"export PYTHONPATH={shlex.quote(_short(shop.folder))}"
    if options.is_kept:
        commands = [
            (f"{here} JETSPARK_SERVERS={shlex.quote(environment.url)}", "where the application and the server are"),
            (f"{jetspark} verify {RELEASE_2} daily_revenue", "compare the state with a fresh fold of history"),
            (f"{jetspark} dlq ls {RELEASE_2} --by error", "show why events became dead letters"),
            (f"{jetspark} dlq redrive {RELEASE_2} --handler refunds", "have release 2 do all of the refunds"),
        ]
        screen.commands("The server and release 2 still run. Try, in another terminal:", commands)
        return
    commands = [
        (f"{jetspark} demo --keep", "the same, and keep the data until you press Enter"),
        (here, "where the application is"),
        (f"{jetspark} check {RELEASE_1}", "look for mistakes in an application"),
        (f"{jetspark} schema asyncapi {RELEASE_1}", "its contracts, for others to read"),
    ]
    screen.commands(f"The application is {_short(shop.folder / 'orders' / 'app.py')}. Try next:", commands)


def _command() -> str:
    """The shell command that runs this installation from the current folder."""
    script = Path(sys.executable).parent / "jetspark"
    return shlex.quote(_short(script)) if script.exists() else f"{shlex.quote(sys.executable)} -m jetspark"


def _short(path: Path) -> str:
    """The path relative to the current folder if it is inside, else absolute."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


async def _until_enter(screen: Screen) -> None:
    screen.line("\nPress Enter to end everything.")
    pressed = asyncio.Event()
    loop = asyncio.get_running_loop()
    try:
        loop.add_reader(sys.stdin.fileno(), pressed.set)
    except (OSError, ValueError):
        return  # stdin is a file or closed: there is no Enter to wait for
    try:
        await pressed.wait()
        os.read(sys.stdin.fileno(), 4096)
    finally:
        loop.remove_reader(sys.stdin.fileno())
