"""Records of jobs that earlier code has stored: they decode, so a job that it began can be resumed.

Each file in ``golden_records`` has the bytes that were stored before records became structs.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import pytest

from jetspark.app.dead_letters.listing import LetterFilter
from jetspark.app.dead_letters.outcomes import RedriveProgress
from jetspark.app.extents import Extent, ReplayRequest
from jetspark.app.replay import HandlerReplayRecord, ReplayRecord
from jetspark.app.stored_events import FailureCause

GOLDEN = Path(__file__).parent / "golden_records"
EXTENT = Extent(stream="ORDERS", created="2026-03-20T09:00:00.123456789Z", first=1, last=90)


def golden(name: str) -> bytes:
    return (GOLDEN / f"{name}.json").read_bytes()


def test_the_stored_record_of_a_replay_decodes() -> None:
    record = ReplayRecord.decode(golden("replay_running"))
    assert record.request == ReplayRequest(
        since=datetime.datetime(2026, 3, 20, 10, 14, 30, tzinfo=datetime.UTC),
        until=datetime.datetime(2026, 3, 20, 12, tzinfo=datetime.UTC),
        keys=("a b", "ö", "half \ud800"),
        subject="orders.*.paid",
    )
    assert (record.id, record.kind, record.projection, record.version) == ("r19d0a1b2c3dabc123", "replay", "totals", 2)
    assert (record.bucket, record.extent, record.key) == ("totals", EXTENT, "totals.replay.r19d0a1b2c3dabc123")
    assert (record.at, record.events, record.keys, record.changed) == (40, 30, 3, 1)
    assert (record.parked, record.unreadable, record.status) == (1, 2, "running")
    assert (record.base, record.replaced) == ("", "")
    assert (record.began, record.noted) == ("2026-03-20T12:00:00.000001+00:00", "2026-03-20T12:00:01+00:00")
    assert record.outline["gaps"] == [[5, 6]]


def test_the_stored_record_of_a_rebuild_decodes() -> None:
    record = ReplayRecord.decode(golden("rebuild_swapped"))
    assert (record.kind, record.request, record.status) == ("rebuild", ReplayRequest(), "swapped")
    assert (record.bucket, record.base, record.replaced, record.first) == ("totals_v2", "totals", "totals", 41)
    assert record.is_done


def test_the_stored_record_of_a_repair_decodes() -> None:
    record = ReplayRecord.decode(golden("repair_failed"))
    assert (record.kind, record.request) == ("repair", ReplayRequest(from_seq=3, to_seq=10**20, keys=("a",)))
    assert (record.status, record.noted, record.outline) == ("failed: half \ud800", "", {})


def test_the_stored_record_of_a_handlers_replay_decodes() -> None:
    record = HandlerReplayRecord.decode(golden("handler_replay_running"))
    assert (record.handler, record.effects, record.kind) == ("billing", True, "handler")
    assert (record.stream, record.created, record.first, record.last) == ("ORDERS", EXTENT.created, 1, 90)
    assert record.request == ReplayRequest(from_seq=1, to_seq=90, keys=("o-1",))
    assert (record.key, record.at, record.events) == ("replay.billing.r19d0a1b2c3d999999", 20, 19)
    assert (record.done, record.skipped, record.stopped, record.failed, record.writes) == (10, 1, 2, 6, 4)
    assert (record.published, record.held_back, record.recorded) == ({"order.paid": 3}, {"charge": 2}, {"mail": 1})
    assert record.failures == [
        {"sequence": 7, "key": None, "error": "ValueError: no"},
        {"sequence": 8, "key": "o-1", "error": "half \ud800"},
    ]
    done = HandlerReplayRecord.decode(golden("handler_replay_done"))
    assert (done.effects, done.status, done.noted, done.failures) == (False, "done", "", [])


def test_the_stored_record_of_a_redrive_decodes() -> None:
    progress = RedriveProgress.decode(golden("redrive"))
    assert progress == RedriveProgress(
        id="r19d0a1b2c3d",
        chosen=LetterFilter(handler="billing", where=(("key", "o-1"), ("error", "Reject"))),
        up_to=9,
        last=4,
        requested=3,
        behind=2,
        freed=1,
        restored=6,
        unhandled=5,
    )
    everything = RedriveProgress.decode(golden("redrive_of_all"))
    assert everything == RedriveProgress(id="r19d0a1b2c3e", chosen=LetterFilter(), up_to=9)


@pytest.mark.parametrize("name", ["replay_running", "rebuild_swapped", "repair_failed"])
def test_a_record_is_stored_with_the_same_fields(name: str) -> None:
    assert ReplayRecord.decode(golden(name)).to_dict() == json.loads(golden(name))


@pytest.mark.parametrize("name", ["handler_replay_running", "handler_replay_done"])
def test_the_record_of_a_handlers_replay_is_stored_with_the_same_fields(name: str) -> None:
    assert HandlerReplayRecord.decode(golden(name)).to_dict() == json.loads(golden(name))


@pytest.mark.parametrize("name", ["redrive", "redrive_of_all"])
def test_the_record_of_a_redrive_is_stored_with_the_same_fields(name: str) -> None:
    assert RedriveProgress.decode(golden(name)).to_dict() == json.loads(golden(name))


def test_the_stored_cause_of_a_failure_decodes() -> None:
    cause = FailureCause.from_dict(json.loads(golden("failure_cause")))
    assert cause == FailureCause("shop.errors.Refused", "no: half \ud800", True, "0123456789ab", "  File x")
