"""What the ledger says of earlier attempts, on a bucket in memory."""

from __future__ import annotations

import datetime
import json
from typing import Any

import pytest

pytest.importorskip("pyspark")

from jetspark.errors import (
    Conflict,
    JetStreamUnavailable,
    KeyNotFound,
    ProtocolError,
    UsageError,
)
from jetspark.jetstream.config import StreamConfig
from jetspark.jetstream.info import StreamInfo, StreamState
from jetspark.jetstream.kv import KVEntry
from jetspark.spark.stream import ledger as module
from jetspark.spark.stream.ledger import Committed, Ledger

NOON = datetime.datetime(2026, 3, 20, 12, 0, tzinfo=datetime.UTC)


class FakeBucket:
    """Keys with revisions, and the server's clock."""

    bucket = "epochs"

    def __init__(self) -> None:
        self.now = NOON
        self.revision = 0
        self.entries: dict[str, KVEntry] = {}
        self.before_write: list[Any] = []
        """Called, and forgotten, before the next write: what somebody else does at that moment."""

    def get(self, key: str) -> KVEntry:
        if key not in self.entries:
            raise KeyNotFound(self.bucket, key)
        return self.entries[key]

    def put(self, key: str, value: bytes) -> int:
        self.revision += 1
        self.entries[key] = KVEntry(bucket=self.bucket, key=key, value=value, revision=self.revision, created=self.now)
        return self.revision

    def create(self, key: str, value: bytes) -> None:
        self._others()
        if key in self.entries:
            raise Conflict(self.bucket, (key,))
        self.put(key, value)

    def update(self, key: str, value: bytes, *, revision: int) -> None:
        self._others()
        if self.entries[key].revision != revision:
            raise Conflict(self.bucket, (key,))
        self.put(key, value)

    def _others(self) -> None:
        while self.before_write:
            self.before_write.pop()()


class FakeJetStream:
    """Notes what is purged."""

    def __init__(self) -> None:
        self.purged: list[tuple[str, str]] = []

    def stream(self, name: str) -> Any:
        outer = self

        class _Stream:
            def purge(self, *, subject: str) -> None:
                outer.purged.append((name, subject))

        return _Stream()


def ledger_of(bucket: FakeBucket, js: Any = None) -> Ledger:
    return Ledger(js, bucket, "q1")  # type: ignore[arg-type]


def stream_at(sequence: int, name: str = "S", created: datetime.datetime = NOON) -> StreamInfo:
    return StreamInfo(config=StreamConfig(name=name), state=StreamState(last_sequence=sequence), created=created)


def test_the_first_attempt_finds_nothing_and_notes_where_the_stream_was() -> None:
    bucket = FakeBucket()
    opening = ledger_of(bucket).open(4, 0, stream_at(100))
    assert (opening.after, opening.is_repeated) == (100, False)
    assert b'"batch":4' in bucket.entries["q1.open.0"].value


def test_a_second_attempt_finds_the_sequence_of_the_first_and_its_age_by_the_servers_clock() -> None:
    bucket = FakeBucket()
    ledger_of(bucket).open(4, 0, stream_at(100))
    bucket.now += datetime.timedelta(seconds=90)
    opening = ledger_of(bucket).open(4, 0, stream_at(170))
    assert (opening.after, opening.is_repeated, opening.age_s) == (100, True, 90.0)
    bucket.now += datetime.timedelta(seconds=10)
    assert ledger_of(bucket).open(4, 0, stream_at(171)).age_s == 100.0


def test_the_age_of_the_first_attempt_is_not_told_by_an_old_note_of_a_replica_that_is_behind() -> None:
    class Behind(FakeBucket):
        def get(self, key: str) -> KVEntry:
            return stale if key.endswith(".again") else super().get(key)

    bucket = Behind()
    stale = KVEntry(bucket="epochs", key="q1.open.0.again", value=b"", revision=1, created=NOON)
    ledger_of(bucket).open(4, 0, stream_at(100))
    bucket.now += datetime.timedelta(seconds=90)
    assert ledger_of(bucket).open(4, 0, stream_at(170)).age_s >= 90


def test_partitions_and_batches_are_told_apart_and_a_batch_takes_the_place_of_the_one_before() -> None:
    bucket = FakeBucket()
    ledger = ledger_of(bucket)
    ledger.open(4, 0, stream_at(100))
    assert not ledger.open(4, 1, stream_at(100)).is_repeated
    assert not ledger.open(5, 0, stream_at(200)).is_repeated
    assert ledger.open(5, 0, stream_at(300)).after == 200
    assert {key for key in bucket.entries if not key.endswith("again")} == {"q1.open.0", "q1.open.1"}


def test_of_two_attempts_at_a_time_the_second_finds_the_first() -> None:
    bucket = FakeBucket()
    bucket.before_write.append(lambda: ledger_of(bucket).open(4, 0, stream_at(100)))
    opening = ledger_of(bucket).open(4, 0, stream_at(101))
    assert (opening.after, opening.is_repeated) == (100, True)


def test_an_attempt_that_always_comes_second_gives_up_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    class Contested(FakeBucket):
        def create(self, key: str, value: bytes) -> None:
            raise Conflict(self.bucket, (key,))

    with pytest.raises(JetStreamUnavailable, match="ledger 'epochs'"):
        ledger_of(Contested()).open(4, 0, stream_at(100))
    assert clock.now == pytest.approx(module.MAX_CONFLICTS * module.CONFLICT_PAUSE_S)


def test_an_attempt_of_a_batch_that_is_over_does_not_write() -> None:
    bucket = FakeBucket()
    ledger_of(bucket).open(5, 0, stream_at(100))
    with pytest.raises(UsageError, match="batch 4 is over"):
        ledger_of(bucket).open(4, 0, stream_at(100))


def test_a_stream_that_was_made_again_is_read_from_its_beginning_and_another_one_is_a_new_start() -> None:
    bucket = FakeBucket()
    ledger_of(bucket).open(4, 0, stream_at(100))
    remade = stream_at(7, created=NOON + datetime.timedelta(hours=1))
    assert ledger_of(bucket).open(4, 0, remade).after == 0
    opening = ledger_of(bucket).open(4, 0, stream_at(55, name="OTHER"))
    assert (opening.after, opening.is_repeated) == (55, False)


def test_the_last_committed_batch_is_known_and_nothing_before_the_first() -> None:
    bucket = FakeBucket()
    ledger = ledger_of(bucket)
    assert ledger.committed() is None
    ledger.commit(Committed(3, 50, {"S": "noon"}))
    ledger.commit(Committed(4, 60, {"S": "noon"}))
    assert ledger.committed() == Committed(4, 60, {"S": "noon"})
    ledger.commit(Committed(5, 70, {"S": "noon"}, run="r1", write="w1", digest="d1"))
    assert ledger.committed() == Committed(5, 70, {"S": "noon"}, run="r1", write="w1", digest="d1")


COMMITTED = {"batch": 4, "rows": 60, "streams": {"S": "noon"}, "run": "", "write": "", "digest": "d1"}


def test_what_a_later_version_adds_to_an_entry_does_no_harm() -> None:
    bucket = FakeBucket()
    bucket.put("q1.committed", json.dumps({**COMMITTED, "new": True}).encode())
    assert ledger_of(bucket).committed() == Committed(4, 60, {"S": "noon"}, digest="d1")


@pytest.mark.parametrize("missing", COMMITTED)
def test_an_entry_without_one_of_its_fields_is_an_error_that_names_the_key_to_delete(missing: str) -> None:
    """Read as empty, a missing digest would be that of other rows, and missing streams any stream."""
    bucket = FakeBucket()
    bucket.put("q1.committed", json.dumps({name: COMMITTED[name] for name in COMMITTED if name != missing}).encode())
    with pytest.raises(ProtocolError, match=r"key q1\.committed of bucket 'epochs' .*digest.*Delete the key"):
        ledger_of(bucket).committed()


def test_what_is_not_an_entry_is_an_error_that_names_the_key_to_delete() -> None:
    bucket = FakeBucket()
    bucket.put("q1.committed", b"gibberish")
    with pytest.raises(ProtocolError, match=r"key q1\.committed .*gibberish"):
        ledger_of(bucket).committed()
    bucket.put("q1.open.0", b'{"batch":4}')
    with pytest.raises(ProtocolError, match=r"key q1\.open\.0 .*created, after"):
        ledger_of(bucket).open(4, 0, stream_at(100))


def test_forgetting_removes_what_is_open_and_nothing_else() -> None:
    js = FakeJetStream()
    ledger_of(FakeBucket(), js).forget()
    assert js.purged == [("KV_epochs", "$KV.epochs.q1.open.>")]


class Clock:
    """Time that passes while one sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(module, "time", self)

    def sleep(self, seconds: float) -> None:
        self.now += seconds
