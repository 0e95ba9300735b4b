"""Replaying, as far as it is pure: ranges, contents, digests, and the check for users' tests."""

from __future__ import annotations

import datetime
import hashlib
import itertools
import random
import time
from typing import Any

import msgspec
import pytest

from jetspark.app import DELETE, App, Event
from jetspark.app.extents import Extent, ReplayRequest, extent_of
from jetspark.app.projections.projection_spec import ProjectionArguments, ProjectionSpec
from jetspark.app.projections.state_header import FOREIGN, Mark, Parked
from jetspark.app.replay.comparison import MAX_NAMED, ComparedKeys, Digest, KeyContent, change_to, compare, reaches
from jetspark.app.replay.outlines import RangeOutline, gaps_between
from jetspark.app.replay.replay_check import NotReplayable, ReplayCheckOptions, check_replay
from jetspark.app.replay.replay_records import ReplayRecord
from jetspark.errors import ConfigError, DataLoss, ProtocolError
from jetspark.jetstream.config import StreamConfig
from jetspark.state.changes import NOTHING, Current
from jetspark.state.losses import first_ever
from jetspark.state.scan import Head

NOON = datetime.datetime(2026, 3, 20, 12, tzinfo=datetime.UTC)

# ---- ranges ----------------------------------------------------------------------------------------------------------


def head(first: int = 1, next: int = 101) -> Head:
    return Head("ORDERS", "then", first, next)


@pytest.mark.parametrize(
    ("request_", "first", "last"),
    [
        (ReplayRequest(), 1, 100),
        (ReplayRequest(from_seq=20, to_seq=30), 20, 30),
        (ReplayRequest(from_seq=20), 20, 100),
        (ReplayRequest(to_seq=500), 1, 100),
        (ReplayRequest(from_seq=100), 100, 100),
        (ReplayRequest(from_seq=20, to_seq=20), 20, 20),
    ],
)
def test_a_range_by_sequence_is_frozen_at_the_end_of_the_stream(request_: ReplayRequest, first: int, last: int) -> None:
    extent = extent_of(request_, head(), 1)
    assert (extent.first, extent.last) == (first, last)
    assert not extent.is_empty


def test_a_range_by_time_is_that_of_the_messages_at_its_ends() -> None:
    request = ReplayRequest(since=NOON, until=NOON + datetime.timedelta(minutes=1))
    extent = extent_of(request, head(), 1, since_seq=40, until_seq=60)
    assert (extent.first, extent.last) == (40, 59)
    assert extent_of(request, head(), 1, since_seq=101, until_seq=101).is_empty


def test_what_is_gone_is_data_loss_that_names_the_range() -> None:
    with pytest.raises(DataLoss, match=r"sequence 5 is needed .* first stored one is 10.*the range 5 to 20") as caught:
        extent_of(ReplayRequest(from_seq=5, to_seq=20), head(first=10), 1)
    assert (caught.value.wanted, caught.value.first) == (5, 10)
    with pytest.raises(DataLoss):
        extent_of(ReplayRequest(), head(first=2), 1)
    assert extent_of(ReplayRequest(from_seq=10), head(first=10), 1).first == 10


def test_a_time_before_the_first_message_there_is_may_have_had_more() -> None:
    request = ReplayRequest(since=NOON)
    with pytest.raises(DataLoss):
        extent_of(request, head(first=10), 1, since_seq=10)
    assert extent_of(request, head(first=10), 1, since_seq=11).first == 11
    assert extent_of(request, head(first=1), 1, since_seq=1).first == 1


def test_a_stream_that_was_made_to_begin_later_has_lost_nothing() -> None:
    assert first_ever(StreamConfig(name="S", first_sequence=1000)) == 1000
    assert extent_of(ReplayRequest(), head(first=1000, next=1005), 1000).first == 1000


def test_an_empty_stream_has_an_empty_range() -> None:
    assert extent_of(ReplayRequest(), head(first=1, next=1), 1).is_empty
    with pytest.raises(DataLoss):  # everything was purged
        extent_of(ReplayRequest(), head(first=101, next=101), 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"from_seq": 0}, "from_seq=0"),
        ({"to_seq": True}, "to_seq=True"),
        ({"from_seq": 9, "to_seq": 8}, "is behind"),
        ({"from_seq": 1, "since": NOON}, "one of the two"),
        ({"to_seq": 1, "until": NOON}, "one of the two"),
        ({"since": NOON, "until": NOON}, "not before"),
        ({"since": NOON.replace(tzinfo=None)}, "a time zone"),
        ({"since": "2026-03-20T10:14:30Z"}, "since='2026-03-20T10:14:30Z': expected a datetime"),
        ({"until": NOON.date()}, r"until=datetime.date\(.*: expected a datetime"),
        ({"subject": "a..b"}, "a..b"),
        ({"keys": "o-1"}, r"keys='o-1': expected several keys, such as \('o-1',\)"),
        ({"keys": None}, "keys=None"),
    ],
)
def test_a_request_that_means_nothing_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplayRequest(**fields)


def test_a_range_that_begins_behind_the_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="ends at 100"):
        extent_of(ReplayRequest(from_seq=101), head(), 1)


def test_the_keys_of_a_request_are_those_of_its_projection() -> None:
    request = ReplayRequest(keys=("a b", 7)).of(spec())
    assert request.keys == ("a b", "7")
    assert request.bucket_keys(spec()) == {"a=20b", "7"}


def test_requests_and_records_are_read_back_as_they_were_written() -> None:
    request = ReplayRequest(since=NOON, to_seq=7, keys=("a.b",), subject="orders.*")
    assert request.keys == ("a.b",)
    record = ReplayRecord(
        id="r1",
        kind="replay",
        projection="p",
        version=1,
        bucket="b",
        request=request,
        stream="S",
        created="c",
        first=1,
        last=7,
    )
    assert ReplayRecord.decode(record.encode()) == record
    assert record.extent == Extent(stream="S", created="c", first=1, last=7)
    with pytest.raises(ProtocolError, match="not readable"):
        ReplayRecord.decode(b"{}")


# ---- contents --------------------------------------------------------------------------------------------------------


def current(value: bytes | None, sequence: int, mark: str | None = "1") -> Current:
    return Current(value, sequence, 5, mark=mark)


@pytest.mark.parametrize(
    ("expected", "found", "kind"),
    [
        (KeyContent(b"1", 3), current(b"1", 3), None),
        (KeyContent(b"1", 3), current(b"2", 3), "value"),
        (KeyContent(b"1", 3), current(b"1", 2), "sequence"),
        (KeyContent(b"1", 3), NOTHING, "missing"),
        (KeyContent(b"1", 3), current(None, 3), "missing"),
        (KeyContent(None, 3), current(b"1", 2), "extra"),
        (KeyContent(None), current(b"1", 2), "extra"),
        (KeyContent(None, 3), current(None, 3), None),
        (KeyContent(None, 3), NOTHING, None),  # somebody has tidied up
        (KeyContent(None, 3), current(None, 2), "sequence"),  # an old event could raise the dead
        (KeyContent(b"1", 3), current(b"1", 3, None), "foreign"),
        (KeyContent(b"1", 3), current(b"1", 3, "2"), "version"),
        (KeyContent(b"1", 3), current(b"1", 3, "1 parked 4 why"), "parked"),
        (KeyContent(b"1", 3, Parked(4, "x")), current(b"1", 3, "1 parked 4 why"), None),
        (KeyContent(b"1", 3, Parked(5, "x")), current(b"1", 3, "1 parked 4 why"), "parked"),
        (KeyContent(None, 0, Parked(4, "x")), NOTHING, "parked"),
    ],
)
def test_what_differs_is_named(expected: KeyContent, found: Current, kind: str | None) -> None:
    difference = compare("k", expected, found, 1)
    assert (difference and difference.kind) == kind


def test_a_digest_is_the_sum_of_its_lines_in_any_order_and_leaves_deleted_keys_out() -> None:
    contents = {"a": KeyContent(b"{}", 7), "b": KeyContent(None, 8), "c": KeyContent(None, 0, Parked(9, "why"))}
    lines = (b"a\x007\x00\x00{}\n", b"c\x000\x009\x00\n")
    total = sum(int.from_bytes(hashlib.sha256(line).digest()) for line in lines) % 2**256
    for keys in itertools.permutations(contents):
        digest, others = Digest(), Digest()
        digest.add(keys[0], contents[keys[0]])
        for key in keys[1:]:
            others.add(key, contents[key])
        digest.include(others)
        assert (str(digest), digest.keys) == (f"sum-sha256:{total:064x}", 2)


def test_an_outline_names_the_first_subjects_and_gaps_and_counts_the_others() -> None:
    gaps = gaps_between(range(1, 100, 2), 10, 60)
    assert (gaps[0], gaps[-1], len(gaps)) == ((11, 11), (59, 59), 25)
    assert gaps_between([9, 3, 4, 8, 5, 1], 2, 8) == [(3, 5), (8, 8)]
    assert gaps_between([], 1, 9) == []
    outline = RangeOutline(subjects=("a", "b"), subject_count=5, deleted=30, gaps=((3, 5), (8, 8)), gap_count=7)
    subjects, deleted = outline.lines()
    assert subjects == "on a, b and 3 more"
    assert deleted.endswith("; in this range 3 to 5, 8 and 5 more")
    assert RangeOutline(deleted=1).lines()[1].endswith("none of them in this range")
    assert RangeOutline(deleted=1, gap_count=None).lines()[1].endswith("no fold sees them")


def test_parts_of_a_comparison_add_up_to_the_whole() -> None:
    keys = [f"k{number:04}" for number in range(2 * MAX_NAMED + 100)]
    parked = current(b"1", 3, "1 parked 4 why")
    whole, parts = ComparedKeys(), [ComparedKeys(events=2, unreadable=1) for _ in range(3)]
    for number, key in enumerate(keys):
        expected, found = KeyContent(b"1", 3), parked if number % 2 else current(b"1", 3)
        for each in (whole, parts[number % 3]):
            each.add(key, expected, found, 1)
    added = ComparedKeys()
    for part in reversed(parts):
        added.include(part)
    assert (added.parked, added.difference_count) == (whole.parked, whole.difference_count) == (1_050, 1_050)
    assert [each.key for each in added.differences] == keys[1::2][:MAX_NAMED]
    assert (added.differences, added.parked_keys) == (whole.differences, whole.parked_keys)
    assert (str(added.found), str(added.expected)) == (str(whole.found), str(whole.expected))
    assert (added.events, added.unreadable) == (6, 3)


class Counted(Event, type="counted", version=1, key="name", subject="counts.{name}"):
    name: str
    number: int = 0


class Counts:
    def key(self, event: Counted) -> str:
        return event.name

    def apply(self, state: int | None, event: Counted) -> Any:
        return DELETE if event.number == 9 else (state or 0) + event.number


def spec(kind: type[Any] = Counts, **options: Any) -> ProjectionSpec:
    return ProjectionSpec("counts", kind, ProjectionArguments(events=[Counted], bucket="counts", **options))


def test_a_mended_key_expects_what_was_there() -> None:
    assert change_to(spec(), "k", KeyContent(b"1", 3), current(b"1", 3)) is None
    change = change_to(spec(), "k", KeyContent(b"1", 3), current(b"2", 3))
    assert change is not None
    assert (change.value, change.sequence, change.revision, change.mark) == (b"1", 3, 5, "1")
    gone = change_to(spec(), "k", KeyContent(None, 3), current(b"2", 2, None))
    assert gone is not None
    assert (gone.operation, gone.sequence) == ("delete", 3)
    parked = change_to(spec(), "k", KeyContent(b"1", 3, Parked(4, "why")), NOTHING)
    assert parked is not None
    assert Mark.read(parked.mark) == Mark(1, Parked(4, "why"))


def test_the_marker_of_a_deleted_key_is_written_where_an_engine_has_not_been() -> None:
    deleted = KeyContent(None, 7)
    assert change_to(spec(), "k", deleted, NOTHING, position=7) is None
    change = change_to(spec(), "k", deleted, NOTHING, position=6)
    assert change is not None
    assert (change.operation, change.sequence, change.revision, change.mark) == ("delete", 7, 0, "1")
    assert change_to(spec(), "k", KeyContent(None, 0), NOTHING) is None


def test_a_key_is_compared_as_far_as_it_shows_traces_of() -> None:
    found = {
        "behind": current(b"1", 3),
        "beyond": current(b"1", 12),
        "parked": current(b"1", 3, "1 parked 15 why"),
        "foreign": current(b"1", 0, None),
    }
    assert reaches(found, 10) == {"beyond": 12, "parked": 15}
    assert KeyContent.of_current(found["foreign"]).parked == FOREIGN


# ---- the check for users' tests --------------------------------------------------------------------------------------


def app_of(kind: type[Any], **options: Any) -> App:
    app = App("counting", stream="COUNTING", subjects=["counts.>"])
    app.projection("counts", events=[Counted], bucket="counts", **options)(kind)
    return app


EVENTS = [Counted(name=name, number=number) for number in (1, 2, 9, 3, 4) for name in "ab"]


def check(kind: type[Any], **options: Any) -> dict[str, Any]:
    return check_replay(app_of(kind), "counts", EVENTS, ReplayCheckOptions(**options))


def test_a_pure_fold_passes_and_its_state_is_returned() -> None:
    assert check(Counts) == {"a": 7, "b": 7}


class Remembers(Counts):
    def __init__(self) -> None:
        self.seen = 0

    def apply(self, state: int | None, event: Counted) -> Any:
        self.seen += 1
        return self.seen


class ReadsTheClock(Counts):
    def apply(self, state: Any, event: Counted) -> Any:
        return time.time_ns() if event.number == 3 else 1


class Rolls(Counts):
    def apply(self, state: Any, event: Counted) -> Any:
        return random.SystemRandom().random() if event.number == 2 else 1


class ChangesTheEvent(Counts):
    def apply(self, state: Any, event: Counted) -> Any:
        msgspec.structs.force_setattr(event, "number", 100)
        return 1


class OrdersBySet(Counts):
    def apply(self, state: Any, event: Counted) -> Any:
        return list({f"{event.name}{number}" for number in range(30)})


class Refuses(Counts):
    def apply(self, state: Any, event: Counted) -> Any:
        raise ValueError("never")


class HasNoKey(Counts):
    def key(self, event: Counted) -> Any:
        return 1.5


@pytest.mark.parametrize(
    ("kind", "index", "reason"),
    [
        (Remembers, 0, "gives another state"),
        (ReadsTheClock, 6, "a second run, a moment later, gives another state"),
        (Rolls, 2, "gives another state"),
        (ChangesTheEvent, 0, "has changed the event"),
        (OrdersBySet, 0, "another process gives another state"),
        (Refuses, 0, "cannot be applied to key 'a': ValueError: never"),
        (HasNoKey, 0, r"key\(\) raised"),
    ],
)
def test_a_fold_that_is_not_pure_is_told_with_its_event(kind: type[Any], index: int, reason: str) -> None:
    events = [Counted(name=each.name, number=each.number) for each in EVENTS]
    with pytest.raises(NotReplayable, match=reason) as caught:
        check_replay(app_of(kind), "counts", events)
    assert caught.value.index == index


def test_a_class_that_cannot_be_imported_is_checked_in_this_process() -> None:
    class Local(Counts):
        pass

    assert check(Local) == {"a": 7, "b": 7}


def test_parked_keys_may_be_part_of_the_check() -> None:
    app = app_of(Counts, invariants=[_is_small])
    with pytest.raises(NotReplayable, match="is not true of"):
        check_replay(app, "counts", EVENTS)
    assert check_replay(app, "counts", EVENTS, ReplayCheckOptions(may_park=True)) == {"a": 3, "b": 3}


def _is_small(state: int) -> bool:
    return state < 4
