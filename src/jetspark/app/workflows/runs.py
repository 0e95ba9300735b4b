"""The runs of a workflow from a program's side: look at them, and end one."""

from __future__ import annotations

import datetime
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from jetspark.app.contracts.envelope import decode
from jetspark.app.contracts.tokens import unescape
from jetspark.app.entities.entities import EntityChange, EntityWriter
from jetspark.app.workflows.declaring import RunRecord, RunStatus, WorkflowSpec
from jetspark.app.workflows.running import carry_out
from jetspark.errors import MessageNotFound

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

    async def list(self, status: RunStatus | None = None) -> AsyncIterator[WorkflowRun]:
        """All runs, or those of a status."""
        bucket = await self._writer.js.kv(self._entities.bucket)
        async for name in bucket.keys(f"{self._spec.name}.>"):
            key = unescape(name.partition(".")[2])
            run = await self.get(key)
            if run is not None and status in (None, run.status):
                yield run

    async def timeline(self, key: str) -> AsyncIterator[dict[str, Any]]:
        """The events that a run has taken, as far as it remembers them and the stream has them, in its order."""
        run = await self.get(key)
        stream = await self._writer.js.stream(self._app.stream)
        for sequence in run.events if run is not None else ():
            try:
                message = await stream.get_message(sequence)
            except MessageNotFound:
                continue
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
        self._spec.compensating = [contract.kind for contract in self._app.catalogue]
        was_running = False

        def decide(change: EntityChange) -> None:
            nonlocal was_running
            record: RunRecord | None = change.state
            was_running = record is not None and record.status == "running"
            if record is not None and was_running:
                carry_out(self._spec, key, change, self._spec.fail(record, reason, self._writer.now()))

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
            events=record.events,
            started=record.started,
            updated=record.updated,
        )
