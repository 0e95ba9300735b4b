"""What a bucket's messages say, and how a table is divided among readers."""

from __future__ import annotations

import logging
from array import array
from typing import Any

import pytest
from support.tables import CREATED, MemoryTable

from jetspark.core.step_runner import Sleep
from jetspark.errors import ConfigError, ConnectionLost, ConsumerNotFound, StreamRecreated
from jetspark.jetstream.acks import AckableMessage
from jetspark.jetstream.operations import Request
from jetspark.publish.steps import Connect, Pull
from jetspark.state.deliveries import count_up_to, delivery
from jetspark.state.scan import SILENCE_S
from jetspark.state.tables import (
    CATCH_UP_S,
    BucketView,
    TablePlan,
    first_from,
    is_within_transaction,
    open_bucket,
    operation,
    plan,
    snapshot,
    split,
)


def delivered(sequence: int, headers: bytes | None = None) -> AckableMessage:
    reply = b"$JS.ACK.KV_orders.c.1.%d.%d.1700000000123456789.4" % (sequence, sequence - 1)
    return AckableMessage("$KV.orders.a", b"", reply, headers, None)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (None, "put"),
        (b"NATS/1.0\r\nJetSpark-Sequence: 4\r\n\r\n", "put"),
        (b"NATS/1.0\r\nKV-Operation: DEL\r\n\r\n", "delete"),
        (b"NATS/1.0\r\nNats-Rollup: sub\r\nKV-Operation: PURGE\r\n\r\n", "purge"),
        (b"NATS/1.0\r\nNats-Marker-Reason: MaxAge\r\n\r\n", "purge"),
    ],
)
def test_headers_tell_what_was_done(headers: bytes | None, expected: str) -> None:
    assert operation(delivered(1, headers=headers)) == expected


@pytest.mark.parametrize(
    ("headers", "is_within"),
    [
        (None, False),
        (b"NATS/1.0\r\nNats-Batch-Id: x\r\nNats-Batch-Sequence: 1\r\n\r\n", True),
        (b"NATS/1.0\r\nNats-Batch-Id: x\r\nNats-Batch-Sequence: 2\r\nNats-Batch-Commit: 1\r\n\r\n", False),
    ],
)
def test_a_transaction_is_over_with_the_message_that_says_so(headers: bytes | None, is_within: bool) -> None:
    assert is_within_transaction(headers) is is_within


def test_a_piece_is_cut_at_the_last_sequence() -> None:
    messages = [delivered(sequence) for sequence in (2, 4, 6)]
    assert [count_up_to(messages, last) for last in range(1, 8)] == [0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("first", "end", "parts"), [(1, 101, 3), (5, 8, 10), (7, 7, 2), (1, 2, 1), (1, 101, 10**25), (7, 7, 10**25)]
)
def test_parts_cover_everything_once(first: int, end: int, parts: int) -> None:
    ranges = split(first, end, parts)
    assert [number for low, high in ranges for number in range(low, high)] == list(range(first, end))
    assert len(ranges) == min(parts, end - first)
    plan = TablePlan(9, array("Q", range(first, end)))
    assert [number for part in plan.parts(parts) for number in part] == list(range(first, end))


# ---- a bucket --------------------------------------------------------------------------------------------------------

HALF = ("Nats-Batch-Id: x", "Nats-Batch-Sequence: 1")
WHOLE = ("Nats-Batch-Id: x", "Nats-Batch-Sequence: 2", "Nats-Batch-Commit: 1")
DELETED = "KV-Operation: DEL"


def opened(table: MemoryTable, *keys: str) -> BucketView:
    view: BucketView = table.run(open_bucket("b", keys))
    return view


def read(table: MemoryTable, *keys: str, **options: Any) -> dict[str, int]:
    """The revision of each key in a snapshot; however it ends, no consumer is left."""
    view = opened(table, *keys)
    try:
        found = table.run(snapshot(view, **options))
    finally:
        assert table.closed == len(table.consumers)
    return {subject.removeprefix("$KV.b."): delivery(message).sequence for subject, message in found.items()}


def planned(table: MemoryTable, *keys: str, **options: Any) -> tuple[int, list[int], tuple[str, ...]]:
    found: TablePlan = table.run(plan(opened(table, *keys), **options))
    assert table.closed == len(table.consumers)
    return found.sequence, list(found.wanted), found.doubtful


def test_a_bucket_is_opened_with_all_of_its_keys() -> None:
    view = opened(MemoryTable(history=3))
    assert (view.name, view.stream, view.prefix, view.subjects) == ("b", "KV_b", "$KV.b.", ("$KV.b.>",))
    assert (view.is_filtered, view.history, view.created) == (False, 3, CREATED)


def test_a_bucket_is_opened_with_some_of_its_keys() -> None:
    view = opened(MemoryTable(), "a.*", "c")
    assert view.subjects == ("$KV.b.a.*", "$KV.b.c")
    assert view.is_filtered is True


def test_a_mirror_has_the_keys_of_its_origin() -> None:
    view = opened(MemoryTable(mirror_of="KV_origin"))
    assert (view.name, view.stream, view.prefix, view.subjects) == ("b", "KV_b", "$KV.origin.", ("$KV.origin.>",))


def test_a_bucket_that_says_nothing_of_its_history_keeps_one_revision() -> None:
    assert opened(MemoryTable(history=None)).history == 1


def test_a_bucket_that_was_made_again_is_another() -> None:
    table = MemoryTable()
    view = opened(table)
    view.check_is(CREATED)
    table.created = "2026-02-02T00:00:00Z"
    with pytest.raises(StreamRecreated):
        opened(table).check_is(view.created)


def test_the_first_revision_from_a_sequence_on_is_that_of_any_key_that_is_asked_for() -> None:
    table = MemoryTable(history=9)
    for key in "abcab":
        table.put(key)
    assert [table.run(first_from(opened(table, "c", "b"), sequence)) for sequence in range(1, 7)] == [
        2,
        2,
        3,
        5,
        5,
        None,
    ]
    assert set(table.requests) == {"STREAM.INFO", "STREAM.MSG.GET"}


# ---- its present -----------------------------------------------------------------------------------------------------


def test_a_snapshot_has_the_last_revision_of_each_key_and_markers() -> None:
    table = MemoryTable(history=5)
    for key in "abcba":
        table.put(key)
    table.put("c", DELETED)
    assert read(table) == {"b": 4, "a": 5, "c": 6}
    assert read(table, "a", "c") == {"a": 5, "c": 6}


@pytest.mark.parametrize("keys", [(), ("never", "neither")])
def test_a_snapshot_of_nothing_waits_for_nothing(keys: tuple[str, ...]) -> None:
    table = MemoryTable()
    assert read(table, *keys) == {}
    assert table.now < CATCH_UP_S


def test_the_consumer_is_asked_what_is_left_only_at_the_end() -> None:
    table = MemoryTable()
    for key in "abcdefg":
        table.put(key)
    assert len(read(table)) == 7
    assert table.requests.count("CONSUMER.INFO") == 1


@pytest.mark.parametrize("wants_data", [True, False])
def test_data_is_sent_only_where_it_is_wanted(wants_data: bool) -> None:
    table = MemoryTable()
    table.put("a")
    read(table, wants_data=wants_data)
    assert bool(table.consumers[0].config.get("headers_only")) is not wants_data
    read(table)
    assert not table.consumers[1].config.get("headers_only")


def test_what_is_written_while_it_is_read_is_in_a_snapshot() -> None:
    table = MemoryTable()
    for key in "abcd":
        table.put(key)
    more = iter("ab")

    def write(step: object) -> None:
        if isinstance(step, Pull) and (key := next(more, None)):
            table.put(key)

    table.before_step = write
    assert read(table) == {"c": 3, "d": 4, "a": 5, "b": 6}


def test_a_snapshot_waits_for_a_replica_that_is_behind_what_the_leader_has() -> None:
    table = MemoryTable()
    for key in "abc":
        table.put(key)
    for hidden in (1, 3):
        table.hidden = hidden

        def catch_up(step: object) -> None:
            if isinstance(step, Sleep):
                table.hidden -= 1

        table.before_step = catch_up
        began = table.now
        assert read(table) == {"a": 1, "b": 2, "c": 3}
        assert table.now - began < CATCH_UP_S
    assert len(table.consumers) == 2


def test_a_replica_that_stays_behind_is_told_of_and_not_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    table = MemoryTable()
    for key in "abc":
        table.put(key)
    table.hidden = 1
    with caplog.at_level(logging.WARNING, "jetspark.state"):
        assert read(table) == {"a": 1, "b": 2}
    assert [each.getMessage() for each in caplog.records] == [
        "stream KV_b: read ends early; expected messages did not arrive"
    ]
    assert CATCH_UP_S < table.now < CATCH_UP_S + 1.0


def test_a_message_that_is_lost_on_the_way_is_read_from_another_consumer() -> None:
    table = MemoryTable()
    for key in "abc":
        table.put(key)
    table.lost = 1  # the second: the third shows that it is missing
    assert read(table) == {"a": 1, "b": 2, "c": 3}
    assert len(table.consumers) == 2


def test_the_last_message_that_is_lost_on_the_way_is_missed_after_a_silence() -> None:
    table = MemoryTable()
    for key in "ab":
        table.put(key)
    table.lost = 1
    assert read(table) == {"a": 1, "b": 2}
    assert len(table.consumers) == 2
    assert table.now > SILENCE_S


def test_a_message_that_is_under_way_is_waited_for() -> None:
    table = MemoryTable()
    for key in "abc":
        table.put(key)
    table.delayed = 1
    assert read(table) == {"a": 1, "b": 2, "c": 3}
    assert len(table.consumers) == 1


def test_a_message_that_only_the_consumer_knows_of_is_waited_for_too() -> None:
    table = MemoryTable()
    table.put("a")

    def write(step: object) -> None:
        if isinstance(step, Pull) and table.last == 1:
            table.now += 10 * SILENCE_S  # the silence begins with the last message
        if isinstance(step, Request) and ".CONSUMER.INFO." in step.subject and table.last == 1:
            table.put("b")
            table.put("c")
            table.consumers[0].late += table.send(table.consumers[0], 1)

    table.before_step = write
    assert read(table) == {"a": 1, "b": 2, "c": 3}
    assert len(table.consumers) == 1


def test_a_snapshot_does_not_end_within_a_transaction() -> None:
    table = MemoryTable()
    table.put("a")
    table.put("b", *HALF)

    def commit(step: object) -> None:
        if isinstance(step, Sleep) and table.last == 2:
            table.put("c", *WHOLE)

    table.before_step = commit
    assert read(table) == {"a": 1, "b": 2, "c": 3}


def test_a_transaction_that_ends_with_a_key_that_is_not_asked_for_is_over_when_the_bucket_says_so() -> None:
    table = MemoryTable()
    table.put("a", *HALF)
    table.put("other", *WHOLE)
    assert read(table, "a") == {"a": 1}
    assert table.now < CATCH_UP_S
    table.put("later")
    assert read(table, "a") == {"a": 1}
    assert table.now < CATCH_UP_S


def test_what_a_transaction_has_stored_by_its_end_is_read_though_the_end_is_not_asked_for() -> None:
    table = MemoryTable()
    table.put("a", *HALF)
    looks = 0

    def go_on(step: object) -> None:
        nonlocal looks
        if isinstance(step, Request) and b'"$KV.b.>"' in step.data and "MSG.GET" in step.subject:
            looks += 1
            if looks == 2:  # the first look has found half of it
                table.put("b", *HALF)
                table.put("other", *WHOLE)

    table.before_step = go_on
    assert read(table, "a", "b") == {"a": 1, "b": 2}
    assert looks > 1


def test_a_snapshot_is_begun_anew_after_what_may_pass() -> None:
    table = MemoryTable()
    table.put("a")
    errors: list[Exception] = [ConnectionLost("gone"), ConsumerNotFound(404, 10014, "consumer not found")]

    def fail(step: object) -> None:
        if isinstance(step, Pull) and errors:
            table.put("a")
            raise errors.pop(0)

    table.before_step = fail
    assert read(table) == {"a": 3}
    assert len(table.consumers) == 3


def test_what_does_not_pass_ends_a_snapshot_at_once() -> None:
    table = MemoryTable()
    view, error = opened(table), ConfigError("no")

    def fail(step: object) -> None:
        if isinstance(step, Connect):
            raise error

    table.before_step = fail
    with pytest.raises(ConfigError) as caught:
        table.run(snapshot(view))
    assert caught.value is error
    assert table.now < 1.0


@pytest.mark.parametrize("problem", [ConnectionLost("gone"), None], ids=["error", "loss"])
def test_a_snapshot_gives_up_when_nothing_comes_for_its_patience(problem: Exception | None) -> None:
    table = MemoryTable()
    table.put("a")
    view = opened(table)

    def fail(step: object) -> None:
        if isinstance(step, Pull):
            if problem is not None:
                raise problem
            table.lost = 1

    table.before_step = fail
    with pytest.raises(Exception, match="gone" if problem else "1 messages were lost on the way"):
        table.run(snapshot(view, patience_s=5.0))
    assert 5.0 < table.now < 10.0
    assert table.closed == len(table.consumers) > 1


def test_messages_begin_the_patience_of_a_snapshot_anew() -> None:
    table = MemoryTable()
    for number in range(20):
        table.put(str(number))

    def slow(step: object) -> None:
        if isinstance(step, Pull):
            table.now += 2.0
            if len(table.consumers) == 1 and table.consumers[0].sent == 18:
                raise ConnectionLost("gone")

    table.before_step = slow
    assert len(read(table, patience_s=5.0)) == 20
    assert len(table.consumers) == 2


# ---- a moment --------------------------------------------------------------------------------------------------------


def test_a_plan_of_the_present_has_the_revisions_with_a_value_and_the_last_of_all() -> None:
    table = MemoryTable(history=5)
    for key in "abca":
        table.put(key)
    table.put("b", DELETED)
    assert planned(table) == (5, [3, 4], ())
    assert planned(table, include_deletes=True) == (5, [3, 4, 5], ())
    assert planned(MemoryTable()) == (0, [], ())
    assert table.consumers[0].config["headers_only"] is True


def test_a_plan_of_the_past_has_the_revisions_of_that_moment() -> None:
    table = MemoryTable(history=5)
    table.put("a")
    table.put("b", DELETED)
    table.put("a")
    table.put("c")
    assert planned(table, as_of=1) == (1, [1], ())
    assert planned(table, as_of=2) == (2, [1], ())
    assert planned(table, as_of=2, include_deletes=True) == (2, [1, 2], ())
    assert planned(table, as_of=3) == (3, [3], ())
    assert planned(table, as_of=4) == (4, [3, 4], ())
    assert planned(table, "c", as_of=4) == (4, [4], ())
    assert all(each.config["headers_only"] for each in table.consumers)
    with pytest.raises(ConfigError, match="asOf=5: the bucket is at 4"):
        planned(table, as_of=5)


def test_a_key_whose_old_revisions_may_be_gone_is_in_doubt() -> None:
    table = MemoryTable(history=2)
    for key in ("old", "full", "full", "x.full", "x.full", "x.full", "young"):
        table.put(key)
    assert planned(table, as_of=1) == (1, [1], ("full", "x.full"))
    assert planned(table, "x.*", "x.>", "young", as_of=1) == (1, [], ("x.full",))
    assert planned(table, as_of=3) == (3, [1, 3], ("x.full",))


def test_a_scan_has_every_revision_there_is_of_a_range_both_ends_included() -> None:
    table = MemoryTable(history=2)
    for key in "abaab":
        table.put(key)

    def scanned(first: int, last: int) -> list[int]:
        scan, found = opened(table).scan(first, last), []
        while (messages := table.run(scan.next())) is not None:
            found += [delivery(each).sequence for each in messages]
        table.run(scan.close())
        return found

    assert scanned(1, 5) == [2, 3, 4, 5]  # the first is gone, and nobody was promised it
    assert scanned(2, 4) == [2, 3, 4]
    assert scanned(3, 3) == [3]
    assert not any(each.config.get("headers_only") for each in table.consumers)
