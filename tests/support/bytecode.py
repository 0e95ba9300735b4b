"""The tests' bytecode, written once before several processes need it.

pytest compiles each file of tests in a way of its own, with asserts that tell what they saw. For all of them that takes
8 seconds, and every process that finds no bytecode does it again: on a fresh clone half a minute before the first test.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

# As a process that collects tests takes some seconds itself, a few files that were edited are not worth one.
FEW = 20


def missing() -> list[Path]:
    """Files of tests that have no bytecode of this pytest's, or are younger than it."""
    return [file for file in sorted(TESTS.rglob("test_*.py")) if not _is_compiled(file)]


def _is_compiled(file: Path) -> bool:
    written = (file.parent / "__pycache__").glob(
        f"{file.stem}.{sys.implementation.cache_tag}-pytest-{pytest.__version__}*"
    )
    return any(each.stat().st_mtime >= file.stat().st_mtime for each in written)


def write() -> None:
    """Have what is missing written by two processes, if it is much."""
    files = missing()
    if len(files) <= FEW:
        return
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider"]
    halves = [
        subprocess.Popen([*command, *map(str, half)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for half in (files[0::2], files[1::2])
    ]
    # Whatever goes wrong in them goes wrong again, and is told, where the tests are collected to be run.
    for process in halves:
        process.wait()
