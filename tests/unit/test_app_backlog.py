"""When a live engine stores what it has folded, and how far it may be ahead of that."""

from __future__ import annotations

import re
from typing import Any

import pytest

from jetspark.app import LiveOptions
from jetspark.app.projections.live_engine import Backlog, FoldedAmount
from jetspark.errors import ConfigError


def backlog(batch: int = 100, batch_bytes: int = 10_000) -> Backlog:
    return Backlog(LiveOptions(batch=batch, batch_bytes=batch_bytes))


def test_a_new_one_has_room_and_is_not_behind() -> None:
    new = backlog()
    assert (new.folded, new.stored) == (FoldedAmount(0, 0), FoldedAmount(0, 0))
    assert (new.has_room, new.is_full, new.is_far_behind) == (True, False, False)


@pytest.mark.parametrize(
    ("events", "is_full", "has_room"), [(74, False, True), (75, True, True), (99, True, True), (100, True, False)]
)
def test_events_fill_it(events: int, is_full: bool, has_room: bool) -> None:
    found = backlog()
    found.fold(events - 50, 1, 0)
    found.fold(50, 1, 0)
    assert (found.is_full, found.has_room) == (is_full, has_room)


@pytest.mark.parametrize(
    ("size", "is_full", "has_room"),
    [(7499, False, True), (7500, True, True), (9999, True, True), (10_000, True, False)],
)
def test_a_few_large_events_fill_it_as_well(size: int, is_full: bool, has_room: bool) -> None:
    found = backlog()
    found.fold(1, size - 5000, 0)
    found.fold(1, 5000, 0)
    assert (found.is_full, found.has_room) == (is_full, has_room)


def test_what_was_folded_while_a_batch_was_stored_is_left() -> None:
    found = backlog()
    found.fold(80, 800, 0)
    taken = found.folded
    found.fold(30, 300, 0)
    assert not found.has_room
    found.store(taken)
    assert (found.has_room, found.is_full) == (True, False)
    assert (found.folded, found.stored) == (FoldedAmount(110, 1100), FoldedAmount(80, 800))
    found.fold(45, 450, 0)
    assert found.is_full


def test_it_is_far_behind_as_long_as_a_tenth_of_a_batch_waits_in_the_stream() -> None:
    found = backlog()
    for pending, is_far_behind in ((9, False), (10, True), (1000, True), (0, False)):
        found.fold(1, 1, pending)
        assert found.is_far_behind is is_far_behind


@pytest.mark.parametrize("option", ["batch", "batch_bytes"])
def test_a_batch_without_room_is_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"{option}=0"):
        LiveOptions(**{option: 0})


@pytest.mark.parametrize("lease_s", [0, 0.5, -1, float("nan"), float("inf"), "10", None, True])
def test_a_lease_that_the_server_would_not_keep_is_refused(lease_s: Any) -> None:
    with pytest.raises(ConfigError, match=rf"lease_s={re.escape(repr(lease_s))}: expected seconds of 1 or more"):
        LiveOptions(lease_s=lease_s)


@pytest.mark.parametrize("partitions", [0, 257, 5000, 2**70, -1, 2.0, "8", None, True])
def test_more_partitions_than_the_server_has_consumers_for_are_refused(partitions: Any) -> None:
    assert LiveOptions(partitions=256).partitions == 256
    with pytest.raises(ConfigError, match=rf"^partitions={re.escape(repr(partitions))}: expected .*1 to 256"):
        LiveOptions(partitions=partitions)
