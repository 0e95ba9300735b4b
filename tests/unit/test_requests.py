"""Who waits for which answer."""

from __future__ import annotations

from unittest.mock import ANY

from support.connections import connected

from jetspark.core.names import Names
from jetspark.core.outcomes import Done, Event, Failed
from jetspark.core.requests import Requests
from jetspark.errors import ConnectionLost


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
