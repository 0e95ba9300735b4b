"""What the sinks for JetStream decide: messages of items, writes that share a publisher, writes that are batches."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from support.connections import connected

from jetspark.batcher.blocking.jetstream import AtomicSink, FastIngestSink
from jetspark.batcher.effects import Call, SinkSteps
from jetspark.batcher.jetstream_sinks import Atomic, Ingest, ItemMessages, check
from jetspark.core.headers import Headers
from jetspark.errors import (
    BatchCutShort,
    BatchInDoubt,
    BatchTooLarge,
    ConfigError,
    ConnectionLost,
    DuplicateMessageId,
    InvalidSubject,
    JetSparkError,
    PayloadTooLarge,
    PermissionDenied,
    ProtocolError,
    ServerError,
    UsageError,
    WrongLastSequence,
)
from jetspark.publish.outgoing import Item

MAX_PAYLOAD = 100
CONNECTION = connected(max_payload=MAX_PAYLOAD, jetstream=True, api_lvl=4, version="2.14.0")


def run(steps: SinkSteps) -> None:
    """As a driver does whose calls return at once."""
    answer: Any = None
    error: BaseException | None = None
    while True:
        try:
            step: Any = steps.send(answer) if error is None else steps.throw(error)
        except StopIteration:
            return
        answer, error = None, None
        try:
            answer = step.call() if isinstance(step, Call) else 0.0
        except BaseException as failure:
            error = failure


# ---- messages --------------------------------------------------------------------------------------------------------


def test_items_are_bytes_on_a_subject_or_made_by_a_function() -> None:
    assert ItemMessages[Any]("s", None).plain([b"1", bytearray(b"2")]) == [("s", b"1"), ("s", b"2")]
    made: dict[int, Any] = {1: ("a", b"1"), 2: ("b", b"2", None), 3: ("c", b"3", {"X": "y"})}
    assert ItemMessages[int](None, made.__getitem__).plain([1, 2, 3]) == [
        ("a", b"1"),
        ("b", b"2"),
        ("c", b"3", {"X": "y"}),
    ]


@pytest.mark.parametrize("wrong", [("a",), ("a", b"", None, 1), ["a", b""], None])
def test_what_is_no_message_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match="expected \\(subject, data\\)"):
        ItemMessages[int](None, lambda item: wrong).plain([1])


def test_an_id_is_a_header_in_blocks_too() -> None:
    messages = ItemMessages[bytes]("s", None, bytes.decode)
    [(subject, data, headers)] = messages.plain([b"1"])  # type: ignore[misc]
    assert (subject, data, type(headers)) == ("s", b"1", Headers)
    assert messages.blocks([b"1"]) == [("s", b"1", b"NATS/1.0\r\nNats-Msg-Id: 1\r\n\r\n")]
    assert ItemMessages[bytes]("s", None).blocks([b"1"]) == [("s", b"1")]
    beside = ItemMessages[int](None, lambda item: ("s", b"", {"X": "y"}), str)
    assert beside.plain([7]) == [("s", b"", Headers({"X": "y", "Nats-Msg-Id": "7"}))]


LARGE = b"x" * (MAX_PAYLOAD + 1)


@pytest.mark.parametrize(
    ("items", "error"),
    [
        ([], None),
        ([("s", LARGE[1:])], None),
        ([("s", b""), ("s", LARGE)], PayloadTooLarge),
        ([("s", b""), ("a b", b"")], InvalidSubject),
        ([("s", b"", {"X": "y"}), ("s", b"", {"X": "y"})], None),
        ([("s", b"", {"X": "y"}), ("a b", b"", {"X": "y"})], InvalidSubject),
        ([("s", b"x" * 80, {"X": "y" * 20})], PayloadTooLarge),
        ([("s", b"x" * 80, b"NATS/1.0\r\nX: yyyyyyyyyyyy\r\n\r\n")], PayloadTooLarge),
        ([("s", b"", None), ("s", LARGE)], PayloadTooLarge),
        ([("s", "text")], ConfigError),
    ],
)
def test_all_can_be_sent_or_one_is_named(items: list[Item], error: type[Exception] | None) -> None:
    if error is None:
        check(CONNECTION, items)
    else:
        with pytest.raises(error):
            check(CONNECTION, items)


def test_messages_that_were_made_are_checked_as_far_as_they_can_be_wrong() -> None:
    plain = ItemMessages[bytes]("s", None)
    plain.check(CONNECTION, [])
    plain.check(CONNECTION, plain.blocks([b"", LARGE[1:]]))
    with pytest.raises(PayloadTooLarge):
        plain.check(CONNECTION, plain.blocks([b"", LARGE]))
    named = ItemMessages[bytes]("s", None, bytes.decode)
    with pytest.raises(PayloadTooLarge):  # with its id
        named.check(CONNECTION, named.blocks([LARGE[1:]]))
    made = ItemMessages[str](None, lambda item: (item, b""))
    with pytest.raises(InvalidSubject):
        made.check(CONNECTION, made.blocks(["s", "a b"]))


# ---- fast ingest -----------------------------------------------------------------------------------------------------


class FakePublisher:
    """Accepts everything; ``fails`` says at which of its calls it raises."""

    _connection = CONNECTION

    def __init__(self, told: list[Any]) -> None:
        self.told = told
        self.accepted = 0
        self.stored = 0
        self.failure: Exception | None = None
        self.fails: dict[str, Exception] = {}

    def _enter(self) -> FakePublisher:
        return self

    def _publish_checked(self, items: Sequence[Item]) -> int:
        self.told.append([item[1] for item in items])
        self.accepted += len(items)
        self._maybe_fail("publish")
        return self.accepted

    def wait_published(self, last: int, *, linger_s: float) -> None:
        self.told.append(("wait", last, linger_s))
        self._maybe_fail("wait")

    def published(self) -> int:
        return self.stored

    def close(self, timeout: float | None) -> None:
        self.told.append(("close", timeout))
        self._maybe_fail("close")

    def _maybe_fail(self, call: str) -> None:
        if call in self.fails:
            raise self.fails[call]


class Bench:
    """Writes that share publishers, and all that happens, in order."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.publishers: list[FakePublisher] = []
        self.ingest = Ingest[bytes](ItemMessages("s", None), self._make, self, linger_s=0.5)

    def _make(self) -> FakePublisher:
        self.publishers.append(FakePublisher(self.told))
        return self.publishers[-1]

    def acquire(self) -> None:
        self.told.append("turn")

    def release(self) -> None:
        self.told.append("over")

    def write(self, *items: bytes) -> None:
        run(self.ingest.write(items))


def test_a_write_is_published_in_its_turn_and_waited_for_after_it() -> None:
    bench = Bench()
    bench.write(b"1", b"2")
    bench.write()
    bench.write(b"3")
    assert bench.told == [
        *["turn", [b"1", b"2"], "over", ("wait", 2, 0.0)],
        *["turn", [b"3"], "over", ("wait", 3, 0.0)],
    ]
    assert len(bench.publishers) == 1


def test_a_write_that_is_not_alone_waits_a_moment_for_the_others_and_one_that_failed_is_not_under_way() -> None:
    bench = Bench()
    with pytest.raises(PayloadTooLarge):
        bench.write(LARGE)
    assert bench.told == ["turn", "over"]
    other = bench.ingest.write([b"1"])
    for answer in (None, [("s", b"1")]):
        other.send(answer)  # it waits for its turn
    bench.told.clear()
    bench.write(b"2")
    assert bench.told == ["turn", [b"2"], "over", ("wait", 1, 0.5)]
    other.close()
    bench.told.clear()
    bench.write(b"3")
    assert bench.told[-1] == ("wait", 2, 0.0)


@pytest.mark.parametrize(
    "refusal", [ServerError(400, 10054, "message size exceeds maximum allowed"), PermissionDenied("publish", "s")]
)
@pytest.mark.parametrize("call", ["publish", "wait"])
def test_a_message_that_is_refused_is_the_fault_of_its_own_write_only(call: str, refusal: JetSparkError) -> None:
    for stored, is_own in ((2, True), (3, True), (1, False), (0, False)):
        bench = Bench()
        bench.write(b"1", b"2")
        [publisher] = bench.publishers
        publisher.stored, publisher.failure = stored, None
        error: JetSparkError = refusal
        publisher.fails[call] = error

        def fail(publisher: FakePublisher = publisher) -> None:
            publisher.failure = refusal

        publisher._maybe_fail = partial(_fail_first, publisher._maybe_fail, fail)  # type: ignore[method-assign]
        with pytest.raises(type(refusal) if is_own else BatchCutShort) as raised:
            bench.write(b"3")
        if is_own:
            assert raised.value is refusal
        else:
            assert "another write" in str(raised.value)
            assert isinstance(raised.value, BatchCutShort)
            assert raised.value.stored == 0
    assert bench.told.count("turn") == bench.told.count("over") == 2


def _fail_first(usual: Callable[[str], None], fail: Callable[[], None], call: str) -> None:
    fail()
    usual(call)


@pytest.mark.parametrize("error", [ConnectionLost("cut"), ServerError(400, 10054, "another")])
def test_other_errors_are_what_they_are(error: JetSparkError) -> None:
    bench = Bench()
    bench.write(b"1")
    bench.publishers[0].fails["wait"] = error
    if isinstance(error, ConnectionLost):
        bench.publishers[0].failure = None
    with pytest.raises(type(error)) as raised:
        bench.write(b"2")
    assert raised.value is error


@pytest.mark.parametrize("closes", [True, False])
def test_a_publisher_that_gave_up_is_closed_and_replaced(closes: bool) -> None:
    bench = Bench()
    bench.write(b"1")
    [old] = bench.publishers
    old.failure = ConnectionLost("cut")
    if not closes:
        old.fails["close"] = ConnectionLost("cut")
    bench.told.clear()
    bench.write(b"2")
    assert bench.told == ["turn", ("close", 0.0), [b"2"], "over", ("wait", 1, 0.0)]
    assert bench.ingest.publisher is bench.publishers[1]


def test_a_sink_that_is_closed_writes_nothing_more() -> None:
    bench = Bench()
    run(bench.ingest.close(None))
    assert bench.told == []
    bench = Bench()
    bench.write(b"1")
    bench.told.clear()
    run(bench.ingest.close(5.0))
    assert bench.told == [("close", 5.0)]
    with pytest.raises(UsageError, match="closed"):
        bench.write(b"2")
    assert bench.told == [("close", 5.0), "turn", "over"]


class FakeJetStream:
    """As much of a JetStream context as the sink for fast ingest uses."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def fast_publisher(self, **options: Any) -> FakePublisher:
        self.told.append(options)
        return FakePublisher(self.told)


@pytest.mark.parametrize(
    ("options", "has_ids"), [({}, False), ({"message_ids": True}, True), ({"id_of": bytes.decode}, True)]
)
def test_a_sink_opens_its_publisher_with_its_options_when_it_writes(options: dict[str, Any], has_ids: bool) -> None:
    js: Any = FakeJetStream()
    sink = FastIngestSink[bytes](js, "s", flow=7, **options)
    assert sink.publisher is None
    sink.write([b"1"])
    sink.write([b"2"])
    assert js.told == [{"message_ids": has_ids, "flow": 7}, [b"1"], ("wait", 1, 0.0), [b"2"], ("wait", 2, 0.0)]
    assert isinstance(sink.publisher, FakePublisher)


@pytest.mark.parametrize("sink", [FastIngestSink, AtomicSink])
@pytest.mark.parametrize("wrong", [None, object(), FakeJetStream])
def test_a_sink_needs_a_jetstream_context(sink: Any, wrong: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"js={wrong!r}: expected what nc.jetstream() returns")):
        sink(wrong, "s")


def test_an_option_that_no_publisher_has_is_refused_before_the_first_write() -> None:
    js: Any = FakeJetStream()
    with pytest.raises(ConfigError, match="unknown fast publisher option speed"):
        FastIngestSink[bytes](js, "s", speed=1)  # type: ignore[call-arg]


# ---- atomic ----------------------------------------------------------------------------------------------------------


class FakeBatch:
    """A batch that is stored, or raises what it is told to."""

    id = "me"

    def __init__(self, told: list[Any], error: BaseException | None, outcome: str) -> None:
        self.told, self.error, self.ends_as = told, error, outcome
        self.outcome = "open"

    def _enter(self) -> FakeBatch:
        return self

    def add_many(self, items: Sequence[Item]) -> None:
        self.told.append(("many", list(items)))

    def add(self, subject: str, data: bytes, headers: Any = None) -> None:
        self.told.append(("add", subject, data, headers))

    def commit(self, *last: Any, headers: Any = None) -> None:
        self.told.append(("commit", *last, headers))
        self.outcome = "stored" if self.error is None else self.ends_as
        if self.error is not None:
            raise self.error

    def resolve(self) -> str:
        self.told.append("resolve")
        return self.ends_as if self.ends_as == "stored" else "not stored"

    def discard(self) -> None:
        self.told.append("discard")


class FakeStream:
    """``errors`` are those of one batch after the other, None for one that is stored; the last stays."""

    def __init__(self, *errors: BaseException | None, outcome: str = "not stored") -> None:
        self.told: list[Any] = []
        self.errors, self.outcome = list(errors or (None,)), outcome
        self.answer: BaseException | None = None

    def atomic_batch(self, timeout: float | None = None) -> FakeBatch:
        if timeout is None:
            return FakeBatch(self.told, None, "")  # for its name
        return FakeBatch(self.told, self.errors.pop(0) if len(self.errors) > 1 else self.errors[0], self.outcome)

    def publish_async(self, subject: str, data: bytes, *, msg_id: str | None, headers: dict[str, str]) -> None:
        self.told.append(("probe", subject, data, msg_id, headers["Nats-Batch-Id"]))

    def outcome_of(self, future: None) -> None:
        if self.answer is not None:
            raise self.answer


def atomic_of(stream: FakeStream, messages: ItemMessages[Any], level: int = 4) -> Atomic[Any]:
    connection = CONNECTION if level == 4 else connected(jetstream=True, api_lvl=level, version="2.12.0")
    return Atomic(
        stream, lambda js: connection, messages, stream.outcome_of, max_messages=10, timeout_s=1.0, doubt_s=1.0
    )


PLAIN = ItemMessages[bytes]("s", None)


def test_the_last_message_of_a_batch_is_its_commit_and_one_alone_is_not_where_a_batch_has_an_end() -> None:
    for items, level, told in (
        ([b"1", b"2", b"3"], 4, [("many", [("s", b"1"), ("s", b"2")]), ("commit", "s", b"3", None)]),
        ([b"1"], 4, [("many", [("s", b"1")]), ("commit", None)]),
        ([b"1"], 3, [("many", []), ("commit", "s", b"1", None)]),
        ([b"1"], 5, [("many", [("s", b"1")]), ("commit", None)]),
        ([b"1", b"2"], 3, [("many", [("s", b"1")]), ("commit", "s", b"2", None)]),
    ):
        stream = FakeStream()
        run(atomic_of(stream, PLAIN, level).write(items))
        assert stream.told == told


def test_a_sink_for_atomic_batches_stores_no_more_at_once_than_it_was_told() -> None:
    stream: Any = FakeStream()
    stream._context = SimpleNamespace(connection=CONNECTION)
    sink = AtomicSink[bytes](stream, "s", max_messages=2, timeout=1.0)
    assert sink.max_messages == 2
    sink.write([b"1", b"2", b"3"])
    assert [each for each in stream.told if each[0] == "commit"] == [("commit", "s", b"2", None), ("commit", None)]


def test_messages_with_headers_are_added_one_by_one() -> None:
    made: dict[int, Any] = {1: ("a", b"1"), 2: ("b", b"2", {"X": "y"}), 3: ("c", b"3", {"Z": "1"})}
    stream = FakeStream()
    run(atomic_of(stream, ItemMessages(None, made.__getitem__)).write([1, 2, 3]))
    assert stream.told == [
        ("add", "a", b"1", None),
        ("add", "b", b"2", {"X": "y"}),
        ("commit", "c", b"3", {"Z": "1"}),
    ]


def test_of_items_with_the_same_id_the_first_is_stored() -> None:
    made: dict[int, Any] = {1: ("a", b"1", {"Nats-Msg-Id": "x"}), 2: ("b", b"2", {"Nats-Msg-Id": "x"}), 3: ("c", b"3")}
    stream = FakeStream()
    run(atomic_of(stream, ItemMessages(None, made.__getitem__)).write([1, 3, 2, 3]))
    assert [step[1:3] for step in stream.told] == [("a", b"1"), ("c", b"3"), ("c", b"3")]


@pytest.mark.parametrize(
    ("outcome", "told"), [("open", ["discard"]), ("not stored", ["discard"]), ("stored", []), ("unknown", [])]
)
def test_a_batch_that_is_not_stored_leaves_its_place(outcome: str, told: list[str]) -> None:
    stream = FakeStream(ConnectionLost("cut"), outcome=outcome)
    with pytest.raises(ConnectionLost):
        run(atomic_of(stream, PLAIN).write([b"1", b"2"]))
    assert stream.told[2:] == told


def test_a_batch_in_doubt_is_resolved_where_that_can_be_done() -> None:
    doubt = BatchInDoubt("me", "no answer")
    stream = FakeStream(doubt, outcome="unknown")
    with pytest.raises(BatchCutShort, match="had no effect"):
        run(atomic_of(stream, PLAIN).write([b"1", b"2"]))
    assert stream.told[2:] == ["resolve"]
    stream = FakeStream(doubt, outcome="not stored")
    with pytest.raises(BatchInDoubt):
        run(atomic_of(stream, PLAIN).write([b"1", b"2"]))
    assert "resolve" not in stream.told


def test_a_resolved_batch_that_is_stored_is_no_error() -> None:
    class Late(FakeBatch):
        def resolve(self) -> str:
            self.told.append("resolve")
            return "stored"

    class Stream(FakeStream):
        def atomic_batch(self, timeout: float | None = None) -> FakeBatch:
            return Late(self.told, self.errors[0], self.outcome)

    stream = Stream(BatchInDoubt("me", "no answer"), outcome="unknown")
    run(atomic_of(stream, PLAIN).write([b"1", b"2"]))
    assert stream.told[-1] == "resolve"


def test_ids_that_are_known_without_ids_are_an_error() -> None:
    stream = FakeStream(DuplicateMessageId(400, 10201, "x"))
    with pytest.raises(DuplicateMessageId):
        run(atomic_of(stream, PLAIN).write([b"1", b"2"]))
    assert not any(step[0] == "probe" for step in stream.told)


def test_a_stream_is_asked_for_each_id_on_the_subject_of_its_item() -> None:
    named = ItemMessages[bytes]("s", None, bytes.decode)
    stream = FakeStream(DuplicateMessageId(400, 10201, "x"), None)
    stream.answer = WrongLastSequence(400, 10071, "x")  # it does not know any of them
    run(atomic_of(stream, named).write([b"1", b"2"]))
    probes = [step for step in stream.told if step[0] == "probe"]
    assert probes == [("probe", "s", b"", "1", "me-0"), ("probe", "s", b"", "2", "me-1")]
    stream = FakeStream(DuplicateMessageId(400, 10201, "x"), None)
    with pytest.raises(ProtocolError, match="a message on 's' was stored"):
        run(atomic_of(stream, named).write([b"1"]))


def test_a_write_of_several_batches_that_fails_tells_how_many_items_are_stored() -> None:
    stream = FakeStream(None, ConnectionLost("cut"))
    with pytest.raises(BatchCutShort, match="cut") as raised:
        run(atomic_of(stream, PLAIN).write([b"%d" % number for number in range(15)]))
    assert raised.value.stored == 10


def test_a_server_that_takes_one_message_at_a_time_gets_them_so() -> None:
    stream = FakeStream(BatchTooLarge(400, 10199, "too large: 1"), None)
    run(atomic_of(stream, PLAIN).write([b"1", b"2"]))
    assert [step for step in stream.told if step[0] == "many"][1:] == [("many", [("s", b"1")]), ("many", [("s", b"2")])]


def test_a_block_of_headers_that_is_ready_has_no_id_to_look_at() -> None:
    block = b"NATS/1.0\r\nX: y\r\n\r\n"
    stream = FakeStream()
    run(atomic_of(stream, ItemMessages(None, lambda item: ("a", item, block))).write([b"1", b"2"]))  # type: ignore[arg-type, return-value]
    assert stream.told == [("add", "a", b"1", block), ("commit", "a", b"2", block)]
