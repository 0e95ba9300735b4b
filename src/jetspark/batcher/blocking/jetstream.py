"""Sinks that store batches in JetStream, from threads; :mod:`jetspark.batcher.jetstream_sinks` decides."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar

from jetspark.batcher.blocking.sinks import Runner
from jetspark.batcher.sink_base import AtomicSinkBase, FastIngestSinkBase
from jetspark.blocking.context import context_of
from jetspark.blocking.fast import FastPublisher
from jetspark.blocking.jetstream import JetStream
from jetspark.core.connection import Connection

__all__ = ["AtomicSink", "FastIngestSink"]

T = TypeVar("T")


class FairLock:
    """A fair lock: threads get it in the order of their requests."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._is_taken = False

    def acquire(self) -> None:
        with self._guard:
            if not self._is_taken:
                self._is_taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        try:
            turn.acquire()  # released by the previous owner, so no other thread can overtake
        except BaseException:  # an interrupt: leave the queue, or release the lock if it was passed to this thread
            with self._guard:
                was_waiting = turn in self._waiting
                if was_waiting:
                    self._waiting.remove(turn)
            if not was_waiting:
                self.release()
            raise

    def release(self) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False


class FastIngestSink(FastIngestSinkBase[JetStream, FastPublisher, T]):
    __doc__ = FastIngestSinkBase.__doc__

    _make_runner = Runner
    _make_turn = FairLock

    def write(self, batch: Sequence[T], /) -> None:
        """Store a batch.

        Raises:
            TypeError, ConfigError: An item can never be sent: nothing was sent.
            BatchPublishDisabled: The stream does not allow fast ingest: nothing is stored.
            BatchCutShort: The stream refused a message of an earlier write: nothing is stored.
            ServerError: The stream refused a message; the messages before it are stored.
            JetStreamUnavailable: No stream stores the subject of the batch's first message: nothing is stored.
            BatchInDoubt: No answer for ``patience_s`` seconds. Some items may be stored.
        """
        self._runner.run(self._ingest.write(batch))

    def close(self, timeout: float | None = None) -> None:
        """Wait until all items are stored, and end the server's batch.

        Raises:
            RequestTimeout: It took longer than ``timeout`` seconds.
            JetSparkError: The publisher gave up, and the running writes have failed.
        """
        self._runner.run(self._ingest.close(timeout))

    def __enter__(self) -> FastIngestSink[T]:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class AtomicSink(AtomicSinkBase[JetStream, T]):
    __doc__ = AtomicSinkBase.__doc__

    _make_runner = Runner

    @staticmethod
    def _connection_of(js: JetStream) -> Connection:
        return context_of(js).connection

    @staticmethod
    def _outcome_of(future: Any) -> Any:
        return future.result()

    def write(self, batch: Sequence[T], /) -> None:
        """Store a batch.

        Raises:
            TypeError, ConfigError: An item can never be sent: nothing was sent.
            BatchCutShort: Exactly the first ``stored`` items are stored; its cause has the reason.
            BatchInDoubt: The first ``stored`` items are stored, the next ``max_messages`` may be, the rest is not.
            ServerError, JetStreamUnavailable, RequestTimeout: Nothing is stored.
        """
        self._runner.run(self._atomic.write(batch))
