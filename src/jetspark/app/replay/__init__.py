"""Replaying, rebuilding and verifying projections, and replaying handlers; see ``docs/replay.md``."""

from jetspark.app.extents import Extent, ReplayRequest
from jetspark.app.replay.compared import ParkedKey
from jetspark.app.replay.contents import Difference
from jetspark.app.replay.handler_records import HandlerReplayPlan, HandlerReplayRecord
from jetspark.app.replay.handlers import plan_handler_replay, read_handler_records, replay_handler
from jetspark.app.replay.previewing import RebuildPreview, preview_rebuild
from jetspark.app.replay.projection_replay import ReplayPlan, plan_replay, repair_keys, run_replay
from jetspark.app.replay.rebuilding import RebuildOutcome, drop_rebuild, rebuild
from jetspark.app.replay.replay_records import ReplayRecord, read_records
from jetspark.app.replay.verifying import Verification, verify
from jetspark.app.replay.what_if import NewCode, WhatIf, what_if

__all__ = [
    "Difference",
    "Extent",
    "HandlerReplayPlan",
    "HandlerReplayRecord",
    "NewCode",
    "ParkedKey",
    "RebuildOutcome",
    "RebuildPreview",
    "ReplayPlan",
    "ReplayRecord",
    "ReplayRequest",
    "Verification",
    "WhatIf",
    "drop_rebuild",
    "plan_handler_replay",
    "plan_replay",
    "preview_rebuild",
    "read_handler_records",
    "read_records",
    "rebuild",
    "repair_keys",
    "replay_handler",
    "run_replay",
    "verify",
    "what_if",
]
