"""Running a generator of steps that may take long: the driver performs each, and leaves here what came of it. Pure."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Generic, TypeVar

__all__ = ["Course"]

S = TypeVar("S")


class Course(Generic[S]):
    """One such generator on its way.

    ``answer`` is what performing the step brought, and ``problem`` the error that it brought instead: the generator is
    given either with the next call, and decides what it means.
    """

    def __init__(self, steps: Generator[S, Any, None]) -> None:
        self._steps = steps
        self.answer: Any = None
        self.problem: Exception | None = None

    def next_step(self) -> S | None:
        """What to do next; None when all is done.

        Raises:
            Exception: The generator gives up.
        """
        answer, problem = self.answer, self.problem
        self.answer = self.problem = None
        try:
            return self._steps.send(answer) if problem is None else self._steps.throw(problem)
        except StopIteration:
            return None
        finally:
            problem = None  # its traceback has this frame

    def close(self) -> None:
        """It is not gone on with."""
        self.problem = None
        self._steps.close()
