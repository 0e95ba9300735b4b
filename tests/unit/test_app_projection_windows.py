"""Windows: which states an event belongs to, and what is late."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from support.projections import route_one, sorted_into

from jetspark.aio.stream_message import JetStreamMessage
from jetspark.app import App, Event, Timestamp, Window, encode
from jetspark.app.projections.router import KeyRows, Recorded, Router, recorded_delivery
from jetspark.core import headers as header_block
from jetspark.errors import ConfigError, NotJson
from jetspark.state.deliveries import sequences_of

NOON = datetime.datetime(2026, 3, 31, 12, tzinfo=datetime.UTC)


class Sold(Event, type="window.sold", version=1, key="shop", subject="sales.{shop}"):
    shop: str
    cents: int = 1
    at: Timestamp | None = None


class Takings:
    def key(self, event: Sold) -> str:
        return event.shop

    def apply(self, state: int | None, event: Sold) -> int:
        return (state or 0) + event.cents


def us(moment: datetime.datetime) -> int:
    return round(moment.timestamp() * 1e6)


def minutes(count: float) -> datetime.timedelta:
    return datetime.timedelta(minutes=count)


def test_an_event_belongs_to_the_hour_it_happened_in() -> None:
    hour = Window(size_s=3600)
    assert hour.parts(None, NOON + minutes(59.9), us(NOON)) == ["20260331T120000Z"]
    assert hour.parts(None, NOON - minutes(0.1), us(NOON)) == ["20260331T110000Z"]
    elsewhere = NOON.astimezone(datetime.timezone(datetime.timedelta(hours=5.5)))
    assert hour.parts(None, elsewhere, us(NOON)) == ["20260331T120000Z"]
    assert hour.name(NOON + minutes(10)) == "20260331T120000Z"


def test_windows_that_overlap_share_events() -> None:
    sliding = Window(size_s=3600, every_s=1200)
    assert sliding.parts(None, NOON + minutes(25), us(NOON)) == [
        "20260331T114000Z",
        "20260331T120000Z",
        "20260331T122000Z",
    ]


def test_what_was_stored_too_late_for_its_window_is_apart() -> None:
    hour = Window(size_s=3600, grace_s=600)
    assert hour.parts(None, NOON, us(NOON + minutes(70))) == ["20260331T120000Z"]
    assert hour.parts(None, NOON, us(NOON + minutes(70)) + 1) == ["late"]
    assert Window(size_s=3600, grace_s=600, late="keep").parts(None, NOON, us(NOON + minutes(99))) == [
        "20260331T120000Z"
    ]
    # Of windows that overlap those count that are still open.
    sliding = Window(size_s=3600, every_s=1800, grace_s=0)
    assert sliding.parts(None, NOON + minutes(5), us(NOON + minutes(40))) == ["20260331T120000Z"]


def test_a_field_of_the_event_can_be_its_time() -> None:
    day = Window(size_s=86400, time=lambda event: event.at)
    assert day.parts(Sold(shop="s", at=NOON), None, us(NOON)) == ["20260331T000000Z"]
    with pytest.raises(ConfigError, match="expected a datetime with a zone"):
        day.parts(Sold(shop="s"), NOON, us(NOON))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size_s": 0}, "size_s=0"),
        ({"size_s": 60.5}, "size_s=60.5"),
        ({"size_s": 100, "every_s": 33}, "multiple"),
        ({"size_s": 1000, "every_s": 1}, "at most 100"),
        ({"size_s": 60, "late": "drop"}, "late='drop'"),
        ({"size_s": 60, "grace_s": -1}, "grace_s"),
        ({"size_s": 60, "time": 5}, "time=5: expected a function"),
    ],
)
def test_a_window_that_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Window(**options)


def test_every_way_of_routing_has_the_same_keys() -> None:
    app = App("shops", stream="SALES", subjects=["sales.>"])
    app.projection("takings", events=[Sold], bucket="takings", window=Window(size_s=3600, every_s=1800))(Takings)
    router = Router(app.projections.values(), app.catalogue)
    sold = encode(Sold(shop="s.1"), id="1", source="/shops", time=NOON)
    message = Recorded(1, sold.subject, sold.data, sold.headers, us(NOON))
    rows = KeyRows()
    assert sorted_into({"takings": rows}, router, [message]) == []
    assert [row.key for row in route_one(router, message).rows] == [key for key, _, _ in rows]
    assert [key for key, _, _ in rows] == ["s=2E1.20260331T113000Z", "s=2E1.20260331T120000Z"]
    with pytest.raises(ConfigError, match="expected a Window"):
        app.projection("x", events=[Sold], bucket="x", window=3600)(Takings)  # type: ignore[arg-type]


def test_messages_of_a_consumer_have_the_rows_that_they_have_as_the_stream_has_them() -> None:
    """Those that are read at once, those that are not, and those that cannot be; with the times that windows need."""
    app = App("shops", stream="SALES", subjects=["sales.>"])
    app.projection("takings", events=[Sold], bucket="takings", window=Window(size_s=3600, grace_s=60))(Takings)
    router = Router(app.projections.values(), app.catalogue, owns_stream=True)
    sold = encode(Sold(shop="s1"), id="1", source="/shops", time=NOON)
    bodies = [sold.data, sold.data.replace(b'"schemaversion":1', b'"schemaversion":0'), b"{", sold.data]
    subjects = [sold.subject, sold.subject, sold.subject, "sales.of.another.kind"]
    headers = header_block.encode({"Nats-Msg-Id": "1"})
    times_ns = [us(NOON) * 1000, us(NOON + datetime.timedelta(hours=3)) * 1000, 0, 0]  # the second is late
    messages = [
        JetStreamMessage(
            subject, data, b"$JS.ACK.SALES.c.1.%d.%d.%d.0" % (7 + 2 * place, place + 1, time_ns), headers, None
        )
        for place, (subject, data, time_ns) in enumerate(zip(subjects, bodies, times_ns, strict=True))
    ]
    rows, others = KeyRows(), KeyRows()
    failed = router.add_rows(messages, sequences_of(messages), recorded_delivery, {"takings": rows})
    recorded = [recorded_delivery(message) for message in messages]
    assert list(rows) == [("s1.20260331T120000Z", 7, Sold(shop="s1")), ("s1.late", 9, Sold(shop="s1"))]
    [(unreadable, [failure])] = failed
    assert unreadable == Recorded(11, sold.subject, b"{", headers, 0)
    assert (failure.projections, failure.sequence, type(failure.error)) == (("takings",), 11, NotJson)
    [(same, _)] = sorted_into({"takings": others}, router, recorded)
    assert (same, list(others)) == (unreadable, list(rows))
    routed = [(row.key, row.sequence, row.event) for each in recorded for row in route_one(router, each).rows]
    assert routed == list(rows)


def test_a_window_that_the_event_tells_needs_nothing_else() -> None:
    def at_of(event: Sold) -> datetime.datetime:
        assert event.at is not None
        return event.at

    told = Window(size_s=3600, late="keep", time=at_of)
    assert told.is_by_event_alone
    assert told.part_of(Sold(shop="s", at=NOON + minutes(59))) == "20260331T120000Z"
    for other in (
        Window(size_s=3600, late="keep"),
        Window(size_s=3600, time=at_of),
        Window(size_s=3600, every_s=1800, late="keep", time=at_of),
    ):
        assert not other.is_by_event_alone


def test_a_window_is_named_by_its_begin_a_moment_in_it_or_as_late() -> None:
    hour = Window(size_s=3600)
    assert hour.part("20260331T120000Z") == "20260331T120000Z"
    assert hour.part("late") == "late"
    assert hour.part(NOON + minutes(59)) == "20260331T120000Z"
    with pytest.raises(ConfigError, match="expected a time zone"):
        hour.part(NOON.replace(tzinfo=None))
    for nothing in (None, 5, datetime.date(2026, 3, 31), b"late"):
        with pytest.raises(ConfigError, match="expected its begin, such as 19700101T000000Z, or 'late'"):
            hour.part(nothing)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="expected a datetime with a time zone"):
            hour.name(nothing)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a time zone, such as 2026-03-31T12:00:00Z"):
        hour.name(NOON.replace(tzinfo=None))
    for wrong in ("", "Late", "20260331", "20260331T120000", "20260331T120000Z "):
        with pytest.raises(ConfigError, match="expected its begin, such as 19700101T000000Z, or 'late'"):
            hour.part(wrong)


@pytest.mark.parametrize("year", [1, 99, 999, 1000, 1969, 9999])
def test_every_window_that_an_event_falls_into_is_one_that_can_be_named(year: int) -> None:
    hour = Window(size_s=3600, late="keep")
    moment = datetime.datetime(year, 3, 31, 12, 30, tzinfo=datetime.UTC)
    [name] = hour.parts(None, moment, us(NOON))
    assert name == hour.name(moment) == hour.part(name) == hour.part(moment) == f"{year:04}0331T120000Z"


def test_windows_that_keep_what_is_late_are_all_of_it() -> None:
    late = us(NOON + minutes(10_000))
    assert Window(size_s=3600, late="keep").parts(None, NOON, late) == ["20260331T120000Z"]
    sliding = Window(size_s=3600, every_s=1800, late="keep")
    assert sliding.parts(None, NOON, late) == ["20260331T113000Z", "20260331T120000Z"]
    seconds = Window(size_s=2, every_s=1, late="keep")
    assert seconds.parts(None, NOON, late) == ["20260331T115959Z", "20260331T120000Z"]


def test_a_window_begins_at_most_a_hundred_times_before_it_ends() -> None:
    assert Window(size_s=100, every_s=1).step_s == 1
    with pytest.raises(ConfigError, match="at most 100 times"):
        Window(size_s=101, every_s=1)
