"""Which reply subjects a worker answers on."""

from __future__ import annotations

import logging

import pytest

from jetspark.app import App, Command, Past
from jetspark.app.commands.reply_rule import LOG_EVERY_S, ReplyRule
from jetspark.errors import ConfigError


class Nothing(Command):
    def reads(self) -> list[str]:
        return ["orders.>"]

    def decide(self, past: Past) -> None: ...


@pytest.mark.parametrize("reply", ["_INBOX.a", "_INBOX.a.b.c", "_R_.x.y", "_MINE.shop.x"])
def test_inboxes_are_answered(reply: str) -> None:
    assert ReplyRule("shop", ["_MINE.shop"]).allows(reply)


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "_INBOX",
        "_INBOX.",
        "_INBOX..a",
        "_INBOX.>",
        "_INBOX.*.a",
        "_INBOX.a b",
        "_INBOXES.a",
        "_MINE.a",
        "_MINE.shopping.a",
        "x._INBOX.a",
        "_GR_.a.b.orders.x",
        "$JS.API.STREAM.PURGE.ORDERS",
        "orders.o-1",
    ],
)
def test_nothing_else_is_answered(reply: str) -> None:
    assert not ReplyRule("shop", ["_MINE.shop"]).allows(reply)


def test_what_a_stream_stores_is_not_answered_even_below_an_inbox() -> None:
    rule = ReplyRule("shop", [])
    assert not rule.allows("_INBOX.a.b", ["orders.>", "_INBOX.a.*"])
    assert rule.allows("_INBOX.b.b", ["orders.>", "_INBOX.a.*"])


def test_refused_requests_are_all_counted_and_logged_once_a_while(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="jetspark.app")
    rule = ReplyRule("shop", [])
    for now in (5.0, 6.0, 5.0 + LOG_EVERY_S):
        rule.refuse("cmd.shop.x", "orders.o-1", now)
    assert rule.refused == 3
    assert [record.getMessage().endswith("inbox_prefixes=[...])") for record in caplog.records] == [True, True]
    assert "(refused so far: 3)" in caplog.records[1].getMessage()


@pytest.mark.parametrize("prefix", ["", ".", "a.", "a.>", "a b", "$JS.x", "$KV.x", "_GR_.x"])
def test_a_prefix_that_is_none_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError, match="inbox_prefixes"):
        App("shop", stream="ORDERS", subjects=["orders.>"], inbox_prefixes=[prefix])


@pytest.mark.parametrize("prefix", ["orders", "orders.replies", "dlq.shop", "dlq", "retry"])
def test_a_prefix_below_which_a_stream_of_the_application_stores_is_refused(prefix: str) -> None:
    app = App("shop", stream="ORDERS", subjects=["orders.>"], inbox_prefixes=[prefix])
    app.command("nothing")(Nothing)

    from jetspark.app import Event

    class Placed(Event, type="order.placed", key="order_id", subject="orders.{order_id}"):
        order_id: str

    @app.handler(Placed, durable="handling")
    async def handle(event: Placed) -> None: ...

    with pytest.raises(ConfigError, match="stores"):
        app.topology()


def test_a_stream_that_stores_inboxes_cannot_have_commands() -> None:
    app = App("shop", stream="ORDERS", subjects=["orders.>", "_INBOX.x.>"])
    app.command("nothing")(Nothing)
    with pytest.raises(ConfigError, match="_INBOX"):
        app.topology()
