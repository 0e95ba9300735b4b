"""Clients that our interpreter cannot import: in another language, or for another Python.

Each is a script next to this file, run as a process of its own by a program that the machine's owner has installed. The
script holds the clock, so that neither its start nor our waiting for it counts. It is called in two ways::

      <command> --version    prints the version that it would measure
    <command> <request>    does the work that the request, a JSON object, describes, and prints its values as JSON

The C client's is a program: it is compiled when it is first needed, and its request is words of the form name=value.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetspark.errors import ConfigError, JetSparkError

__all__ = ["NATS_C", "NATS_JETSTREAM", "NATS_JS", "NODE_MODULES_VARIABLE", "PYTHON_VARIABLE", "Peer"]

# These name programs on this machine, which no file that travels with a project could know.
NODE_MODULES_VARIABLE = "JETSPARK_BENCH_NODE_MODULES"
PYTHON_VARIABLE = "JETSPARK_BENCH_PYTHON313"

HERE = Path(__file__).resolve().parent
# The packages that the interoperability tests name may be installed beside them.
CHECKOUT_NODE_MODULES = HERE.parent / "tests" / "interop" / "node_modules"

INSTALL_C_CLIENT = "apt install gcc libnats-dev"

VERSION_TIMEOUT_S = 30.0
# Less than a measurement as a whole may take: then it is us who end the process, and none is left behind.
MEASURE_TIMEOUT_S = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    distribution: str
    """Its name where it is installed from."""
    command_from_env: Callable[[], list[str]]
    """Raises ConfigError when there is nothing to run."""
    arguments_of: Callable[[dict[str, Any]], list[str]] = lambda request: [json.dumps(request)]
    """How a request becomes the command's last words."""

    def version(self) -> str:
        """The version of the client, and of its interpreter or compiler.

        Raises:
            ConfigError: It is not installed, or not where the environment says; the message names the missing part.
        """
        return _version(self.distribution, *self.command_from_env())

    def measure(self, request: dict[str, Any]) -> dict[str, float]:
        """By metric name.

        Raises:
            JetSparkError: It failed, for the reason that it gave.
        """
        command = [*self.command_from_env(), *self.arguments_of(request)]
        try:
            finished = _run(command, MEASURE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            # Without its cause: that would repeat the whole command, and says no more.
            raise JetSparkError(f"{self.distribution}: not done after {MEASURE_TIMEOUT_S:.0f} s") from None
        if finished.returncode:
            raise JetSparkError(f"{self.distribution}: {_last_words(finished)}")
        values: dict[str, float] = json.loads(finished.stdout)
        return values


# Installed programs do not change during a run, and a plan asks several times.
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


def _c_client_from_env() -> list[str]:
    """The program made of ``c_client.c``, compiled unless the same source and library were compiled before."""
    compiler = shutil.which("gcc")
    if compiler is None:
        raise ConfigError(f"gcc is not on the PATH: {INSTALL_C_CLIENT}")
    source = HERE / "c_client.c"
    expanded = _compile(compiler, "-E", str(source))  # with the library's header in it, which names its version
    if expanded.returncode:
        raise ConfigError(f"libnats is not installed: {INSTALL_C_CLIENT}")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jetspark"
    program = cache / f"bench-c-client-{hashlib.sha256(expanded.stdout.encode()).hexdigest()[:16]}"
    if not program.exists():
        try:
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=cache) as folder:  # in its place when it is complete
                made = Path(folder) / program.name
                finished = _compile(compiler, "-O2", str(source), "-o", str(made), "-lnats")
                if finished.returncode:
                    raise ConfigError(f"the C client does not compile: {_last_words(finished)}")
                made.replace(program)
        except OSError as error:
            raise ConfigError(f"no place for the compiled C client: {error}; set XDG_CACHE_HOME") from error
    return [str(program)]


def _compile(compiler: str, *options: str) -> subprocess.CompletedProcess[str]:
    try:
        return _run([compiler, *options], VERSION_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{compiler} cannot be run: {error}") from error


def _as_words(request: dict[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in request.items()]


NATS_C = Peer(distribution="libnats", command_from_env=_c_client_from_env, arguments_of=_as_words)
NATS_JS = Peer(distribution="@nats-io/jetstream", command_from_env=_node_from_env)
NATS_JETSTREAM = Peer(distribution="nats-jetstream-extra", command_from_env=_python_from_env)
