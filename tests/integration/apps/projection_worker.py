"""A process that runs projections, for tests: it kills itself at a named moment."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import Any

from support.projections import bank

from jetspark.aio.steps import ProcedureRunner
from jetspark.app.projections.live_options import LiveOptions
from jetspark.app.projections.live_projection import LiveProjection
from jetspark.publish.steps import IngestAll


def die_at(moment: str, number: int) -> None:
    """Just before a batch is stored for the n-th time, in the middle of sending it, or just after."""
    left = number

    def is_it() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    store, ingest = LiveProjection.store, ProcedureRunner._ingest

    async def mortal_store(self: LiveProjection, *args: Any, **options: Any) -> bool:
        dies = is_it()
        if dies and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        done = await store(self, *args, **options)
        if dies and moment == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    async def mortal_ingest(self: ProcedureRunner, step: IngestAll) -> Any:

        def items() -> Any:
            for count, item in enumerate(step.items):
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                yield item

        return await ingest(self, IngestAll(items()))

    if moment == "within":
        ProcedureRunner._ingest = mortal_ingest  # type: ignore[method-assign]
    else:
        LiveProjection.store = mortal_store  # type: ignore[method-assign]


if __name__ == "__main__":
    url, moment, number = sys.argv[1:]
    if moment:
        die_at(moment, int(number))
    options = LiveOptions(batch=40, batch_wait_s=0.0, position_every_s=0.01, lease_s=1.0, cache_keys=3)
    asyncio.run(bank().run(url, stop_timeout=5.0, live=options))
