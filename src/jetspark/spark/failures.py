"""What is wrong, without the traces of everything Spark has around it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from jetspark.errors import JetSparkError, UsageError

__all__ = ["failure_of", "plain_failures"]


def failure_of(text: str) -> UsageError:
    """The last error of ours that a trace names; the whole text where there is none."""
    found = re.findall(r"jetspark\.errors\.\w+: (.+)", text)
    return UsageError(found[-1] if found else text)


@contextmanager
def plain_failures() -> Iterator[None]:
    """Raise errors of tasks and planners as what our code has raised there."""
    try:
        yield
    except JetSparkError:
        raise
    except Exception as error:
        if "jetspark.errors." not in str(error):
            raise
        raise failure_of(str(error)) from error
