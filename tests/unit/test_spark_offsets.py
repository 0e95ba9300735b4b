"""Offsets as JSON, how far a batch may go, and how it is cut."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspark.errors import ConfigError, DataLoss, StreamRecreated, StreamWentBack
from jetspark.spark.offsets import (
    Limits,
    Offset,
    Sizes,
    StreamPosition,
    admit,
    check_filters,
    check_unchanged,
    plan,
    position_of,
)
from jetspark.spark.stream_follower import check_loss
from jetspark.state.scan import Head, Range

CREATED = "2026-03-20T10:14:30.000001Z"
ANY = Limits()


def at(step: int = 0, begin: int | None = None, **nexts: int) -> Offset:
    """Of a batch that starts at ``begin`` everywhere, or has nothing."""
    return Offset(
        {name: StreamPosition(CREATED, end, end if begin is None else begin) for name, end in nexts.items()}, step
    )


def head(stream: str, end: int, *, first: int = 1, size: float = 0.0, created: str = CREATED) -> Head:
    return Head(stream, created, first, end, size)


def nexts(offset: Offset) -> dict[str, int]:
    return {name: position.next for name, position in offset.streams.items()}


# ---- as JSON -------------------------------------------------------------------------------------------------------


def test_an_offset_survives_its_json() -> None:
    offset = at(500, A=12, B=7)
    assert Offset.from_json(json.loads(json.dumps(offset.to_json()))) == offset


def test_the_text_of_an_offset_does_not_depend_on_how_it_was_made() -> None:
    assert json.dumps(at(5, A=1, B=2).to_json()) == json.dumps(at(5, B=2, A=1).to_json())


def test_the_json_is_what_the_documentation_shows() -> None:
    offset = Offset({"ORDERS": StreamPosition(CREATED, 1201, 1, is_earliest=True)}, 50_000, ("orders.>",))
    assert json.dumps(offset.to_json()) == (
        '{"version": 2, "step": 50000, "subjects": ["orders.>"], "streams": '
        '{"ORDERS": {"created": "2026-03-20T10:14:30.000001Z", "from": 1, "next": 1201, "earliest": true}}}'
    )


def test_an_offset_of_version_1_is_read_with_its_start_promised_and_its_filters_unknown() -> None:
    streams = {"A": {"created": CREATED, "from": 1, "next": 12}}
    found = Offset.from_json({"version": 1, "step": 5, "streams": streams})
    assert found == Offset({"A": StreamPosition(CREATED, 12, 1)}, 5, None)


def test_a_start_from_earliest_is_promised_when_a_batch_has_begun_with_it() -> None:
    start = Offset(
        {"A": StreamPosition(CREATED, 1, is_earliest=True), "B": StreamPosition(CREATED, 1, is_earliest=True)}
    )
    assert not start.streams["A"].is_promised
    first = admit(start, [head("A", 101, first=31), head("B", 1)], Limits(rows=10), Sizes())
    assert first.streams["A"] == StreamPosition(CREATED, 41, 31, is_earliest=True)
    assert (first.streams["A"].is_promised, first.streams["B"].is_promised) == (True, False)
    assert [part.is_earliest for part in plan(start, first)] == [True]
    second = admit(first, [head("A", 101, first=31), head("B", 11, first=6)], ANY, Sizes())
    assert second.streams["A"] == StreamPosition(CREATED, 101, 41)
    assert second.streams["B"] == StreamPosition(CREATED, 11, 6, is_earliest=True)


def test_a_place_that_is_kept_without_its_batch_is_as_promised_as_before() -> None:
    assert StreamPosition(CREATED, 12, 5).at_rest() == StreamPosition(CREATED, 12)
    assert StreamPosition(CREATED, 12, 5, is_earliest=True).at_rest() == StreamPosition(CREATED, 12)
    assert StreamPosition(CREATED, 12, is_earliest=True).at_rest() == StreamPosition(CREATED, 12, is_earliest=True)
    assert (
        plan(
            at(A=12),
            Offset({"A": StreamPosition(CREATED, 12, 5).at_rest(), "B": StreamPosition(CREATED, 9, 9)}, 4),
        )
        == []
    )


def test_what_is_gone_from_the_earliest_start_takes_nothing_of_a_limit_and_no_partitions() -> None:
    start = Offset({"A": StreamPosition(CREATED, 1, is_earliest=True)})
    end = admit(start, [head("A", 1_000_001, first=999_001)], ANY, Sizes(max_records=100))
    assert [(part.start, part.end) for part in plan(start, end)][:2] == [(999_001, 999_101), (999_101, 999_201)]


def test_a_stream_purged_before_its_earliest_start_was_read_has_an_empty_batch() -> None:
    start = Offset({"A": StreamPosition(CREATED, 1, is_earliest=True)})
    end = admit(start, [head("A", 101, first=101)], ANY, Sizes())
    assert plan(start, end) == []


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"version": 3, "streams": {}},
        {"version": 1},
        {"version": 1, "step": 1, "streams": {"A": {}}},
        {"version": 2, "step": 1, "streams": {}},
    ],
)
def test_an_offset_of_another_kind_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="offset"):
        Offset.from_json(value)


# ---- filters -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("known", "now"),
    [((), ()), ((), ("a.>",)), (("a.>",), ("a.b",)), (("a.*", "b"), ("a.x", "b")), ((">",), ()), (None, ("a",))],
)
def test_filters_that_want_nothing_more_are_taken(known: tuple[str, ...] | None, now: tuple[str, ...]) -> None:
    check_filters(Offset({}, subjects=known), now, "subjects")


@pytest.mark.parametrize(("known", "now"), [(("a.>",), ()), (("a.b",), ("a.>",)), (("a",), ("a", "b"))])
def test_filters_that_want_more_are_refused_with_both_and_the_remedies(
    known: tuple[str, ...], now: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_filters(Offset({}, subjects=known), now, "subjects")
    for words in (
        f"subjects={','.join(known)!r}",
        f"subjects={','.join(now)!r}",
        "new checkpoint",
        "acceptFilterChange",
    ):
        assert words in str(caught.value)
    check_filters(Offset({}, subjects=known), now, "subjects", is_accepted=True)


# ---- how far -------------------------------------------------------------------------------------------------------


def test_without_limits_a_batch_goes_to_the_end() -> None:
    assert nexts(admit(at(A=1), [head("A", 101)], ANY, Sizes())) == {"A": 101}


def test_without_news_the_offset_is_the_very_same() -> None:
    start = at(7, A=101)
    assert admit(start, [head("A", 101)], ANY, Sizes()) is start


def test_an_offset_never_goes_back() -> None:
    start = at(A=101)
    assert admit(start, [head("A", 50)], ANY, Sizes()) is start


def test_a_limit_of_rows_is_kept() -> None:
    assert nexts(admit(at(A=11), [head("A", 1_001)], Limits(rows=100), Sizes())) == {"A": 111}


def test_a_limit_of_bytes_is_kept_by_the_mean_size() -> None:
    assert nexts(admit(at(A=1), [head("A", 1_001, size=50.0)], Limits(bytes=1_000), Sizes())) == {"A": 21}


def test_of_two_limits_the_tighter_one_counts() -> None:
    limits = Limits(rows=10, bytes=1_000)
    assert nexts(admit(at(A=1), [head("A", 1_001, size=50.0)], limits, Sizes())) == {"A": 11}
    assert nexts(admit(at(A=1), [head("A", 1_001, size=500.0)], limits, Sizes())) == {"A": 3}


def test_a_limit_below_one_message_still_moves() -> None:
    assert nexts(admit(at(A=1), [head("A", 1_001, size=5_000.0)], Limits(bytes=10), Sizes())) == {"A": 2}


def test_streams_share_a_limit_in_proportion_to_what_waits() -> None:
    end = admit(at(A=1, B=1), [head("A", 901), head("B", 101)], Limits(rows=100), Sizes())
    assert nexts(end) == {"A": 91, "B": 11}


def test_no_stream_starves_beside_a_long_one() -> None:
    end = admit(at(A=1, B=1), [head("A", 1_000_001), head("B", 2)], Limits(rows=10), Sizes())
    assert nexts(end)["B"] == 2


def test_a_stream_without_news_keeps_its_place() -> None:
    assert nexts(admit(at(A=1, B=5), [head("A", 11), head("B", 5)], ANY, Sizes())) == {"A": 11, "B": 5}


def test_what_is_gone_does_not_use_up_the_limit() -> None:
    assert nexts(admit(at(A=1), [head("A", 1_001, first=501)], Limits(rows=100), Sizes())) == {"A": 601}


def test_what_is_gone_makes_no_partitions_of_its_own() -> None:
    start = at(A=1)
    end = admit(start, [head("A", 1_000_101, first=1_000_001)], Limits(rows=10), Sizes())
    ranges = plan(start, end)
    assert (ranges[0].start, ranges[-1].end) == (1, 1_000_011)  # the loss is in them, to be noticed
    assert len(ranges) <= 2


def test_limits_lead_to_the_end_in_the_end() -> None:
    offset, batches = at(A=1, B=1), 0
    heads = [head("A", 1_001), head("B", 38)]
    while (further := admit(offset, heads, Limits(rows=64), Sizes())) is not offset:
        assert all(further.streams[name].next >= offset.streams[name].next for name in "AB")
        offset, batches = further, batches + 1
    assert nexts(offset) == {"A": 1_001, "B": 38}
    assert batches < 30


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_a_limit_of_rows_is_kept_to_the_row(waiting: int, rows: int) -> None:
    assert nexts(admit(at(A=1), [head("A", 1 + waiting)], Limits(rows=rows), Sizes())) == {"A": 1 + min(waiting, rows)}


@settings(deadline=None)
@given(st.lists(st.integers(0, 10**5), min_size=1, max_size=5), st.integers(1, 10**5))
def test_every_stream_gets_its_share_of_a_limit_rounded_down_or_one_message(waiting: list[int], rows: int) -> None:
    names = "ABCDE"[: len(waiting)]
    heads = [head(name, 1 + each) for name, each in zip(names, waiting, strict=True)]
    end = nexts(admit(at(**dict.fromkeys(names, 1)), heads, Limits(rows=rows), Sizes()))
    share = min(Fraction(1), Fraction(rows, max(1, sum(waiting))))
    assert [end[name] - 1 for name in names] == [max(min(each, 1), int(each * share)) for each in waiting]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_batch_after_batch_covers_every_sequence_once_whatever_is_added_removed_and_allowed(
    data: st.DataObject,
) -> None:
    """A stream grows and loses its oldest. What is gone is in a batch, too, to be noticed, except before the earliest
    start."""
    first = data.draw(st.integers(1, 50))
    end = first + data.draw(st.integers(0, 50))
    is_earliest = data.draw(st.booleans())
    start = offset = Offset({"A": StreamPosition(CREATED, first, is_earliest=is_earliest)})
    covered: list[int] = []
    for _ in range(data.draw(st.integers(1, 8))):
        end += data.draw(st.integers(0, 40))
        first = data.draw(st.integers(first, end))
        limits = Limits(data.draw(st.none() | st.integers(1, 30)), data.draw(st.none() | st.integers(1, 300)))
        sizes = Sizes(
            min_partitions=data.draw(st.integers(1, 4)),
            max_records=data.draw(st.integers(1, 40)),
            max_bytes=data.draw(st.integers(1, 400)),
        )
        now = head("A", end, first=first, size=data.draw(st.sampled_from([0.0, 10.0])))
        further = admit(offset, [now], limits, sizes)
        parts = plan(offset, further)
        assert all(part.start < part.end for part in parts)
        covered += [sequence for part in parts for sequence in range(part.start, part.end)]
        assert (further is offset) == (end <= offset.streams["A"].next)
        offset = Offset.from_json(further.to_json())
    begin, reached = start.streams["A"].next, offset.streams["A"].next
    if is_earliest:
        begin = covered[0] if covered else reached
        assert begin >= start.streams["A"].next
    assert covered == list(range(begin, reached))


# ---- partitions ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "sequences", "size", "step"),
    [
        (Sizes(), 10, 0.0, 10),
        (Sizes(), 120_000, 0.0, 100_000),
        (Sizes(min_partitions=4), 1_000, 0.0, 250),
        (Sizes(min_partitions=3), 1_000, 0.0, 334),
        (Sizes(min_partitions=50), 10, 0.0, 1),
        (Sizes(max_bytes=1_000), 1_000, 100.0, 10),
        (Sizes(max_bytes=1_000), 1_000, 5_000.0, 1),
        (Sizes(), 0, 0.0, 1),
    ],
)
def test_partitions_are_sized_by_rows_and_bytes(sizes: Sizes, sequences: int, size: float, step: int) -> None:
    assert sizes.step(sequences, size) == step


def test_a_plan_covers_every_sequence_once() -> None:
    for step in (1, 3, 7, 100):
        end = admit(at(A=5, B=2), [head("A", 47), head("B", 2)], ANY, Sizes(max_records=step))
        ranges = plan(at(A=5, B=2), end)
        covered = [sequence for part in ranges for sequence in range(part.start, part.end)]
        assert covered == list(range(5, 47))
        assert all(part.end - part.start <= step for part in ranges)


def test_a_batch_run_again_has_the_same_plan() -> None:
    start, end = at(A=1), at(10, 1, A=31)
    replayed = plan(Offset.from_json(start.to_json()), Offset.from_json(end.to_json()))
    assert replayed == plan(start, end) == [Range("A", CREATED, begin, begin + 10) for begin in (1, 11, 21)]


def test_the_first_batch_does_not_depend_on_an_initial_offset_that_has_moved() -> None:
    end = at(100, 1, A=31)
    assert plan(at(A=1), end) == plan(at(A=500), end) == plan(at(A=31), end) == [Range("A", CREATED, 1, 31)]


def test_a_batch_of_another_source_reads_nothing_here_again() -> None:
    end = at(100, 1, A=31)
    assert plan(end, end) == []


def test_a_batch_starts_where_the_one_before_ended() -> None:
    first = admit(at(A=1, B=1), [head("A", 11), head("B", 1)], ANY, Sizes())
    second = admit(first, [head("A", 11), head("B", 6)], ANY, Sizes())
    assert plan(first, second) == [Range("B", CREATED, 1, 6)]


def test_an_empty_batch_has_no_partitions() -> None:
    assert plan(at(5, A=7), at(5, A=7)) == []


def test_the_plan_carries_the_filters() -> None:
    end = at(5, 1, A=3)
    assert plan(at(A=1), replace(end, subjects=("a.>",)), ("b.>",)) == [Range("A", CREATED, 1, 3, ("a.>",))]
    # Version 1 did not note them.
    assert plan(at(A=1), replace(end, subjects=None), ("b.>",)) == [Range("A", CREATED, 1, 3, ("b.>",))]


def test_a_plan_over_two_streams_of_one_name_is_refused() -> None:
    with pytest.raises(StreamRecreated):
        plan(at(A=1), Offset({"A": StreamPosition("2026-04-01T00:00:00Z", 9, 1)}, 1))


# ---- the stream itself ---------------------------------------------------------------------------------------------


def test_a_recreated_stream_is_noticed() -> None:
    with pytest.raises(StreamRecreated, match=r"'A' was deleted and re-created.*new checkpoint"):
        check_unchanged(at(A=5), [head("A", 100, created="2026-04-01T00:00:00Z")])


def test_a_stream_that_went_back_is_noticed() -> None:
    with pytest.raises(StreamWentBack, match="sequence 50 is needed and the stream's next one is 7"):
        check_unchanged(at(A=50), [head("A", 7)])


def test_a_stream_that_grew_is_fine() -> None:
    check_unchanged(at(A=5), [head("A", 5), head("NEW", 1)])


@pytest.mark.parametrize(
    "error", [DataLoss("A", 5, 10), StreamRecreated("A", CREATED, "later"), StreamWentBack("A", 9, 4)]
)
def test_errors_survive_the_way_between_processes(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again)) == (type(error), str(error))


def test_data_loss_names_stream_sequences_and_the_option() -> None:
    with pytest.raises(DataLoss) as caught:
        check_loss(at(A=5), [head("A", 200, first=101)], is_allowed=False)
    assert str(caught.value) == (
        "stream 'A': sequence 5 is needed and the first stored one is 101, so 96 sequences are gone (limits, a "
        "purge, or deletes); set failOnDataLoss=false to continue with the remaining messages"
    )


# ---- where reading starts --------------------------------------------------------------------------------------------


def test_reading_starts_with_the_first_message_behind_the_last_or_at_a_sequence() -> None:
    stream = head("A", 101, first=31)
    assert position_of(stream, "earliest") == StreamPosition(CREATED, 31, is_earliest=True)
    assert position_of(stream, "latest") == StreamPosition(CREATED, 101)
    assert position_of(stream, 7) == StreamPosition(CREATED, 7)
    assert position_of(stream, 101) == StreamPosition(CREATED, 101)


def test_reading_cannot_start_behind_the_next_message() -> None:
    with pytest.raises(ConfigError, match="startingOffsets=102: the next sequence of stream 'A' is 101"):
        position_of(head("A", 101), 102)


def test_nothing_is_said_of_partitions_before_the_first_batch() -> None:
    assert Offset({}).to_json() == {"version": 2, "step": 0, "subjects": [], "streams": {}}


def test_partitions_have_these_sizes_unless_somebody_says_otherwise() -> None:
    assert Sizes() == Sizes(min_partitions=1, max_records=100_000, max_bytes=67_108_864)


def test_a_stream_without_news_does_not_count_when_partitions_are_sized() -> None:
    assert admit(at(A=1, B=5), [head("A", 11), head("B", 5)], ANY, Sizes()).step == 10


def test_messages_of_less_than_a_byte_are_sized_by_their_bytes_too() -> None:
    """The mean of a stream with many deleted messages."""
    assert Sizes(max_bytes=10).step(1_000, 0.5) == 20
