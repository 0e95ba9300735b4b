"""What it proves that a stream begins later than it once did."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

from jetspark.app.projections.positions import FoldPosition, part_start
from jetspark.core.message import CoreMessage
from jetspark.jetstream.config import StreamConfig
from jetspark.jetstream.info import StreamInfo, StreamState
from jetspark.jetstream.operations import Api
from jetspark.state.losses import first_ever, front_of, holds_passing_messages, proves_loss, removes_by_limits
from jetspark.state.scan import Head


def config(**fields: Any) -> StreamConfig:
    return StreamConfig(name="S", **fields)


NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
MIXED = config(allow_rollup=True)


@pytest.mark.parametrize("is_there", [None, True, False])
def test_in_a_stream_of_events_alone_every_gap_is_a_loss(is_there: bool | None) -> None:
    assert proves_loss(config(), is_there)
    assert proves_loss(config(allow_message_ttl=True), is_there)  # events whose time is over are gone, too


@pytest.mark.parametrize("fields", [{"allow_rollup": True}, {"allow_message_schedules": True}])
def test_where_other_messages_go_too_a_witness_decides(fields: dict[str, Any]) -> None:
    for limits in ({}, {"max_age_s": 60.0}):
        assert holds_passing_messages(config(**fields, **limits))
        assert not proves_loss(config(**fields, **limits), True)
        assert proves_loss(config(**fields, **limits), False)


@pytest.mark.parametrize(
    ("fields", "removes"),
    [
        ({}, False),
        ({"max_age_s": 0.0, "max_messages": -1, "max_bytes": -1, "max_messages_per_subject": -1}, False),
        ({"retention": "limits", "max_messages_per_subject": 1_000_000_000}, False),
        ({"max_age_s": 3600.0}, True),
        ({"max_messages": 1}, True),
        ({"max_messages": 10}, True),
        ({"max_bytes": 10}, True),
        ({"max_messages_per_subject": 1}, True),
        ({"max_messages_per_subject": 999_999_999}, True),
        ({"retention": "interest"}, True),
        ({"retention": "workqueue"}, True),
    ],
)
def test_without_a_witness_the_limits_of_the_stream_decide(fields: dict[str, Any], removes: bool) -> None:
    assert removes_by_limits(config(**fields)) is removes
    assert proves_loss(config(allow_rollup=True, **fields), None) is removes


def test_a_stream_begins_at_one_or_where_it_was_told_to() -> None:
    assert [first_ever(config()), first_ever(config(first_sequence=0)), first_ever(config(first_sequence=7))] == [
        1,
        1,
        7,
    ]


def front(stream: StreamConfig, *, first: int, anchor_sequence: int, is_there: bool = True) -> tuple[Head, int]:
    """What is found, and how often the server was asked."""
    info = StreamInfo(config=stream, state=StreamState(first_sequence=first, last_sequence=90), created=NOW)
    operation, asked = front_of(Api(), info, anchor_sequence), 0
    try:
        next(operation)
        asked += 1
        error = {"error": {"code": 404, "err_code": 10037, "description": "no message found"}}
        found = {"message": {"subject": "a", "seq": anchor_sequence, "time": "2026-01-01T00:00:00Z"}}
        operation.send(CoreMessage("", json.dumps(found if is_there else error).encode(), None, None, None))
    except StopIteration as done:
        return done.value, asked
    raise AssertionError("it asks once")


@pytest.mark.parametrize(
    ("stream", "first", "anchor_sequence", "is_there", "whole_from", "asks"),
    [
        (config(), 5, 3, True, 5, 0),  # a witness would say nothing
        (config(first_sequence=5), 5, 0, True, 5, 0),
        (MIXED, 1, 3, True, 1, 0),  # nothing is gone
        (MIXED, 5, 0, True, 1, 0),
        (MIXED, 5, 7, True, 1, 1),
        (MIXED, 5, 3, False, 5, 1),
        (config(allow_rollup=True, first_sequence=4), 9, 9, True, 4, 1),
        (config(allow_rollup=True, max_age_s=60.0), 5, 0, True, 5, 0),
        (config(allow_rollup=True, max_age_s=60.0), 5, 7, True, 1, 1),  # a witness knows better than a limit
    ],
)
def test_the_front_of_a_stream_is_whole_from_its_first_message_or_from_where_it_begins_now(
    stream: StreamConfig, first: int, anchor_sequence: int, is_there: bool, whole_from: int, asks: int
) -> None:
    head, asked = front(stream, first=first, anchor_sequence=anchor_sequence, is_there=is_there)
    assert (head.first, head.whole_from, asked) == (first, whole_from, asks)


def test_the_server_is_asked_for_no_witness_where_none_is_named() -> None:
    info = StreamInfo(config=MIXED, state=StreamState(first_sequence=5, last_sequence=90), created=NOW)
    with pytest.raises(StopIteration) as done:
        next(front_of(Api(), info))
    assert done.value.value.whole_from == 1


# ---- what a position knows -------------------------------------------------------------------------------------------


def test_a_position_names_the_first_event_and_the_last_that_was_read() -> None:
    begin = FoldPosition("S", "then", 0)
    assert begin.reaching(4, 0, 0) == FoldPosition("S", "then", 4)  # no event so far
    position = begin.reaching(9, 3, 7)
    assert (position.first_event, position.last_event) == (3, 7)
    assert position.reaching(20, 11, 12).witnesses == (3, 12)
    assert position.reaching(20, 0, 0).witnesses == (3, 7)
    assert FoldPosition.decode(position.encode()) == position
    assert FoldPosition.decode(begin.encode()) == begin


def test_a_position_that_is_moved_back_names_no_event_behind_it() -> None:
    position = FoldPosition("S", "then", 0).reaching(9, 3, 7)
    assert position.repaired(7).witnesses == (3, 7)
    assert position.repaired(6).witnesses == (3, 3)
    assert position.repaired(2).witnesses == (3, 3)  # before the first event there is none
    assert FoldPosition("S", "then", 0).reaching(9, 0, 7).repaired(5).witnesses is None


def test_a_part_is_where_it_was_whatever_events_are_known() -> None:
    whole = FoldPosition("S", "then", 5).reaching(5, 1, 4)
    assert part_start(FoldPosition("S", "then", 8), whole) == 8
    assert part_start(FoldPosition("S", "then", 8, repairs=1), whole) == 5
