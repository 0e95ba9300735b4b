"""Which seeds a run tries: those that never change, a few that nobody has tried, or the one that is asked for.

Fixed seeds are regression tests. Fresh ones are drawn once for a whole run of pytest, whose header names the first, so
every process of the run has the same. To repeat a failure, which names its seed::

    JETSPARK_SEED=1234 .venv/bin/python -m pytest tests/simulation/test_batches.py -k endless_with_ids

To repeat a whole run, fresh seeds included, give it the number from its header::

    JETSPARK_FRESH_SEED=7050 .venv/bin/python -m pytest tests/simulation

To try many that nobody has tried, say how many of each simulation::

    JETSPARK_SEEDS=5000 nice .venv/bin/python -m pytest -n 1 tests/simulation/test_app_partitions.py
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable

__all__ = ["again", "draw", "fresh", "given", "header", "tried"]

ONE, FRESH, MANY = "JETSPARK_SEED", "JETSPARK_FRESH_SEED", "JETSPARK_SEEDS"


def given() -> list[int] | None:
    """The seeds that are asked for and no others, separated by commas; None when nobody asks."""
    text = os.environ.get(ONE)
    return None if not text else [int(each) for each in text.split(",")]


def draw() -> None:
    """Settle on this run's fresh seeds; child processes inherit them."""
    # Far from the fixed ones, and short enough to be typed.
    os.environ.setdefault(FRESH, str(1_000_000 + secrets.randbelow(1_000_000_000)))


def fresh(count: int) -> list[int]:
    """This run's seeds, ``count`` of them; none when others are asked for."""
    if given() is not None:
        return []
    draw()
    first = int(os.environ[FRESH])
    return list(range(first, first + count))


def tried(fixed: Iterable[int], count: int) -> list[int]:
    """What a simulation tries: ``fixed`` seeds and ``count`` fresh ones, or what is asked for instead."""
    many = os.environ.get(MANY)
    return given() or (fresh(int(many)) if many else [*fixed, *fresh(count)])


def again(seed: int) -> str:
    """How to try a seed again, in the words of a shell; the command follows."""
    return f"{ONE}={seed}"


def header() -> str:
    """What to print of it at the beginning of a run."""
    draw()
    if given() is not None:
        return f"seeds: {os.environ[ONE]} only"
    first = os.environ[FRESH]
    if os.environ.get(MANY):
        return f"seeds: {os.environ[MANY]} of each simulation from {first} on; one seed alone: {ONE}=..."
    return f"seeds: fresh ones from {first} on; this run again: {FRESH}={first}, one seed alone: {ONE}=..."
