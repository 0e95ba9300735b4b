"""Workers in processes of their own, which tests kill."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

_FORKING = multiprocessing.get_context("forkserver")
# A process that has everything imported, and is copied for each worker: a Python that starts anew takes a second.
_FORKING.set_forkserver_preload(
    ["support.accounts", "support.fulfilment", "support.transfers", "jetspark.app.workers", "jetspark.aio.client"]
)


def start_process(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Have a function of a module called in a process of its own."""
    process = _FORKING.Process(target=work, args=arguments, daemon=True)
    process.start()
    return process
