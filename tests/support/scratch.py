"""One folder for everything that a run of the suite writes to the temporary folder; it goes when the run ends.

Tests kill servers, workers and Sparks, and what is killed does not clean up: a run left some two hundred folders of
Spark's blocks, of its classes and of its configuration. Every process that the run starts inherits the variables, and a
JVM is told by an option, since Java looks at none. The folder is inside that of pytest's own, so if the run itself is
killed it goes with that, three runs later.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

__all__ = ["begin", "end", "java_option"]

# Spark prefers the second to the option `spark.local.dir`; a test of what a process leaves behind sets both anew.
VARIABLES = ("TMPDIR", "SPARK_LOCAL_DIRS")


def begin(parent: Path) -> Path:
    """Make the folder, and have this process and those that it starts use it."""
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
