"""A message is the same thing with msgspec and without."""

from __future__ import annotations

import gc
import importlib.util
import sys
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

import jetspark.core.message as installed


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


def test_it_has_what_it_was_given(kind: Any) -> None:
    client = object()
    message = kind("a.b", b"data", b"reply", b"NATS/1.0\r\nX: 1\r\n\r\n", client)
    assert (message.subject, message.data, message.reply, message._client) == ("a.b", b"data", "reply", client)
    assert (message.size_bytes, message.headers["X"]) == (18 + 4, "1")
    assert message.headers is message.headers
    assert repr(message) == "<Message subject='a.b', reply='reply', 4 bytes>"
    assert dict(kind("a", b"", None, None, None).headers) == {}


def test_two_messages_are_never_the_same(kind: Any) -> None:
    first, second = (kind("a", b"", None, None, None) for _ in range(2))
    assert first != second
    assert len({first, second}) == 2


def test_it_has_no_room_for_other_attributes(kind: Any) -> None:
    class Mine(kind):  # type: ignore[misc]
        def shout(self) -> str:
            return str(self.subject).upper()

    message = Mine("a", b"", None, None, None)
    assert message.shout() == "A"
    with pytest.raises(AttributeError):
        message.other = 1


def test_the_garbage_collector_does_not_look_at_those_of_msgspec() -> None:
    assert not gc.is_tracked(installed.CoreMessage("a", b"", None, None, None))
    assert gc.is_tracked(without_msgspec().CoreMessage("a", b"", None, None, None))
