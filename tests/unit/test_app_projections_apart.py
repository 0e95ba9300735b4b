"""Which projections read by themselves."""

from __future__ import annotations

import pytest

from jetspark.app.projections.projection_worker import far_behind


@pytest.mark.parametrize(
    ("starts", "are_far"),
    [
        ([5], [False]),
        ([0, 0, 0], [False, False, False]),
        ([0, 100], [False, False]),
        ([0, 101], [True, False]),
        ([101, 0, 1, 90], [False, True, False, False]),
        ([500, 0, 250], [False, True, True]),
    ],
)
def test_a_position_that_is_more_than_so_much_behind_the_furthest_is_far(
    starts: list[int], are_far: list[bool]
) -> None:
    assert far_behind(starts, 100) == are_far
