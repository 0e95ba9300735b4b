"""The runs of a workflow as a program sees them: read, cancel and retry them."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from jetspark.app.causes import current_cause
from jetspark.app.contracts.envelope import Decoded, decode
from jetspark.app.dead_letters.redriving import DeadLetterFilter, RedriveResults, read_dead_letters, run_redrive
from jetspark.app.entities.entities import EntityChange, EntityWriter, StoredEntity, UnreadableEntity
from jetspark.app.workflows.timeline import read_timeline
from jetspark.app.workflows.workflow_handlers import carry_out
from jetspark.app.workflows.workflow_spec import RunRecord, RunStatus, StepRecord, WorkflowSpec
from jetspark.core.arguments import text
from jetspark.core.numbers import check_timeout, seconds
from jetspark.errors import ConfigError, ConnectionClosed, ContractViolation, MessageNotFound, WorkflowNotOver

if TYPE_CHECKING:
    from jetspark.app.spec import AppSpec

__all__ = ["RunRetry", "WorkflowRun", "WorkflowRuns"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRetry:
    """The way in which a stuck run continues."""

    dead_letters: int = 0
    """Dead letters of it that are handled again."""
    results: RedriveResults | None = None
    """The outcomes of the redriven dead letters, if the call waited for them."""
    is_restarted: bool = False
    """True if the run had failed and was restarted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowRun:
    """The stored record of one run."""

    key: str
    status: RunStatus | Literal["unreadable"]
    """``unreadable`` only in a listing: this program cannot read its state."""
    reason: str | None
    """Why a run has failed, or why it is unreadable; an unreadable run has its key, and other fields may be missing."""
    state: Any = None
    """The state as ``react`` gets it."""
    timers: tuple[str, ...] = ()
    """The names of the timers that are set."""
    commands: tuple[str, ...] = ()
    """Names of those whose answers it waits for."""
    events: tuple[int, ...] = ()
    """Sequences of the last events that it has taken."""
    retries: int = 0
    """How often the run was restarted."""
    started: datetime.datetime | None = None
    updated: datetime.datetime | None = None


class WorkflowRuns:
    """The runs of one workflow: ``client.workflow("fulfilment")``."""

    def __init__(self, writer: EntityWriter, spec: WorkflowSpec) -> None:
        self._writer, self._spec = writer, spec
        self._entities = writer.entities(spec.name)

    async def get(self, key: str) -> WorkflowRun | None:
        """A run; None if it does not exist."""
        record = await self._entities.get(key)
        return None if record is None else self._run(key, record)

    async def wait_for_end(self, key: str, timeout: float | None = None) -> WorkflowRun:
        """Wait until a run is over; it need not have started yet.

        Raises:
            WorkflowNotOver: The run does not end within ``timeout`` seconds; also a ``TimeoutError``.
        """
        check_timeout(timeout)
        status: str | None = "unknown"
        try:
            async with asyncio.timeout(timeout) as waiting:
                async with contextlib.aclosing(self._entities.watch(key)) as records:  # type: ignore[type-var]
                    async for record in records:
                        if record is not None and record.status != "running":
                            return self._run(key, record)
                        status = None if record is None else record.status
        except TimeoutError:
            if timeout is None or not waiting.expired():
                raise
            raise WorkflowNotOver(self._spec.name, key, timeout, status) from None
        raise ConnectionClosed("the connection was closed before the run was over")

    async def list(self, status: RunStatus | None = None) -> AsyncIterator[WorkflowRun]:
        """All runs, or those of a status, each as it was when it was read.

        A run whose state this program cannot read is listed whatever the status asked for, with the status
        ``unreadable`` and the reason.
        """
        if status not in (None, *get_args(RunStatus)):
            raise ConfigError(f"status={status!r}: expected one of {', '.join(get_args(RunStatus))}, or None for all")
        async for found in self._entities.list_all():
            run = self._listed(found)
            if status in (None, run.status) or run.status == "unreadable":
                yield run

    async def timeline(self, key: str) -> AsyncIterator[dict[str, object]]:
        """The steps of a run, oldest first: the event that it took, and the decision, as they were stored.

        A step has ``sequence``, ``time``, ``type``, ``id`` and ``data`` of the event, None where the stream no longer
        has it; ``fired``, the run's timer that published it; ``by_hand``, where it was ``cancelled`` or ``begun anew``;
        and ``decided``: ``time``, ``status``, ``reason``, ``events``, ``commands``, ``timers`` with their due times,
        and ``cancels``. A run records the decisions of its last 64 steps, and the last 256 events that it took.
        """
        read = await self._entities.read(key)
        if read.state is not None:
            stream = await self._writer.js.stream(self._app.stream)
            async for step in read_timeline(stream, self._app.catalogue, read.state, read.revision):
                yield step

    async def cancel(self, key: str, reason: str = "cancelled") -> bool:
        """Let a run fail: its compensations are published, and its timers end. False if none is running."""
        text("reason", reason, "a text that says why")
        was_running = False

        def decide(change: EntityChange) -> None:
            nonlocal was_running
            record: RunRecord | None = change.state
            was_running = record is not None and record.status == "running"
            if record is not None and was_running:
                step = self._spec.fail(record, reason, self._writer.now(), self._app.catalogue)
                carry_out(self._app, self._spec, key, change, step, StepRecord(0, by_hand="cancelled"))

        last = await self._last_event(key)
        with _caused_by(last):
            await self._entities.modify(key, decide)
        return was_running

    async def retry(self, key: str, *, wait_s: float = 0.0) -> RunRetry:
        """Continue a stuck run: redrive its dead letters or, if it has failed, restart it.

        A failed run has undone its steps. So it restarts with its first event, as if that had just arrived; later
        events are not taken again. Dead letters come first: those of its events, and of its commands.

        Args:
            wait_s: Longest wait for the outcomes of dead letters, which ``results`` then has.

        Raises:
            ConfigError: The run does not exist, no part of it has failed, or its first event is no longer in the
                stream.
            UsageError: A redrive is under way.
        """
        seconds("wait_s", wait_s)
        dead_letters, results = 0, None
        for handler in (self._spec.name, f"{self._spec.name}-commands"):
            chosen = DeadLetterFilter(handler=handler, where=(("key", key),))
            if await read_dead_letters(self._writer.js, self._app, chosen):
                progress = await run_redrive(self._writer.js, self._app, chosen, wait_s=wait_s)
                dead_letters, results = dead_letters + progress.requested + progress.behind, progress.results
        if dead_letters:
            return RunRetry(dead_letters=dead_letters, results=results)
        record: RunRecord | None = await self._entities.get(key)
        if record is None:
            raise ConfigError(f"workflow {self._spec.name!r} has no run {key!r}; `jetspark workflow ls` lists them")
        if record.status != "failed":
            raise ConfigError(
                f"workflow {self._spec.name!r}: run {key!r} is {record.status}, and has no event or command "
                "in the dead letters: there is nothing to retry"
            )
        first = await self._read_event(record.first)
        if first is None:
            raise ConfigError(
                f"workflow {self._spec.name!r}: run {key!r} cannot be restarted: event {record.first} of stream "
                f"{self._app.stream}, which began it, is gone"
            )

        def decide(change: EntityChange) -> None:
            record: RunRecord | None = change.state
            if record is not None and record.status == "failed":
                step = self._spec.restart(record, first.event, self._writer.now(), self._app.catalogue)
                carry_out(self._app, self._spec, key, change, step, StepRecord(record.first, by_hand="begun anew"))

        with _caused_by(first):
            await self._entities.modify(key, decide)
        return RunRetry(is_restarted=True)

    async def _read_event(self, sequence: int) -> Decoded | None:
        stream = await self._writer.js.stream(self._app.stream)
        try:
            message = await stream.get_message(sequence)
        except MessageNotFound:
            return None
        return decode(message.subject, message.data, message.headers, self._app.catalogue)

    async def _last_event(self, key: str) -> Decoded | None:
        """The last event that a run has taken, if it can be read."""
        record: RunRecord | None = await self._entities.get(key)
        with contextlib.suppress(ContractViolation):
            return await self._read_event(record.events[-1]) if record is not None and record.events else None
        return None

    @property
    def _app(self) -> AppSpec:
        return self._writer.app

    def _listed(self, found: StoredEntity | UnreadableEntity) -> WorkflowRun:
        if isinstance(found, UnreadableEntity):
            return WorkflowRun(key=found.key, status="unreadable", reason=found.reason)
        record: RunRecord = found.state
        try:
            return self._run(record.key, record)
        except ConfigError as error:
            return WorkflowRun(key=found.key, status="unreadable", reason=str(error), updated=record.updated)

    def _run(self, key: str, record: RunRecord) -> WorkflowRun:
        return WorkflowRun(
            key=key,
            status=record.status,
            reason=record.reason,
            state=self._spec.state_of(record),
            timers=tuple(name for name, id in record.timers.items() if id),
            commands=tuple(record.commands),
            events=record.events,
            retries=record.retries,
            started=record.started,
            updated=record.updated,
        )


@contextlib.contextmanager
def _caused_by(event: Decoded | None) -> Iterator[None]:
    """Make an event of the run the cause of everything published in the block, as in its own steps; a present cause
    stays."""
    before = current_cause.get()
    token = current_cause.set(before or event)
    try:
        yield
    finally:
        current_cause.reset(token)
