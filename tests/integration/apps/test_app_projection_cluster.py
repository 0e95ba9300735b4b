"""Live projections on three nodes, whose leaders die."""

from __future__ import annotations

import asyncio
import random

import pytest
from support.apps import running, until
from support.cluster import apply_on_new_cluster, kill_leader
from support.projections import Balances, Closed, Moved, Opened, some_events

import jetspark
from jetspark import StreamConfig
from jetspark.app import App, LiveOptions
from jetspark.app.replay import verify
from jetspark.errors import JetSparkError
from jetspark.server import NatsCluster


def bank() -> App:
    app = App("bank", stream=StreamConfig(name="BANK", subjects=["bank.>"], replicas=3))
    app.projection("balances", events=[Opened, Moved, Closed], bucket="balances")(Balances)
    return app


@pytest.mark.slow
async def test_a_fold_under_changes_of_leaders_is_the_fold_of_its_history() -> None:
    app = bank()
    with NatsCluster(3) as cluster:
        urls = [node.url for node in cluster.nodes]
        await apply_on_new_cluster(app, urls)
        async with (
            jetspark.connect(urls, reconnect_wait_s=0.05) as client,
            running(app, urls, live=LiveOptions(lease_s=2.0)),
            app.connect(urls) as publisher,
        ):
            js = client.jetstream(timeout=10.0)
            for name in ("KV_bank_projections", "KV_balances"):
                assert (await (await js.stream(name)).info()).config.replicas == 3
            sent = asyncio.create_task(publish_all(publisher))
            view = publisher.view("balances")

            async def has_folded(sequence: int) -> bool:
                try:
                    return (await view.position()).sequence >= sequence
                except JetSparkError:
                    return False

            await until(
                lambda: has_folded(1)
            )  # a worker that cannot start is another matter: whoever runs it sees that
            for name in ("BANK", "KV_balances", "KV_balances"):
                await kill_leader(cluster, await js.stream(name))
            await sent
            last = (await (await js.stream("BANK")).info()).state.last_sequence
            await until(lambda: has_folded(last))
            found = await verify(js, app, "balances")
        assert found.is_equal, found.differences
        assert found.boundary == last
        assert last >= 3000


async def publish_all(publisher: jetspark.app.AppClient) -> None:
    rng = random.Random(1)
    for begin in range(0, 3000, 100):
        for number, event in enumerate(some_events(rng, 100, accounts=50)):
            while True:
                try:
                    await publisher.publish(event, id=f"e{begin + number}", timeout=5.0)
                    break
                except JetSparkError as error:
                    if not error.may_pass:
                        raise
                    await asyncio.sleep(0.1)
