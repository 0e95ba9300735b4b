"""Clients that our interpreter cannot import: in another language, or for another Python.

Each is a script next to this file, run as a process of its own by a program that the machine's owner has installed. The
script holds the clock, so that neither its start nor our waiting for it counts. It is called in two ways::

    <command> --version    prints what it would measure
    <command> <request>    does the work that the request, a JSON object, describes, and prints its values as JSON
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetspark.errors import ConfigError, JetSparkError

__all__ = ["NATS_JETSTREAM", "NATS_JS", "NODE_MODULES_VARIABLE", "PYTHON_VARIABLE", "Peer"]

# These name programs on this machine, which no file that travels with a project could know.
NODE_MODULES_VARIABLE = "JETSPARK_BENCH_NODE_MODULES"
PYTHON_VARIABLE = "JETSPARK_BENCH_PYTHON313"

HERE = Path(__file__).resolve().parent
# In a checkout, the packages that the interoperability tests name may be installed beside them.
CHECKOUT_NODE_MODULES = HERE.parents[2] / "tests" / "interop" / "node_modules"

VERSION_TIMEOUT_S = 30.0
# Less than a measurement as a whole may take: then it is us who end the process, and none is left behind.
MEASURE_TIMEOUT_S = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    distribution: str
    """Its name where it is installed from."""
    command_from_env: Callable[[], list[str]]
    """Raises ConfigError when there is nothing to run."""

    def version(self) -> str:
        """Of the client, and of what runs it.

        Raises:
            ConfigError: It is not installed, or not where the environment says; tells what is missing.
        """
        return _version(self.distribution, *self.command_from_env())

    def measure(self, request: dict[str, Any]) -> dict[str, float]:
        """By metric name.

        Raises:
            JetSparkError: It failed, for the reason that it gave.
        """
        command = [*self.command_from_env(), json.dumps(request)]
        try:
            finished = _run(command, MEASURE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # Without its cause: that would repeat the whole command, and says no more.
            raise JetSparkError(f"{self.distribution}: not done after {MEASURE_TIMEOUT_S:.0f} s") from None
        if finished.returncode:
            raise JetSparkError(f"{self.distribution}: {_last_words(finished)}")
        values: dict[str, float] = json.loads(finished.stdout)
        return values


# What is installed does not change during a run, and a plan asks several times.
@functools.cache
def _version(distribution: str, *command: str) -> str:
    try:
        finished = _run([*command, "--version"], VERSION_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{distribution} cannot be run: {error}") from error
    if finished.returncode:
        raise ConfigError(f"{distribution} cannot be run: {_last_words(finished)}")
    return finished.stdout.strip()


def _run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
    )


def _last_words(finished: subprocess.CompletedProcess[str]) -> str:
    return (finished.stderr.strip().splitlines() or [f"ended with code {finished.returncode}"])[-1]


def _node_from_env() -> list[str]:
    node = shutil.which("node")
    if node is None:
        raise ConfigError("node is not on the PATH")
    folder = os.environ.get(NODE_MODULES_VARIABLE, "")
    if not folder and not CHECKOUT_NODE_MODULES.is_dir():
        raise ConfigError(f"{NODE_MODULES_VARIABLE} does not name a node_modules folder with @nats-io/jetstream")
    return [node, str(HERE / "fast_ingest.mjs"), folder or str(CHECKOUT_NODE_MODULES)]


def _python_from_env() -> list[str]:
    python = os.environ.get(PYTHON_VARIABLE, "")
    if not python:
        raise ConfigError(f"{PYTHON_VARIABLE} does not name a Python with nats-jetstream-extra")
    # Isolated: neither our modules beside the script nor our own environment's may come in the way of its packages.
    return [python, "-I", str(HERE / "fast_ingest_nats_jetstream.py")]


NATS_JS = Peer(distribution="@nats-io/jetstream", command_from_env=_node_from_env)
NATS_JETSTREAM = Peer(distribution="nats-jetstream-extra", command_from_env=_python_from_env)
