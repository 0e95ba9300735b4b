"""Java classes that Spark loads at its start, parsed beforehand: an archive for the suite.

A Spark that maps this file, a class data sharing archive, starts with half the processor time: 4 seconds instead of 8.
The suite starts some forty, so :func:`begin` has the file written while the first tests run. Java checks that it fits
the JVM and the class path, and goes without it where it does not.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from support import scratch

TESTS = Path(__file__).resolve().parents[1]

# The first compiler only, the simplest collector, and classes that are not verified.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"


def path() -> Path | None:
    """Where the archive of this environment's Spark is or will be; None where there is no Spark."""
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        return None
    key = hashlib.sha256(f"{found.origin} {os.stat(found.origin).st_mtime_ns}".encode()).hexdigest()[:12]
    return TESTS.parent / ".pytest_cache" / f"spark-classes-{key}.jsa"


def java_options() -> str:
    """For ``JDK_JAVA_OPTIONS``. A JVM with another class path says so on standard output unless told not to."""
    archive = path()
    if archive is None:
        return JAVA_OPTIONS
    return f"{JAVA_OPTIONS} -XX:SharedArchiveFile={archive} -Xlog:cds=off -Xlog:cds+dynamic=off"


def begin() -> subprocess.Popen[bytes] | None:
    """Start writing the archive, unless there is one, in a process of its own."""
    archive = path()
    if archive is None or archive.exists():
        return None
    return subprocess.Popen(
        [sys.executable, str(TESTS.parent / "tools" / "class_archive.py"), str(archive)],
        env=os.environ | {"JDK_JAVA_OPTIONS": f"{JAVA_OPTIONS} {scratch.java_option()}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
