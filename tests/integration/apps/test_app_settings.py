"""Settings and flags on a real server: defaults, deletes, changes while a program runs, and who did it."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import pytest
from support.apps import until

from jetspark.aio.jetstream import JetStream
from jetspark.app import App, Flag, FlagValue, Setting
from jetspark.app.settings import part_of
from jetspark.errors import ConfigError, Conflict, RequestTimeout
from jetspark.jetstream.kv import KVConfig
from jetspark.server import NatsServer


class Limits(msgspec.Struct, frozen=True):
    cents: int = 100


def shop() -> App:
    app = App("shop", stream="SHOP", subjects=["shop.>"])
    app.settings(
        "shop_settings",
        currency=Setting(str, "USD"),
        limits=Setting(Limits, Limits(), on_delete="keep"),
        checkout=Flag(),
    )
    return app


async def test_settings_follow_the_bucket_and_fall_back_to_what_is_declared(nats_url: str) -> None:
    app = shop()
    await app.apply(nats_url)
    async with app.connect(nats_url) as client, client.settings("shop_settings", scope="acme") as settings:
        assert (settings.get("currency"), settings.get("limits")) == ("USD", Limits(100))
        assert not settings.is_on("checkout", "ann")
        told: list[tuple[Any, Any]] = []
        settings.on_change("currency", lambda new, old: 1 // 0)
        settings.on_change("currency", lambda new, old: told.append((new, old)))
        revision = await settings.set("currency", "EUR", by="ann")
        await settings.set("limits", Limits(7), by="bob")
        await settings.set("checkout", FlagValue(True, rollout=40), by="bob")
        await until(lambda: settings.get("checkout").rollout == 40)
        assert (settings.get("currency"), settings.get("limits"), told) == ("EUR", Limits(7), [("EUR", "USD")])
        on = {unit for unit in range(1000) if settings.is_on("checkout", unit)}
        assert on == {unit for unit in range(1000) if part_of("checkout", unit) < 40}
        assert 300 < len(on) < 500
        assert not settings.is_on("checkout")
        with pytest.raises(Conflict):
            await settings.set("currency", "GBP", by="bob", revision=0)
        await settings.set("currency", "GBP", by="bob", revision=revision)
        for name, value in (("currency", 5), ("limits", {"cents": "many"})):
            with pytest.raises(ConfigError, match="expected a value of type"):
                await settings.set(name, value, by="ann")
        await settings.delete("limits", by="ann")
        await settings.delete("currency", by="ann")
        await until(lambda: settings.get("currency") == "USD")
        assert settings.get("limits") == Limits(7)
        assert [(each.value, each.is_deleted, each.by) for each in await settings.history("currency")] == [
            ("EUR", False, "ann"),
            ("GBP", False, "bob"),
            (None, True, "ann"),
        ]
        # A copy that begins now sees the same, and another tenant sees nothing of it.
        async with client.settings("shop_settings", scope="acme") as later, client.settings("shop_settings") as other:
            assert (later.get("currency"), later.get("limits")) == ("USD", Limits(7))
            assert later.is_on("checkout", min(on))
            assert other.get("limits") == Limits()
        # What another program writes may be anything.
        kv = await client.js.kv("shop_settings")
        await kv.put("acme.currency", b"{")
        await until(lambda: "currency" in settings.errors)
        assert settings.get("currency") == "USD"
        await kv.put("acme.unknown", b"{}")
        await kv.put("acme.currency", b'{"value":"CHF"}')
        await until(lambda: settings.get("currency") == "CHF")
        assert settings.errors == {}
        await kv.delete("acme.currency")
        await until(lambda: settings.get("currency") == "USD")


async def test_a_change_without_a_readable_name_is_refused_and_one_that_nobody_could_be_told_of(nats_url: str) -> None:
    app = shop()
    await app.apply(nats_url)
    async with app.connect(nats_url) as client, client.settings("shop_settings", scope="names") as settings:
        for by in ("", None, 7, b"ann", ["ann"], True):
            for change in (settings.set("currency", "EUR", by=by), settings.delete("currency", by=by)):  # type: ignore[arg-type]
                with pytest.raises(ConfigError, match=re.escape(f"by={by!r}: expected who does it")):
                    await change
        assert await settings.history("currency") == []
        for callback in (None, "print", asyncio.sleep):
            with pytest.raises(ConfigError, match="expected a plain function"):
                settings.on_change("currency", callback)  # type: ignore[arg-type]
    for rollout in ("5", None, 1.5, -1, 101):
        with pytest.raises(ValueError, match=re.escape(f"rollout={rollout!r}: expected 0 to 100")):
            FlagValue(rollout=rollout)  # type: ignore[arg-type]


async def test_a_copy_that_the_server_does_not_confirm_says_so() -> None:
    app = shop()
    with NatsServer() as server:
        await app.apply(server.url)
        async with app.connect(server.url) as client:
            strict, easy = client.settings("shop_settings", max_stale_s=0.6), client.settings("shop_settings")
            async with strict, easy:
                await strict.set("currency", "EUR", by="ann")
                await until(lambda: easy.get("currency") == "EUR" and strict.get("currency") == "EUR")
                server.stop()
                await until(lambda: strict.stale_s > 0.6)
                with pytest.raises(RequestTimeout, match="which are as they were"):
                    strict.get("currency")
                assert easy.get("currency") == "EUR"
                server.start()
                await until(lambda: strict.stale_s < 0.6)
                assert strict.get("currency") == "EUR"


async def test_settings_that_were_purged_with_their_stream_are_not_confirmed_as_they_were(
    server: NatsServer, js: JetStream
) -> None:
    app = App("purged", stream="PURGED", subjects=["purged.>"])
    app.settings("purged_settings", currency=Setting(str, "USD"), owner=Setting(str, "nobody", on_delete="keep"))
    await app.apply(server.url)
    heard: list[tuple[str, str]] = []
    async with app.connect(server.url) as client, client.settings("purged_settings", max_stale_s=3.0) as settings:
        settings.on_change("currency", lambda new, old: heard.append((new, old)))
        for name, value in {"currency": "EUR", "owner": "ann"}.items():
            await settings.set(name, value, by="ann")
            await until(lambda name=name, value=value: settings.get(name) == value)  # type: ignore[misc]
        await (await js.stream("KV_purged_settings")).purge()
        await until(lambda: settings.get("currency") == "USD", timeout=10.0)
        assert settings.get("owner") == "ann"  # as with any other deletion
        assert heard == [("EUR", "USD"), ("USD", "EUR")]
        await settings.set("currency", "GBP", by="bob")
        await until(lambda: settings.get("currency") == "GBP")
        await asyncio.sleep(1.2)  # it is compared once more
        assert settings.get("currency") == "GBP"


def test_what_cannot_be_a_setting_is_refused() -> None:
    app = shop()
    with pytest.raises(ConfigError, match="expected one declaration"):
        app.settings("shop_settings", x=Flag())
    with pytest.raises(ConfigError, match="expected a value of type <class 'int'>"):
        Setting(int, "many")
    with pytest.raises(ConfigError, match="needs a bucket with history=2"):
        app.settings(KVConfig(bucket="x"), y=Setting(int, 1, on_delete="keep"))
    with pytest.raises(ConfigError, match="expected at least one"):
        app.settings("x")
    with pytest.raises(ConfigError, match="rollout=101"):
        Flag().check({"enabled": True, "rollout": 101})
