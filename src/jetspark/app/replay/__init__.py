"""Replaying, rebuilding and verifying projections; see ``docs/replay.md``."""

from jetspark.app.replay.contents import Difference
from jetspark.app.replay.ranges import Extent, ReplayRequest
from jetspark.app.replay.rebuilding import RebuildOutcome, rebuild
from jetspark.app.replay.records import ReplayRecord, read_records
from jetspark.app.replay.running import ReplayPlan, plan_replay, repair_keys, run_replay
from jetspark.app.replay.verifying import Verification, verify

__all__ = [
    "Difference",
    "Extent",
    "RebuildOutcome",
    "ReplayPlan",
    "ReplayRecord",
    "ReplayRequest",
    "Verification",
    "plan_replay",
    "read_records",
    "rebuild",
    "repair_keys",
    "run_replay",
    "verify",
]
