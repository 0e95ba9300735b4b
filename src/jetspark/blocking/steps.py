# Generated from aio/steps.py by tools/unasync.py; edit that file.
"""Running procedures from threads: this module performs the steps of :mod:`jetspark.publish.steps`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from typing import Any, TypeVar

from jetspark.blocking import clock
from jetspark.blocking.ack_future import error_of
from jetspark.blocking.context import DriverContext, context_of
from jetspark.blocking.fast import FastBatch
from jetspark.blocking.jetstream import JetStream
from jetspark.blocking.source import Source
from jetspark.blocking.step_runner import run_steps
from jetspark.blocking.subscription import next_some
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

    def __init__(self, js: JetStream | None = None, *, renew: Callable[[], JetStream] | None = None) -> None:
        """Pass a context, or a function that returns an open one; procedures call it when they connect."""
        self._context = None if js is None else context_of(js)
        self._renew = renew
        self._meaning = partial(meaning, renews=renew is not None)
        self._ways: dict[type[Any], Callable[[Any], Any]] = {
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

    def run(self, procedure: Procedure[T]) -> T:
        return run_steps(StepRun(procedure), self._perform)

    def pieces(self, reading: Pieces) -> Generator[list[Any], None, None]:
        """Read to the end; closes the reading even if the caller leaves the loop early."""
        try:
            while (piece := self.run(reading.next())) is not None:
                yield piece
        finally:
            self.run(reading.close())

    # ---- the steps ---------------------------------------------------------------------------------------------

    def _perform(self, step: Step) -> Any:
        try:
            return self._ways[type(step)](step)
        except ConnectionClosed as error:
            raise self._meaning(error) from error

    @property
    def _connected(self) -> DriverContext:
        assert self._context is not None, "a procedure connects before anything else"
        return self._context

    def _now(self, step: ReadClock) -> float:
        return clock.now()

    def _connect(self, step: Connect) -> Api:
        if self._renew is not None:
            self._context = context_of(self._renew())
        return self._connected.api

    def _ask(self, step: Request) -> Any:
        context = self._connected
        return context.perform(step, Deadline(context.timeout_s))

    def _ask_many(self, step: AskMany) -> None:
        context, reading = self._connected, step.answers
        timeout_s, accept_all = context.timeout_s, reading.accept_all
        with context.asked(reading.request()) as answers:
            try:
                while not reading.is_over:
                    accept_all(next_some(answers, timeout_s))
            except ConnectionClosed:
                if context.client.is_closed:
                    raise
                reading.lost()

    def _ingest(self, step: IngestAll) -> IngestReport:
        batch = FastBatch(self._connected, FastBatchOptions(gap="ok"))
        failure: JetSparkError | None = None
        try:
            with batch:
                batch.add_many(step.items, commit=True)
        except JetSparkError as error:
            failure = self._meaning(error)
        missing = (*batch.gaps, *batch.doubts)
        return IngestReport(batch.acknowledged, missing, tuple(batch.errors), failure, batch.last_sequence)

    def _publish_each(self, step: PublishEach) -> list[Exception | None]:
        context = self._connected
        futures = []
        for subject, data, *rest in step.items:
            block = rest[0] if rest else None
            headers = decode(block) if isinstance(block, bytes) else block
            fields = publish_headers(headers, None, None, None)
            futures.append(context.publisher.publish(subject, data, fields, None))
        errors = [error_of(future) for future in futures]
        return [self._meaning(error) if isinstance(error, JetSparkError) else error for error in errors]

    def _open_pull(self, step: OpenPull) -> Source:
        return Source(self._connected, step.info)

    def _pull(self, step: Pull) -> list[Any]:
        assert isinstance(step.source, Source)
        return step.source.puller.pop_messages(step.source.perform(step.reader))

    def _close_pull(self, step: ClosePull) -> None:
        source, info, context = step.source, step.info, self._connected
        assert isinstance(source, Source)
        source.puller.release()  # the consumer has no acks, so there is nothing to wait for
        source.close()
        if context.client.is_connected:
            try:
                context.run(context.api.delete_consumer(info.stream_name, info.name), CLEAN_UP_TIMEOUT_S)
            except JetSparkError:
                pass  # the consumer is deleted already, or will expire
