"""Replaying, rebuilding and verifying projections, and replaying handlers; see ``docs/replay.md``."""

from jetspark.app.extents import Extent, ReplayRequest
from jetspark.app.replay.comparison import Difference, ParkedKey
from jetspark.app.replay.handler_replay import (
    HandlerReplayOptions,
    HandlerReplayPlan,
    plan_handler_replay,
    read_handler_records,
    replay_handler,
)
from jetspark.app.replay.projection_rebuild import RebuildOptions, RebuildOutcome, drop_rebuild, rebuild
from jetspark.app.replay.projection_replay import ReplayOptions, ReplayPlan, plan_replay, repair_keys, run_replay
from jetspark.app.replay.replay_records import HandlerReplayRecord, ReplayRecord, read_records
from jetspark.app.replay.verification import RebuildPreview, Verification, VerifyOptions, preview_rebuild, verify
from jetspark.app.replay.what_if import NewCode, WhatIf, what_if

__all__ = [
    "Difference",
    "Extent",
    "HandlerReplayOptions",
    "HandlerReplayPlan",
    "HandlerReplayRecord",
    "NewCode",
    "ParkedKey",
    "RebuildOptions",
    "RebuildOutcome",
    "RebuildPreview",
    "ReplayOptions",
    "ReplayPlan",
    "ReplayRecord",
    "ReplayRequest",
    "Verification",
    "VerifyOptions",
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
