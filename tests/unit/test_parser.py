from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspark.core import parser as parser_module
from jetspark.core.message import AnswerRun, CoreMessage
from jetspark.core.parser import MAX_LINE_BYTES, MAX_MESSAGE_BYTES, Err, HandshakeReader, Info, Parser, Ping, Pong
from jetspark.errors import ProtocolError

Seen = tuple[str, bytes, bytes | None, bytes | None]
"""Subject, payload, reply, header block."""

BLOCK = b"NATS/1.0\r\nA: 1\r\n\r\n"


class Destination:
    is_inbox = False
    message_class: type[CoreMessage] | None = None
    counted_messages = counted_bytes = 0

    def __init__(self) -> None:
        self.arrived: list[CoreMessage] = []
        self.answer_runs: deque[AnswerRun] | None = None

    @property
    def seen(self) -> list[Seen]:
        return [(each.subject, each.data, each.raw_reply, each.raw_headers) for each in self.arrived]


def parser_for(*sids: bytes) -> tuple[Parser, dict[bytes, Destination]]:
    routes = {sid: Destination() for sid in sids}
    return Parser(routes), routes


def read(stream: bytes, cuts: Iterable[int] = (), *, careful: bool = False) -> tuple[list[object], list[list[Seen]]]:
    """Control frames, and what subscriptions 1 and 2 got, from a stream cut into chunks."""
    parser, routes = parser_for(b"1", b"2")
    if careful:
        parser._skip_chunks = 1 << 30
    for chunk in chunks(stream, cuts):
        parser.receive_data(chunk)
    assert parser._tail == []
    return list(parser.control), [destination.seen for destination in routes.values()]


def chunks(stream: bytes, cuts: Iterable[int]) -> Iterator[bytes]:
    begin = 0
    for cut in [*sorted(cuts), len(stream)]:
        yield stream[begin:cut]
        begin = cut


# ---- every frame ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"PING", [Ping()]),
        (b"PONG", [Pong()]),
        (b"+OK", []),
        (b'INFO {"server_name":"a","max_payload":1}', [Info({"server_name": "a", "max_payload": 1})]),
        (b'INFO {"a":1} ', [Info({"a": 1})]),
        (b"-ERR 'Authorization Violation'", [Err("Authorization Violation")]),
        (b"-ERR bare words", [Err("bare words")]),
        (b"-ERR 'Permissions Violation for Publish to \"a\"'", [Err('Permissions Violation for Publish to "a"')]),
        (b"-ERR '\xff'", [Err("\ufffd")]),
    ],
)
def test_each_control_frame_is_read(line: bytes, expected: list[object]) -> None:
    stream = line + b"\r\n"
    for cuts in ((), range(len(stream))):
        assert read(stream, cuts) == (expected, [[], []])


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (b"MSG a.b 1 5\r\nhello\r\n", ("a.b", b"hello", None, None)),
        (b"MSG a.b 1 0\r\n\r\n", ("a.b", b"", None, None)),
        (b"MSG a.b 1 _INBOX.x 2\r\nhi\r\n", ("a.b", b"hi", b"_INBOX.x", None)),
        (b"MSG a 1 005\r\nhello\r\n", ("a", b"hello", None, None)),
        (b"HMSG a 1 %d %d\r\n%bhi\r\n" % (len(BLOCK), len(BLOCK) + 2, BLOCK), ("a", b"hi", None, BLOCK)),
        (b"HMSG a 1 r %d %d\r\n%bhi\r\n" % (len(BLOCK), len(BLOCK) + 2, BLOCK), ("a", b"hi", b"r", BLOCK)),
        (b"HMSG a 1 %d %d\r\n%b\r\n" % (len(BLOCK), len(BLOCK), BLOCK), ("a", b"", None, BLOCK)),
        (b"HMSG a 1 0 2\r\nhi\r\n", ("a", b"hi", None, None)),
        ("MSG é.日本 1 0\r\n\r\n".encode(), ("é.日本", b"", None, None)),
        (b"MSG a\xff 1 0\r\n\r\n", ("a\udcff", b"", None, None)),
    ],
)
def test_each_message_frame_is_read(frame: bytes, expected: Seen) -> None:
    for cuts in ((), range(len(frame))):
        assert read(frame, cuts) == ([], [[expected], []])


@pytest.mark.parametrize(
    "payload",
    [
        b"\r\n",
        b"\r",
        b"\n",
        b"\r\n\r\n",
        b"a\r\nb",
        b"PING\r\n",
        b"\r\nPING\r\n",
        b"MSG a 1 2\r\nhi\r\n",
        b"MSG a 1 2\r\nhi",
        b"-ERR 'x'\r\n",
        b"ends with \r",
        b"\nbegins with",
        bytes(range(256)),
    ],
)
def test_a_payload_that_looks_like_frames_is_a_payload(payload: bytes) -> None:
    message = b"MSG a 1 %d\r\n%b\r\n" % (len(payload), payload)
    stream = message + b"PONG\r\n" + message
    for cuts in ((), range(len(stream))):
        assert read(stream, cuts) == ([Pong()], [[("a", payload, None, None)] * 2, []])


def test_messages_for_an_unknown_subscription_are_dropped() -> None:
    stream = b"MSG a 7 2\r\nhi\r\n" * 2 + b"MSG a 1 1\r\nx\r\n" + b"HMSG a 7 0 2\r\nhi\r\n" + b"MSG a 2 1\r\ny\r\n"
    for cuts in ((), range(len(stream))):
        assert read(stream, cuts) == ([], [[("a", b"x", None, None)], [("a", b"y", None, None)]])


def test_touched_names_each_subscription_that_got_something() -> None:
    parser, routes = parser_for(b"1", b"2", b"3")
    parser.receive_data(b"MSG a 2 0\r\n\r\nMSG a 2 0\r\n\r\nMSG a 1 0\r\n\r\nMSG a 7 0\r\n\r\nMSG a 1 0\r\n\r\n")
    assert {id(each) for each in parser.touched} == {id(routes[b"1"]), id(routes[b"2"])}


def test_a_message_class_and_its_client_are_the_drivers_choice() -> None:
    class Mine(CoreMessage):
        pass

    destination, client = Destination(), object()
    parser = Parser({b"1": destination}, Mine, client)
    parser.receive_data(b"MSG a 1 0\r\n\r\nHMSG a 1 0 0\r\n\r\n")
    assert [(type(each), each._client) for each in destination.arrived] == [(Mine, client)] * 2


def test_a_route_may_have_a_message_class_of_its_own() -> None:
    class Special(CoreMessage):
        pass

    parser, routes = parser_for(b"1", b"2")
    routes[b"2"].message_class = Special
    for _ in range(2):  # the loop for plain messages reads the first chunk, the careful one takes over in it
        parser.receive_data(b"MSG a 1 0\r\n\r\nMSG a 2 r 0\r\n\r\nMSG a 1 0\r\n\r\nHMSG a 2 0 0\r\n\r\n")
    assert {type(each) for each in routes[b"1"].arrived} == {CoreMessage}
    assert [type(each) for each in routes[b"2"].arrived] == [Special] * 4


# ---- removed routes, bounded memory of lines and subjects ----------------------------------------------------------


@pytest.mark.parametrize("careful", [False, True])
def test_a_removed_route_gets_nothing_even_on_a_line_seen_before(careful: bool) -> None:
    parser, routes = parser_for(b"1", b"2")
    parser._skip_chunks = 1 << 30 if careful else 0
    parser.receive_data(b"MSG a 1 2\r\nhi\r\n")
    removed = routes.pop(b"1")
    parser.forget_routes()
    parser.receive_data(b"MSG a 1 2\r\nho\r\nMSG a 2 2\r\nhu\r\n")
    assert removed.seen == [("a", b"hi", None, None)]
    assert routes[b"2"].seen == [("a", b"hu", None, None)]


def test_a_route_removed_while_its_message_is_half_here_gets_nothing() -> None:
    parser, routes = parser_for(b"1")
    parser.receive_data(b"MSG a 1 2\r\nhi\r\nMSG a 1 2\r\nh")
    removed = routes.pop(b"1")
    parser.forget_routes()
    parser.receive_data(b"o\r\n")
    assert removed.seen == [("a", b"hi", None, None)]


def test_a_route_added_later_is_found_on_a_line_that_was_dropped_before() -> None:
    parser, routes = parser_for()
    parser.receive_data(b"MSG a 1 2\r\nhi\r\n")
    routes[b"1"] = Destination()
    parser.receive_data(b"MSG a 1 2\r\nho\r\n")
    assert routes[b"1"].seen == [("a", b"ho", None, None)]


@pytest.mark.parametrize("careful", [False, True])
def test_the_memory_of_lines_and_subjects_is_bounded(careful: bool) -> None:
    parser, routes = parser_for(b"1")
    parser._skip_chunks = 1 << 30 if careful else 0
    count = 2 * max(parser_module.MAX_KNOWN_LINES, parser_module.MAX_KNOWN_SUBJECTS) + 3
    largest_lines = largest_subjects = 0
    for number in range(count):
        parser.receive_data(b"MSG s.%d 1 1\r\nx\r\n" % number)
        largest_lines = max(largest_lines, len(parser._known_lines))
        largest_subjects = max(largest_subjects, len(parser._known_subjects))
    assert largest_lines == parser_module.MAX_KNOWN_LINES
    assert largest_subjects == parser_module.MAX_KNOWN_SUBJECTS
    assert [each.subject for each in routes[b"1"].arrived] == [f"s.{number}" for number in range(count)]


def test_lines_with_a_reply_or_for_nobody_are_not_remembered() -> None:
    parser, _ = parser_for(b"1")
    for number in range(10):
        parser.receive_data(b"MSG a 1 r.%d 1\r\nx\r\nMSG a 7 1\r\nx\r\n" % number)
    assert parser._known_lines == {}


def test_the_fast_loop_is_retried_after_a_bounded_number_of_chunks() -> None:
    parser, _ = parser_for(b"1")
    for _ in range(1000):
        parser.receive_data(b"PING\r\nPING\r\n")
        assert parser._skip_chunks <= parser_module.MAX_SKIPPED_CHUNKS


# ---- splits --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    wire: bytes
    control: object = None
    sid: int = 0
    seen: Seen | None = None


def message_frame(subject: str, sid: int, reply: bytes | None, headers: bytes | None, payload: bytes) -> Frame:
    address = b"%b %d" % (subject.encode(), sid) + (b" " + reply if reply else b"")
    if headers is None:
        wire = b"MSG %b %d\r\n%b\r\n" % (address, len(payload), payload)
    else:
        sizes = b"%d %d" % (len(headers), len(headers) + len(payload))
        wire = b"HMSG %b %b\r\n%b%b\r\n" % (address, sizes, headers, payload)
    return Frame(wire, sid=sid, seen=(subject, payload, reply, headers))


PAYLOADS = st.sampled_from([b"", b"x", b"\r\n", b"PING\r\n", b"MSG a 1 1\r\nx\r\n", b"\r", b"\n"]) | st.binary(
    max_size=40
)
MESSAGES = st.builds(
    message_frame,
    st.sampled_from(["a", "a.b", "é"]),
    st.sampled_from([1, 1, 2, 7]),
    st.sampled_from([None, None, b"_INBOX.r"]),
    st.none() | st.none() | st.just(BLOCK),
    PAYLOADS,
)
CONTROLS = st.sampled_from(
    [
        Frame(b"PING\r\n", Ping()),
        Frame(b"PONG\r\n", Pong()),
        Frame(b"+OK\r\n"),
        Frame(b"-ERR 'x'\r\n", Err("x")),
        Frame(b'INFO {"a":1}\r\n', Info({"a": 1})),
    ]
)
STREAMS = st.lists(MESSAGES | MESSAGES | MESSAGES | CONTROLS, max_size=12)


def meaning(frames: list[Frame]) -> tuple[list[object], list[list[Seen]]]:
    control = [frame.control for frame in frames if frame.control is not None]
    return control, [[frame.seen for frame in frames if frame.seen and frame.sid == sid] for sid in (1, 2)]


@settings(deadline=None, max_examples=200)
@given(STREAMS, st.data())
def test_no_split_of_a_stream_changes_what_comes_out(frames: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(frame.wire for frame in frames)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    expected = meaning(frames)
    assert read(stream) == expected
    assert read(stream, careful=True) == expected
    assert read(stream, cuts) == expected
    assert read(stream, cuts, careful=True) == expected
    assert read(stream, range(len(stream))) == expected


@pytest.mark.parametrize("more", [0, 1])
def test_a_line_of_a_message_has_a_bound_to_the_byte(more: int) -> None:
    subject = b"a" * (MAX_LINE_BYTES - len(b"MSG  1 2") + more)
    for cuts in ((), [len(subject) - 5]):
        parser, routes = parser_for(b"1")
        try:
            for chunk in chunks(b"MSG %b 1 2\r\nhi\r\n" % subject, cuts):
                parser.receive_data(chunk)
        except ProtocolError:
            pass
        assert len(routes[b"1"].arrived) == 1 - more


def test_whoever_gets_a_message_from_the_careful_reader_is_told() -> None:
    for frame in (b"MSG a 1 2\r\nhi\r\n", b"HMSG a 1 18 20\r\n" + BLOCK + b"hi\r\n"):
        parser, routes = parser_for(b"1", b"2")
        parser._skip_chunks = 1
        parser.receive_data(frame)
        assert parser.touched == [routes[b"1"]]


def test_what_the_last_call_read_has_a_size_with_what_was_kept_for_it() -> None:
    parser, _ = parser_for(b"1")
    assert parser.chunk_bytes == 0
    frame = b"MSG a 1 5\r\nhello\r\n"
    parser.receive_data(frame * 3 + frame[:4])
    assert parser.chunk_bytes == 3 * len(frame) + 4
    parser.receive_data(frame[4:] + frame)
    assert parser.chunk_bytes == 2 * len(frame)


def test_the_memory_of_lines_and_sizes_is_bounded_and_used_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parser_module, "MAX_KNOWN_LINES", 3)
    plain, replied = [], []
    parser, _ = parser_for(b"1")
    for subject in (b"a", b"b", b"c", b"d"):
        parser.receive_data(b"MSG %b 1 2\r\nhi\r\n" % subject)
        parser.receive_data(b"MSG %b 1 r 2\r\nhi\r\n" % subject)
        plain.append(len(parser._known_lines))
        replied.append(len(parser._known_beginnings))
    assert plain == replied == [1, 2, 3, 1]
    sizes = parser_module._Sizes()
    known = [(sizes[text], len(sizes)) for text in (b"1", b"20", b"300", b"x", b"+1", b"4000")]
    assert known == [(1, 1), (20, 2), (300, 3), (-1, 3), (-1, 3), (4000, 1)]


def test_a_stream_cut_once_at_any_place_reads_the_same() -> None:
    frames = [
        message_frame("a", 1, None, None, b"hello"),
        message_frame("a", 1, b"r", None, b"\r\n"),
        Frame(b"PING\r\n", Ping()),
        message_frame("b", 2, None, BLOCK, b"PONG\r\n"),
        message_frame("a", 1, None, None, b""),
    ]
    stream = b"".join(frame.wire for frame in frames)
    for cut in range(len(stream) + 1):
        assert read(stream, [cut]) == meaning(frames), cut


def test_a_large_payload_in_many_chunks_is_joined_once() -> None:
    payload = random.Random(1).randbytes(3_000_000)
    stream = b"MSG a 1 %d\r\n%b\r\nPING\r\n" % (len(payload), payload)
    assert read(stream, range(0, len(stream), 1000)) == ([Ping()], [[("a", payload, None, None)], []])


@pytest.mark.parametrize("frame", [b"MSG a 1 5\r\nhello\r\n", b"HMSG a 1 0 5\r\nhello\r\n"])
@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_message_waits_for_the_last_byte_of_its_line_break(frame: bytes, missing: int) -> None:
    parser, routes = parser_for(b"1")
    parser.receive_data(frame[:-missing])
    parser.receive_data(b"")
    assert routes[b"1"].arrived == []
    parser.receive_data(frame[-missing:] + b"PI")
    assert routes[b"1"].seen == [("a", b"hello", None, None)]
    parser.receive_data(b"NG\r")
    assert parser.control == []
    parser.receive_data(b"\n")
    assert parser.control == [Ping()]
    assert parser._tail == []


def test_an_empty_chunk_says_nothing() -> None:
    assert read(b"", [0, 0]) == ([], [[], []])


# ---- what is not NATS ----------------------------------------------------------------------------------------------

MALFORMED = [
    b"HELLO",
    b"",
    b" PING",
    b"PING ",
    b"ping",
    b"PIN",
    b"PINGS",
    b"+OKAY",
    b"-ERR",
    b"INFO",
    b"INFO ",
    b"INFO []",
    b"INFO 5",
    b"INFO {",
    b"INFO \xff",
    b"MSG",
    b"MSG ",
    b"MSGX a 1 0",
    b"MSG a",
    b"MSG a 1",
    b"MSG a 1 r 0 0",
    b"MSG a 1 x",
    b"MSG a 1 -1",
    b"MSG a 1 +1",
    b"MSG a 1 1_0",
    b"MSG a 1 1.0",
    b"MSG a 1 0x1",
    b"MSG a 1 \xb2",
    b"MSG a 1 1\r",
    b"MSG a 1 1 ",
    b"MSG a 1 1\t",
    b"MSG a 1 %d" % (MAX_MESSAGE_BYTES + 1),
    b"MSG a 1 99999999999999999999",
    b"HMSG",
    b"HMSG a 1 0",
    b"HMSG a 1 5 4",
    b"HMSG a 1 x 4",
    b"HMSG a 1 0 +4",
    b"HMSG a 1 1_0 20",
    b"HMSG a 1 r 0 0 0",
    b"HMSG a 1 0 %d" % (MAX_MESSAGE_BYTES + 1),
    b"HPUB a 0 0",
    b"HTTP/1.1 400 Bad Request",
    b"SSH-2.0-OpenSSH_9.6",
]


@pytest.mark.parametrize("line", MALFORMED)
@pytest.mark.parametrize("before", [b"", b"MSG a 1 2\r\nhi\r\n", b"PING\r\n"])
def test_a_malformed_line_is_a_protocol_error_however_it_is_cut(line: bytes, before: bytes) -> None:
    stream = before + line + b"\r\n\r\n"
    for cuts in ((), range(len(stream))):
        with pytest.raises(ProtocolError):
            read(stream, cuts)


def test_the_error_shows_the_beginning_of_what_came() -> None:
    with pytest.raises(ProtocolError, match=r"unknown operation: b'SSH-2.0-OpenSSH_9.6'"):
        read(b"SSH-2.0-OpenSSH_9.6\r\n")
    with pytest.raises(ProtocolError) as failure:
        read(b"X" * 100_000)
    assert len(str(failure.value)) < 200


def test_a_first_byte_no_frame_has_is_refused_without_a_line_break() -> None:
    for first in set(range(256)) - set(b"MHPI+-"):
        with pytest.raises(ProtocolError):
            parser_for(b"1")[0].receive_data(bytes([first]))


@pytest.mark.parametrize("frame", [b"MSG a 1 5\r\nhello", b"HMSG a 1 0 5\r\nhello"])
@pytest.mark.parametrize("after", [b"XX", b"\n\r", b"\rX", b"X\n", b"world\r\n"])
def test_a_payload_without_its_line_break_is_a_protocol_error(frame: bytes, after: bytes) -> None:
    for cuts in ((), range(len(frame + after))):
        with pytest.raises(ProtocolError, match="no line break after the 5 bytes"):
            read(frame + after, cuts)


def test_a_payload_shorter_than_announced_is_a_protocol_error_once_enough_follows() -> None:
    with pytest.raises(ProtocolError, match="no line break"):
        read(b"MSG a 1 5\r\nhi\r\nMSG a 1 2\r\nhi\r\n")


@pytest.mark.parametrize("chunk_bytes", [1000, 65_536])
@pytest.mark.parametrize("first", [b"M", b"MSG ", b"INFO {", b"-ERR ", b"H", b"P"])
def test_a_line_without_end_is_refused_at_its_bound(first: bytes, chunk_bytes: int) -> None:
    parser, _ = parser_for(b"1")
    parser.receive_data(first)
    fed = len(first)

    def feed_on() -> None:
        nonlocal fed
        while fed < 2 * MAX_LINE_BYTES:
            fed += chunk_bytes
            parser.receive_data(b"x" * chunk_bytes)

    with pytest.raises(ProtocolError, match="a line of over"):
        feed_on()
    assert MAX_LINE_BYTES < fed <= MAX_LINE_BYTES + chunk_bytes


@pytest.mark.parametrize("line_bytes", [MAX_LINE_BYTES - 1, MAX_LINE_BYTES, MAX_LINE_BYTES + 1, MAX_LINE_BYTES + 2])
def test_whether_a_line_is_too_long_does_not_depend_on_the_split(line_bytes: int) -> None:
    line = b'INFO {"a":"%b"}' % (b"x" * (line_bytes - 13))
    assert len(line) == line_bytes
    stream = line + b"\r\n"
    outcomes = []
    for cuts in ((), [10], [line_bytes], [line_bytes + 1], [10, line_bytes, line_bytes + 1]):
        try:
            outcomes.append(len(read(stream, cuts)[0]))
        except ProtocolError:
            outcomes.append(0)
    assert outcomes == [1 if line_bytes <= MAX_LINE_BYTES else 0] * len(outcomes)


def test_the_bound_of_a_line_is_counted_from_its_own_beginning() -> None:
    count = MAX_LINE_BYTES // len(b"PING\r\n")
    assert read(b"PING\r\n" * count + b"PONG\r\n", [6 * count + 3]) == ([*[Ping()] * count, Pong()], [[], []])


def test_the_largest_message_is_announced_without_error() -> None:
    parser, _ = parser_for(b"1")
    parser.receive_data(b"MSG a 1 %d\r\n" % MAX_MESSAGE_BYTES)
    assert parser._missing_bytes == MAX_MESSAGE_BYTES + 2


def test_a_server_may_have_payloads_of_64_mib_and_no_more() -> None:
    parser, _ = parser_for(b"1")
    parser.receive_data(b"HMSG a 1 20 %d\r\n" % (64 << 20))
    assert parser._missing_bytes == (64 << 20) + 2
    for line in (b"HMSG a 1 20 %d", b"MSG a 1 %d"):
        with pytest.raises(ProtocolError, match=r"not an? H?MSG line"):
            parser_for(b"1")[0].receive_data(line % (65 << 20) + b"\r\n")


@pytest.mark.parametrize(
    "fields",
    [b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}", b'{"a":' * 20_000 + b"1" + b"}" * 20_000, b'{"a":' + b"9" * 9999],
    ids=["deep lists", "deep objects", "long number"],
)
def test_json_that_would_exhaust_the_reader_is_a_protocol_error(fields: bytes) -> None:
    with pytest.raises(ProtocolError, match="INFO without a JSON object"):
        read(b"INFO " + fields + b"\r\n")


# ---- fuzz ----------------------------------------------------------------------------------------------------------

FUZZ_BYTES = 500_000
NATS_LIKE = b"MSG HMSG PING PONG INFO {}+OK-ERR 0123456789 ab.\r\n\r\n\r\n"


def valid_stream(chance: random.Random) -> bytes:
    wire = []
    for _ in range(chance.randrange(1, 30)):
        kind = chance.randrange(10)
        if kind == 0:
            wire.append(chance.choice([b"PING\r\n", b"PONG\r\n", b"+OK\r\n", b"-ERR 'x y'\r\n"]))
        elif kind == 1:
            wire.append(b"INFO %b\r\n" % json.dumps({"a": chance.random(), "b": ["c"]}).encode())
        else:
            reply = chance.choice([None, b"r.1"])
            headers = chance.choice([None, None, BLOCK])
            payload = chance.randbytes(chance.choice([0, 1, 5, 300])) if kind < 9 else b"PING\r\n"
            wire.append(message_frame("a.b", chance.choice([1, 2, 7]), reply, headers, payload).wire)
    return b"".join(wire)


def mutated(stream: bytes, chance: random.Random) -> bytes:
    changed = bytearray(stream)
    for _ in range(chance.randrange(1, 5)):
        place = chance.randrange(len(changed))
        match chance.randrange(5):
            case 0:
                changed[place] ^= 1 << chance.randrange(8)
            case 1:
                changed.insert(place, chance.choice(NATS_LIKE))
            case 2 if len(changed) > 1:
                del changed[place]
            case 3:
                end = place + chance.randrange(1, 20)
                changed[place:place] = changed[place:end]
            case _:
                changed[place] = chance.choice(NATS_LIKE)
    return bytes(changed)


def garbage(kind: str, chance: random.Random) -> bytes:
    if kind == "random bytes":
        return chance.randbytes(chance.randrange(1, 400))
    if kind == "random words":
        return bytes(chance.choices(NATS_LIKE, k=chance.randrange(1, 400)))
    return mutated(valid_stream(chance), chance)


def holds_at_most_one_frame(parser: Parser) -> bool:
    held = b"".join(parser._tail)
    line, line_break, payload = held.partition(b"\r\n")
    if not line_break:
        return len(held) <= MAX_LINE_BYTES
    return len(payload) < int(line.rsplit(b" ", 1)[1]) + 2


@pytest.mark.parametrize("kind", ["random bytes", "random words", "mutated streams"])
def test_garbage_raises_nothing_but_protocol_errors_and_is_not_hoarded(kind: str) -> None:
    chance = random.Random(20_240_601)
    fed = errors = 0
    while fed < FUZZ_BYTES:
        parser, _ = parser_for(b"1", b"2")
        stream = garbage(kind, chance)
        begin = 0
        try:
            while begin < len(stream):
                end = begin + chance.choice([1, 2, 7, 50, 1000])
                fed += min(end, len(stream)) - begin
                parser.receive_data(stream[begin:end])
                begin = end
                assert holds_at_most_one_frame(parser), (stream, begin)
        except ProtocolError:
            errors += 1
    assert errors > 100


def test_mutated_streams_read_the_same_whole_and_in_pieces() -> None:
    chance = random.Random(7)
    for _ in range(2000):
        stream = mutated(valid_stream(chance), chance)
        cuts = [chance.randrange(len(stream)) for _ in range(chance.randrange(1, 20))]
        outcomes = []
        for where in ((), cuts):
            parser, routes = parser_for(b"1", b"2")
            problem = None
            try:
                for chunk in chunks(stream, where):
                    parser.receive_data(chunk)
            except ProtocolError:
                problem = ProtocolError
            outcomes.append((parser.control, [each.seen for each in routes.values()], problem))
        assert outcomes[0] == outcomes[1], (stream, cuts)


def test_lines_with_a_reply_are_known_by_their_beginning() -> None:
    parser, routes = parser_for(b"1", b"2")
    for number in range(3):
        parser.receive_data(b"MSG a 1 reply.%d 2\r\nhi\r\nMSG a 2 reply.%d 0\r\n\r\n" % (number, number))
    assert [each.raw_reply for each in routes[b"1"].arrived] == [b"reply.0", b"reply.1", b"reply.2"]
    assert [each.data for each in routes[b"2"].arrived] == [b"", b"", b""]
    # What is known of the beginning must not make a wrong ending right.
    for ending in (b"3\r\nhi\r\nx", b"x\r\nhi", b"+2\r\nhi"):
        broken, _ = parser_for(b"1")
        broken.receive_data(b"MSG a 1 reply 2\r\nhi\r\n" * 2)
        with pytest.raises(ProtocolError):
            broken.receive_data(b"MSG a 1 reply " + ending + b"\r\n" + b"PING\r\n")


def test_nothing_is_remembered_of_lines_to_an_inbox() -> None:
    parser, routes = parser_for(b"1", b"2")
    routes[b"2"].is_inbox = True
    parser.receive_data(b"MSG a 1 0\r\n\r\n")
    for number in range(2000):
        parser.receive_data(b"MSG _INBOX.me.%d 2 0\r\n\r\n" % number)
    assert list(parser._known_lines) == [b"MSG a 1 0"]
    assert len(routes[b"2"].arrived) == 2000


# ---- runs: many messages of one subscription, subject and size -----------------------------------------------------


class WatchedParser(Parser):
    """Counts what the expression for runs has read."""

    read_in_runs = 0

    def _read_run(self, run: parser_module._Run, data: bytes) -> bytes:
        arrived = run.kind.route.arrived
        before = len(arrived)
        rest = super()._read_run(run, data)
        self.read_in_runs += len(arrived) - before
        return rest


def stream_messages(count: int, size: int, *, first: int = 0, subject: bytes = b"a", sid: int = 1) -> list[Frame]:
    """As a pull consumer gets them."""
    return [
        message_frame(subject.decode(), sid, b"$JS.ACK.s.c.1.%d" % number, None, bytes([97 + number % 26]) * size)
        for number in range(first, first + count)
    ]


def answers(count: int, size: int, *, first: int = 0, inbox: str = "_INBOX.me.many.1.") -> list[Frame]:
    """As a publisher gets them that has asked for as many."""
    return [
        message_frame(f"{inbox}{number}", 1, None, None, bytes([97 + number % 26]) * size)
        for number in range(first, first + count)
    ]


def parser_in_a_run(size: int, subject: bytes = b"a") -> tuple[WatchedParser, dict[bytes, Destination]]:
    """One that has read so many messages of one subject to subscription 1 that it expects nothing else."""
    return parser_after(stream_messages(parser_module.RUN_AFTER_MESSAGES, size, first=10**6, subject=subject))


def parser_in_answers(size: int, inbox: str = "_INBOX.me.many.1.") -> tuple[WatchedParser, dict[bytes, Destination]]:
    """One that has read so many answers in the inbox of subscription 1 that it expects nothing else."""
    return parser_after(answers(parser_module.RUN_AFTER_MESSAGES, size, inbox=inbox), is_inbox=True)


def parser_after(frames: list[Frame], *, is_inbox: bool = False) -> tuple[WatchedParser, dict[bytes, Destination]]:
    routes = {b"1": Destination(), b"2": Destination()}
    routes[b"1"].is_inbox = is_inbox
    parser = WatchedParser(routes)
    wire = b"".join(frame.wire for frame in frames)
    for _ in range(2):  # the first chunk only shows what to count
        assert parser._run is None
        parser.receive_data(wire)
    assert parser._run is not None
    assert parser.read_in_runs == 0
    assert len(routes[b"1"].arrived) == 2 * parser_module.RUN_AFTER_MESSAGES
    routes[b"1"].arrived.clear()
    parser.touched.clear()
    return parser, routes


def read_in_a_run(size: int, stream: bytes, cuts: Iterable[int] = ()) -> tuple[WatchedParser, object]:
    parser, routes = parser_in_a_run(size)
    for chunk in chunks(stream, cuts):
        parser.receive_data(chunk)
    assert parser._tail == []
    return parser, (parser.control, [destination.seen for destination in routes.values()])


def reference(stream: bytes) -> tuple[list[object], list[list[Seen]]]:
    """The simplest reader there is of a whole, correct stream: one frame after the other."""
    control: list[object] = []
    seen: dict[bytes, list[Seen]] = {b"1": [], b"2": []}
    while stream:
        line, _, stream = stream.partition(b"\r\n")
        operation, *arguments = line.split(b" ")
        if operation in (b"PING", b"PONG"):
            control.append(Ping() if operation == b"PING" else Pong())
            continue
        size = int(arguments[-1])
        header_size = int(arguments[-2]) if operation == b"HMSG" else 0
        addresses = arguments[: -2 if operation == b"HMSG" else -1]
        body, line_break, stream = stream[:size], stream[size : size + 2], stream[size + 2 :]
        assert line_break == b"\r\n"
        reply = addresses[2] if len(addresses) == 3 else None
        headers = body[:header_size] if operation == b"HMSG" else None
        if addresses[1] in seen:
            seen[addresses[1]].append((addresses[0].decode(), body[header_size:], reply, headers))
    return control, list(seen.values())


RUN_SIZES = [0, 1, 9, 10, 99, 100, 128]
RUN_BYTES = st.sampled_from([b"\r", b"\n", b" ", b"x", b"PING\r\n", b"MSG a 1 r 1\r\n", b"0\r\n"])


@st.composite
def interruptions(draw: st.DrawFn, size: int) -> bytes:
    """One frame that is not like the others of its run, or only nearly."""
    hostile = (b"".join(draw(st.lists(RUN_BYTES, min_size=1, max_size=size + 1))) + b"x" * size)[:size]
    other_size = draw(st.sampled_from([each for each in (*RUN_SIZES, size + 1) if each != size]))
    return draw(
        st.sampled_from(
            [
                b"PING\r\n",
                b"PONG\r\n",
                message_frame("a", 1, b"r", None, hostile).wire,
                message_frame("a", 1, b"r", None, b"y" * other_size).wire,
                message_frame("a", 1, b"r", BLOCK, b"y" * size).wire,
                message_frame("a", 1, None, None, b"y" * size).wire,
                message_frame("a", 1, None, None, hostile).wire,
                message_frame("b", 1, b"r", None, b"y" * size).wire,
                message_frame("a", 2, b"r", None, b"y" * size).wire,
                message_frame("a", 2, None, BLOCK, hostile).wire,
                message_frame("a", 7, b"r", None, b"y" * size).wire,
                message_frame("a", 11, b"r", None, b"y" * size).wire,
                message_frame("a", 1, "é\x01".encode(), None, b"y" * size).wire,
            ]
        )
    )


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_no_split_of_an_interrupted_run_changes_what_comes_out(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(RUN_SIZES))
    parts = []
    first = 0
    for count in data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5)):
        parts += [frame.wire for frame in stream_messages(count, size, first=first)]
        first += count
        parts += data.draw(st.lists(interruptions(size), max_size=2))
    stream = b"".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    expected = reference(stream)
    for where in ((), cuts):
        parser, came = read_in_a_run(size, stream, where)
        assert came == expected
        # The first message opens the stream: unless the first cut goes through it, only the expression can read it.
        if not where or min(where) >= len(parts[0]):
            assert parser.read_in_runs > 0


@st.composite
def interruptions_of_answers(draw: st.DrawFn, size: int) -> bytes:
    """One frame that is not like the answers around it, or only nearly."""
    hostile = (b"".join(draw(st.lists(RUN_BYTES, min_size=1, max_size=size + 1))) + b"x" * size)[:size]
    inbox = "_INBOX.me.many.1"
    return draw(
        st.sampled_from(
            [
                b"PING\r\n",
                message_frame(f"{inbox}.x", 1, None, None, hostile).wire,
                message_frame(f"{inbox}.x", 1, None, None, b"y" * (size + 1)).wire,
                message_frame(f"{inbox}.x", 1, None, BLOCK, b"y" * size).wire,
                message_frame(f"{inbox}.x", 1, b"r", None, b"y" * size).wire,
                message_frame(f"{inbox}.x", 2, None, None, b"y" * size).wire,
                message_frame(f"{inbox}.x", 11, None, None, b"y" * size).wire,
                message_frame(f"{inbox}.x.y.é\x01", 1, None, None, b"y" * size).wire,
                message_frame(inbox, 1, None, None, b"y" * size).wire,
                message_frame(f"{inbox}2.x", 1, None, None, b"y" * size).wire,
                message_frame("a", 2, None, None, hostile).wire,
            ]
        )
    )


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_no_split_of_interrupted_answers_changes_what_comes_out(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(RUN_SIZES))
    parts = []
    first = 0
    for count in data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=5)):
        parts += [frame.wire for frame in answers(count, size, first=first)]
        first += count
        parts += data.draw(st.lists(interruptions_of_answers(size), max_size=2))
    stream = b"".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    expected = reference(stream)
    for where in ((), cuts):
        parser, routes = parser_in_answers(size)
        for chunk in chunks(stream, where):
            parser.receive_data(chunk)
        assert (parser.control, [each.seen for each in routes.values()]) == expected
        if not where or min(where) >= len(parts[0]):
            assert parser.read_in_runs > 0


@pytest.mark.parametrize("size", RUN_SIZES)
def test_answers_are_read_by_an_expression_to_the_last(size: int) -> None:
    frames = answers(200, size)
    stream = b"".join(frame.wire for frame in frames)
    for cuts in ((), range(len(stream) // 7, len(stream), len(stream) // 7), range(len(stream))):
        parser, routes = parser_in_answers(size)
        for chunk in chunks(stream, cuts):
            parser.receive_data(chunk)
        assert routes[b"1"].seen == [frame.seen for frame in frames]
        assert parser._run is not None
        if len(cuts) < 10:
            assert parser.read_in_runs == 200


def test_a_token_that_is_not_utf8_reaches_its_reader_as_it_would_alone() -> None:
    parser, routes = parser_in_answers(2)
    tokens = [b"\xc3", b"\xa9", b"\xc3\xa9", b"\xff."]
    stream = b"".join(b"MSG _INBOX.me.many.1.%b 1 2\r\nok\r\n" % token for token in tokens)
    parser.receive_data(stream)
    assert parser.read_in_runs == len(tokens)
    expected = ["_INBOX.me.many.1." + token.decode(errors="surrogateescape") for token in tokens]
    assert [each.subject for each in routes[b"1"].arrived] == expected


# ---- answers that their reader takes in runs -------------------------------------------------------------------------


def taken(route: Destination) -> list[tuple[str, bytes]]:
    """Subjects and payloads of the runs."""
    assert route.answer_runs is not None
    return [
        (run.prefix + token.decode(errors="surrogateescape"), payload)
        for run in route.answer_runs
        for token, payload in zip(run.tokens, run.payloads, strict=True)
    ]


@pytest.mark.parametrize("size", [0, 2, 31])
@pytest.mark.parametrize("chunk_bytes", [1, 7, 1000, 1 << 20])
def test_a_reader_that_takes_runs_gets_answers_as_columns_and_no_messages(size: int, chunk_bytes: int) -> None:
    parser, routes = parser_in_answers(size)
    routes[b"1"].answer_runs = deque()
    frames = answers(200, size, first=700)
    stream = b"".join(frame.wire for frame in frames)
    for begin in range(0, len(stream), chunk_bytes):
        parser.receive_data(stream[begin : begin + chunk_bytes])
    assert set(parser.touched) == {routes[b"1"]}
    runs, messages = taken(routes[b"1"]), [(each.subject, each.data) for each in routes[b"1"].arrived]
    assert sorted(runs + messages) == sorted(frame.seen[:2] for frame in frames if frame.seen)
    # Who asked tells its answers by what is before their last token.
    assert {run.prefix for run in routes[b"1"].answer_runs} <= {"_INBOX.me.many.1."}
    if chunk_bytes > 100:
        assert not messages


def test_what_comes_with_headers_between_them_is_a_message() -> None:
    parser, routes = parser_in_answers(2)
    routes[b"1"].answer_runs = deque()
    odd = message_frame("_INBOX.me.many.1.9", 1, None, BLOCK, b"hi")
    frames = [*answers(20, 2, first=100), odd, *answers(20, 2, first=200)]
    parser.receive_data(b"".join(frame.wire for frame in frames))
    assert routes[b"1"].seen == [odd.seen]
    assert taken(routes[b"1"]) == [frame.seen[:2] for frame in frames if frame.seen and frame is not odd]


def test_messages_with_a_reply_subject_are_no_answers() -> None:
    parser, routes = parser_in_a_run(2)
    routes[b"1"].answer_runs = deque()
    frames = stream_messages(50, 2)
    parser.receive_data(b"".join(frame.wire for frame in frames))
    assert routes[b"1"].seen == [frame.seen for frame in frames]
    assert not routes[b"1"].answer_runs


@pytest.mark.parametrize("takes_runs", [False, True])
def test_answers_that_come_one_by_one_are_expected_in_runs_only_by_who_takes_them(takes_runs: bool) -> None:
    routes = {b"1": Destination()}
    routes[b"1"].is_inbox = True
    routes[b"1"].answer_runs = deque() if takes_runs else None
    parser = Parser(routes)
    for frame in answers(parser_module.RUN_AFTER_MESSAGES + 5, 2):
        parser.receive_data(frame.wire)
    assert (parser._run is not None) is takes_runs
    assert bool(routes[b"1"].answer_runs) is takes_runs


def test_answers_without_a_dot_in_their_subjects_are_no_run() -> None:
    routes = {b"1": Destination()}
    routes[b"1"].is_inbox = True
    parser = WatchedParser(routes)
    for _ in range(3):
        frames = answers(parser_module.RUN_AFTER_MESSAGES, 2, inbox="inbox")
        parser.receive_data(b"".join(frame.wire for frame in frames))
    assert parser._run is None
    assert len(routes[b"1"].arrived) == 3 * parser_module.RUN_AFTER_MESSAGES


@pytest.mark.parametrize("size", RUN_SIZES)
def test_a_run_is_read_by_its_expression_to_the_last_message(size: int) -> None:
    frames = stream_messages(200, size)
    stream = b"".join(frame.wire for frame in frames)
    chunk_bytes = len(stream) // 7
    # The last cuts fall between two frames and at the very end.
    for cuts in ((), range(chunk_bytes, len(stream), chunk_bytes), [len(b"".join(f.wire for f in frames[:50]))]):
        parser, came = read_in_a_run(size, stream, cuts)
        assert came == meaning(frames)
        assert parser.read_in_runs == 200
        assert parser._run is not None


@pytest.mark.parametrize("size", RUN_SIZES)
def test_a_run_reads_the_same_byte_by_byte(size: int) -> None:
    frames = stream_messages(20, size)
    stream = b"".join(frame.wire for frame in frames)
    parser, came = read_in_a_run(size, stream, range(len(stream)))
    assert came == meaning(frames)
    assert parser._run is not None


def test_a_run_cut_once_at_any_place_reads_the_same() -> None:
    frames = [*stream_messages(3, 2), Frame(b"PING\r\n", Ping()), *stream_messages(2, 2, first=3)]
    stream = b"".join(frame.wire for frame in frames)
    parser, routes = parser_in_a_run(2)
    run = parser._run
    for cut in range(len(stream) + 1):
        parser.receive_data(stream[:cut])
        parser.receive_data(stream[cut:])
        assert parser._run is run
        assert (parser.control, [each.seen for each in routes.values()]) == meaning(frames), cut
        parser.control.clear()
        routes[b"1"].arrived.clear()


@pytest.mark.parametrize(("size", "next_size"), [(0, 1), (9, 10), (99, 100), (10, 9), (128, 0)])
def test_a_run_goes_over_into_one_of_another_size(size: int, next_size: int) -> None:
    count = 2 * parser_module.RUN_AFTER_MESSAGES
    frames = [*stream_messages(30, size), *stream_messages(3 * count, next_size, first=30)]
    stream = b"".join(frame.wire for frame in frames)
    parser, came = read_in_a_run(size, stream, range(5000, len(stream), 5000))
    assert came == meaning(frames)
    assert parser.read_in_runs > 30 + count
    assert parser._run is not None
    assert b" %d\\r\\n" % next_size in parser._run.frames.pattern


def test_payloads_that_look_like_the_frames_of_their_run_are_payloads() -> None:
    inner = b"\r\nMSG a 1 r 24\r\n"
    payload = (inner + b"x" * 24)[:24]
    frames = [message_frame("a", 1, b"r.%d" % number, None, payload) for number in range(100)]
    parser, came = read_in_a_run(24, b"".join(frame.wire for frame in frames), range(70, 4000, 70))
    assert came == meaning(frames)
    assert parser.read_in_runs == 100


def test_a_run_takes_nothing_from_the_payload_of_a_message_without_reply() -> None:
    # To an expression that lets a reply go over line breaks, "9\r\nx" is the reply of a message of size 4.
    stream = b"MSG a 1 9\r\nx 4\r\nabcd\r\n" + b"MSG a 1 r 4\r\nabcd\r\n"
    _, came = read_in_a_run(4, stream)
    assert came == ([], [[("a", b"x 4\r\nabcd", None, None), ("a", b"abcd", b"r", None)], []])


def test_a_subject_is_not_an_expression() -> None:
    subject = b"a.b$(c|\xc3\xa9"
    parser, routes = parser_in_a_run(2, subject)
    frames = [frame for each in (subject, b"axb", b"a", b"c") for frame in stream_messages(3, 2, subject=each)]
    parser.receive_data(b"".join(frame.wire for frame in frames))
    assert routes[b"1"].seen == [frame.seen for frame in frames]
    assert parser.read_in_runs == 3


def test_a_run_to_a_removed_route_is_dropped() -> None:
    parser, routes = parser_in_a_run(2)
    frames = stream_messages(100, 2)
    stream = b"".join(frame.wire for frame in frames)
    parser.receive_data(stream[:-5])
    removed = routes.pop(b"1")
    parser.forget_routes()
    for _ in range(parser_module.RUN_AFTER_MESSAGES):
        parser.receive_data(stream[-5:] + stream[:-5])
    parser.receive_data(stream[-5:] + b"MSG a 2 r 2\r\nhi\r\n")
    assert removed.seen == [frame.seen for frame in frames[:-1]]
    assert routes[b"2"].seen == [("a", b"hi", b"r", None)]
    assert parser._run is None


def between(statuses: int, messages: int = 20) -> list[Frame]:
    """Messages, and after each ``messages`` of them a status."""
    frames = []
    for number in range(statuses):
        frames += stream_messages(messages, 2, first=number * messages)
        frames.append(message_frame("a", 1, None, BLOCK, b""))
    return frames + stream_messages(messages, 2, first=statuses * messages)


def test_a_run_goes_on_behind_a_few_statuses() -> None:
    """A server sends one after each pull request with a bound of bytes."""
    most = parser_module.MAX_INTERRUPTIONS
    for statuses in (1, most, most + 1):
        frames = between(statuses)
        parser, came = read_in_a_run(2, b"".join(frame.wire for frame in frames))
        assert came == meaning(frames)
        assert parser.read_in_runs == 20 * min(statuses + 1, most + 1)


def test_a_run_is_expected_though_statuses_come_between() -> None:
    routes = {b"1": Destination(), b"2": Destination()}
    parser = WatchedParser(routes)
    frames = between(1, 200)
    for _ in range(6):
        parser.receive_data(b"".join(frame.wire for frame in frames))
    assert parser._run is not None
    assert parser.read_in_runs
    assert routes[b"1"].seen == [frame.seen for frame in frames] * 6


def test_a_run_ends_when_others_fill_the_chunks() -> None:
    parser, routes = parser_in_a_run(2)
    run = parser._run
    few = stream_messages(parser_module.MIN_CHUNK_MESSAGES - 1, 2, subject=b"b", sid=2)
    parser.receive_data(b"".join(frame.wire for frame in few))
    assert parser._run is run
    many = stream_messages(parser_module.MIN_CHUNK_MESSAGES, 2, subject=b"b", sid=2)
    parser.receive_data(b"".join(frame.wire for frame in many))
    assert parser._run is None
    assert routes[b"2"].seen == [frame.seen for frame in few + many]


@pytest.mark.parametrize("kind", ["sizes", "subjects", "subscriptions", "without reply", "to an inbox"])
def test_no_run_is_expected_of_messages_that_are_not_alike(kind: str) -> None:
    parser, routes = parser_for(b"1", b"2")
    routes[b"1"].is_inbox = kind == "to an inbox"
    total = 4 * parser_module.RUN_AFTER_MESSAGES
    frames = []
    for number in range(total):
        odd = number % 2
        subject = "b" if kind == "subjects" and odd else "a"
        sid = 2 if kind == "subscriptions" and odd else 1
        reply = None if kind == "without reply" else b"r.%d" % number
        frames.append(message_frame(subject, sid, reply, None, b"x" * (3 if kind == "sizes" and odd else 2)))
    for begin in range(0, total, 100):
        parser.receive_data(b"".join(frame.wire for frame in frames[begin : begin + 100]))
        assert parser._run is None
    assert ([], [each.seen for each in routes.values()]) == meaning(frames)


def test_messages_read_in_a_run_are_of_their_routes_class_and_know_their_client() -> None:
    class Special(CoreMessage):
        pass

    parser, routes = parser_in_a_run(2)
    parser._client = object()
    stream = b"".join(frame.wire for frame in stream_messages(2, 2))
    parser.receive_data(stream)
    assert parser.touched == [routes[b"1"]]
    routes[b"1"].message_class = Special
    parser.receive_data(stream)
    assert [type(each) for each in routes[b"1"].arrived] == [CoreMessage] * 2 + [Special] * 2
    assert {each._client for each in routes[b"1"].arrived} == {parser._client}
    assert parser.read_in_runs == 4


@pytest.mark.parametrize("line", [*MALFORMED, b"MSG a 1 r s 2", b"MSG a 1 r 3", b"MSG a 1 r 2 "])
def test_a_malformed_line_in_a_run_is_a_protocol_error_however_it_is_cut(line: bytes) -> None:
    frames = stream_messages(20, 2)
    before = b"".join(frame.wire for frame in frames)
    stream = before + line + b"\r\nhi\r\nPING\r\n"
    for cuts in ((), [len(before) - 3], range(len(stream))):
        parser, routes = parser_in_a_run(2)
        problem = None
        try:
            for chunk in chunks(stream, cuts):
                parser.receive_data(chunk)
        except ProtocolError as error:
            problem = error
        assert problem is not None
        assert routes[b"1"].seen == [frame.seen for frame in frames]


def test_a_size_written_unlike_the_others_of_a_run_is_a_size() -> None:
    assert read_in_a_run(2, b"MSG a 1 r 02\r\nhi\r\n")[1] == ([], [[("a", b"hi", b"r", None)], []])


@pytest.mark.parametrize("after", [b"XX", b"\n\r", b"\rX", b"X\n"])
def test_a_payload_of_a_run_without_its_line_break_is_a_protocol_error(after: bytes) -> None:
    frames = stream_messages(20, 2)
    stream = b"".join(frame.wire for frame in frames)[:-2] + after
    for cuts in ((), range(len(stream))):
        with pytest.raises(ProtocolError, match="no line break after the 2 bytes"):
            read_in_a_run(2, stream, cuts)


# ---- columns: many messages of one subscription, of any subject and size --------------------------------------------


class ColumnParser(Parser):
    """Counts what was read in columns."""

    read_in_columns = 0

    def _deliver_columns(self, *columns: Any) -> None:
        super()._deliver_columns(*columns)
        self.read_in_columns += len(columns[-1])


def orders(count: int, *, first: int = 0, has_reply: bool = True) -> list[Frame]:
    """As the reader of a stream with a subject for each order gets them."""
    return [
        message_frame(
            f"orders.é{number % 97}.paid",
            1,
            b"$JS.ACK.s.c.1.%d" % number if has_reply else None,
            None,
            bytes([97 + number % 26]) * (number % 13),
        )
        for number in range(first, first + count)
    ]


def parser_in_columns(*, has_reply: bool = True) -> tuple[ColumnParser, dict[bytes, Destination]]:
    """One that has read a chunk of many subjects, and expects the like."""
    routes = {b"1": Destination(), b"2": Destination()}
    parser = ColumnParser(routes)
    parser.receive_data(b"".join(frame.wire for frame in orders(97, has_reply=has_reply)))
    assert parser._expects_columns
    assert parser.read_in_columns == 0
    routes[b"1"].arrived.clear()
    parser.touched.clear()
    return parser, routes


def read_in_columns(
    stream: bytes, cuts: Iterable[int] = (), *, has_reply: bool = True
) -> tuple[ColumnParser, dict[bytes, Destination]]:
    parser, routes = parser_in_columns(has_reply=has_reply)
    for chunk in chunks(stream, cuts):
        parser.receive_data(chunk)
    assert parser._tail == []
    return parser, routes


def seen_by(parser: Parser, routes: dict[bytes, Destination]) -> tuple[list[object], list[list[Seen]]]:
    return list(parser.control), [each.seen for each in routes.values()]


@pytest.mark.parametrize("has_reply", [True, False])
def test_messages_of_many_subjects_are_read_in_columns_to_the_last(has_reply: bool) -> None:
    frames = orders(300, has_reply=has_reply)
    stream = b"".join(frame.wire for frame in frames)
    for cuts in ((), range(2500, len(stream), 2500), [len(b"".join(f.wire for f in frames[:50]))]):
        parser, routes = read_in_columns(stream, cuts, has_reply=has_reply)
        assert seen_by(parser, routes) == meaning(frames)
        # The last chunk may be too small to be worth while.
        assert parser.read_in_columns > 300 - parser_module.MIN_CHUNK_MESSAGES
        assert parser.touched == [routes[b"1"]] * len(parser.touched)


def test_a_parser_that_reads_columns_knows_what_the_server_has_counted() -> None:
    """A pull request with a bound of bytes is used up by these."""
    status = message_frame("a", 1, None, BLOCK, b"")
    frames = [*orders(40), status, *orders(30, first=40), status]
    for kind in ("columns", "run"):
        if kind == "columns":
            _, routes = read_in_columns(b"".join(frame.wire for frame in frames))
        else:
            frames = [*stream_messages(40, 2, subject=b"a"), status, *stream_messages(30, 2, first=40), status]
            parser, routes = parser_in_a_run(2)
            routes[b"1"].counted_messages = routes[b"1"].counted_bytes = 0
            parser.receive_data(b"".join(frame.wire for frame in frames))
        messages = [each for each in routes[b"1"].arrived if each.raw_reply]
        assert routes[b"1"].counted_messages == len(messages) == 70
        assert routes[b"1"].counted_bytes == sum(
            len(each.subject.encode()) + len(each.raw_reply or b"") + len(each.data) for each in messages
        )


@pytest.mark.parametrize("status", [BLOCK, b""])
def test_columns_are_expected_where_a_status_ends_the_chunk(status: bytes) -> None:
    routes = {b"1": Destination(), b"2": Destination()}
    parser = ColumnParser(routes)
    frames = [*stream_messages(20, 2), message_frame("a", 1, None, status, b"hi")]
    for _ in range(2):
        parser.receive_data(b"".join(frame.wire for frame in frames))
    assert parser.read_in_columns == 20
    assert [each[:3] for each in routes[b"1"].seen] == [frame.seen[:3] for frame in frames if frame.seen] * 2


@pytest.mark.parametrize(
    "other",
    [
        message_frame("_INBOX.me.1", 2, None, None, b"an answer"),
        message_frame("a", 2, b"r", None, b""),
        message_frame("a", 1, None, None, b"no reply"),
        message_frame("a", 1, b"r", None, b"a line\r\nbreak"),
        message_frame("a", 1, b"r", BLOCK, b"with headers"),
    ],
)
def test_columns_go_on_behind_a_few_others(other: Frame) -> None:
    """Answers to what the reader publishes come between what it reads."""
    frames = [*orders(50), other, *orders(50, first=50), other, *orders(50, first=100)]
    parser, routes = read_in_columns(b"".join(frame.wire for frame in frames))
    assert seen_by(parser, routes) == meaning(frames)
    assert parser.read_in_columns >= 150


@pytest.mark.parametrize("others", [1, 3, parser_module.MAX_INTERRUPTIONS])
@pytest.mark.parametrize(
    "other",
    [
        message_frame("_INBOX.me.1", 2, None, None, b"an answer"),
        message_frame("_INBOX.me.1", 2, b"r", None, b"a line\r\nbreak"),
        message_frame("a", 1, None, BLOCK, b""),
    ],
)
def test_columns_go_on_behind_answers_and_statuses_before_them(other: Frame, others: int) -> None:
    """A chunk may begin with them, and several may come together."""
    parser, routes = parser_in_columns()
    routes[b"2"].is_inbox = True
    first, second = orders(50), [other] * others + orders(50, first=50)
    for frames in (first, second):
        parser.receive_data(b"".join(frame.wire for frame in frames))
    assert seen_by(parser, routes) == meaning([*first, *second])
    assert parser.read_in_columns == 100
    assert parser._expects_columns


def test_columns_of_a_pull_subscription_are_read_from_the_first_frame_on() -> None:
    """Its own subscription is an inbox, too, as that of answers is."""
    parser, routes = parser_in_columns()
    routes[b"1"].is_inbox = routes[b"2"].is_inbox = True
    read = []
    for _ in range(3):
        parser.receive_data(b"".join(frame.wire for frame in orders(50)))
        read.append(parser.read_in_columns)
    assert [read[1] - read[0], read[2] - read[1]] == [50, 50]


def test_columns_go_on_in_a_large_chunk_that_begins_with_a_status() -> None:
    parser, routes = parser_in_columns()
    large = [message_frame(f"a.{number}", 1, b"r", None, b"x" * 1000) for number in range(100)]
    frames = [message_frame("a", 1, None, BLOCK, b""), *large]
    parser.receive_data(b"".join(frame.wire for frame in frames))
    assert seen_by(parser, routes) == meaning(frames)
    assert parser.read_in_columns == 100


def test_a_chunk_of_answers_ends_the_columns_of_others() -> None:
    parser, routes = parser_in_columns()
    routes[b"2"].is_inbox = True
    other = message_frame("_INBOX.me.1", 2, None, None, b"an answer" * 1000)
    first, second = orders(50), [other] * (parser_module.MAX_INTERRUPTIONS + 1) + orders(50, first=50)
    for frames in (first, second):
        parser.receive_data(b"".join(frame.wire for frame in frames))
    assert seen_by(parser, routes) == meaning([*first, *second])
    assert parser.read_in_columns == 50
    assert not parser._expects_columns


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_no_split_of_interrupted_columns_changes_what_comes_out(data: st.DataObject) -> None:
    has_reply = data.draw(st.booleans())
    parts: list[bytes] = []
    first = 0
    for count in data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=5)):
        parts += [frame.wire for frame in orders(count, first=first, has_reply=has_reply)]
        first += count
        parts += data.draw(st.lists(interruptions(data.draw(st.sampled_from(RUN_SIZES))), max_size=2))
    stream = b"".join(parts)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    expected = reference(stream)
    for where in ((), cuts):
        assert seen_by(*read_in_columns(stream, where, has_reply=has_reply)) == expected


def test_columns_cut_once_at_any_place_read_the_same() -> None:
    frames = [*orders(17), message_frame("a", 1, None, BLOCK, b""), *orders(17, first=20)]
    stream = b"".join(frame.wire for frame in frames)
    for cut in range(len(stream) + 1):
        routes = {b"1": Destination(), b"2": Destination()}
        parser = Parser(routes)
        parser._expects_columns = True
        for chunk in chunks(stream, [cut]):
            parser.receive_data(chunk)
        assert seen_by(parser, routes) == meaning(frames), cut


@pytest.mark.parametrize("line", [*MALFORMED, b"MSG a 1 r s 2", b"MSG a 1 r 3", b"MSG a 1 r 2 ", b"MSG a 1 r\n 2 2"])
@pytest.mark.parametrize("after", [0, 30])
def test_a_malformed_line_among_columns_is_a_protocol_error_however_it_is_cut(line: bytes, after: int) -> None:
    frames = orders(20)
    before = b"".join(frame.wire for frame in frames)
    stream = before + line + b"\r\nhi\r\nPING\r\n" + b"".join(frame.wire for frame in orders(after))
    for cuts in ((), [len(before) - 3], range(len(stream))):
        parser, routes = parser_in_columns()
        problem = None
        try:
            for chunk in chunks(stream, cuts):
                parser.receive_data(chunk)
        except ProtocolError as error:
            problem = error
        assert problem is not None
        assert routes[b"1"].seen == [frame.seen for frame in frames]


@pytest.mark.parametrize("line", [b"MSG a", b"MSG a 1", b"MSG a 1 r s 2", b"MSG a 1 r  2"])
def test_lines_that_are_malformed_all_alike_are_no_columns(line: bytes) -> None:
    parser, _ = parser_in_columns()
    with pytest.raises(ProtocolError, match="not a MSG line"):
        parser.receive_data((line + b"\r\nhi\r\n") * 20)


def test_whoever_gets_messages_in_columns_is_told() -> None:
    parser, routes = read_in_columns(b"".join(frame.wire for frame in orders(40)))
    assert parser.read_in_columns == 40
    assert parser.touched == [routes[b"1"]]


def test_a_line_that_is_too_long_for_one_is_refused_among_columns() -> None:
    for size in (MAX_LINE_BYTES - len(b"MSG  1 r 1") + 1, MAX_LINE_BYTES):
        long = message_frame("a" * size, 1, b"r", None, b"x").wire
        parser, _ = parser_in_columns()
        with pytest.raises(ProtocolError, match="a line of over"):
            parser.receive_data(b"".join(frame.wire for frame in orders(20)) + long)


def test_columns_to_a_removed_route_are_dropped() -> None:
    parser, routes = parser_in_columns()
    del routes[b"1"]
    parser.forget_routes()
    parser.receive_data(b"".join(frame.wire for frame in orders(50)) + b"MSG a 2 r 2\r\nhi\r\n")
    assert routes[b"2"].seen == [("a", b"hi", b"r", None)]


def test_columns_of_one_subject_and_size_become_a_run() -> None:
    parser, routes = parser_in_columns()
    stream = b"".join(frame.wire for frame in stream_messages(parser_module.RUN_AFTER_MESSAGES, 2))
    for _ in range(2):
        assert parser._run is None
        parser.receive_data(stream)
    assert parser._run is not None
    assert parser.read_in_columns == 2 * parser_module.RUN_AFTER_MESSAGES
    parser.receive_data(stream)
    assert parser.read_in_columns == 2 * parser_module.RUN_AFTER_MESSAGES
    assert len(routes[b"1"].arrived) == 3 * parser_module.RUN_AFTER_MESSAGES


def test_columns_that_fail_are_tried_less_and_less_often() -> None:
    parser, routes = parser_in_columns()
    tries = 0
    mixed = b"".join(
        message_frame(f"a.{number}", 1 + number % 2, b"r", None, b"hi").wire for number in range(100)
    )  # two subscriptions
    for _ in range(200):
        tries += parser._expects_columns
        parser.receive_data(mixed)
    assert parser.read_in_columns == 0
    assert 3 <= tries <= 9
    assert [len(each.arrived) for each in routes.values()] == [10_000, 10_000]
    for _ in range(parser_module.MAX_CHUNKS_WITHOUT_COLUMNS + 2):
        parser.receive_data(b"".join(frame.wire for frame in orders(100)))
    assert parser.read_in_columns > 0


# ---- before a session is established -------------------------------------------------------------------------------


def read_handshake(stream: bytes, cuts: Iterable[int]) -> tuple[list[object], str, bytes]:
    """The frames up to the end or the first error, the error, and what is left."""
    reader = HandshakeReader()
    frames: list[object] = []
    try:
        for chunk in chunks(stream, cuts):
            reader.receive_data(chunk)
            while (frame := reader.next_frame()) is not None:
                frames.append(frame)
    except ProtocolError as error:
        return frames, str(error).split(":")[0], b""
    return frames, "", reader.take_rest()


@pytest.mark.parametrize("more", [0, 1])
def test_a_line_of_the_handshake_has_a_bound_to_the_byte(more: int) -> None:
    line = b"INFO {" + b" " * (MAX_LINE_BYTES - len(b"INFO {}") + more) + b"}"
    expected = ([], f"a line of over {MAX_LINE_BYTES} bytes", b"") if more else ([Info({})], "", b"")
    frames, said, rest = read_handshake(b"PING\r\n" + line + b"\r\n", ())
    assert (frames[1:], said, rest) == expected


def test_what_follows_a_frame_of_the_handshake_is_taken_once() -> None:
    reader = HandshakeReader()
    reader.receive_data(b"INFO {}\r\nPING\r\n")
    assert reader.next_frame() == Info({})
    assert [reader.has_more, reader.take_rest(), reader.has_more, reader.take_rest()] == [True, b"PING\r\n", False, b""]


@pytest.mark.parametrize("cuts", ["none", "every"])
def test_the_handshake_has_five_kinds_of_frames(cuts: str) -> None:
    stream = b"PING\r\n+OK\r\nINFO {}\r\nPONG\r\n-ERR 'no'\r\nPI"
    read = read_handshake(stream, range(1, len(stream)) if cuts == "every" else ())
    assert read == ([Ping(), Info({}), Pong(), Err("no")], "", b"PI")


@pytest.mark.parametrize("cuts", ["none", "every"])
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"MSG a 1 1\r\nx\r\n", "a message before the session is established"),
        (b"HMSG a 1 12 13\r\nNATS/1.0\r\n\r\nx\r\n", "a message before the session is established"),
        (b"\r\n", "unknown operation"),
        (b"\x16\x03\x01", "unknown operation"),
        (b"PUB a 1\r\nx\r\n", "unknown operation"),
        (b"INFO []\r\n", "INFO without a JSON object"),
        (b"I" * (MAX_LINE_BYTES + 2), f"a line of over {MAX_LINE_BYTES} bytes"),
    ],
)
def test_nothing_else_is_part_of_a_handshake(line: bytes, words: str, cuts: str) -> None:
    stream = b"PING\r\n" + line
    read = read_handshake(stream, range(1, len(stream)) if cuts == "every" and len(line) < 100 else ())
    assert read == ([Ping()], words, b"")


@pytest.mark.parametrize(
    ("greeting", "said"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "it speaks HTTP (b'HTTP/1.1 400 Bad Request'), as a web server"),
        (b"\x15\x03\x01\x00\x02\x02F", "it speaks TLS from the first byte (b'\\x15\\x03"),
        (b"\x16\x03\x03\x00P", "it speaks TLS from the first byte (b'\\x16\\x03"),
        (b"\x14\x03", "it speaks TLS from the first byte (b'\\x14\\x03"),
        (b"\x17\x03", "it speaks TLS from the first byte (b'\\x17\\x03"),
        (b"\x13\x03", "it begins with b'\\x13\\x03'; check host and port"),
        (b"\x18\x03", "it begins with b'\\x18\\x03'; check host and port"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "it begins with b'SSH-2.0-OpenSSH_9.6'; check host and port"),
        (b"+OK POP3 ready\r\n", "it begins with b'+OK POP3 ready'; check host and port"),
        (b"INFO nonsense\r\n", "it begins with b'INFO nonsense'; check host and port"),
        (b"PUB a 1\r\nx\r\n", "it begins with b'PUB a 1'; check host and port"),
        (b"\x13\r\n", "it begins with b'\\x13'; check host and port"),
        (b"\x18\r\n", "it begins with b'\\x18'; check host and port"),
        (b"\r\n", "it begins with b''; check host and port"),
        (b"I" * (MAX_LINE_BYTES + 2), "it begins with b'IIII"),
    ],
)
def test_whoever_does_not_greet_as_nats_does_is_told_by_its_first_bytes(greeting: bytes, said: str) -> None:
    reader = HandshakeReader()
    reader.receive_data(greeting)
    with pytest.raises(ProtocolError) as raised:
        reader.next_frame()
    assert str(raised.value).startswith(f"not a NATS server: {said}")
    assert len(str(raised.value)) < 300


def test_the_first_letter_of_http_is_not_judged_alone() -> None:
    reader = HandshakeReader()
    for piece in (b"H", b"TT", b"P"):
        reader.receive_data(piece)
        assert reader.next_frame() is None
    reader.receive_data(b"/1.1 200 OK")
    with pytest.raises(ProtocolError, match=r"it speaks HTTP \(b'HTTP/1\.1 200 OK'\)"):
        reader.next_frame()


def test_the_longest_line_of_a_handshake_is_read_in_any_pieces() -> None:
    text = "x" * (MAX_LINE_BYTES - len(b'INFO {"a":""}'))
    stream = b'INFO {"a":"%b"}\r\n' % text.encode()
    for cuts in ((), (len(stream) - 1,), (len(stream) - 2,), (1000, len(stream) - 1)):
        assert read_handshake(stream, cuts) == ([Info({"a": text})], "", b"")


@settings(max_examples=200)
@given(st.lists(st.sampled_from([b"PING\r\n", b"INFO {}\r\n", b"+OK\r\n", b"HTTP", b"MSG ", b"\r"])), st.data())
def test_no_split_of_a_handshake_changes_what_comes_out(pieces: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(pieces)
    cuts = data.draw(st.sets(st.integers(0, len(stream))))
    assert read_handshake(stream, cuts) == read_handshake(stream, ())
