"""The words of a benchmark: a workload is one claim, its contenders do the same work, a bar is what we promise."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from time import perf_counter, process_time
from typing import Literal, TypeAlias

from benchmarks.extras import Extra
from benchmarks.peers import Peer

__all__ = [
    "CPU_PER_MILLION",
    "MESSAGES_PER_S",
    "Bar",
    "Contender",
    "Job",
    "Metric",
    "Rounds",
    "Stopwatch",
    "Values",
    "Workload",
    "payload_of",
    "percentile",
]

Values: TypeAlias = dict[str, float]
"""The values of one measurement, by metric name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The task of one contender, for one measurement."""

    url: str
    subject: str
    """Used by this measurement alone, so that late messages of an earlier one cannot reach it."""
    count: int
    warmup: int
    """Operations that are done before the clock starts."""
    payload_bytes: int
    replicas: int = 1
    """Number of replicas of its streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to do the workload. ``run`` may be a coroutine function; then it gets an event loop."""

    name: str
    what: str
    run: Callable[[Job], Values | Awaitable[Values]]
    needs: str | Peer | Extra = ""
    """Name of a module that is not ours, an extra, or a client outside this interpreter; without it the contender is
    skipped."""
    is_in_quick_runs: bool = True
    """False for a variant that is slow to start and shows nothing new about whether things work."""
    count_divisor: int = 1
    """More than 1 for a slow peer of a long workload, which does that part of the work: the rates compare all the same,
    in seconds instead of a minute. Never for one of ours, or a baseline of several bars."""
    has_uvloop_twin: bool = False
    """True if ``--uvloop`` runs it a second time, on uvloop."""


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    unit: str
    better: Literal["higher", "lower"] = "higher"


MESSAGES_PER_S = Metric("messages_per_s", "messages/s")
CPU_PER_MILLION = Metric("cpu_s_per_million", "CPU s/million", "lower")
"""Processor time of the contender's own process, user and system, all threads: less noisy than the rate where others
use the machine, and what a client leaves to the program around it. The server's is not in it."""


class Stopwatch:
    """The time of one measurement; runs from its creation."""

    def __init__(self) -> None:
        self.elapsed_s = self.cpu_s = 0.0
        self._started, self._cpu_started = perf_counter(), process_time()

    def stop(self) -> None:
        self.elapsed_s, self.cpu_s = perf_counter() - self._started, process_time() - self._cpu_started

    def values(self, count: int) -> Values:
        """The values for ``count`` messages."""
        return {"messages_per_s": count / self.elapsed_s, "cpu_s_per_million": self.cpu_s / count * 1e6}


class Rounds:
    """The warm-up and the measurement, one after the other; the clock runs in the body of the loop::

    for count in (rounds := Rounds(job)):
        ...  # that many operations
    return rounds.values()
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._watch = Stopwatch()
        self._has_ended = False

    def __iter__(self) -> Iterator[int]:
        for count in (self._job.warmup, self._job.count):
            self.begin()
            yield count
            if not self._has_ended:
                self.end()

    def begin(self) -> None:
        """Start the clock again: the body was a preparation so far."""
        self._has_ended = False
        self._watch = Stopwatch()

    def end(self) -> None:
        """Stop the clock: the rest of the body is a check."""
        self._watch.stop()
        self._has_ended = True

    @property
    def elapsed_s(self) -> float:
        """Seconds of the last round."""
        return self._watch.elapsed_s

    def values(self) -> Values:
        return self._watch.values(self._job.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A promise: how the contender's median stands to the baseline's is at least, or at most, the threshold."""

    claim: str
    metric: str
    contender: str
    baseline: str = ""
    """Without one the promise is about the contender's own median."""
    by: Literal["ratio", "difference"] = "ratio"
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        assert (self.at_least is None) != (self.at_most is None), self.claim

    def is_met_by(self, value: float) -> bool:
        if self.at_least is not None:
            return value >= self.at_least
        assert self.at_most is not None
        return value <= self.at_most


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    what: str
    """The work and how it is timed, in one sentence."""
    count: int
    """Chosen so that the slower contenders take about a second on a small machine."""
    quick_count: int
    contenders: tuple[Contender, ...]
    payload_bytes: int = 128
    storage: str | None = None
    """The kind of stream storage; None for core messaging, which stores nothing."""
    replicas: int | None = None
    """Replicas of its streams; with more than one it is measured on a cluster of as many servers on this machine."""
    metrics: tuple[Metric, ...] = (MESSAGES_PER_S, CPU_PER_MILLION)
    baselines: tuple[str, ...] = ("nats-py", "bare")
    """Contenders that everyone is compared with."""
    bars: tuple[Bar, ...] = ()


def payload_of(size: int) -> bytes:
    """``size`` bytes without a line break; the content makes no difference to anyone."""
    return (b"0123456789abcdef" * (size // 16 + 1))[:size]


def percentile(ordered: list[float], percent: float) -> float:
    """By nearest rank, so that the answer is one of the measured values. ``ordered`` is sorted and not empty."""
    rank = -(-len(ordered) * percent // 100)
    return ordered[max(0, int(rank) - 1)]
