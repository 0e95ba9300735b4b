"""The runs of a workflow from a program's side: look at them, and end one."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from jetspark.app.contracts.envelope import decode
from jetspark.app.entities.entities import EntityChange, EntityWriter
from jetspark.app.workflows.declaring import RunRecord, RunStatus, WorkflowSpec
from jetspark.app.workflows.running import carry_out
from jetspark.errors import ConnectionClosed, MessageNotFound

if TYPE_CHECKING:
    from jetspark.app.declarations import Declarations

__all__ = ["WorkflowRun", "WorkflowRuns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowRun:
    """One run, as it is stored."""

    key: str
    status: RunStatus
    reason: str | None
    """Of a run that has failed."""
    state: Any
    """As ``react`` gets it."""
    timers: tuple[str, ...]
    """Names of those that are set."""
    commands: tuple[str, ...]
    """Names of those whose answers it waits for."""
    events: tuple[int, ...]
    """Sequences of the last events that it has taken."""
    started: datetime.datetime | None
    updated: datetime.datetime | None


class WorkflowRuns:
    """The runs of one workflow: ``client.workflow("fulfilment")``."""

    def __init__(self, writer: EntityWriter, spec: WorkflowSpec) -> None:
        self._writer, self._spec = writer, spec
        self._entities = writer.entities(spec.name)

    async def get(self, key: str) -> WorkflowRun | None:
        """A run, or None if there is none."""
        record = await self._entities.get(key)
        return None if record is None else self._run(key, record)

    async def wait_for_end(self, key: str, timeout: float | None = None) -> WorkflowRun:
        """Wait until a run is over, also one that has not begun yet.

        Raises:
            TimeoutError: It is not over within ``timeout`` seconds.
        """
        async with asyncio.timeout(timeout):
            bucket = await self._writer.js.kv(self._entities.bucket)
            changing = bucket.watch(self._entities.key_of(key))
            async with contextlib.aclosing(changing) as changes:  # type: ignore[type-var]
                async for _ in changes:
                    run = await self.get(key)
                    if run is not None and run.status != "running":
                        return run
        raise ConnectionClosed("the connection was closed before the run was over")

    async def list(self, status: RunStatus | None = None) -> AsyncIterator[WorkflowRun]:
        """All runs, or those of a status, each as it was when it was read. Needs ``allow_direct``, which an app's
        stream has unless you say otherwise."""
        decode_record = self._app.entity_specs[self._spec.name].decode
        stream = await self._writer.js.stream(self._app.stream)
        records: dict[str, RunRecord | None] = {}
        # A run that moves on meanwhile is read twice, in the order of the stream: the later record counts.
        async for message in stream.get_messages(1, subject=f"$KV.{self._entities.bucket}.{self._spec.name}.*"):
            is_gone = "KV-Operation" in message.headers or "Nats-Marker-Reason" in message.headers
            records[message.subject] = None if is_gone else decode_record(message.data)
        for record in records.values():
            if record is not None and status in (None, record.status):
                yield self._run(record.key, record)

    async def timeline(self, key: str) -> AsyncIterator[dict[str, Any]]:
        """The events that a run has taken, as far as it remembers them and the stream has them, in its order."""
        run = await self.get(key)
        stream = await self._writer.js.stream(self._app.stream)
        sequences = () if run is None else run.events
        asked = await asyncio.gather(*map(stream.get_message, sequences), return_exceptions=True)
        for sequence, message in zip(sequences, asked, strict=True):
            if isinstance(message, MessageNotFound):
                continue
            if isinstance(message, BaseException):
                raise message
            decoded = decode(message.subject, message.data, message.headers, self._app.catalogue)
            yield {
                "sequence": sequence,
                "time": message.timestamp.isoformat(timespec="milliseconds"),
                "type": decoded.type,
                "id": decoded.id,
                "data": msgspec.to_builtins(decoded.event),
            }

    async def cancel(self, key: str, reason: str = "cancelled") -> bool:
        """Let a run fail: its compensations are published, and its timers end. False if none is running."""
        was_running = False

        def decide(change: EntityChange) -> None:
            nonlocal was_running
            record: RunRecord | None = change.state
            was_running = record is not None and record.status == "running"
            if record is not None and was_running:
                step = self._spec.fail(record, reason, self._writer.now(), self._app.catalogue)
                carry_out(self._app, self._spec, key, change, step)

        await self._entities.modify(key, decide)
        return was_running

    @property
    def _app(self) -> Declarations:
        return self._writer.app

    def _run(self, key: str, record: RunRecord) -> WorkflowRun:
        return WorkflowRun(
            key=key,
            status=record.status,
            reason=record.reason,
            state=self._spec.state_of(record),
            timers=tuple(name for name, id in record.timers.items() if id),
            commands=tuple(record.commands),
            events=record.events,
            started=record.started,
            updated=record.updated,
        )
