"""The file that tells Spark's JVM how to log.

The JVM reads it while it starts, and its author decides what the JVM loads. So it is in a folder that this
process makes for itself: with a name nobody can foresee, which only its owner may enter. It goes when the process ends.
"""

from __future__ import annotations

import atexit
import os
import shutil
import stat
import tempfile
from pathlib import Path
from typing import NamedTuple

__all__ = ["LOGGING", "logging_file", "remove"]

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
    remove()
    path = Path(tempfile.mkdtemp(prefix="jetspark-log4j2-")) / "log4j2.properties"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(LOGGING)
    if _made is None:
        atexit.register(remove)
    _made = _Made(path, os.getpid())
    return path


def remove() -> None:
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
