"""The ``jetspark`` console script, which handles SIGTERM before it imports any other module of JetSpark.

The imports take most of the start of ``jetspark run``, and a process manager may end it at any moment. During the
interpreter's own start, which comes first, SIGTERM ends it like any program, with code -15 (143 in a shell).
"""

from __future__ import annotations

import os
import signal
import sys

__all__ = ["run"]


def run() -> None:
    """Run a command: see :func:`jetspark.cli.main.run`."""
    if sys.argv[1:2] == ["run"] or sys.argv[1:3] == ["archive", "run"]:
        signal.signal(signal.SIGTERM, _exit)
    from jetspark.cli.main import run

    run()


def _exit(number: int, frame: object) -> None:
    # Not by an exception: within an import, __set_name__ would replace it and __del__ drop it. Nothing has begun that
    # has to be ended.
    os._exit(0)
