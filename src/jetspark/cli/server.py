"""``jetspark server``: a nats-server in the foreground, for as long as the terminal or script wants it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from jetspark.cli.signals import EndSignal
from jetspark.errors import ConfigError, EmbeddedServerError
from jetspark.server import NatsServer, find_nats_server

__all__ = ["server"]

# How soon we notice that the server ended by itself; a signal wakes us at once.
POLL_S = 0.2


def server(
    port: Annotated[int, typer.Option(help="Port for clients; 0 takes a free one.")] = 4222,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    store: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps the streams. Without it they are removed at the end.", metavar="DIR"),
    ] = None,
    durable: Annotated[
        bool,
        typer.Option("--durable", help="Flush to disk before each acknowledgement, not every two minutes."),
    ] = False,
    jetstream: Annotated[
        bool, typer.Option("--jetstream/--no-jetstream", help="Whether streams can be stored.")
    ] = True,
    config: Annotated[
        Path | None,
        typer.Option(
            help="File with further settings in nats-server's own syntax; they win over the options.",
            metavar="FILE",
            exists=True,
            dir_okay=False,
            readable=True,
        ),
    ] = None,
) -> None:
    """Run a nats-server until Ctrl-C or SIGTERM.

    Standard output has one line, the URL, once clients can connect; everything else goes to standard error.
    """
    out, notes = (
        Console(highlight=False, soft_wrap=True),
        Console(stderr=True, highlight=False, soft_wrap=True),
    )
    end_signal = EndSignal()  # before the start, so that a signal during it is not lost and leaves no traceback
    try:
        extra = "" if config is None else config.read_text(encoding="utf-8")
        nats = NatsServer(
            host=host, port=port, store_dir=store, durable=durable, jetstream=jetstream, extra_config=extra
        )
        with nats:
            notes.print(_banner(nats, store))
            out.print(nats.url, markup=False)
            while not end_signal.wait(POLL_S):
                if not nats.is_running:
                    raise EmbeddedServerError("nats-server ended by itself", nats.log()[-2000:])
    except (ConfigError, EmbeddedServerError) as failure:
        _explain(failure, port, notes)
        raise typer.Exit(1) from None
    notes.print("stopped")


def _banner(nats: NatsServer, store: Path | None) -> Table:
    binary = find_nats_server()
    rows = {"nats-server": f"{'.'.join(map(str, binary.version))}, pid {nats.pid}"}
    if not nats.config.jetstream:
        rows["streams"] = "off"
    elif store is None:
        rows["streams"] = "temporary: removed when the server stops (--store DIR keeps them)"
    else:
        rows["streams"] = f"in {nats.store_dir}"
    if nats.config.jetstream:
        rows["flushed"] = (
            "before each acknowledgement"
            if nats.config.durable
            else "every two minutes, after the acknowledgement (--durable: before)"
        )
    rows["monitoring"] = nats.monitoring_url
    rows["stop"] = "Ctrl-C"
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _explain(failure: ConfigError | EmbeddedServerError, port: int, notes: Console) -> None:
    if isinstance(failure, EmbeddedServerError) and "already in use" in failure.reason and port:
        # One line: the log would only say the same again.
        notes.print(
            f"error: {failure.reason}; stop what listens there, or take another with --port (0: a free one)",
            markup=False,
        )
        return
    notes.print(f"error: {failure}", markup=False)
