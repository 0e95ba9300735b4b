"""``--engine`` and the options that belong to Spark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jetspark.cli.apps import connection_options, load_app
from jetspark.errors import ConfigError

if TYPE_CHECKING:
    from jetspark.lake.reading import ArchiveRoot
    from jetspark.spark import ReplayEngine

__all__ = ["EngineOptions", "Master", "PyFiles", "SparkTarget", "spark_target"]

Master = Annotated[
    str | None,
    typer.Option(
        "--master",
        "--remote",
        metavar="URL",
        help="With --engine spark: where Spark runs, such as spark://HOST:7077, or sc://HOST for Spark Connect; else "
        "on this machine.",
    ),
]
PyFiles = Annotated[
    list[str] | None,
    typer.Option(
        "--py-files",
        metavar="FILE",
        help="With --engine spark: a module or a zip file that Spark's workers import; may be repeated.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkTarget:
    """Where Spark runs: a cluster, a Connect server, or this machine."""

    master: str | None = None
    py_files: tuple[str, ...] = ()


def spark_target(engine: str, master: str | None, py_files: list[str] | None) -> SparkTarget | None:
    """The target of ``--engine spark``; None for the live engine.

    Raises:
        ConfigError: There are options for Spark with another engine.
    """
    if engine == "spark":
        return SparkTarget(master=master, py_files=tuple(py_files or ()))
    given = {"--master": master is not None, "--py-files": bool(py_files)}
    if wrong := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(f"{', '.join(wrong)} needs --engine spark")
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The engine that folds."""

    engine: Annotated[
        Literal["live", "spark"], typer.Option("--engine", help="The engine: this process (live), or Spark.")
    ] = "live"
    master: Master = None
    py_files: PyFiles = None

    @property
    def target(self) -> SparkTarget | None:
        """Where Spark runs; None for the live engine.

        Raises:
            ConfigError: There are options for Spark with the live engine.
        """
        return spark_target(self.engine, self.master, self.py_files)

    @contextmanager
    def started(
        self, app: str, servers: str | None, projection: str, archive: ArchiveRoot | None = None
    ) -> Iterator[ReplayEngine | None]:
        """Start Spark for one projection, and stop it at the end of the block; None for the live engine."""
        target = self.target
        if target is None:
            yield None
            return
        from jetspark.app.replay.history import spec_of
        from jetspark.cli.run_spark import spark_options
        from jetspark.spark import ReplayEngine  # says which extra is missing, if it is
        from jetspark.spark.session import short_session

        name = spec_of(load_app(app).spec, projection).name
        given = spark_options(connection_options(servers))
        if archive is not None:
            given["archive"] = archive
        with short_session(f"jetspark-{name}", master=target.master, py_files=target.py_files) as spark:
            yield ReplayEngine(app, spark, projection=name, **given)
