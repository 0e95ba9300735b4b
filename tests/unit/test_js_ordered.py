from __future__ import annotations

import datetime
import itertools
import json
import pickle
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.connections import connected

from jetspark.core.message import CoreMessage
from jetspark.core.options import ConnectOptions
from jetspark.errors import (
    ConfigError,
    ConnectionLost,
    ConsumerNotFound,
    JetStreamUnavailable,
    NoServersAvailable,
    ProtocolError,
    RequestTimeout,
    ServerError,
    StreamNotFound,
    StreamRecreated,
    StreamWentBack,
)
from jetspark.jetstream import ordered
from jetspark.jetstream.acks import AckableMessage
from jetspark.jetstream.config import ConsumerConfig, DeliverPolicy
from jetspark.jetstream.info import ConsumerInfo, SequencePair
from jetspark.jetstream.operations import Api, Request
from jetspark.jetstream.ordered import (
    OrderedFlow,
    OrderedOptions,
    OrderedPuller,
    OrderedReader,
    Patience,
    heartbeat_for,
    retry_pauses,
)
from jetspark.jetstream.pull import Ask, PullLimits, Wait, size_bytes
from jetspark.jetstream.push import answer_to, check_status, silence_s


def delivered(stream_sequence: int, consumer_sequence: int, pending: int = 0) -> AckableMessage:
    reply = b"$JS.ACK.S.c.1.%d.%d.1700000000000000000.%d" % (stream_sequence, consumer_sequence, pending)
    return AckableMessage("s", b"", reply, None, None)


def status(line: str, *headers: str, to: str = "inbox.1") -> AckableMessage:
    block = "\r\n".join([f"NATS/1.0 {line}", *headers, "", ""]).encode()
    return AckableMessage(to, b"", None, block, None)


def accept(reader: OrderedReader, message: AckableMessage) -> str:
    """What becomes of one message."""
    accepted, looked_at = reader.accept([message])
    return "deliver" if accepted else "ignore" if looked_at else "gap"


@pytest.mark.parametrize("place", [0, 1])
def test_a_message_without_a_reply_is_not_of_jetstream(place: int) -> None:
    messages = [delivered(1, 1), delivered(2, 2)]
    messages.insert(place, AckableMessage("s", b"", None, None, None))
    with pytest.raises(ProtocolError, match="not the reply subject"):
        OrderedReader(OrderedOptions()).accept(messages)


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
        assert (config.max_deliver, config.headers_only) == (1, None)
    assert OrderedReader(OrderedOptions(headers_only=True)).config("inbox").headers_only is True


def test_options_come_from_keywords() -> None:
    assert OrderedOptions.of(["a"], {"start_sequence": 5}) == OrderedOptions(filter_subjects=["a"], start_sequence=5)
    unknown: Any = {"start": 5}
    with pytest.raises(ConfigError, match="start"):
        OrderedOptions.of([], unknown)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"filter_subjects": "a"}, "filter_subjects"),
        ({"filter_subjects": ["a..b"]}, "'a..b'"),
        ({"headers_only": 1}, "headers_only"),
        ({"start_time": "2026-01-01"}, "start_time"),
        ({"deliver_policy": "by_start_sequence"}, "deliver_policy"),
        ({"start_sequence": 0}, "start_sequence"),
    ],
)
def test_options_that_make_no_sense_are_named(wrong: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        OrderedOptions(**wrong)


def test_the_next_consumer_begins_after_the_last_message() -> None:
    reader = OrderedReader(OrderedOptions(start_sequence=40))
    reader.config("one")
    assert accept(reader, delivered(40, 1)) == "deliver"
    assert accept(reader, delivered(43, 2)) == "deliver"
    config = reader.config("two")
    assert (config.deliver_policy, config.start_sequence) == ("by_start_sequence", 44)
    assert accept(reader, delivered(44, 1)) == "deliver"


# ---- the last of each subject ----------------------------------------------------------------------------------------


class Bucket:
    """A stream in memory, with every revision, as a ``last_per_subject`` consumer and its successors see it."""

    def __init__(self, subjects: list[str]) -> None:
        self.messages: list[tuple[int, str]] = list(enumerate(subjects, 1))

    def append(self, subject: str) -> None:
        self.messages.append((len(self.messages) + 1, subject))

    def consume(self, reader: OrderedReader) -> Iterator[tuple[int, str, AckableMessage]]:
        """A new consumer; its messages are decided as they are taken, as a server does."""
        config = reader.config("inbox")
        if config.deliver_policy == "last_per_subject":
            sequences = sorted({subject: sequence for sequence, subject in self.messages}.values())
            resume = len(self.messages)
        else:
            assert config.deliver_policy == "by_start_sequence"
            sequences, resume = [], (config.start_sequence or 1) - 1
        place = (sequences[0] if sequences else resume + 1) - 1
        pending = len(sequences) + len(self.messages) - resume
        reader.created(SequencePair(stream_sequence=place), pending)
        return self._deliver(sequences, resume)

    def _deliver(self, sequences: list[int], resume: int) -> Iterator[tuple[int, str, AckableMessage]]:
        count = 0
        while sequences or resume < len(self.messages):
            if sequences:
                sequence = sequences.pop(0)
            else:
                resume += 1
                sequence = resume
            count += 1
            pending = len(sequences) + len(self.messages) - resume
            yield sequence, self.messages[sequence - 1][1], delivered(sequence, count, pending)


@pytest.mark.parametrize("seed", range(50))
def test_a_listing_interrupted_anywhere_is_that_of_an_uninterrupted_one_and_never_goes_back(seed: int) -> None:
    """Any number of consumers lost anywhere, and writers at the same time: every subject's last message comes, once,
    no older one after the listing began again, and nothing new is missing from where the listing was over."""
    rng = random.Random(seed)
    names = [f"s{number}" for number in range(rng.randint(1, 12))]
    bucket = Bucket([rng.choice(names) for _ in range(rng.randint(1, 60))])
    reader = OrderedReader(OrderedOptions(deliver_policy="last_per_subject"))
    received: list[tuple[int, str]] = []
    began_at: list[int] = []
    for life in itertools.count():
        was_caught_up = reader.is_caught_up
        began_at.append(len(bucket.messages) if not was_caught_up else began_at[-1])
        is_lost = False
        coming = bucket.consume(reader)
        while part := list(itertools.islice(coming, 1)):
            if rng.random() < 0.4 and len(bucket.messages) < 120:
                bucket.append(rng.choice(names))
            if rng.random() < 0.7:
                part += itertools.islice(coming, rng.randint(0, 6))
            if rng.random() < 0.1 and life < 20:
                is_lost = True
                break
            while part:
                accepted, looked_at = reader.accept([message for _, _, message in part])
                assert looked_at
                received += [(sequence, subject) for sequence, subject, message in part if message in accepted]
                del part[:looked_at]
        if not is_lost:
            break
    sequences = [sequence for sequence, _ in received]
    assert sequences == sorted(set(sequences))
    assert reader.is_caught_up
    # A message that is not the last of its subject when everything ends was the last in one of the listings, or new.
    assert {subject: sequence for sequence, subject in received} == {
        subject: sequence for sequence, subject in bucket.messages
    }
    stale = [
        sequence
        for sequence, subject in received
        if not any(
            sequence == max((s for s, other in bucket.messages[:began] if other == subject), default=0)
            or sequence > began
            for began in began_at
        )
    ]
    assert stale == []


def test_a_listing_that_is_over_goes_on_by_sequence() -> None:
    """So that no change after it is left out."""
    reader = OrderedReader(OrderedOptions(deliver_policy="last_per_subject"))
    bucket = Bucket(["a", "b", "a"])
    messages = bucket.consume(reader)
    for _ in range(2):
        assert accept(reader, next(messages)[2]) == "deliver"
    for subject in ("a", "a", "b"):
        bucket.append(subject)
    config = reader.config("two")
    assert (config.deliver_policy, config.start_sequence) == ("by_start_sequence", 4)


def test_writers_that_never_pause_do_not_prolong_a_listing() -> None:
    reader = OrderedReader(OrderedOptions(deliver_policy="last_per_subject"))
    bucket = Bucket(["a", "b"])
    messages = bucket.consume(reader)
    for _ in range(2):
        bucket.append("a")
        assert accept(reader, next(messages)[2]) == "deliver"
    assert not reader.is_caught_up  # the changes are still to come
    assert reader.config("two").start_sequence == 3


def test_what_is_passed_over_last_ends_a_listing_too() -> None:
    reader = OrderedReader(OrderedOptions(deliver_policy="last_per_subject"))
    bucket = Bucket(["a", "b"])
    messages = bucket.consume(reader)
    accept(reader, next(messages)[2])
    del bucket.messages[1:]  # purged while nobody was connected
    (again,) = bucket.consume(reader)
    assert accept(reader, again[2]) == "ignore"
    assert reader.is_caught_up
    assert reader.config("three").start_sequence == 2


def test_a_bucket_without_a_match_is_listed_at_once_and_its_place_is_kept() -> None:
    reader = OrderedReader(OrderedOptions(deliver_policy="last_per_subject"))
    reader.config("one")
    reader.created(SequencePair(stream_sequence=8), 0)
    assert reader.is_caught_up
    assert reader.config("two").start_sequence == 9


# ---- which stream it is ----------------------------------------------------------------------------------------------


def stream(created: int, last_sequence: int) -> bytes:
    moment = datetime.datetime.fromtimestamp(created, datetime.UTC).isoformat()
    state = {"messages": 0, "bytes": 0, "first_seq": 1, "last_seq": last_sequence, "consumer_count": 0}
    return json.dumps({"config": {"name": "S"}, "created": moment, "state": state}).encode()


def consumer(pending: int = 0) -> bytes:
    return json.dumps({"stream_name": "S", "name": "c", "config": {}, "num_pending": pending}).encode()


def opened(reader: OrderedReader, *answers: bytes, made: list[ConsumerInfo] | None = None) -> list[str]:
    """Run the operation with these answers; returns what was asked. ``made`` gets the consumer."""
    asked = []
    operation = reader.open(Api(), "S", "name")
    step = next(operation)
    coming = iter(answers)
    try:
        while True:
            assert isinstance(step, Request)
            asked.append(step.subject.removeprefix("$JS.API."))
            answer = b"" if step.is_silent else next(coming)
            step = operation.send(CoreMessage("r", answer, None, None, None))
    except StopIteration as ended:
        if made is not None:
            made.append(ended.value)
    return asked


@pytest.mark.parametrize("pending", [0, 3])
def test_the_consumer_that_was_made_is_returned_and_what_waits_in_it_is_known(pending: int) -> None:
    reader = OrderedReader(OrderedOptions())
    made: list[ConsumerInfo] = []
    opened(reader, stream(1, 9), consumer(pending), made=made)
    assert [each.name for each in made] == ["c"]
    assert reader.is_caught_up is (pending == 0)


def test_an_empty_stream_that_stays_empty_has_not_gone_back() -> None:
    reader = OrderedReader(OrderedOptions())
    opened(reader, stream(1, 0), consumer())
    assert opened(reader, consumer(), stream(1, 0)) == ["CONSUMER.CREATE.S.name", "STREAM.INFO.S"]


def test_a_stream_that_went_back_is_waited_for_from_the_beginning() -> None:
    reader = OrderedReader(OrderedOptions())
    verdicts = [reader.may_pass(StreamWentBack("S", 10, 4)) for _ in range(ordered.MAX_ATTEMPTS_BEHIND)]
    assert verdicts == [True] * (ordered.MAX_ATTEMPTS_BEHIND - 1) + [False]


def test_the_stream_is_asked_before_the_first_consumer_and_after_every_other() -> None:
    """After: a stream that is still the same then was so when the consumer was made."""
    reader = OrderedReader(OrderedOptions())
    had_begun = reader.has_begun
    assert opened(reader, stream(1, 9), consumer(9)) == ["STREAM.INFO.S", "CONSUMER.CREATE.S.name"]
    assert (had_begun, reader.has_begun) == (False, True)
    accept(reader, delivered(9, 1))
    assert opened(reader, consumer(), stream(1, 9)) == ["CONSUMER.CREATE.S.name", "STREAM.INFO.S"]


def test_a_stream_of_the_same_name_is_told_from_the_one_that_was_read() -> None:
    reader = OrderedReader(OrderedOptions())
    opened(reader, stream(1, 9), consumer(9))
    accept(reader, delivered(9, 1))
    with pytest.raises(
        StreamRecreated, match=r"'S' was deleted and re-created.*the last sequence read is 9: read"
    ) as e:
        opened(reader, consumer(), stream(2, 60))
    assert e.value.stream == "S"
    assert not reader.may_pass(e.value)
    assert pickle.loads(pickle.dumps(e.value)).remedy == e.value.remedy


def test_a_stream_that_ends_before_our_place_is_an_error_only_if_it_stays_so() -> None:
    """A replica that has just become leader may be a moment behind."""
    reader = OrderedReader(OrderedOptions())
    opened(reader, stream(1, 9), consumer(9))
    accept(reader, delivered(9, 1))
    verdicts = []
    for _ in range(7):
        with pytest.raises(StreamWentBack, match="sequence 10 is needed and the stream's next one is 4") as caught:
            opened(reader, consumer(), stream(1, 3))
        verdicts.append(reader.may_pass(caught.value))
    assert verdicts == [True] * 6 + [False]
    opened(reader, consumer(), stream(1, 9))  # and forgotten when it has caught up
    assert reader.may_pass(caught.value)


# ---- how long to wait ------------------------------------------------------------------------------------------------


def test_patience_is_for_lack_of_progress() -> None:
    patience = Patience("keys of bucket 'b'", 2.0, now=100.0)
    assert (patience.left_s(100.5, 12.5), patience.left_s(100.5, 0.1)) == (1.5, 0.1)
    assert patience.give_up_at == 102.0
    assert Patience("anything", None, now=100.0).give_up_at is None
    patience.check(101.9)
    patience.renew(101.9)
    patience.check(103.8)
    with pytest.raises(RequestTimeout, match=r"keys of bucket 'b': no answer within 2 s"):
        patience.check(103.9)
    with pytest.raises(RequestTimeout, match="keys of bucket"):
        patience.check(104.0, ConnectionLost("cut"))
    with pytest.raises(JetStreamUnavailable):  # a reason that says more
        patience.check(104.0, JetStreamUnavailable("x"))
    assert patience.left_s(104.0, 1.0) == 0.0
    for_ever = Patience("x", None, now=0.0)
    for_ever.check(1e12, ConnectionLost("cut"))
    assert for_ever.left_s(1e12, 12.5) == 12.5


def test_a_heartbeat_comes_before_a_listing_is_given_up() -> None:
    assert [heartbeat_for(timeout) for timeout in (0.1, 1.5, 5.0, 60.0)] == [0.25, 0.5, 5.0 / 3, 5.0]


@pytest.mark.parametrize("consumer_sequence", [1, 2, 4, 100])
def test_a_gap_or_a_repetition_asks_for_a_new_consumer(consumer_sequence: int) -> None:
    reader = OrderedReader(OrderedOptions())
    reader.config("one")
    accept(reader, delivered(10, 1))
    accept(reader, delivered(11, 2))
    assert accept(reader, delivered(20, consumer_sequence)) == "gap"
    assert reader.config("two").start_sequence == 12


@pytest.mark.parametrize("policy", ["new", "last"])
@pytest.mark.parametrize("place", [0, 50])
def test_where_it_begins_is_remembered_before_anything_came(policy: DeliverPolicy, place: int) -> None:
    reader = OrderedReader(OrderedOptions(deliver_policy=policy))
    reader.config("one")
    reader.created(SequencePair(stream_sequence=place), 0)
    assert reader.config("two").start_sequence == place + 1


def test_where_a_later_consumer_begins_is_not_where_the_reading_is() -> None:
    reader = OrderedReader(OrderedOptions(deliver_policy="new"))
    reader.config("one")
    reader.created(SequencePair(consumer_sequence=0, stream_sequence=40), 0)
    accept(reader, delivered(50, 1))
    assert reader.config("two").start_sequence == 51
    reader.created(SequencePair(consumer_sequence=0, stream_sequence=60), 0)
    assert reader.config("three").start_sequence == 51
    everything = OrderedReader(OrderedOptions())
    everything.config("one")
    everything.created(SequencePair(consumer_sequence=0, stream_sequence=7), 3)
    assert everything.config("two").start_sequence is None  # nothing came: from the beginning again


def test_only_what_passes_is_waited_for() -> None:
    reader = OrderedReader(OrderedOptions())
    assert reader.may_pass(ConnectionLost("cut while the consumer was made"))
    assert not reader.may_pass(NoServersAvailable({"a": "refused"}))
    for error in (RequestTimeout("x", 1), JetStreamUnavailable("x"), ServerError(503, 10008, "no leader")):
        assert reader.may_pass(error)
    for error in (StreamNotFound(404, 10059, "stream not found"), ServerError(400, 10094, "bad")):
        assert not reader.may_pass(error)


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
    assert (
        answer_to(CoreMessage("to.us", b"", b"$JS.FC.1", b"NATS/1.0 100 FlowControl Request\r\n\r\n", None))
        == "$JS.FC.1"
    )
    assert answer_to(status("100 Idle Heartbeat", "Nats-Consumer-Stalled: $JS.FC.2")) == "$JS.FC.2"
    with pytest.raises(ConsumerNotFound, match="'c' of stream 'S': it was deleted"):
        check_status(info, 409, "Consumer Deleted")
    check_status(info, 409, "Leadership Change")
    with pytest.raises(ServerError, match="odd"):
        check_status(info, 499, "odd")


# ---- parts of what came ----------------------------------------------------------------------------------------------


def test_a_part_ends_with_what_was_there_in_the_beginning() -> None:
    """So that one can tell it from what is new, though all of it came together."""
    reader = OrderedReader(OrderedOptions())
    reader.config("one")
    reader.created(SequencePair(), 2)
    messages = [delivered(1, 1, 1), delivered(2, 2, 0), delivered(3, 3, 0)]
    assert reader.accept(messages) == (messages[:2], 2)
    assert reader.is_caught_up
    assert reader.accept(messages[2:]) == (messages[2:], 1)


def test_a_part_with_a_gap_ends_before_it() -> None:
    reader = OrderedReader(OrderedOptions())
    reader.config("one")
    reader.created(SequencePair(), 9)
    messages = [delivered(1, 1, 8), delivered(2, 2, 7), delivered(4, 4, 5), delivered(5, 5, 4)]
    assert reader.accept(messages) == (messages[:2], 2)
    assert reader.accept(messages[2:]) == ([], 0)


@pytest.mark.parametrize(
    ("came", "right"),
    [
        ([6, 7, 8], 3),
        ([6, 7, 9], 2),
        ([6, 7, 10], 2),
        ([6, 7, 7], 2),
        ([6, 6], 1),
        ([6, 3], 1),
        ([5, 7], 0),
        ([7, 8], 0),
    ],
)
def test_the_first_and_the_last_are_as_far_apart_as_there_are_messages(came: list[int], right: int) -> None:
    reader = OrderedReader(OrderedOptions(deliver_policy="new"))
    reader.config("one")
    reader.created(SequencePair(), 0)
    reader._last_consumer_sequence = 15
    messages = [delivered(20 + place, 10 + number, 5) for place, number in enumerate(came)]
    assert reader.accept(messages) == (messages[:right], right)


@pytest.mark.parametrize(
    "came",
    [
        [(1, 1), (10, 10), (3, 3)],  # longer numbers between
        [(1, 1), (2, 10), (3, 3)],
        [(11, 11), (12, 100), (13, 13)],
        [(111, 1), (112, 10), (113, 3)],
        [(1, 111), (2, 1000), (3, 113)],
        [(1001, 1001), (20, 1), (3003, 1003)],  # a shorter one: its consumer sequence ends where the first one's begins
        [(1001, 11), (20, 1), (1003, 13)],
    ],
    ids=str,
)
def test_numbers_of_other_lengths_between_are_not_taken_for_the_right_ones(came: list[tuple[int, int]]) -> None:
    reader = OrderedReader(OrderedOptions(deliver_policy="new"))
    reader.config("one")
    reader.created(SequencePair(), 0)
    reader._last_consumer_sequence = came[0][1] - 1
    messages = [delivered(stream, consumer, 5) for stream, consumer in came]
    assert reader.accept(messages) == (messages[:1], 1)


def test_neighbours_in_the_wrong_order_are_noticed_between_the_right_ends() -> None:
    reader = OrderedReader(OrderedOptions(deliver_policy="new"))
    reader.config("one")
    reader.created(SequencePair(), 0)
    messages = [delivered(20 + number, number, 5) for number in (1, 3, 2, 4)]
    assert reader.accept(messages) == (messages[:1], 1)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 1200), st.integers(1, 1200), st.data())
def test_no_other_order_is_taken_for_the_right_one(stream_sequence: int, consumer_sequence: int, data: Any) -> None:
    """With numbers of one to four digits, and anything left out, repeated or moved."""
    reader = OrderedReader(OrderedOptions(deliver_policy="new"))
    reader.config("one")
    reader.created(SequencePair(), 0)
    reader._last_consumer_sequence = consumer_sequence - 1
    steps = data.draw(st.lists(st.integers(1, 3), min_size=12, max_size=12))
    sent = [
        delivered(stream_sequence + sum(steps[:number]), consumer_sequence + number, 12 - number)
        for number in range(12)
    ]
    came = data.draw(st.one_of(st.just(sent), st.permutations(sent), st.lists(st.sampled_from(sent), min_size=1)))
    right = list(itertools.takewhile(lambda pair: pair[0] is pair[1], zip(came, sent, strict=False)))
    accepted, looked_at = reader.accept(list(came))
    assert (accepted, looked_at) == ([message for message, _ in right], len(right))


def replies_of(sequences: list[int], *, pending: int = 5_000_000, stream_offset: int = 1_000_000) -> list[bytes]:
    return [
        b"$JS.ACK.S.one.1.%d.%d.1700000000000000000.%d" % (stream_offset + number, number, pending)
        for number in sequences
    ]


@pytest.mark.parametrize("first", [1, 9, 10, 995, 9_990, 9_999, 10_000, 19_995, 99_990, 1_234_567, 99_999_995])
@pytest.mark.parametrize("count", [1, 2, 5, 300, 10_000])
def test_consecutive_sequences_are_seen_at_once_unless_they_get_longer(first: int, count: int) -> None:
    is_as_long = len(str(first)) == len(str(first + count - 1))
    replies = replies_of(list(range(first, first + count)), stream_offset=10**12)
    assert ordered.are_consecutive(replies, first, 3) == is_as_long
    assert not ordered.are_consecutive(replies, first + 1, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        [1_234_567, 2_234_568],
        [1_234_567, 1_244_568],
        [1_239_999, 1_230_000],
        [1_239_999, 1_250_000],
        [1_239_998, 1_249_999, 1_240_000],
    ],
)
def test_digits_that_seldom_change_are_compared_too(wrong: list[int]) -> None:
    right = list(range(wrong[0], wrong[0] + len(wrong)))
    assert ordered.are_consecutive(replies_of(right), right[0], 3)
    assert not ordered.are_consecutive(replies_of(wrong), wrong[0], 3)


def test_more_than_can_be_compared_at_once_are_read_one_by_one() -> None:
    replies = replies_of(list(range(20_000, 30_001)))
    assert ordered.are_consecutive(replies[:-1], 20_000, 3)
    assert not ordered.are_consecutive(replies, 20_000, 3)


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_what_is_seen_at_once_is_what_reading_every_number_finds(data: Any) -> None:
    """Whatever is left out, repeated, moved, longer, shorter, or of another consumer."""
    near = data.draw(st.sampled_from([1, 9, 99, 9_999, 10_000, 20_000, 99_999, 1_230_000]))
    first = max(near + data.draw(st.integers(-12, 12)), 1)
    replies = replies_of(list(range(first, first + data.draw(st.integers(1, 24)))))
    for _ in range(data.draw(st.integers(0, 3))):
        place = data.draw(st.integers(0, len(replies) - 1))
        numbers = st.integers(max(first - 5, 1), first + 40)
        other = st.one_of(
            st.sampled_from(replies),
            st.builds(lambda number: replies_of([number])[0], numbers),
            st.builds(lambda number, stream: replies_of([number], stream_offset=stream)[0], numbers, numbers),
            st.builds(lambda number, pending: replies_of([number], pending=pending)[0], numbers, st.integers(0, 10**8)),
            st.builds(lambda number: replies_of([number])[0].replace(b"one", b"two"), numbers),
        )
        replies[place : place + data.draw(st.integers(0, 1))] = [data.draw(other)]
    numbers_read = [int(reply.split(b".")[6]) for reply in replies]
    if ordered.are_consecutive(replies, first, 3):
        assert numbers_read == list(range(first, first + len(replies)))


def frames_of(data: Any, first: int) -> bytes:
    """What a consumer's inbox gets: messages with gaps, some with headers, and statuses between them."""
    frames, number = bytearray(), first
    for _ in range(data.draw(st.integers(1, 40))):
        number += data.draw(st.sampled_from([0] * 30 + [1, -1]))
        [reply] = replies_of([number])
        match data.draw(st.sampled_from(["plain"] * 8 + ["headers", "status", "heartbeat"])):
            case "plain":
                frames += b"MSG s 1 %b 2\r\nab\r\n" % reply
            case "headers":
                frames += b"HMSG s 1 %b 18 20\r\nNATS/1.0\r\nA: b\r\n\r\nab\r\n" % reply
            case "status":
                block = b"NATS/1.0 409 Batch Completed\r\n\r\n"
                frames += b"HMSG inbox.7 1 %d %d\r\n%b\r\n" % (len(block), len(block), block)
                continue
            case "heartbeat":
                block = b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: %d\r\n\r\n" % (number - 1)
                frames += b"HMSG inbox.7 1 %d %d\r\n%b\r\n" % (len(block), len(block), block)
                continue
        number += 1
    return bytes(frames)


def handed_out(chunks: list[bytes], first: int) -> tuple[list[bytes | None], bool, int]:
    """What a flow gives out of these chunks, whether its consumer is lost, and where the next one begins."""
    connection = connected()
    reader = OrderedReader(OrderedOptions(deliver_policy="new"))
    reader.config("one")
    reader.created(SequencePair(), 0)
    reader._last_consumer_sequence = first - 1
    state = connection.subscribe("inbox.*", message_class=AckableMessage)
    puller = OrderedPuller[AckableMessage]("inbox", "$JS.API.CONSUMER.MSG.NEXT.S.one", reader)
    flow = OrderedFlow(puller, reader, connection.options, 1024)
    given_out: list[bytes | None] = []
    for chunk in chunks:
        connection.receive_data(chunk)
        puller.on_replies(state, 1.0)
        while puller.buffer:
            given_out += [each.raw_reply for each in flow.take(len(puller.buffer))]
    return given_out, puller.is_lost, reader.config("two").start_sequence or 0


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_stream_of_frames_is_the_same_seen_at_once_and_read_one_by_one(data: Any) -> None:
    first = data.draw(st.sampled_from([1, 95, 9_990, 123_456]))
    frames = frames_of(data, first)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(frames)), max_size=6)))
    chunks = [frames[start:end] for start, end in zip([0, *cuts], [*cuts, len(frames)], strict=True)]
    at_once = handed_out(chunks, first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ordered, "are_consecutive", lambda *_: False)
        assert handed_out(chunks, first) == at_once


def test_a_part_that_begins_and_ends_right_is_wrong_between_when_the_numbers_get_longer() -> None:
    """Texts that grow say nothing where the first and the last stream sequence have another number of digits."""
    reader = OrderedReader(OrderedOptions())
    reader.config("one")
    reader.created(SequencePair(), 9)
    messages = [delivered(1, 1, 8), delivered(10, 9, 7), delivered(11, 3, 6)]
    assert reader.accept(messages) == (messages[:1], 1)


def test_a_part_ends_with_the_listing() -> None:
    """What is new by then came with it, and is not told by what it says is pending."""
    reader = OrderedReader(OrderedOptions(deliver_policy="last_per_subject"))
    reader.config("one")
    reader.created(SequencePair(), 2)
    messages = [delivered(1, 1, 3), delivered(2, 2, 2), delivered(3, 3, 1), delivered(4, 4, 0)]
    assert reader.accept(messages) == (messages[:2], 2)
    assert (reader.is_listing, reader.is_caught_up) == (False, False)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_message_without_a_reply_subject_is_none_of_a_consumer(place: int) -> None:
    """Anybody may publish to the inbox: it is not taken for a gap, nor for one of those around it."""
    reader = OrderedReader(OrderedOptions())
    messages = [delivered(number, number, 3 - number) for number in (1, 2, 3)]
    messages[place] = AckableMessage("s", b"", None, None, None)
    with pytest.raises(ProtocolError, match="b''"):
        reader.accept(messages)


def test_the_longer_form_of_reply_subjects_is_read_too() -> None:
    for end in ("", ".more", ".more.still"):
        reader = OrderedReader(OrderedOptions())
        reader.config("one")
        reader.created(SequencePair(), 2)
        replies = [f"$JS.ACK._.hash.S.c.1.{n + 6}.{n}.1700000000000000000.{2 - n}{end}".encode() for n in (1, 2, 3)]
        messages = [AckableMessage("s", b"", reply, None, None) for reply in replies]
        assert reader.accept(messages) == (messages[:2], 2)
        assert reader.config("two").start_sequence == 9


def test_what_is_no_message_of_a_consumer_is_an_error() -> None:
    reader = OrderedReader(OrderedOptions())
    with pytest.raises(ProtocolError, match="not the reply subject of a JetStream message"):
        reader.accept([delivered(1, 1, 5), AckableMessage("s", b"", b"some.reply", None, None)])


# ---- one throw-away consumer -----------------------------------------------------------------------------------------


def flow_of(
    reader: OrderedReader, pending: int = 0, **options: Any
) -> tuple[OrderedPuller[AckableMessage], OrderedFlow[AckableMessage]]:
    reader.config("one")
    reader.created(SequencePair(), pending)
    puller: OrderedPuller[AckableMessage] = OrderedPuller("inbox", "$JS.API.CONSUMER.MSG.NEXT.S.c", reader)
    return puller, OrderedFlow(puller, reader, ConnectOptions(**options), 1 << 20)


def asked(step: object) -> dict[str, Any]:
    assert isinstance(step, Ask)
    fields: dict[str, Any] = json.loads(step.body)
    return fields


def test_it_asks_within_the_bounds_of_the_connection() -> None:
    _, flow = flow_of(OrderedReader(OrderedOptions()), max_pending_messages=20, max_pending_bytes=5000)
    fields = asked(flow.step(0.0, 1))
    assert (fields["batch"], fields["max_bytes"], fields["idle_heartbeat"]) == (20, 5000, 5_000_000_000)
    _, flow = flow_of(OrderedReader(OrderedOptions()))
    fields = asked(flow.step(0.0, 1))
    assert (fields["batch"], fields["max_bytes"]) == (ordered.MAX_MESSAGES, ordered.MAX_BYTES // 16)


@pytest.mark.parametrize(
    "line", ["409 Consumer Deleted", "409 Leadership Change", "409 Server Shutdown", "409 Something New", "503"]
)
def test_these_are_the_end_of_a_consumer(line: str) -> None:
    reader = OrderedReader(OrderedOptions())
    puller, flow = flow_of(reader, 9)
    asked(flow.step(0.0, 1))
    puller.absorb([delivered(1, 1, 8), status(line)], 0.1)
    assert puller.wants_wake()
    assert flow.step(0.1, 1) == 1  # what came counts
    assert len(flow.take(1)) == 1
    assert flow.step(0.1, 1) is None
    assert reader.config("two").start_sequence == 2


@pytest.mark.parametrize("line", ["408 Request Timeout", "409 Batch Completed"])
def test_these_are_not(line: str) -> None:
    puller, flow = flow_of(OrderedReader(OrderedOptions()))
    asked(flow.step(0.0, 1))
    puller.absorb([status(line, f"Nats-Pending-Messages: {ordered.MAX_MESSAGES}")], 0.1)
    assert asked(flow.step(0.1, 1))["batch"] == ordered.MAX_MESSAGES


@pytest.mark.parametrize(("largest", "window"), [(0, 16_384), (100, 16_384), (4096, 682), (1 << 20, 64)])
def test_the_window_is_smaller_for_large_messages(largest: int, window: int) -> None:
    """The bound of bytes would be reached with every request, and bytes counted for each."""
    _, flow = flow_of(OrderedReader(OrderedOptions()))
    flow._largest_bytes = largest
    assert asked(flow.step(0.0, 1))["batch"] == window


def test_two_missing_heartbeats_are_the_end_of_a_consumer() -> None:
    puller, flow = flow_of(OrderedReader(OrderedOptions()))
    asked(flow.step(0.0, 1))
    puller.absorb([status("100 Idle Heartbeat", "Nats-Last-Consumer: 0")], 5.0)
    assert flow.step(5.0, 1) == Wait(15.0)
    puller.on_time(14.9)
    assert flow.step(14.9, 1) == Wait(15.0)
    puller.on_time(15.0)
    assert flow.step(15.0, 1) is None


@pytest.mark.parametrize(
    "line", ["100 Idle Heartbeat", "404 No Messages", "408 Request Timeout", "409 Batch Completed"]
)
def test_a_consumer_that_was_heard_of_and_then_is_nowhere_is_lost(line: str) -> None:
    puller, flow = flow_of(OrderedReader(OrderedOptions()))
    asked(flow.step(0.0, 1))
    puller.absorb([status(line)], 0.1)
    assert puller.wants_wake()
    puller.absorb([status("503")], 0.2)
    assert flow.step(0.2, 1) is None


@pytest.mark.parametrize("line", ["400 Bad Request", "409 Exceeded MaxRequestBatch of 5"])
def test_a_request_that_breaks_a_rule_is_an_error_and_not_the_end_of_a_consumer(line: str) -> None:
    puller, flow = flow_of(OrderedReader(OrderedOptions()))
    asked(flow.step(0.0, 1))
    puller.absorb([status(line)], 0.1)
    assert not puller.is_lost
    with pytest.raises((ServerError, ConfigError)):
        flow.step(0.1, 1)


def test_a_consumer_that_says_that_it_is_there_is_good_for_something() -> None:
    reader = OrderedReader(OrderedOptions())
    puller, flow = flow_of(reader)
    asked(flow.step(0.0, 1))
    for _ in range(3):
        reader.lost()
    assert reader.pause_s() > 0
    puller.absorb([status("100 Idle Heartbeat", "Nats-Last-Consumer: 0")], 5.0)
    assert reader.pause_s() == 0.0
    reader.lost()
    assert reader.pause_s() == 0.0  # the first that is lost again
    puller.absorb([delivered(1, 1)], 5.1)
    assert not puller.is_idle


def test_a_session_that_begins_at_once_is_the_end_of_a_consumer_too() -> None:
    puller, flow = flow_of(OrderedReader(OrderedOptions()), 9)
    asked(flow.step(0.0, 3))
    puller.absorb([delivered(1, 1, 8)], 0.1)
    assert flow.step(0.2, 4) == 1  # what came counts
    flow.take(1)
    assert flow.step(0.2, 4) is None
    assert puller.outstanding == 0


def test_another_session_is_the_end_of_a_consumer() -> None:
    puller, flow = flow_of(OrderedReader(OrderedOptions()))
    asked(flow.step(0.0, 3))
    assert flow.step(0.1, None) == Wait(None)  # for as long as it takes
    puller.on_time(100.0)
    assert flow.step(100.0, None) == Wait(None)
    assert flow.step(100.0, 4) is None


def test_a_new_consumer_that_cannot_be_asked_yet_is_asked_again() -> None:
    """In a cluster its creation may be known here before its name is."""
    puller, flow = flow_of(OrderedReader(OrderedOptions()))
    now, asks = 0.0, 0
    while (step := flow.step(now, 1)) is not None:
        if isinstance(step, Ask):
            asks += 1
            puller.absorb([status("503", to=step.reply)], now)
        else:
            assert isinstance(step, Wait)
            assert step.until is not None
            now = step.until
    assert asks == ordered.MAX_REFUSALS_AT_FIRST + 1
    assert 1.0 < now < 2.0


def test_a_heartbeat_shows_what_was_missed() -> None:
    for received, last, is_lost in ((1, 1, False), (1, 2, True), (0, 0, False), (0, 1, True)):
        for is_taken in (True, False):
            reader = OrderedReader(OrderedOptions())
            puller, flow = flow_of(reader, 9)
            asked(flow.step(0.0, 1))
            puller.absorb([delivered(n, n, 9 - n) for n in range(1, received + 1)], 0.1)
            if is_taken and received:
                flow.take(received)
            puller.absorb([status("100 Idle Heartbeat", f"Nats-Last-Consumer: {last}")], 5.0)
            if not is_taken and received:
                assert flow.step(5.0, 1) == received
                flow.take(received)
            assert (flow.step(5.0, 1) is None) == is_lost


def test_a_heartbeat_says_that_nothing_is_left_of_what_was_counted() -> None:
    reader = OrderedReader(OrderedOptions())
    puller, flow = flow_of(reader, 9)
    asked(flow.step(0.0, 1))
    puller.absorb([delivered(1, 1, 8)], 0.1)
    puller.absorb([status("100 Idle Heartbeat", "Nats-Last-Consumer: 1")], 5.0)
    assert puller.wants_wake()
    assert flow.step(5.0, 1) == 1
    flow.take(1)
    flow.step(5.0, 1)
    assert not reader.is_caught_up  # something was here when it was said
    puller.absorb([status("100 Idle Heartbeat", "Nats-Last-Consumer: 1")], 10.0)
    flow.step(10.0, 1)
    assert reader.is_caught_up


def test_no_more_is_taken_than_was_asked_for() -> None:
    puller, flow = flow_of(OrderedReader(OrderedOptions()), 9)
    asked(flow.step(0.0, 1))
    messages = [delivered(number, number, 9 - number) for number in (1, 2, 3)]
    puller.absorb(messages, 0.1)
    assert flow.take(2) == messages[:2]
    assert list(puller.buffer) == messages[2:]
    assert flow.take(1) == messages[2:]


def test_where_waiting_costs_nothing_a_request_waits_for_long_once_all_that_was_there_has_come() -> None:
    for policy, pending, expires_s in (("all", 0, 100), ("all", 9, 30), ("last_per_subject", 9, 30)):
        puller, flow = flow_of(OrderedReader(OrderedOptions(deliver_policy=policy)), pending)  # type: ignore[arg-type]
        puller.idle_s = 100.0
        assert asked(flow.step(0.0, 1))["expires"] == expires_s * 1_000_000_000


def test_a_listing_reserves_twice_what_its_largest_message_has() -> None:
    reader = OrderedReader(OrderedOptions(deliver_policy="last_per_subject"))
    _, flow = flow_of(reader, 5000)
    reader.came([5000])
    fields = asked(flow.step(0.0, 1))
    assert fields["batch"] == ordered.MAX_BYTES // 20_000
    assert fields["max_bytes"] == 2 * fields["batch"] * 5000


def test_nobody_waits_for_a_courtesy_as_long_as_for_a_sign_of_life() -> None:
    assert ordered.CLEAN_UP_TIMEOUT_S < ordered.HEARTBEAT_S


@pytest.mark.parametrize(
    ("max_bytes", "largest", "window"),
    [
        (1000, 0, (4, 0)),  # nothing is known of them
        (1000, 10, (25, 10)),
        (1000, 50, (5, 50)),
        (1000, 62, (4, 0)),  # no more than surely fit: no bound of bytes is needed
        (1000, 200, (4, 0)),
        (200, 0, (1, 0)),
        (200, 200, (1, 0)),
        (100_000, 10, (1000, 10)),
        (10_000_000, 0, (1000, 0)),
    ],
)
def test_a_listing_has_as_many_ahead_as_have_room_four_times(
    max_bytes: int, largest: int, window: tuple[int, int]
) -> None:
    reader = OrderedReader(OrderedOptions(deliver_policy="last_per_subject"))
    reader.came([largest])
    assert reader.listing_window(PullLimits(max_messages=1000, max_bytes=max_bytes), 250) == window


def test_what_comes_behind_a_gap_is_thrown_away() -> None:
    reader = OrderedReader(OrderedOptions())
    puller, flow = flow_of(reader, 9)
    asked(flow.step(0.0, 1))
    puller.absorb([delivered(1, 1, 8), delivered(3, 3, 6), delivered(4, 4, 5)], 0.1)
    step = flow.step(0.1, 1)
    assert isinstance(step, int)
    assert [message.metadata.stream_sequence for message in flow.take(3)] == [1]
    assert flow.step(0.1, 1) == 2
    assert flow.take(2) == []
    assert flow.step(0.1, 1) is None
    assert reader.config("two").start_sequence == 2


def test_a_message_larger_than_all_there_is_room_for_comes_alone() -> None:
    puller, flow = flow_of(OrderedReader(OrderedOptions()), 9, max_pending_bytes=1000)
    fields = asked(flow.step(0.0, 1))
    refused = ("409 Message Size Exceeds MaxBytes", f"Nats-Pending-Messages: {fields['batch']}")
    puller.absorb([status(*refused)], 0.1)
    fields = asked(flow.step(0.1, 1))
    assert (fields["batch"], fields.get("max_bytes")) == (1, None)
    puller.absorb([delivered(1, 1, 8)], 0.2)
    flow.take(1)
    assert asked(flow.step(0.2, 1))["max_bytes"] == 1000


def test_a_listing_asks_for_as_many_as_surely_fit() -> None:
    """A request that ends for its bytes may cost the listing a message."""
    reader = OrderedReader(OrderedOptions(deliver_policy="last_per_subject"))
    puller, flow = flow_of(reader, 5000)
    first = asked(flow.step(0.0, 1))
    assert (first["batch"], first.get("max_bytes")) == (16, None)  # 16 MiB, if they are as large as can be
    puller.absorb([delivered(n, n, 5000 - n) for n in range(1, 17)], 0.1)
    second = asked(flow.step(0.1, 1))
    assert second["batch"] + 16 == ordered.MAX_MESSAGES
    size = size_bytes(delivered(16, 16, 4984))
    assert second["max_bytes"] == max(ordered.MAX_BYTES // 16, 2 * second["batch"] * size)
    large = delivered(17, 17, 4983)
    large.data = b"x" * 50_000
    puller.absorb([large], 0.2)
    flow.take(17)
    window = ordered.MAX_BYTES // (4 * 50_060)
    assert flow.step(0.2, 1) == Wait(10.2)  # of such messages too many are owed already
    assert reader.listing_window(flow._limits, 1 << 20)[0] == window


def test_a_listing_is_made_again_when_a_message_of_it_may_be_lost() -> None:
    for line in ("409 Message Size Exceeds MaxBytes", "408 Request Timeout"):
        reader = OrderedReader(OrderedOptions(deliver_policy="last_per_subject"))
        puller, flow = flow_of(reader, 100)
        asked(flow.step(0.0, 1))
        puller.absorb([delivered(1, 1, 99), status(line, "Nats-Pending-Messages: 15"), delivered(3, 2, 98)], 0.1)
        assert flow.step(0.1, 1) == 1
        assert [message.metadata.stream_sequence for message in flow.take(1)] == [1]
        puller.absorb([delivered(4, 3, 97)], 0.2)  # what comes now has a hole before it
        assert flow.step(0.2, 1) is None
        assert reader.config("two").deliver_policy == "last_per_subject"
        puller, flow = flow_of(reader, 100)
        puller.absorb([delivered(1, 1, 99), delivered(2, 2, 98)], 0.3)
        assert [message.metadata.stream_sequence for message in flow.take(2)] == [2]
        fields = asked(flow.step(0.3, 1))
        is_careful = "max_bytes" not in fields
        assert (is_careful, fields["batch"] <= 16) == ((True, True) if "Size" in line else (False, False))


def test_a_server_that_has_nothing_to_send_has_ended_the_listing() -> None:
    reader = OrderedReader(OrderedOptions(deliver_policy="last_per_subject"))
    puller, flow = flow_of(reader, 3)
    asked(flow.step(0.0, 1))
    puller.absorb([delivered(7, 1, 2)], 0.1)
    flow.take(1)
    puller.absorb([status("100 Idle Heartbeat", "Nats-Last-Consumer: 1")], 5.0)
    flow.step(5.0, 1)
    assert (reader.is_caught_up, reader.is_listing) == (True, False)
    assert reader.config("two").start_sequence == 8


def test_no_wait_is_longer_than_its_deadline() -> None:
    puller, flow = flow_of(OrderedReader(OrderedOptions()))
    flow.deadline = 2.0
    assert flow.step(0.0, None) == Wait(2.0)
    asked(flow.step(0.0, 1))
    assert flow.step(0.0, 1) == Wait(2.0)
    flow.deadline = 20.0
    assert flow.step(0.0, 1) == Wait(10.0)  # two heartbeats
    flow.deadline = 2.0
    puller.absorb([status("408 Request Timeout")], 2.0)
    assert flow.step(2.0, 1) == Wait(2.0)  # it does not ask any more
    flow.deadline = None
    asked(flow.step(2.0, 1))


def test_only_consumers_that_are_good_for_nothing_are_waited_before() -> None:
    reader = OrderedReader(OrderedOptions())
    pauses = []
    for _ in range(8):
        pauses.append(reader.pause_s())
        reader.lost()
    assert pauses == [0.0, 0.0, 0.05, 0.1, 0.2, 0.4, 0.8, 1.0]
    reader.config("one")
    accept(reader, delivered(1, 1))
    assert reader.pause_s() == 0.0


class _Stream:
    """As many messages as one likes, read by one consumer after the other, each with the requests it was sent."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.next = 1
        self.consumer_sequence = 0
        self.requests: dict[str, int] = {}

    def create(self, config: ConsumerConfig) -> None:
        self.next, self.consumer_sequence = config.start_sequence or 1, 0
        self.requests.clear()

    def send(self, most: int) -> list[AckableMessage]:
        messages: list[AckableMessage] = []
        while self.requests and len(messages) < most and self.next <= self.count:
            self.consumer_sequence += 1
            messages.append(delivered(self.next, self.consumer_sequence, self.count - self.next))
            self.next += 1
            reply = next(iter(self.requests))
            self.requests[reply] -= 1
            if not self.requests[reply]:
                del self.requests[reply]
        return messages


_FAULTS = st.sampled_from(["none", "lose some", "lose the last", "swap", "double", "delete", "session", "forget"])


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 60), st.lists(st.tuples(_FAULTS, st.integers(1, 12)), max_size=40), st.integers(1, 20))
def test_whatever_happens_everything_comes_once_and_in_order(
    count: int, events: list[tuple[str, int]], window: int
) -> None:
    server, reader = _Stream(count), OrderedReader(OrderedOptions())
    received: list[int] = []
    now, session = 0.0, 1
    coming = iter([*events, *[("none", 12)] * (2 * count + 60)])
    while len(received) < count:
        server.create(reader.config("name"))
        reader.created(SequencePair(), count - server.next + 1)
        puller: OrderedPuller[AckableMessage] = OrderedPuller("inbox", "$JS.API.CONSUMER.MSG.NEXT.S.c", reader)
        flow = OrderedFlow(puller, reader, ConnectOptions(max_pending_messages=window), 1 << 20)
        while (step := flow.step(now, session)) is not None:
            if isinstance(step, Ask):
                server.requests[step.reply] = json.loads(step.body)["batch"]
            elif isinstance(step, int):
                received += [message.metadata.stream_sequence for message in flow.take(step)]
            elif len(received) == count:
                break
            else:
                fault, size = next(coming)
                messages = server.send(size)
                if fault == "lose some":
                    del messages[::3]
                elif fault == "lose the last":
                    del messages[-1:]
                elif fault == "swap":
                    messages.reverse()
                elif fault == "double":
                    messages = [message for message in messages for _ in range(2)]
                if fault == "delete":
                    messages.append(status("409 Consumer Deleted"))
                session += fault == "session"
                if fault == "forget":
                    now += 100.0
                    puller.on_time(now)
                elif messages:
                    puller.absorb(messages, now)
                else:
                    puller.absorb(
                        [status("100 Idle Heartbeat", f"Nats-Last-Consumer: {server.consumer_sequence}")], now
                    )
    assert received == list(range(1, count + 1))
    assert reader.is_caught_up
