"""What of a fast batch is not stored, as far as the server said: lost, refused, or in doubt. Pure.

The server tells of a gap or a refusal once, at the moment it notices, and neither a ping nor an acknowledgement brings
it again. So what it said into a session that was lost is not known: all that was sent and not acknowledged then, and
that no later report is about, is in doubt, and mostly stored. A new leader, on the other hand, knows what is stored and
nothing else: it reports as a gap what the old one had reported or refused.

Invariants: a message is in at most one of ``gaps``, ``errors`` and ``doubts``, and is reported once, however often the
server reports it. An end of the batch is no message, and in none of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jetspark.errors import UsageError
from jetspark.publish.fast_options import Refusal

__all__ = ["MAX_REPORTS", "FastLosses"]

# Exact reports need memory. A batch with more separate losses than this has no use for going on.
MAX_REPORTS = 100_000


class FastLosses:
    """Of one batch."""

    def __init__(self) -> None:
        self.gaps: list[range] = []
        self.errors: list[Refusal] = []
        self.news: list[range | Refusal] = []
        """Gaps and errors that nobody was told yet."""
        self.ends: set[int] = set()
        """Sequences of ours that are no messages."""
        self._refused: set[int] = set()
        """Sequences of ``errors``."""
        self._gaps_end = 0
        """No gap reaches this sequence; most are looked for above it, which needs no search."""
        self._unheard: list[range] = []
        """What was under way each time a session was lost."""

    def add_gap(self, missing: range, sent: int) -> None:
        """The server reports these as missing; ``sent`` is the highest that it can have had.

        Raises:
            UsageError: There are too many losses to remember.
        """
        # A message too large for the stream is refused, never reaches the batch, and is in the next gap, too.
        refused = self._refused.intersection(range(missing.start, min(missing.stop, sent + 1)))
        known = [range(sequence, sequence + 1) for sequence in (*self.ends, *refused)]
        if missing.start < self._gaps_end:
            known += self.gaps  # a new leader repeats what the old one had said
        self._gaps_end = max(self._gaps_end, missing.stop)
        for part in _without(missing, known):
            self._report(self.gaps, part)

    def add_refusal(self, refusal: Refusal) -> None:
        """The server refused a message.

        Raises:
            UsageError: There are too many losses to remember.
        """
        sequence = refusal.sequence
        is_in_gap = sequence < self._gaps_end and any(sequence in each for each in self.gaps)
        if sequence not in self._refused and sequence not in self.ends and not is_in_gap:
            self._refused.add(sequence)
            self._report(self.errors, refusal)

    def _report(self, reports: list[Any], entry: range | Refusal) -> None:
        if len(reports) >= MAX_REPORTS:
            raise UsageError(f"more than {MAX_REPORTS} losses in one batch")
        reports.append(entry)
        self.news.append(entry)

    def lose_session(self, acknowledged: int, sent: int) -> None:
        """What the server says of those sent and not acknowledged may be lost with the session."""
        first = max(acknowledged + 1, self._unheard[-1].stop if self._unheard else 1)
        if first <= sent:
            self._unheard.append(range(first, sent + 1))

    def begin_again(self) -> None:
        """Nothing was stored, and sequences are given anew: there is no doubt about those of before."""
        self._unheard.clear()

    # ---- facts -------------------------------------------------------------------------------------------------

    @property
    def doubts(self) -> list[range]:
        """Under way when a session was lost, and not reported since."""
        known = self._reported() if self._unheard else []
        return [part for unheard in self._unheard for part in _without(unheard, known)]

    def stored(self, last: int) -> int:
        """How many messages up to this sequence are stored for sure, once the server is done with all of them."""
        covered = [*self._reported(), *self._unheard]
        return sum(map(len, _without(range(1, last + 1), covered)))

    def explain(self, sequences: range) -> bool:
        """Whether each of these was reported, or is no message."""
        return not _without(sequences, self._reported())

    def _reported(self) -> list[range]:
        """Sequences that are surely not stored, or no messages."""
        return [*self.gaps, *(range(sequence, sequence + 1) for sequence in (*self._refused, *self.ends))]


def _without(numbers: range, others: Iterable[range]) -> list[range]:
    """The parts of a range that are in none of the others."""
    parts, start = [], numbers.start
    for other in sorted(others, key=lambda each: each.start):
        if other.stop > start and other.start < numbers.stop:
            parts.append(range(start, other.start))
            start = max(start, other.stop)
    parts.append(range(start, numbers.stop))
    return [part for part in parts if part]
