"""How a range is asked for, and when it is proven to be read: procedures without a server."""

from __future__ import annotations

import dataclasses
import datetime
import json
import random
from itertools import pairwise
from typing import Any

import pytest
from support.procedures import MemoryStream, Source

from jetspark.core.message import CoreMessage
from jetspark.errors import (
    ConfigError,
    ConnectionLost,
    ConsumerNotFound,
    DataLoss,
    RequestTimeout,
    StreamRecreated,
    UsageError,
)
from jetspark.jetstream.acks import AckableMessage
from jetspark.jetstream.config import StreamConfig
from jetspark.jetstream.info import StreamInfo, StreamState
from jetspark.jetstream.operations import Request
from jetspark.jetstream.pull import Ask, Puller, Wait
from jetspark.publish.steps import AskMany, OpenPull, Pull
from jetspark.state import scan
from jetspark.state.scan import REQUEST_MESSAGES, SILENCE_S, SLACK, Range, RangeScan, Sweep

SEEDS = range(80)

# ---- asking --------------------------------------------------------------------------------------------------------


def sweep(left: int) -> Sweep:
    return Sweep(Puller("_INBOX.x", "$JS.API.CONSUMER.MSG.NEXT.S.c"), left)


def asked(machine: Sweep, now: float = 0.0) -> list[bytes]:
    bodies = []
    while isinstance(step := machine.step(now, 1), Ask):
        bodies.append(step.body)
    assert isinstance(step, Wait)
    return bodies


def test_two_requests_are_out_ahead_of_the_reader() -> None:
    bodies = asked(sweep(999_999))
    assert len(bodies) == 2
    assert all(f'"batch":{REQUEST_MESSAGES},'.encode() in body for body in bodies)


def test_no_more_is_asked_for_than_is_expected() -> None:
    [body] = asked(sweep(11))
    assert b'"batch":11,' in body


def test_the_wait_is_bounded_by_the_silence_after_which_the_leader_is_asked() -> None:
    machine = sweep(4)
    asked(machine)
    assert machine.step(10.0, 1) == Wait(10.0 + SILENCE_S)


def test_nothing_is_asked_while_there_is_no_connection() -> None:
    assert sweep(4).step(0.0, None) == Wait(SILENCE_S)


def test_what_has_come_is_taken_before_anything_is_asked_or_told() -> None:
    machine = sweep(4)
    asked(machine)
    messages = [
        AckableMessage("s.1", b"x", f"$JS.ACK.S.c.1.{number}.{number}.0.2".encode(), None, None) for number in (1, 2)
    ]
    gone = CoreMessage("_INBOX.x.1", b"", None, b"NATS/1.0 409 Consumer Deleted\r\n\r\n", None)
    machine._puller.absorb([*messages, gone], 1.0)  # type: ignore[list-item]
    assert machine.step(1.0, 1) == 2
    machine._puller.buffer.clear()
    with pytest.raises(ConsumerNotFound):
        machine.step(1.0, 1)


def test_an_error_of_the_driver_is_told() -> None:
    machine = sweep(4)
    machine.error = ConnectionLost("cut")
    with pytest.raises(ConnectionLost):
        machine.step(1.0, 1)


def test_a_new_session_is_asked_for_what_the_last_one_owed() -> None:
    machine = sweep(4)
    [before] = asked(machine)
    assert isinstance(machine.step(0.0, 1), Wait)
    again = machine.step(0.0, 2)
    assert isinstance(again, Ask)
    assert again.body == before


def test_a_message_larger_than_a_request_is_asked_for_alone_and_without_a_bound() -> None:
    machine = sweep(2)
    asked(machine)
    refusal = b"NATS/1.0 409 Message Size Exceeds MaxBytes\r\nNats-Pending-Messages: 2\r\nNats-Pending-Bytes: 0\r\n\r\n"
    machine._puller.absorb([CoreMessage("_INBOX.x.1", b"", None, refusal, None)], 1.0)  # type: ignore[list-item]
    first, *_ = asked(machine, 1.0)
    assert b'"batch":1,' in first
    assert b"max_bytes" not in first


def test_a_large_message_waits_for_the_requests_that_are_out() -> None:
    machine = sweep(999_999)
    asked(machine)
    left = b"Nats-Pending-Messages: 20000\r\nNats-Pending-Bytes: 0\r\n\r\n"
    refusal = b"NATS/1.0 409 Message Size Exceeds MaxBytes\r\n" + left
    machine._puller.absorb([CoreMessage("_INBOX.x.1", b"", None, refusal, None)], 1.0)  # type: ignore[list-item]
    assert [asked(machine, 1.0), asked(machine, 1.0)] == [[], []]
    over = b"NATS/1.0 408 Request Timeout\r\n" + left
    machine._puller.absorb([CoreMessage("_INBOX.x.2", b"", None, over, None)], 1.0)  # type: ignore[list-item]
    first, *_ = asked(machine, 1.0)
    assert b'"batch":1,' in first


# ---- a range -------------------------------------------------------------------------------------------------------


def part(start: int, end: int, **more: Any) -> Range:
    return Range("S", MemoryStream.CREATED, start, end, **more)


def test_a_range_has_its_start_and_not_its_end() -> None:
    stream = MemoryStream(100)
    assert stream.read(RangeScan(part(10, 20))) == list(range(10, 20))
    assert stream.read(RangeScan(part(1, 101))) == list(range(1, 101))
    assert stream.read(RangeScan(part(5, 5))) == []
    assert stream.open == 0


def test_of_a_range_with_few_messages_few_are_asked_for() -> None:
    stream, asked = MemoryStream(2_999), []

    def note(step: Any) -> None:
        if isinstance(step, Pull):
            assert isinstance(step.reader, Sweep)
            asked.append(step.reader.left)

    stream.before_step = note
    found = stream.read(RangeScan(part(1, 3_000, subjects=("s.0",))))
    assert found == list(range(3, 3_000, 3))
    assert asked[0] == 999 + SLACK


def test_what_is_asked_for_gets_less_as_the_range_is_read() -> None:
    stream, asked = MemoryStream(2_999), []

    def note(step: Any) -> None:
        if isinstance(step, Pull):
            assert isinstance(step.reader, Sweep)
            asked.append(step.reader.left)

    stream.before_step = note
    assert stream.read(RangeScan(part(1, 1_001))) == list(range(1, 1_001))
    assert asked == sorted(set(asked), reverse=True)
    assert asked[0] == 1_000
    assert asked[-1] < 40  # what comes at once


class Counted(MemoryStream):
    """Counts what is asked for and done, by kind."""

    def __init__(self, count: int, message_bytes: int = 0) -> None:
        super().__init__(count)
        self._message_bytes = message_bytes
        self.steps: list[str] = []
        self.config: dict[str, Any] = {}
        """Of the last consumer."""

    def _perform(self, step: Any) -> Any:
        self.steps.append(type(step).__name__)
        return super()._perform(step)

    def _answer(self, request: Request) -> dict[str, Any]:
        self.steps.append(request.subject.removeprefix("$JS.API.").rpartition(".S")[0])
        answer = super()._answer(request)
        if "CONSUMER.CREATE" in request.subject:
            self.config = answer["config"]
        if "STREAM.INFO" in request.subject:
            answer["state"]["bytes"] = self._message_bytes * self.last
        return answer


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
@pytest.mark.parametrize("is_earliest", [True, False])
def test_of_a_range_that_is_all_there_the_stream_is_asked_once(
    is_earliest: bool, retention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "BATCH_MESSAGES", 30)  # so that the last messages of a range come with some beyond it
    for end in (50, 70):
        stream = Counted(100)
        stream.retention = retention
        assert stream.read(RangeScan(part(10, end, is_earliest=is_earliest))) == list(range(10, end))
        assert [stream.steps.count(each) for each in ("STREAM.INFO", "STREAM.MSG.GET", "Sleep")] == [1, 0, 0]


def test_gaps_matter_only_where_everything_was_promised() -> None:
    stream = Counted(100)
    stream.deleted = {20, 49}
    assert len(stream.read(RangeScan(part(10, 50, is_earliest=True)))) == 38
    assert stream.steps.count("STREAM.INFO") == 1


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_reading_ends_with_the_first_message_beyond_the_range(retention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "BATCH_MESSAGES", 20)
    stream = Counted(5_000)
    stream.retention, stream.deleted = retention, {10}
    assert stream.read(RangeScan(part(1, 11))) == list(range(1, 10))
    assert stream.steps.count("Pull") + stream.steps.count("AskMany") < 10


def test_a_range_of_which_nothing_is_left_is_not_read_and_is_lost_once() -> None:
    stream = MemoryStream(100)
    stream.first = 60
    allowed = RangeScan(part(10, 50), fail_on_loss=False)
    assert stream.read(allowed) == []
    assert allowed.lost_sequences == 40
    assert stream.opened == 0


@pytest.mark.parametrize(
    ("wants_data", "message_bytes", "is_without"), [(True, 1024, False), (False, 1024, True), (False, 1023, False)]
)
def test_large_messages_come_without_their_data_where_nobody_wants_it(
    wants_data: bool, message_bytes: int, is_without: bool
) -> None:
    stream = Counted(100, message_bytes)
    stream.read(RangeScan(part(1, 101), wants_data=wants_data))
    assert bool(stream.config.get("headers_only")) is is_without


def test_data_is_wanted_unless_somebody_says_otherwise() -> None:
    stream = Counted(100, 5_000)
    stream.read(RangeScan(part(1, 101)))
    assert not stream.config.get("headers_only")


def test_a_consumer_is_kept_by_one_server_in_memory_and_wants_no_acknowledgements() -> None:
    stream = Counted(100)
    stream.read(RangeScan(part(1, 101)))
    assert (stream.config["mem_storage"], stream.config["num_replicas"], stream.config["ack_policy"]) == (
        True,
        1,
        "none",
    )


def test_what_the_leader_has_beyond_the_range_is_not_left_of_it() -> None:
    stream, reading = MemoryStream(20), RangeScan(part(1, 11))
    stream.deleted = {10}
    stream.run(reading.next())
    reading._next = 10
    assert stream.run(reading._is_nothing_left()) is True
    reading._next = 9
    assert stream.run(reading._is_nothing_left()) is False


class Hesitant(MemoryStream):
    """Its pulls come back early at first, with nothing; the fourth with messages loses its first one."""

    early, with_messages = 3, 0

    def _pull(self, source: Source, reader: Any) -> list[Any]:
        if self.early:
            self.early -= 1
            self.now += SILENCE_S / 10
            return []
        found = super()._pull(source, reader)
        self.with_messages += 1
        return found[1:] if self.with_messages == 4 and len(found) > 1 else found


def test_a_pull_that_comes_back_early_is_no_silence() -> None:
    stream = Hesitant(100)
    stream.now = 1_000.0
    assert stream.run(RangeScan(part(1, 11)).next()) is not None
    assert stream.opened == 1


def test_how_many_messages_were_lost_on_the_way_is_told(caplog: pytest.LogCaptureFixture) -> None:
    stream = Hesitant(400)
    with caplog.at_level("INFO", "jetspark.state"):
        assert stream.read(RangeScan(part(1, 401))) == list(range(1, 401))
    assert "with a new consumer: 1 messages of consumer 'c' were lost on the way" in caplog.text
    assert stream.opened == 2


def test_the_first_missing_sequence_is_neither_there_nor_known_to_be_gone() -> None:
    assert scan._first_missing(10, set(), []) == 10
    assert scan._first_missing(10, {10, 11, 12, 14}, []) == 13
    assert scan._first_missing(10, {10, 11, 14}, [range(12, 14)]) == 15


@pytest.mark.parametrize("size", [7, 50])
def test_a_piece_ends_when_it_is_large_enough(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "PIECE_MESSAGES", size)
    stream, reading = MemoryStream(500), RangeScan(part(1, 501))
    sizes = []
    while (piece := stream.run(reading.next())) is not None:
        sizes.append(len(piece))
    assert sum(sizes) == 500
    assert len(sizes) > 1
    assert all(size <= each < size + 40 for each in sizes[:-1])  # what comes at once stays together


@pytest.mark.parametrize("block", range(4))
def test_nothing_is_skipped_or_repeated_whatever_is_lost(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "PIECE_MESSAGES", 50)
    monkeypatch.setattr(scan, "BATCH_MESSAGES", 20)  # so that a range takes several direct gets
    for seed in SEEDS[block::4]:
        rng = random.Random(seed)
        stream = MemoryStream(400, faults=rng.choice([0.02, 0.1, 0.3]), rng=rng)
        stream.retention = rng.choice(["limits", "limits", "workqueue"])
        stream.deleted = set(rng.sample(range(1, 401), rng.choice([0, 5, 300])))
        subjects = rng.choice([(), ("s.1",), ("s.0", "s.2")])
        start, end = sorted(rng.sample(range(1, 402), 2))
        found = stream.read(RangeScan(part(start, end, subjects=subjects)))
        stream._filters = list(subjects)
        assert found == [sequence for sequence in stream.there(start) if sequence < end], seed
        assert stream.open == 0, seed


@pytest.mark.parametrize("block", range(4))
def test_what_is_evicted_while_it_is_read_is_counted_to_the_message(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scan, "PIECE_MESSAGES", 50)
    for seed in SEEDS[block::4]:
        rng = random.Random(seed)
        stream = MemoryStream(600, faults=rng.choice([0.0, 0.1]), rng=rng)

        def evict(step: Any, stream: MemoryStream = stream, rng: random.Random = rng) -> None:
            if isinstance(step, Pull) and rng.random() < 0.3:
                stream.first = min(600, stream.first + rng.randrange(60))

        stream.before_step = evict
        reading = RangeScan(part(1, 601), fail_on_loss=False)
        found = stream.read(reading)
        assert found == sorted(set(found)), seed
        assert reading.lost_sequences == 600 - len(found), seed


def test_what_is_gone_is_an_error_unless_it_was_not_promised() -> None:
    stream = MemoryStream(100)
    stream.first = 31
    failing = RangeScan(part(10, 50))
    with pytest.raises(DataLoss):
        stream.read(failing)
    with pytest.raises(UsageError, match="a scan that has failed"):
        stream.run(failing.next())
    earliest = RangeScan(part(10, 50, is_earliest=True))
    assert stream.read(earliest) == list(range(31, 50))
    assert earliest.lost_sequences == 0
    with pytest.raises(DataLoss):
        stream.read(RangeScan(part(10, 20)))


def test_what_is_purged_up_to_the_end_while_it_is_read_is_lost() -> None:
    for allowed in (True, False):
        stream = MemoryStream(100)

        def purge(step: Any, stream: MemoryStream = stream) -> None:
            if isinstance(step, Pull) and step.source.position > 30:  # type: ignore[attr-defined]
                stream.first = 101

        stream.before_step = purge
        reading = RangeScan(part(1, 101), fail_on_loss=not allowed)
        if allowed:
            found = stream.read(reading)
            assert 30 <= len(found) < 100
            assert reading.lost_sequences == 100 - len(found)
        else:
            with pytest.raises(DataLoss) as caught:
                stream.read(reading)
            assert "failOnDataLoss" not in str(caught.value)  # an option of Spark, which is not who reads here


@pytest.mark.parametrize("piece", [1, 1_000])
@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_what_is_evicted_beyond_the_end_while_it_is_read_is_lost(
    retention: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next message is one that nobody asked for: everything up to the end is gone, too."""
    monkeypatch.setattr(scan, "BATCH_MESSAGES", 20)
    monkeypatch.setattr(scan, "PIECE_MESSAGES", piece)
    stream, reads = MemoryStream(200), iter(range(1_000))
    stream.retention = retention

    def purge(step: Any) -> None:
        if isinstance(step, Pull | AskMany) and next(reads) == 2:
            stream.first = 151

    stream.before_step = purge
    reading = RangeScan(part(1, 101), fail_on_loss=False)
    found = stream.read(reading)
    assert 0 < len(found) < 100
    assert reading.lost_sequences == 100 - len(found)


def test_a_full_batch_of_direct_gets_is_followed_by_another_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "BATCH_MESSAGES", 20)
    stream = Counted(100)
    stream.retention = "workqueue"
    assert stream.read(RangeScan(part(1, 101))) == list(range(1, 101))
    assert stream.steps.count("Sleep") == 0


def test_another_stream_of_the_same_name_is_not_read() -> None:
    stream = MemoryStream(100)
    stream.created = "2026-02-02T00:00:00Z"
    with pytest.raises(StreamRecreated):
        stream.read(RangeScan(part(10, 50)))


def test_a_server_that_is_silent_is_given_up_in_time(caplog: pytest.LogCaptureFixture) -> None:
    stream = MemoryStream(100)

    def gone(step: Any) -> None:
        if isinstance(step, Pull):
            raise ConsumerNotFound(404, 10014, "consumer not found")

    stream.before_step = gone
    with (
        caplog.at_level("INFO", "jetspark.state"),
        pytest.raises(RequestTimeout, match="sequence 10 or one after it in stream 'S'"),
    ):
        stream.read(RangeScan(part(10, 50), timeout_s=5.0))
    assert 5.0 <= stream.now < 7.0
    assert stream.open == 0
    assert "stream S: reading continues at sequence 10 with a new consumer: consumer not found" in caplog.text


@pytest.mark.parametrize("retention", ["limits", "workqueue"])
def test_patience_is_counted_from_the_last_message(retention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a slow server nor a slow reader is silence: ten times as long as the time-out may pass in all."""
    monkeypatch.setattr(scan, "PIECE_MESSAGES", 100)
    monkeypatch.setattr(scan, "BATCH_MESSAGES", 20)
    stream, steps = MemoryStream(400), iter(range(1_000_000))
    stream.retention = retention

    def be_slow(step: Any) -> None:
        if isinstance(step, Pull | AskMany):
            stream.now += 3.0
            if next(steps) % 2:
                raise ConsumerNotFound(404, 10014, "consumer not found")

    stream.before_step = be_slow
    reading, found = RangeScan(part(1, 401), timeout_s=8.0), 0
    while (piece := stream.run(reading.next())) is not None:
        found += len(piece)
        stream.now += 100.0
    assert found == 400
    assert stream.now > 400.0


class SlowStream(MemoryStream):
    """Its consumers send nothing at first, each for a time of its own, and after three times again."""

    def __init__(self, count: int, *silences_s: float) -> None:
        super().__init__(count)
        self._silences_s = iter(silences_s)
        self._speaks_at = dict[int, float]()
        self.opened_at: list[float] = []
        self.heard: list[float] = []

    def _perform_own(self, step: Any) -> Any:
        answer = super()._perform_own(step)
        if isinstance(step, OpenPull):
            self.opened_at.append(self.now)
            self._speaks_at[id(answer)] = self.now + next(self._silences_s)
        return answer

    def _pull(self, source: Source, reader: Any) -> list[Any]:
        while isinstance(step := reader.step(self.now, 1), Ask):
            pass
        if self.now < self._speaks_at[id(source)]:
            assert isinstance(step, Wait)
            self.now = step.until or self.now
            return []
        self.heard.append(self.now)
        if len(self.heard) == 3:
            self._speaks_at[id(source)] = float("inf")  # it has said its last
        return super()._pull(source, reader)


def test_a_consumer_that_needs_long_to_begin_is_given_longer_each_time() -> None:
    never = float("inf")
    stream = SlowStream(400, never, never, never, 3.0, 0.0)
    assert stream.read(RangeScan(part(1, 401), timeout_s=60.0)) == list(range(1, 401))
    waited = [later - before for before, later in pairwise(stream.opened_at)]
    assert waited[:3] == pytest.approx([SILENCE_S, SILENCE_S, 2 * SILENCE_S], abs=0.3)
    # Once it has spoken, silence is as long as it was in the beginning.
    assert stream.opened_at[4] - stream.heard[2] == pytest.approx(SILENCE_S, abs=0.3)


def test_a_consumer_that_nobody_serves_is_left_without_waiting_for_silence() -> None:
    stream = MemoryStream(100)

    def serve_nobody(step: Any) -> None:
        if isinstance(step, Pull) and stream.opened == 1:
            nobody = CoreMessage("_INBOX.x.1", b"", None, b"NATS/1.0 503\r\n\r\n", None)
            step.source.puller.absorb([nobody], stream.now)

    stream.before_step = serve_nobody
    assert stream.read(RangeScan(part(1, 101))) == list(range(1, 101))
    assert stream.opened == 2
    assert stream.now < SILENCE_S


# ---- the head of a stream ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "last", "size", "expected"),
    [
        (0, 0, 0, (1, 1, 0.0)),  # never had a message
        (8, 7, 0, (8, 8, 0.0)),  # purged
        (5, 5, 70, (5, 6, 70.0)),
        (11, 20, 1000, (11, 21, 100.0)),
    ],
)
def test_a_head_is_where_a_stream_begins_and_ends(
    first: int, last: int, size: int, expected: tuple[int, int, float]
) -> None:
    state = StreamState(messages=1, bytes=size, first_sequence=first, last_sequence=last, consumers=0)
    head = scan.head_of(StreamInfo(config=StreamConfig(name="S"), state=state, created=NOW))
    assert (head.stream, head.created) == ("S", "2026-01-01T00:00:00Z")
    assert (head.first, head.next, head.bytes_per_sequence) == expected


def test_a_stream_is_whole_from_where_it_begins_or_from_where_it_is_known_to_be() -> None:
    head = scan.Head("S", "", 5, 9)
    assert head.whole_from == 5
    assert dataclasses.replace(head, kept_from=2).whole_from == 2


def test_a_stream_that_is_consumed_by_reading_is_read_by_direct_get() -> None:
    for retention in (None, "limits"):
        assert scan.is_consumed(StreamConfig(name="S", retention=retention)) is False
    assert scan.is_consumed(StreamConfig(name="S", retention="workqueue", allow_direct=True)) is True
    with pytest.raises(ConfigError, match=r"interest retention.*set allow_direct"):
        scan.is_consumed(StreamConfig(name="S", retention="interest"))


# ---- direct gets ---------------------------------------------------------------------------------------------------

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def stored(sequence: int, before: int, subject: str = "s.1") -> CoreMessage:
    block = (
        f"Nats-Stream: S\r\nNats-Subject: {subject}\r\nNats-Sequence: {sequence}\r\nNats-Last-Sequence: {before}\r\n"
    )
    block += "Nats-Time-Stamp: 2026-01-01T00:00:00Z\r\nNats-Num-Pending: 5\r\n"
    return CoreMessage("_INBOX", b"x", None, f"NATS/1.0\r\n{block}\r\n".encode(), None)


def ended(before: int, pending: int = 0) -> CoreMessage:
    block = f"NATS/1.0 204 EOB\r\nNats-Num-Pending: {pending}\r\nNats-Last-Sequence: {before}\r\n\r\n"
    return CoreMessage("_INBOX", b"", None, block.encode(), None)


def answered(direct: scan.DirectReading, *answers: CoreMessage) -> tuple[list[int] | None, dict[str, Any]]:
    """The sequences that one request finds, and the request. Without an end its answers are lost."""
    reading = direct.next()
    try:
        step = next(reading)
        assert isinstance(step, AskMany)
        request = json.loads(direct.request().data)
        was_over = direct.is_over
        for answer in answers:
            direct.accept_all([answer])
        if not direct.is_over:
            direct.lost()
        assert (was_over, direct.is_over) == (False, True)
        reading.send(None)
    except StopIteration as finished:
        found = finished.value
        return (None if found is None else [each.sequence for each in found]), request
    raise AssertionError("one request was to be enough")


def reading_of(*subjects: str, bytes_per_sequence: float = 100.0) -> scan.DirectReading:
    return scan.DirectReading("$JS.API", part(10, 50, subjects=subjects), 10, bytes_per_sequence)


def test_messages_are_read_from_the_last_one_on_until_the_stream_ends() -> None:
    direct = reading_of("s.1")
    found, request = answered(direct, stored(11, 0), stored(14, 11), ended(14, pending=7))
    assert (found, direct.next_sequence) == ([11, 14], 15)
    assert request == {"batch": 1000, "seq": 10, "next_by_subj": "s.1"}
    found, request = answered(direct, stored(20, 0), ended(20))
    assert (found, request["seq"], direct.next_sequence) == ([20], 15, 21)
    with pytest.raises(StopIteration) as over:
        next(direct.next())
    assert over.value.value is None


def test_an_empty_answer_is_the_end_and_a_lost_one_is_not() -> None:
    direct = reading_of()
    nothing = CoreMessage("_INBOX", b"", None, b"NATS/1.0 404 Message Not Found\r\n\r\n", None)
    assert answered(direct, nothing)[0] is None
    direct = reading_of()
    with pytest.raises(scan.Interrupted, match="from sequence 10 on were lost"):
        answered(direct)
    assert answered(direct, stored(10, 0), ended(10))[0] == [10]


def test_several_filters_are_applied_here_because_the_server_takes_one() -> None:
    direct = reading_of("s.1", "s.2")
    answers = [stored(10, 0, "s.1"), stored(11, 10, "s.3"), stored(12, 11, "s.2"), stored(13, 12, "s.3")]
    found, request = answered(direct, *answers, ended(13, pending=3))
    assert (found, direct.next_sequence, "next_by_subj" in request) == ([10, 12], 14, False)


@pytest.mark.parametrize(
    ("bytes_per_sequence", "batch"), [(0.0, 1000), (4194.0, 1000), (8192.0, 512), (4e6, 1), (1e9, 1)]
)
def test_a_request_is_for_as_many_as_fit(bytes_per_sequence: float, batch: int) -> None:
    direct = reading_of(bytes_per_sequence=bytes_per_sequence)
    assert json.loads(direct.request().data)["batch"] == batch


# ---- pieces and losses ---------------------------------------------------------------------------------------------


def test_a_piece_ends_when_it_has_enough_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, reading = MemoryStream(200), RangeScan(part(1, 201))
    whole = stream.run(RangeScan(part(1, 201)).next())
    size = len(whole[0].data)
    assert len(whole) == 200
    assert size > 0
    monkeypatch.setattr(scan, "PIECE_BYTES", 50 * size)
    sizes = []
    while (piece := stream.run(reading.next())) is not None:
        sizes.append(len(piece))
    assert sum(sizes) == 200
    assert len(sizes) > 1
    assert all(50 <= each < 90 for each in sizes[:-1])


def test_a_loss_that_is_allowed_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    stream = MemoryStream(100)
    stream.first = 31
    with caplog.at_level("INFO", "jetspark.state"):
        allowed = RangeScan(part(10, 50), fail_on_loss=False)
        assert stream.read(allowed) == list(range(31, 50))
        assert allowed.lost_sequences == 21
        assert ["21 sequences from 10 on are gone" in each.getMessage() for each in caplog.records] == [True]
        caplog.clear()
        stream.read(RangeScan(part(10, 50, is_earliest=True)))
        assert ["21 messages from sequence 10 on" in each.getMessage() for each in caplog.records] == [True]
