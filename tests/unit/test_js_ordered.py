from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import pickle
import random
from collections.abc import Iterator

import pytest

from jetspark.core.message import CoreMessage
from jetspark.errors import (
    ConfigError,
    ConnectionLost,
    ConsumerNotFound,
    JetStreamUnavailable,
    NoServersAvailable,
    RequestTimeout,
    ServerError,
    StreamNotFound,
    StreamRecreated,
    StreamWentBack,
)
from jetspark.jetstream.config import ConsumerConfig, DeliverPolicy
from jetspark.jetstream.info import ConsumerInfo, SequencePair
from jetspark.jetstream.operations import Api, Request
from jetspark.jetstream.ordered import (
    OrderedOptions,
    OrderedReader,
    Patience,
    Verdict,
    heartbeat_for,
    retry_pauses,
)
from jetspark.jetstream.push import answer_to, check_status, silence_s


def delivered(stream_sequence: int, consumer_sequence: int, pending: int = 0) -> CoreMessage:
    reply = b"$JS.ACK.S.c.1.%d.%d.1700000000000000000.%d" % (stream_sequence, consumer_sequence, pending)
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
    reader = OrderedReader(OrderedOptions(start_sequence=40))
    reader.config("one")
    assert reader.accept(delivered(40, 1)) is Verdict.DELIVER
    assert reader.accept(delivered(43, 2)) is Verdict.DELIVER
    config = reader.config("two")
    assert (config.deliver_policy, config.start_sequence) == ("by_start_sequence", 44)
    assert reader.accept(delivered(44, 1)) is Verdict.DELIVER


# ---- the last of each subject ----------------------------------------------------------------------------------------


class Bucket:
    """A stream in memory, with every revision, as a ``last_per_subject`` consumer and its successors see it."""

    def __init__(self, subjects: list[str]) -> None:
        self.messages: list[tuple[int, str]] = list(enumerate(subjects, 1))

    def append(self, subject: str) -> None:
        self.messages.append((len(self.messages) + 1, subject))

    def consume(self, reader: OrderedReader) -> Iterator[tuple[int, str, CoreMessage]]:
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

    def _deliver(self, sequences: list[int], resume: int) -> Iterator[tuple[int, str, CoreMessage]]:
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
        for sequence, subject, message in bucket.consume(reader):
            if rng.random() < 0.2 and len(bucket.messages) < 120:
                bucket.append(rng.choice(names))
            if rng.random() < 0.1 and life < 20:
                is_lost = True
                break
            verdict = reader.accept(message)
            if verdict is Verdict.DELIVER:
                received.append((sequence, subject))
            else:
                assert verdict is Verdict.IGNORE
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
        assert reader.accept(next(messages)[2]) is Verdict.DELIVER
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
        assert reader.accept(next(messages)[2]) is Verdict.DELIVER
    assert not reader.is_caught_up  # the changes are still to come
    assert reader.config("two").start_sequence == 3


def test_what_is_passed_over_last_ends_a_listing_too() -> None:
    reader = OrderedReader(OrderedOptions(deliver_policy="last_per_subject"))
    bucket = Bucket(["a", "b"])
    messages = bucket.consume(reader)
    reader.accept(next(messages)[2])
    del bucket.messages[1:]  # purged while nobody was connected
    (again,) = bucket.consume(reader)
    assert reader.accept(again[2]) is Verdict.IGNORE
    assert reader.is_caught_up
    assert reader.config("three").start_sequence == 2


def test_a_bucket_without_a_match_is_listed_at_once_and_its_place_is_kept() -> None:
    reader = OrderedReader(OrderedOptions(deliver_policy="last_per_subject"))
    reader.config("one")
    reader.created(SequencePair(stream_sequence=8), 0)
    assert reader.is_caught_up
    assert reader.config("two").start_sequence == 9


def test_a_listing_made_again_is_bounded_by_flow_control_only() -> None:
    """Otherwise what was delivered before might fill all the room there is, each time."""
    reader = OrderedReader(OrderedOptions(deliver_policy="last_per_subject"))
    assert reader.bounds()["max_pending_messages"] > 1_000_000
    next(Bucket(["a"]).consume(reader))
    reader.accept(delivered(1, 1))
    assert reader.bounds() == {}
    assert OrderedReader(OrderedOptions()).bounds() == {}


# ---- which stream it is ----------------------------------------------------------------------------------------------


def stream(created: int, last_sequence: int) -> bytes:
    moment = datetime.datetime.fromtimestamp(created, datetime.UTC).isoformat()
    state = {"messages": 0, "bytes": 0, "first_seq": 1, "last_seq": last_sequence, "consumer_count": 0}
    return json.dumps({"config": {"name": "S"}, "created": moment, "state": state}).encode()


def consumer(pending: int = 0) -> bytes:
    return json.dumps({"stream_name": "S", "name": "c", "config": {}, "num_pending": pending}).encode()


def opened(reader: OrderedReader, *answers: bytes) -> list[str]:
    """Run the operation with these answers; returns what was asked."""
    asked = []
    operation = reader.open(Api(), "S", "inbox")
    step = next(operation)
    coming = iter(answers)
    with contextlib.suppress(StopIteration):
        while True:
            assert isinstance(step, Request)
            asked.append(step.subject.removeprefix("$JS.API."))
            answer = b"" if step.is_silent else next(coming)
            step = operation.send(CoreMessage("r", answer, None, None, None))
    return asked


def test_the_stream_is_asked_before_the_first_consumer_and_after_every_other() -> None:
    """After: a stream that is still the same then was so when the consumer was made."""
    reader = OrderedReader(OrderedOptions())
    assert not reader.has_begun
    assert opened(reader, stream(1, 9), consumer(9)) == ["STREAM.INFO.S", "CONSUMER.CREATE.S"]
    assert reader.has_begun
    reader.accept(delivered(9, 1))
    assert opened(reader, consumer(), stream(1, 9)) == ["CONSUMER.CREATE.S", "STREAM.INFO.S"]


def test_a_stream_of_the_same_name_is_told_from_the_one_that_was_read() -> None:
    reader = OrderedReader(OrderedOptions())
    opened(reader, stream(1, 9), consumer(9))
    reader.accept(delivered(9, 1))
    with pytest.raises(
        StreamRecreated, match=r"'S' was deleted and created anew.*the last sequence read is 9: read"
    ) as e:
        opened(reader, consumer(), stream(2, 60))
    assert e.value.stream == "S"
    assert not reader.may_pass(e.value)
    assert pickle.loads(pickle.dumps(e.value)).remedy == e.value.remedy


def test_a_stream_that_ends_before_our_place_is_an_error_only_if_it_stays_so() -> None:
    """A replica that has just become leader may be a moment behind."""
    reader = OrderedReader(OrderedOptions())
    opened(reader, stream(1, 9), consumer(9))
    reader.accept(delivered(9, 1))
    verdicts = []
    for _ in range(7):
        with pytest.raises(StreamWentBack, match="sequence 10 is wanted and the stream's next one is 4") as caught:
            opened(reader, consumer(), stream(1, 3))
        verdicts.append(reader.may_pass(caught.value))
    assert verdicts == [True] * 6 + [False]
    opened(reader, consumer(), stream(1, 9))  # and forgotten when it has caught up
    assert reader.may_pass(caught.value)


# ---- how long to wait ------------------------------------------------------------------------------------------------


def test_patience_is_for_lack_of_progress() -> None:
    patience = Patience("keys of bucket 'b'", 2.0, now=100.0)
    assert (patience.left_s(100.5, 12.5), patience.left_s(100.5, 0.1)) == (1.5, 0.1)
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
    reader.accept(delivered(10, 1))
    reader.accept(delivered(11, 2))
    assert reader.accept(delivered(20, consumer_sequence)) is Verdict.RESTART
    assert reader.config("two").start_sequence == 12


@pytest.mark.parametrize("policy", ["new", "last"])
@pytest.mark.parametrize("place", [0, 50])
def test_where_it_begins_is_remembered_before_anything_came(policy: DeliverPolicy, place: int) -> None:
    reader = OrderedReader(OrderedOptions(deliver_policy=policy))
    reader.config("one")
    reader.created(SequencePair(stream_sequence=place), 0)
    assert reader.config("two").start_sequence == place + 1


def test_a_place_that_was_left_before_we_heard_of_it_is_not_taken_for_the_beginning() -> None:
    reader = OrderedReader(OrderedOptions(deliver_policy="new"))
    reader.config("one")
    reader.created(SequencePair(stream_sequence=51, consumer_sequence=1), 0)
    assert reader.config("two").deliver_policy == "new"


def test_only_what_passes_is_waited_for() -> None:
    reader = OrderedReader(OrderedOptions())
    assert reader.may_pass(ConnectionLost("cut while the consumer was made"))
    assert not reader.may_pass(NoServersAvailable({"a": "refused"}))
    for error in (RequestTimeout("x", 1), JetStreamUnavailable("x"), ServerError(503, 10008, "no leader")):
        assert reader.may_pass(error)
    for error in (StreamNotFound(404, 10059, "stream not found"), ServerError(400, 10094, "bad")):
        assert not reader.may_pass(error)


def test_heartbeats_show_what_was_missed() -> None:
    reader = OrderedReader(OrderedOptions())
    reader.config("one")
    reader.accept(delivered(10, 1))
    assert reader.accept(status("100 Idle Heartbeat", "Nats-Last-Consumer: 1")) is Verdict.IDLE
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
    with pytest.raises(ConsumerNotFound, match="'c' of stream 'S': it was deleted"):
        check_status(info, 409, "Consumer Deleted")
    check_status(info, 409, "Leadership Change")
    with pytest.raises(ServerError, match="odd"):
        check_status(info, 499, "odd")
