from __future__ import annotations

import copy
import pickle
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspark.core.headers import Headers, Status, decode, decode_status, encode, last_value, readable, restored
from jetspark.errors import ConfigError, InvalidHeader, ProtocolError

NAME_CHARACTERS = "".join(chr(code) for code in range(0x21, 0x7F) if chr(code) != ":")
NAMES = st.text(NAME_CHARACTERS, min_size=1, max_size=12)
VALUES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), max_size=20).map(
    lambda value: value.lstrip(" \t")
)
PAIRS = st.lists(st.tuples(NAMES, VALUES), max_size=6)


@pytest.mark.parametrize(
    "given_as",
    [
        {"A": ["1", "2"], "B": "3"},
        [("A", "1"), ("B", "3"), ("A", "2")],
        Headers({"A": ("1", "2"), "B": "3"}),
    ],
    ids=["mapping", "pairs", "headers"],
)
def test_every_form_of_input_gives_the_same_headers(given_as: Any) -> None:
    headers = Headers(given_as)
    assert headers == {"A": ["1", "2"], "B": "3"}
    assert headers.multi_items() == [("A", "1"), ("A", "2"), ("B", "3")]
    assert encode(given_as) == b"NATS/1.0\r\nA: 1\r\nA: 2\r\nB: 3\r\n\r\n"


def test_nothing_given_means_no_headers() -> None:
    assert len(Headers()) == len(Headers(None)) == len(Headers({})) == len(Headers({"A": []})) == 0
    assert encode(None) == encode({}) == encode({"A": []}) == b"NATS/1.0\r\n\r\n"
    assert decode(b"NATS/1.0\r\n\r\n") == Headers()


def test_lookup_ignores_case_and_the_spelling_is_kept() -> None:
    headers = Headers({"X-Trace": "1"})
    assert headers["x-trace"] == headers.get("X-TRACE") == "1"
    assert "x-TRACE" in headers
    assert 5 not in headers  # type: ignore[comparison-overlap]
    assert list(headers) == ["X-Trace"]
    assert list(headers.items()) == [("X-Trace", "1")]
    assert headers.get_all("x-trace") == ["1"]


def test_a_missing_name_is_a_key_error_none_or_an_empty_list() -> None:
    headers = Headers()
    with pytest.raises(KeyError, match="nope"):
        headers["nope"]
    with pytest.raises(KeyError, match="nope"):
        del headers["nope"]
    assert headers.get("nope") is None
    assert headers.get("nope", "default") == "default"
    assert headers.get_all("nope") == []


def test_the_exact_spelling_answers_before_another_one() -> None:
    headers = decode(b"NATS/1.0\r\nnats-sequence: 666\r\nNats-Sequence: 7\r\n\r\n")
    assert headers["Nats-Sequence"] == "7"
    assert headers["nats-sequence"] == "666"
    assert headers["NATS-SEQUENCE"] == "666"
    assert headers.get_all("Nats-Sequence") == ["7"]
    assert all(headers[name] == value for name, value in headers.items())


def test_setting_replaces_every_value_and_spelling() -> None:
    headers = Headers([("A", "1"), ("B", "2"), ("a", "3"), ("A", "4")])
    headers["a"] = "5"
    assert headers.multi_items() == [("B", "2"), ("a", "5")]
    headers["B"] = ["6", "7"]
    assert headers.multi_items() == [("B", "6"), ("B", "7"), ("a", "5")]
    headers["B"] = []
    assert headers.multi_items() == [("a", "5")]


def test_deleting_removes_every_spelling() -> None:
    headers = Headers([("A", "1"), ("a", "2"), ("B", "3")])
    del headers["A"]
    assert headers.multi_items() == [("B", "3")]


def test_adding_keeps_what_is_there() -> None:
    headers = Headers({"A": "1"})
    headers.add("A", "2")
    assert headers.get_all("a") == ["1", "2"]
    headers.get_all("A").append("mine")
    assert headers.get_all("A") == ["1", "2"]


def test_updating_takes_all_values_of_a_name() -> None:
    headers = Headers({"A": "1", "B": "2"})
    headers.update(Headers([("a", "3"), ("a", "4")]), C="5")
    assert headers.multi_items() == [("B", "2"), ("a", "3"), ("a", "4"), ("C", "5")]


@pytest.mark.parametrize("duplicate", [Headers.copy, copy.copy, copy.deepcopy, Headers])
def test_copies_are_independent(duplicate: Any) -> None:
    headers = Headers({"A": "1"})
    twin = duplicate(headers)
    assert twin == headers
    twin.add("A", "2")
    assert headers.get_all("A") == ["1"]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_headers_survive_pickle_even_with_names_we_would_not_send(protocol: int) -> None:
    headers = decode("NATS/1.0\r\nnaïve name: 1\r\nA: 2\r\nA: 3\r\n\r\n".encode())
    assert pickle.loads(pickle.dumps(headers, protocol)) == headers


def test_equality_is_exact_about_case_and_indifferent_to_the_order_of_names() -> None:
    assert Headers([("A", "1"), ("B", "2")]) == Headers([("B", "2"), ("A", "1")])
    assert Headers({"A": "1"}) != Headers({"a": "1"})
    assert Headers({"A": ["1", "2"]}) != Headers({"A": ["2", "1"]})
    assert Headers({"A": "1"}) != {"A": 1}
    assert Headers() != 0


def test_another_type_may_say_that_it_is_equal() -> None:
    class Anything:
        def __eq__(self, other: object) -> bool:
            return True

    assert Headers({"A": "1"}) == Anything()


def test_headers_are_mutable_and_so_unhashable() -> None:
    with pytest.raises(TypeError):
        hash(Headers())


def test_the_repr_rebuilds_the_headers() -> None:
    headers = Headers([("A", "1"), ("A", "2"), ("B", "3")])
    assert repr(headers) == "Headers({'A': ['1', '2'], 'B': '3'})"
    assert eval(repr(headers)) == headers


BAD_HEADERS: list[tuple[Any, Any, str]] = [
    ("", "x", "may not be empty"),
    ("a:b", "x", "may not contain ':'"),
    ("a b", "x", "may not contain ' '"),
    ("a\r\nB", "x", r"may not contain '\\r'"),
    ("é", "x", "may not contain 'é'"),
    ("a\x7f", "x", "may not contain"),
    (5, "x", "name of type int: expected str"),
    ("A", "x\r\nEvil: 1", "contains a line break"),
    ("A", "x\n", "contains a line break"),
    ("A", "\r", "contains a line break"),
    ("A", "\ud800", "UTF-8"),
    ("A", 5, "value of type int"),
    ("A", b"x", "value of type bytes"),
    ("A", None, "value of type NoneType"),
    ("A", ["x", 5], "value of type int"),
    ("A", ["x", "y\n"], "contains a line break"),
]


@pytest.mark.parametrize(("name", "value", "reason"), BAD_HEADERS)
def test_what_would_break_the_frame_is_refused_wherever_it_enters(name: Any, value: Any, reason: str) -> None:
    headers = Headers()
    with pytest.raises(InvalidHeader, match=reason):
        Headers({name: value})
    with pytest.raises(InvalidHeader, match=reason):
        headers[name] = value
    with pytest.raises(InvalidHeader, match=reason):
        encode({name: value})
    with pytest.raises(InvalidHeader):
        headers.add(name, value)
    with pytest.raises(InvalidHeader):
        encode([(name, value)])
    assert headers == {}


@pytest.mark.parametrize("pair", [("A", "1", "2"), ("A",), ["A", "1", "2"], "A1", {"A", "1"}, 5])
def test_what_is_no_pair_of_a_name_and_a_value_is_refused(pair: Any) -> None:
    with pytest.raises(ConfigError, match=r"a list of \(name, value\)"):
        Headers([pair])


def test_a_received_header_we_could_not_send_is_readable_but_not_encodable() -> None:
    for raw in (b"NATS/1.0\r\na b: 1\r\n\r\n", b"NATS/1.0\r\nA: x\ny\r\n\r\n"):
        headers = decode(raw)
        assert len(headers) == 1
        with pytest.raises(InvalidHeader):
            encode(headers)


def test_values_lose_leading_blanks_everywhere_alike() -> None:
    assert Headers({"A": " \t x "})["A"] == "x "
    assert decode(encode({"A": " \t x "}))["A"] == "x "
    assert decode(b"NATS/1.0\r\nA:x\r\nB:\t  y\r\nC:\r\nD: a:b\r\n\r\n") == {
        "A": "x",
        "B": "y",
        "C": "",
        "D": "a:b",
    }


def test_bytes_that_are_not_utf8_come_out_as_they_came_in() -> None:
    raw = b"NATS/1.0\r\nA: \xff\xfe caf\xc3\xa9\r\n\r\n"
    assert encode(decode(raw)) == raw
    assert decode(raw)["A"].endswith("café")


@given(PAIRS)
def test_any_valid_headers_survive_the_round_trip(pairs: list[tuple[str, str]]) -> None:
    headers = Headers(pairs)
    received = decode(encode(headers))
    assert received == headers
    assert received.multi_items() == headers.multi_items()
    assert decode_status(encode(headers)) is None


@given(st.dictionaries(NAMES, VALUES, max_size=6))
def test_the_fast_path_for_plain_dicts_encodes_the_same_bytes(plain: dict[str, str]) -> None:
    assert encode(plain) == encode(Headers(plain))


@given(st.dictionaries(st.text(string.printable, max_size=3), st.text("ab:\r\n \t", max_size=4), max_size=3))
def test_no_input_smuggles_in_a_header(plain: dict[str, str]) -> None:
    try:
        raw = encode(plain)
    except InvalidHeader:
        return
    assert list(decode(raw)) == list(plain)


@given(st.binary(max_size=60).map(lambda tail: b"NATS/1.0\r\n" + tail + b"\r\n\r\n"))
def test_a_block_of_any_bytes_is_decoded_or_refused_as_a_protocol_error(raw: bytes) -> None:
    try:
        decode(raw)
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"NATS/1.0",
        b"NATS/1.0\r\n",
        b"NATS/1.0\r\nA: 1\r\n",
        b"NATS/2.0\r\n\r\n",
        b"NATS/1.01\r\n\r\n",
        b"nats/1.0\r\n\r\n",
        b"NATS/1.0\r\nno colon\r\n\r\n",
        b"NATS/1.0\r\n: no name\r\n\r\n",
        b"NATS/1.0\r\nA: 1\r\n\r\nB: 2\r\n\r\n",
    ],
)
def test_a_malformed_block_is_a_protocol_error(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(raw)


@given(PAIRS)
def test_what_can_be_decoded_is_readable(pairs: list[tuple[str, str]]) -> None:
    raw = encode(Headers(pairs))
    assert readable(raw).multi_items() == decode(raw).multi_items()


@given(st.binary(max_size=60))
def test_something_can_be_read_of_any_block(raw: bytes) -> None:
    for name, value in readable(raw).multi_items():
        assert name
        assert "\r\n" not in value


@pytest.mark.parametrize(
    ("raw", "pairs"),
    [
        (None, []),
        (b"", []),
        (b"NATS/1.0\r\nno colon\r\nA:  1\r\n: no name\r\nA: 2\r\n\r\n", [("A", "1"), ("A", "2")]),
        (b"NATS/1.0\r\nA: 1\r\n", [("A", "1")]),
        (b"HTTP/1.1\r\nA: \xff\r\n\r\n", [("A", "\udcff")]),
        (b"NATS/1.0\r\nno colon\r\na b: 1\r2\r\n\r\n", [("a b", "1\r2")]),
    ],
)
def test_lines_that_are_no_headers_are_left_out(raw: bytes | None, pairs: list[tuple[str, str]]) -> None:
    assert readable(raw).multi_items() == pairs


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (None, None),
        (b"NATS/1.0\r\nB: 1\r\n\r\n", None),
        (b"NATS/1.0\r\na: 1\r\n\r\n", None),
        (b"NATS/1.0\r\nA: 1\r\nA:  2 x\r\nB: 3\r\n\r\n", "2 x"),
        (b"NATS/1.0\r\nX: yA: 4\r\n\r\n", "4"),
        (b"NATS/1.0\r\nA: 5", "5"),
        (b"A: 6\r\n\r\n", "6"),
        (b"NATS/1.0\r\nA:7\r\n\r\n", "7"),
    ],
)
def test_the_last_value_is_found_in_any_block(raw: bytes | None, value: str | None) -> None:
    assert last_value(raw, "A") == value


def test_headers_that_were_received_are_put_together_unchecked() -> None:
    pairs = [("a b", "1\r"), ("C", "2"), ("a b", "3")]
    assert restored(pairs).multi_items() == [("a b", "1\r"), ("a b", "3"), ("C", "2")]


def test_a_protocol_error_shows_the_offending_piece_but_not_all_of_a_long_one() -> None:
    with pytest.raises(ProtocolError, match="'no colon'"):
        decode(b"NATS/1.0\r\nA: 1\r\nno colon\r\n\r\n")
    with pytest.raises(ProtocolError) as caught:
        decode(b"NATS/1.0\r\n" + b"x" * 100_000 + b"\r\n\r\n")
    assert len(str(caught.value)) < 200


def test_a_piece_of_80_characters_is_shown_whole_and_a_longer_one_is_cut_there() -> None:
    with pytest.raises(ProtocolError, match=f"header line '{'x' * 80}': expected"):
        decode(b"NATS/1.0\r\n" + b"x" * 80 + b"\r\n\r\n")
    with pytest.raises(ProtocolError, match=rf"header line '{'x' * 80}'\.\.\.: expected"):
        decode(b"NATS/1.0\r\n" + b"x" * 81 + b"\r\n\r\n")


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"NATS/1.0\r\n\r\n", None),
        (b"NATS/1.0\r\nStatus: 503\r\n\r\n", None),
        (b"NATS/1.0 503\r\n\r\n", Status(503)),
        (b"NATS/1.0 503\r\nNats-Subject: x\r\n\r\n", Status(503, "")),
        (b"NATS/1.0 503 No Responders\r\n\r\n", Status(503, "No Responders")),
        (b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 1\r\n\r\n", Status(100, "Idle Heartbeat")),
        (b"NATS/1.0  404   No Messages  \r\n\r\n", Status(404, "No Messages")),
    ],
)
def test_the_status_is_read_from_the_first_line(raw: bytes, status: Status | None) -> None:
    assert decode_status(raw) == status


@pytest.mark.parametrize(
    "raw",
    [b"", b"HTTP/1.1 200 OK\r\n\r\n", b"NATS/1.0 OK\r\n\r\n", b"NATS/1.0 5031\r\n\r\n", b"NATS/1.0 503"],
)
def test_a_first_line_without_version_or_code_is_a_protocol_error(raw: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode_status(raw)


def test_the_headers_next_to_a_status_are_decoded_too() -> None:
    raw = b"NATS/1.0 409 Message Size Exceeds MaxBytes\r\nNats-Pending-Messages: 3\r\n\r\n"
    assert decode(raw) == {"Nats-Pending-Messages": "3"}
