"""Commits whose answer may be lost: the store is asked what happened before anything is tried again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from jetspark.errors import JetSparkError

__all__ = ["done_once"]

T = TypeVar("T")

# Each of these is several attempts of the library, which take up to a minute.
ATTEMPTS = 4
PAUSE_S = 0.2


def done_once(
    attempt: Callable[[], T], outcome: Callable[[], T | None], problem: Callable[[Exception], JetSparkError]
) -> T:
    """Call ``attempt`` until it is known to be done, once.

    Args:
        attempt: Raises any error if it was not done, or if that is unknown.
        outcome: Reads the result of an attempt from the store; None if nothing was done. May raise an error of its
            own, such as :class:`ArchiveMoved` if another writer was first.
        problem: Translates an error of an attempt. If nothing was done, the error is raised unless it may pass.
    """
    for number in range(ATTEMPTS):
        try:
            return attempt()
        except Exception as error:  # the libraries' errors have no common root but this one
            known = problem(error)
        if (found := outcome()) is not None:
            return found
        if not known.may_pass:
            break
        time.sleep(PAUSE_S * 2**number if number < ATTEMPTS - 1 else 0)
    raise known
