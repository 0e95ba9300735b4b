"""Answers of nats-server 2.15, damaged in every place: read all the same, or an error of ours, never a Python error.

Every field of every answer is left out, or becomes something else; every header likewise; and answers are cut and
scrambled at random, from a seed. What is read all the same has the types that the signatures promise.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import datetime
import json
import random
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from support.readers import SilentReader

from jetspark.core.connection import Connection
from jetspark.core.message import CoreMessage
from jetspark.core.options import ConnectOptions
from jetspark.core.reconnect import parse_servers
from jetspark.errors import ConfigError, ConnectionClosed, JetSparkError, KeyExists, StreamNotFound
from jetspark.jetstream.acks import AckableMessage, parse_metadata
from jetspark.jetstream.advisories import BatchAbandoned
from jetspark.jetstream.config import ConsumerConfig, StreamConfig
from jetspark.jetstream.direct_get import BatchGet, LastGet
from jetspark.jetstream.kv import Bucket, KVEntry, entry_of_delivery
from jetspark.jetstream.objects import ObjectLink, ObjectMeta, Objects, ObjectStoreConfig, Upload, create_bucket
from jetspark.jetstream.operations import Api, Operation, Request
from jetspark.jetstream.ordered import OrderedOptions, OrderedPuller, OrderedReader
from jetspark.jetstream.publishing import publish
from jetspark.jetstream.pull import Fetch, Puller
from jetspark.publish.fast_batch import FastMachine
from jetspark.publish.fast_options import HIGHEST_FLOW, FastBatchOptions, FastPublisherOptions, GapMode
from jetspark.publish.fast_publisher import FastPublisherMachine
from jetspark.publish.outgoing import Item

SEED = 20261116
STAMP = "2026-11-15T10:25:48.893408446Z"
NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
API = Api()

STREAM: dict[str, Any] = {
    "type": "io.nats.jetstream.api.v1.stream_info_response",
    "total": 2,
    "offset": 0,
    "limit": 100_000,
    "config": {
        "name": "KV_b",
        "subjects": ["$KV.b.>"],
        "retention": "limits",
        "max_consumers": -1,
        "max_msgs": -1,
        "max_age": 60_000_000_000,
        "max_msgs_per_subject": 5,
        "discard": "new",
        "storage": "file",
        "num_replicas": 1,
        "duplicate_window": 120_000_000_000,
        "allow_direct": True,
        "placement": {"cluster": "C", "tags": ["a"]},
        "mirror": {"name": "KV_a", "opt_start_time": STAMP, "external": {"api": "$JS.h.API", "deliver": ""}},
        "consumer_limits": {"inactive_threshold": 5_000_000_000, "max_ack_pending": 7},
        "metadata": {"_nats.level": "5"},
    },
    "created": STAMP,
    "state": {
        "messages": 3,
        "bytes": 300,
        "first_seq": 1,
        "first_ts": STAMP,
        "last_seq": 3,
        "last_ts": STAMP,
        "num_subjects": 2,
        "subjects": {"$KV.b.k": 2, "$KV.b.l": 1},
        "num_deleted": 1,
        "deleted": [2],
        "consumer_count": 0,
    },
    "cluster": {"name": "C", "leader": "n1", "replicas": [{"name": "n2", "current": True, "active": 5}]},
    "ts": STAMP,
}
CONSUMER: dict[str, Any] = {
    "type": "io.nats.jetstream.api.v1.consumer_info_response",
    "stream_name": "S",
    "name": "c",
    "created": STAMP,
    "config": {
        "durable_name": "c",
        "name": "c",
        "ack_policy": "explicit",
        "ack_wait": 5_000_000_000,
        "backoff": [5, 6],
    },
    "delivered": {"consumer_seq": 1, "stream_seq": 4},
    "ack_floor": {"consumer_seq": 0, "stream_seq": 4},
    "num_ack_pending": 0,
    "num_pending": 3,
    "paused": False,
    "pause_remaining": 5,
    "push_bound": False,
    "cluster": {"leader": "n1"},
    "ts": STAMP,
}
OBJECT = {
    "name": "o",
    "description": "d",
    "headers": {"a": ["1", "2"]},
    "metadata": {"k": "v"},
    "options": {"link": {"bucket": "b", "name": "n"}, "max_chunk_size": 4},
    "bucket": "b",
    "nuid": "N1",
    "size": 8,
    "mtime": STAMP,
    "chunks": 2,
    "digest": "SHA-256=x",
    "deleted": False,
}
PUB_ACK = {"stream": "S", "seq": 7, "duplicate": False, "domain": "hub", "batch": "b", "count": 2, "val": "5"}
ACCOUNT = {
    "type": "io.nats.jetstream.api.v1.account_info_response",
    "memory": 0,
    "storage": 1,
    "streams": 1,
    "consumers": 0,
    "limits": {"max_memory": -1},
    "api": {"level": 5, "total": 2, "errors": 0},
    "domain": "hub",
}
ERROR = {"type": "x", "error": {"code": 404, "err_code": 10059, "description": "stream not found"}, "stream": "S"}
NOT_LAST = {"type": "x", "error": {"code": 400, "err_code": 10071, "description": "wrong last sequence: 3"}}
OK = {"type": "x", "success": True}


def _stored(subject: str, data: bytes) -> dict[str, Any]:
    text = base64.b64encode(data).decode()
    headers = base64.b64encode(b"NATS/1.0\r\nKV-Operation: PUT\r\n\r\n").decode()
    return {"type": "x", "message": {"subject": subject, "seq": 3, "hdrs": headers, "data": text, "time": STAMP}}


STORED_KEY = _stored("$KV.b.k", b"value")
STORED_OBJECT = _stored("$O.b.M.bw==", json.dumps(OBJECT).encode())
STREAM_CONFIG = StreamConfig(name="OBJ_b", subjects=["$O.b.C.>", "$O.b.M.>"])


def _bucket() -> Bucket:
    return Bucket(API, "b", "b", direct=False, atomic=True)


def _objects() -> Objects:
    return Objects(API, STREAM_CONFIG)


# Of each operation, what it is answered, one after the other; the last one as often as it asks.
OPERATIONS: dict[str, tuple[Callable[[], Operation[Any]], list[dict[str, Any]]]] = {
    "account_info": (lambda: API.account_info(), [ACCOUNT]),
    "create_stream": (lambda: API.create_stream("S"), [STREAM]),
    "update_stream": (lambda: API.update_stream(StreamConfig(name="S")), [STREAM, STREAM]),
    "create_or_update_stream": (lambda: API.create_or_update_stream("S"), [ERROR, STREAM]),
    "stream_info": (lambda: API.stream_info("S", ">"), [STREAM]),
    "delete_stream": (lambda: API.delete_stream("S"), [OK]),
    "purge_stream": (lambda: API.purge_stream("S"), [OK | {"purged": 5}]),
    "stream_page": (lambda: API.stream_page(0, None), [{"total": 1, "offset": 0, "streams": [STREAM]}]),
    "stream_name_page": (lambda: API.stream_name_page(0, None), [{"total": 2, "streams": ["a", "b"]}]),
    "get_message": (lambda: API.get_message("S", {"seq": 1}, direct=False), [STORED_KEY]),
    "create_consumer": (lambda: API.create_consumer("S", ConsumerConfig()), [CONSUMER]),
    "update_consumer": (lambda: API.update_consumer("S", ConsumerConfig(name="c")), [CONSUMER, CONSUMER]),
    "consumer_info": (lambda: API.consumer_info("S", "c"), [CONSUMER]),
    "consumer_page": (lambda: API.consumer_page("S", 0), [{"total": 1, "consumers": [CONSUMER]}]),
    "consumer_name_page": (lambda: API.consumer_name_page("S", 0), [{"total": 1, "consumers": ["a"]}]),
    "publish": (lambda: publish("s", b"", None), [PUB_ACK]),
    "refused publish": (lambda: publish("s", b"", None), [ERROR]),
    "kv.put": (lambda: _bucket().put("k", b""), [PUB_ACK]),
    "kv.get": (lambda: _bucket().get("k", None), [STORED_KEY]),
    "kv.create": (
        lambda: _bucket().create("k", b"", None),
        [ERROR | {"error": {"code": 400, "err_code": 10071}}, STORED_KEY],
    ),
    "kv.update": (lambda: _bucket().update("k", b"", 3, None), [PUB_ACK]),
    "kv.delete": (lambda: _bucket().mark("k", "delete", None, None), [PUB_ACK]),
    "kv.status": (lambda: _bucket().status(), [STREAM]),
    "objects.create": (lambda: create_bucket(API, ObjectStoreConfig(bucket="b")), [STREAM]),
    "objects.info": (lambda: _objects().info("o"), [STORED_OBJECT]),
    "objects.delete": (lambda: _objects().delete("o"), [STORED_OBJECT, PUB_ACK]),
    "objects.update_meta": (lambda: _objects().update_meta("o", ObjectMeta(name="o")), [STORED_OBJECT, PUB_ACK]),
    "objects.add_link": (
        lambda: _objects().add_link("l", "N2", ObjectLink(bucket="b", name="n"), NOW),
        [STORED_OBJECT, PUB_ACK],
    ),
    "objects.check_chunks": (lambda: _objects().check_chunks(Upload("N1", 4)), [STREAM]),
    "objects.purge_chunks": (lambda: _objects().purge_chunks("N1"), [OK | {"purged": 5}]),
    "objects.status": (lambda: _objects().status(), [STREAM]),
}

REPLACEMENTS: list[Any] = [None, "5", 5, -1, 1.5, 10**30, True, [None], {"a": None}, 1e400]
MISSING = object()


def _damaged(answer: Any) -> Iterator[Any]:
    """The answer with one place damaged, every place in every way."""
    for path in _paths(answer):
        for replacement in [MISSING, *REPLACEMENTS]:
            damaged = copy.deepcopy(answer)
            place = damaged
            for step in path[:-1]:
                place = place[step]
            if replacement is MISSING:
                del place[path[-1]]
            else:
                place[path[-1]] = replacement
            yield damaged


def _paths(value: Any) -> Iterator[tuple[Any, ...]]:
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, content in entries:
        yield (name,)
        for path in _paths(content):
            yield (name, *path)


def _scrambled(answer: Any, rng: random.Random) -> Iterator[bytes]:
    """The bytes of the answer, cut or with a few of them changed."""
    data = json.dumps(answer).encode()
    for _ in range(15):
        yield data[: rng.randrange(len(data))]
        changed = bytearray(data)
        for _ in range(rng.choice([1, 2, 5])):
            changed[rng.randrange(len(changed))] = rng.choice(b'{}[]",:0 a\xff\\')
        yield bytes(changed)


def _message(answer: Any) -> CoreMessage:
    data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    return CoreMessage("_INBOX.x.1", data, None, None, None)


def _run(operation: Operation[Any], answers: list[Any]) -> Any:
    """What an operation makes of answers, the last of which is given again, if it asks for more; but not for ever."""
    try:
        step = next(operation)
        for place in range(30):
            answer = answers[min(place, len(answers) - 1)]
            step = operation.send(
                _message(answer) if isinstance(step, Request) and not step.is_silent else _message(b"")
            )
    except StopIteration as finished:
        return finished.value
    return None


def _unfit(value: Any, hint: Any = None) -> str | None:
    """What is not of the type it should have, in a result; None when everything is."""
    if dataclasses.is_dataclass(value):
        hints = typing.get_type_hints(type(value))
        for entry in dataclasses.fields(value):
            if found := _unfit(getattr(value, entry.name), hints[entry.name]):
                return f"{type(value).__name__}.{entry.name}: {found}"
        return None
    if hint is None or hint is Any:
        return None
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    options = typing.get_args(hint) if is_union else (hint,)
    for option in options:
        origin = typing.get_origin(option)
        if origin is typing.Literal or option is Any:
            return None
        if (
            origin is not None
            and issubclass(origin, Sequence)
            and isinstance(value, Sequence)
            and not isinstance(value, str)
        ):
            return next(filter(None, (_unfit(each, typing.get_args(option)[0]) for each in value)), None)
        if origin is not None and issubclass(origin, Mapping) and isinstance(value, Mapping):
            return next(filter(None, (_unfit(each, typing.get_args(option)[1]) for each in value.values())), None)
        if origin is None and isinstance(value, option) and (option is bool or not isinstance(value, bool)):
            return None
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            return None
    return f"{value!r} is not {hint}"


def _complaint(call: Callable[[], Any], answer: Any) -> str | None:
    try:
        result = call()
    except JetSparkError as error:
        if isinstance(error, ConfigError) and "ask for fewer" not in str(error):
            return f"{answer}: {error!r}, but the caller did nothing wrong"
        str(error)
        return None
    except Exception as error:
        return f"{answer}: {error!r}"
    for each in result if isinstance(result, list | tuple) else [result]:
        if found := _unfit(each):
            return f"{answer}: {found}"
    return None


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_an_undamaged_answer_is_read(name: str) -> None:
    make, answers = OPERATIONS[name]
    if name in ("kv.create", "refused publish"):
        with pytest.raises((KeyExists, StreamNotFound)):
            _run(make(), answers)
    else:
        assert _unfit(_run(make(), answers)) is None


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_an_answer_damaged_in_any_place_is_read_or_an_error_of_ours(name: str) -> None:
    make, answers = OPERATIONS[name]
    rng = random.Random(f"{SEED}-{name}")
    complaints = []
    for place, answer in enumerate(answers):
        for damaged in [*_damaged(answer), *_scrambled(answer, rng)]:
            given = [*answers[:place], damaged, *answers[place + 1 :]]
            complaints.append(_complaint(lambda: _run(make(), given), damaged))  # noqa: B023
    assert [complaint for complaint in complaints if complaint][:5] == []


# ---- messages and statuses -------------------------------------------------------------------------------------------

DIRECT = {
    "Nats-Stream": "KV_b",
    "Nats-Subject": "$KV.b.k",
    "Nats-Sequence": "3",
    "Nats-Time-Stamp": STAMP,
    "Nats-Num-Pending": "2",
    "Nats-Last-Sequence": "0",
    "KV-Operation": "PUT",
}
VALUES = ["", "x", "-1", "1.5", "99999999999999999999999", "0001-01-01T00:00:00Z", "$KV", "a.b", "\xff", "9" * 5000]
LINES = [
    "NATS/1.0",
    "NATS/1.0 204 EOB",
    "NATS/1.0 404 No Messages",
    "NATS/1.0 409 x",
    "NATS/1.0 x",
    "NATS/1.0 999999",
    "",
]


def _blocks(headers: dict[str, str]) -> Iterator[bytes]:
    """A block of headers with one of them damaged, and with every first line."""
    variants = [headers]
    for name in headers:
        variants.append({each: value for each, value in headers.items() if each != name})
        variants += [headers | {name: value} for value in VALUES]
    for line in LINES:
        for variant in variants:
            fields = "".join(f"{name}: {value}\r\n" for name, value in variant.items())
            yield f"{line}\r\n{fields}\r\n".encode("latin-1")
    yield b"NATS/1.0\r\nno colon\r\n\r\n"
    yield b""


def _direct(block: bytes) -> CoreMessage:
    return CoreMessage("_INBOX.x.1", b"data", None, block, None)


def _given(operation: Operation[Any], message: CoreMessage) -> Any:
    try:
        next(operation)
        operation.send(message)
    except StopIteration as finished:
        return finished.value
    return None


READERS: dict[str, Callable[[CoreMessage], Any]] = {
    "get_message": lambda message: _given(API.get_message("KV_b", {"seq": 3}, direct=True), message),
    "kv.get": lambda message: _given(Bucket(API, "b", "b", direct=True, atomic=True).get("k", None), message),
    "get_messages": lambda message: _accept(
        BatchGet("$JS.API", "S", start_sequence=1, subject=None, max_messages=None), message
    ),
    "get_last_messages": lambda message: _accept(LastGet("$JS.API", "S", [">"], None), message),
    "snapshot": lambda message: KVEntry.of("b", _given(API.get_message("KV_b", {"seq": 3}, direct=True), message)),
    "ordered": lambda message: _read_in_order(message),
}


def _read_in_order(message: CoreMessage) -> Any:
    reader = OrderedReader(OrderedOptions())
    puller: OrderedPuller[Any] = OrderedPuller("inbox", "subject", reader)
    puller.absorb([message], 0.0)  # a status ends here
    return reader.accept(list(puller.buffer) or [message])


def _accept(reading: Any, message: CoreMessage) -> Any:
    reading.request()
    return reading.accept(message)


@pytest.mark.parametrize("name", sorted(READERS))
def test_a_message_with_damaged_headers_is_read_or_an_error_of_ours(name: str) -> None:
    complaints = [_complaint(lambda: READERS[name](_direct(block)), block) for block in _blocks(DIRECT)]  # noqa: B023
    assert [complaint for complaint in complaints if complaint][:5] == []


def test_a_damaged_status_does_not_end_a_fetch() -> None:
    headers = {"Nats-Pending-Messages": "5", "Nats-Pending-Bytes": "0"}
    complaints = []
    for block in _blocks(headers):
        puller: Puller[AckableMessage] = Puller("_INBOX.x", "$JS.API.CONSUMER.MSG.NEXT.S.c")
        fetch = Fetch(puller, 5, now=0.0, timeout_s=5.0)
        fetch.step(0.0, 1)
        message = AckableMessage("_INBOX.x.1", b"", None, block, None)
        complaints.append(_complaint(lambda: puller.absorb([message], 1.0), block))  # noqa: B023
    assert [complaint for complaint in complaints if complaint][:5] == []


REPLIES = [
    b"",
    b"$JS.ACK",
    b"$JS.ACK.S.c.1.2.3.4",
    b"$JS.ACK.S.c.x.2.3.4.5",
    b"$JS.ACK.S.c.1.2.3.99999999999999999999.5",
]


@pytest.mark.parametrize("reply", [*REPLIES, b"$JS.ACK._.h.S.c.1.2.3.-5.x.t", b"\xff" * 20, b"$JS.ACK.S.c.1.2.3.-1.5"])
def test_a_damaged_reply_subject_is_a_protocol_error(reply: bytes) -> None:
    assert _complaint(lambda: parse_metadata(reply), reply) is None


@pytest.mark.parametrize("subject", ["$KV.b.k", "$KV.b", "$KV", "", "k", "other.b.k"])
def test_a_key_is_read_from_any_subject_or_refused(subject: str) -> None:
    message = AckableMessage(subject, b"", b"$JS.ACK.S.c.1.2.3.1700000000000000000.5", None, None)
    assert _complaint(lambda: entry_of_delivery("b", message), subject) is None


def test_a_damaged_advisory_is_an_error_of_ours() -> None:
    advisory = {"type": "x", "id": "i", "timestamp": STAMP, "stream": "S", "batch": "b", "reason": "timeout"}
    rng = random.Random(SEED)
    for damaged in [*_damaged(advisory), *_scrambled(advisory, rng)]:
        assert _complaint(lambda: BatchAbandoned.of(_message(damaged)), damaged) is None  # noqa: B023


# ---- fast batches ----------------------------------------------------------------------------------------------------


def _connected() -> Connection:
    connection = Connection(ConnectOptions(), parse_servers("a"), inbox="_INBOX.me", jitter=lambda: 0.0)
    connection.begin(connection.pool.next()[0])
    connection.receive_data(b'INFO {"server_id":"S","max_payload":100000}\r\n')
    connection.login(None)
    connection.data_to_send()
    connection.receive_data(b"PONG\r\n")
    return connection


def _send_command(connection: Connection, batch: FastMachine, answer: Any) -> None:
    assert batch.inbox.subscription is not None
    data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    subject = batch.inbox.subscription.subject.removesuffix(">") + "500.fail.1.0.$FI"
    connection.receive_data(
        b"MSG %b %d %d\r\n%b\r\n" % (subject.encode(), batch.inbox.subscription.sid, len(data), data)
    )


def _batch_at(stage: str, gap: GapMode) -> tuple[Connection, FastMachine]:
    """A batch of one message that is not answered yet; one of three that is open; one of three that is ended."""
    connection = _connected()
    batch = FastMachine(connection, SilentReader(), FastBatchOptions(gap=gap))
    batch.start(("s.a", b"1"), 0.0)
    if stage != "opening":
        _send_command(connection, batch, FAST_ANSWERS["ack"])
        batch.on_replies(0.0)
        batch.sender.add_many([("s.a", b"2"), ("s.a", b"3")], 0.0)
    if stage == "ended":
        batch.end(0.0)
    return connection, batch


FAST_ANSWERS = {
    "ack": {"type": "ack", "seq": 0, "msgs": 10},
    "gap": {"type": "gap", "last_seq": 1, "seq": 2},
    "err": {"type": "err", "seq": 1, "error": {"code": 400, "err_code": 10071, "description": "no"}},
    "final": {"stream": "S", "seq": 5, "batch": "b", "count": 1},
    "error": {"error": {"code": 400, "err_code": 10206, "description": "no"}, "stream": "S", "seq": 0},
}


def _damaged_fast_answers(kind: str) -> list[Any]:
    rng = random.Random(SEED)
    return [*_damaged(FAST_ANSWERS[kind]), *_scrambled(FAST_ANSWERS[kind], rng)]


@pytest.mark.parametrize("gap", ["fail", "ok"])
@pytest.mark.parametrize("stage", ["opening", "open", "ended"])
@pytest.mark.parametrize("kind", sorted(FAST_ANSWERS))
def test_a_damaged_answer_ends_a_fast_batch_with_an_error_of_ours_or_is_passed_over(
    kind: str, stage: str, gap: GapMode
) -> None:
    for damaged in _damaged_fast_answers(kind):
        connection, batch = _batch_at(stage, gap)
        _send_command(connection, batch, damaged)
        assert _complaint(lambda: batch.on_replies(1.0), damaged) is None  # noqa: B023
        assert batch.failure is None or isinstance(batch.failure, JetSparkError)
        assert 0 <= batch.stored <= batch.messages, damaged
        assert 0 <= batch.acknowledged <= batch.messages, damaged
        assert batch.sender.room <= 3 * HIGHEST_FLOW, damaged  # two acknowledgements, and what may come early
        assert all(1 <= sequence <= batch.messages for sequence in _reported(batch)), damaged
        assert batch.losses.doubts == [], damaged


def _reported(batch: FastMachine) -> list[int]:
    return [
        *(each for gap in batch.losses.gaps for each in (gap.start, gap.stop - 1)),
        *(each[0] for each in batch.losses.errors),
    ]


@pytest.mark.parametrize("message_ids", [False, True])
@pytest.mark.parametrize("stage", ["opening", "open", "ended", "sent again"])
@pytest.mark.parametrize("kind", sorted(FAST_ANSWERS))
def test_a_damaged_answer_loses_no_message_of_a_fast_publisher(kind: str, stage: str, message_ids: bool) -> None:
    items: list[Item] = [("s.a", b"1"), ("s.a", b"2"), ("s.a", b"3")]
    for damaged in _damaged_fast_answers(kind):
        connection = _connected()
        options = FastPublisherOptions(message_ids=message_ids, on_refused=lambda _: None)
        publisher = FastPublisherMachine(connection, SilentReader(), options, now=0.0)
        publisher.accept(items, 0.0)
        now = _drive(publisher, connection, stage)
        assert publisher.batch is not None
        _send_command(connection, publisher.batch, damaged)
        assert _complaint(lambda: publisher.on_replies(now), damaged) is None  # noqa: B023
        assert publisher.failure is None or isinstance(publisher.failure, JetSparkError)
        assert publisher.stages.published + len(publisher.stages.unpublished()) == 3, damaged
        left = items[publisher.stages.published :]
        assert [each[:2] for each in publisher.stages.unpublished()] == left, damaged


def _drive(publisher: FastPublisherMachine, connection: Connection, stage: str) -> float:
    """Bring a publisher's batch to a stage; "sent again" is the next one, after one that ended in doubt."""
    now = 0.0
    if stage == "sent again":
        now = _drive(publisher, connection, "open")
        assert publisher.batch is not None
        publisher.batch.fail(ConnectionClosed("cut"))
        publisher.on_replies(now)
        now += 10.0
    publisher.pump(now)
    if stage == "opening":
        return now
    assert publisher.batch is not None
    _send_command(connection, publisher.batch, FAST_ANSWERS["ack"])
    publisher.on_replies(now)
    if stage == "ended":
        publisher.flush_requests.flush()
    while publisher.pump(now):
        pass
    return now
