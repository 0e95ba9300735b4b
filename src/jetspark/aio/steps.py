"""Running procedures with asyncio: this module performs the steps of :mod:`jetspark.publish.steps`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from jetspark.aio import clock
from jetspark.aio.ack_future import error_of
from jetspark.aio.context import DriverContext, context_of
from jetspark.aio.fast import FastBatch
from jetspark.aio.jetstream import JetStream
from jetspark.aio.source import Source
from jetspark.aio.step_runner import run_steps
from jetspark.aio.subscription import next_some
from jetspark.core.headers import decode
from jetspark.core.step_runner import ReadClock, Sleep, StepRun
from jetspark.errors import ConnectionClosed, JetSparkError
from jetspark.jetstream.operations import Api, Deadline, Request
from jetspark.jetstream.ordered import CLEAN_UP_TIMEOUT_S
from jetspark.jetstream.publishing import publish_headers
from jetspark.publish.fast_options import FastBatchOptions
from jetspark.publish.steps import (
    AskMany,
    ClosePull,
    Connect,
    IngestAll,
    IngestReport,
    OpenPull,
    Pieces,
    Procedure,
    PublishEach,
    Pull,
    Step,
    meaning,
)

__all__ = ["ProcedureRunner"]

T = TypeVar("T")


class ProcedureRunner:
    """Runs procedures on a JetStream context, one at a time."""

    def __init__(self, js: JetStream | None = None, *, renew: Callable[[], Awaitable[JetStream]] | None = None) -> None:
        """Pass a context, or a function that returns an open one; procedures call it when they connect."""
        self._context = None if js is None else context_of(js)
        self._renew = renew
        self._meaning = partial(meaning, renews=renew is not None)
        self._ways: dict[type[Any], Callable[[Any], Awaitable[Any]]] = {
            Request: self._ask,
            Sleep: lambda step: clock.sleep(step.draw_s(clock.rng().random)),
            ReadClock: self._now,
            Connect: self._connect,
            AskMany: self._ask_many,
            IngestAll: self._ingest,
            PublishEach: self._publish_each,
            OpenPull: self._open_pull,
            Pull: self._pull,
            ClosePull: self._close_pull,
        }

    async def run(self, procedure: Procedure[T]) -> T:
        return await run_steps(StepRun(procedure), self._perform)

    async def pieces(self, reading: Pieces) -> AsyncGenerator[list[Any], None]:
        """Read to the end; closes the reading even if the caller leaves the loop early."""
        try:
            while (piece := await self.run(reading.next())) is not None:
                yield piece
        finally:
            await self.run(reading.close())

    # ---- the steps ---------------------------------------------------------------------------------------------

    async def _perform(self, step: Step) -> Any:
        try:
            return await self._ways[type(step)](step)
        except ConnectionClosed as error:
            raise self._meaning(error) from error

    @property
    def _connected(self) -> DriverContext:
        assert self._context is not None, "a procedure connects before anything else"
        return self._context

    async def _now(self, step: ReadClock) -> float:
        return clock.now()

    async def _connect(self, step: Connect) -> Api:
        if self._renew is not None:
            self._context = context_of(await self._renew())
        return self._connected.api

    async def _ask(self, step: Request) -> Any:
        context = self._connected
        return await context.perform(step, Deadline(context.timeout_s))

    async def _ask_many(self, step: AskMany) -> None:
        context, reading = self._connected, step.answers
        timeout_s, accept_all = context.timeout_s, reading.accept_all
        async with context.asked(reading.request()) as answers:
            try:
                while not reading.is_over:
                    accept_all(await next_some(answers, timeout_s))
            except ConnectionClosed:
                if context.client.is_closed:
                    raise
                reading.lost()

    async def _ingest(self, step: IngestAll) -> IngestReport:
        batch = FastBatch(self._connected, FastBatchOptions(gap="ok"))
        failure: JetSparkError | None = None
        try:
            async with batch:
                await batch.add_many(step.items, commit=True)
        except JetSparkError as error:
            failure = self._meaning(error)
        missing = (*batch.gaps, *batch.doubts)
        return IngestReport(batch.acknowledged, missing, tuple(batch.errors), failure, batch.last_sequence)

    async def _publish_each(self, step: PublishEach) -> list[Exception | None]:
        context = self._connected
        futures = []
        for subject, data, *rest in step.items:
            block = rest[0] if rest else None
            headers = decode(block) if isinstance(block, bytes) else block
            fields = publish_headers(headers, None, None, None)
            futures.append(await context.publisher.publish(subject, data, fields, None))
        errors = [await error_of(future) for future in futures]
        return [self._meaning(error) if isinstance(error, JetSparkError) else error for error in errors]

    async def _open_pull(self, step: OpenPull) -> Source:
        return Source(self._connected, step.info)

    async def _pull(self, step: Pull) -> list[Any]:
        assert isinstance(step.source, Source)
        return step.source.puller.pop_messages(await step.source.perform(step.reader))

    async def _close_pull(self, step: ClosePull) -> None:
        source, info, context = step.source, step.info, self._connected
        assert isinstance(source, Source)
        source.puller.release()  # the consumer has no acks, so there is nothing to wait for
        await source.close()
        if context.client.is_connected:
            try:
                await context.run(context.api.delete_consumer(info.stream_name, info.name), CLEAN_UP_TIMEOUT_S)
            except JetSparkError:
                pass  # the consumer is deleted already, or will expire
