"""Names and streams that no other test of this process has, for tests that share a server and its account."""

from __future__ import annotations

import itertools
from typing import Any

from jetspark.blocking import JetStream, Stream, StreamConfig

_numbers = itertools.count(1)


def new_name(word: str = "S") -> str:
    return f"{word}{next(_numbers)}"


def new_stream(js: JetStream, **options: Any) -> Stream:
    """A stream of everything below its name, with every way to publish and to read switched on."""
    name = new_name()
    usual = {"allow_batched": True, "allow_atomic": True, "allow_direct": True, "allow_message_ttl": True}
    return js.create_stream(StreamConfig(name=name, subjects=[f"{name}.>"], **(usual | options)))
