from __future__ import annotations

import base64
import datetime
import pickle
from typing import Any

import pytest

from jetspark.core.message import CoreMessage
from jetspark.errors import MessageNotFound, ProtocolError, ServerError
from jetspark.jetstream import wire
from jetspark.jetstream.info import (
    AccountInfo,
    AccountLimits,
    AccountTier,
    ConsumerInfo,
    PubAck,
    StoredMessage,
    StreamInfo,
)

UTC = datetime.UTC
STAMP = "2026-11-15T10:25:48.893408446Z"
MOMENT = datetime.datetime(2026, 11, 15, 10, 25, 48, 893408, UTC)

# Replies of nats-server 2.15.1, without the fields the operations take off.
STREAM_CONFIG: dict[str, Any] = {
    "name": "S",
    "subjects": ["s.>"],
    "retention": "limits",
    "max_consumers": -1,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_age": 0,
    "max_msgs_per_subject": -1,
    "max_msg_size": -1,
    "discard": "old",
    "storage": "file",
    "num_replicas": 1,
    "duplicate_window": 120_000_000_000,
    "compression": "none",
    "allow_direct": True,
    "mirror_direct": False,
    "sealed": False,
    "deny_delete": False,
    "deny_purge": False,
    "allow_rollup_hdrs": False,
    "consumer_limits": {},
    "allow_msg_ttl": False,
    "metadata": {"_nats.level": "5", "_nats.req.level": "0", "_nats.ver": "2.15.1"},
}
STREAM: dict[str, Any] = {
    "config": STREAM_CONFIG,
    "created": "2026-11-15T10:25:48.890749899Z",
    "state": {
        "messages": 3,
        "bytes": 114,
        "first_seq": 1,
        "first_ts": STAMP,
        "last_seq": 5,
        "last_ts": STAMP,
        "num_subjects": 2,
        "subjects": {"s.0": 2, "s.1": 1},
        "num_deleted": 2,
        "deleted": [2, 3],
        "consumer_count": 7,
    },
    "cluster": {
        "name": "east",
        "raft_group": "S-R3F-x",
        "leader": "n1",
        "replicas": [{"name": "n2", "current": True, "active": 1000, "peer": "p2"}],
    },
    "alternates": [{"name": "S", "cluster": "east"}],
}
CONSUMER: dict[str, Any] = {
    "stream_name": "S",
    "name": "c",
    "created": "2026-11-15T10:25:49.699174477Z",
    "config": {
        "durable_name": "c",
        "name": "c",
        "deliver_policy": "all",
        "ack_policy": "explicit",
        "ack_wait": 30_000_000_000,
        "max_deliver": -1,
        "replay_policy": "instant",
        "max_waiting": 512,
        "max_ack_pending": 1000,
        "num_replicas": 0,
    },
    "delivered": {"consumer_seq": 11, "stream_seq": 14, "last_active": STAMP},
    "ack_floor": {"consumer_seq": 9, "stream_seq": 12},
    "num_ack_pending": 2,
    "num_redelivered": 1,
    "num_waiting": 3,
    "num_pending": 40,
    "paused": True,
    "pause_remaining": 1_500_000_000,
    "push_bound": True,
    "priority_groups": [{"group": "jobs"}],
}


def _direct(block: bytes, data: bytes = b"") -> StoredMessage:
    return StoredMessage.from_direct(CoreMessage("_INBOX.x.1", data, None, block, None))


def _place() -> bytes:
    """What the server puts behind a message's own headers."""
    return f"Nats-Stream: S\r\nNats-Subject: s.1\r\nNats-Sequence: 4\r\nNats-Time-Stamp: {STAMP}\r\n".encode()


def _stored(**changes: Any) -> dict[str, Any]:
    message = {"subject": "s.1", "seq": 4, "data": "eA==", "time": STAMP} | changes
    return {"message": {name: value for name, value in message.items() if value is not ...}}


# ---- infos ---------------------------------------------------------------------------------------------------------


def test_a_stream_info_is_read_whole() -> None:
    info = wire.decode(StreamInfo, STREAM)
    assert (info.config.name, info.config.subjects, info.config.duplicate_window_s) == ("S", ["s.>"], 120)
    assert info.created == datetime.datetime(2026, 11, 15, 10, 25, 48, 890749, UTC)
    state = info.state
    assert (state.messages, state.bytes, state.first_sequence, state.last_sequence) == (3, 114, 1, 5)
    assert (state.first_time, state.last_time) == (MOMENT, MOMENT)
    assert (state.consumers, state.deleted_count, state.deleted) == (7, 2, [2, 3])
    assert (state.subject_count, state.subjects) == (2, {"s.0": 2, "s.1": 1})
    assert info.cluster is not None
    assert (info.cluster.name, info.cluster.leader, info.cluster.replicas[0]["name"]) == ("east", "n1", "n2")
    assert info.cluster.extra == {"raft_group": "S-R3F-x"}
    assert info.extra == {"alternates": [{"name": "S", "cluster": "east"}]}


def test_a_configuration_that_was_read_is_sent_back_word_for_word() -> None:
    assert wire.encode(wire.decode(StreamInfo, STREAM).config) == STREAM_CONFIG
    assert wire.encode(wire.decode(ConsumerInfo, CONSUMER).config) == CONSUMER["config"]


def test_an_empty_stream_has_no_first_time() -> None:
    zero = "0001-01-01T00:00:00Z"
    info = wire.decode(StreamInfo, STREAM | {"state": {"messages": 0, "first_ts": zero, "last_ts": zero}})
    assert (info.state.first_time, info.state.last_time, info.state.subjects) == (None, None, {})
    assert info.state.deleted == ()


def test_what_the_server_leaves_out_is_none_of_it() -> None:
    """nats-server omits what is zero, empty or false."""
    state = wire.decode(StreamInfo, {"config": STREAM_CONFIG, "state": {}}).state
    assert (state.messages, state.bytes, state.first_sequence, state.last_sequence) == (0, 0, 0, 0)
    assert (state.consumers, state.deleted_count, state.subject_count) == (0, 0, 0)
    bare = {name: CONSUMER[name] for name in ("stream_name", "name", "config")} | {"delivered": {}}
    consumer = wire.decode(ConsumerInfo, bare)
    for position in (consumer.delivered, consumer.ack_floor):
        assert (position.consumer_sequence, position.stream_sequence) == (0, 0)
    assert (consumer.ack_pending, consumer.redelivered, consumer.waiting_pulls, consumer.pending) == (0, 0, 0, 0)
    assert (consumer.is_paused, consumer.push_bound) == (False, False)
    account = wire.decode(AccountInfo, {})
    assert (account.memory, account.storage, account.streams, account.consumers) == (0, 0, 0, 0)
    ack = wire.decode(PubAck, {"stream": "S"})
    assert (ack.sequence, ack.duplicate) == (0, False)


def test_each_info_has_an_extra_of_its_own() -> None:
    assert AccountInfo().extra == {}
    assert AccountInfo().extra is not AccountInfo().extra


def test_a_consumer_info_is_read_whole() -> None:
    info = wire.decode(ConsumerInfo, CONSUMER)
    assert (info.stream_name, info.name, info.config.durable_name, info.config.ack_wait_s) == ("S", "c", "c", 30)
    assert (info.delivered.consumer_sequence, info.delivered.stream_sequence) == (11, 14)
    assert (info.ack_floor.consumer_sequence, info.ack_floor.stream_sequence) == (9, 12)
    assert (info.ack_pending, info.redelivered, info.waiting_pulls, info.pending) == (2, 1, 3, 40)
    assert (info.is_paused, info.pause_remaining_s, info.push_bound) == (True, 1.5, True)
    assert info.delivered.extra == {"last_active": STAMP}
    assert info.extra == {"priority_groups": [{"group": "jobs"}]}


def test_infos_survive_pickle() -> None:
    for kind, fields in ((StreamInfo, STREAM), (ConsumerInfo, CONSUMER), (PubAck, {"stream": "S", "seq": 1})):
        info = wire.decode(kind, fields)
        assert pickle.loads(pickle.dumps(info)) == info
    message = StoredMessage.from_reply("S", _stored())
    assert pickle.loads(pickle.dumps(message)) == message


@pytest.mark.parametrize("name", ["nb\u00a0x", "thin\u2009x", "vt\x0bx", "nel\x85x"])
def test_a_name_the_server_accepted_can_be_read(name: str) -> None:
    # nats-server 2.15.1 creates all of these; one such stream must not hide all others from a listing.
    assert wire.decode(StreamInfo, STREAM | {"config": STREAM_CONFIG | {"name": name}}).config.name == name


def test_the_account_tells_its_api_level() -> None:
    info = wire.decode(
        AccountInfo,
        {
            "memory": 1,
            "storage": 2,
            "reserved_memory": 3,
            "streams": 8,
            "consumers": 7,
            "limits": {"max_memory": -1, "max_ack_pending": -1},
            "api": {"level": 5, "total": 25, "errors": 4},
            "domain": "hub",
            "tiers": {"R1": {"memory": 0}},
        },
    )
    assert (info.memory, info.storage, info.streams, info.consumers, info.domain) == (1, 2, 8, 7, "hub")
    assert info.api_level == 5
    assert info.extra["reserved_memory"] == 3


def test_the_limits_of_an_account_and_of_its_tiers_are_typed() -> None:
    limits = {
        "max_memory": 1,
        "max_storage": 2,
        "max_streams": 3,
        "max_consumers": 4,
        "max_ack_pending": 5,
        "memory_max_stream_bytes": 6,
        "storage_max_stream_bytes": 7,
        "max_bytes_required": True,
        "new": 8,
    }
    tier = {"memory": 9, "storage": 10, "streams": 11, "consumers": 12, "limits": limits, "reserved_storage": 13}
    info = wire.decode(AccountInfo, {"limits": limits, "tiers": {"R1": tier, "R3": {}}})
    expected = AccountLimits(
        max_memory=1,
        max_storage=2,
        max_streams=3,
        max_consumers=4,
        max_ack_pending=5,
        max_stream_memory=6,
        max_stream_storage=7,
        is_max_bytes_required=True,
        extra={"new": 8},
    )
    assert info.limits == expected
    assert info.tiers == {
        "R1": AccountTier(
            memory=9, storage=10, streams=11, consumers=12, limits=expected, extra={"reserved_storage": 13}
        ),
        "R3": AccountTier(),
    }
    assert wire.decode(AccountInfo, {}).limits.max_streams == -1
    assert wire.decode(AccountInfo, {}).tiers == {}


def test_a_server_before_api_levels_has_level_zero() -> None:
    assert AccountInfo().api_level == 0
    assert wire.decode(AccountInfo, {"api": {"total": 3, "errors": 0}}).api_level == 0
    assert wire.decode(AccountInfo, {"api": {"level": "many"}}).api_level == 0


# ---- messages in JSON ----------------------------------------------------------------------------------------------


def test_a_message_in_json_is_decoded() -> None:
    block = b"NATS/1.0\r\nA: 1\r\nA: 2\r\nNats-Msg-Id: x\r\n\r\n"
    data = bytes(range(256))
    reply = _stored(data=base64.b64encode(data).decode(), hdrs=base64.b64encode(block).decode())
    message = StoredMessage.from_reply("S", reply)
    assert (message.stream, message.subject, message.sequence) == ("S", "s.1", 4)
    assert message.timestamp == MOMENT
    assert message.data == data
    assert message.headers.multi_items() == [("A", "1"), ("A", "2"), ("Nats-Msg-Id", "x")]


@pytest.mark.parametrize("sequence", [0, 2**64 - 1])
def test_a_message_in_json_has_any_sequence_that_the_server_can_count(sequence: int) -> None:
    assert StoredMessage.from_reply("S", _stored(seq=sequence)).sequence == sequence


def test_a_message_in_json_may_lack_data_and_headers() -> None:
    message = StoredMessage.from_reply("S", _stored(data=...))
    assert message.data == b""
    assert len(message.headers) == 0


def test_headers_in_json_that_look_like_the_servers_stay() -> None:
    block = b"NATS/1.0\r\nNats-Sequence: 77\r\nNats-Stream: OTHER\r\n\r\n"
    message = StoredMessage.from_reply("S", _stored(hdrs=base64.b64encode(block).decode()))
    assert (message.stream, message.sequence) == ("S", 4)
    assert message.headers == {"Nats-Sequence": "77", "Nats-Stream": "OTHER"}


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"message": None},
        {"message": []},
        {"message": "x"},
        _stored(time=...),
        _stored(time=None),
        _stored(time="yesterday"),
        _stored(time="2026-02-30T00:00:00Z"),
        _stored(time="0001-01-01T00:00:00Z"),
        _stored(seq=...),
        _stored(seq="x"),
        _stored(seq=None),
        _stored(seq=-1),
        _stored(seq=2**64),
        _stored(seq=True),
        _stored(subject=...),
        _stored(data="a"),
        _stored(data=5),
        _stored(data="not base64!!"),
        _stored(data="eA==\n"),
        _stored(hdrs="a"),
        _stored(hdrs=base64.b64encode(b"NATS/1.0\r\n\r\n").decode() + "\n"),
        _stored(hdrs=5),
    ],
    ids=str,
)
def test_a_message_in_json_that_cannot_be_read_is_a_protocol_error(reply: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        StoredMessage.from_reply("S", reply)


def test_a_message_can_be_read_whatever_block_its_publisher_wrote() -> None:
    # The server does not look inside: nobody could get such a message, or list what is behind it.
    for begin in (b"HTTP/1.1\r\n", b"NATS/1.0\r\nno colon\r\n", b"NATS/1.0 404 Not Found\r\n"):
        own = begin + "Größe: 1\r\n".encode()
        stored = StoredMessage.from_reply("S", _stored(hdrs=base64.b64encode(own + b"\r\n").decode()))
        direct = _direct(own + _place() + b"\r\n", b"x")
        assert stored.headers.multi_items() == [("Größe", "1")]
        assert direct == stored


def test_a_direct_message_is_found_behind_a_block_that_is_not_closed() -> None:
    message = _direct(b"NATS/1.0\r\nX: y" + _place() + b"\r\n", b"x")
    assert (message.stream, message.subject, message.sequence) == ("S", "s.1", 4)


# ---- messages fetched directly -------------------------------------------------------------------------------------


def test_a_direct_message_is_told_from_its_headers_which_are_taken_off() -> None:
    message = _direct(b"NATS/1.0\r\n" + _place() + b"\r\n", b"\x00payload")
    assert (message.stream, message.subject, message.sequence) == ("S", "s.1", 4)
    assert message.timestamp == MOMENT
    assert message.data == b"\x00payload"
    assert len(message.headers) == 0


def test_the_headers_of_a_direct_message_itself_are_kept() -> None:
    message = _direct(b"NATS/1.0\r\nA: 1\r\nA: 2\r\nNats-Msg-Id: x\r\nKV-Operation: DEL\r\n" + _place() + b"\r\n")
    assert message.headers.multi_items() == [("A", "1"), ("A", "2"), ("Nats-Msg-Id", "x"), ("KV-Operation", "DEL")]


def test_the_headers_of_a_batch_are_taken_off_too() -> None:
    block = b"NATS/1.0\r\nA: 1\r\n" + _place() + b"Nats-Num-Pending: 3\r\nNats-Last-Sequence: 2\r\n\r\n"
    assert _direct(block).headers == {"A": "1"}


def test_reading_a_direct_message_leaves_the_received_one_as_it_was() -> None:
    received = CoreMessage("_INBOX.x.1", b"", None, b"NATS/1.0\r\n" + _place() + b"\r\n", None)
    assert received.headers["Nats-Sequence"] == "4"
    StoredMessage.from_direct(received)
    assert StoredMessage.from_direct(received).sequence == 4
    assert received.headers["Nats-Sequence"] == "4"


def test_the_servers_headers_win_over_the_same_names_in_the_message() -> None:
    # Measured on nats-server 2.15.1: its headers are appended behind the message's own. Whatever was republished
    # from another stream carries all of these.
    block = (
        b"NATS/1.0\r\nNats-Sequence: 77\r\nNats-Subject: elsewhere\r\nNats-Stream: OTHER\r\n"
        b"Nats-Time-Stamp: 2020-01-01T00:00:00Z\r\n" + _place() + b"\r\n"
    )
    message = _direct(block)
    assert (message.stream, message.subject, message.sequence) == ("S", "s.1", 4)
    assert message.timestamp == MOMENT
    assert message.headers == {
        "Nats-Sequence": "77",
        "Nats-Subject": "elsewhere",
        "Nats-Stream": "OTHER",
        "Nats-Time-Stamp": "2020-01-01T00:00:00Z",
    }


def test_another_spelling_of_the_servers_headers_belongs_to_the_message() -> None:
    message = _direct(b"NATS/1.0\r\nnats-stream: low\r\nNATS-SEQUENCE: 9\r\n" + _place() + b"\r\n")
    assert (message.stream, message.sequence) == ("S", 4)
    assert message.headers.multi_items() == [("nats-stream", "low"), ("NATS-SEQUENCE", "9")]


def test_both_ways_of_getting_a_message_agree_on_its_headers() -> None:
    own = b"Nats-Stream: OTHER\r\nNats-Last-Sequence: 76\r\nnats-subject: low\r\nA: 1\r\n"
    direct = _direct(b"NATS/1.0\r\n" + own + _place() + b"\r\n", b"x")
    stored = StoredMessage.from_reply("S", _stored(hdrs=base64.b64encode(b"NATS/1.0\r\n" + own + b"\r\n").decode()))
    assert direct == stored
    assert direct.raw_headers == stored.raw_headers


def test_no_such_message_is_not_found() -> None:
    with pytest.raises(MessageNotFound) as failure:
        _direct(b"NATS/1.0 404 Message Not Found\r\n\r\n")
    assert (failure.value.code, failure.value.err_code) == (404, 10037)
    assert failure.value.description == "message not found"


@pytest.mark.parametrize(
    ("line", "code", "description"),
    [
        (b"408 Empty Request", 408, "empty request"),
        (b"408 Bad Request", 408, "bad request"),
        (b"408 Malformed Request", 408, "malformed request"),
        (b"412 Required Api Level", 412, "required api level"),
        (b"413 Too Many Results", 413, "too many results"),
    ],
)
def test_another_status_is_a_server_error_with_its_words(line: bytes, code: int, description: str) -> None:
    with pytest.raises(ServerError) as failure:
        _direct(b"NATS/1.0 " + line + b"\r\n\r\n")
    assert type(failure.value) is ServerError
    assert (failure.value.code, failure.value.description) == (code, description)


@pytest.mark.parametrize("missing", ["Nats-Stream", "Nats-Subject", "Nats-Sequence", "Nats-Time-Stamp"])
def test_a_direct_message_without_its_place_names_what_is_missing(missing: str) -> None:
    lines = [line for line in _place().split(b"\r\n") if not line.startswith(missing.encode() + b":")]
    with pytest.raises(ProtocolError, match=missing):
        _direct(b"NATS/1.0\r\n" + b"\r\n".join(lines) + b"\r\n")


def test_a_direct_message_without_any_headers_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="Nats-Stream"):
        StoredMessage.from_direct(CoreMessage("_INBOX.x.1", b"", None, None, None))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"Nats-Sequence: 4", b"Nats-Sequence: four"),
        (b"Nats-Sequence: 4", b"Nats-Sequence: "),
        (STAMP.encode(), b"yesterday"),
        (STAMP.encode(), b"2026-02-30T00:00:00Z"),
        (STAMP.encode(), b"0001-01-01T00:00:00Z"),
    ],
)
def test_a_direct_message_with_an_unreadable_place_is_a_protocol_error(before: bytes, after: bytes) -> None:
    with pytest.raises(ProtocolError):
        _direct(b"NATS/1.0\r\n" + _place().replace(before, after) + b"\r\n")
