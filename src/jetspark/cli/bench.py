"""``jetspark bench``: throughput and latency of a server, as one client sees it."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer

from jetspark.bench.measurements import MEASUREMENTS, BenchSettings, Measured, choose, measure
from jetspark.cli.apps import AsJson, Servers, connection_options
from jetspark.cli.tables import TerminalTable
from jetspark.core.version import VERSION
from jetspark.errors import ConfigError

__all__ = ["bench"]


class StorageChoice(StrEnum):
    file = "file"
    memory = "memory"


def bench(
    measurements: Annotated[
        list[str] | None,
        typer.Argument(help=f"Some of: {', '.join(MEASUREMENTS)}. All when none is named.", show_default=False),
    ] = None,
    servers: Servers = None,
    count: Annotated[int | None, typer.Option(help="Operations in each measurement.", min=1)] = None,
    size: Annotated[int, typer.Option(help="Bytes of each message.", min=0)] = 128,
    storage: Annotated[StorageChoice, typer.Option(help="Storage of the streams.")] = StorageChoice.file,
    replicas: Annotated[int, typer.Option(help="Replicas of the streams.", min=1, max=5)] = 1,
    as_json: AsJson = False,
) -> None:
    """Measure throughput and latency against your server.

    Streams named jetspark-bench-... are created on the server and deleted afterwards; other streams are left alone.
    The server carries the full load of each measurement. Exits with code 1 when a measurement failed.
    """
    names = measurements or []
    try:
        choose(names)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None
    settings = BenchSettings(payload_bytes=size, storage=storage.value, replicas=replicas, count=count)
    found = asyncio.run(_measure(names, servers, settings, as_json=as_json))
    if as_json:
        settings_given = {"payload_bytes": size, "storage": storage.value, "replicas": replicas}
        document = {"jetspark": VERSION, **settings_given, "measurements": [asdict(each) for each in found]}
        typer.echo(json.dumps(document, indent=2))
    for each in found:
        if each.error is not None:
            typer.echo(f"failed: {each.name}: {each.error}", err=True)
    if any(each.error is not None for each in found):
        raise typer.Exit(1)


async def _measure(names: list[str], servers: str | None, settings: BenchSettings, *, as_json: bool) -> list[Measured]:
    table, found = TerminalTable("measurement", "count", "messages/s", "p50 ms", "p99 ms", "how"), []
    async for each in measure(names, connection_options(servers), settings):
        found.append(each)
        latencies = [_shown(None if s is None else s * 1e3, 3) for s in (each.latency_s_p50, each.latency_s_p99)]
        row = (each.name, f"{each.count:,}", _shown(each.messages_per_s, 0), *latencies, MEASUREMENTS[each.name].what)
        table.add(*row)
    if not as_json:
        table.end()
    return found


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
