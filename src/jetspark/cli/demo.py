"""``jetspark demo``: the order pipeline of ``examples/orders``, end to end, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

import jetspark
from jetspark.errors import ConfigError, JetSparkError

__all__ = ["demo"]


def demo(
    events: Annotated[int, typer.Option(help="How many order events.", min=1)] = 200_000,
    servers: Annotated[str | None, typer.Option(help="Use this NATS instead of starting one.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave server and data, and say how to look at them.")] = False,
) -> None:
    """Run the order pipeline: events into JetStream, through Spark, state into key-value buckets; then check it.

    Exits with 1 when the result is not what an independent computation gives, or when a second run or a replay changes
    it.
    """
    try:
        folder = _examples()
        from jetspark.spark.session import check_java  # says which extra is missing, if it is

        check_java()
    except JetSparkError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    command = [sys.executable, "-m", "orders", "--events", str(events)]
    command += ["--servers", servers] if servers else []
    command += ["--keep"] if keep else []
    # Spark's workers inherit the path, and import the projections from there.
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"PYSPARK_PYTHON": sys.executable} | os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    raise typer.Exit(_run(command, environment))


def _run(command: list[str], environment: dict[str, str]) -> int:
    with subprocess.Popen(command, env=environment) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                # The terminal interrupts the pipeline too, which stops Spark, removes what it made and says so.
                continue


def _examples() -> Path:
    """Beside the package when it is installed, in the repository when it is not."""
    package = Path(jetspark.__file__).parent
    for folder in (package / "_examples", package.parents[1] / "examples"):
        if (folder / "orders" / "__main__.py").exists():
            return folder
    raise ConfigError("the example 'orders' is not part of this installation; clone the repository")
