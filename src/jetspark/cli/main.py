"""The entry point of the ``jetspark`` command."""

from __future__ import annotations

import signal
import sys

from jetspark.cli.signals import EndedAtOnce, end_at_once
from jetspark.errors import JetSparkError, MissingExtra

__all__ = ["run"]


def run() -> None:
    """Run a command. A JetSparkError is one line on stderr and exit code 1, not a traceback.

    Ctrl-C ends any command with the exit code that shells give an interrupted program. ``jetspark run`` and
    ``jetspark archive run`` exit with 0 after SIGTERM, also while they import their modules.
    """
    try:
        try:
            import typer

            from jetspark.cli.commands import app
        except ImportError as error:
            raise MissingExtra("the jetspark command", "cli") from error
        if sys.argv[1:2] == ["run"] or sys.argv[1:3] == ["archive", "run"]:
            signal.signal(signal.SIGTERM, end_at_once)
        typer.main.get_command(app)(prog_name="jetspark")
    except EndedAtOnce:
        sys.exit(0)
    except KeyboardInterrupt:
        print("jetspark: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        if end_at_once.was_called:  # the code that it interrupted has raised an error of its own
            sys.exit(0)
        if not isinstance(error, JetSparkError):
            raise
        print(f"jetspark: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    run()
