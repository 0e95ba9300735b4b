"""Serves requests for commands, each in one of two ways.

Most commands have what they need in memory: they are decided as soon as they arrive, in the connection's own callback,
one guarded message is sent, and its acknowledgement, in the callback again, is made the reply. No task, no future and
no timer of the event loop is made for them; those took half of the time of a command.

A command that has to wait for anything else (its turn, a place, something to read, a batch, another attempt) goes on in
a task, from the very step at which it is. The steps are those of :mod:`~jetspark.app.commands.deciding` either way.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jetspark.aio.context import DriverContext
from jetspark.aio.message import Message
from jetspark.app.causes import Cause
from jetspark.app.commands import wire
from jetspark.app.commands.deciding import Append, Appended, AppendMoved, AppendUnknown, CommandRequest, Deciding
from jetspark.app.commands.declaring import CommandReply, CommandSpec
from jetspark.app.commands.service import Endpoint
from jetspark.app.commands.store import REQUEST_S, CommandStore
from jetspark.app.contracts.catalogue import Catalogue
from jetspark.app.contracts.envelope import decode
from jetspark.app.contracts.other_forms import header_of
from jetspark.app.turns import DecidingPlaces, Turns
from jetspark.core.events import ConnectionEvent, Disconnected, Reconnected
from jetspark.core.subjects import matches
from jetspark.errors import (
    BufferFull,
    CommandFailed,
    ConnectionClosed,
    ContractViolation,
    JetSparkError,
    PayloadTooLarge,
    RequestTimeout,
    WorkersBusy,
)
from jetspark.jetstream.publishing import read_pub_ack

if TYPE_CHECKING:
    from jetspark.app.commands.deciding import CommandStep, CommandSteps
    from jetspark.app.commands.worker import CommandOptions

__all__ = ["Serving"]

_logger = logging.getLogger("jetspark.app")

SMALL_BYTES = 4096
"""A reply of at most this size is sent without a look at what the server takes at most."""
# What a stream answers mostly. Read in a twentieth of the time that any answer takes.
_read_plain_ack = re.compile(rb'\{"stream":"[^"\\]*", ?"seq":([0-9]+)\}').fullmatch


class _Served:
    """One request. While its message is on its way, it is what the connection tells of the acknowledgement."""

    __slots__ = (
        "_serving",
        "began",
        "boundary",
        "deadline",
        "endpoint",
        "has_place",
        "has_turn",
        "is_over",
        "message",
        "spec",
        "steps",
        "token",
        "wait_until",
    )

    steps: CommandSteps[CommandReply]

    def __init__(
        self, serving: Serving, spec: CommandSpec, endpoint: Endpoint, message: Message, began: float, deadline: float
    ) -> None:
        self._serving, self.spec, self.endpoint, self.message = serving, spec, endpoint, message
        self.began, self.deadline = began, deadline
        self.boundary: tuple[str, ...] = ()
        self.has_turn = self.has_place = self.is_over = False
        self.token = ""
        self.wait_until = 0.0

    def done(self) -> bool:
        return not self.token

    def set_result(self, message: Message) -> None:
        self._serving.on_ack(self, message)

    def set_exception(self, error: Exception) -> None:
        self._serving.on_ack_failed(self, error)


class Serving:
    """What a worker does with the requests that reach it."""

    def __init__(
        self,
        context: DriverContext,
        commands: Catalogue,
        deciding: Deciding,
        store: CommandStore,
        options: CommandOptions,
    ) -> None:
        self._connection, self._link = context.connection, context.link
        self._commands, self._deciding, self._store, self._options = commands, deciding, store, options
        self._turns, self._places = Turns(), DecidingPlaces(options.concurrency)
        self._loop = asyncio.get_running_loop()
        self._count = 0
        """Requests that are not answered yet."""
        self._on_their_way: dict[_Served, None] = {}
        """Those whose message was sent and is not acknowledged."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._idle: asyncio.Future[None] | None = None

    # ---- life --------------------------------------------------------------------------------------------------

    async def finish(self, timeout: float) -> None:
        """Wait until all that came is answered, for at most ``timeout`` seconds."""
        if self._count:
            self._idle = self._loop.create_future()
            await asyncio.wait([self._idle], timeout=timeout)

    async def close(self) -> None:
        """Leave what is not answered: nobody is told, and who asks again is."""
        for served in [*self._on_their_way]:
            self._forget(served)
            served.steps.close()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # ---- attached to the connection ----------------------------------------------------------------------------

    def on_event(self, event: ConnectionEvent) -> None:
        if isinstance(event, Disconnected | Reconnected):
            self._deciding.doubt()  # nobody told us what happened to the stream meanwhile

    def next_deadline(self) -> float | None:
        return min((served.wait_until for served in self._on_their_way), default=None)

    def on_time(self, now: float) -> None:
        for served in [served for served in self._on_their_way if served.wait_until <= now]:
            self._forget(served)
            if served.deadline <= now:
                served.steps.close()
                self._end(served, RequestTimeout(f"command {served.spec.name!r}", now - served.began))
            else:
                self._go_on(served, AppendUnknown())

    # ---- a request ---------------------------------------------------------------------------------------------

    def take(self, spec: CommandSpec, endpoint: Endpoint, message: Message) -> None:
        """Serve a request."""
        now, headers = self._loop.time(), message.headers
        deadline = now + wire.read_timeout(headers, self._options.timeout_s)
        served = _Served(self, spec, endpoint, message, now, deadline)
        waiting = self._count - self._options.concurrency
        self._count += 1
        if not self._may_answer(message.reply):
            _logger.warning("command %s: not decided, its answer was asked for on %r", spec.name, message.reply)
            self._close(served, None)
        elif waiting >= self._options.queue:
            self._end(served, WorkersBusy(spec.name, max(0, waiting)))
        else:
            try:
                self._begin(served, headers)
            except Exception as error:
                self._end(served, error)
            except BaseException:
                self._close(served, None)
                raise

    def _may_answer(self, reply: str | None) -> bool:
        """Whether an answer to this subject reaches a caller, and is no message of the stream, nor to the server.

        A worker may publish more than most callers: a caller must not choose what it publishes, and where.
        """
        return not reply or not (reply.startswith("$") or any(matches(each, reply) for each in self._deciding.stored))

    def _begin(self, served: _Served, headers: Mapping[str, str]) -> None:
        request = self._read(served.spec, served.message, headers)
        served.boundary = boundary = self._deciding.boundary(served.spec, request.command)
        served.steps = self._deciding.run(served.spec, request, boundary)
        # A turn first, then a place: those that wait for one boundary must not hold the places of all the others.
        served.has_turn = self._turns.try_begin(boundary)
        served.has_place = served.has_turn and self._places.try_take()
        if served.has_place:
            self._go_on(served, None)
        else:
            self._start_task(served, None)

    def _read(self, spec: CommandSpec, message: Message, headers: Mapping[str, str]) -> CommandRequest:
        try:
            decoded = decode(message.subject, message.data, message.raw_headers, self._commands)
        except ContractViolation as error:
            raise CommandFailed(spec.name, f"the worker cannot read the command: {error}") from error
        if type(decoded.event) is not spec.kind:
            # Who may call one command need not be allowed to call another, which has other guards besides.
            raise CommandFailed(spec.name, f"{decoded.type!r} came to {message.subject!r}: send it to its own subject")
        return CommandRequest(
            command=decoded.event,
            cause=Cause(decoded.id, decoded.correlation_id, header_of(headers, "traceparent", "ce-traceparent")),
            expected_version=wire.read_expected_version(spec.name, headers),
        )

    # ---- without waiting ---------------------------------------------------------------------------------------

    def _go_on(self, served: _Served, answer: Any) -> None:
        """Do what can be done at once with the answer to the last step."""
        try:
            step = served.steps.send(answer)
            if type(step) is not Append or len(step.messages) > 1 or not self._send(served, step):
                self._start_task(served, step)
        except StopIteration as finished:
            self._end(served, finished.value)
        except Exception as error:
            self._end(served, error)
        except BaseException:
            self._close(served, None)  # others wait for the turn and the place
            raise

    def _send(self, served: _Served, step: Append) -> bool:
        """Send the one message of a decision; False if that has to wait."""
        encoded = step.messages[0].encoded
        headers = encoded.headers | self._store.guard_headers(step, 0)
        now = self._loop.time()
        try:
            served.token = self._connection.request(served, encoded.subject, encoded.data, headers)
        except BufferFull:
            return False
        self._flush()
        served.wait_until = min(now + REQUEST_S, served.deadline)
        self._on_their_way[served] = None
        self._link.set_alarm(served.wait_until)
        return True

    def on_ack(self, served: _Served, message: Message) -> None:
        """The stream has answered."""
        self._forget(served)
        plain = _read_plain_ack(message.data)
        if plain is not None:
            self._go_on(served, Appended(int(plain[1])))
            return
        try:
            ack = read_pub_ack(message)
        except JetSparkError as error:
            self.on_ack_failed(served, error)
        else:
            self._go_on(served, AppendMoved(is_duplicate=True) if ack.duplicate else Appended(ack.sequence))

    def on_ack_failed(self, served: _Served, error: Exception) -> None:
        """Nobody will answer, or the stream refuses."""
        self._forget(served)
        try:
            outcome = self._store.judge(error)
        except Exception as fatal:
            self._end(served, fatal)
        else:
            self._go_on(served, outcome)

    def _forget(self, served: _Served) -> None:
        self._on_their_way.pop(served, None)
        token, served.token = served.token, ""
        if token:
            self._connection.requests.forget(token)

    # ---- with waiting ------------------------------------------------------------------------------------------

    def _start_task(self, served: _Served, step: CommandStep | None) -> None:
        task = self._loop.create_task(self._serve(served, step))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, served: _Served, step: CommandStep | None) -> None:
        outcome: Any = None
        try:
            async with asyncio.timeout_at(served.deadline):
                if not served.has_turn:
                    await self._turns.begin(served.boundary)
                    served.has_turn = True
                if not served.has_place:
                    await self._places.take()
                    served.has_place = True
                outcome = await self._store.run(served.steps, step)
        except TimeoutError:
            # Nobody waits for an answer any more. Whether it was decided is told to those who ask again.
            outcome = RequestTimeout(f"command {served.spec.name!r}", self._loop.time() - served.began)
        except Exception as error:
            outcome = error
        finally:
            # Also when cancelled: others wait for the turn and the place.
            if outcome is None:
                self._close(served, None)
            else:
                self._end(served, outcome)

    # ---- the answer --------------------------------------------------------------------------------------------

    def _end(self, served: _Served, outcome: CommandReply | Exception) -> None:
        """Answer with a reply or an error. Nobody is told of a time that is over, or over a connection that is."""
        error = outcome if isinstance(outcome, Exception) else None
        self._close(served, error)
        if isinstance(outcome, TimeoutError):
            if self._store.refused_at >= served.began:
                reason = f": the stream does not take its events now: {self._store.refusal}"
                _logger.warning("command %s: not decided within the caller's time%s", served.spec.name, reason)
            else:
                _logger.debug("command %s: not decided within the caller's time", served.spec.name)
        elif not isinstance(outcome, ConnectionClosed) and served.message.reply:
            try:
                try:
                    self._respond(served.message, *self._answer(served.spec, outcome))
                except PayloadTooLarge as large:
                    reason = f"its reply cannot be sent: {large}. Return an id, and let the caller read a view"
                    self._respond(served.message, *self._answer(served.spec, CommandFailed(served.spec.name, reason)))
            except ConnectionClosed:
                pass
            except Exception:
                _logger.exception("command %s: its caller could not be answered", served.spec.name)

    def _close(self, served: _Served, error: Exception | None) -> None:
        assert not served.is_over
        served.is_over = True
        if served.has_place:
            self._places.give_back()
        if served.has_turn:
            self._turns.end(served.boundary)
        served.endpoint.count(self._loop.time() - served.began, error)
        self._count -= 1
        if self._count == 0 and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _answer(self, spec: CommandSpec, outcome: CommandReply | Exception) -> tuple[bytes, dict[str, str] | None]:
        if not isinstance(outcome, Exception):
            try:
                return wire.write_reply(outcome), None
            except (TypeError, ValueError) as error:
                outcome = error
        return wire.write_error(self._told(spec, outcome))

    def _told(self, spec: CommandSpec, error: Exception) -> JetSparkError:
        """What the caller is told of an error."""
        if isinstance(error, JetSparkError) and wire.kind_of(error) is not None:
            if isinstance(error, CommandFailed):
                _logger.error("command %s: %s", spec.name, error.reason, exc_info=error.__cause__)
            return error
        _logger.error("command %s: %s", spec.name, error, exc_info=error)
        return CommandFailed(spec.name, f"{type(error).__name__}: {error}")

    def _respond(self, message: Message, body: bytes, headers: dict[str, str] | None) -> None:
        reply = message.reply or ""
        try:
            if headers is None and len(body) <= SMALL_BYTES:
                self._connection.publish_raw(reply.encode(), body)
            else:
                self._connection.publish(reply, body, "", headers)
            self._flush()
        except BufferFull:
            task = self._loop.create_task(message.respond(body, headers=headers))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _flush(self) -> None:
        if self._count <= 1:
            self._link.flush()  # now; where there are others, what they send goes with it
        else:
            self._link.flush_soon()
