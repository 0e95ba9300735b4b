"""Decides the commands of a program in the program itself: ``app.connect(url, decide_here=True)``.

The guards of the stream make it safe to decide in any process, so no worker is asked, and a command takes one trip
through the server instead of three. Requests and replies are still encoded and decoded as over the network, so that
results and errors match those of a remote call.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from jetspark.aio.context import context_of
from jetspark.aio.jetstream import JetStream
from jetspark.app.causes import Cause
from jetspark.app.commands import wire
from jetspark.app.commands.command_runner import CommandOptions, CommandRun, CommandRunner
from jetspark.app.commands.command_spec import Command, CommandReply, CommandSpec
from jetspark.app.commands.decider import CommandRequest
from jetspark.app.commands.wire import reply_too_large, written_outcome
from jetspark.app.contracts.catalogue import Catalogue
from jetspark.core.headers import encode as encode_headers
from jetspark.errors import CommandInDoubt, ConnectionClosed, PayloadTooLarge, PermissionDenied

if TYPE_CHECKING:
    from jetspark.app.spec import AppSpec

__all__ = ["LocalDecider"]

CLOSING_S = 2.0
"""How long closing waits for running commands. A healthy server answers within milliseconds."""
ENVELOPE_BYTES = 16 << 10
"""An upper bound of the envelope around a request's fields. A request that stays below the server's limit by this much
is not measured."""


class _LocalRun(CommandRun):
    """A command of this program, and the future of its outcome."""

    __slots__ = ("outcome",)

    def __init__(self, runner: CommandRunner, spec: CommandSpec, began: float, timeout_s: float) -> None:
        super().__init__(runner, spec, began, began + timeout_s)
        self.outcome: asyncio.Future[CommandReply | Exception | None] = asyncio.get_running_loop().create_future()

    def on_end(self, outcome: CommandReply | Exception) -> None:
        self._finish(outcome)

    def on_abandoned(self) -> None:
        self._finish(None)

    def _finish(self, outcome: CommandReply | Exception | None) -> None:
        if not self.outcome.done():  # else the caller was cancelled
            self.outcome.set_result(outcome)


class LocalDecider:
    """Decides the calls of one client. The first call reads the stream."""

    def __init__(self, app: AppSpec, js: JetStream, options: CommandOptions) -> None:
        self._app, self._js, self._options = app, js, options
        self._context = context_of(js)
        self._loop = asyncio.get_running_loop()
        self._runner: CommandRunner | None = None
        self._opening: asyncio.Task[CommandRunner | Exception] | None = None
        self._is_closed = False

    async def call(
        self,
        spec: CommandSpec,
        command: Command,
        cause: Cause,
        expected_version: int | None,
        timeout_s: float,
        write: Callable[[], tuple[bytes, dict[str, str]]],
    ) -> CommandReply:
        """Decide a command, and return when its events are stored; ``write`` writes it as a request to a worker.

        Raises:
            JetSparkError: Any error of :meth:`AppClient.call`.
        """
        if self._context.client.is_closed:
            raise ConnectionClosed("the connection is closed")
        began = self._loop.time()
        read = self._reader(spec, command, cause, expected_version, write)
        runner = self._runner or await self._open(timeout_s)
        if not isinstance(runner, CommandRunner):
            return self._reply(spec, cause.id, timeout_s, runner)
        run = _LocalRun(runner, spec, began, timeout_s)
        runner.start(run, read)
        try:
            outcome = await run.outcome
        except asyncio.CancelledError:
            run.is_wanted = False
            raise
        return self._reply(spec, cause.id, timeout_s, outcome)

    async def close(self) -> None:
        """Finish running commands for at most two seconds; callers of the rest get ``CommandInDoubt``."""
        self._is_closed = True
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait([self._opening])
        runner, self._runner = self._runner, None
        if runner is not None:
            try:
                await runner.finish(CLOSING_S)
            finally:
                await runner.close()

    def _reader(
        self,
        spec: CommandSpec,
        command: Command,
        cause: Cause,
        expected_version: int | None,
        write: Callable[[], tuple[bytes, dict[str, str]]],
    ) -> Callable[[], CommandRequest]:
        """Returns a function that reads the request as a worker would. The fields are encoded now: the caller may
        change them later.

        Raises:
            InvalidEvent: A field has a value that its type does not allow.
            PayloadTooLarge: The request is too large for a worker.
        """
        limit = self._context.client.max_payload_bytes
        with contextlib.suppress(Exception):  # whatever it is: the long way says it as a worker does
            contract = spec.kind.__contract__
            fields = contract.encode(command)
            if len(fields) + ENVELOPE_BYTES <= limit:
                # Encoding and decoding the envelope would take a tenth of a command, and its values are known.
                read = contract.decode(fields)
                return lambda: CommandRequest(command=read, cause=cause, expected_version=expected_version)
        body, headers = write()
        size = len(body) + len(encode_headers(headers))
        if size > limit:
            raise PayloadTooLarge(size, limit)
        subject = wire.command_subject(self._app.name, spec.name)
        return partial(wire.read_request, spec, Catalogue(spec.kind), subject, body, headers, headers)

    # ---- opening -----------------------------------------------------------------------------------------------

    async def _open(self, timeout_s: float) -> CommandRunner | Exception | None:
        """The runner, once the stream has been read; an error if that failed, None if it took too long."""
        if self._is_closed:
            return None
        if self._opening is None:
            self._opening = self._loop.create_task(self._start())
        opening = self._opening  # one for all who call meanwhile, and none of them may cancel it
        await asyncio.wait([opening], timeout=timeout_s)
        if self._is_closed or not opening.done():
            return None
        return opening.result()

    async def _start(self) -> CommandRunner | Exception:
        try:
            catalogue = self._app.catalogue
            catalogue.check()
            self._runner = await CommandRunner.open(self._app, self._js, catalogue=catalogue, options=self._options)
            return self._runner
        except Exception as error:
            return error
        finally:
            self._opening = None  # one that failed is tried again by the next call

    # ---- the answer --------------------------------------------------------------------------------------------

    def _reply(
        self, spec: CommandSpec, command_id: str, timeout_s: float, outcome: CommandReply | Exception | None
    ) -> CommandReply:
        """The reply, or the error, as it would have come over the network."""
        if outcome is None or isinstance(outcome, TimeoutError | ConnectionClosed):
            # The sent message may be stored.
            raise CommandInDoubt(spec.name, command_id, timeout_s) from outcome
        if isinstance(outcome, PermissionDenied):
            raise outcome  # of this program's own user, and not of a worker's
        if isinstance(outcome, CommandReply) and outcome.data is None:
            return outcome  # nothing in it would be another one
        body, headers = written_outcome(spec, outcome)
        limit = self._context.client.max_payload_bytes
        if len(body) > limit:
            body, headers = written_outcome(spec, reply_too_large(spec, PayloadTooLarge(len(body), limit)))
        return wire.read_reply(body, headers or {})
