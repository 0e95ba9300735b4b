"""The window against the bytes a server would send; time is stated."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspark.core.connection import Connection, Ready
from jetspark.core.events import Closed, ConnectionEvent
from jetspark.core.message import AnswerRun
from jetspark.core.options import ConnectOptions
from jetspark.core.parser import RUN_AFTER_MESSAGES
from jetspark.core.reconnect import Server
from jetspark.errors import (
    BufferFull,
    ConfigError,
    ConnectionClosed,
    ConnectionLost,
    InvalidSubject,
    JetStreamUnavailable,
    PermissionDenied,
    ProtocolError,
    RequestTimeout,
    ServerError,
    WindowFull,
    WrongLastSequence,
)
from jetspark.jetstream.info import PubAck
from jetspark.publish.window import DEFAULT_WINDOW, GATHER_S, HandleFacts, PublishWindow, WindowBase, WindowOptions

A = Server("a", 4222)
NO_RESPONDERS = b"NATS/1.0 503\r\nNats-Subject: orders\r\n\r\n"


class Ack(HandleFacts):
    """A handle that remembers; being resolved twice is the one thing that must not happen."""

    def __init__(self) -> None:
        self.outcome: PubAck | Exception | None = None
        self.is_cancelled = False

    def cancelled(self) -> bool:
        return self.is_cancelled

    def set_result(self, result: PubAck, /) -> None:
        assert self.outcome is None
        assert not self.is_cancelled
        self.outcome = result

    def set_exception(self, exception: Exception, /) -> None:
        assert self.outcome is None
        assert not self.is_cancelled
        self.outcome = exception


class Bench:
    """A connection, a window on it, and the server's side of the conversation."""

    def __init__(self, options: dict[str, Any] | None = None, **bounds: Any) -> None:
        self.now = 100.0
        self.machine = Connection(ConnectOptions(**(options or {})), [A], inbox="_INBOX.me", jitter=lambda: 0.0)
        self.connect()
        self.window = PublishWindow(self.machine, self, **bounds)

    pending_messages = 0

    def wake(self) -> None:
        self.window.on_replies(self.now)

    def read_up(self, deadline: float) -> bool:
        return True

    def connect(self) -> None:
        machine = self.machine
        machine.begin(A)
        machine.receive_data(b'INFO {"max_payload": 1024}\r\n')
        machine.login(None)
        machine.data_to_send()
        machine.receive_data(b"PONG\r\n")
        self.settle()

    def settle(self) -> None:
        """What the drivers do with events."""
        for event in self.machine.events():
            if isinstance(event, Ready):
                assert event.subscription.reader is self
                self.wake()
            elif hasattr(self, "window"):
                self.window.on_event(event, self.now)  # type: ignore[arg-type]

    def publish(self, subject: str = "orders", headers: dict[str, str] | None = None) -> Ack:
        ack = Ack()
        assert self.window.publish(ack, subject, b"x", headers, self.now)
        return ack

    def send(self) -> list[str]:
        """Hand over what is buffered; returns the reply subjects in it."""
        frames = self.machine.data_to_send().split(b"\r\n")
        return [frame.split(b" ")[2].decode() for frame in frames if frame.startswith((b"PUB ", b"HPUB "))]

    def answer(self, reply: str, payload: bytes = b"", block: bytes = b"") -> None:
        if block:
            frame = b"HMSG %b 1 %d %d\r\n%b%b\r\n" % (
                reply.encode(),
                len(block),
                len(block) + len(payload),
                block,
                payload,
            )
        else:
            frame = b"MSG %b 1 %d\r\n%b\r\n" % (reply.encode(), len(payload), payload)
        self.machine.receive_data(frame)
        self.settle()

    def answer_all(self, replies: list[str], payloads: list[bytes]) -> None:
        """In one chunk."""
        answers = zip(replies, payloads, strict=True)
        self.machine.receive_data(b"".join(b"MSG %b 1 %d\r\n%b\r\n" % (to.encode(), len(x), x) for to, x in answers))
        self.settle()

    def expect_runs(self) -> None:
        """Have the connection read acknowledgements of the next messages as runs."""
        count = self.window.max_outstanding
        for first in range(1, 2 * RUN_AFTER_MESSAGES + count, count):
            for _ in range(count):
                self.publish()
            self.answer_all(self.send(), [plain(10_000 + first + number) for number in range(count)])
        assert self.window.outstanding == 0
        assert self.machine.subscriptions.parser._run is not None

    def end(self, reason: str = "gone") -> None:
        self.machine.end(reason)
        self.settle()


def plain(sequence: int) -> bytes:
    return b'{"stream":"ORDERS","seq":%d}' % sequence


# ---- answers ---------------------------------------------------------------------------------------------------


def test_each_acknowledgement_resolves_its_own_handle_in_any_order() -> None:
    bench = Bench()
    acks = [bench.publish() for _ in range(3)]
    replies = bench.send()
    assert len(set(replies)) == 3
    for position in (2, 0, 1):
        bench.answer(replies[position], plain(position + 1))
    assert [ack.outcome for ack in acks] == [PubAck(stream="ORDERS", sequence=number) for number in (1, 2, 3)]
    assert bench.window.outstanding == 0


def test_answers_are_kept_however_few_messages_others_may_keep() -> None:
    """No more can come than was asked for, so the window is the bound."""
    bench = Bench({"max_pending_messages": 1})
    acks = [bench.publish() for _ in range(3)]
    answers = [(reply.encode(), plain(number)) for number, reply in enumerate(bench.send(), 1)]
    bench.machine.receive_data(b"".join(b"MSG %b 1 %d\r\n%b\r\n" % (to, len(data), data) for to, data in answers))
    bench.settle()
    assert [ack.outcome for ack in acks] == [PubAck(stream="ORDERS", sequence=number) for number in (1, 2, 3)]


@pytest.mark.parametrize(
    ("payload", "expected"),
    [
        (b'{"stream":"A","seq":2}', PubAck(stream="A", sequence=2)),
        (b'{"stream":"A", "seq":2}', PubAck(stream="A", sequence=2)),
        (b'{"stream":"A","seq":18446744073709551615}', PubAck(stream="A", sequence=2**64 - 1)),
        (b'{"stream":"A","seq":2,"duplicate": true}', PubAck(stream="A", sequence=2, duplicate=True)),
        (b'{"stream":"A","domain":"hub","seq":2}', PubAck(stream="A", sequence=2, domain="hub")),
        (b'{"stream":"\xc3\xa4 \\"","seq":2}', PubAck(stream='ä "', sequence=2)),
        (b'{"stream":"A","seq":2,"val":"5"}', PubAck(stream="A", sequence=2, value="5")),
        (b' { "seq" : 2 , "stream" : "A" } ', PubAck(stream="A", sequence=2)),
    ],
)
def test_every_form_of_an_acknowledgement_is_read(payload: bytes, expected: PubAck) -> None:
    bench = Bench()
    ack = bench.publish()
    bench.answer(bench.send()[0], payload)
    assert ack.outcome == expected
    assert repr(ack.outcome) == repr(expected)  # every field is there, whichever way it was read


@given(st.text("ABCxyz019_-", min_size=1, max_size=8), st.integers(0, 2**64 - 1))
@settings(max_examples=50)
def test_the_fast_way_to_read_and_json_agree(stream: str, sequence: int) -> None:
    bench = Bench()
    fast, slow = bench.publish(), bench.publish()
    replies = bench.send()
    bench.answer(replies[0], json.dumps({"stream": stream, "seq": sequence}, separators=(",", ":")).encode())
    bench.answer(replies[1], json.dumps({"seq": sequence, "stream": stream}, indent=1).encode())
    assert fast.outcome == slow.outcome == PubAck(stream=stream, sequence=sequence)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"}",
        b"{5}",
        b'{"stream":"A","seq":}',
        b'{"stream":"A","seq":2',
        b'{"stream":"A","seq":2]',
        b'{"stream":"A","seq":-2}',
        b'{"stream":"A","seq":+2}',
        b'{"stream":"A","seq":2_0}',
        b'{"stream":"A","seq": 2}',
        b'{"stream":"A","seq":2} ',
        b'{"stream":"A","seq":\xd9\xa2}',
        b'{"stream":"A","seq":99999999999999999999}',
        b'{"stream":"A", "seq":2}',
        b'{"stream":"B","seq":2}',
        b'{"stream":"","seq":2}',
    ],
)
def test_what_was_read_before_changes_no_reading(payload: bytes) -> None:
    """A window remembers how its acknowledgements begin; what only looks alike is read as if it were the first."""
    outcomes = []
    for before in ([], [plain(1)], [b'{"stream":"A","seq":1}']):
        bench = Bench()
        for known in before:
            bench.publish()
            bench.answer(bench.send()[0], known)
        ack = bench.publish()
        bench.answer(bench.send()[0], payload)
        outcomes.append(repr(ack.outcome))
    assert outcomes[0] == outcomes[1] == outcomes[2] != "None"


# ---- runs of answers -------------------------------------------------------------------------------------------


def test_acknowledgements_that_come_in_a_run_resolve_their_own_handles_in_any_order() -> None:
    bench = Bench(max_outstanding=100)
    bench.expect_runs()
    acks = [bench.publish() for _ in range(100)]
    replies = bench.send()
    numbers = list(range(20_000, 20_100))
    bench.answer_all([replies[number % 100] for number in reversed(numbers)], [plain(n) for n in reversed(numbers)])
    assert [ack.outcome for ack in acks] == [PubAck(stream="ORDERS", sequence=number) for number in numbers]
    assert bench.window.outstanding == 0


def test_one_unusual_answer_in_a_run_changes_nothing_for_the_others() -> None:
    """Of the same size as the others, so that the connection reads it as one of them."""
    bench = Bench(max_outstanding=20)
    bench.expect_runs()
    unusual: dict[int, tuple[bytes, PubAck | type[Exception]]] = {
        5: (b'{"seq":20005,"stream":"ORDERS"}', PubAck(stream="ORDERS", sequence=20005)),
        6: (b'{"stream":"ORDERS","seq":2000}}', ProtocolError),
        7: (b'{"error":{"code":500,"x":"abc"}', ProtocolError),
        8: (b'{"error":{"code":5003,"err":1}}', ServerError),
        9: (b'{"stream":"ORDERS","seq":20009 ', ProtocolError),
    }
    acks = [bench.publish() for _ in range(20)]
    bench.answer_all(bench.send(), [unusual[n][0] if n in unusual else plain(20_000 + n) for n in range(20)])
    for number, ack in enumerate(acks):
        expected = unusual[number][1] if number in unusual else PubAck(stream="ORDERS", sequence=20_000 + number)
        if isinstance(expected, PubAck):
            assert ack.outcome == expected
        else:
            assert isinstance(ack.outcome, expected)
    assert bench.window.outstanding == 0


def test_in_a_run_a_second_answer_is_ignored_and_a_cancelled_handle_is_left_alone() -> None:
    bench = Bench(max_outstanding=20)
    bench.expect_runs()
    first, cancelled, last = (bench.publish() for _ in range(3))
    cancelled.is_cancelled = True
    replies = bench.send()
    bench.answer_all([replies[0], replies[1], replies[0], replies[2]], [plain(20_000 + n) for n in range(4)])
    assert first.outcome == PubAck(stream="ORDERS", sequence=20_000)
    assert cancelled.outcome is None
    assert last.outcome == PubAck(stream="ORDERS", sequence=20_003)
    assert bench.window.outstanding == 0


def test_a_refusal_with_headers_between_acknowledgements_is_for_its_own_message() -> None:
    bench = Bench(max_outstanding=20)
    bench.expect_runs()
    before, refused, after = (bench.publish() for _ in range(3))
    to = [reply.encode() for reply in bench.send()]
    no_one = b"HMSG %b 1 %d %d\r\n%b\r\n" % (to[1], len(NO_RESPONDERS), len(NO_RESPONDERS), NO_RESPONDERS)
    ack = b"MSG %b 1 31\r\n%b\r\n"
    bench.machine.receive_data(ack % (to[0], plain(20_000)) + no_one + ack % (to[2], plain(20_001)))
    bench.settle()
    assert before.outcome == PubAck(stream="ORDERS", sequence=20_000)
    assert isinstance(refused.outcome, JetStreamUnavailable)
    assert after.outcome == PubAck(stream="ORDERS", sequence=20_001)


def test_a_refusal_with_headers_among_answers_that_are_no_run_is_for_its_own_message() -> None:
    bench = Bench()
    before, refused, after = (bench.publish() for _ in range(3))
    to = [reply.encode() for reply in bench.send()]
    no_one = b"HMSG %b 1 %d %d\r\n%b\r\n" % (to[1], len(NO_RESPONDERS), len(NO_RESPONDERS), NO_RESPONDERS)
    bench.machine.receive_data(
        b"MSG %b 1 31\r\n%b\r\n%bMSG %b 1 31\r\n%b\r\n" % (to[0], plain(10_000), no_one, to[2], plain(10_001))
    )
    bench.settle()
    assert before.outcome == PubAck(stream="ORDERS", sequence=10_000)
    assert isinstance(refused.outcome, JetStreamUnavailable)
    assert after.outcome == PubAck(stream="ORDERS", sequence=10_001)


def test_an_answer_on_a_subject_that_is_not_ours_resolves_nothing() -> None:
    """The server chooses the subscription; whose answer it is, the subject says in full."""
    bench = Bench(max_outstanding=20)
    bench.expect_runs()
    ack = bench.publish()
    reply = bench.send()[0]
    token = reply.rpartition(".")[2]
    bench.answer(f"_INBOX.other.{token}", plain(20_000))
    inbox = bench.window.inbox
    assert inbox is not None
    assert inbox.answer_runs is not None
    inbox.answer_runs.append(AnswerRun("_INBOX.other.", [token.encode()], [plain(20_000)]))
    bench.wake()
    assert ack.outcome is None
    bench.answer(reply, plain(20_001))
    assert ack.outcome == PubAck(stream="ORDERS", sequence=20_001)


def test_an_interrupt_within_a_run_leaves_the_rest_to_the_next_look() -> None:
    class Interrupted(Ack):
        def set_result(self, result: PubAck, /) -> None:
            if not self.is_cancelled:
                self.is_cancelled = True  # as one that was resolved: it is left alone
                raise KeyboardInterrupt

    bench = Bench(max_outstanding=20)
    bench.expect_runs()
    first, last = bench.publish(), Ack()
    assert bench.window.publish(Interrupted(), "orders", b"x", None, bench.now)
    assert bench.window.publish(last, "orders", b"x", None, bench.now)
    with pytest.raises(KeyboardInterrupt):
        bench.answer_all(bench.send(), [plain(20_000 + n) for n in range(3)])
    assert last.outcome is None
    bench.wake()
    assert [first.outcome, last.outcome] == [PubAck(stream="ORDERS", sequence=n) for n in (20_000, 20_002)]
    assert bench.window.outstanding == 0


def test_a_window_knows_which_handles_it_waits_for() -> None:
    bench = Bench()
    first, second = bench.publish(), bench.publish()
    replies = bench.send()
    assert bench.window.waits_for(first) is bench.window.waits_for(second) is True
    bench.answer(replies[0], b'{"stream":"S", "seq":1}')
    assert (bench.window.waits_for(first), bench.window.waits_for(second)) == (False, True)
    assert bench.window.waits_for(Ack()) is False


def test_every_publish_has_a_reply_subject_of_its_own_in_an_inbox() -> None:
    bench = Bench()
    for _ in range(3):
        bench.publish()
    replies = bench.send()
    assert len(set(replies)) == 3
    inbox = bench.window.inbox
    assert inbox is not None
    assert inbox.is_inbox  # its subjects are used once: nothing about them is worth remembering
    assert all(reply.startswith(inbox.subject.removesuffix("*")) for reply in replies)


def test_an_error_reply_fails_its_own_handle_only() -> None:
    bench = Bench()
    before, bad, after = (bench.publish() for _ in range(3))
    replies = bench.send()
    bench.answer(replies[0], plain(1))
    bench.answer(
        replies[1],
        b'{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 1"},"stream":"A","seq":0}',
    )
    bench.answer(replies[2], plain(2))
    assert isinstance(before.outcome, PubAck)
    assert isinstance(bad.outcome, WrongLastSequence)
    assert isinstance(after.outcome, PubAck)


def test_an_error_with_a_status_beside_it_is_the_error() -> None:
    bench = Bench()
    ack = bench.publish()
    payload = b'{"error":{"code":429,"err_code":10167,"description":"too many requests"}}'
    bench.answer(bench.send()[0], payload, b"NATS/1.0 429 Too Many Requests\r\n\r\n")
    assert isinstance(ack.outcome, ServerError)
    assert ack.outcome.code == 429


def test_no_responders_says_that_nothing_was_stored() -> None:
    bench = Bench()
    ack = bench.publish("orders")
    bench.answer(bench.send()[0], b"", NO_RESPONDERS)
    assert isinstance(ack.outcome, JetStreamUnavailable)
    assert ack.outcome.subject == "orders"


@pytest.mark.parametrize("payload", [b"", b"[]", b"nonsense", b"{}", b'{"stream":"A","seq":', b"\xff"])
def test_an_answer_that_is_none_is_a_protocol_error_of_that_publish(payload: bytes) -> None:
    bench = Bench()
    ack, other = bench.publish(), bench.publish()
    replies = bench.send()
    bench.answer(replies[0], payload)
    bench.answer(replies[1], plain(1))
    assert isinstance(ack.outcome, ProtocolError)
    assert isinstance(other.outcome, PubAck)


def test_a_number_that_python_does_not_read_is_a_protocol_error_also_after_a_plain_answer() -> None:
    bench = Bench()
    acks = [bench.publish() for _ in range(3)]
    replies = bench.send()
    bench.answer(replies[0], plain(1))  # the next ones are compared with this one
    bench.answer(replies[1], b'{"stream":"ORDERS","seq":%b}' % (b"9" * 5000))
    bench.answer(replies[2], plain(2))
    assert [type(ack.outcome) for ack in acks] == [PubAck, ProtocolError, PubAck]


def test_second_and_unknown_answers_are_ignored() -> None:
    bench = Bench()
    ack, other = bench.publish(), bench.publish()
    replies = bench.send()
    bench.answer(replies[0], plain(1))
    bench.answer(replies[0], plain(7))
    bench.answer(replies[0] + "9", plain(8))
    assert ack.outcome == PubAck(stream="ORDERS", sequence=1)
    assert other.outcome is None
    assert bench.window.outstanding == 1


def test_a_cancelled_handle_keeps_its_place_until_the_answer() -> None:
    bench = Bench(max_outstanding=1)
    ack = bench.publish()
    ack.is_cancelled = True
    assert bench.window.is_full
    bench.answer(bench.send()[0], plain(1))
    assert not bench.window.is_full


# ---- bounds ----------------------------------------------------------------------------------------------------


def test_a_full_window_accepts_nothing_until_an_answer_makes_room() -> None:
    bench = Bench(max_outstanding=2)
    bench.publish()
    bench.publish()
    assert bench.window.is_full
    assert bench.window.publish(Ack(), "orders", b"", None, bench.now) is False
    replies = bench.send()
    assert len(replies) == 2
    bench.answer(replies[1], plain(1))
    bench.publish()
    assert bench.window.is_full
    bench.window.check_may_wait()


def test_a_window_that_raises_says_how_large_it_is() -> None:
    bench = Bench(max_outstanding=1, when_full="raise")
    bench.publish()
    with pytest.raises(WindowFull) as caught:
        bench.window.check_may_wait()
    assert caught.value.max_outstanding == 1


@pytest.mark.parametrize(
    ("bounds", "text"),
    [
        ({"max_outstanding": 0}, "max_outstanding=0: expected 1 or more"),
        ({"ack_timeout": 0}, "ack_timeout=0: expected seconds above 0"),
        ({"ack_timeout": float("nan")}, "ack_timeout=nan: expected seconds above 0"),
        ({"when_full": "drop"}, "when_full='drop': expected 'wait' or 'raise'"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(bounds: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Bench(**bounds)


def test_what_the_connection_does_not_accept_is_not_outstanding() -> None:
    bench = Bench({"send_buffer_bytes": 70})
    with pytest.raises(InvalidSubject):
        bench.window.publish(Ack(), "a b", b"", None, bench.now)
    bench.send()  # the subscription
    bench.publish()
    with pytest.raises(BufferFull):
        bench.window.publish(Ack(), "orders", b"", None, bench.now)
    assert bench.window.outstanding == 1


# ---- time ------------------------------------------------------------------------------------------------------


def test_those_without_an_answer_are_given_up_in_order() -> None:
    bench = Bench(ack_timeout=30.0)
    assert bench.window.next_deadline() is None
    first = bench.publish()
    bench.now = 101.0
    second = bench.publish()
    replies = bench.send()
    assert bench.window.next_deadline() == 130.0
    bench.window.on_time(129.9)
    early = first.outcome
    bench.window.on_time(130.0)
    assert early is None
    assert isinstance(first.outcome, RequestTimeout)
    assert (first.outcome.timeout_s, second.outcome) == (30.0, None)
    assert "'orders'" in str(first.outcome)
    assert bench.window.next_deadline() == 131.0
    bench.answer(replies[1], plain(2))
    bench.answer(replies[0], plain(1))  # late: nobody is told
    assert isinstance(second.outcome, PubAck)
    assert bench.window.next_deadline() is None


def test_an_answer_that_is_here_counts_even_after_the_deadline() -> None:
    bench = Bench(ack_timeout=1.0)
    ack = bench.publish()
    reply = bench.send()[0].encode()
    bench.machine.receive_data(b"MSG %b 1 %d\r\n%b\r\n" % (reply, len(plain(1)), plain(1)))
    bench.window.on_time(200.0)
    assert isinstance(ack.outcome, PubAck)


def test_a_cancelled_handle_gives_its_place_back_in_time() -> None:
    bench = Bench(max_outstanding=1, ack_timeout=1.0)
    bench.publish().is_cancelled = True
    bench.window.on_time(101.0)
    assert bench.window.outstanding == 0


def test_the_clock_stands_still_without_a_session_and_begins_anew_with_the_next() -> None:
    bench = Bench(ack_timeout=30.0)
    bench.send()
    ack = bench.publish()
    bench.end()
    assert bench.window.next_deadline() is None
    bench.window.on_time(1000.0)
    assert ack.outcome is None
    bench.now = 2000.0
    bench.connect()
    assert bench.window.next_deadline() == 2030.0
    bench.window.on_time(2029.0)
    assert ack.outcome is None
    bench.window.on_time(2030.0)
    assert isinstance(ack.outcome, RequestTimeout)


# ---- sessions --------------------------------------------------------------------------------------------------


def test_a_lost_session_leaves_in_doubt_what_had_left_and_keeps_the_rest() -> None:
    bench = Bench()
    acked, doubtful = bench.publish(), bench.publish()
    replies = bench.send()
    bench.answer(replies[0], plain(1))
    buffered = bench.publish()
    bench.end("the cable was pulled")
    assert isinstance(acked.outcome, PubAck)
    assert isinstance(doubtful.outcome, ConnectionLost)
    assert doubtful.outcome.reason == "the cable was pulled"
    assert doubtful.outcome.unconfirmed_messages == 1
    assert buffered.outcome is None
    while_down = bench.publish()
    bench.connect()
    again = bench.send()
    assert len(again) == 2
    bench.answer(replies[1], plain(2))  # the late answer of the one in doubt
    for number, reply in enumerate(again, 3):
        bench.answer(reply, plain(number))
    assert [ack.outcome for ack in (buffered, while_down)] == [
        PubAck(stream="ORDERS", sequence=number) for number in (3, 4)
    ]


def test_publishes_of_others_on_the_connection_do_not_confuse_the_count() -> None:
    bench = Bench()
    bench.machine.publish("plain")
    left = bench.publish()
    bench.machine.publish("plain")
    bench.send()
    bench.machine.publish("plain")
    stayed = bench.publish()
    bench.machine.publish("plain")
    bench.end()
    assert isinstance(left.outcome, ConnectionLost)
    assert stayed.outcome is None


def test_what_a_session_brought_before_it_ended_counts() -> None:
    bench = Bench()
    ack = bench.publish()
    reply = bench.send()[0].encode()
    bench.machine.receive_data(b"MSG %b 1 %d\r\n%b\r\n" % (reply, len(plain(1)), plain(1)))
    bench.machine.end("gone")
    events = [event for event in bench.machine.events() if not isinstance(event, Ready)]  # another thread has those
    for event in events:
        assert not hasattr(event, "handle")
        _tell(bench, event)
    assert isinstance(ack.outcome, PubAck)


def _tell(bench: Bench, event: Any) -> None:
    told: ConnectionEvent = event
    bench.window.on_event(told, bench.now)


@pytest.mark.parametrize("error", [None, ConnectionLost("no server left")])
def test_closing_resolves_everything_and_nothing_more_is_accepted(error: Exception | None) -> None:
    bench = Bench()
    sent = bench.publish()
    bench.send()
    unsent = bench.publish()
    bench.machine.close(error)
    bench.settle()
    for ack in (sent, unsent):
        if error is None:
            assert isinstance(ack.outcome, ConnectionClosed)
        else:
            assert ack.outcome is error
    assert bench.window.outstanding == 0
    with pytest.raises(ConnectionClosed):
        bench.window.publish(Ack(), "orders", b"", None, bench.now)


def test_an_end_that_the_inbox_does_not_say_is_the_end_too() -> None:
    bench = Bench()
    ack = bench.publish()
    bench.window.on_event(Closed(None), bench.now)
    assert isinstance(ack.outcome, ConnectionClosed)
    assert bench.window.outstanding == 0


def test_a_publish_we_may_not_make_fails_at_once_and_alone() -> None:
    bench = Bench()
    denied, other = bench.publish("secret"), bench.publish("orders")
    replies = bench.send()
    bench.machine.receive_data(b"-ERR 'Permissions Violation for Publish to \"secret\"'\r\n")
    bench.settle()
    assert isinstance(denied.outcome, PermissionDenied)
    bench.answer(replies[1], plain(1))
    assert isinstance(other.outcome, PubAck)


def test_an_inbox_we_may_not_subscribe_to_is_asked_for_again_by_the_next_publish() -> None:
    bench = Bench()
    ack = bench.publish()
    inbox = bench.window.inbox
    assert inbox is not None
    bench.send()
    bench.machine.receive_data(b"-ERR 'Permissions Violation for Subscription to \"%b\"'\r\n" % inbox.subject.encode())
    bench.settle()
    assert isinstance(ack.outcome, PermissionDenied)
    bench.publish()
    assert bench.window.inbox not in (None, inbox)
    assert b"SUB _INBOX.me.many." in bench.machine.data_to_send()


def test_overlooked_failures_are_told_at_each_doubling(caplog: pytest.LogCaptureFixture) -> None:
    window = Bench().window
    for number in range(9):
        window.log_overlooked(logging.getLogger("jetspark.test"), ConnectionLost(f"number {number}"))
    told = [(record.args or ()) for record in caplog.records]
    assert [(count, str(error)[:8]) for count, error in told] == [
        (1, "number 0"),
        (2, "number 1"),
        (4, "number 3"),
        (8, "number 7"),
    ]


# ---- who is woken ----------------------------------------------------------------------------------------------


class Waiting:
    """Those who wait, counted."""

    def __init__(self, count: int = 0) -> None:
        self.count, self.told = count, 0

    def __len__(self) -> int:
        return self.count

    def notify_all(self) -> None:
        self.told, self.count = self.told + bool(self.count), 0


class Publisher(WindowBase):
    """A driver's publisher, as far as nothing is waited for."""

    def __init__(self, bench: Bench) -> None:
        self.alarms: list[float] = []
        self.is_detached = False
        self._window, self._connection, self._now = bench.window, bench.machine, lambda: bench.now
        self._room, self._all_done = self.room, self.all_done = Waiting(), Waiting()
        self._runner: Any = self

    def wake_at(self, moment: float) -> None:
        self.alarms.append(moment)

    def detach(self) -> None:
        self.is_detached = True

    def step(self) -> None:
        self._on_step()


def full_window(max_outstanding: int) -> tuple[Bench, Publisher, list[str]]:
    """With one who waits for room; and the reply subjects of all that is outstanding."""
    bench = Bench(max_outstanding=max_outstanding)
    publisher = Publisher(bench)
    for _ in range(max_outstanding):
        bench.publish()
    publisher.room.count = 1
    publisher.step()
    assert (publisher.room.told, publisher.alarms) == (0, [])
    return bench, publisher, bench.send()


def test_a_publisher_tells_what_is_outstanding_and_when_there_is_no_room() -> None:
    bench = Bench(max_outstanding=1)
    publisher = Publisher(bench)
    assert publisher._attempt(Ack(), "orders", b"", None)
    assert publisher.outstanding == 1
    assert not publisher._attempt(Ack(), "orders", b"", None)


def test_answers_that_are_read_one_by_one_are_not_kept() -> None:
    bench = Bench()
    bench.publish()
    [reply] = bench.send()
    bench.answer(reply, b"{}")
    inbox = bench.window._inbox
    assert inbox is not None
    assert not inbox.pending


def test_those_who_wait_for_room_go_on_when_an_eighth_of_the_window_is_free() -> None:
    bench, publisher, replies = full_window(80)
    for number in range(10):
        assert publisher.room.told == 0
        bench.answer(replies[number], plain(number))
        publisher.step()
    assert publisher.room.told == 1
    assert publisher.alarms == [bench.now + GATHER_S]  # once, not for each acknowledgement


def test_those_who_wait_for_room_go_on_a_moment_later_with_what_there_is() -> None:
    bench, publisher, replies = full_window(80)
    bench.answer(replies[0], plain(1))
    publisher.step()
    bench.now = publisher.alarms[0]
    publisher.step()
    assert publisher.room.told == 1
    # The next one waits for as long again.
    bench.publish()
    publisher.room.count = 1
    bench.answer(replies[1], plain(2))
    publisher.step()
    assert publisher.room.told == 1
    assert publisher.alarms == [bench.now, bench.now + GATHER_S]


@pytest.mark.parametrize("max_outstanding", [1, 2, 7, 15])
def test_in_a_small_window_every_free_place_counts(max_outstanding: int) -> None:
    bench, publisher, replies = full_window(max_outstanding)
    bench.answer(replies[0], plain(1))
    publisher.step()
    assert (publisher.room.told, publisher.alarms) == (1, [])


def test_without_anybody_who_waits_no_alarm_is_set() -> None:
    bench, publisher, replies = full_window(80)
    publisher.room.count = 0
    bench.answer(replies[0], plain(1))
    publisher.step()
    assert publisher.alarms == []


def test_those_who_wait_for_all_go_on_with_the_last_and_a_closed_connection_is_left() -> None:
    bench, publisher, replies = full_window(2)
    publisher.all_done.count = 1
    bench.answer(replies[0], plain(1))
    publisher.step()
    assert publisher.all_done.told == 0
    bench.answer(replies[1], plain(2))
    publisher.step()
    assert publisher.all_done.told == 1
    assert not publisher.is_detached
    bench.machine.close()
    publisher.step()
    assert publisher.is_detached


# ---- all of it -------------------------------------------------------------------------------------------------


@given(
    st.lists(st.sampled_from(["publish", "send", "ack", "error", "503", "twice", "lose", "connect", "time", "drop"]))
)
@settings(max_examples=300)
def test_whatever_happens_every_handle_is_resolved_once_and_the_window_keeps_its_bound(steps: list[str]) -> None:
    bench = Bench(max_outstanding=5, ack_timeout=3.0)
    acks: list[Ack] = []
    under_way: list[str] = []
    answered: list[str] = []
    for step in steps:
        bench.now += 1
        is_up = bench.machine.is_connected
        if step == "publish":
            if not bench.window.is_full:
                acks.append(bench.publish())
        elif step == "send" and is_up:
            under_way += bench.send()
        elif step in ("ack", "error", "503") and is_up and under_way:
            reply = under_way.pop(0)
            answered.append(reply)
            if step == "503":
                bench.answer(reply, b"", NO_RESPONDERS)
            else:
                bench.answer(reply, plain(1) if step == "ack" else b'{"error":{"code":500}}')
        elif step == "twice" and is_up and answered:
            bench.answer(answered[0], plain(9))
        elif step == "lose" and is_up:
            bench.end()
        elif step == "connect" and not is_up:
            bench.connect()
        elif step == "time":
            bench.window.on_time(bench.now)
        elif step == "drop" and acks and acks[-1].outcome is None:
            acks[-1].is_cancelled = True
        assert bench.window.outstanding <= 5
        assert sum(ack.outcome is None and not ack.is_cancelled for ack in acks) <= bench.window.outstanding
    bench.machine.close()
    bench.settle()
    assert bench.window.outstanding == 0
    assert all(ack.is_cancelled or ack.outcome is not None for ack in acks)


def test_equal_options_are_one_key_and_the_default_is_what_nobody_asked_for() -> None:
    windows = {DEFAULT_WINDOW: "default", WindowOptions(max_outstanding=3): "narrow"}
    assert windows[WindowOptions()] == "default"
    assert windows[WindowOptions(max_outstanding=3, when_full="wait")] == "narrow"
    assert WindowOptions(max_outstanding=3, when_full="raise") not in windows
