"""Jobs that another process can resume, and the stored records of earlier code.

Each file in ``golden_records`` has the bytes that were stored before records became structs: a job that earlier code
began can be resumed.
"""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jetspark.app.dead_letters.listing import DeadLetterFilter
from jetspark.app.dead_letters.outcomes import RedriveProgress
from jetspark.app.extents import Extent, ReplayRequest
from jetspark.app.jobs import Job, new_job_id
from jetspark.app.replay import HandlerReplayRecord, ReplayRecord
from jetspark.app.replay.replay_records import MAX_RECORD_BYTES, begin_replay, run_job
from jetspark.app.stored_events import FailureCause
from jetspark.errors import (
    ConfigError,
    Conflict,
    ConnectionLost,
    DataLoss,
    JetSparkError,
    KeyExists,
    KeyNotFound,
    ProtocolError,
    UsageError,
)

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
    assert (record.began, record.saved) == ("2026-03-20T12:00:00.000001+00:00", "2026-03-20T12:00:01+00:00")
    assert record.outline["gaps"] == [[5, 6]]


def test_the_stored_record_of_a_rebuild_decodes() -> None:
    record = ReplayRecord.decode(golden("rebuild_swapped"))
    assert (record.kind, record.request, record.status) == ("rebuild", ReplayRequest(), "swapped")
    assert (record.bucket, record.base, record.replaced, record.first) == ("totals_v2", "totals", "totals", 41)
    assert record.is_done


def test_the_stored_record_of_a_repair_decodes() -> None:
    record = ReplayRecord.decode(golden("repair_failed"))
    assert (record.kind, record.request) == ("repair", ReplayRequest(from_seq=3, to_seq=10**20, keys=("a",)))
    assert (record.status, record.saved, record.outline) == ("failed: half \ud800", "", {})


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
    assert (done.effects, done.status, done.saved, done.failures) == (False, "done", "", [])


def test_the_stored_record_of_a_redrive_decodes() -> None:
    progress = RedriveProgress.decode(golden("redrive"))
    assert progress == RedriveProgress(
        id="r19d0a1b2c3d",
        chosen=DeadLetterFilter(handler="billing", where=(("key", "o-1"), ("error", "Reject"))),
        up_to=9,
        last=4,
        requested=3,
        behind=2,
        freed=1,
        restored=6,
        unhandled=5,
    )
    everything = RedriveProgress.decode(golden("redrive_of_all"))
    assert everything == RedriveProgress(id="r19d0a1b2c3e", chosen=DeadLetterFilter(), up_to=9)


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


# ---- jobs ------------------------------------------------------------------------------------------------------------


@dataclass
class Entry:
    value: bytes
    revision: int


class Bucket:
    """A bucket in memory that can lose the answer to an update."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.revision = 0
        self.is_answer_lost = False

    async def create(self, key: str, value: bytes) -> int:
        if key in self.entries:
            raise KeyExists("records", (key,))
        return self._put(key, value)

    async def get(self, key: str, *, direct: bool) -> Entry:
        assert not direct, "records are read from the leader"
        if key not in self.entries:
            raise KeyNotFound("records", key)
        return self.entries[key]

    async def update(self, key: str, value: bytes, *, revision: int) -> int:
        self._check(key, revision)
        stored = self._put(key, value)
        if self.is_answer_lost:
            raise Conflict("records", (key,))
        return stored

    async def purge(self, key: str, *, revision: int) -> None:
        self._check(key, revision)
        del self.entries[key]

    def _check(self, key: str, revision: int) -> None:
        if self.entries[key].revision != revision:
            raise Conflict("records", (key,))

    def _put(self, key: str, value: bytes) -> int:
        self.revision += 1
        self.entries[key] = Entry(value, self.revision)
        return self.revision


def redrive(id: str = "r1") -> RedriveProgress:
    return RedriveProgress(id=id, chosen=DeadLetterFilter(), up_to=9, last=4)


async def begun(bucket: Any, id: str = "r1") -> Job[RedriveProgress]:
    return await Job.begin(bucket, redrive(id))


async def found(bucket: Any, id: str) -> Job[RedriveProgress]:
    return await Job.find(bucket, RedriveProgress, "redrive", id)


def test_ids_sort_by_time_and_differ_in_the_same_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetspark.app.jobs.seconds_now", lambda: 1_774_000_000.123)
    ids = {new_job_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch(f"r{1_774_000_000_123:x}[0-9a-f]{{6}}", each) for each in ids)


def test_the_fields_of_a_record_are_given_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        RedriveProgress("r1", chosen=DeadLetterFilter(), up_to=9)  # type: ignore[call-arg]


async def test_a_second_job_of_the_same_key_is_refused_with_the_id_to_resume() -> None:
    bucket = Bucket()
    await begun(bucket)
    with pytest.raises(UsageError, match=r"redrive r1 is under way \(at dead letter 4 of 9\): .*--resume r1"):
        await begun(bucket, "r2")


async def test_an_unknown_id_is_refused() -> None:
    bucket = Bucket()
    with pytest.raises(ConfigError, match="'r1': no job has this id; no redrive is under way"):
        await found(bucket, "r1")
    await begun(bucket)
    with pytest.raises(ConfigError, match="'r2': no job has this id; redrive r1 is under way"):
        await found(bucket, "r2")


async def test_a_job_that_is_resumed_elsewhere_fails_at_its_next_save() -> None:
    bucket = Bucket()
    first = await begun(bucket)
    second = await found(bucket, "r1")
    await second.resume()
    for attempt in (first.save(last=5), first.end()):
        with pytest.raises(UsageError, match="redrive r1 was taken over by another process"):
            await attempt
    await second.save(last=6)
    assert (await found(bucket, "r1")).record.last == 6
    await second.end()
    assert bucket.entries == {}


async def test_a_save_whose_answer_was_lost_counts_once() -> None:
    bucket = Bucket()
    job = await begun(bucket)
    bucket.is_answer_lost = True
    await job.save(last=5)
    bucket.is_answer_lost = False
    await job.save(last=6)
    assert (await found(bucket, "r1")).record.last == 6


def replay(keys: tuple[str, ...] = ()) -> ReplayRecord:
    extent = {"stream": "S", "created": "c", "first": 1, "last": 9}
    fields: dict[str, Any] = {"kind": "replay", "projection": "p", "version": 1, "bucket": "b", **extent}
    return ReplayRecord(id=new_job_id(), request=ReplayRequest(keys=keys), **fields)


@pytest.mark.parametrize(
    ("error", "status"),
    [(DataLoss("S", 1, 2, "gone"), "failed: .*gone"), (ConnectionLost("cut"), "running"), (None, "running")],
)
async def test_a_permanent_error_is_saved_and_a_passing_one_is_not(error: JetSparkError | None, status: str) -> None:
    bucket: Any = Bucket()
    job = await begin_replay(bucket, replay())

    async def work() -> None:
        if error is not None:
            raise error

    if error is None:
        assert await run_job(job, work()) is job.record
    else:
        with pytest.raises(type(error)):
            await run_job(job, work())
    stored = ReplayRecord.decode(bucket.entries[job.record.key].value)
    assert re.match(status, stored.status)


async def test_a_resumed_replay_runs_again_and_has_the_time_of_its_save() -> None:
    bucket: Any = Bucket()
    job = await begin_replay(bucket, replay())
    await job.save(status="failed: x")
    assert job.record.saved
    again = await Job.find(bucket, ReplayRecord, job.record.key, job.record.id)
    await again.resume()
    assert ReplayRecord.decode(bucket.entries[job.record.key].value).status == "running"


async def test_more_keys_than_fit_are_refused_before_anything_is_stored() -> None:
    bucket: Any = Bucket()
    with pytest.raises(ConfigError, match=r"keys: 1 of them make a record of .* give fewer at a time"):
        await begin_replay(bucket, replay(keys=("k" * MAX_RECORD_BYTES,)))
    assert bucket.entries == {}


@pytest.mark.parametrize("value", [b"", b"what is this", b"5", b"[]", b"{}", b"\xff", b'{"id": 5}'])
def test_a_value_that_is_not_a_record_is_a_protocol_error(value: bytes) -> None:
    with pytest.raises(ProtocolError, match="the record of a job is not readable"):
        RedriveProgress.decode(value)
