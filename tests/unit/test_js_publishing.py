from __future__ import annotations

import re
from typing import Any

import pytest
from support.connections import connected

from jetspark.core.headers import Headers, encode
from jetspark.core.message import CoreMessage
from jetspark.errors import (
    ConfigError,
    ConnectionClosed,
    ConnectionLost,
    InvalidHeader,
    JetSparkError,
    JetStreamNotEnabled,
    JetStreamUnavailable,
    ProtocolError,
    RequestTimeout,
    ServerError,
    WrongLastSequence,
)
from jetspark.jetstream.info import PubAck
from jetspark.jetstream.operations import Api, Operation, Request
from jetspark.jetstream.publishing import (
    Expect,
    check_batch_id,
    header_block,
    may_be_stored,
    publish,
    publish_headers,
    publish_with_ttl,
    read_plain_acks,
    read_pub_ack,
)


def _headers(
    headers: Any = None, *, msg_id: Any = None, expect: Expect | None = None, ttl_s: Any = None
) -> list[tuple[str, str]]:
    return Headers(publish_headers(headers, msg_id, expect, ttl_s)).multi_items()


def _ack(data: bytes, raw_headers: bytes | None = None) -> PubAck:
    return read_pub_ack(CoreMessage("_INBOX.x.1", data, None, raw_headers, None))


# ---- headers -------------------------------------------------------------------------------------------------------


def test_a_plain_publish_has_no_headers_at_all() -> None:
    assert publish_headers(None, None, None, None) is None


def test_the_callers_headers_go_out_as_they_are() -> None:
    assert _headers({"A": "1", "b": ["2", "3"]}) == [("A", "1"), ("b", "2"), ("b", "3")]
    assert _headers([("A", "1"), ("a", "2"), ("A", "3")]) == [("A", "1"), ("A", "3"), ("a", "2")]
    assert _headers(Headers({"A": "1"})) == [("A", "1")]
    assert _headers({}) == []


def test_the_callers_headers_are_not_changed() -> None:
    mine = Headers({"A": "1"})
    plain = {"A": "1"}
    for given in (mine, plain):
        publish_headers(given, "id", Expect(stream="S"), 5)
    assert mine == {"A": "1"}
    assert plain == {"A": "1"}


def test_everything_at_once_is_a_block_that_can_be_sent() -> None:
    expect = Expect(stream="S", last_sequence=9, last_subject_sequence=0, last_subject_sequence_subject="s.*.total")
    block = encode(publish_headers({"A": "1"}, "id-1", expect, 60))
    assert block == (
        b"NATS/1.0\r\nA: 1\r\nNats-Msg-Id: id-1\r\nNats-TTL: 60s\r\nNats-Expected-Stream: S\r\n"
        b"Nats-Expected-Last-Sequence: 9\r\nNats-Expected-Last-Subject-Sequence: 0\r\n"
        b"Nats-Expected-Last-Subject-Sequence-Subject: s.*.total\r\n\r\n"
    )


def test_arguments_replace_headers_of_the_same_meaning_in_any_spelling() -> None:
    given = {"nats-msg-id": "old", "Nats-TTL": "1s", "Nats-Expected-Stream": "OLD"}
    assert sorted(_headers(given, msg_id="new", ttl_s=5, expect=Expect(stream="NEW"))) == [
        ("Nats-Expected-Stream", "NEW"),
        ("Nats-Msg-Id", "new"),
        ("Nats-TTL", "5s"),
    ]


@pytest.mark.parametrize(
    ("given", "beside"),
    [
        ({"headers": {"A": "1"}}, ("A", "1")),
        ({"expect": Expect(last_subject_sequence=0)}, ("Nats-Expected-Last-Subject-Sequence", "0")),
        ({"ttl_s": 5}, ("Nats-TTL", "5s")),
    ],
)
def test_a_message_id_goes_out_beside_any_other_option(given: dict[str, Any], beside: tuple[str, str]) -> None:
    assert sorted(_headers(msg_id="id", **given)) == sorted([beside, ("Nats-Msg-Id", "id")])


def test_a_block_is_encoded_headers() -> None:
    assert header_block({"A": "1"}) == b"NATS/1.0\r\nA: 1\r\n\r\n"


@pytest.mark.parametrize("headers", [{"A": "1\r\nB: 2"}, {"A:": "1"}, {"": "1"}, {"A": 5}])
def test_headers_that_would_break_the_frame_are_refused(headers: Any) -> None:
    with pytest.raises(InvalidHeader):
        publish_headers(headers, None, None, None)


# ---- the header that stops a stream --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["Nats-Expected-Last-Msg-Id", "nats-expected-last-msg-id", "NATS-EXPECTED-LAST-MSG-ID"]
)
@pytest.mark.parametrize("value", ["x", "", ["a", "b"]])
def test_the_header_that_stops_a_replicated_stream_is_refused_in_any_spelling(name: str, value: Any) -> None:
    # Only the first spelling is dangerous; whoever writes another means the same, and would be silently ignored.
    with pytest.raises(ConfigError, match=r"Nats-Expected-Last-Msg-Id: not sent, .* use expect=Expect"):
        publish_headers({"A": "1", name: value}, None, None, None)
    with pytest.raises(ConfigError, match="Nats-Expected-Last-Msg-Id"):
        publish_headers({name: value}, "id", Expect(stream="S"), 5)
    with pytest.raises(ConfigError, match="Nats-Expected-Last-Msg-Id"):
        header_block({"A": "1", name: value})
    if isinstance(value, str):
        with pytest.raises(ConfigError, match="Nats-Expected-Last-Msg-Id"):
            publish_headers([("A", "1"), (name, value)], None, None, None)


def test_headers_with_similar_names_are_fine() -> None:
    names = ["Nats-Expected-Last-Msg-Id2", "X-Nats-Expected-Last-Msg-Id", "Nats-Expected-Last-Sequence"]
    assert [name for name, _ in _headers(dict.fromkeys(names, "1"))] == names
    assert header_block(dict.fromkeys(names, "1")) == encode(dict.fromkeys(names, "1"))


# ---- message ids ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("msg_id", ["a", "order-17", "0", "größe", "with space", "x" * 500])
def test_a_message_id_is_sent_as_it_is(msg_id: str) -> None:
    assert _headers(msg_id=msg_id) == [("Nats-Msg-Id", msg_id)]


def test_an_empty_message_id_is_refused() -> None:
    with pytest.raises(ConfigError, match=re.escape("msg_id='': expected a text, or None for no deduplication")):
        publish_headers(None, "", None, None)


@pytest.mark.parametrize("msg_id", [" ", "\t ", " a", "\ta"])
def test_a_message_id_that_would_lose_its_blanks_is_refused(msg_id: str) -> None:
    # A header drops leading blanks: " " would deduplicate nothing, and " a" would be taken for a duplicate of "a".
    with pytest.raises(ConfigError, match="msg_id"):
        publish_headers(None, msg_id, None, None)


@pytest.mark.parametrize("msg_id", ["a\r\nb", "a\n", 5, b"id"])
def test_a_message_id_that_is_no_header_value_is_refused(msg_id: Any) -> None:
    with pytest.raises(ConfigError):
        publish_headers(None, msg_id, None, None)


# ---- time to live --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ttl_s", "text"), [(1, "1s"), (1.0, "1s"), (60, "60s"), (3600.0, "3600s"), (10**9, "1000000000s")]
)
def test_a_ttl_is_sent_in_whole_seconds(ttl_s: float, text: str) -> None:
    assert _headers(ttl_s=ttl_s) == [("Nats-TTL", text)]


@pytest.mark.parametrize(("ttl_s", "text"), [(1.2, "2s"), (1.5, "2s"), (2.5, "3s"), (3.5, "4s"), (59.999, "60s")])
def test_a_message_never_goes_before_its_ttl(ttl_s: float, text: str) -> None:
    assert _headers(ttl_s=ttl_s) == [("Nats-TTL", text)]


@pytest.mark.parametrize("ttl_s", [0, 0.0, 0.5, 0.999, -1, -5.5, float("-inf")])
def test_a_ttl_below_one_second_is_refused(ttl_s: float) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"ttl={ttl_s}: expected seconds of 1 or more")):
        publish_headers(None, None, None, ttl_s)


@pytest.mark.parametrize("ttl_s", [float("nan"), float("inf"), "5"])
def test_a_ttl_that_is_no_number_of_seconds_is_refused(ttl_s: Any) -> None:
    with pytest.raises(ConfigError, match="ttl="):
        publish_headers(None, None, None, ttl_s)


# ---- expectations --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expect", "headers"),
    [
        (Expect(), []),
        (Expect(stream="S"), [("Nats-Expected-Stream", "S")]),
        (Expect(last_sequence=0), [("Nats-Expected-Last-Sequence", "0")]),
        (Expect(last_sequence=2**63), [("Nats-Expected-Last-Sequence", "9223372036854775808")]),
        (Expect(last_subject_sequence=0), [("Nats-Expected-Last-Subject-Sequence", "0")]),
        (
            Expect(last_subject_sequence=7, last_subject_sequence_subject="a.>"),
            [
                ("Nats-Expected-Last-Subject-Sequence", "7"),
                ("Nats-Expected-Last-Subject-Sequence-Subject", "a.>"),
            ],
        ),
    ],
)
def test_an_expectation_is_sent_in_the_servers_spelling(expect: Expect, headers: list[tuple[str, str]]) -> None:
    assert _headers(expect=expect) == headers


def test_a_subject_to_look_at_needs_a_sequence_to_find_there() -> None:
    expected = "last_subject_sequence_subject: expected last_subject_sequence beside it"
    with pytest.raises(ConfigError, match=f"^{expected}$"):
        Expect(last_subject_sequence_subject="a")
    with pytest.raises(ConfigError, match=f"^{expected}$"):
        Expect(last_sequence=5, last_subject_sequence_subject="a")


@pytest.mark.parametrize("name", ["last_sequence", "last_subject_sequence"])
def test_an_expected_sequence_is_zero_or_more(name: str) -> None:
    # nats-server 2.15.1 answers -1 with "wrong last sequence", whatever the last one is: a conflict that reading
    # again never solves.
    wrong: dict[str, Any] = {name: -1}
    with pytest.raises(ConfigError, match=f"{name}=-1"):
        Expect(**wrong)


@pytest.mark.parametrize("name", ["stream", "last_subject_sequence_subject"])
def test_an_expected_name_is_a_text(name: str) -> None:
    wrong: dict[str, Any] = {"last_subject_sequence": 0, name: 5}
    with pytest.raises(ConfigError, match=f"{name}=5: expected a str"):
        Expect(**wrong)


def test_what_is_expected_is_an_expectation() -> None:
    wrong: Any = {"stream": "S"}
    with pytest.raises(ConfigError, match=re.escape("expect={'stream': 'S'}: expected an Expect")):
        publish_headers(None, None, wrong, None)


def test_an_expectation_does_not_change_and_takes_keywords_only() -> None:
    with pytest.raises(AttributeError):
        Expect().stream = "S"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Expect("S")  # type: ignore[call-arg]


# ---- batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_id", ["a", "aZ0_-", "x" * 64])
def test_an_id_of_a_batch_is_what_the_server_can_give_back(batch_id: str) -> None:
    assert check_batch_id(batch_id) == batch_id


@pytest.mark.parametrize("batch_id", ["", "x" * 65, "a.b", "a b", "ü", "a\n", None, 7])
def test_other_ids_are_refused(batch_id: Any) -> None:
    with pytest.raises(ConfigError, match=r"batch_id=.*: expected 1 to 64 of the characters"):
        check_batch_id(batch_id)


# ---- publishing ----------------------------------------------------------------------------------------------------


def _finish(operation: Operation[PubAck], data: bytes) -> PubAck:
    with pytest.raises(StopIteration) as finished:
        operation.send(CoreMessage("_INBOX.x.1", data, None, None, None))
    ack: PubAck = finished.value.value
    return ack


def test_a_publish_is_one_request_that_may_find_no_leader_and_ends_with_the_acknowledgement() -> None:
    operation = publish("a", b"x", {"A": "1"})
    assert next(operation) == Request("a", b"x", {"A": "1"}, may_be_leaderless=True)
    assert _finish(operation, b'{"stream":"S","seq":17}') == PubAck(stream="S", sequence=17)


def test_a_publish_with_a_ttl_asks_first_whether_the_server_knows_ttls() -> None:
    operation = publish_with_ttl(Api(connection=connected()), "a", b"x", {"Nats-TTL": "5s"})
    first = next(operation)
    assert isinstance(first, Request)
    assert first.subject == "$JS.API.INFO"
    info = b'{"memory":0,"storage":0,"streams":0,"consumers":0,"limits":{},"api":{"level":1,"total":0,"errors":0}}'
    second = operation.send(CoreMessage("_INBOX.x.1", info, None, None, None))
    assert second == Request("a", b"x", {"Nats-TTL": "5s"}, may_be_leaderless=True)
    assert _finish(operation, b'{"stream":"S","seq":17}') == PubAck(stream="S", sequence=17)


@pytest.mark.parametrize(
    ("error", "is_possible"),
    [
        (RequestTimeout("publish", 1.0), True),
        (RequestTimeout("publish", 1.0, was_sent=False), False),
        (ConnectionLost("cut"), True),
        (JetStreamUnavailable("a"), False),
        (ServerError(400, 10071, "wrong last sequence: 7"), False),
        (ConnectionClosed("closed"), False),
        (ConfigError("no"), False),
    ],
)
def test_only_what_was_sent_and_not_answered_may_be_stored(error: JetSparkError, is_possible: bool) -> None:
    assert may_be_stored(error) is is_possible


# ---- acknowledgements ----------------------------------------------------------------------------------------------


def test_an_acknowledgement_says_where_the_message_is() -> None:
    ack = _ack(b'{"stream":"S","seq":17}')
    assert ack == PubAck(stream="S", sequence=17)
    assert (ack.duplicate, ack.domain, ack.batch, ack.batch_size, ack.value) == (False, None, None, None, None)


def test_a_duplicate_has_the_sequence_of_the_first() -> None:
    ack = _ack(b'{"stream":"S","seq":17,"duplicate": true}')
    assert (ack.sequence, ack.duplicate) == (17, True)


def test_an_acknowledgement_tells_domain_batch_and_counter() -> None:
    ack = _ack(b'{"stream":"S","domain":"hub","seq":4,"batch":"B1","count":4,"val":"12","future":[1]}')
    assert (ack.domain, ack.batch, ack.batch_size, ack.value) == ("hub", "B1", 4, "12")
    assert ack.extra == {"future": [1]}


# ---- many acknowledgements together --------------------------------------------------------------------------------


def test_acknowledgements_of_any_streams_are_read_together() -> None:
    payloads = [b'{"stream":"A","seq":7}', b'{"stream":"B-2_c", "seq":0}', b'{"stream":"A","seq":%d}' % (10**19 - 1)]
    expected = [
        PubAck(stream="A", sequence=7),
        PubAck(stream="B-2_c", sequence=0),
        PubAck(stream="A", sequence=10**19 - 1),
    ]
    assert read_plain_acks(payloads) == expected
    assert repr(read_plain_acks(payloads)) == repr(expected)  # every field is there


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"}",
        b'{"stream":"A","seq":}',
        b'{"stream":"A","seq":2',
        b'{"stream":"A","seq":2]',
        b'{"stream":"A","seq":-2}',
        b'{"stream":"A","seq":+2}',
        b'{"stream":"A","seq":2_0}',
        b'{"stream":"A","seq": 2}',
        b'{"stream":"A","seq":2} ',
        b' {"stream":"A","seq":2}',
        b'{"stream":"A","seq":2}\n',
        b'\n{"stream":"A","seq":2}',
        b'{"stream":"A","seq":2}\n{"stream":"A","seq":3}',
        b'{"stream":"A","seq":\xd9\xa2}',
        b'{"stream":"A","seq":10000000000000000000}',
        b'{"stream":"","seq":2}',
        b'{"stream":"\xc3\xa4","seq":2}',
        b'{"stream":"A","seq":2,"duplicate":true}',
        b'{"stream":"A","domain":"hub","seq":2}',
        b'{"stream":"A","seq":2,"domain":"hub"}',
        b'{"stream":"A","seq":2,"val":"5"}',
        b'{"stream":"A","seq":2,"batch":"B","count":4}',
        b'{"error":{"code":503,"err_code":10077,"description":"maximum messages exceeded"},"stream":"A","seq":0}',
    ],
)
@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_that_has_another_form_is_read_together_with_no_other(payload: bytes, place: int) -> None:
    payloads = [b'{"stream":"A","seq":1}', b'{"stream":"A","seq":3}']
    payloads.insert(place, payload)
    assert read_plain_acks(payloads) is None


def test_two_halves_are_not_read_as_a_whole() -> None:
    assert read_plain_acks([b'{"stream":"A","seq":1', b'}{"stream":"A","seq":2}']) is None
    assert read_plain_acks([b'{"stream":"A","seq":1}\n{"stream":"A"', b',"seq":2}']) is None
    # As many complete ones as there are payloads, but not one in each.
    assert read_plain_acks([b'{"stream":"A","seq":1}\n{"stream":"A","seq":2}', b""]) is None


def test_sequences_beyond_a_floats_precision_are_exact() -> None:
    assert _ack(b'{"stream":"S","seq":18446744073709551615}').sequence == 2**64 - 1


@pytest.mark.parametrize(
    ("code", "err_code", "description", "kind"),
    [
        (400, 10071, "wrong last sequence: 7", WrongLastSequence),
        (400, 10164, "wrong last sequence", WrongLastSequence),
        (400, 10060, "expected stream does not match", ServerError),
        (503, 10076, "jetstream not enabled", JetStreamNotEnabled),
        (503, 10077, "maximum messages exceeded", ServerError),
        (400, 10054, "message size exceeds maximum allowed", ServerError),
    ],
)
def test_a_message_that_was_not_stored_raises_the_servers_error(
    code: int, err_code: int, description: str, kind: type
) -> None:
    body = f'{{"error":{{"code":{code},"err_code":{err_code},"description":"{description}"}},"stream":"S","seq":0}}'
    with pytest.raises(ServerError) as failure:
        _ack(body.encode())
    assert type(failure.value) is kind
    assert (failure.value.code, failure.value.err_code, failure.value.description) == (code, err_code, description)


def test_an_error_with_a_status_beside_it_is_still_the_error() -> None:
    with pytest.raises(ServerError, match="too many requests"):
        _ack(
            b'{"error":{"code":429,"err_code":10167,"description":"too many requests"},"stream":"S","seq":0}',
            b"NATS/1.0 429 Too Many Requests\r\n\r\n",
        )


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"+OK",
        b"[]",
        b"{}",
        b'{"seq":5}',
        b'{"stream":"S"}',
        b'{"stream":"S","seq":null}',
        b'{"stream":null,"seq":5}',
    ],
)
def test_what_does_not_say_where_the_message_is_acknowledges_nothing(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        _ack(data)


def test_an_empty_reply_with_a_status_acknowledges_nothing() -> None:
    with pytest.raises((ProtocolError, ServerError)):
        _ack(b"", b"NATS/1.0 503\r\nNats-Subject: orders\r\n\r\n")


@pytest.mark.parametrize("msg_id", ["a", "evt-1", "a:b/c.d", "~!", "with a blank", "ä", "x" * 300])
def test_a_message_id_alone_is_encoded_as_among_other_headers(msg_id: str) -> None:
    alone, among = publish_headers(None, msg_id, None, None), publish_headers({}, msg_id, None, None)
    assert alone is not None
    assert among is not None
    assert encode(alone) == encode(among) == f"NATS/1.0\r\nNats-Msg-Id: {msg_id}\r\n\r\n".encode()
