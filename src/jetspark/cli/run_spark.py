"""``jetspark run --engine spark``: the projections of an application as a Spark stream."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import typer

from jetspark.aio.connector import connect
from jetspark.app import App
from jetspark.app.provisioning import check_for_drift
from jetspark.cli.engine_options import SparkTarget
from jetspark.cli.signals import EndSignal
from jetspark.core.auth import Credentials, Token, UserPassword
from jetspark.core.options import TLSConfig
from jetspark.errors import ConfigError

if TYPE_CHECKING:
    from jetspark.cli.run import RunOptions

__all__ = ["run_on_spark", "spark_options"]

# How soon the end of the query is noticed; a signal wakes the process at once.
POLL_S = 0.2
# How long the last micro-batch may take after a signal.
MICRO_BATCH_S = 5.0
_SECRET = "JETSPARK_SPARK_SECRET"


def run_on_spark(name: str, app: App, target: SparkTarget, options: RunOptions, connection: dict[str, Any]) -> None:
    """Fold until SIGTERM or Ctrl-C; then exit with code 0. Events that are folded again after that change no state."""
    import jetspark.spark  # noqa: F401 - says which extra is missing, if it is

    asyncio.run(_prepare(app, connection, apply=options.apply))
    given = spark_options(connection)
    end_signal = EndSignal()  # before the start of Spark, so that no signal is lost
    with tempfile.TemporaryDirectory(prefix="jetspark-") as folder, ThreadPoolExecutor(1) as beside:
        given["checkpoint"] = folder if options.checkpoint is None else options.checkpoint
        # In a thread, since Spark takes Ctrl-C for itself in the main thread, and raises it amid calls to Java.
        beside.submit(_fold, name, app, target, options.only or (), given, end_signal).result()


def _fold(
    name: str, app: App, target: SparkTarget, only: Sequence[str], options: dict[str, Any], end_signal: EndSignal
) -> None:
    from jetspark.spark import run, session
    from jetspark.spark.queries import stop_between_batches

    spark = session(f"jetspark-{app.name}", master=target.master, py_files=target.py_files)
    try:
        if end_signal.is_received:
            return
        query = run(name, spark, projections=only, **options)
        typer.echo(f"folding {', '.join(only or app.projections)} of {app.name} on Spark", err=True)
        while query.isActive and not end_signal.wait(POLL_S):
            pass
        stop_between_batches(query, MICRO_BATCH_S)
    finally:
        spark.stop()


async def _prepare(app: App, options: dict[str, Any], *, apply: bool) -> None:
    if apply:
        await app.apply(**options)
    async with connect(**options) as nc:
        await check_for_drift(nc.jetstream(), app)


def spark_options(options: dict[str, Any]) -> dict[str, Any]:
    """How to connect, as options of Spark. Spark shows options in plans, so secrets go through the environment."""
    servers, in_urls = _without_secrets(options["servers"])
    given = {"servers": servers}
    if "jetstream_domain" in options:
        given["domain"] = options["jetstream_domain"]
    tls = options.get("tls") or TLSConfig()
    if "inbox_prefix" in options or tls.handshake_first:
        what = "inbox_prefix" if "inbox_prefix" in options else "tls_first"
        raise ConfigError(f"{what} of the nats context: Spark's workers cannot do that; give --servers")
    files = {"tlsCaFile": tls.ca_file, "tlsCertFile": tls.cert_file, "tlsKeyFile": tls.key_file}
    given |= {name: str(path) for name, path in files.items() if path is not None}
    match options.get("auth") or in_urls:
        case None:
            return given
        case Credentials(path=str() | Path()) as auth:
            return given | {"credentialsFile": str(auth.path)}
        case Token() as auth:
            os.environ[_SECRET] = auth.token
            return given | {"tokenEnv": _SECRET}
        case UserPassword() as auth:
            os.environ[_SECRET] = auth.password
            return given | {"user": auth.user, "passwordEnv": _SECRET}
        case other:  # such as an NKey
            raise ConfigError(f"{type(other).__name__}: Spark's workers cannot connect with it; give --servers")


def _without_secrets(servers: str | Sequence[str]) -> tuple[str | list[str], Token | UserPassword | None]:
    """Addresses without users, and the user that all of them have.

    Raises:
        ConfigError: Two addresses have different users.
    """
    plain: list[str] = []
    found: set[Token | UserPassword | None] = set()
    for url in [servers] if isinstance(servers, str) else servers:
        scheme, slashes, rest = url.rpartition("//")
        login, at, address = rest.rpartition("@")
        user, colon, password = (unquote(each) for each in login.partition(":"))
        found.add((UserPassword(user, password) if colon else Token(user)) if at else None)
        plain.append(f"{scheme}{slashes}{address}")
    if len(found) > 1:
        raise ConfigError("--servers: expected one user for all of them; Spark's workers have one way to connect")
    return plain[0] if isinstance(servers, str) else plain, found.pop()
