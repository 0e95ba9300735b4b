"""The ``jetspark`` command: one module per command group; this one only gathers them."""

from __future__ import annotations

import signal
import sys

from jetspark.cli.signals import EndedAtOnce, end_at_once
from jetspark.errors import JetSparkError, MissingExtra

__all__ = ["run"]


def run() -> None:
    """Entry point. Errors we understand are one line on stderr and exit code 1, not a traceback.

    Ctrl-C ends any command with the exit code shells give an interrupted program. ``jetspark run`` ends with 0 at
    SIGTERM, also while it imports what it needs.
    """
    try:
        if sys.argv[1:2] == ["run"]:
            signal.signal(signal.SIGTERM, end_at_once)
        try:
            import typer

            from jetspark.cli.commands import app
        except ImportError as error:
            raise MissingExtra("the jetspark command", "cli") from error
        typer.main.get_command(app)(prog_name="jetspark")
    except JetSparkError as error:
        print(f"jetspark: {error}", file=sys.stderr)
        sys.exit(1)
    except EndedAtOnce:
        sys.exit(0)
    except KeyboardInterrupt:
        print("jetspark: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    run()
