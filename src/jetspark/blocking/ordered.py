"""Ordered consumers for threads. What to do about each message is decided in :mod:`jetspark.jetstream.ordered`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from jetspark.blocking.stream_message import JetStreamMessage
from jetspark.blocking.subscription import Subscription
from jetspark.core.events import ConnectionEvent, Reconnected
from jetspark.errors import ConnectionClosed, JetSparkError, RequestTimeout
from jetspark.jetstream.info import ConsumerInfo
from jetspark.jetstream.ordered import (
    CLEAN_UP_TIMEOUT_S,
    SILENCE_S,
    OrderedOptions,
    OrderedReader,
    Patience,
    Verdict,
    heartbeat_for,
    retry_pauses,
)

if TYPE_CHECKING:
    from jetspark.blocking.jetstream import JetStream

__all__ = ["OrderedConsumer"]


class OrderedConsumer:
    """Reads a stream in order, without acknowledgements, through reconnects, restarts and leader changes.

    Never skips, repeats or reorders what the stream still has, and never goes on in another stream of the same name.
    Make one with :meth:`Stream.ordered_consumer`; each call of :meth:`messages` begins where the options say.
    """

    def __init__(self, js: JetStream, stream_name: str, options: OrderedOptions) -> None:
        self._js = js
        self.stream_name = stream_name
        self.options = options

    def messages(self) -> Iterator[JetStreamMessage]:
        """Every message, then every new one as it comes; ends only when the connection is closed.

        Once it has begun it waits for a server that is away for as long as that takes.

        Raises:
            StreamNotFound: There is no such stream, or no more; found out within 13 seconds.
            StreamRecreated: The stream was deleted, and there is another of its name.
            StreamWentBack: The stream lost messages that were read: it was restored from an older state, or kept in
                memory only.
            RequestTimeout: No answer within the context's ``timeout`` when it was to begin.
        """
        reading = Reading(self._js, self.stream_name, self.options)
        try:
            while (message := reading.next()) is not None:
                yield message
        finally:
            reading.close()


class Reading:
    """One pass over a stream: the present consumer, and the next one when that is lost.

    ``listing`` names what is read by somebody who wants to see its end: then going on for longer than the context's
    time-out without any progress is an error. Without it one waits for ever, once there was a first consumer.
    """

    def __init__(self, js: JetStream, stream_name: str, options: OrderedOptions, *, listing: str = "") -> None:
        self._js, self._client, self._stream_name = js, js._client, stream_name
        self._listing = listing
        self._reader = OrderedReader(options, heartbeat_for(js._timeout_s)) if listing else OrderedReader(options)
        self._subscription: Subscription | None = None
        self._consumer = ""
        self._is_given_up = False
        self.initial_pending: int | None = None
        """How many messages were waiting when the first consumer was made."""

    @property
    def is_caught_up(self) -> bool:
        """Everything that was there when this began was read."""
        return self._reader.is_caught_up

    def start(self) -> None:
        """Make the first consumer now, not at the first message."""
        if self._subscription is None:
            self._restart(self._patience())

    def next(self, *, until_idle: bool = False) -> JetStreamMessage | None:
        """The next message; None when the connection is closed, which is an error in a listing.

        With ``until_idle`` also None when everything was read that was there in the beginning, or the server says that
        it has nothing: what was counted as waiting may be gone.
        """
        patience = self._patience()
        try:
            while not (until_idle and self._reader.is_caught_up):
                message = self._receive(patience)
                if message is None:
                    continue
                patience.renew(_now())
                match self._reader.accept(message):
                    case Verdict.DELIVER:
                        return message
                    case Verdict.RESPOND:
                        self._client.publish(self._reader.respond_to)
                    case Verdict.RESTART:
                        self._drop()
                    case Verdict.IGNORE | Verdict.IDLE:
                        pass
        except ConnectionClosed:
            if self._listing:
                raise
        return None

    def close(self) -> None:
        if self._on_event in self._client._listeners:
            self._client._listeners.remove(self._on_event)
        try:
            self._drop()
        finally:  # An interrupt can be in the way of one of them; when the first is done, the second has nothing to do.
            self._drop()

    def _patience(self) -> Patience:
        is_bounded = self._listing or not self._reader.has_begun
        what = self._listing or f"ordered consumer of stream {self._stream_name!r}"
        return Patience(what, self._js._timeout_s if is_bounded else None, _now())

    def _receive(self, patience: Patience) -> JetStreamMessage | None:
        """What comes next; None when the consumer was lost instead."""
        if self._subscription is None:
            self._restart(patience)
        assert self._subscription is not None
        # We were too slow; the next heartbeat would tell, but we know already.
        if not self._subscription.dropped or self._subscription.pending_messages:
            try:
                return cast(JetStreamMessage, self._subscription.next(patience.left_s(_now(), SILENCE_S)))
            except RequestTimeout:
                self._check(patience)
            except ConnectionClosed:
                if self._client.is_closed:
                    raise
        self._drop()
        return None

    def _restart(self, patience: Patience) -> None:
        if self._on_event not in self._client._listeners:  # not when it is made: it may be interrupted, and not closed
            self._client._listeners.append(self._on_event)
        for pause_s in retry_pauses():
            inbox = self._client._new_inbox()
            subscription = self._client._subscribe(inbox, **self._reader.bounds())
            subscription._state.message_class = JetStreamMessage
            try:
                info = self._open(inbox, patience)
            except BaseException as error:
                subscription.unsubscribe()
                if not (isinstance(error, JetSparkError) and self._reader.may_pass(error)):
                    raise
                self._check(patience, error)
                time.sleep(patience.left_s(_now(), pause_s))
            else:
                self._subscription, self._consumer = subscription, info.name
                if self.initial_pending is None:
                    self.initial_pending = info.pending + info.delivered.consumer_sequence
                return

    def _open(self, inbox: str, patience: Patience) -> ConsumerInfo:
        js = self._js
        operation = self._reader.open(js._api, self._stream_name, inbox)
        return js._run(operation, patience.left_s(_now(), js._timeout_s))

    def _check(self, patience: Patience, error: JetSparkError | None = None) -> None:
        try:
            patience.check(_now(), error)
        except JetSparkError:
            self._is_given_up = True
            raise

    def _drop(self) -> None:
        """Give the present consumer up; the server would forget it by itself, only later."""
        subscription = self._subscription
        if subscription is None or self._client.is_closed:
            return
        subscription.unsubscribe()
        self._subscription = None  # not before: interrupted, it is done again
        if self._client.is_connected:
            try:
                operation = self._js._api.delete_consumer(self._stream_name, self._consumer)
                # One who did not answer before will not do so now.
                self._js._run(operation, 0.0 if self._is_given_up else CLEAN_UP_TIMEOUT_S)
            except JetSparkError:
                pass  # gone already, or about to be

    def _on_event(self, event: ConnectionEvent) -> None:
        # What was sent meanwhile is lost, and the consumer may be: do not wait for its silence.
        if isinstance(event, Reconnected) and self._subscription is not None:
            self._client._unsubscribe(self._subscription._state, 0)


def _now() -> float:
    return time.monotonic()
