"""A received message, which is the same thing with msgspec and without."""

from __future__ import annotations

import gc
import importlib.util
import sys
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

import jetspark.core.message as installed
from jetspark.core.headers import Headers, Status
from jetspark.errors import ProtocolError, UsageError


def without_msgspec() -> ModuleType:
    """The module as it is where msgspec is not installed."""
    spec = importlib.util.find_spec(installed.__name__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {"msgspec": None}):
        spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["msgspec", "plain"])
def kind(request: pytest.FixtureRequest) -> Any:
    return (installed if request.param == "msgspec" else without_msgspec()).CoreMessage


@pytest.fixture
def message(kind: Any) -> Any:
    def make(reply: bytes | None = None, headers: bytes | None = None) -> Any:
        return kind("a.b", b"hello", reply, headers, None)

    return make


def test_subject_and_data_are_as_received(message: Any) -> None:
    assert (message().subject, message().data) == ("a.b", b"hello")


def test_the_reply_subject_is_text_and_empty_when_there_is_none(message: Any) -> None:
    assert message("é".encode()).reply == message("é".encode()).reply_subject() == "é"
    assert message().reply == message(b"").reply == ""


def test_answering_a_message_that_wants_no_answer_is_an_error_that_says_so(message: Any) -> None:
    with pytest.raises(UsageError, match=r"'a\.b' has no reply subject"):
        message().reply_subject()


def test_a_reply_subject_that_is_not_utf_8_is_kept_like_such_a_subject(message: Any) -> None:
    odd = message(b"r\xff")
    assert odd.reply == "r\udcff"
    assert "r" in repr(odd)


def test_headers_are_decoded_once_and_empty_when_there_are_none(message: Any) -> None:
    received = message(headers=b"NATS/1.0\r\nA: 1\r\n\r\n")
    assert received.headers == {"A": "1"}
    assert received.headers is received.headers
    plain = message()
    assert plain.headers == Headers()
    assert plain.headers is plain.headers


def test_the_size_counts_headers_and_data(message: Any) -> None:
    assert message(headers=b"NATS/1.0\r\nA: 1\r\n\r\n").size_bytes == 18 + len(message().data)


def test_the_status_is_read_without_the_headers(message: Any) -> None:
    assert message(headers=b"NATS/1.0 503 No Responders\r\n\r\n").status == Status(503, "No Responders")
    assert message(headers=b"NATS/1.0\r\nA: 1\r\n\r\n").status is None
    assert message().status is None


def test_reading_the_headers_leaves_the_status_readable(message: Any) -> None:
    received = message(headers=b"NATS/1.0 100 Idle\r\nA: 1\r\n\r\n")
    assert received.headers == {"A": "1"}
    assert received.status == Status(100, "Idle")


def test_damaged_headers_are_an_error_for_the_reader_only_when_read(message: Any) -> None:
    damaged = message(headers=b"garbage")
    assert damaged.data == b"hello"
    with pytest.raises(ProtocolError):
        damaged.headers  # noqa: B018


def test_the_repr_shows_the_size_and_not_the_payload(message: Any) -> None:
    assert repr(message()) == "<Message subject='a.b', 5 bytes>"
    assert repr(message(b"r")) == "<Message subject='a.b', reply='r', 5 bytes>"


def test_it_knows_the_client_it_came_by(kind: Any) -> None:
    client = object()
    assert kind("a", b"", None, None, client)._client is client


def test_two_messages_are_never_the_same(message: Any) -> None:
    first, second = message(), message()
    assert first != second
    assert len({first, second}) == 2


def test_it_has_no_room_for_other_attributes(kind: Any) -> None:
    class Mine(kind):  # type: ignore[misc]
        def shout(self) -> str:
            return str(self.subject).upper()

    mine = Mine("a", b"", None, None, None)
    assert mine.shout() == "A"
    with pytest.raises(AttributeError):
        mine.other = 1


def test_the_garbage_collector_does_not_look_at_those_of_msgspec() -> None:
    assert not gc.is_tracked(installed.CoreMessage("a", b"", None, None, None))
    assert gc.is_tracked(without_msgspec().CoreMessage("a", b"", None, None, None))
