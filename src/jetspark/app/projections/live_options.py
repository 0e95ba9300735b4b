"""The live engine with asyncio: what one does, how it is told, and what it has done.

It reads the stream in order, folds, and stores, for as long as it has the lease. Reading and storing go on side by
side (``engine``). The reader folds events into states in memory (``states``); the writer stores what has changed, one
compare-and-set for each key, all of a batch by fast ingest (``place``). While a batch is under way the next one grows,
so there is no size to choose: with few events a batch has few and is stored within milliseconds, and with many it has
as many as arrived meanwhile. ``LiveOptions.batch`` bounds how far the reader may be ahead (``backlog``).

Only what is stored counts: the position is written after the states, and says what was stored before. Whatever ends
an engine, the next one begins at the last position, and what it reads once more changes nothing (``worker``).

Projections share one reading. One that is far behind the others, such as a new one, is read for apart, beside them,
until it is near: so the others are as fresh as before (``apart``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jetspark.app.projections.live_states import CACHE
from jetspark.app.projections.state_header import Parked
from jetspark.core.arguments import explained
from jetspark.core.numbers import seconds, whole

__all__ = ["LiveCounts", "LiveOptions", "RestartPass"]

# The lease of a partition is watched by a consumer, and by a second one while a bucket is swapped. nats-server allows a
# thousand or so for the bucket of the leases, and a projection ended with its refusal.
MAX_PARTITIONS = 256


@explained
@dataclass(frozen=True, slots=True, kw_only=True)
class LiveOptions:
    """How a live engine works."""

    batch: int = 200_000
    """Events that are folded and not stored yet, at most: they are kept, and folded again where others wrote."""
    batch_bytes: int = 64 << 20
    """What these events may have in the stream, in bytes; the last ones that were received may pass it."""
    batch_wait_s: float = 0.002
    """How long a batch waits for more events before it is stored."""
    cache_keys: int = CACHE.keys
    """States kept in memory, for each projection."""
    cache_bytes: int = CACHE.bytes
    """What these states may take, roughly; half a kilobyte besides each key and value is counted."""
    position_every_s: float = 0.1
    """How often the position is written: readers that wait for an event of another key wait for it."""
    lease_s: float = 10.0
    """How long a process that died holds the others up; 1 or more."""
    partitions: int = 1
    """Parts of the keys that several processes share; the same in all of them, 256 at most. With 1, one process folds
    everything.
    """
    apart_after: int = 20_000
    """A projection that is more sequences than this behind the others catches up in a reading of its own."""

    def __post_init__(self) -> None:
        for name in ("batch", "batch_bytes", "cache_keys", "cache_bytes", "apart_after"):
            whole(name, getattr(self, name))
        whole("partitions", self.partitions, high=MAX_PARTITIONS, instead="since each has a consumer of the server")
        for name in ("batch_wait_s", "position_every_s"):
            seconds(name, getattr(self, name))
        seconds("lease_s", self.lease_s, low=1)  # it is the TTL of a key, and the server takes none below


@dataclass(slots=True)
class LiveCounts:
    """What a worker has done since it began."""

    events: int = 0
    """Read from the stream."""
    batches: int = 0
    stored: int = 0
    """Values written."""
    conflicts: int = 0
    """Keys that somebody else had written meanwhile, and that were folded again."""
    letters: int = 0
    restarts: int = 0
    position: int = 0
    """Everything up to this sequence is stored."""
    parked: dict[str, dict[str, Parked]] = field(default_factory=dict)
    """Keys of each projection that do not go on, as far as this worker has met them."""
    apart: list[str] = field(default_factory=list)
    """Projections that catch up in a reading of their own."""
    joins: int = 0
    """How often such projections have caught up."""
    other_versions: dict[str, int] = field(default_factory=dict)
    """Projections that were swapped to another version of their fold, which this worker leaves to others."""


class RestartPass(Exception):
    """Something has changed: open everything anew, and go on from the last position."""
