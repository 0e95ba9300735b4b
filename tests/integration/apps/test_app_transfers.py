"""Transfers between accounts that are entities, on a cluster, by programs that are killed, with servers that die.

The small version runs always. The large one has a thousand accounts::

    JETSPARK_MANY_TRANSFERS=20000 python -m pytest -s tests/integration/apps/test_app_transfers.py
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
from support.apps import until
from support.beside import beside
from support.cluster import create_on_new_cluster, kill_leader
from support.transfers import (
    BrokenBank,
    Seen,
    bank,
    check_bank,
    names,
    open_accounts,
    start_transfers,
    transfer,
    witness,
)

import jetspark
from jetspark import StreamConfig
from jetspark.app import App, AppClient
from jetspark.errors import JetSparkError
from jetspark.server import NatsCluster

MANY = int(os.environ.get("JETSPARK_MANY_TRANSFERS", "0"))
TRANSFERS, ACCOUNTS, WORKERS, KILL_AFTER = (MANY, 1000, 4, 200) if MANY else (40, 20, 2, 10)
TIMEOUT_S = 2400.0 if MANY else 120.0


async def balances(client: AppClient) -> dict[str, int]:
    return {each.key: each.state.cents async for each in client.entities("accounts").list()}


class Trouble:
    """Programs that are killed and replaced, leaders that step down, and nodes that are killed."""

    def __init__(self, cluster: NatsCluster, app: App, folder: Path) -> None:
        self._cluster, self._app, self._folder = cluster, app, folder
        self.urls = [node.url for node in cluster.nodes]
        self._programs: list[tuple[BaseProcess, Path]] = []
        """With the files in which they write down what was acknowledged."""
        self._killing: asyncio.Task[None] | None = None
        """Kills a node, and ends when it is back."""
        self.killed = self.elections = self.nodes = 0

    def _start_program(self) -> None:
        path = self._folder / f"p{self.killed}-{len(self._programs)}.txt"
        process = start_transfers(self.urls, path.stem, path, ACCOUNTS, replicas=3)
        self._programs.append((process, path))

    @contextlib.asynccontextmanager
    async def going_on(self) -> AsyncIterator[Trouble]:
        for _ in range(WORKERS):
            self._start_program()
        async with jetspark.connect(self.urls) as nc:
            stream = await nc.jetstream().stream(self._app.stream)
            try:
                async with beside(self._kill_programs(), self._change_leaders(stream)):
                    yield self
            finally:
                for process, _ in self._programs:
                    process.kill()
                    process.join()
                if self._killing is not None:
                    await self._killing

    async def _kill_programs(self) -> None:
        while True:
            process, path = self._programs[0]
            await until(lambda path=path: _lines(path) >= KILL_AFTER)  # type: ignore[misc]
            process.kill()
            process.join()
            self._programs.pop(0)
            self.killed += 1
            self._start_program()

    async def _change_leaders(self, stream: jetspark.Stream) -> None:
        while True:
            for _ in range(3 if MANY else 1):
                await asyncio.sleep(1.0)
                with contextlib.suppress(JetSparkError):
                    await stream.step_down()
                    self.elections += 1
            if MANY or not self.nodes:
                self._killing = asyncio.create_task(kill_leader(self._cluster, stream))
                await asyncio.shield(self._killing)
                self.nodes += 1

    @property
    def is_over(self) -> bool:
        """Every kind of trouble has been."""
        return bool(self.killed and self.elections and self.nodes)

    def acknowledged(self) -> list[str]:
        return [line for path in self._folder.glob("p*.txt") for line in path.read_text().splitlines()]


def _lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.slow
@pytest.mark.timeout(3000 if MANY else 300)
async def test_transfers_keep_the_sum_at_every_sequence_whatever_dies(tmp_path: Path) -> None:
    began = time.monotonic()
    with NatsCluster(3) as cluster:
        app = bank(replicas=3)
        urls = [node.url for node in cluster.nodes]
        async with jetspark.connect(urls) as nc:
            await create_on_new_cluster(nc.jetstream(), StreamConfig(name="WARM", replicas=3))
        await app.apply(urls)
        async with app.connect(urls) as client, witness(client) as seen:
            await open_accounts(client, names(ACCOUNTS))
            trouble = Trouble(cluster, app, tmp_path)
            async with trouble.going_on():
                await until(lambda: trouble.is_over and len(trouble.acknowledged()) >= TRANSFERS, timeout=TIMEOUT_S)
            await asyncio.sleep(0.5)  # what a program had sent before it was killed is stored by now, or never
            final = await balances(client)
        checked = check_bank(seen, final)
        async with app.connect(urls) as client:
            found = await client.entities("accounts").reconcile()
    acknowledged = trouble.acknowledged()
    print(
        f"\n{len(checked.transfers)} transfers between {ACCOUNTS} accounts in {checked.batches} batches and "
        f"{time.monotonic() - began:.0f} s, {trouble.killed} programs and {trouble.nodes} nodes killed, "
        f"{trouble.elections} leaders changed: the sum is {sum(final.values())} at the end of every batch, "
        f"{checked.states} states fit their events, {len(acknowledged)} were acknowledged and none of them is missing"
    )
    assert len(set(acknowledged)) == len(acknowledged)
    assert set(acknowledged) <= checked.transfers
    assert (found.is_equal, found.keys) == (True, ACCOUNTS)


@pytest.fixture
async def good_run(nats_url: str) -> tuple[dict[int, Seen], dict[str, int]]:
    """What a small bank has stored, with all its states."""
    app = bank()
    await app.apply(nats_url)
    async with app.connect(nats_url) as client, witness(client) as seen:
        await open_accounts(client, names(3))
        for number in range(4):
            assert await transfer(client, f"a{number % 3}", f"a{(number + 1) % 3}", 10 + number, f"t{number}")
            await asyncio.sleep(0.05)  # so that the witness sees the states
        return dict(seen), await balances(client)


def without(seen: dict[int, Seen], subject: str, number: int) -> dict[int, Seen]:
    found = [sequence for sequence in sorted(seen) if seen[sequence].subject.endswith(subject)]
    return {sequence: each for sequence, each in seen.items() if sequence != found[number]}


def changed(seen: dict[int, Seen], subject: str, old: bytes, new: bytes) -> dict[int, Seen]:
    sequence = next(n for n in sorted(seen) if seen[n].subject.endswith(subject) and old in seen[n].data)
    return seen | {sequence: seen[sequence]._replace(data=seen[sequence].data.replace(old, new))}


async def test_the_check_of_transfers_rejects_what_is_broken(good_run: tuple[dict[int, Seen], dict[str, int]]) -> None:
    seen, final = good_run
    checked = check_bank(seen, final)
    assert (checked.transfers, checked.states) == ({"t0", "t1", "t2", "t3"}, 3 + 8)
    moved = [each for each in seen.values() if each.subject.endswith("moved")]
    broken = {
        "the sum is": without(seen, "moved", 2),
        "had 90, and the event says": changed(seen, "a0.moved", b'"balance":102', b'"balance":103'),
        "is not what its event says": changed(seen, "$KV.bank.accounts.a1", b"110", b"111"),
        "states without an event": seen | {10_000: Seen(10_000, "$KV.bank.accounts.a1", b'{"cents":5}', "", True)},
        "has 2 halves": seen | {moved[0].sequence: moved[0]._replace(batch="another")},
    }
    for words, wrong in broken.items():
        with pytest.raises(BrokenBank, match=words):
            check_bank(wrong, final)
    with pytest.raises(BrokenBank, match=r"not what their events make: \['a2'\]"):
        check_bank(seen, final | {"a2": 1})
