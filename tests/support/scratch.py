"""One folder for everything that a run of the suite writes to the temporary folder; it goes when the run ends.

Tests kill servers, workers and Sparks, and what is killed does not clean up: a run left some two hundred folders of
Spark's blocks, of its classes and of its configuration. Every process that the run starts inherits the variables, and a
JVM is told by an option, since Java looks at none.

The folder is in memory where there is room: servers make and remove thousands of small stores, and no test is about
the disk below them. It is inside pytest's own folder otherwise. If the run itself is killed, the next run removes the
folder in memory, and pytest the one inside its own, three runs later.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["begin", "end", "java_option"]

# Spark prefers the second to the option `spark.local.dir`; a test of what a process leaves behind sets both anew.
VARIABLES = ("TMPDIR", "SPARK_LOCAL_DIRS")

MEMORY = Path("/dev/shm")
PREFIX = "jetspark-tests-"
# The servers, Sparks and workers of a run need memory too, and a file there must not take it from them.
ROOM_BYTES = 8 << 30


def begin(parent: Path, *, memory: Path = MEMORY) -> Path:
    """Make the folder, and have this process and those that it starts use it.

    Args:
        parent: Where the folder is made if ``memory`` is of no use.
        memory: A folder whose files are in memory.
    """
    if _has_room(memory):
        _remove_of_killed_runs(memory)
        parent = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=memory))
    folder = parent / "scratch"
    folder.mkdir(mode=0o700)
    for variable in VARIABLES:
        os.environ[variable] = str(folder)
    tempfile.tempdir = str(folder)
    os.environ["JDK_JAVA_OPTIONS"] = f"{os.environ.get('JDK_JAVA_OPTIONS', '')} {java_option()}".strip()
    return folder


def java_option() -> str:
    """By which a JVM uses the same temporary folder as this process."""
    return f"-Djava.io.tmpdir={tempfile.gettempdir()}"


def end(folder: Path) -> None:
    """Remove it. A Spark of this process is still alive, and writes no more."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.parent.name.startswith(PREFIX):
        shutil.rmtree(folder.parent, ignore_errors=True)


def _has_room(memory: Path) -> bool:
    """Whether there is such a folder for us, with programs that can be run from it, as Java runs its libraries."""
    try:
        place = os.statvfs(memory)
        available = int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) << 10
    except (OSError, IndexError):
        return False
    can_be_used = os.access(memory, os.W_OK) and not place.f_flag & os.ST_NOEXEC
    return can_be_used and min(place.f_bavail * place.f_frsize, available) >= ROOM_BYTES


def _remove_of_killed_runs(memory: Path) -> None:
    for folder in memory.glob(f"{PREFIX}*"):
        pid = folder.name.removeprefix(PREFIX).partition("-")[0]
        if not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)
