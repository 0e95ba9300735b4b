"""Creates Spark sessions with the formats registered: local by default, on a cluster with ``master=``."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

from jetspark.errors import ConfigError
from jetspark.spark.startup_files import VARIABLE, logging_file, started_by_launcher

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "CONNECT",
    "SparkServer",
    "check_java",
    "check_somebody_listens",
    "find_java",
    "server_of",
    "session",
    "short_session",
]

JAVA_VERSION = 17
_REMEDY = f"install Java {JAVA_VERSION} or newer, for example `apt install openjdk-{JAVA_VERSION}-jre-headless`"

# Attempts for each task, as on a cluster. Plain `local[n]` has one attempt, so a single killed Python worker would end
# the query.
TASK_ATTEMPTS = 4
# Longest wait for the end of a Java process whose start was interrupted.
JAVA_END_S = 5.0

# For a JVM that lives for minutes: one tier of compilation, and one thread for garbage collection. A session starts in
# two thirds of the time; long-running work in Java takes up to twice as long.
SHORT_JOB_FLAGS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# Checkpoints by rename instead of a forked process for each file: 90 ms less for each micro-batch. Safe where a rename
# is atomic, as on a local disk.
LOCAL_CHECKPOINTS = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"


def session(
    app_name: str = "jetspark",
    *,
    cores: int | str = "*",
    conf: dict[str, str] | None = None,
    is_short: bool = False,
    master: str | None = None,
    py_files: Sequence[str] = (),
) -> SparkSession:
    """A Spark session with the formats registered; on this machine unless ``master`` is given.

    Workers run the same Python as this process. A failed task has four attempts in all, as on a cluster. Arrow is on,
    the UI and the console progress bar are off, shuffles have one partition for each core, timestamps are UTC. Settings
    in ``conf`` override these. An existing session is returned unchanged, with the formats registered.

    Args:
        is_short: Optimise for a job of seconds or minutes: the session starts sooner, but long-running work in Java is
            slower. Checkpoints of streaming queries must be on the disk of this machine.
        master: A cluster such as ``spark://host:7077``: shuffles have Spark's default number of partitions, and workers
            run ``PYSPARK_PYTHON``, by default the path of this Python. Or a Spark Connect server, ``sc://host:15002``,
            which has its own settings. ``cores`` is ignored then.
        py_files: Modules and zip files that workers can import.

    Raises:
        ConfigError: Java is missing or too old; the message says what to install. No server listens at ``master``, a
            file of ``py_files`` is missing, or a session with another master exists.
    """
    _check_files(py_files)
    if master is not None and server_of(master) is CONNECT:
        check_somebody_listens(master)
        return _connect_session(app_name, master, py_files, conf or {})
    find_java()
    from pyspark.sql import SparkSession

    from jetspark.spark.formats import register

    if master is not None and SparkSession.getActiveSession() is None:
        check_somebody_listens(master)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    is_local = master is None or master.startswith("local")
    if is_local:
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")  # not for a cluster: its workers must reach the driver
    settings = _settings(is_short=is_short)
    if is_local:
        settings["spark.sql.shuffle.partitions"] = str(os.cpu_count() or 2) if cores == "*" else str(cores)
    builder = SparkSession.builder.appName(app_name).master(master or f"local[{cores},{TASK_ATTEMPTS}]")
    for name, value in (settings | (conf or {})).items():
        builder = builder.config(name, value)
    # Otherwise workers run the first `python3` on the PATH, which may lack this package.
    with started_by_launcher() if is_local else _started_by_this_python():
        spark = _started(builder)
    if master is not None and spark.sparkContext.master != master:
        raise ConfigError(
            f"master={master!r}: this program has a session with master {spark.sparkContext.master} already"
        )
    for path in py_files:
        spark.sparkContext.addPyFile(path)
    register(spark)
    return spark


def _started(builder: SparkSession.Builder) -> SparkSession:
    """Start the session; after an error, end the Java process that was started for it."""
    try:
        return builder.getOrCreate()
    except BaseException as error:
        _end_java(error)
        if isinstance(error, Exception):
            check_java()  # only now: reading Java's version takes a third of a second
        raise


def _end_java(error: BaseException) -> None:
    """End the Java process whose start was interrupted, by Ctrl-C for instance.

    Java ends with Python, but not during its start: it cannot write its port into the folder that pyspark has removed
    by then, and keeps listening. pyspark keeps the process in a local variable of ``launch_gateway`` until its start
    has succeeded and has no documented access to it, so the process is taken from the frame in the traceback.
    """
    from pyspark.java_gateway import launch_gateway

    for frame, _ in traceback.walk_tb(error.__traceback__):
        java = frame.f_locals.get("proc") if frame.f_code is launch_gateway.__code__ else None
        if java is not None:
            java.terminate()
            try:
                java.wait(JAVA_END_S)
            except subprocess.TimeoutExpired:
                java.kill()
                java.wait()


def _settings(*, is_short: bool) -> dict[str, str]:
    settings = {
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.sql.session.timeZone": "UTC",
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile=file:{logging_file()}",
    }
    if is_short:
        settings["spark.driver.extraJavaOptions"] += f" {SHORT_JOB_FLAGS}"
        settings["spark.sql.streaming.checkpointFileManagerClass"] = LOCAL_CHECKPOINTS
    return settings


def _connect_session(app_name: str, url: str, py_files: Sequence[str], conf: Mapping[str, str]) -> SparkSession:
    from pyspark.errors import PySparkImportError
    from pyspark.sql import SparkSession

    from jetspark.spark.formats import register

    try:
        builder = SparkSession.builder.appName(app_name).remote(url)
        for name, value in conf.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
    except (ImportError, PySparkImportError) as error:
        raise ConfigError(
            f"master={url!r}: Spark Connect needs more: pip install 'pyspark[connect]' ({error})"
        ) from None
    if py_files:
        spark.addArtifacts(*py_files, pyfile=True)
    register(spark)
    return spark


def _check_files(py_files: Sequence[str]) -> None:
    for path in py_files:
        if "://" not in path and not Path(path).is_file():
            raise ConfigError(f"py_files: {path!r}: file not found from {os.getcwd()}")


@contextmanager
def _started_by_this_python() -> Iterator[None]:
    """Sets PYSPARK_PYTHON for a session of a cluster, whose machines do not have the launcher."""
    os.environ.setdefault(VARIABLE, sys.executable)
    yield


@contextmanager
def short_session(
    app_name: str = "jetspark", *, master: str | None = None, py_files: Sequence[str] = ()
) -> Iterator[SparkSession]:
    """A session for one job of seconds or minutes; an existing session is used, and stays open.

    Raises:
        ConfigError: As :func:`session`.
    """
    from pyspark.sql import SparkSession

    is_ours = SparkSession.getActiveSession() is None
    spark = session(app_name, is_short=True, master=master, py_files=py_files)
    try:
        yield spark
    finally:
        if is_ours:
            spark.stop()


def check_java() -> None:
    """Check that Spark can run on the installed Java.

    Raises:
        ConfigError: Java is missing or too old.
    """
    java = find_java()
    try:
        shown = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=True).stderr
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"Spark needs Java, and {java!r} does not run ({error}): {_REMEDY}") from None
    version = _major(shown)
    if version is not None and version < JAVA_VERSION:
        raise ConfigError(f"Spark needs Java {JAVA_VERSION} or newer, and {java!r} is {version}: {_REMEDY}")


def find_java() -> str:
    """Path of the Java that Spark will start.

    Raises:
        ConfigError: Java is missing.
    """
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home) / "bin" / "java") if home else shutil.which("java")
    if java is None:
        raise ConfigError(f"Spark needs Java, and none was found: {_REMEDY}")
    return java


def _major(shown: str) -> int | None:
    """The major version in ``openjdk version "17.0.15"``; old releases print ``"1.8.0_292"``."""
    _, quote, rest = shown.partition('"')
    parts = rest.partition('"')[0].split(".")
    if not quote or not parts[0].isdecimal():
        return None
    return int(parts[1]) if parts[0] == "1" and len(parts) > 1 and parts[1].isdecimal() else int(parts[0])


CONNECT_TIMEOUT_S = 10.0


class SparkServer(NamedTuple):
    """A kind of Spark server: its URL scheme, default port and name."""

    scheme: str
    port: int
    """Default port."""
    name: str


CONNECT = SparkServer("sc://", 15002, "Spark Connect server")
STANDALONE = SparkServer("spark://", 7077, "Spark master")
# Masters without an address to check.
_OTHERS = re.compile(r"local(-cluster)?(\[.*\])?|yarn|k8s://.+")


def server_of(master: str) -> SparkServer | None:
    """The kind of server of a master URL; None for this machine, YARN and Kubernetes.

    Raises:
        ConfigError: ``master`` is not a master URL.
    """
    if _OTHERS.fullmatch(master):
        return None
    for server in (STANDALONE, CONNECT):
        if master.startswith(server.scheme):
            return server
    raise ConfigError(
        f"master={master!r}: expected {STANDALONE.scheme}HOST:{STANDALONE.port}, {CONNECT.scheme}HOST, yarn, k8s://URL "
        "or local[CORES]"
    )


def check_somebody_listens(master: str) -> None:
    """Check that a Spark server accepts connections; Spark itself would fail only after minutes, with two pages.

    Raises:
        ConfigError: ``master`` is not a master URL, or no server listens there. Of several addresses one is enough.
    """
    server = server_of(master)
    if server is None:
        return
    refused = []
    for address in master.removeprefix(server.scheme).split(","):
        try:
            url = urlsplit(f"//{address}")
            host, port = url.hostname or "localhost", url.port or server.port
        except ValueError as error:
            raise ConfigError(
                f"master={master!r}: expected an address such as {server.scheme}host:{server.port}: {error}"
            ) from None
        try:
            socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_S).close()
            return
        except OSError as error:
            refused.append(f"{host}:{port}: {error}")
    raise ConfigError(f"master={master!r}: no {server.name} at {', '.join(refused)}")
