"""The server's time of day, for timers, retries and pauses, which are due by the server's clock.

A program's own clock may be wrong, and a timer that is due "in an hour" by it fires at once, or a day late. The server
sends its time with every ``STREAM.INFO``; between two answers the event loop's clock, which is never set, measures the
time since. The server's time is counted from when the request was sent, so the time read here is ahead by up to a round
trip: a timer may come late by as much, and never early.
"""

from __future__ import annotations

import datetime
from weakref import WeakKeyDictionary

from jetspark.aio import clock
from jetspark.aio.client import Client
from jetspark.aio.context import DriverContext, context_of
from jetspark.aio.jetstream import JetStream
from jetspark.app.clock import seconds_now
from jetspark.errors import ProtocolError

__all__ = ["ServerClock", "server_clock"]

REFRESH_S = 60.0
"""How long an answer is used. Clocks drift by some ms in this time; a clock that was set is noticed afterwards."""


class ServerClock:
    """The time of day of the server that leads a stream."""

    def __init__(self, context: DriverContext, stream: str) -> None:
        self._context, self._stream = context, stream
        self._said: datetime.datetime | None = None
        self._sent_at = self._sent_wall_s = 0.0

    async def now(self) -> datetime.datetime:
        """The time; requested from the server if the last answer is older than ``REFRESH_S``.

        Raises:
            JetSparkError: The stream's info cannot be read. It needs ``$JS.API.STREAM.INFO.<stream>``.
        """
        if self._said is None or self._longest_s() > REFRESH_S:
            sent_at, sent_wall_s = clock.now(), seconds_now()
            info = await self._context.run(self._context.api.stream_info(self._stream))
            if info.timestamp is None:
                raise ProtocolError(f"STREAM.INFO.{self._stream}: the server does not say its time ('ts')")
            self._said, self._sent_at, self._sent_wall_s = info.timestamp, sent_at, sent_wall_s
        return self.last_known()

    def last_known(self) -> datetime.datetime:
        """The time by the last answer; :meth:`now` has to have been called before."""
        assert self._said is not None
        return self._said + datetime.timedelta(seconds=clock.now() - self._sent_at)

    def at_most(self) -> datetime.datetime | None:
        """The time or a later one, without a request; None before the server's first answer."""
        return None if self._said is None else self._said + datetime.timedelta(seconds=self._longest_s())

    def _longest_s(self) -> float:
        """The age of the answer, at most: one clock stands still while the machine sleeps, the other can be set."""
        return max(clock.now() - self._sent_at, seconds_now() - self._sent_wall_s)


_clocks: WeakKeyDictionary[Client, dict[str, ServerClock]] = WeakKeyDictionary()


def server_clock(js: JetStream, stream: str) -> ServerClock:
    """The one clock of a connection and a stream: each event of a handler has other objects that need it."""
    context = context_of(js)
    clocks = _clocks.setdefault(context.client, {})
    found = clocks.get(stream)
    if found is None:
        found = clocks[stream] = ServerClock(context, stream)
    return found
