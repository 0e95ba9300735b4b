"""Event applications: typed, versioned events, handlers with retries and dead letters. It needs the extra ``app``."""

from jetspark.app._extra import INSTALLED as _INSTALLED  # noqa: F401
from jetspark.app.application import App
from jetspark.app.checks.golden import check_contracts
from jetspark.app.client import AppClient, BulkPublisher
from jetspark.app.commands.command_runner import CommandOptions
from jetspark.app.commands.command_spec import Command, CommandReply, CommandSpec, Decision, Past, PastEvent
from jetspark.app.contracts.catalogue import Catalogue, Contract, contract_of
from jetspark.app.contracts.envelope import Decoded, Encoded, decode, derived_id, encode
from jetspark.app.contracts.events import Event, event, unchanged, upcast
from jetspark.app.contracts.field_rules import Measure, Private, Timestamp
from jetspark.app.contracts.tokens import Template
from jetspark.app.dead_letters.access import AppDeadLetter, AppDeadLetters, ScheduledRetries, ScheduledRetry
from jetspark.app.dead_letters.outcomes import RedriveProgress, RedriveResults
from jetspark.app.dead_letters.redriving import DiscardResults
from jetspark.app.dead_letters.retries import RetryChanges
from jetspark.app.entities.entities import Entities, EntityChange, EntityChanges, StoredEntity, UnreadableEntity
from jetspark.app.entities.event_comparison import EntityDifference, Reconciliation
from jetspark.app.handlers.context import Context
from jetspark.app.handlers.handler_spec import HandlerSpec
from jetspark.app.handlers.retry import Breaker, HandlerTimeout, Reject, Retry, RetryIn, Skip
from jetspark.app.projections.live_options import LiveOptions
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.projections.views import View, ViewEntry, ViewPosition, ViewReplica
from jetspark.app.projections.windows import Window
from jetspark.app.settings import Flag, FlagValue, Setting, SettingChange, Settings, SettingsSpec
from jetspark.app.spec import AppSpec
from jetspark.app.stored_events import FailureCause
from jetspark.app.telemetry import AttemptResult, DeadLetterChange, HandlerAttempt, HandlerObserver, HeldEvents
from jetspark.app.timers import FiredTimer, Timer, Timers
from jetspark.app.topology.declared import TopologyPlan
from jetspark.app.workflows.command_events import CommandAnswered
from jetspark.app.workflows.runs import RunRetry, WorkflowRun, WorkflowRuns
from jetspark.errors import CommandRefused as Refused
from jetspark.state.changes import DELETE

__all__ = [
    "DELETE",
    "App",
    "AppClient",
    "AppDeadLetter",
    "AppDeadLetters",
    "AppSpec",
    "AttemptResult",
    "Breaker",
    "BulkPublisher",
    "Catalogue",
    "Command",
    "CommandAnswered",
    "CommandOptions",
    "CommandReply",
    "CommandSpec",
    "Context",
    "Contract",
    "DeadLetterChange",
    "Decision",
    "Decoded",
    "DiscardResults",
    "Encoded",
    "Entities",
    "EntityChange",
    "EntityChanges",
    "EntityDifference",
    "Event",
    "FailureCause",
    "FiredTimer",
    "Flag",
    "FlagValue",
    "HandlerAttempt",
    "HandlerObserver",
    "HandlerSpec",
    "HandlerTimeout",
    "HeldEvents",
    "LiveOptions",
    "Measure",
    "Past",
    "PastEvent",
    "Private",
    "ProjectionSpec",
    "Reconciliation",
    "RedriveProgress",
    "RedriveResults",
    "Refused",
    "Reject",
    "Retry",
    "RetryChanges",
    "RetryIn",
    "RunRetry",
    "ScheduledRetries",
    "ScheduledRetry",
    "Setting",
    "SettingChange",
    "Settings",
    "SettingsSpec",
    "Skip",
    "StoredEntity",
    "Template",
    "Timer",
    "Timers",
    "Timestamp",
    "TopologyPlan",
    "UnreadableEntity",
    "View",
    "ViewEntry",
    "ViewPosition",
    "ViewReplica",
    "Window",
    "WorkflowRun",
    "WorkflowRuns",
    "check_contracts",
    "contract_of",
    "decode",
    "derived_id",
    "encode",
    "event",
    "unchanged",
    "upcast",
]
