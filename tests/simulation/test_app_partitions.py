"""Does the order of keys hold across processes that are killed, cut off and replaced? A seed is a run in no time."""

from __future__ import annotations

import pytest
from simulation.partition_world import run_world
from support import seeds


@pytest.mark.parametrize("seed", seeds.tried([*range(3), 779791299], 2))
def test_keys_stay_in_order_and_effects_happen_once(seed: int) -> None:
    run_world(seed)
