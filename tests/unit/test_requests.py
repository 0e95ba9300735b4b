"""Requests that wait for their answers, one or many."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest
from support.connections import connected

from jetspark.core.message import CoreMessage
from jetspark.core.requests import Collector, Names, Requests
from jetspark.core.subscription import Done, Event, Failed
from jetspark.errors import ConfigError, ConnectionLost, NoResponders


def waiting() -> Requests:
    requests = Requests(Names("_INBOX.me"))
    for token, handle in (("1", "a"), ("2", "b"), ("3", "a")):
        requests.add(token, handle, "s")
    return requests


def handles(requests: Requests) -> list[str]:
    events: list[Event] = []
    requests.fail_all(ConnectionLost("gone"), events)
    return [event.handle for event in events if isinstance(event, Failed)]


def test_requests_are_forgotten_by_who_made_them() -> None:
    requests = waiting()
    requests.forget_handle("a")
    assert handles(requests) == ["b"]


def test_a_request_that_was_not_sent_fails_alone() -> None:
    requests, events, error = waiting(), list[Event](), ConnectionLost("not sent")
    assert requests.fail_reply(b"_INBOX.me.2", error, events) is True
    assert events == [Failed("b", error)]
    assert handles(requests) == ["a", "a"]


def test_a_reply_subject_is_ours_also_when_nobody_waits_any_more() -> None:
    events: list[Event] = []
    assert waiting().fail_reply(b"_INBOX.me.9", ConnectionLost("not sent"), events) is True
    assert waiting().fail_reply(b"_INBOX.other.1", ConnectionLost("not sent"), events) is False
    assert events == []


def test_answers_that_were_told_are_not_kept() -> None:
    connection = connected()
    token = connection.request("asked", "svc", b"", None)
    replies = connection.requests.replies
    assert replies is not None
    connection.receive_data(b"MSG _INBOX.me.%b %d 1\r\nx\r\n" % (token.encode(), replies.sid))
    assert Done("asked", ANY) in connection.events()
    assert replies.arrived == []


# ---- many answers ----------------------------------------------------------------------------------------------------


ANSWER = CoreMessage("r", b"x", None, None, None)


def collector(**options: Any) -> Collector:
    return Collector("svc", **{"now": 100.0, "timeout_s": 5.0, "stall_s": None, "max_messages": 0} | options)


def test_without_other_limits_it_waits_until_the_timeout() -> None:
    answers = collector()
    assert answers.wait_s(100.0) == 5.0
    assert answers.accept(ANSWER, now=104.0, stop=None)
    assert answers.wait_s(104.0) == 1.0
    assert answers.wait_s(105.0) == 0.0
    assert answers.wait_s(106.0) < 0


def test_so_many_answers_are_enough() -> None:
    answers = collector(max_messages=2)
    assert answers.accept(ANSWER, now=100.0, stop=None)
    assert answers.wait_s(100.0) == 5.0
    assert answers.accept(ANSWER, now=100.0, stop=None)
    assert answers.wait_s(100.0) == 0.0


def test_a_stall_is_counted_from_each_answer_and_only_after_the_first() -> None:
    answers = collector(stall_s=1.0)
    assert answers.wait_s(100.0) == 5.0
    answers.accept(ANSWER, now=102.0, stop=None)
    assert answers.wait_s(102.0) == 1.0
    answers.accept(ANSWER, now=102.5, stop=None)
    assert answers.wait_s(103.0) == 0.5
    answers.accept(ANSWER, now=104.5, stop=None)
    assert answers.wait_s(104.5) == 0.5


def test_the_message_that_stops_is_not_an_answer() -> None:
    answers = collector(max_messages=2)
    assert answers.accept(ANSWER, now=100.0, stop=lambda message: not message.data)
    assert not answers.accept(CoreMessage("r", b"", None, None, None), now=100.0, stop=lambda message: not message.data)


def test_nobody_listening_is_an_error_and_is_not_shown_to_stop() -> None:
    nobody = CoreMessage("r", b"", None, b"NATS/1.0 503\r\n\r\n", None)
    with pytest.raises(NoResponders) as failure:
        collector().accept(nobody, now=100.0, stop=lambda message: True)
    assert failure.value.subject == "svc"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_messages": -1}, "max_messages=-1"),
        ({"timeout_s": 0}, "timeout=0"),
        ({"timeout_s": -1.0}, "timeout=-1.0"),
        ({"stall_s": 0}, "stall=0"),
    ],
)
def test_limits_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        collector(**options)
