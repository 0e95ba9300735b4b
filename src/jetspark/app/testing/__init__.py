"""A test kit for applications. It needs no server: handlers run alone, or on a model server in virtual time."""

from jetspark.app.checks.golden import check_contracts
from jetspark.app.replay.replay_check import NotReplayable, ReplayCheckOptions, check_replay
from jetspark.app.testing.failures import FAILURES
from jetspark.app.testing.fault_injection import InjectedFault
from jetspark.app.testing.handler_runs import EffectCall, HandlerRun, run_handler
from jetspark.app.testing.kit import TestApp
from jetspark.app.testing.reliability import (
    ReliabilityReport,
    ReliabilityRow,
    UnreliableHandler,
    check_reliability,
)
from jetspark.app.testing.steps import STEPS
from jetspark.app.testing.workflow_checking import WorkflowProblem, WorkflowReport, WorkflowSearch, check_workflow
from jetspark.app.testing.workflow_model import RunView

__all__ = [
    "FAILURES",
    "STEPS",
    "EffectCall",
    "HandlerRun",
    "InjectedFault",
    "NotReplayable",
    "ReliabilityReport",
    "ReliabilityRow",
    "ReplayCheckOptions",
    "RunView",
    "TestApp",
    "UnreliableHandler",
    "WorkflowProblem",
    "WorkflowReport",
    "WorkflowSearch",
    "check_contracts",
    "check_reliability",
    "check_replay",
    "check_workflow",
    "run_handler",
]
