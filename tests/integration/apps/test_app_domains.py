"""An application whose JetStream is in a domain of its own: the connection says which, and the nats context may."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.apps import until
from support.servers import domain_config
from typer.testing import CliRunner

import jetspark
from jetspark.app import App, Context, Event, Reject
from jetspark.cli import commands
from jetspark.errors import ConfigError, JetStreamUnavailable
from jetspark.server import NatsServer

APP = """
from jetspark.app import App
app = App("shop", stream="SHOP", subjects=["shop.>"])
"""


class Paid(Event, type="order.paid", key="order_id", subject="orders.{order_id}.paid"):
    order_id: str
    number: int


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server whose JetStream is the domain ``hub``, which it answers for beside its own prefix."""
    folder = tmp_path_factory.mktemp("domains")
    with NatsServer(jetstream=False, extra_config=domain_config("hub", folder / "hub")) as server:
        yield server


async def test_an_application_runs_in_the_domain_of_its_connection(hub: NatsServer) -> None:
    app = App("hub-shop", stream="ORDERS", subjects=["orders.>"])
    done: list[str] = []

    @app.handler(Paid, durable="billing", ack_wait_s=5.0)
    async def bill(event: Paid, ctx: Context) -> None:
        if event.number == 1:
            raise Reject("no such card")
        await ctx.once("charge", _charge, event.order_id)
        done.append(event.order_id)

    with pytest.raises(JetStreamUnavailable, match=r"\$JS\.other\.API"):
        await app.apply(hub.url, jetstream_domain="other")
    await app.apply(hub.url, jetstream_domain="hub")
    workers = asyncio.create_task(app.run(hub.url, jetstream_domain="hub"))
    async with app.connect(hub.url, jetstream_domain="hub") as shop:
        await shop.publish(Paid(order_id="a", number=0))
        await shop.publish(Paid(order_id="b", number=1))
        await shop.publish(Paid(order_id="c", number=2))

        async def has_ended() -> bool:
            stream = await shop.js.stream(app.spec.dead_letter_stream)
            return sorted(done) == ["a", "c"] and (await stream.info()).state.messages > 0

        await until(has_ended)
    workers.cancel()
    await asyncio.wait([workers])


async def _charge(order_id: str, idempotency_key: str) -> str:
    return order_id


async def test_a_call_that_names_a_domain_or_a_prefix_has_that(hub: NatsServer) -> None:
    async with jetspark.connect(hub.url, jetstream_domain="other") as nc:
        assert (await nc.jetstream(domain="hub").account_info()).domain == "hub"
        assert (await nc.jetstream(prefix="$JS.API").account_info()).domain == "hub"
        with pytest.raises(JetStreamUnavailable, match=r"\$JS\.other\.API"):
            await nc.jetstream().account_info()
    async with jetspark.connect(hub.url, jetstream_domain="a.b") as nc:
        with pytest.raises(ConfigError, match=r"domain='a\.b'"):
            nc.jetstream()


def test_commands_work_in_the_domain_of_the_nats_context(
    hub: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop_in_domain.py").write_text(APP, encoding="utf-8")
    (tmp_path / "nats" / "context").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("JETSPARK_SERVERS", raising=False)
    for name in ("hub", "other"):
        context = {"url": hub.url, "jetstream_domain": name}
        (tmp_path / "nats" / "context" / f"{name}.json").write_text(json.dumps(context), encoding="utf-8")
    monkeypatch.setenv("NATS_CONTEXT", "hub")
    assert CliRunner().invoke(commands.app, ["apply", "shop_in_domain:app"]).exit_code == 0
    monkeypatch.setenv("NATS_CONTEXT", "other")
    failed = CliRunner().invoke(commands.app, ["apply", "shop_in_domain:app"])
    assert isinstance(failed.exception, JetStreamUnavailable)
