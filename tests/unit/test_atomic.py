"""The atomic batch as a state machine, against answers a server would give. No I/O."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import pytest
from support.interrupts import Interrupt, count_places

from jetspark.core.connection import Connection
from jetspark.core.message import CoreMessage
from jetspark.core.options import ConnectOptions
from jetspark.core.reconnect import Server
from jetspark.core.step_runner import Sleep
from jetspark.errors import (
    AtomicPublishDisabled,
    BatchIncomplete,
    BatchInDoubt,
    BatchTooLarge,
    BufferFull,
    ConfigError,
    ConnectionClosed,
    FeatureUnavailable,
    InvalidSubject,
    JetStreamUnavailable,
    PayloadTooLarge,
    PermissionDenied,
    ProtocolError,
    RequestTimeout,
    ServerError,
    TooManyBatches,
    UsageError,
    WrongLastSequence,
)
from jetspark.jetstream.advisories import BatchAbandoned, abandoned_subject
from jetspark.jetstream.operations import Api, Operation, Request
from jetspark.jetstream.publishing import Expect, publish_headers
from jetspark.publish import atomic_resolve
from jetspark.publish.atomic import RETRY, AtomicBatchBase, AtomicMachine

A = Server("a", 4222)
OK = b""

Answer = bytes | BaseException | dict[str, Any]


def error(code: int, err_code: int, description: str = "no", stream: str = "S") -> dict[str, Any]:
    return {"error": {"code": code, "err_code": err_code, "description": description}, "stream": stream, "seq": 0}


TOO_MANY = error(429, 10210, "atomic publish too many inflight")
INCOMPLETE = error(400, 10176, "atomic publish batch is incomplete")
DISCARDED = error(400, 10200, "atomic publish batch commit is invalid")
WRONG = error(400, 10071, "wrong last sequence: 7")


def acked(size: int, sequence: int = 10, batch: str = "id") -> dict[str, Any]:
    return {"stream": "S", "seq": sequence, "batch": batch, "count": size}


class Bench:
    """A batch on a connection, and what it asks the server."""

    def __init__(self, api_level: int = 5, max_payload: int = 1000, options: dict[str, Any] | None = None, **more: Any):
        self.connection = Connection(ConnectOptions(**(options or {})), [A], inbox="_INBOX.me", jitter=lambda: 0.0)
        self.info = json.dumps({"max_payload": max_payload, "api_lvl": api_level, "version": "2.99", "jetstream": True})
        self.connect()
        settings: dict[str, Any] = {"timeout_s": 5.0, "jitter": lambda: 0.5, "ack_first": False}
        self.batch = AtomicMachine(
            self.connection, Api(connection=self.connection), **({"batch_id": "id"} | settings | more)
        )
        self.asked: list[Request] = []
        self.paused_s: list[float] = []

    def connect(self) -> None:
        connection = self.connection
        connection.begin(A)
        connection.receive_data(f"INFO {self.info}\r\n".encode())
        connection.login(None)
        connection.data_to_send()
        connection.receive_data(b"PONG\r\n")
        connection.events()

    def run(self, operation: Operation[Any], *answers: Answer) -> Any:
        """The result. Each answer goes to one request; silent ones and pauses need none."""
        waiting = iter(answers)
        try:
            step = next(operation)
            while True:
                answer: Answer = OK
                if isinstance(step, Sleep):
                    self.paused_s.append(step.seconds)
                else:
                    self.asked.append(step)
                    answer = OK if step.is_silent else next(waiting)
                if isinstance(answer, BaseException):
                    step = operation.throw(answer)
                else:
                    data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                    step = operation.send(CoreMessage("inbox", data, None, None, None))
        except StopIteration as finished:
            assert next(waiting, None) is None, "an answer nobody asked for"
            return finished.value

    def sent(self) -> list[tuple[str, dict[str, str], bytes]]:
        """Subject, headers and data of everything that went to the connection directly."""
        data = self.connection.data_to_send()
        found = []
        while data:
            head = re.match(rb"HPUB (\S+) (\d+) (\d+)\r\n", data)
            assert head is not None, data
            block, rest = data[head.end() :][: int(head[2])], data[head.end() + int(head[2]) :]
            size = int(head[3]) - int(head[2])
            assert rest[size : size + 2] == b"\r\n"
            lines = block.decode().strip().split("\r\n")[1:]
            found.append((head[1].decode(), dict(line.split(": ", 1) for line in lines), rest[:size]))
            data = rest[size + 2 :]
        return found


def headers_of(request: Request) -> dict[str, str]:
    return dict(cast(Mapping[str, str], request.headers or {}))


def options(**given: Any) -> Any:
    return publish_headers(given.get("headers"), given.get("msg_id"), given.get("expect"), given.get("ttl"))


# ---- ids and settings ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_id", ["", "a" * 65, "a.b", "a b", "ü", "a\n", None, 7])
def test_an_id_the_server_would_not_like_is_refused_by_name(batch_id: Any) -> None:
    with pytest.raises(ConfigError, match=r"batch_id=.*expected 1 to 64"):
        Bench(batch_id=batch_id)
    assert Bench(batch_id="aZ0_-" + "x" * 59).batch.outcome == "open"


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ConfigError, match="ack_every=0"):
        Bench(ack_every=0)
    with pytest.raises(ConfigError, match="timeout=0"):
        Bench(timeout_s=0)
    with pytest.raises(ConfigError, match="ack_first=1"):
        Bench(ack_first=1)


# ---- adding ----------------------------------------------------------------------------------------------------------


def test_every_message_carries_the_id_and_its_number() -> None:
    bench = Bench()
    bench.batch.add("a.1", b"one")
    bench.batch.add("a.2", b"two", options(msg_id="m", ttl=3, headers={"X": "y"}))
    assert bench.sent() == [
        ("a.1", {"Nats-Batch-Id": "id", "Nats-Batch-Sequence": "1"}, b"one"),
        (
            "a.2",
            {"X": "y", "Nats-Msg-Id": "m", "Nats-TTL": "3s", "Nats-Batch-Id": "id", "Nats-Batch-Sequence": "2"},
            b"two",
        ),
    ]


def test_the_first_message_is_a_request_and_every_nth_if_wanted() -> None:
    bench = Bench(ack_first=True, ack_every=3)
    wanted = []
    for _ in range(7):
        wanted.append(bench.batch.wants_ack)
        if bench.batch.wants_ack:
            bench.run(bench.batch.ask("a", b""), OK)
        else:
            bench.batch.add("a", b"")
    assert wanted == [True, False, True, False, False, True, False]
    assert [headers_of(each)["Nats-Batch-Sequence"] for each in bench.asked] == ["1", "3", "6"]
    assert [fields["Nats-Batch-Sequence"] for _, fields, _ in bench.sent()] == ["2", "4", "5", "7"]
    assert not Bench(ack_first=False).batch.wants_ack


def test_many_are_packed_as_they_would_be_added() -> None:
    one, many = Bench(), Bench()
    messages = [(f"a.{number % 3}", b"x" * number) for number in range(1, 120)]
    for subject, data in messages:
        one.batch.add(subject, data)
    pack = many.batch.pack(iter(messages))
    many.batch.send(pack)
    assert pack.is_last
    assert many.sent() == one.sent()
    assert many.batch.sequence == one.batch.sequence == 119
    with pytest.raises(ConfigError, match=r"'a\.1': this batch has written"):
        many.batch.add("a.1", b"", options(expect=Expect(last_subject_sequence=0)))


def test_a_pack_ends_where_an_acknowledgement_is_wanted_or_a_write_is_full() -> None:
    bench = Bench(ack_every=4)
    messages = iter([("a", b"")] * 10)
    bench.batch.send(bench.batch.pack(messages))
    assert (bench.batch.sequence, bench.batch.wants_ack) == (3, True)
    bench = Bench(max_payload=1 << 20)
    messages = iter([("a", b"x" * 10_000)] * 10)
    pack = bench.batch.pack(messages)
    assert (len(pack.frames), pack.is_last) == (7, False)


def test_a_commit_after_a_pack_goes_to_the_last_subject_in_it() -> None:
    bench = Bench()
    bench.batch.send(bench.batch.pack(iter([("a", b""), ("b", b""), ("a", b"")])))
    bench.batch.send(bench.batch.pack(iter([])))
    bench.run(bench.batch.commit(), acked(3))
    assert bench.asked[-1].subject == "a"


def test_a_pack_of_empty_messages_has_an_end_too() -> None:
    bench = Bench()
    pack = bench.batch.pack(itertools.repeat(("a", b"")))
    assert 100 < len(pack.frames) < 2000


def test_a_message_added_while_others_are_packed_is_noticed() -> None:
    bench = Bench()
    pack = bench.batch.pack(iter([("a", b"")]))
    bench.batch.add("a", b"")
    with pytest.raises(UsageError, match="while others were packed"):
        bench.batch.send(pack)


def test_what_is_wrong_in_the_middle_of_many_leaves_those_before_it() -> None:
    bench = Bench()
    pack = bench.batch.pack(iter([("a", b"1"), ("a", b"2"), ("a", b"x" * 2000), ("a", b"3")]))
    bench.batch.send(pack)
    assert isinstance(pack.error, PayloadTooLarge)
    assert bench.batch.sequence == 2

    def failing() -> Iterator[tuple[str, bytes]]:
        yield "b", b"3"
        raise ZeroDivisionError

    pack = bench.batch.pack(failing())
    bench.batch.send(pack)
    assert isinstance(pack.error, ZeroDivisionError)
    assert bench.batch.sequence == 3


@pytest.mark.parametrize("data", ["text", None, 5])
def test_what_is_no_data_is_refused_in_the_middle_of_many(data: Any) -> None:
    bench = Bench()
    pack = bench.batch.pack(iter([("a", b"1"), ("a", data)]))
    assert isinstance(pack.error, ConfigError)
    assert len(pack.frames) == 1


def test_a_pack_is_not_sent_while_the_batch_waits_or_when_it_is_over() -> None:
    bench = Bench()
    pack = bench.batch.pack(iter([("a", b"1")]))
    waiting = bench.batch.ask("a", b"")
    next(waiting)
    with pytest.raises(UsageError, match="waits for an answer"):
        bench.batch.send(pack)
    waiting.close()
    bench = Bench()
    pack = bench.batch.pack(iter([("a", b"1")]))
    bench.run(bench.batch.discard())
    with pytest.raises(UsageError, match="it was discarded"):
        bench.batch.send(pack)
    assert bench.sent() == []


class Batch(AtomicBatchBase):
    def __init__(self, machine: AtomicMachine) -> None:
        self._machine = machine


def test_a_batch_shows_its_acknowledgement_once_it_is_stored() -> None:
    bench = Bench()
    bench.batch.add("a", b"")
    with pytest.raises(UsageError, match="no acknowledgement: its outcome is 'open'"):
        _ = Batch(bench.batch).ack
    bench.run(bench.batch.commit(), acked(1, sequence=7))
    assert (Batch(bench.batch).ack.sequence, Batch(bench.batch).outcome) == (7, "stored")


def test_a_batch_shows_what_was_added() -> None:
    bench = Bench()
    bench.batch.add("a", b"")
    bench.batch.add("a", b"")
    shown = Batch(bench.batch)
    assert (shown.id, shown.sequence, shown.outcome) == ("id", 2, "open")


def test_headers_and_data_share_what_a_message_may_have() -> None:
    bench = Bench()
    with pytest.raises(PayloadTooLarge):
        bench.batch.add("a", b"x" * 980, {"Own": "1"})
    assert (bench.batch.sequence, bench.sent()) == (0, [])


def test_what_is_refused_before_it_is_sent_leaves_the_batch_as_it_was() -> None:
    bench = Bench(ack_first=True)
    with pytest.raises(PayloadTooLarge):
        bench.run(bench.batch.ask("a", b"x" * 2000), PayloadTooLarge(2000, 1000))
    assert (bench.batch.sequence, bench.batch.outcome, bench.batch.wants_ack) == (0, "open", True)
    bench.run(bench.batch.ask("a", b""), OK)
    with pytest.raises(PayloadTooLarge):
        bench.batch.add("a", b"x" * 2000)
    with pytest.raises(InvalidSubject):
        bench.batch.add("a..b", b"")
    with pytest.raises(ConfigError, match="data of type str"):
        bench.batch.add("a", "text")  # type: ignore[arg-type]
    bench.batch.add("a", b"")
    assert bench.sent()[0][1]["Nats-Batch-Sequence"] == "2"
    with pytest.raises(BufferFull):
        bench.run(bench.batch.commit(), BufferFull(1, 1))
    assert bench.batch.outcome == "open"


def test_a_full_buffer_takes_nothing_and_uses_no_number() -> None:
    bench = Bench(options={"send_buffer_bytes": 200})
    bench.batch.add("a", b"x" * 100)
    with pytest.raises(BufferFull):
        bench.batch.add("a", b"x" * 100)
    pack = bench.batch.pack(iter([("a", b"x" * 100)]))
    with pytest.raises(BufferFull):
        bench.batch.send(pack)
    assert bench.batch.sequence == 1
    bench.sent()
    bench.batch.send(pack)
    assert bench.sent()[0][1]["Nats-Batch-Sequence"] == "2"


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"headers": {"Nats-Batch-Id": "x"}}, "header Nats-Batch-Id: the batch sets it"),
        ({"headers": {"nats-batch-commit": "1"}}, "header nats-batch-commit: the batch sets it"),
        ({"expect": Expect(last_sequence=3)}, "last_sequence=3 on message 2 .* first only"),
        ({"expect": Expect(last_subject_sequence=3)}, "'a.b': this batch has written 'a.b'"),
        (
            {"expect": Expect(last_subject_sequence=3, last_subject_sequence_subject="a.>")},
            "'a.>': this batch has written 'a.b'",
        ),
        (
            {"expect": Expect(last_subject_sequence=3, last_subject_sequence_subject="a.*")},
            r"'a.\*': this batch has written 'a.b'",
        ),
        ({"headers": {"Nats-Expected-Last-Subject-Sequence": "1"}}, "'a.b': this batch has written"),
        ({"msg_id": "m1"}, "msg_id='m1': another message of this batch has it"),
        ({"headers": {"Nats-Msg-Id": "m1"}}, "msg_id='m1'"),
    ],
)
def test_what_the_server_would_refuse_at_the_commit_is_refused_at_once(given: dict[str, Any], complaint: str) -> None:
    bench = Bench()
    bench.batch.add("a.b", b"", options(msg_id="m1", expect=Expect(last_sequence=9)))
    with pytest.raises(ConfigError, match=complaint):
        bench.batch.add("a.b", b"", options(**given))
    with pytest.raises(ConfigError, match=complaint):
        bench.run(bench.batch.commit("a.b", b"", options(**given)))
    assert (bench.batch.sequence, bench.batch.outcome) == (1, "open")


def test_headers_may_be_pairs() -> None:
    bench = Bench()
    bench.batch.add("a", b"", [("Nats-Msg-Id", "m1")])
    with pytest.raises(ConfigError, match="msg_id='m1': another message"):
        bench.batch.add("a", b"", [("Nats-Msg-Id", "m1")])


def test_the_dangerous_header_is_refused_as_everywhere() -> None:
    with pytest.raises(ConfigError, match="Nats-Expected-Last-Msg-Id"):
        options(headers={"Nats-Expected-Last-Msg-Id": "x"})


def test_expectations_about_what_is_not_written_yet_are_fine() -> None:
    bench = Bench()
    guard = Expect(last_subject_sequence=0, last_subject_sequence_subject="g.*")
    bench.batch.add("a.b", b"", options(expect=Expect(last_subject_sequence=4)))
    bench.batch.add("a.b", b"", options(expect=guard))
    bench.batch.add("a.c", b"", options(expect=guard))
    assert bench.batch.sequence == 3


def test_a_server_without_batches_is_not_sent_any() -> None:
    bench = Bench(api_level=1)
    with pytest.raises(FeatureUnavailable, match=r"atomic_batch needs nats-server 2\.12"):
        bench.batch.add("a", b"")
    with pytest.raises(FeatureUnavailable):
        bench.run(bench.batch.commit("a", b""))
    with pytest.raises(FeatureUnavailable):
        bench.batch.pack(iter([]))
    assert (bench.sent(), bench.asked) == ([], [])


def behind_a_domain(level: int, **more: Any) -> tuple[Bench, dict[str, Any]]:
    """A batch on a server whose level has to be asked for, and its answer."""
    bench = Bench(**more)
    api = Api("$JS.hub.API", bench.connection)
    bench.batch = AtomicMachine(bench.connection, api, "id", ack_first=True, timeout_s=5.0, jitter=lambda: 0.5)
    return bench, {"api": {"level": level}}


def test_a_server_behind_another_is_asked_for_its_level_once_before_the_first_message() -> None:
    bench, level = behind_a_domain(4)
    bench.run(bench.batch.ask("a", b"1"), level, OK)
    bench.run(bench.batch.ask("a", b"2"), OK)
    bench.run(bench.batch.commit(), acked(2))
    assert [each.subject for each in bench.asked] == ["$JS.hub.API.INFO", "a", "a", "a"]


def test_a_server_behind_another_that_knows_no_batches_is_not_sent_any() -> None:
    bench, level = behind_a_domain(1)
    with pytest.raises(FeatureUnavailable, match="atomic_batch"):
        bench.run(bench.batch.ask("a", b"1"), level)
    assert [each.subject for each in bench.asked] == ["$JS.hub.API.INFO"]


def test_a_server_behind_another_that_is_older_gets_each_message_when_the_next_one_is_added() -> None:
    bench, level = behind_a_domain(3)
    bench.run(bench.batch.ask("a", b"1"), level)
    assert (bench.batch.added, bench.batch.wants_ack) == (1, True)
    bench.run(bench.batch.commit(), acked(1))
    assert [each.subject for each in bench.asked] == ["$JS.hub.API.INFO", "a"]
    assert headers_of(bench.asked[-1])["Nats-Batch-Commit"] == "1"


# ---- answers to a message --------------------------------------------------------------------------------------------


def test_a_refused_message_ends_the_batch() -> None:
    bench = Bench()
    with pytest.raises(AtomicPublishDisabled, match="allow_atomic=True"):
        bench.run(bench.batch.ask("a", b""), error(400, 10174, "atomic publish is disabled"))
    assert bench.batch.outcome == "not stored"
    assert len(bench.asked) == 1  # the server has dropped it already
    with pytest.raises(UsageError, match=r"nothing of it is stored: .*atomic publish is disabled"):
        bench.batch.add("a", b"")
    with pytest.raises(UsageError, match="nothing of it is stored"):
        bench.run(bench.batch.commit())


def test_a_batch_that_is_too_large_tells_the_servers_limit() -> None:
    bench = Bench()
    with pytest.raises(BatchTooLarge) as refused:
        bench.run(bench.batch.ask("a", b""), error(400, 10199, "atomic publish batch is too large: 17"))
    assert refused.value.limit == 17
    assert BatchTooLarge(400, 10199, "too large").limit is None


def test_a_message_too_large_for_the_stream_leaves_a_hole_so_the_batch_is_discarded() -> None:
    bench = Bench()
    bench.batch.add("a.1", b"")
    with pytest.raises(ServerError, match="message size"):
        bench.run(bench.batch.ask("a.2", b""), error(400, 10054, "message size exceeds maximum allowed"))
    assert bench.batch.outcome == "not stored"
    [_, discard] = bench.asked
    assert discard.is_silent
    assert headers_of(discard)["Nats-Batch-Commit"] == "discard"


@pytest.mark.parametrize("problem", [RequestTimeout("x", 1), ConnectionClosed("closed")])
def test_an_acknowledgement_that_does_not_come_means_that_nothing_is_stored(problem: Exception) -> None:
    bench = Bench()
    with pytest.raises(type(problem)):
        bench.run(bench.batch.ask("a", b""), problem)
    assert bench.batch.outcome == "not stored"
    assert [each.is_silent for each in bench.asked] == [False, True]


def test_a_first_message_nobody_receives_leaves_nothing_to_discard() -> None:
    for problem in (JetStreamUnavailable("a"), PermissionDenied("publish", "a")):
        bench = Bench()
        with pytest.raises(type(problem)):
            bench.run(bench.batch.ask("a", b""), problem)
        assert (bench.batch.outcome, len(bench.asked)) == ("not stored", 1)


def test_a_cancelled_wait_stores_nothing_and_leaving_frees_the_place() -> None:
    bench = Bench()
    with pytest.raises(KeyboardInterrupt):
        bench.run(bench.batch.ask("a", b""), KeyboardInterrupt())
    assert (bench.batch.outcome, len(bench.asked)) == ("not stored", 1)
    bench.run(bench.batch.leave(failed=True))
    assert headers_of(bench.asked[-1])["Nats-Batch-Commit"] == "discard"


def test_a_stream_that_stores_at_once_is_not_taken_for_a_batch() -> None:
    bench = Bench()
    with pytest.raises(BatchInDoubt, match="stored a message at once"):
        bench.run(bench.batch.ask("a", b""), {"stream": "S", "seq": 4})
    assert bench.batch.outcome == "unknown"


def waits_for_the_level() -> tuple[Bench, Operation[Any]]:
    bench, _ = behind_a_domain(5)
    return bench, bench.batch.ask("a", b"")


def waits_for_an_acknowledgement() -> tuple[Bench, Operation[Any]]:
    bench = Bench()
    return bench, bench.batch.ask("a", b"")


def waits_to_send_what_was_held_back() -> tuple[Bench, Operation[Any]]:
    bench = Bench(api_level=3)
    bench.run(bench.batch.ask("a", b""))
    return bench, bench.batch.ask("a", b"")


def waits_for_the_commit() -> tuple[Bench, Operation[Any]]:
    bench = Bench()
    return bench, bench.batch.commit("a", b"")


@pytest.mark.parametrize(
    "begin",
    [waits_for_the_level, waits_for_an_acknowledgement, waits_to_send_what_was_held_back, waits_for_the_commit],
)
def test_waiting_calls_do_not_overlap(begin: Callable[[], tuple[Bench, Operation[Any]]]) -> None:
    bench, waiting = begin()
    next(waiting)
    for call in (
        lambda: bench.batch.add("a", b""),
        lambda: bench.run(bench.batch.ask("a", b"")),
        lambda: bench.run(bench.batch.commit()),
        lambda: bench.run(bench.batch.discard()),
        lambda: bench.run(bench.batch.resolve(1.0)),
        lambda: bench.batch.pack(iter([])),
    ):
        with pytest.raises(UsageError, match="waits for an answer"):
            call()


# ---- too many batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "last"),
    [(lambda batch: batch.ask("a", b""), OK), (lambda batch: batch.commit("a", b""), acked(1))],
    ids=["first message", "single commit"],
)
def test_a_new_batch_waits_for_a_place_a_little_longer_each_time(
    start: Callable[[AtomicMachine], Operation[Any]], last: Answer
) -> None:
    bench = Bench()
    bench.run(start(bench.batch), TOO_MANY, TOO_MANY, TOO_MANY, last)
    assert bench.paused_s == [0.01, 0.02, 0.04]
    assert {headers_of(each)["Nats-Batch-Sequence"] for each in bench.asked} == {"1"}
    assert bench.batch.sequence == 1


def test_waiting_for_a_place_ends_with_the_timeout() -> None:
    bench = Bench(timeout_s=2.0)
    with pytest.raises(TooManyBatches):
        bench.run(bench.batch.ask("a", b""), *[TOO_MANY] * 9)
    assert 1.0 < sum(bench.paused_s) <= 2.0
    assert max(bench.paused_s) <= RETRY.max_s
    assert (bench.batch.outcome, len(bench.asked)) == ("not stored", 9)


def test_a_later_message_is_never_sent_again() -> None:
    bench = Bench()
    bench.batch.add("a", b"")
    with pytest.raises(TooManyBatches):
        bench.run(bench.batch.commit("a", b""), TOO_MANY)
    assert bench.paused_s == []


# ---- the commit ------------------------------------------------------------------------------------------------------


def test_a_commit_with_a_last_message() -> None:
    bench = Bench()
    bench.batch.add("a", b"1")
    ack = bench.run(bench.batch.commit("b", b"2", options(msg_id="m")), acked(2))
    [request] = bench.asked
    assert (request.subject, request.data, request.may_be_leaderless) == ("b", b"2", False)
    assert headers_of(request) == {
        "Nats-Msg-Id": "m",
        "Nats-Batch-Id": "id",
        "Nats-Batch-Sequence": "2",
        "Nats-Batch-Commit": "1",
    }
    assert ack is bench.batch.ack
    assert ack is not None
    assert (ack.sequence, ack.batch, ack.batch_size, bench.batch.outcome) == (10, "id", 2, "stored")
    with pytest.raises(UsageError, match="its 2 messages are stored"):
        bench.batch.add("a", b"")
    with pytest.raises(UsageError, match="its 2 messages are stored"):
        bench.run(bench.batch.discard())
    assert bench.run(bench.batch.resolve(1.0)) == "stored"


def test_a_commit_without_a_message_of_its_own() -> None:
    bench = Bench()
    bench.batch.add("a", b"1")
    bench.batch.add("b", b"2")
    bench.run(bench.batch.commit(), acked(2))
    [request] = bench.asked
    assert (request.subject, request.data) == ("b", b"")
    fields = headers_of(request)
    assert (fields["Nats-Batch-Sequence"], fields["Nats-Batch-Commit"]) == ("3", "eob")
    assert bench.batch.sequence == 2


def test_a_commit_without_a_message_needs_a_newer_server_and_leaves_the_batch_open() -> None:
    bench = Bench(api_level=2)
    bench.batch.add("a", b"1")
    with pytest.raises(FeatureUnavailable, match=r"2\.14"):
        bench.run(bench.batch.commit())
    assert bench.batch.outcome == "open"
    bench.run(bench.batch.commit("a", b"2"), acked(2))
    bench = Bench(api_level=2)
    bench.batch.add("a", b"1")
    with pytest.raises(FeatureUnavailable):
        bench.run(bench.batch.leave(failed=False))
    assert bench.batch.outcome == "not stored"
    assert headers_of(bench.asked[0])["Nats-Batch-Commit"] == "discard"


@pytest.mark.parametrize("ack_first", [True, False])
def test_an_older_server_gets_each_message_when_the_next_one_is_added(ack_first: bool) -> None:
    bench = Bench(api_level=3, ack_first=ack_first)
    batch = bench.batch
    assert batch.wants_ack
    bench.run(batch.ask("a", b"1"))
    assert (bench.asked, batch.added, batch.sequence) == ([], 1, 0)
    bench.run(batch.ask("b", b"2"), *([OK] if ack_first else []))
    bench.run(batch.ask("c", b"3"))
    assert [request.subject for request in bench.asked] == ["a", "b"]
    assert [request.is_silent for request in bench.asked] == [not ack_first, True]
    assert not batch.pack(iter([("d", b"")])).frames, "add_many goes through ask"
    bench.run(batch.commit(), acked(3))
    assert [headers_of(request)["Nats-Batch-Sequence"] for request in bench.asked] == ["1", "2", "3"]
    assert [headers_of(request).get("Nats-Batch-Commit") for request in bench.asked] == [None, None, "1"]
    assert (batch.outcome, batch.added, batch.sequence) == ("stored", 3, 3)


def test_what_an_older_server_must_not_get_is_not_held_back_for_it() -> None:
    bench = Bench(api_level=3, max_payload=200)
    bench.run(bench.batch.ask("a", b"1", {"Nats-Msg-Id": "one"}))
    for bad in (
        bench.batch.ask("b.>", b""),
        bench.batch.ask("b", b"x" * 150),  # too large with the header of a commit
        bench.batch.ask("b", b"", {"Nats-Msg-Id": "one"}),
        bench.batch.ask("a", b"", {"Nats-Expected-Last-Subject-Sequence": "0"}),
        bench.batch.ask("b", b"", {"Nats-Expected-Last-Sequence": "0"}),
        bench.batch.commit("b.>", b""),
        bench.batch.commit("b", b"x" * 150),
    ):
        with pytest.raises(ConfigError):
            bench.run(bad)
    assert (bench.asked, bench.batch.added) == ([], 1)
    bench.run(bench.batch.commit("b", b"last"), acked(2))
    assert [request.data for request in bench.asked] == [b"1", b"last"]


def test_what_is_held_back_is_never_sent_when_the_batch_is_given_up() -> None:
    for is_left in (True, False):
        bench = Bench(api_level=3)
        bench.run(bench.batch.ask("a", b"1"))
        bench.run(bench.batch.leave(failed=True) if is_left else bench.batch.discard())
        assert (bench.asked, bench.batch.outcome) == ([], "not stored")
        assert Batch(bench.batch).sequence == 1, "added, though not stored"
    bench = Bench(api_level=3, ack_first=True)
    bench.run(bench.batch.ask("a", b"1"))
    with pytest.raises(BatchInDoubt):
        bench.run(bench.batch.commit(), RequestTimeout("commit", 1))
    assert (bench.batch.outcome, bench.batch.sequence) == ("unknown", 1)


def test_a_commit_that_was_not_accepted_leaves_no_mark_on_the_message_that_is_held_back() -> None:
    bench = Bench(api_level=3)
    bench.run(bench.batch.ask("a", b"1"))
    with pytest.raises(BufferFull):
        bench.run(bench.batch.commit(), BufferFull(1, 1))
    bench.asked.clear()
    bench.run(bench.batch.ask("b", b"2"))
    bench.run(bench.batch.commit(), acked(2))
    assert [headers_of(request).get("Nats-Batch-Commit") for request in bench.asked] == [None, "1"]


def test_an_older_server_is_asked_on_the_last_subject_what_became_of_a_commit() -> None:
    bench = Bench(api_level=3)
    for subject in ("a.1", "a.2", "a.1"):
        bench.run(bench.batch.ask(subject, b""))
    with pytest.raises(BatchInDoubt):
        bench.run(bench.batch.commit(), RequestTimeout("x", 1))
    bench.asked.clear()
    assert bench.run(bench.batch.resolve(5.0), INCOMPLETE) == "not stored"
    assert bench.asked[0].subject == "a.1"


def test_there_is_no_committing_nothing() -> None:
    bench = Bench()
    with pytest.raises(UsageError, match="no messages"):
        bench.run(bench.batch.commit())
    with pytest.raises(ConfigError, match="expected the subject"):
        bench.run(bench.batch.commit(None, b"data"))


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (INCOMPLETE, BatchIncomplete),
        (WRONG, WrongLastSequence),
        (error(400, 10060), ServerError),
        (JetStreamUnavailable("a"), JetStreamUnavailable),
        (PermissionDenied("publish", "a"), PermissionDenied),
    ],
)
def test_a_refused_commit_stores_nothing(answer: Answer, kind: type[Exception]) -> None:
    bench = Bench()
    bench.batch.add("a", b"1")
    with pytest.raises(kind):
        bench.run(bench.batch.commit(), answer)
    assert (bench.batch.outcome, bench.batch.ack) == ("not stored", None)


@pytest.mark.parametrize(
    "answer",
    [
        RequestTimeout("x", 1),
        ConnectionClosed("closed"),
        PermissionDenied("subscribe", "_INBOX"),
        b"",
        b"not json",
        acked(3),
        acked(1, batch="other"),
        {"stream": "S", "seq": 4},
    ],
)
def test_a_commit_without_an_answer_that_fits_is_in_doubt(answer: Answer) -> None:
    bench = Bench()
    bench.batch.add("a", b"1")
    with pytest.raises(BatchInDoubt) as doubt:
        bench.run(bench.batch.commit(), answer)
    assert doubt.value.batch_id == "id"
    assert bench.batch.outcome == "unknown"
    with pytest.raises(UsageError, match="resolve"):
        bench.batch.add("a", b"")


def test_a_connection_closed_before_the_commit_leaves_no_doubt() -> None:
    bench = Bench()
    bench.batch.add("a", b"1")
    bench.connection.close()
    with pytest.raises(ConnectionClosed):
        bench.run(bench.batch.commit())
    assert (bench.batch.outcome, bench.asked) == ("not stored", [])


def test_a_cancelled_commit_is_in_doubt() -> None:
    bench = Bench()
    bench.batch.add("a", b"1")
    with pytest.raises(KeyboardInterrupt):
        bench.run(bench.batch.commit(), KeyboardInterrupt())
    assert bench.batch.outcome == "unknown"
    asked = len(bench.asked)
    bench.run(bench.batch.leave(failed=True))
    assert len(bench.asked) == asked  # a discard could overtake nothing and decide nothing


# ---- leaving and discarding ------------------------------------------------------------------------------------------


def test_leaving_commits_what_is_open() -> None:
    bench = Bench()
    bench.batch.add("a", b"1")
    bench.run(bench.batch.leave(failed=False), acked(1))
    assert bench.batch.outcome == "stored"
    bench.run(bench.batch.leave(failed=False))
    empty = Bench()
    empty.run(empty.batch.leave(failed=False))
    assert (empty.batch.outcome, empty.batch.ack, empty.asked) == ("not stored", None, [])
    with pytest.raises(UsageError, match="it had no messages"):
        empty.batch.add("a", b"")


def test_leaving_by_an_exception_discards() -> None:
    bench = Bench()
    bench.batch.add("a", b"1")
    bench.run(bench.batch.leave(failed=True))
    assert bench.batch.outcome == "not stored"
    assert headers_of(bench.asked[0])["Nats-Batch-Commit"] == "discard"
    with pytest.raises(UsageError, match="its block was left by an exception"):
        bench.batch.add("a", b"")
    empty = Bench()
    empty.run(empty.batch.leave(failed=True))
    assert empty.asked == []


def test_a_discard_can_never_be_stored_and_is_sent_once() -> None:
    bench = Bench()
    bench.batch.add("a.1", b"")
    bench.batch.add("a.2", b"")
    bench.run(bench.batch.discard())
    bench.run(bench.batch.discard())
    [discard] = bench.asked
    assert (discard.subject, discard.data, discard.is_silent) == ("a.1", b"", True)
    assert headers_of(discard) == {
        "Nats-Batch-Id": "id",
        "Nats-Batch-Sequence": "2",
        "Nats-Batch-Commit": "discard",
        "Nats-Expected-Last-Sequence": "9223372036854775807",
    }
    with pytest.raises(UsageError, match="it was discarded"):
        bench.batch.add("a", b"")


@pytest.mark.parametrize(("denied", "asked"), [(["a.1"], ["a.2"]), (["a.1", "a.2"], [])])
def test_a_discard_is_not_sent_to_a_denied_subject(denied: list[str], asked: list[str]) -> None:
    bench = Bench()
    bench.batch.add("a.1", b"")
    bench.batch.add("a.2", b"")
    for subject in denied:
        bench.connection.receive_data(b"-ERR 'Permissions Violation for Publish to \"%b\"'\r\n" % subject.encode())
    with pytest.raises(PermissionDenied):
        bench.batch.add("a.2", b"")
    bench.run(bench.batch.leave(failed=True))
    assert [each.subject for each in bench.asked] == asked


def test_a_discard_that_cannot_be_sent_hides_no_other_error() -> None:
    bench = Bench()
    bench.batch.add("a", b"")
    operation = bench.batch.leave(failed=True)
    next(operation)
    with pytest.raises(StopIteration):
        operation.throw(ConnectionClosed("closed"))


def test_a_batch_that_could_not_be_handed_over_is_not_stored_and_takes_no_more() -> None:
    bench = Bench()
    bench.batch.add("a", b"")
    given_up = bench.batch.give_up(3.0)
    assert (given_up.timeout_s, given_up.was_sent) == (3.0, False)
    assert bench.batch.outcome == "not stored"
    with pytest.raises(UsageError):
        bench.batch.add("a", b"")


def test_giving_up_too_late_changes_no_outcome() -> None:
    bench = Bench()
    waiting = bench.batch.ask("a", b"")
    next(waiting)
    bench.batch.give_up(3.0)
    assert bench.batch.outcome == "open"
    waiting.close()
    for answer, outcome in ((acked(1), "stored"), (RequestTimeout("x", 1), "unknown")):
        bench = Bench()
        with contextlib.suppress(BatchInDoubt):
            bench.run(bench.batch.commit("a", b""), answer)
        bench.batch.give_up(3.0)
        assert bench.batch.outcome == outcome


def test_a_message_that_was_counted_can_be_discarded_wherever_adding_it_was_interrupted() -> None:
    def add(bench: Bench) -> None:
        bench.batch.add("a.1", b"")

    for number in range(count_places(lambda: add(Bench()), at="any")):
        bench = Bench()
        with contextlib.suppress(KeyboardInterrupt), Interrupt(number, at="any"):
            add(bench)
        counted = bench.batch.sequence
        bench.run(bench.batch.leave(failed=True))
        assert {request.subject for request in bench.asked} <= {"a.1"}
        assert len(bench.asked) >= counted


@pytest.mark.parametrize("answer", [acked(2, batch="another"), acked(1)], ids=["batch", "size"])
def test_an_acknowledgement_of_another_batch_leaves_the_batch_in_doubt(answer: dict[str, Any]) -> None:
    bench = Bench()
    bench.batch.add("a", b"")
    bench.batch.add("a", b"")
    with pytest.raises(BatchInDoubt, match="2 messages were acknowledged as"):
        bench.run(bench.batch.commit(), answer)
    assert bench.batch.outcome == "unknown"
    with pytest.raises(UsageError, match="another batch"):
        bench.batch.add("a", b"")


# ---- resolving -------------------------------------------------------------------------------------------------------

NOW = "2026-01-01T12:00:00Z"
NOT_FOUND = {"error": {"code": 404, "err_code": 10037, "description": "no message found"}}


def info(
    last: int = 7, first: int = 1, replicas: int = 1, active_ns: int = 0, leader: str = "n1", **config: Any
) -> dict[str, Any]:
    others = [{"name": f"n{each}", "current": True, "active": active_ns} for each in range(2, replicas + 1)]
    return {
        "config": {"name": "S", "subjects": ["a.>"], "num_replicas": replicas, "retention": "limits"} | config,
        "state": {"messages": last, "first_seq": first, "last_seq": last},
        "cluster": {"leader": leader, "replicas": others},
        "ts": NOW,
    }


def stored(sequence: int, batch: str = "", number: int = 1, more: str = "") -> dict[str, Any]:
    message = {"subject": "a.1", "seq": sequence, "data": "", "time": NOW}
    if batch:
        block = f"NATS/1.0\r\nNats-Batch-Id: {batch}\r\nNats-Batch-Sequence: {number}\r\n{more}\r\n"
        message["hdrs"] = base64.b64encode(block.encode()).decode()
    return {"message": message}


def in_doubt(size: int = 3, *, first_arrived: bool = True, **more: Any) -> Bench:
    """A batch on a.1, a.2, ... whose commit was not answered."""
    bench = Bench(**more)
    for number in range(1, size + 1):
        if number == 1 and first_arrived:
            bench.run(bench.batch.ask("a.1", b""), OK)
        else:
            bench.batch.add(f"a.{number}", b"")
    with pytest.raises(BatchInDoubt):
        bench.run(bench.batch.commit(), RequestTimeout("x", 1))
    bench.asked.clear()
    return bench


def bodies(bench: Bench) -> list[dict[str, Any]]:
    return [json.loads(each.data) for each in bench.asked if "MSG.GET" in each.subject]


def test_a_batch_that_still_waited_for_its_commit_is_not_stored() -> None:
    bench = in_doubt()
    assert bench.run(bench.batch.resolve(5.0), INCOMPLETE) == "not stored"
    [fence] = bench.asked
    assert (fence.subject, fence.is_silent, fence.may_be_leaderless) == ("a.3", False, True)
    assert headers_of(fence) == {
        "Nats-Batch-Id": "id",
        "Nats-Batch-Sequence": "1",
        "Nats-Batch-Commit": "1",
        "Nats-Expected-Last-Sequence": "9223372036854775807",
    }
    assert (bench.batch.outcome, bench.batch.ack) == ("not stored", None)
    bench.run(bench.batch.discard())
    assert bench.asked == [fence], "the server has nothing left to forget"


def test_a_batch_that_is_being_resolved_is_not_resolved_a_second_time_meanwhile() -> None:
    bench = in_doubt()
    first = bench.batch.resolve(5.0)
    next(first)
    with pytest.raises(UsageError):
        bench.run(bench.batch.resolve(5.0))
    first.close()
    assert bench.run(bench.batch.resolve(5.0), INCOMPLETE) == "not stored"


def test_a_message_with_the_id_proves_that_all_are_stored() -> None:
    bench = in_doubt()
    outcome = bench.run(bench.batch.resolve(5.0), WRONG, info(), stored(5), stored(7, "id", 3))
    assert outcome == bench.batch.outcome == "stored"
    assert bench.batch.ack is not None
    assert (bench.batch.ack.stream, bench.batch.ack.sequence, bench.batch.ack.batch_size) == ("S", 7, 3)
    # Twelve o'clock, less five seconds of age and the margin for clocks.
    assert bodies(bench) == [
        {"start_time": "2026-01-01T11:59:45Z", "next_by_subj": ">"},
        {"last_by_subj": "a.3"},
    ]


def test_any_of_its_messages_tells_where_the_last_one_is() -> None:
    bench = in_doubt()
    bench.run(bench.batch.resolve(5.0), WRONG, info(last=30), stored(5), stored(29), stored(21, "id", 2))
    assert bench.batch.ack is not None
    assert bench.batch.ack.sequence == 22


def test_a_subject_nobody_wrote_since_proves_that_nothing_is_stored() -> None:
    for last in (NOT_FOUND, stored(4)):
        bench = in_doubt()
        assert bench.run(bench.batch.resolve(5.0), WRONG, info(), stored(5), last) == "not stored"
    bench = in_doubt()
    assert bench.run(bench.batch.resolve(5.0), WRONG, info(), NOT_FOUND, stored(7)) == "not stored"


def test_an_older_batch_of_the_same_name_is_not_taken_for_this_one() -> None:
    bench = in_doubt()
    assert bench.run(bench.batch.resolve(5.0), WRONG, info(), stored(6), stored(5, "id", 3)) == "not stored"


def test_where_others_wrote_since_their_messages_are_read_up_to_ours() -> None:
    bench = in_doubt(size=1)
    answers = [stored(5), stored(30), stored(8), stored(9, "other"), stored(12, "id", 1)]
    assert bench.run(bench.batch.resolve(5.0), WRONG, info(last=30), *answers) == "stored"
    assert bodies(bench)[2:] == [
        {"seq": 5, "next_by_subj": "a.1"},
        {"seq": 9, "next_by_subj": "a.1"},
        {"seq": 10, "next_by_subj": "a.1"},
    ]
    bench = in_doubt(size=1)
    answers = [stored(5), stored(30), stored(8), stored(30), NOT_FOUND]
    assert bench.run(bench.batch.resolve(5.0), WRONG, info(last=30), *answers) == "not stored"


@pytest.mark.parametrize(
    "stream",
    [
        info(last=30, max_msgs_per_subject=2),  # ours may have been pushed out
        info(last=30, first=5),  # the beginning is gone
        info(last=30, retention="workqueue"),  # consumed
    ],
)
def test_what_the_stream_no_longer_has_stays_in_doubt(stream: dict[str, Any]) -> None:
    bench = in_doubt(size=1)
    answers = [stored(5), stored(30), stored(8), stored(30), NOT_FOUND]
    with pytest.raises(BatchInDoubt, match="no longer has all"):
        bench.run(bench.batch.resolve(5.0), WRONG, stream, *answers)
    assert bench.batch.outcome == "unknown"
    # Asking again may help: here the stream has it after all.
    assert bench.run(bench.batch.resolve(5.0), WRONG, stream, stored(5), stored(7, "id", 1)) == "stored"


@pytest.mark.parametrize(
    ("limit", "outcome"), [(-1, "not stored"), (0, "not stored"), (3, "not stored"), (2, "unknown")]
)
def test_a_subject_with_room_for_more_than_others_wrote_would_still_have_it(limit: int, outcome: str) -> None:
    bench = in_doubt(size=1)
    answers = [stored(5), stored(30), stored(8), stored(30), NOT_FOUND]
    resolving = bench.batch.resolve(5.0)
    with contextlib.suppress(BatchInDoubt):
        bench.run(resolving, WRONG, info(last=30, max_msgs_per_subject=limit), *answers)
    assert bench.batch.outcome == outcome


def test_a_subject_that_keeps_one_message_may_have_lost_ours_to_a_single_other() -> None:
    bench = in_doubt(size=1)
    with pytest.raises(BatchInDoubt, match="no longer has all"):
        bench.run(
            bench.batch.resolve(5.0),
            *[WRONG, info(last=30, max_msgs_per_subject=1), stored(5), stored(30), stored(30), NOT_FOUND],
        )


@pytest.mark.parametrize(
    ("first", "since", "outcome"), [(1, 1, "not stored"), (3, 5, "not stored"), (0, 1, "not stored"), (2, 2, "unknown")]
)
def test_absence_proves_something_where_the_stream_has_what_came_before(first: int, since: int, outcome: str) -> None:
    bench = in_doubt()
    answers = [stored(since), *[NOT_FOUND] * (1 if outcome == "not stored" else 3)]
    with contextlib.suppress(BatchInDoubt):
        bench.run(bench.batch.resolve(5.0), WRONG, info(first=first), *answers)
    assert bench.batch.outcome == outcome


def test_the_first_message_since_may_be_ours() -> None:
    bench = in_doubt(size=1)
    assert bench.run(bench.batch.resolve(5.0), WRONG, info(), stored(5), stored(5, "id", 1)) == "stored"
    # It may come after the stream was asked how far it is: then nothing is there since, and a moment later it is.
    bench = in_doubt()
    assert bench.run(bench.batch.resolve(5.0), WRONG, info(), NOT_FOUND, stored(8, "id", 3)) == "stored"


def test_a_rollup_may_have_removed_it() -> None:
    bench = in_doubt(size=1)
    answers = [stored(5), stored(30), stored(30, "other", more="Nats-Rollup: sub\r\n"), NOT_FOUND]
    with pytest.raises(BatchInDoubt):
        bench.run(bench.batch.resolve(5.0), WRONG, info(last=30), *answers)


def test_a_message_with_a_ttl_may_have_expired() -> None:
    bench = Bench()
    bench.run(bench.batch.ask("a.1", b"", options(ttl=1)), OK)
    with pytest.raises(BatchInDoubt):
        bench.run(bench.batch.commit(), RequestTimeout("x", 1))
    with pytest.raises(BatchInDoubt, match="no longer"):
        bench.run(bench.batch.resolve(5.0), WRONG, info(), stored(5), NOT_FOUND)


def test_where_subjects_are_renamed_every_message_is_looked_at() -> None:
    for config in ({"subject_transform": {"src": "a.>", "dest": "b.>"}}, {"subjects": ["mapped.>"]}):
        bench = in_doubt()
        answers = [stored(5), stored(9), stored(8, "id", 3)]
        assert bench.run(bench.batch.resolve(5.0), WRONG, info(last=9, **config), *answers) == "stored"
        assert bodies(bench)[1:] == [{"last_by_subj": ">"}, {"seq": 5, "next_by_subj": ">"}]


def test_reading_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_resolve, "MAX_READS", 5)
    bench = in_doubt(size=1)
    others = [stored(number) for number in range(6, 9)]
    with pytest.raises(BatchInDoubt, match="too many to look at"):
        bench.run(bench.batch.resolve(5.0), WRONG, info(last=30), stored(5), stored(30), *others)
    assert len(bodies(bench)) == 5
    bench = in_doubt(size=1)
    assert bench.run(bench.batch.resolve(5.0), *[WRONG, info(last=30), stored(5), stored(30), *others[1:], NOT_FOUND])
    assert (len(bodies(bench)), bench.batch.outcome) == (5, "not stored")


def test_a_replicated_stream_is_believed_once_its_leader_has_applied_all_and_heard_from_a_majority() -> None:
    bench = in_doubt()
    behind = info(last=5, replicas=3, active_ns=0)
    silent = info(last=7, replicas=3, active_ns=900_000_000)
    heard = info(last=7, replicas=3, active_ns=50_000_000)
    assert (
        bench.run(
            bench.batch.resolve(5.0),
            *[WRONG, behind, WRONG, behind, behind, silent, heard],
            *[stored(5), NOT_FOUND, heard],
        )
        == "not stored"
    )
    assert bench.paused_s == [atomic_resolve.WAIT_PAUSE_S] * 3


@pytest.mark.parametrize(("replicas", "heard"), [(2, 0), (4, 1), (5, 1)])
def test_half_of_the_replicas_or_fewer_are_no_majority(replicas: int, heard: int) -> None:
    bench = in_doubt()
    some = info(replicas=replicas, active_ns=10_000_000_000)
    more = info(replicas=replicas, active_ns=10_000_000_000)
    for each in some["cluster"]["replicas"][:heard] + more["cluster"]["replicas"][: heard + 1]:
        each["active"] = 50_000_000
    # What a leader does not say of a replica, it has not heard.
    del some["cluster"]["replicas"][-1]["active"]
    answers = [WRONG, some, WRONG, some, some, more, stored(5), NOT_FOUND, more]
    assert bench.run(bench.batch.resolve(5.0), *answers) == "not stored"
    assert len(bench.paused_s) == 2


def test_a_stream_that_says_nothing_of_replicas_has_none() -> None:
    bench = in_doubt()
    alone = info()
    del alone["config"]["num_replicas"], alone["cluster"]
    assert bench.run(bench.batch.resolve(5.0), WRONG, alone, stored(5), NOT_FOUND) == "not stored"


def test_a_new_leader_is_asked_from_the_beginning() -> None:
    bench = in_doubt()
    old, new = info(last=5, replicas=3), info(last=7, replicas=3, active_ns=50_000_000, leader="n2")
    answers = [WRONG, old, WRONG, old, new, WRONG, new, new, stored(5), NOT_FOUND, new]
    assert bench.run(bench.batch.resolve(5.0), *answers) == "not stored"


def test_a_leader_cut_off_from_its_replicas_decides_nothing() -> None:
    bench = in_doubt()
    alone = info(last=7, replicas=3, active_ns=10_000_000_000)
    with pytest.raises(BatchInDoubt, match="does not hear from its replicas"):
        bench.run(bench.batch.resolve(5.0), WRONG, alone, WRONG, *[alone] * 100)
    assert atomic_resolve.WAIT_MAX_S <= sum(bench.paused_s) < atomic_resolve.WAIT_MAX_S + 0.2
    assert bench.batch.outcome == "unknown"


def test_a_question_is_asked_again_until_it_is_between_two_answers_of_one_leader() -> None:
    """The answer does not say who gave it: it may have been the old leader, who does not know what the new one took."""
    bench = in_doubt()
    new = info(last=7, replicas=3, active_ns=50_000_000, leader="n2")
    late = error(400, 10071, "wrong last sequence: 10")
    applied = info(last=10, replicas=3, active_ns=50_000_000, leader="n2")
    answers = [WRONG, new, late, new, new, applied, stored(5), stored(10, "id", 3)]
    assert bench.run(bench.batch.resolve(5.0), *answers) == "stored"


def test_leaders_that_change_with_every_question_leave_the_doubt() -> None:
    bench = in_doubt()
    turns = [info(last=7, replicas=3, active_ns=50_000_000, leader=f"n{number % 3}") for number in range(200)]
    with pytest.raises(BatchInDoubt, match="changes its leader"):
        bench.run(bench.batch.resolve(5.0), *[each for turn in turns for each in (WRONG, turn)])


def test_absence_counts_only_if_the_leader_that_had_settled_was_read() -> None:
    bench = in_doubt()
    ours = info(last=7, replicas=3, active_ns=50_000_000, leader="n1")
    other = info(last=7, replicas=3, active_ns=50_000_000, leader="n2")
    first = [WRONG, ours, WRONG, ours, ours, stored(5), NOT_FOUND, other]
    again = [WRONG, other, other, stored(5), stored(7, "id", 3)]
    assert bench.run(bench.batch.resolve(5.0), *first, *again) == "stored"


def test_a_replica_the_leader_never_heard_from_confirms_nothing() -> None:
    """nats-server 2.15.1 says 0 nanoseconds of one that it has not heard from since it was elected."""
    bench = in_doubt()
    alone = info(last=7, replicas=3)
    alone["cluster"]["replicas"][0]["active"] = 10_000_000_000
    with pytest.raises(BatchInDoubt, match="does not hear from its replicas"):
        bench.run(bench.batch.resolve(5.0), WRONG, alone, WRONG, *[alone] * 100)


def test_a_batch_that_may_still_be_on_its_way_as_a_whole_stays_in_doubt() -> None:
    bench = in_doubt(first_arrived=False)
    bench.connection.end("cut")
    bench.connect()
    with pytest.raises(BatchInDoubt, match="still be on its way"):
        bench.run(bench.batch.resolve(5.0), WRONG, info(), stored(5), NOT_FOUND)
    # Where others wrote since, their messages are read first; then it is the same.
    bench = in_doubt(size=1, first_arrived=False)
    bench.connection.end("cut")
    bench.connect()
    answers = [stored(5), stored(30), stored(8), stored(30), NOT_FOUND]
    with pytest.raises(BatchInDoubt, match="still be on its way"):
        bench.run(bench.batch.resolve(5.0), WRONG, info(last=30), *answers)
    assert bench.batch.outcome == "unknown"
    # On the session it was sent over it cannot be behind the question.
    bench = in_doubt(first_arrived=False)
    assert bench.run(bench.batch.resolve(5.0), WRONG, info(), stored(5), NOT_FOUND) == "not stored"
    # An acknowledged first message is not on its way any more, and without it nothing is stored.
    bench = in_doubt()
    bench.connection.end("cut")
    bench.connect()
    assert bench.run(bench.batch.resolve(5.0), WRONG, info(), stored(5), NOT_FOUND) == "not stored"


@pytest.mark.parametrize(
    "answers",
    [
        [RequestTimeout("x", 1)],
        [JetStreamUnavailable("a")],
        [error(400, 10109, "invalid operation on sealed stream")],
        [WRONG, RequestTimeout("x", 1)],
        [WRONG, info(), error(503, 10008)],
    ],
)
def test_a_stream_that_does_not_answer_leaves_the_doubt(answers: list[Answer]) -> None:
    bench = in_doubt()
    with pytest.raises(BatchInDoubt):
        bench.run(bench.batch.resolve(5.0), *answers)
    assert bench.batch.outcome == "unknown"


def test_a_stream_that_takes_no_batches_any_more_is_read_all_the_same() -> None:
    bench = in_doubt()
    disabled = error(400, 10174, "atomic publish is disabled")
    assert bench.run(bench.batch.resolve(5.0), disabled, info(), stored(5), stored(7, "id", 3)) == "stored"
    bench = in_doubt()
    assert bench.run(bench.batch.resolve(5.0), disabled, info(last=0, first=0), NOT_FOUND, NOT_FOUND) == "not stored"


def test_the_fence_waits_for_a_place_too() -> None:
    bench = in_doubt()
    assert bench.run(bench.batch.resolve(5.0), TOO_MANY, TOO_MANY, INCOMPLETE) == "not stored"
    assert len(bench.paused_s) == 2


@pytest.mark.parametrize(("timeout_s", "pauses"), [(0.1, 1), (0.25, 3)])
def test_the_fence_does_not_wait_for_a_place_for_ever(timeout_s: float, pauses: int) -> None:
    bench = in_doubt(timeout_s=timeout_s)
    with pytest.raises(BatchInDoubt, match="no account of itself"):
        bench.run(bench.batch.resolve(5.0), *[TOO_MANY] * 20)
    assert len(bench.paused_s) == pauses


def test_there_is_nothing_to_resolve_in_an_open_batch() -> None:
    bench = Bench()
    with pytest.raises(UsageError, match="is open"):
        bench.run(bench.batch.resolve(1.0))


# ---- advisories ------------------------------------------------------------------------------------------------------


def test_an_advisory_is_read_from_what_the_server_sends() -> None:
    data = (
        b'{"type":"io.nats.jetstream.advisory.v1.stream_batch_abandoned","id":"X1",'
        b'"timestamp":"2026-11-15T11:57:29.654999711Z","stream":"A","batch":"L3","reason":"incomplete"}'
    )
    advisory = BatchAbandoned.of(CoreMessage("s", data, None, None, None))
    assert (advisory.stream, advisory.batch, advisory.reason, advisory.id) == ("A", "L3", "incomplete", "X1")
    assert advisory.time.microsecond == 654999
    for bad in (b"{}", b"no", b'{"timestamp":"0001-01-01T00:00:00Z"}', b'{"timestamp":"x"}'):
        with pytest.raises(ProtocolError):
            BatchAbandoned.of(CoreMessage("s", bad, None, None, None))


def test_advisories_are_of_one_stream_or_of_all() -> None:
    assert abandoned_subject(None) == "$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED.*"
    assert abandoned_subject("A") == "$JS.EVENT.ADVISORY.STREAM.BATCH_ABANDONED.A"
    with pytest.raises(ConfigError):
        abandoned_subject("a.b")
