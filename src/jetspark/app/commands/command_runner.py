"""Runs commands in this process: a request in, a reply or an error out, each in one of two ways.

Most commands find everything in memory: they are decided as soon as they arrive, one guarded message is sent, and the
reply is made from its acknowledgement, in the connection's own callback. No task, future or event-loop timer is created
for them, which took half of the time of a command.

A command that has to wait for anything else (its turn, a slot, a read, a batch, another attempt) continues in a task
from its current step. The steps are those of :mod:`~jetspark.app.commands.decider` in both cases.

The runner does not know its callers: :mod:`~jetspark.app.commands.command_worker` serves requests from the network,
:mod:`~jetspark.app.commands.local_decider` those of a program that decides its commands itself.
"""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jetspark.aio.context import DriverContext, context_of
from jetspark.aio.jetstream import JetStream
from jetspark.aio.message import Message
from jetspark.aio.subscription import Subscription
from jetspark.app.clock import idle_s, utc_now
from jetspark.app.commands.boundaries import BoundaryCache
from jetspark.app.commands.command_spec import CommandReply, CommandSpec
from jetspark.app.commands.decider import Append, Appended, AppendMoved, AppendUnknown, CommandRequest, Decider
from jetspark.app.commands.decision_store import REQUEST_S, CommandStore, stream_end
from jetspark.app.patience import patiently
from jetspark.app.projections.views import Views
from jetspark.app.server_clock import REFRESH_S, ServerClock, server_clock
from jetspark.app.turns import DecisionSlots, Turns
from jetspark.core.arguments import explained
from jetspark.core.events import ConnectionEvent, Disconnected, Reconnected
from jetspark.core.numbers import seconds, whole
from jetspark.core.step_runner import StepRun
from jetspark.errors import BufferFull, ConnectionClosed, JetSparkError, PermissionDenied, RequestTimeout, WorkersBusy
from jetspark.jetstream.publishing import read_pub_ack

if TYPE_CHECKING:
    from jetspark.app.commands.decider import CommandStep
    from jetspark.app.contracts.catalogue import Catalogue
    from jetspark.app.spec import AppSpec

__all__ = ["CommandOptions", "CommandRun", "CommandRunner"]

_logger = logging.getLogger("jetspark.app")


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class CommandOptions:
    """Limits of deciding commands, for a worker or for a program that decides its own."""

    concurrency: int = 64
    """Commands that are decided at a time; those of one boundary are one after the other."""
    queue: int = 1000
    """Commands that wait for their turn; one more is answered with ``WorkersBusy``."""
    timeout_s: float = 30.0
    """How long a command is tried if its caller gives no time-out."""
    cache_events: int = 100_000
    """Events of boundaries that are remembered, so that the next command on them need not read."""

    def __post_init__(self) -> None:
        whole("concurrency", self.concurrency)
        whole("queue", self.queue, low=0)
        seconds("timeout_s", self.timeout_s)
        whole("cache_events", self.cache_events, low=0)


class CommandRun(ABC):
    """One command. While its message is in transit, it is the handle of the acknowledgement."""

    __slots__ = (
        "_runner",
        "began",
        "boundary",
        "deadline",
        "has_slot",
        "has_turn",
        "is_over",
        "is_wanted",
        "spec",
        "steps",
        "token",
        "wait_until",
    )

    steps: StepRun[CommandStep, CommandReply]

    def __init__(self, runner: CommandRunner, spec: CommandSpec, began: float, deadline: float) -> None:
        self._runner, self.spec, self.began, self.deadline = runner, spec, began, deadline
        self.boundary: tuple[str, ...] = ()
        self.has_turn = self.has_slot = self.is_over = False
        self.is_wanted = True
        """False once the caller is gone; such a command is not started."""
        self.token = ""
        self.wait_until = 0.0

    @abstractmethod
    def on_end(self, outcome: CommandReply | Exception) -> None:
        """The command ended with a reply or an error; ``TimeoutError`` means an unknown outcome. Turn and slot are free
        already."""

    @abstractmethod
    def on_abandoned(self) -> None:
        """The command was abandoned with an unknown outcome."""

    # ---- called by the connection -------------------------------------------------------------------------------

    def done(self) -> bool:
        return not self.token

    def set_result(self, message: Message) -> None:
        self._runner.on_ack(self, message)

    def set_exception(self, error: Exception) -> None:
        self._runner.on_ack_failed(self, error)


class CommandRunner:
    """Decides the commands of one application in this process, within its bounds; made by :meth:`open`."""

    def __init__(
        self,
        context: DriverContext,
        decider: Decider,
        store: CommandStore,
        views: Views,
        watching: asyncio.Task[None],
        options: CommandOptions,
    ) -> None:
        self._context, self._transport = context, context.transport
        self._decider, self._store, self._views, self._watching = decider, store, views, watching
        self.options = options
        self._turns, self._slots = Turns(), DecisionSlots(options.concurrency)
        self._loop = asyncio.get_running_loop()
        self._count = 0
        """Commands that are not over."""
        self._in_transit: dict[CommandRun, None] = {}
        """Commands whose message was sent and is not acknowledged."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: asyncio.Future[None] | None = None
        self._transport.dispatcher.attach(self)

    # ---- life --------------------------------------------------------------------------------------------------

    @classmethod
    async def open(cls, app: AppSpec, js: JetStream, *, catalogue: Catalogue, options: CommandOptions) -> CommandRunner:
        """Look at the stream, and hear of it from now on when it is deleted, made, or changed.

        Args:
            catalogue: The events of the application.

        Raises:
            JetSparkError: The stream does not exist, or the server does not answer for a minute.
        """
        context = context_of(js)
        # Subscribed before the stream is read, so no later change is missed.
        advisories = await context.client.subscribe(f"$JS.EVENT.ADVISORY.STREAM.*.{app.stream}")
        time = server_clock(js, app.stream)
        try:
            stream = await patiently(partial(js.stream, app.stream))
            await patiently(time.now)
        except BaseException:
            await advisories.unsubscribe()
            raise
        # For pauses and spans, not for secrets: asking the system each time would be a twentieth of a command.
        rng = getattr(asyncio.get_running_loop(), "rng", None) or random.Random()
        decider = Decider(
            app,
            stream_end(stream.cached_info),
            catalogue=catalogue,
            cache=BoundaryCache(options.cache_events),
            clock=utc_now,
            server_now=time.last_known,
            random_bits=rng.getrandbits,
        )
        views = Views(app, js)
        watching = asyncio.create_task(_watch_stream(app, advisories, decider))
        runner = cls(context, decider, CommandStore(js, stream, views), views, watching, options)
        runner.spawn(_keep_time(time))
        return runner

    @property
    def stored(self) -> tuple[str, ...]:
        """The subjects of the stream; none if they are not known."""
        return self._decider.stored

    async def finish(self, timeout: float) -> None:
        """Wait until all started commands are over, for at most ``timeout`` seconds."""
        if self._count:
            self._idle = self._loop.create_future()
            await asyncio.wait([self._idle], timeout=timeout)

    async def close(self) -> None:
        """Abandon unfinished commands; a retry with the same id learns whether it was decided."""
        self._transport.dispatcher.detach(self)
        for run in [*self._in_transit]:
            self._forget(run)
            run.steps.close()
            self._abandon(run)
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        self._watching.cancel()
        await asyncio.wait([self._watching, *tasks])
        await self._views.close()

    # ---- attached to the connection ----------------------------------------------------------------------------

    def on_event(self, event: ConnectionEvent) -> None:
        if isinstance(event, Disconnected | Reconnected):
            self._decider.doubt()  # the stream may have changed while the connection was down

    def next_deadline(self) -> float | None:
        return min((run.wait_until for run in self._in_transit), default=None)

    def on_time(self, now: float) -> None:
        for run in [run for run in self._in_transit if run.wait_until <= now]:
            self._forget(run)
            if run.deadline <= now:
                run.steps.close()
                self._end(run, RequestTimeout(f"command {run.spec.name!r}", now - run.began))
            else:
                self._continue(run, AppendUnknown())

    # ---- a command ---------------------------------------------------------------------------------------------

    def start(self, run: CommandRun, read: Callable[[], CommandRequest]) -> None:
        """Decide a command, which ``read`` decodes; ``run.on_end`` is called when it is over, possibly before this
        returns."""
        waiting = self._count - self.options.concurrency
        self._count += 1
        if waiting >= self.options.queue:
            self._end(run, WorkersBusy(run.spec.name, max(0, waiting)))
            return
        try:
            self._begin(run, read())
        except Exception as error:
            self._end(run, error)
        except BaseException:
            self._abandon(run)
            raise

    def _begin(self, run: CommandRun, request: CommandRequest) -> None:
        run.boundary = boundary = self._decider.boundary(run.spec, request.command)
        run.steps = StepRun(self._decider.run(run.spec, request, boundary))
        # The turn comes before the slot: commands that wait for one boundary must not hold the slots of all others.
        run.has_turn = self._turns.try_begin(boundary)
        run.has_slot = run.has_turn and self._slots.try_take()
        if run.has_slot:
            self._continue(run)
        else:
            self._start_task(run)

    # ---- without waiting ---------------------------------------------------------------------------------------

    def _continue(self, run: CommandRun, answer: object = None, error: Exception | None = None) -> None:
        """Give the procedure the outcome of its last step, and send its next message, or start a task for the rest."""
        steps = run.steps
        steps.answer, steps.error = answer, error
        try:
            steps.advance()
            step = steps.step
            if step is None:
                self._end(run, steps.result)
            elif type(step) is not Append or len(step.messages) > 1 or not self._send(run, step):
                self._start_task(run)
        except Exception as error:
            self._end(run, error)
        except BaseException:
            self._abandon(run)  # others wait for the turn and the place
            raise

    def _send(self, run: CommandRun, step: Append) -> bool:
        """Send the one message of a decision; False if that has to wait."""
        encoded = step.messages[0].encoded
        headers = encoded.headers | self._store.guard_headers(step, 0)
        now = self._loop.time()
        try:
            run.token = self._context.request_with(run, encoded.subject, encoded.data, headers, at_once=self.is_alone)
        except BufferFull:
            return False
        run.wait_until = min(now + REQUEST_S, run.deadline)
        self._in_transit[run] = None
        self._transport.set_alarm(run.wait_until)
        return True

    def on_ack(self, run: CommandRun, message: Message) -> None:
        """The stream has answered."""
        self._forget(run)
        try:
            ack = read_pub_ack(message)
        except JetSparkError as error:
            self.on_ack_failed(run, error)
        else:
            self._continue(run, AppendMoved(is_duplicate=True) if ack.duplicate else Appended(ack.sequence))

    def on_ack_failed(self, run: CommandRun, error: Exception) -> None:
        """The stream refuses the message, or no acknowledgement will come."""
        self._forget(run)
        try:
            outcome = self._store.judge(error)
        except Exception as fatal:
            self._continue(run, error=fatal)
        else:
            self._continue(run, outcome)

    def _forget(self, run: CommandRun) -> None:
        self._in_transit.pop(run, None)
        token, run.token = run.token, ""
        if token:
            self._context.forget(token)

    # ---- with waiting ------------------------------------------------------------------------------------------

    def _start_task(self, run: CommandRun) -> None:
        def over(task: asyncio.Task[None]) -> None:
            if not run.is_over:
                self._abandon(run)  # cancelled before its first step, it could not do that itself

        self.spawn(self._work(run)).add_done_callback(over)

    def spawn(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Do something that has to wait; :meth:`close` ends it."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _work(self, run: CommandRun) -> None:
        outcome: CommandReply | Exception | None = None
        try:
            async with asyncio.timeout_at(run.deadline):
                if not run.has_turn:
                    await self._turns.begin(run.boundary)
                    run.has_turn = True
                if not run.has_slot:
                    await self._slots.take()
                    run.has_slot = True
                if run.steps.step is not None or run.is_wanted:
                    outcome = await self._store.run(run.steps)
        except TimeoutError:
            # The caller has stopped waiting. A retry with the same id learns whether it was decided.
            outcome = RequestTimeout(f"command {run.spec.name!r}", self._loop.time() - run.began)
        except Exception as error:
            outcome = error
        finally:
            # Also when cancelled: others wait for the turn and the place.
            if outcome is None:
                self._abandon(run)
            else:
                self._end(run, outcome)

    # ---- the end -----------------------------------------------------------------------------------------------

    def _end(self, run: CommandRun, outcome: CommandReply | Exception) -> None:
        self._free(run)
        if isinstance(outcome, TimeoutError):
            if self._store.refused_at >= run.began:
                reason = f": the stream refuses its events: {self._store.refusal}"
                _logger.warning("command %s: not decided before the caller's time-out%s", run.spec.name, reason)
            else:
                _logger.debug("command %s: not decided before the caller's time-out", run.spec.name)
        run.on_end(outcome)

    def _abandon(self, run: CommandRun) -> None:
        self._free(run)
        run.on_abandoned()

    def _free(self, run: CommandRun) -> None:
        assert not run.is_over
        run.is_over = True
        if run.has_slot:
            self._slots.give_back()
        if run.has_turn:
            self._turns.end(run.boundary)
        self._count -= 1
        if self._count == 0 and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    @property
    def is_alone(self) -> bool:
        """At most one command is being decided: its message gains nothing from waiting for others to share a write."""
        return self._count <= 1


async def _keep_time(time: ServerClock) -> None:
    """Have the server's time at hand: decisions are made without waiting."""
    while True:
        await asyncio.sleep(idle_s(REFRESH_S))
        try:
            await time.now()
        except JetSparkError as error:
            _logger.warning("the server's time could not be read (%s); still counting from its last answer", error)


async def _watch_stream(app: AppSpec, advisories: Subscription, decider: Decider) -> None:
    """Hear of it when the stream is deleted, made, or changed."""
    try:
        async with advisories:
            async for advisory in advisories:
                if advisory.subject.split(".")[4] in ("CREATED", "DELETED", "UPDATED"):
                    decider.doubt()
    except ConnectionClosed:
        pass  # nothing is decided without it
    except PermissionDenied as error:
        _logger.info(
            "app %s: no permission to subscribe to %s; checking the stream every few seconds instead",
            app.name,
            error.subject,
        )
