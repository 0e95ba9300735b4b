"""Where Spark runs, for commands with ``--engine spark``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Self

import typer

from jetspark.errors import ConfigError

__all__ = ["Master", "PyFiles", "SparkPlace"]

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
        help="With --engine spark: a module or a zip file that Spark's workers have to import; may be repeated.",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparkPlace:
    """A cluster, a Connect server, or this machine."""

    master: str | None = None
    py_files: tuple[str, ...] = ()

    @classmethod
    def of(cls, engine: str, master: str | None, py_files: Sequence[str] | None) -> Self | None:
        """What the options say; None for the live engine.

        Raises:
            ConfigError: They are for Spark, and another engine was asked for.
        """
        if engine == "spark":
            return cls(master=master, py_files=tuple(py_files or ()))
        given = {"--master": master is not None, "--py-files": bool(py_files)}
        if refused := [name for name, is_given in given.items() if is_given]:
            raise ConfigError(f"{', '.join(refused)}: expected with --engine spark")
        return None
