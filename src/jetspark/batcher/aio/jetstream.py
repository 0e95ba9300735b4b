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
            TypeError, ConfigError: An item can never be sent: nothing was sent.
            BatchPublishDisabled: The stream does not allow fast ingest: nothing is stored.
            BatchCutShort: The stream refused a message of an earlier write: nothing is stored.
            ServerError: The stream refused a message; the messages before it are stored.
            JetStreamUnavailable: No stream stores the subject of the batch's first message: nothing is stored.
            BatchInDoubt: No answer for ``patience_s`` seconds. Some items may be stored.
        """
        await self._runner.run(self._ingest.write(batch))

    async def close(self, timeout: float | None = None) -> None:
        """Wait until all items are stored, and end the server's batch.

        Raises:
            RequestTimeout: It took longer than ``timeout`` seconds.
            JetSparkError: The publisher gave up, and the running writes have failed.
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
            TypeError, ConfigError: An item can never be sent: nothing was sent.
            BatchCutShort: Exactly the first ``stored`` items are stored; its cause has the reason.
            BatchInDoubt: The first ``stored`` items are stored, the next ``max_messages`` may be, the rest is not.
            ServerError, JetStreamUnavailable, RequestTimeout: Nothing is stored.
        """
        await self._runner.run(self._atomic.write(batch))
