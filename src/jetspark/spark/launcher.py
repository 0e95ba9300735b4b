"""The Python that Spark's workers are started with.

Spark puts ``pyspark.zip`` in front of the path of every Python process it starts. Modules from a zip file are compiled
in each process that imports them, which takes 0.85 s of processor time, and a query has some ten processes. The
installed package beside the zip is the same, and is compiled already. So workers are started by a script that takes
the zip file from the path. It is in the folder of the file that tells Java how to log, which is this process's alone.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from jetspark.spark.logs import logging_file

__all__ = ["VARIABLE", "started_by_launcher", "worker_python"]

VARIABLE = "PYSPARK_PYTHON"
"""Names the Python of workers."""

_SCRIPT = """\
#!/bin/sh
path=""
IFS=:
for entry in $PYTHONPATH; do
    case "$entry" in
        */pyspark/python/lib/pyspark.zip) ;;
        *) path="$path${{path:+:}}$entry" ;;
    esac
done
export PYTHONPATH="$path"
exec {python} "$@"
"""


def worker_python() -> str:
    """The script, or this Python where the script is of no use: where Spark is not that of the installed package."""
    import pyspark

    is_installed = Path(pyspark.__file__).is_file() and "SPARK_HOME" not in os.environ
    if os.name != "posix" or not is_installed:
        return sys.executable
    path, script = logging_file().with_name("python"), _SCRIPT.format(python=shlex.quote(sys.executable))
    if os.statvfs(path.parent).f_flag & os.ST_NOEXEC:
        return sys.executable
    if not path.exists():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700), "w", encoding="utf-8") as file:
            file.write(script)
    return str(path)


@contextlib.contextmanager
def started_by_launcher() -> Iterator[None]:
    """While a session is made, which notes what workers are to run, unless the user has said something else.

    Afterwards the variable names this Python: programs that are started from here outlive the script.
    """
    given = os.environ.get(VARIABLE, sys.executable)
    if given == sys.executable:
        os.environ[VARIABLE] = worker_python()
    try:
        yield
    finally:
        os.environ[VARIABLE] = given
