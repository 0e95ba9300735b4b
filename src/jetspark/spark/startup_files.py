"""Files that Spark's processes start with: the log configuration of the JVM, and the Python launcher of workers.

Both are in a temporary folder of this process. Its name is unpredictable and only its owner may enter it, because the
author of the log configuration decides which classes the JVM loads. The folder is removed at exit.

The launcher saves start-up time. Spark prepends ``pyspark.zip`` to the path of every Python process. Each process
compiles the modules that it imports from a zip file, which takes 0.85 s of CPU time, and a query has about ten
processes. The installed package is identical and compiled already, so the launcher removes the zip file from the path.
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
"""Environment variable with the Python of workers."""

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
    """Path of the launcher; this Python if Spark is not the installed package, or the launcher cannot be executed."""
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
    """Sets PYSPARK_PYTHON to the launcher while a session starts, unless the user has set it.

    Afterwards the variable has this Python: programs started from here may outlive the launcher.
    """
    given = os.environ.get(VARIABLE, sys.executable)
    if given == sys.executable:
        os.environ[VARIABLE] = worker_python()
    try:
        yield
    finally:
        os.environ[VARIABLE] = given


# Warnings are shown, because Spark reports a cluster without free cores as a warning. With any other level Spark prints
# at every start that it changes the level to this one.
_LOGGING = """\
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d{HH:mm:ss} %p %c{1}: %m%n%ex
"""
# Loggers that warn in every session, or whenever a query ends, about conditions without a remedy.
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
    """Path of the log configuration, one for each process; a new one if the file was changed."""
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
    """Remove the folder if this process created it; a fork inherits the exit handlers of its parent."""
    if _made is not None and _made.pid == os.getpid():
        shutil.rmtree(_made.path.parent, ignore_errors=True)


def _is_ours(path: Path) -> bool:
    """True if only this user can have written the file, and its content is unchanged."""
    try:
        folder, file = os.lstat(path.parent), os.lstat(path)
        is_private = all(each.st_uid == os.geteuid() and not each.st_mode & 0o077 for each in (folder, file))
        is_plain = stat.S_ISDIR(folder.st_mode) and stat.S_ISREG(file.st_mode)
        return is_private and is_plain and path.read_text(encoding="utf-8") == LOGGING
    except OSError:
        return False
