"""Answers of the past: every few loads are answered as a replica would that is behind, by the real server."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

from jetspark.jetstream.operations import Request
from jetspark.state.lookup import Lookup


class StaleLoads:
    """How many there were."""

    def __init__(self) -> None:
        self.asked = self.stale = 0


@contextmanager
def stale_loads(
    seed: int = 1, *, share: float = 0.5, is_believed: bool = False, up_to: Sequence[int] = (1, 5, 50, 500)
) -> Iterator[StaleLoads]:
    """Have a share of all loads, among them the first, be of an early moment of their bucket.

    The request says ``up_to_seq``, and the server answers with what there was, and says up to where that is true. Of a
    bucket without history it has dropped most of that: then there was nothing.

    Args:
        up_to: The moments, as sequences of the bucket.
        is_believed: Plant the mistake that this is for: whoever loads takes such an answer for the present.
    """
    rng, counts = random.Random(seed), StaleLoads()
    request, init = Lookup.request, Lookup.__init__

    def of_the_past(self: Lookup) -> Request:
        real = request(self)
        counts.asked += 1
        if counts.asked > 1 and rng.random() >= share:
            return real
        counts.stale += 1
        body = json.loads(real.data) | {"up_to_seq": rng.choice(up_to)}
        return Request(real.subject, json.dumps(body).encode())

    def credulous(self: Lookup, *args: object, at_least: int = 0, probe_subject: str | None = None) -> None:
        init(self, *args)  # type: ignore[arg-type]

    with mock.patch.object(Lookup, "request", of_the_past):
        if not is_believed:
            yield counts
            return
        with mock.patch.object(Lookup, "__init__", credulous):
            yield counts
