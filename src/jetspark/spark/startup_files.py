"""The Python that Spark's workers are started with.

Spark puts ``pyspark.zip`` in front of the path of every Python process it starts. Modules from a zip file are compiled
in each process that imports them, which takes 0.85 s of processor time, and a query has some ten processes. The
installed package beside the zip is the same, and is compiled already. So workers are started by a script that takes
the zip file from the path. It is in the folder of the file that tells Java how to log, which is this process's alone.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shlex
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["LOGGING", "VARIABLE", "logging_file", "remove_startup_files", "started_by_launcher", "worker_python"]

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


# Warnings are shown, because a cluster without free cores tells it by one. With another level than this Spark says at
# every start that it sets this one.
_LOGGING = """\
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""
# What these warn of is so in every session, or whenever a query ends: nobody could do anything about it.
_QUIET = (
    "org.apache.hadoop.util.NativeCodeLoader",
    "org.apache.spark.scheduler.DAGScheduler",
    "org.apache.spark.sql.execution.datasources.DataSourceManager",
    "org.apache.spark.sql.execution.streaming.runtime.ResolveWriteToStream",
)
LOGGING = _LOGGING + "".join(
    f"logger.{number}.name = {name}\nlogger.{number}.level = error\n" for number, name in enumerate(_QUIET)
)


class _Made(NamedTuple):
    path: Path
    pid: int


_made: _Made | None = None


def logging_file() -> Path:
    """One for each process; another one if somebody has changed it."""
    global _made
    if _made is not None and _made.pid == os.getpid() and _is_ours(_made.path):
        return _made.path
    remove_startup_files()
    path = Path(tempfile.mkdtemp(prefix="jetspark-log4j2-")) / "log4j2.properties"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(LOGGING)
    if _made is None:
        atexit.register(remove_startup_files)
    _made = _Made(path, os.getpid())
    return path


def remove_startup_files() -> None:
    """The folder, if it is this process that has made it: a fork ends with the same functions as its parent."""
    if _made is not None and _made.pid == os.getpid():
        shutil.rmtree(_made.path.parent, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    """Whether nobody else can have written it, and it says what it should."""
    try:
        folder, file = os.lstat(path.parent), os.lstat(path)
        is_private = all(each.st_uid == os.geteuid() and not each.st_mode & 0o077 for each in (folder, file))
        is_plain = stat.S_ISDIR(folder.st_mode) and stat.S_ISREG(file.st_mode)
        return is_private and is_plain and path.read_text(encoding="utf-8") == LOGGING
    except OSError:
        return False
