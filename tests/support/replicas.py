"""A replica that is behind, on one server and for as long as a test wants."""

from __future__ import annotations

import contextlib
import itertools
import time

from jetspark import StreamConfig, StreamSource
from jetspark.blocking import JetStream, Stream
from jetspark.errors import ServerError

_numbers = itertools.count(1)


def stale_replica(js: JetStream, stream: Stream, last_sequence: int) -> Stream:
    """A mirror that answers every second direct get of a stream, as its replicas do, from before a sequence.

    It has lost what came after ``last_sequence``; what is stored from now on it gets.
    """
    last = stream.info().state.last_sequence
    name = f"STALE{next(_numbers)}"
    mirror = js.create_stream(
        StreamConfig(name=name, mirror=StreamSource(name=stream.name), mirror_direct=True, allow_direct=True)
    )
    deadline = time.monotonic() + 30
    while mirror.info().state.last_sequence < last:
        assert time.monotonic() < deadline, "the mirror does not catch up"
        time.sleep(0.01)
    for sequence in range(last_sequence + 1, last + 1):
        with contextlib.suppress(ServerError):  # a bucket without history has replaced some already
            mirror.delete_message(sequence)
    return mirror
