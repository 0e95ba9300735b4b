"""Options and counters of live engines.

An engine runs while its process holds the lease. Its reader folds events into states in memory (``live_states``). Its
writer stores the changed states at the same time: one compare-and-set for each key, a batch by fast ingest
(``live_projection``). While one batch is being stored the next one grows, so the batch size adapts to the load: at low
rates a batch has a few events and is stored within milliseconds. ``LiveOptions.batch`` bounds how far the reader can be
ahead of the writer (``live_engine.Backlog``).

The position is written after the states that it covers. An engine that ends, for whatever reason, is followed by one
that starts at the last position; events that are read a second time change nothing.

The projections of a worker share one engine. A projection that is far behind the others, such as a new one, gets an
engine of its own until it has caught up, so it does not delay the others (``projection_worker.LivePass``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jetspark.app.projections.live_states import CACHE
from jetspark.app.projections.state_header import Parked
from jetspark.core.arguments import explained
from jetspark.core.numbers import seconds, whole

__all__ = ["LiveCounts", "LiveOptions", "RestartPass"]

# The lease of a partition is watched by a consumer, and by a second one while a bucket is swapped. nats-server allows
# about a thousand consumers on the bucket of the leases; beyond that a projection ended with the server's refusal.
MAX_PARTITIONS = 256


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """Options of a live engine."""

    batch: int = 200_000
    """Largest number of events that are folded and not stored yet. They are kept, to be folded again after a conflict.
    """
    batch_bytes: int = 64 << 20
    """Largest size of these events in the stream, in bytes; exceeded by at most the last messages received."""
    batch_wait_s: float = 0.002
    """How long a batch waits for more events before it is stored, in seconds."""
    cache_keys: int = CACHE.keys
    """Largest number of states in memory, for each projection."""
    cache_bytes: int = CACHE.bytes
    """Approximate memory for these states; each counts half a kilobyte more than its key and value."""
    position_every_s: float = 0.1
    """Interval between writes of the position. A reader with ``at_least=`` waits for it if its key has no later event.
    """
    lease_s: float = 10.0
    """How long other processes wait after a process died; 1 or more."""
    partitions: int = 1
    """Number of parts that processes divide the keys into; the same in all processes, at most 256. With 1, one process
    folds all keys.
    """
    apart_after: int = 20_000
    """A projection that lags the others by more sequences than this catches up in an engine of its own."""

    def __post_init__(self) -> None:
        for name in ("batch", "batch_bytes", "cache_keys", "cache_bytes", "apart_after"):
            whole(name, getattr(self, name))
        whole("partitions", self.partitions, high=MAX_PARTITIONS, instead="since each has a consumer of the server")
        for name in ("batch_wait_s", "position_every_s"):
            seconds(name, getattr(self, name))
        seconds("lease_s", self.lease_s, low=1)  # it is the TTL of a key, and the server takes none below


@dataclass(slots=True)
class LiveCounts:
    """Counters of a worker since its start."""

    events: int = 0
    """Events read from the stream."""
    batches: int = 0
    stored: int = 0
    """Values written."""
    conflicts: int = 0
    """Keys that another writer had changed; their events were folded again."""
    dead_letters: int = 0
    """Dead letters written."""
    restarts: int = 0
    position: int = 0
    """Everything up to this sequence is stored."""
    parked: dict[str, dict[str, Parked]] = field(default_factory=dict)
    """Stuck keys of each projection that this worker has met, with event and reason."""
    apart: list[str] = field(default_factory=list)
    """Projections that are catching up in an engine of their own."""
    joins: int = 0
    """How often such engines have caught up and were merged."""
    other_versions: dict[str, int] = field(default_factory=dict)
    """Projections that were swapped to another version of their fold; workers of that version fold them."""


class RestartPass(Exception):
    """The bucket, its position or the stream has changed: reopen all, and continue from the stored position."""
