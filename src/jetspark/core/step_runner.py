"""The contract between a procedure, which decides, and the driver that runs it. Pure.

A procedure is a generator, :data:`Steps`. It yields one step at a time: plain data that says what to do, such as a
request to send or a time to wait. The driver performs the step and resumes the generator with the answer, whose type
the step's docstring states. What the generator returns is the procedure's result.

One rule holds for failures, in every driver: **the error that ended a step is thrown into the generator** at its
``yield``, cancellations and interrupts included. The generator catches the errors it has a decision for; all others end
the procedure and reach the caller. A driver that repeats a step, because the step is idempotent, does so while it
performs it: the generator sees only the last outcome.

Every driver uses :class:`StepRun`, most of them through ``run_steps`` of ``aio/step_runner.py`` and its blocking twin.
The aliases of :data:`Steps` name the steps of one kind of procedure:

=====================================  ==========================================================================
``jetstream.operations.Operation``     JetStream requests within one deadline; run by ``DriverContext.run``
``publish.steps.Procedure``            batches, bulk reads and pull consumers; run by ``ProcedureRunner``
``core.lifecycle.Establishing``        dialling and logging in; run by a transport
``core.lifecycle.Ending``              draining and closing; run by ``Client``
``batcher.effects.SinkSteps``          wrappers of a sink; run by the sink's ``Runner``
``app.commands.deciding.CommandSteps`` deciding a command; run by ``CommandRunner``, which waits in callbacks where it
                                       can, and by ``CommandStore``, which repeats reads for as long as the caller waits
``app.handlers.handler_steps``         storing the outcome of an event; run by ``HandlerWorker``, which repeats a step
                                       that fails, and by ``DeadLetterBox`` for operators
=====================================  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

__all__ = ["ReadClock", "Sleep", "StepRun", "Steps"]

S = TypeVar("S")
R = TypeVar("R")

Steps: TypeAlias = Generator[S, Any, R]
"""A procedure that yields steps of type ``S`` and returns an ``R``."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Wait for a time. There is no answer."""

    seconds: float
    random_fraction: float = 0.0
    """The part of ``seconds``, from 0 to 1, that is random: writers that collided once would collide again after equal
    waits."""

    def draw_s(self, random: Callable[[], float]) -> float:
        """The time to wait; ``random`` returns a number in [0, 1), and is called only if a part is random."""
        return self.seconds * (1.0 - self.random_fraction * random()) if self.random_fraction else self.seconds


@dataclass(frozen=True, slots=True)
class ReadClock:
    """The answer is the time in seconds on the driver's monotonic clock."""


class StepRun(Generic[S, R]):
    """One run of a procedure.

    A driver calls :meth:`advance`, performs :attr:`step`, stores the outcome in :attr:`answer` or :attr:`error`, and
    repeats this until ``step`` is None.
    """

    __slots__ = ("_steps", "answer", "error", "result", "step")

    result: R
    """The return value of the procedure; set when :attr:`step` is None after :meth:`advance`."""

    def __init__(self, steps: Steps[S, R]) -> None:
        self._steps = steps
        self.step: S | None = None
        """The step to perform; None before the first and after the last."""
        self.answer: Any = None
        """The answer to :attr:`step`; cleared when the procedure has it."""
        self.error: BaseException | None = None
        """The error that :attr:`step` ended with; cleared when the procedure has it."""

    def advance(self) -> None:
        """Give the procedure the outcome of its step, and set :attr:`step` to the next one.

        Raises:
            BaseException: The procedure ended with this error.
        """
        answer, error = self.answer, self.error
        self.answer = self.error = self.step = None
        try:
            self.step = self._steps.send(answer) if error is None else self._steps.throw(error)
        except StopIteration as finished:
            self.result = finished.value
        finally:
            error = None  # its traceback refers to this frame

    def close(self) -> None:
        """End the procedure where it is; its ``finally`` blocks run."""
        self.step = self.error = None
        self._steps.close()
