"""Keys in the two spellings that they have: what users write, and what a bucket has."""

from __future__ import annotations

import datetime
import random
import uuid
from typing import Any

import msgspec
import pytest

from jetspark.app import App, Event, Window
from jetspark.app.projections.projection_spec import ProjectionArguments, ProjectionSpec
from jetspark.app.replay import ReplayRequest
from jetspark.app.testing import check_replay
from jetspark.errors import ConfigError
from jetspark.jetstream.kv import check_key

NOON = datetime.datetime(2026, 3, 31, 12, tzinfo=datetime.UTC)


class Sold(Event, type="keys.sold", version=1, key="shop", subject="keys.{shop}"):
    shop: str


class Takings:
    def key(self, event: Sold) -> str:
        return event.shop

    def apply(self, state: list[str] | None, event: Sold, key: str) -> list[str]:
        return [*(state or []), key]


def spec_of(window: Window | None = None) -> ProjectionSpec:
    return ProjectionSpec("takings", Takings, ProjectionArguments(events=[Sold], bucket="takings", window=window))


PLAIN, HOURLY = spec_of(), spec_of(Window(size_s=3600))


@pytest.mark.parametrize(
    ("spec", "written", "stored"),
    [
        (PLAIN, "s1", "s1"),
        (PLAIN, 7, "7"),
        (PLAIN, uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (PLAIN, "ann@example.com", "ann=40example=2Ecom"),
        (PLAIN, "s1.20260331T120000Z", "s1=2E20260331T120000Z"),
        (PLAIN, "", "="),
        (HOURLY, "s1.20260331T120000Z", "s1.20260331T120000Z"),
        (HOURLY, ("s1", "20260331T120000Z"), "s1.20260331T120000Z"),
        (HOURLY, ("s1", NOON + datetime.timedelta(minutes=59)), "s1.20260331T120000Z"),
        (HOURLY, ("s1", "late"), "s1.late"),
        (HOURLY, "a.b.late", "a=2Eb.late"),
        (HOURLY, (7, "late"), "7.late"),
        (HOURLY, ".late", "=.late"),
    ],
)
def test_what_users_write_is_a_key_of_the_bucket(spec: ProjectionSpec, written: Any, stored: str) -> None:
    assert spec.bucket_key(written) == check_key(stored) == stored
    text = spec.key_text(stored)
    assert spec.bucket_key(text) == stored
    if isinstance(written, str):
        assert text == written


@pytest.mark.parametrize(
    ("spec", "written", "message"),
    [
        (PLAIN, ("s1", "late"), "expected no tuple; it has no windows"),
        (HOURLY, "s1", r"expected its window, too, such as 's1.20260331T100000Z', \('s1', '20260331T100000Z'\)"),
        (HOURLY, "s1.today", "expected its window"),
        (HOURLY, 7, "expected its window"),
        (HOURLY, ("s1",), "expected its window"),
        (HOURLY, ("s1", "today"), "window 'today': expected its begin, such as 19700101T000000Z, or 'late'"),
        (HOURLY, ("s1", datetime.datetime(2026, 3, 31)), "expected a time zone"),
        (PLAIN, 0.5, "expected str, int, bool, UUID, date or an enum"),
    ],
)
def test_what_is_no_key_says_what_is_expected(spec: ProjectionSpec, written: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec.bucket_key(written)


def test_every_text_comes_back_as_it_was() -> None:
    rng = random.Random(1)
    letters = "ab=.2E _-*>/\\ä€😀\n@"
    for _ in range(3000):
        text = "".join(rng.choice(letters) for _ in range(rng.randrange(6)))
        assert PLAIN.key_text(PLAIN.bucket_key(text)) == text
        windowed = f"{text}.{rng.choice(['late', '20260331T120000Z'])}"
        assert HOURLY.key_text(HOURLY.bucket_key(windowed)) == windowed


@pytest.mark.parametrize("name", ["a.b", "a=b", "a=2eb", "=2", "_jetspark.position"])
def test_a_key_of_somebody_else_is_shown_as_it_is(name: str) -> None:
    assert PLAIN.key_text(name) == name
    assert HOURLY.key_text(name) == name


def test_apply_is_told_the_key_as_users_write_it() -> None:
    assert PLAIN.fold("ann=40example=2Ecom", None, Sold(shop="")) == b'["ann@example.com"]'
    assert HOURLY.fold("a=2Eb.late", None, Sold(shop="")) == b'["a.b.late"]'


def test_a_request_has_its_keys_as_text_and_survives_its_record() -> None:
    request = ReplayRequest(keys=(("s1", NOON), "a.b.late")).of(HOURLY)
    assert request.keys == ("s1.20260331T120000Z", "a.b.late")
    assert msgspec.convert(msgspec.to_builtins(request), ReplayRequest) == request
    assert request.bucket_keys(HOURLY) == {"s1.20260331T120000Z", "a=2Eb.late"}


def test_check_replay_folds_windows() -> None:
    app = App("keys", stream="KEYS", subjects=["keys.>"])
    app.projection("takings", events=[Sold], bucket="takings", window=Window(size_s=3600, every_s=1800))(Takings)
    events = [Sold(shop="a.b"), Sold(shop="c"), Sold(shop="a.b")]
    times = [NOON, NOON, NOON + datetime.timedelta(minutes=40)]
    assert {key: len(state) for key, state in check_replay(app, "takings", events, times=times).items()} == {
        "a.b.20260331T113000Z": 1,
        "a.b.20260331T120000Z": 2,
        "a.b.20260331T123000Z": 1,
        "c.20260331T113000Z": 1,
        "c.20260331T120000Z": 1,
    }
    assert len(check_replay(app, "takings", events)) == 4  # all at one moment
    with pytest.raises(ConfigError, match="times: expected one for each of 3 events, got 1"):
        check_replay(app, "takings", events, times=[NOON])


def test_a_copy_of_a_projection_is_the_same_projection() -> None:
    for filtered in (True, False):
        spec = ProjectionSpec(
            "takings", Takings, ProjectionArguments(events=[Sold], bucket="takings", filtered=filtered, version=4)
        )
        assert spec.renewed().options == spec.options
        assert spec.renewed().filtered is filtered


# ---- the keys of the events themselves -------------------------------------------------------------------------------


class Paid(Event, type="keys.paid", version=1, key="shop", subject="keys.{shop}.paid.{till}"):
    shop: str
    till: int


class Closed(Event, type="keys.closed", version=1, key="{shop}.{till}", subject="keys.closed.{shop}"):
    shop: str
    till: int


class Counted(Event, type="keys.counted", version=1, subject="keys.counted"):
    shop: str


class Sums:
    """Without ``key``."""

    def apply(self, state: int | None, event: Any) -> int:
        return (state or 0) + 1


def sums(events: list[type[Any]], **options: Any) -> ProjectionSpec:
    return ProjectionSpec("sums", Sums, ProjectionArguments(events=events, bucket="sums", **options))


def test_a_projection_without_a_key_of_its_own_takes_that_of_each_event() -> None:
    events = [Sold(shop="s.1"), Paid(shop="s.1", till=5), Closed(shop="s.1", till=5)]
    spec = sums([Sold, Paid, Closed])
    assert [spec.keys_of(each) for each in events] == [("s=2E1",), ("s=2E1",), ("s=3D2E1=2E5",)]
    app = App("keys", stream="KEYS", subjects=["keys.>"])
    app.projection("sums", events=[Sold, Paid], bucket="sums", window=Window(size_s=3600))(Sums)
    states = check_replay(app, "sums", events[:2], times=[NOON, NOON])
    assert states == {"s.1.20260331T120000Z": 2}
    with pytest.raises(ConfigError, match=r"expected `def key\(self, event\)`.*since Counted has no key of its own"):
        sums([Sold, Counted])
