from __future__ import annotations

import json
from typing import Any

import pytest

from jetspark.core.message import CoreMessage
from jetspark.errors import ConfigError, JetStreamUnavailable, ServerError
from jetspark.jetstream.direct_get import BATCH_MESSAGES, BatchGet, LastGet


def stored(sequence: int, before: int, *more: str) -> CoreMessage:
    lines = [
        "NATS/1.0",
        *more,
        "Nats-Stream: S",
        "Nats-Subject: s.a",
        f"Nats-Sequence: {sequence}",
        "Nats-Time-Stamp: 2026-01-01T00:00:00Z",
        "Nats-Num-Pending: 5",
        f"Nats-Last-Sequence: {before}",
        "",
        "",
    ]
    return CoreMessage("inbox", b"%d" % sequence, None, "\r\n".join(lines).encode(), None)


def ended(line: str, *headers: str) -> CoreMessage:
    return CoreMessage("inbox", b"", None, "\r\n".join([f"NATS/1.0 {line}", *headers, "", ""]).encode(), None)


def reading(start: int = 1, subject: str | None = None, count: int | None = None) -> BatchGet:
    return BatchGet("$JS.API", "S", start_sequence=start, subject=subject, max_messages=count)


def body(get: BatchGet | LastGet) -> dict[str, object]:
    request = get.request()
    assert request.subject == "$JS.API.DIRECT.GET.S"
    fields: dict[str, object] = json.loads(request.data)
    return fields


def test_a_stream_is_read_batch_by_batch() -> None:
    get = reading(5, "s.>")
    assert body(get) == {"batch": BATCH_MESSAGES, "seq": 5, "next_by_subj": "s.>"}
    assert [get.accept(stored(5, 0)), get.accept(stored(8, 5))] != [None, None]
    assert get.accept(ended("204 EOB", "Nats-Num-Pending: 3", "Nats-Last-Sequence: 8")) is None
    assert (get.is_over, get.is_done) == (True, False)
    assert body(get)["seq"] == 9
    assert get.accept(ended("204 EOB", "Nats-Num-Pending: 0", "Nats-Last-Sequence: 0")) is None
    assert get.is_done


def test_a_message_lost_on_the_way_is_asked_for_again() -> None:
    get = reading()
    get.request()
    assert get.accept(stored(1, 0)) is not None
    assert get.accept(stored(3, 2)) is None
    assert (get.is_over, get.is_done) == (True, False)
    assert body(get)["seq"] == 2


def test_a_loss_at_the_end_is_noticed_too() -> None:
    get = reading()
    get.request()
    get.accept(stored(1, 0))
    get.accept(ended("204 EOB", "Nats-Num-Pending: 0", "Nats-Last-Sequence: 2"))
    assert (get.is_over, get.is_done) == (True, False)


def test_the_messages_own_headers_do_not_confuse_it() -> None:
    get = reading()
    get.request()
    message = get.accept(stored(1, 0, "Nats-Last-Sequence: 77", "Nats-Subject: other"))
    assert message is not None
    assert (message.subject, message.headers.get_all("Nats-Subject")) == ("s.a", ["other"])


@pytest.mark.parametrize("line", ["NATS/1.0 404 No Messages", "NATS/1.0 204 EOB", "HTTP/1.1", "NATS/1.0\r\nno colon"])
def test_a_message_whose_publisher_wrote_a_status_is_no_end(line: str) -> None:
    get, last = reading(), LastGet("$JS.API", "S", ["s.>"], None)
    get.request(), last.request()
    message = stored(1, 0)
    assert message.raw_headers is not None
    odd = CoreMessage("inbox", b"1", None, message.raw_headers.replace(b"NATS/1.0", line.encode()), None)
    found = get.accept(odd)
    assert found is not None
    assert (found.sequence, found.data, get.is_over) == (1, b"1", False)
    last.accept(odd)
    assert ([each.sequence for each in last.messages], last.is_over) == ([1], False)


def test_a_count_is_kept() -> None:
    get = reading(count=2)
    assert body(get)["batch"] == 2
    get.accept(stored(1, 0))
    assert not get.is_done
    get.accept(stored(2, 1))
    assert get.is_done


def test_what_is_lost_with_the_connection_is_asked_for_again() -> None:
    get = reading()
    get.request()
    get.accept(stored(1, 0))
    get.lost()
    assert (get.is_over, get.is_done) == (True, False)
    assert body(get)["seq"] == 2
    last = LastGet("$JS.API", "S", [">"], None)
    last.request()
    last.accept(stored(1, 0))
    last.lost()
    assert (last.is_over, last.is_broken) == (True, True)


def test_nothing_there_and_nobody_there_are_told_apart() -> None:
    get = reading()
    get.request()
    assert get.accept(ended("404 Message Not Found")) is None
    assert get.is_done
    for kind, line in ((JetStreamUnavailable, "503"), (ServerError, "408 Bad Request")):
        get = reading()
        get.request()
        with pytest.raises(kind):
            get.accept(ended(line))
    arguments: Any
    for arguments in ({"start": 0}, {"count": 0}):
        with pytest.raises(ConfigError):
            reading(**arguments)


def test_the_last_messages_are_whole_or_asked_for_again() -> None:
    get = LastGet("$JS.API", "S", ["s.a", "s.>"], 9)
    assert body(get) == {"multi_last": ["s.a", "s.>"], "up_to_seq": 9}
    get.accept(stored(3, 0))
    get.accept(stored(7, 5))
    get.accept(ended("204 EOB", "Nats-Num-Pending: 0", "Nats-Last-Sequence: 7"))
    assert (get.is_over, get.is_broken) == (True, True)
    get.request()
    assert (get.is_over, get.is_broken, get.messages) == (False, False, [])
    get.accept(stored(3, 0))
    get.accept(ended("204 EOB", "Nats-Num-Pending: 0", "Nats-Last-Sequence: 3"))
    assert (get.is_broken, [message.sequence for message in get.messages]) == (False, [3])


def test_too_many_subjects_at_once_say_so() -> None:
    get = LastGet("$JS.API", "S", [">"], None)
    get.request()
    with pytest.raises(ConfigError, match="more than 1024 subjects"):
        get.accept(ended("413 Too Many Results"))
    filters: Any
    for filters in ("abc", []):
        with pytest.raises(ConfigError, match="expected a list"):
            LastGet("$JS.API", "S", filters, None)


def test_an_answer_the_server_cut_short_is_not_taken_for_all_of_it() -> None:
    get = LastGet("$JS.API", "S", [">"], None)
    get.request()
    get.accept(stored(3, 0))
    with pytest.raises(ConfigError, match=r"2 of the last messages .* 64 MB"):
        get.accept(ended("204 EOB", "Nats-Num-Pending: 2", "Nats-Last-Sequence: 3"))


def test_nothing_is_over_before_it_was_asked_for_and_a_request_begins_anew() -> None:
    get = reading()
    assert (get.is_over, get.is_done) == (False, False)
    get.request()
    get.lost()
    ends = [get.is_over]
    get.request()
    assert [*ends, get.is_over] == [True, False]
    last = LastGet("$JS.API", "S", [">"], None)
    assert (last.is_over, last.is_broken, last.is_empty, last.messages) == (False, False, False, [])


def test_what_a_server_does_not_say_is_nothing() -> None:
    """The first of a batch has no message before it, and an end without a number has nothing pending."""
    block = (stored(3, 0).raw_headers or b"").replace(b"Nats-Last-Sequence: 0\r\n", b"")
    first = CoreMessage("inbox", b"", None, block, None)
    get = LastGet("$JS.API", "S", [">"], None)
    get.request()
    get.accept(first)
    get.accept(ended("204 EOB", "Nats-Last-Sequence: 3"))
    assert (get.is_over, get.is_broken) == (True, False)


def test_subjects_without_messages_and_a_stream_without_answers_are_told_apart() -> None:
    get = LastGet("$JS.API", "S", [">"], None)
    get.request()
    get.accept(ended("404 No Results"))
    assert (get.is_over, get.is_broken, get.messages) == (True, False, [])
    with pytest.raises(JetStreamUnavailable):
        get.accept(ended("503"))
    with pytest.raises(ServerError) as refused:
        get.accept(ended("408 Bad Request"))
    assert (refused.value.code, refused.value.stream) == (408, "S")


def test_before_the_first_message_there_was_nothing() -> None:
    assert LastGet("$JS.API", "S", [">"], 0).is_empty
    assert not LastGet("$JS.API", "S", [">"], 1).is_empty
    with pytest.raises(ConfigError, match="up_to_sequence=-1"):
        LastGet("$JS.API", "S", [">"], -1)
