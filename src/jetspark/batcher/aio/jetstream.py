"""Sinks that store batches in JetStream, with asyncio; :mod:`jetspark.batcher.jetstream_sinks` decides."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from jetspark.aio.context import context_of
from jetspark.aio.fast import FastPublisher
from jetspark.aio.jetstream import JetStream
from jetspark.batcher.aio.sinks import Runner
from jetspark.batcher.sink_base import AtomicSinkBase, FastIngestSinkBase
from jetspark.core.connection import Connection

__all__ = ["AtomicSink", "FastIngestSink"]

T = TypeVar("T")


class FastIngestSink(FastIngestSinkBase[JetStream, FastPublisher, T]):
    __doc__ = FastIngestSinkBase.__doc__

    _make_runner = Runner
    _make_turn = asyncio.Lock

    async def write(self, batch: Sequence[T], /) -> None:
        """Store a batch.

        Raises:
            TypeError, ConfigError: An item that can never be sent: nothing was.
            BatchPublishDisabled: The stream does not allow fast ingest: nothing is stored.
            BatchCutShort: See above.
            ServerError: The stream refused a message; those before it are stored.
            JetStreamUnavailable: Nobody listens to the first message of a batch: nothing of it is stored.
            BatchInDoubt: Out of patience. Items handed over may be stored.
        """
        await self._runner.run(self._ingest.write(batch))

    async def close(self, timeout: float | None = None) -> None:
        """Wait until everything handed over is stored, and end the batch.

        Raises:
            RequestTimeout: It took longer than ``timeout`` seconds.
            JetSparkError: The publisher gave up; so did the writes under way.
        """
        await self._runner.run(self._ingest.close(timeout))

    async def __aenter__(self) -> FastIngestSink[T]:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


class AtomicSink(AtomicSinkBase[JetStream, T]):
    __doc__ = AtomicSinkBase.__doc__

    _make_runner = Runner

    @staticmethod
    def _connection_of(js: JetStream) -> Connection:
        return context_of(js).connection

    @staticmethod
    def _outcome_of(future: Any) -> Any:
        return future

    async def write(self, batch: Sequence[T], /) -> None:
        """Store a batch.

        Raises:
            TypeError, ConfigError: An item that can never be sent: nothing was.
            BatchCutShort: Exactly the first ``stored`` items are stored; its cause says why.
            BatchInDoubt: The first ``stored`` are; the next ``max_messages`` are or are not, and the rest is not.
            ServerError, JetStreamUnavailable, RequestTimeout: Nothing is stored.
        """
        await self._runner.run(self._atomic.write(batch))
