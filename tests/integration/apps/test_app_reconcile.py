"""``jetspark reconcile`` on a real server: what differs between states and events is found, and repaired."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.apps import until
from support.transfers import Account, Balances, Corrected, Moved, Opened, bank, names, open_accounts, transfer
from typer.testing import CliRunner

from jetspark.app import App, AppClient
from jetspark.app.entities.reconciliation import _Reconciling
from jetspark.cli import commands
from jetspark.errors import ConfigError, DataLoss, JetSparkError

# Why a state or an event is there alone, and how that is called.
PLANTED = {"a0": "value", "a1": "missing", "new": "missing", "stray": "extra", "torn": "unreadable"}


async def plant(client: AppClient) -> None:
    """Differences of each kind, as others make them: by writing the bucket, or an event, alone."""
    kv = await client.js.kv("bank")
    await kv.put("accounts.a0", b'{"cents": 77}')
    await kv.delete("accounts.a1")
    await client.publish(Opened(account="new", cents=5, balance=5))
    await kv.put("accounts.stray", b'{"cents":9}')
    await client.publish(Opened(account="torn", cents=6, balance=6))
    await kv.put("accounts.torn", b"no json")


@asynccontextmanager
async def open_bank(url: str, truth: str) -> AsyncIterator[tuple[App, AppClient]]:
    app = bank(truth)
    await app.apply(url)
    async with app.connect(url) as client:
        await open_accounts(client, names(6))
        assert await transfer(client, "a0", "a2", 30, "t1")
        # As many others do, and have to be told apart: fields in another order are the same state.
        await (await client.js.kv("bank")).put("accounts.a5", b' { "cents" : 100 } ')
        yield app, client


async def states(client: AppClient) -> dict[str, int]:
    return {each.key: each.state.cents async for each in client.entities("accounts").list()}


async def test_where_events_are_the_truth_states_are_made_anew(nats_url: str) -> None:
    async with open_bank(nats_url, "events") as (_, client):
        accounts = client.entities("accounts")
        assert (await accounts.reconcile()).is_equal
        await plant(client)
        events = (await client.js.stream("KV_bank")).info(subjects_filter="accounts.>")
        before = sum(((await events).state.subjects or {}).values())
        planned = await accounts.reconcile(repair=True, dry_run=True)
        assert {each.key: each.kind for each in planned.differences} == PLANTED
        assert {each.outcome for each in planned.differences} == {"would repair"}
        found = await accounts.reconcile()
        assert {each.key: each.kind for each in found.differences} == PLANTED
        assert (found.is_equal, found.keys, {each.outcome for each in found.differences}) == (False, 9, {"found"})
        repaired = await accounts.reconcile(repair=True)
        assert {each.key: each.outcome for each in repaired.differences} == dict.fromkeys(PLANTED, "repaired")
        assert repaired.is_equal
        again = await accounts.reconcile(repair=True)
        assert (again.is_equal, again.differences) == (True, [])
        expected = {"a0": 70, "a1": 100, "a2": 130, "a3": 100, "a4": 100, "a5": 100, "new": 5, "torn": 6}
        assert await states(client) == expected
        info = await (await client.js.stream("KV_bank")).info(subjects_filter="accounts.>")
        assert sum((info.state.subjects or {}).values()) == before, "events are what they were"
        assert await transfer(client, "a0", "new", 70, "t2")
        assert (await accounts.reconcile()).is_equal


async def test_states_in_a_stream_of_another_name_are_repaired_as_well(nats_url: str) -> None:
    app = App("bank", stream="BANK", subjects=["accounts.>"])
    app.entities("accounts", state=Account, truth="events", events=[Opened, Moved, Corrected], fold=Balances)
    await app.apply(nats_url)
    async with app.connect(nats_url) as client:
        accounts = client.entities("accounts")
        await open_accounts(client, names(3))
        assert (await accounts.reconcile()).is_equal
        await client.js.publish(accounts.subject_of("a1"), b'{"cents":7}', headers={"Nats-Rollup": "sub"})
        repaired = await accounts.reconcile(repair=True)
        assert [(each.key, each.kind, each.outcome) for each in repaired.differences] == [("a1", "value", "repaired")]
        assert await states(client) == {"a0": 100, "a1": 100, "a2": 100}


async def test_where_the_state_is_the_truth_events_are_corrected(nats_url: str) -> None:
    async with open_bank(nats_url, "state") as (app, client):
        accounts = client.entities("accounts")
        await plant(client)
        repaired = await accounts.reconcile(repair=True)
        outcomes = {each.key: each.outcome for each in repaired.differences}
        assert outcomes == dict.fromkeys(PLANTED, "repaired") | {
            # There is no state that events could lead to; and Balances cannot delete an account.
            "torn": "not repairable",
            "a1": "not repairable",
            "new": "not repairable",
        }
        assert not repaired.is_equal
        notes = {each.key: each.note for each in repaired.differences}
        assert "is no" in notes["torn"]
        assert "and not to the state nothing" in notes["a1"]
        assert notes["a0"] == f"events {Corrected(account='a0', cents=7, balance=77)!r}"
        stream = await client.js.stream(app.stream)
        last = await stream.get_message(last_for="accounts.a0.corrected", direct=False)
        state = await stream.get_message(last_for="$KV.bank.accounts.a0", direct=False)
        assert (last.sequence, last.headers["Nats-Batch-Id"]) == (state.sequence + 1, state.headers["Nats-Batch-Id"])
        async with accounts.change("a1") as change:
            change.set(Account(100))
        async with accounts.change("new") as change:
            change.set(Account(5))
        await (await client.js.kv("bank")).delete("accounts.torn")
        left = await accounts.reconcile(keys=["a0", "a1", "new", "stray"])
        assert (left.is_equal, left.keys) == (True, 4)
        assert [each.key for each in (await accounts.reconcile()).differences] == ["torn"]


async def test_changes_go_on_and_are_neither_reported_nor_overwritten(nats_url: str) -> None:
    """Transfers all the time between the accounts that are compared, and repaired; the sum stays the same."""
    async with open_bank(nats_url, "events") as (_, client):
        accounts, is_over, made = client.entities("accounts"), asyncio.Event(), 0

        async def go_on(first: int) -> None:
            nonlocal made
            while not is_over.is_set():
                source, target = f"a{(made + first) % 5}", f"a{(made + first + 1 + made % 4) % 5}"
                if source != target:
                    await transfer(client, source, target, 1, f"live-{first}-{made}")
                made += 1
                await asyncio.sleep(0.002)

        tasks = [asyncio.create_task(go_on(number)) for number in range(3)]
        try:
            for round in range(4):
                for _ in range(3):
                    found = await accounts.reconcile(repair=True)
                    assert found.differences == [], "nothing differs"
                    assert found.moving == []
                kv, key = await client.js.kv("bank"), f"accounts.a{round}"
                # Nobody is told: the next transfer goes on with it, and so the state differs by as much.
                entry = await kv.get(key)
                wrong = json.dumps({"cents": json.loads(entry.value)["cents"] + 1000})
                try:
                    await kv.update(key, wrong.encode(), revision=entry.revision)
                except JetSparkError:
                    continue
                seen = [each async for each in _until_repaired(accounts)]
                assert {each.key for found in seen for each in found.differences} == {f"a{round}"}
        finally:
            is_over.set()
            await asyncio.gather(*tasks)
        assert made > 20
        assert (await accounts.reconcile()).is_equal
        assert sum((await states(client)).values()) == 600


async def test_an_entity_that_changes_between_two_looks_is_looked_at_again(
    nats_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_bank(nats_url, "events") as (_, client):
        looks, current = 0, _Reconciling._current

        async def look_and_change(self: Any, tokens: Any) -> Any:
            nonlocal looks
            looks += 1
            found = await current(self, tokens)
            if looks <= 4:
                assert await transfer(client, "a3", "a4", 1, f"between-{looks}")
            return found

        monkeypatch.setattr(_Reconciling, "_differs", lambda self, token: True)
        monkeypatch.setattr(_Reconciling, "_current", look_and_change)
        found = await client.entities("accounts").reconcile()
        assert (found.differences, found.moving) == ([], [])
        assert looks >= 4
        assert sum((await states(client)).values()) == 600


@pytest.mark.parametrize("truth", ["events", "state"])
async def test_a_repair_that_is_overtaken_overwrites_nothing(
    nats_url: str, monkeypatch: pytest.MonkeyPatch, truth: str
) -> None:
    async with open_bank(nats_url, truth) as (_, client):
        await (await client.js.kv("bank")).put("accounts.a0", b'{"cents":1000}')
        repairs, repair = 0, _Reconciling._repair

        async def be_overtaken(self: Any, *arguments: Any) -> None:
            nonlocal repairs
            repairs += 1
            if repairs == 1:
                assert await transfer(client, "a0", "a1", 1, "meanwhile")
            await repair(self, *arguments)

        monkeypatch.setattr(_Reconciling, "_repair", be_overtaken)
        accounts = client.entities("accounts")
        found = await accounts.reconcile(repair=True)
        assert [(each.key, each.outcome) for each in found.differences] == [("a0", "repaired")]
        assert repairs == 2
        again = await accounts.reconcile(repair=True)
        assert (again.is_equal, again.differences) == (True, [])
        expected = (69, 101) if truth == "events" else (999, 101)
        assert (await accounts.get("a0"), await accounts.get("a1")) == tuple(map(Account, expected))


async def test_a_boundary_is_not_inside_of_a_batch(nats_url: str) -> None:
    async with open_bank(nats_url, "events") as (_, client):
        # As a message in the middle of a batch looks; without an id it is none.
        half = client.encode(Opened(account="a9", cents=1, balance=1))
        stored = await client.js.publish(half.subject, half.data, headers={"Nats-Batch-Sequence": "1"})
        async with asyncio.TaskGroup() as group:
            reconciling = group.create_task(client.entities("accounts").reconcile())
            await asyncio.sleep(0.3)
            assert not reconciling.done()
            whole = await client.publish(Moved(account="a9", cents=1, balance=2, transfer="x"))
        assert reconciling.result().boundary == whole.sequence == stored.sequence + 1


async def _until_repaired(accounts: Any) -> AsyncIterator[Any]:
    for _ in range(20):
        found = await accounts.reconcile(repair=True)
        yield found
        if found.is_equal:
            return
    raise AssertionError("it was not repaired")


async def test_what_cannot_be_compared_is_said(nats_url: str) -> None:
    app = App("bank", stream="KV_bank", subjects=["accounts.>"])
    events = [Opened, Moved, Corrected]
    app.entities("accounts", state=Account, truth="events", events=events, fold=Balances)
    app.entities("notes", state=Account)
    await app.apply(nats_url)
    async with app.connect(nats_url) as client:
        with pytest.raises(ConfigError, match="declare events= and fold="):
            await client.entities("notes").reconcile()
        assert (await client.entities("accounts").reconcile()).keys == 0
        # An application cannot declare such a limit, so somebody else sets it.
        config = (await (await client.js.stream("KV_bank")).info()).config
        await client.js.update_stream(replace(config, max_messages=3))
        await open_accounts(client, names(3))
        with pytest.raises(DataLoss, match="drops old messages by its limits"):
            await client.entities("accounts").reconcile(repair=True)


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(commands.app, list(arguments))
    assert done.exit_code == code, f"{done.output} {done.exception!r}"
    return done.output


MODULE = """
from support.transfers import bank
app = bank("events")
"""


async def test_the_command_finds_and_repairs_also_after_it_was_killed(
    nats_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "till_bank.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("JETSPARK_SERVERS", nats_url)
    many = 300
    async with open_bank(nats_url, "events") as (_, client):
        kv = await client.js.kv("bank")
        for number in range(many):
            await client.publish(Opened(account=f"n{number}", cents=1, balance=1))
        command = [sys.executable, "-m", "jetspark.cli.main", "reconcile", "till_bank:app", "accounts", "--repair"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        process = await asyncio.to_thread(subprocess.Popen, command, env=environment, stdout=subprocess.DEVNULL)

        async def is_at_it() -> bool:
            return bool(await kv.snapshot(["accounts.n0"]))

        await until(is_at_it)
        process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(process.wait)
        found = await asyncio.to_thread(run, "reconcile", "till_bank:app", "--json", code=3)
        [result] = json.loads(found)
        assert 0 < len(result["differences"]) < many, "it was killed in the middle"
        left = result["differences"][0]["key"]  # keys are repaired in no order of theirs
        text = await asyncio.to_thread(run, "reconcile", "till_bank:app", "accounts", "--key", left, code=3)
        assert "(the events are the truth): 1 keys" in text
        assert f'{left}: missing: state None, and its events make {{"cents":1}}: found' in text
        text = await asyncio.to_thread(run, "reconcile", "till_bank:app", "--repair", "--dry-run", code=3)
        assert 'would repair: state {"cents":1}' in text
        text = await asyncio.to_thread(run, "reconcile", "till_bank:app", "--repair")
        assert f"{len(result['differences'])} repaired" in text
        assert "equal to their events" in await asyncio.to_thread(run, "reconcile", "till_bank:app")
        assert sum((await states(client)).values()) == 600 + many
