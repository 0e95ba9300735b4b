from __future__ import annotations

import itertools

from jetspark.core.backoff import Backoff


def test_waits_double_up_to_the_maximum() -> None:
    backoff = Backoff(first_s=0.05, max_s=0.3)
    assert [backoff.wait_s(failures) for failures in (1, 2, 3, 4, 5)] == [0.05, 0.1, 0.2, 0.3, 0.3]


def test_a_first_wait_above_the_maximum_is_cut_to_it() -> None:
    assert Backoff(5.0, 1.0).wait_s(1) == 1.0


def test_no_number_of_failures_is_too_large() -> None:
    backoff = Backoff(0.001, 30.0)
    waits = [backoff.wait_s(failures) for failures in (1, 10, 100, 5_000, 10**9)]
    assert all(earlier <= later for earlier, later in itertools.pairwise(waits))
    assert waits[-1] == 30.0
