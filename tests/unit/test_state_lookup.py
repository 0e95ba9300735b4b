"""What one answer of the server says of the last messages of many keys."""

from __future__ import annotations

import datetime
import json

import pytest

from jetspark.core.headers import Headers
from jetspark.core.message import CoreMessage
from jetspark.errors import JetStreamUnavailable, ProtocolError, ServerError
from jetspark.jetstream.info import StoredMessage
from jetspark.state.changes import Stored
from jetspark.state.lookup import Lookup, lookup_requests, stored_delivery, stored_of


def test_requests_have_each_subject_once_and_are_not_too_large() -> None:
    subjects = [f"$KV.b.{number}" for number in range(3000)]
    assert list(map(len, lookup_requests(subjects + subjects))) == [1023, 1023, 954]
    long = ["$KV.b." + "x" * 100_000 + str(number) for number in range(5)]
    assert list(map(len, lookup_requests(long))) == [2, 2, 1]
    assert list(lookup_requests([])) == []


OWN = [
    b"JetSpark-Sequence: 5\r\n",
    b"JetSpark-Sequence: 0\r\nJetSpark-Projection: 3\r\n",
    b"JetSpark-Sequence: 18446744073709551615\r\nNats-Expected-Last-Subject-Sequence: 7\r\n",
    b"JetSpark-Sequence: 7\r\nJetSpark-Projection: 1 parked 6 no\r\nNats-Expected-Last-Subject-Sequence: 0\r\n",
    b"JetSpark-Sequence: 7\r\nJetSpark-Projection: \r\n",
    b"JetSpark-Sequence: 7\r\nJetSpark-Projection:  \t1 \t\r\n",
    b"JetSpark-Sequence: 7\r\nJetSpark-Projection: \xff\r\n",
    b"",
    b"JetSpark-Sequence: many\r\n",
    b"JetSpark-Sequence: 5\r\nNats-Sequence: 99\r\n",
    b"JetSpark-Sequence: 5\r\nNats-Stream: KV_other\r\nNats-Subject: $KV.other.x\r\nNats-Last-Sequence: 3\r\n",
    b"JetSpark-Sequence: 5\r\nJetSpark-Sequence: 6\r\n",
    b"JetSpark-Projection: 3\r\nJetSpark-Sequence: 5\r\n",
    b"KV-Operation: DEL\r\nJetSpark-Sequence: 5\r\nJetSpark-Projection: 3\r\n",
    b"JetSpark-Sequence: 5\r\nKV-Operation: PURGE\r\n",
    b"JetSpark-Sequence: 5\r\nX-Other: b\r\nJetSpark-Projection: 3\r\n",
    b"JetSpark-Writer: w\r\nJetSpark-Sequence: 5\r\n",
    b"A: 1\r\nJetSpark-Sequence: 5\r\nJetSpark-Projection: 3\r\n",
]


def test_answers_count_alike_however_many_come_at_a_time() -> None:
    """Plain states, a marker and one that was lost on the way; what comes behind the end is not looked at."""
    answers = [
        answer("a", 3, 0, b"JetSpark-Sequence: 5\r\nJetSpark-Projection: 1\r\n"),
        answer("b", 7, 3, b"JetSpark-Sequence: 6\r\nKV-Operation: DEL\r\n", b""),
        answer("lost", 9, 8, b"JetSpark-Sequence: 7\r\n"),
        answer("c", 12, 7, b"JetSpark-Sequence: 8\r\nJetSpark-Projection: 1 parked 9 no\r\n"),
        end(12),
        answer("d", 13, 12, b"JetSpark-Sequence: 9\r\n"),
    ]
    for size in range(1, len(answers) + 1):
        lookup = Lookup("$JS.API", "KV_b", ["a", "b", "c", "d"])
        lookup.request()
        for first in range(0, len(answers), size):
            if not lookup.is_over:
                lookup.accept_all(answers[first : first + size])
        assert lookup.is_over
        assert [each.subject for each in lookup.found] == ["a", "b", "c"], size
        assert [each.mark for each in lookup.found] == ["1", None, "1 parked 9 no"]


@pytest.mark.parametrize("own", OWN)
def test_a_plain_state_is_read_as_if_header_by_header(own: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[list[Stored]]()
    for _ in range(2):
        lookup = Lookup("$JS.API", "KV_b", ["$KV.b.a"])
        lookup.request()
        lookup.accept_all([answer("$KV.b.a", 8, 0, own)])
        lookup.accept_all([end(8)])
        assert lookup.is_over
        read.append(lookup.found)
        monkeypatch.setattr("jetspark.state.lookup._plain_state", lambda raw: None)
    assert len(read[0]) == 1
    assert read[0] == read[1]


@pytest.mark.parametrize("own", [*OWN, b"JetSpark-Sequence: 5\r\nJetSpark-Batch: b\r\n"])
def test_a_plain_state_that_a_consumer_delivers_is_read_as_if_header_by_header(
    own: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = CoreMessage("$KV.b.a", b"5", None, b"NATS/1.0\r\n" + own + b"\r\n", None)
    plain = stored_delivery("$KV.b.a", 8, message)
    monkeypatch.setattr("jetspark.state.lookup._plain_delivery", lambda raw: None)
    assert stored_delivery("$KV.b.a", 8, message) == plain


def test_a_message_that_names_none_before_it_is_the_first() -> None:
    """As those of older servers do."""
    lookup = Lookup("$JS.API", "KV_b", ["$KV.b.a"])
    lookup.request()
    raw = b"NATS/1.0\r\nNats-Stream: KV_b\r\nNats-Subject: $KV.b.a\r\nNats-Sequence: 8\r\n\r\n"
    lookup.accept_all([CoreMessage("_INBOX.x", b"v", None, raw, None)])
    lookup.accept_all([end(8)])
    assert [each.revision for each in lookup.found] == [8]


def test_a_request_has_as_many_subjects_as_fit_if_all_were_as_long_as_the_longest() -> None:
    """Each subject takes its length and three more: the quotes and the comma."""
    fit = ["x" * 1020 + f"{number:05}" for number in range(512)]
    assert (1025 + 3) * 255 <= 256 << 10 < (1025 + 3) * 256
    assert list(map(len, lookup_requests(fit))) == [255, 255, 2]
    halves = ["x" * ((128 << 10) - 3), "y" * ((128 << 10) - 3)]
    assert list(map(len, lookup_requests(halves))) == [2]
    assert list(map(len, lookup_requests([halves[0], halves[1] + "y"]))) == [1, 1]
    assert list(map(len, lookup_requests(["z" * (256 << 10), "a"]))) == [1, 1]


# ---- the last messages of many keys ----------------------------------------------------------------------------------


def answer(subject: str, sequence: int, before: int, own: bytes = b"", data: bytes = b"v") -> CoreMessage:
    raw = (
        b"NATS/1.0\r\n%bNats-Stream: KV_b\r\nNats-Subject: %b\r\nNats-Sequence: %d\r\n"
        b"Nats-Time-Stamp: 2026-03-20T10:14:30Z\r\nNats-Num-Pending: 0\r\nNats-Last-Sequence: %d\r\n\r\n"
    ) % (own, subject.encode(), sequence, before)
    return CoreMessage("_INBOX.x", data, None, raw, None)


def end(before: int, left: int = 0, up_to: int | None = None) -> CoreMessage:
    boundary = b"" if up_to is None else b"Nats-UpTo-Sequence: %d\r\n" % up_to
    raw = b"NATS/1.0 204 EOB\r\nNats-Num-Pending: %d\r\nNats-Last-Sequence: %d\r\n%b\r\n" % (left, before, boundary)
    return CoreMessage("_INBOX.x", b"", None, raw, None)


def status(line: str) -> CoreMessage:
    return CoreMessage("_INBOX.x", b"", None, f"NATS/1.0 {line}\r\n\r\n".encode(), None)


def test_answers_are_read_from_the_few_headers_that_matter() -> None:
    lookup = Lookup("$JS.API", "KV_b", ["a", "b", "c"])
    assert (lookup.is_over, lookup.is_behind, lookup.up_to) == (False, False, 0)
    request = lookup.request()
    assert request.subject == "$JS.API.DIRECT.GET.KV_b"
    assert json.loads(request.data) == {"multi_last": ["a", "b", "c"]}
    lookup.accept_all([answer("a", 3, 0, b"JetSpark-Sequence:  12\r\n")])
    lookup.accept_all([answer("b", 7, 3, b"KV-Operation: DEL\r\nJetSpark-Writer: job\r\n", b"")])
    # A message that was republished has such headers of its own; and anybody may write anything into ours.
    lookup.accept_all([answer("c", 9, 7, b"Nats-Sequence: 99\r\nNats-Subject: x\r\nJetSpark-Sequence: soon\r\n")])
    was_over = lookup.is_over
    lookup.accept_all([end(9)])
    assert (was_over, lookup.is_over, lookup.left) == (False, True, [])
    assert lookup.found == [
        Stored("a", 3, b"v", "put", 12, None),
        Stored("b", 7, b"", "delete", None, "job"),
        Stored("c", 9, b"v", "put", None, None),
    ]


def test_what_a_large_answer_leaves_is_asked_for_next() -> None:
    lookup = Lookup("$JS.API", "KV_b", ["a", "b", "never"])
    lookup.request()
    lookup.accept_all([answer("b", 3, 0)])
    lookup.accept_all([end(3, left=1)])
    assert (lookup.is_over, lookup.left) == (True, ["a", "never"])
    assert json.loads(lookup.request().data) == {"multi_last": ["a", "never"]}
    was_over = lookup.is_over
    lookup.accept_all([answer("a", 5, 0)])
    lookup.accept_all([end(5)])
    assert (was_over, lookup.is_over, lookup.left) == (False, True, [])
    assert [each.subject for each in lookup.found] == ["b", "a"]


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_an_answer_with_a_hole_counts_for_nothing(lost: int) -> None:
    lookup = Lookup("$JS.API", "KV_b", ["a", "b", "c"])
    lookup.request()
    answers = [answer("a", 3, 0), answer("b", 5, 3), answer("c", 6, 5)]
    for message in answers[:lost] + answers[lost + 1 :]:
        lookup.accept_all([message])
    lookup.accept_all([end(6)])
    assert lookup.is_over
    assert (lookup.left, lookup.found) == (["a", "b", "c"], [])


def test_an_answer_whose_rest_is_lost_is_over_and_counts_for_nothing() -> None:
    lookup = Lookup("$JS.API", "KV_b", ["a", "b"])
    lookup.request()
    lookup.accept_all([answer("a", 3, 0)])
    lookup.lost()
    assert (lookup.is_over, lookup.left, lookup.found) == (True, ["a", "b"], [])


def test_markers_of_the_server_and_headers_without_a_blank_are_understood() -> None:
    lookup = Lookup("$JS.API", "KV_b", ["a", "b"])
    lookup.request()
    lookup.accept_all([answer("a", 3, 0, b"Nats-Marker-Reason: MaxAge\r\n", b"")])
    lookup.accept_all(
        [answer("b", 4, 3, b"JetSpark-Sequence:12\r\nJetSpark-Projection:1\r\nJetSpark-Stream-Created:9\r\n")]
    )
    lookup.accept_all([end(4)])
    assert lookup.found == [Stored("a", 3, b"", "purge", None, None), Stored("b", 4, b"v", "put", 12, None, "1", 9)]


def test_an_end_that_says_nothing_more_ends_an_empty_answer() -> None:
    lookup = Lookup("$JS.API", "KV_b", ["a"])
    lookup.request()
    lookup.accept_all([status("204 EOB")])
    assert (lookup.is_over, lookup.left, lookup.found, lookup.up_to) == (True, [], [], 0)


@pytest.mark.parametrize("missing", [b"Nats-Subject", b"Nats-Sequence"])
def test_a_message_that_does_not_say_where_it_was_is_an_error(missing: bytes) -> None:
    lookup = Lookup("$JS.API", "KV_b", ["a"])
    lookup.request()
    whole = answer("a", 3, 0)
    assert whole.raw_headers is not None
    raw = whole.raw_headers.replace(missing + b":", b"Other:")
    with pytest.raises(ProtocolError, match="does not say where it was"):
        lookup.accept_all([CoreMessage("_INBOX.x", b"v", None, raw, None)])


def test_a_message_of_the_leader_says_the_same() -> None:
    headers = Headers(
        {"JetSpark-Sequence": "12", "JetSpark-Writer": "job", "JetSpark-Projection": "1", "KV-Operation": "DEL"}
    )
    now = datetime.datetime(2026, 3, 20, tzinfo=datetime.UTC)
    message = StoredMessage(stream="KV_b", subject="a", sequence=3, timestamp=now, data=b"v", headers=headers)
    assert stored_of(message) == Stored("a", 3, b"v", "delete", 12, "job", "1")


def test_an_answer_may_be_that_there_is_nothing_or_nobody() -> None:
    lookup = Lookup("$JS.API", "KV_b", ["a"])
    lookup.request()
    lookup.accept_all([status("404 No Results")])
    assert (lookup.is_over, lookup.left, lookup.found) == (True, [], [])
    with pytest.raises(JetStreamUnavailable):
        Lookup("$JS.API", "KV_b", ["a"]).accept_all([status("503")])
    with pytest.raises(ServerError, match="Bad Request"):
        Lookup("$JS.API", "KV_b", ["a"]).accept_all([status("408 Bad Request")])


def test_an_answer_counts_only_if_it_is_up_to_what_is_wanted() -> None:
    lookup = Lookup("$JS.API", "KV_b", ["a", "never"], at_least=9, probe_subject="w")
    assert json.loads(lookup.request().data) == {"multi_last": ["a", "never", "w"]}
    for up_to in (8, None):
        lookup.request()
        lookup.accept_all([answer("a", 3, 0)])
        lookup.accept_all([end(3, up_to=up_to)])
        assert (lookup.is_over, lookup.is_behind, lookup.left, lookup.found) == (True, True, ["a", "never"], [])
    lookup.request()
    assert not lookup.is_behind
    lookup.accept_all([status("404 No Results")])
    assert (lookup.is_behind, lookup.left) == (True, ["a", "never"])
    lookup.request()
    lookup.accept_all([answer("a", 3, 0)])
    lookup.accept_all([answer("w", 9, 3)])
    lookup.accept_all([end(9, up_to=12)])
    assert (lookup.is_behind, lookup.left, lookup.up_to) == (False, [], 12)
    assert [each.subject for each in lookup.found] == ["a"]  # nobody has asked for the witness


@pytest.mark.parametrize("at_least", [0, 1])
def test_nothing_at_all_is_an_answer_only_where_any_place_will_do(at_least: int) -> None:
    lookup = Lookup("$JS.API", "KV_b", ["a"], at_least=at_least)
    lookup.request()
    lookup.accept_all([status("404 No Results")])
    assert (lookup.is_behind, lookup.left) == ((True, ["a"]) if at_least else (False, []))


def test_a_witness_that_is_asked_for_anyway_is_asked_for_once() -> None:
    lookup = Lookup("$JS.API", "KV_b", ["a", "w"], at_least=9, probe_subject="w")
    assert json.loads(lookup.request().data) == {"multi_last": ["a", "w"]}
    lookup.accept_all([answer("w", 9, 0)])
    lookup.accept_all([end(9, up_to=9)])
    assert [each.subject for each in lookup.found] == ["w"]


@pytest.mark.parametrize("own", [b"", OWN[0], OWN[3]], ids=["foreign value", "state", "parked"])
def test_what_a_mirror_says_does_not_count_where_the_place_matters(own: bytes) -> None:
    for at_least in (0, 1):
        lookup = Lookup("$JS.API", "KV_b_elsewhere", ["a"], at_least=at_least)
        lookup.request()
        lookup.accept_all([answer("a", 3, 0, own)])
        lookup.accept_all([end(3, up_to=3)])
        assert (lookup.is_behind, len(lookup.found)) == ((True, 0) if at_least else (False, 1))
