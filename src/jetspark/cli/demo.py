"""``jetspark demo``: the application of ``examples/orders``, end to end, on this machine."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from jetspark.errors import ConfigError, JetSparkError

__all__ = ["demo"]


def demo(
    events: Annotated[int, typer.Option(help="How many events to publish.", min=1000)] = 500_000,
    servers: Annotated[
        str | None,
        typer.Option(envvar="JETSPARK_SERVERS", show_envvar=True, help="Use this NATS instead of starting one."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep server and data until Enter, to look at them.")] = False,
    remove: Annotated[
        bool, typer.Option("--remove", help="Only remove what a killed demo has left on --servers.")
    ] = False,
) -> None:
    """Show an application end to end: publish, fold on Spark and live, crash, replay, rebuild, redrive; check it all.

    Exits with code 1 when a stage or a check fails. Removes all that it has created.
    """
    try:
        if remove and servers is None:
            raise ConfigError("--remove needs --servers")
        from jetspark.demo.runner import DemoOptions, run_demo
        from jetspark.spark.session import check_java  # says which extra is missing, if it is

        check_java()
    except JetSparkError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    logging.getLogger("jetspark").setLevel(logging.ERROR)
    logging.getLogger().addHandler(logging.NullHandler())  # py4j logs errors while Java stops
    options = DemoOptions(events=events, servers=servers, is_kept=keep, is_removal=remove)
    raise typer.Exit(run_demo(options))
