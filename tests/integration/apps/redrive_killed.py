"""A redrive for tests that kills itself at a named place: ``python redrive_killed.py URL PLACE``."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import jetspark
from jetspark.app import App
from jetspark.app.dead_letters import redriving
from jetspark.app.dead_letters.redriving import DeadLetterFilter, run_redrive
from jetspark.app.jobs import Job

# Each names what was the last thing to have its effect.
PLACES = ("begin", "_request", "save", "every _request")


def die_after(name: str, times: int) -> None:
    """Die when a function of the module, or a method of the job, has returned this many times."""
    owner: Any = redriving if hasattr(redriving, name) else Job
    call: Callable[..., Any] = getattr(owner, name)
    left = times

    async def mortal(*args: Any) -> Any:
        nonlocal left
        answer = await call(*args)
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    setattr(owner, name, mortal)


async def main(url: str, place: str) -> None:
    redriving.SAVE_EVERY = 3
    die_after(place.split()[-1], {"_request": 2, "every _request": 3}.get(place, 1))
    async with jetspark.connect(url) as nc:
        await run_redrive(nc.jetstream(), App("notes", stream="NOTES", subjects=["notes.>"]), DeadLetterFilter())


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
