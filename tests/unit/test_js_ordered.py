from __future__ import annotations

import datetime
import itertools

import pytest

from jetspark.core.message import CoreMessage
from jetspark.errors import (
    ConfigError,
    ConsumerNotFound,
    JetStreamUnavailable,
    RequestTimeout,
    ServerError,
    StreamNotFound,
)
from jetspark.jetstream.config import ConsumerConfig, DeliverPolicy
from jetspark.jetstream.info import ConsumerInfo, SequencePair
from jetspark.jetstream.ordered import OrderedOptions, OrderedReader, Verdict, retry_pauses, will_pass
from jetspark.jetstream.push import answer_to, check_status, silence_s


def delivered(stream_sequence: int, consumer_sequence: int) -> CoreMessage:
    reply = b"$JS.ACK.S.c.1.%d.%d.1700000000000000000.0" % (stream_sequence, consumer_sequence)
    return CoreMessage("s", b"", reply, None, None)


def status(line: str, *headers: str, reply: bytes | None = None) -> CoreMessage:
    block = "\r\n".join([f"NATS/1.0 {line}", *headers, "", ""]).encode()
    return CoreMessage("inbox", b"", reply, block, None)


def test_the_first_consumer_begins_where_the_options_say() -> None:
    moment = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    for options, expected in (
        (OrderedOptions(), (None, None, None)),
        (OrderedOptions(start_sequence=7), (None, 7, None)),
        (OrderedOptions(start_time=moment), (None, None, moment)),
        (OrderedOptions(deliver_policy="new"), ("new", None, None)),
    ):
        config = OrderedReader(options).config("inbox")
        assert (config.deliver_policy, config.start_sequence, config.start_time) == expected
        assert (config.ack_policy, config.replicas, config.memory_storage) == ("none", 1, True)


def test_the_next_consumer_begins_after_the_last_message() -> None:
    reader = OrderedReader(OrderedOptions(deliver_policy="last_per_subject"))
    reader.config("one")
    assert reader.accept(delivered(40, 1)) is Verdict.DELIVER
    assert reader.accept(delivered(43, 2)) is Verdict.DELIVER
    config = reader.config("two")
    assert (config.deliver_policy, config.start_sequence) == ("by_start_sequence", 44)
    assert reader.accept(delivered(44, 1)) is Verdict.DELIVER


@pytest.mark.parametrize("consumer_sequence", [1, 2, 4, 100])
def test_a_gap_or_a_repetition_asks_for_a_new_consumer(consumer_sequence: int) -> None:
    reader = OrderedReader(OrderedOptions())
    reader.config("one")
    reader.accept(delivered(10, 1))
    reader.accept(delivered(11, 2))
    assert reader.accept(delivered(20, consumer_sequence)) is Verdict.RESTART
    assert reader.config("two").start_sequence == 12


@pytest.mark.parametrize("policy", ["new", "last"])
@pytest.mark.parametrize("place", [0, 50])
def test_where_it_begins_is_remembered_before_anything_came(policy: DeliverPolicy, place: int) -> None:
    reader = OrderedReader(OrderedOptions(deliver_policy=policy))
    reader.config("one")
    reader.created(SequencePair(stream_sequence=place))
    assert reader.config("two").start_sequence == place + 1


def test_a_place_that_was_left_before_we_heard_of_it_is_not_taken_for_the_beginning() -> None:
    reader = OrderedReader(OrderedOptions(deliver_policy="new"))
    reader.config("one")
    reader.created(SequencePair(stream_sequence=51, consumer_sequence=1))
    assert reader.config("two").deliver_policy == "new"


def test_only_what_passes_is_waited_for() -> None:
    for error in (RequestTimeout("x", 1), JetStreamUnavailable("x"), ServerError(503, 10008, "no leader")):
        assert will_pass(error)
    for error in (StreamNotFound(404, 10059, "stream not found"), ServerError(400, 10094, "bad")):
        assert not will_pass(error)


def test_heartbeats_show_what_was_missed() -> None:
    reader = OrderedReader(OrderedOptions())
    reader.config("one")
    reader.accept(delivered(10, 1))
    assert reader.accept(status("100 Idle Heartbeat", "Nats-Last-Consumer: 1")) is Verdict.IGNORE
    assert reader.accept(status("100 Idle Heartbeat", "Nats-Last-Consumer: 2")) is Verdict.RESTART
    assert reader.accept(status("409 Consumer Deleted")) is Verdict.RESTART


def test_questions_whether_we_keep_up_are_answered() -> None:
    reader = OrderedReader(OrderedOptions())
    reader.config("one")
    assert reader.accept(status("100 FlowControl Request", reply=b"$JS.FC.1")) is Verdict.RESPOND
    assert reader.respond_to == "$JS.FC.1"
    stalled = status("100 Idle Heartbeat", "Nats-Last-Consumer: 0", "Nats-Consumer-Stalled: $JS.FC.2")
    assert reader.accept(stalled) is Verdict.RESPOND
    assert reader.respond_to == "$JS.FC.2"


def test_filters_are_one_or_several() -> None:
    assert OrderedReader(OrderedOptions(filter_subjects=["a"])).config("i").filter_subject == "a"
    assert OrderedReader(OrderedOptions(filter_subjects=["a", "b"])).config("i").filter_subjects == ["a", "b"]
    assert OrderedReader(OrderedOptions(deliver_policy="last_per_subject")).config("i").filter_subject == ">"


def test_two_beginnings_are_refused() -> None:
    with pytest.raises(ConfigError, match="start_sequence with deliver_policy"):
        OrderedOptions(start_sequence=1, deliver_policy="all")
    with pytest.raises(ConfigError, match="start_sequence=0"):
        OrderedOptions(start_sequence=0)
    with pytest.raises(ConfigError, match="expected a list"):
        OrderedOptions(filter_subjects="abc")


def test_pauses_grow_up_to_a_second() -> None:
    assert list(itertools.islice(retry_pauses(), 7)) == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_a_push_consumers_statuses_are_told_apart() -> None:
    info = ConsumerInfo(stream_name="S", name="c", config=ConsumerConfig(idle_heartbeat_s=2))
    assert silence_s(info) == 5.0
    assert silence_s(ConsumerInfo(stream_name="S", name="c", config=ConsumerConfig())) is None
    assert answer_to(status("100 Idle Heartbeat")) is None
    with pytest.raises(ConsumerNotFound, match="'c' of stream 'S' was deleted"):
        check_status(info, 409, "Consumer Deleted")
    check_status(info, 409, "Leadership Change")
    with pytest.raises(ServerError, match="odd"):
        check_status(info, 499, "odd")
