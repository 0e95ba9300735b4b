"""How a range is asked for, and when it is proven to be read: procedures without a server."""

from __future__ import annotations

import random
from typing import Any

import pytest
from support.procedures import MemoryStream

from jetspark.core.message import CoreMessage
from jetspark.errors import ConsumerNotFound, DataLoss, RequestTimeout, StreamRecreated, UsageError
from jetspark.jetstream.pull import Ask, Puller, Wait
from jetspark.publish.steps import Pull
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


def test_a_message_larger_than_a_request_is_asked_for_alone_and_without_a_bound() -> None:
    machine = sweep(2)
    asked(machine)
    refusal = b"NATS/1.0 409 Message Size Exceeds MaxBytes\r\nNats-Pending-Messages: 2\r\nNats-Pending-Bytes: 0\r\n\r\n"
    machine._puller.absorb([CoreMessage("_INBOX.x.1", b"", None, refusal, None)], 1.0)  # type: ignore[list-item]
    first, *_ = asked(machine, 1.0)
    assert b'"batch":1,' in first
    assert b"max_bytes" not in first


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


@pytest.mark.parametrize("size", [7, 50])
def test_a_piece_ends_when_it_is_large_enough(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "PIECE_MESSAGES", size)
    stream, reading = MemoryStream(500), RangeScan(part(1, 501))
    sizes = []
    while (piece := stream.run(reading.next())) is not None:
        sizes.append(len(piece))
    assert sum(sizes) == 500
    assert all(size <= each < size + 40 for each in sizes[:-1])  # what comes at once stays together


@pytest.mark.parametrize("block", range(4))
def test_nothing_is_skipped_or_repeated_whatever_is_lost(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan, "PIECE_MESSAGES", 50)
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


def test_another_stream_of_the_same_name_is_not_read() -> None:
    stream = MemoryStream(100)
    stream.created = "2026-02-02T00:00:00Z"
    with pytest.raises(StreamRecreated):
        stream.read(RangeScan(part(10, 50)))


def test_a_server_that_is_silent_is_given_up_in_time() -> None:
    stream = MemoryStream(100)

    def gone(step: Any) -> None:
        if isinstance(step, Pull):
            raise ConsumerNotFound(404, 10014, "consumer not found")

    stream.before_step = gone
    with pytest.raises(RequestTimeout, match="sequence 10 or one after it in stream 'S'"):
        stream.read(RangeScan(part(10, 50), timeout_s=5.0))
    assert 5.0 <= stream.now < 7.0
    assert stream.open == 0
