# Generated from aio/step_runner.py by tools/unasync.py; edit that file.
"""Running a procedure to its end from threads; :mod:`jetspark.core.step_runner` states the contract."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from jetspark.core.step_runner import StepRun

__all__ = ["run_steps"]

S = TypeVar("S")
R = TypeVar("R")

NO_LOCK = nullcontext()


def run_steps(run: StepRun[S, R], perform: Callable[[S], Any], *, lock: AbstractContextManager[Any] = NO_LOCK) -> R:
    """Perform the steps of ``run``, from its present one, and return the procedure's result.

    ``lock`` is held while the procedure runs, but not while a step is performed.
    """
    try:
        if run.step is None:
            with lock:
                run.advance()
        while (step := run.step) is not None:
            try:
                run.answer = perform(step)
            except BaseException as error:
                run.error = error
            with lock:
                run.advance()
        return run.result
    finally:
        run.close()
