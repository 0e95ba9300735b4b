"""Checks of `jetspark check` that need no server: names, overlaps, ownership.

An *error* cannot work, or breaks what the framework promises. A *warning* works, and is what teams regret later.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, TypeAlias

from jetspark.app.checks.purity import impure_names
from jetspark.app.commands.wire import command_subject
from jetspark.app.contracts.catalogue import Contract
from jetspark.app.contracts.field_rules import field_names, private_fields
from jetspark.app.layout import topology_of
from jetspark.app.spec import AppSpec, HasSpec
from jetspark.app.workflows.command_events import CommandAnswered, CommandSent, workflow_subjects
from jetspark.core.subjects import is_subset, overlaps
from jetspark.errors import ConfigError

__all__ = ["Lint", "lint_apps"]

Level: TypeAlias = Literal["error", "warning"]

# fmt: off
IMPERATIVES = frozenset({
    "accept", "add", "approve", "assign", "cancel", "charge", "check", "close", "complete", "confirm",
    "create", "delete", "do", "execute", "fulfil", "fulfill", "invoice", "make", "move", "notify",
    "open", "order", "pay", "place", "process", "publish", "refund", "register", "reject", "release",
    "remove", "request", "reserve", "retry", "run", "save", "schedule", "send", "ship", "start",
    "stop", "submit", "sync", "transfer", "update", "validate", "verify", "write",
})
# fmt: on
"""Last words of a type that make a request: the name of a command, not of an event."""
AMBIGUOUS = frozenset(
    {"changed", "data", "done", "event", "handled", "info", "message", "processed", "status", "touched"}
)
"""Last words of a type that do not name a fact."""

_is_camel = re.compile(r".*[a-z0-9][A-Z]").match
_is_snake = re.compile(r"[a-z0-9]+_[a-z0-9_]+").fullmatch


@dataclass(frozen=True, slots=True)
class Lint:
    """A finding of the checks."""

    level: Level
    rule: str
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.level}: {self.where}: {self.reason} ({self.rule})"


def lint_apps(apps: Sequence[HasSpec]) -> list[Lint]:
    """Everything that is worth a look, errors first; several applications are compared with each other as well."""
    specs = [app.spec for app in apps]
    found = [lint for spec in specs for lint in _one_app(spec)]
    for one, other in combinations(specs, 2):
        found += _ownership(one, other)
    return sorted(found, key=lambda lint: (lint.level, lint.where, lint.rule))


def _one_app(app: AppSpec) -> Iterator[Lint]:
    try:
        app.catalogue.check()
        topology = topology_of(app)
    except ConfigError as error:
        yield Lint("error", "declaration", f"app {app.name}", str(error))
        return
    for contract in app.catalogue:
        yield from _event(contract)
    yield from _overlaps(app)
    yield from _stream(app)
    yield from _commands(app)
    yield from _impure(app)
    for one, other in combinations(topology.streams, 2):
        for a in one.subjects or ():
            for b in other.subjects or ():
                if overlaps(a, b):
                    reason = f"{a!r} overlaps {b!r} of stream {other.name}: a subject belongs to one stream"
                    yield Lint("error", "stream_overlap", f"stream {one.name}", reason)


def _event(contract: Contract) -> Iterator[Lint]:
    where = f"event {contract.type}"
    word = contract.type.rsplit(".", 1)[-1].lower()
    if word in IMPERATIVES:
        yield Lint("warning", "imperative_type", where, f"{word!r} asks for something; an event is a fact: past tense")
    if word in AMBIGUOUS:
        yield Lint("warning", "ambiguous_type", where, f"{word!r} does not say what happened")
    if contract.type != contract.type.lower():
        yield Lint("warning", "type_case", where, "write types in lower case, so that their spelling is predictable")
    for token in contract.subject.text.split("."):
        if not token.startswith("{") and token != token.lower():
            yield Lint("warning", "subject_case", where, f"subject token {token!r} is not lower case")
    tokens = contract.subject.text.split(".")
    fields_last = sorted(tokens, key=lambda token: token.startswith("{"))
    if tokens != fields_last and not issubclass(contract.kind, CommandSent | CommandAnswered):
        reason = (
            f"subject {contract.subject.text!r} has fields before other words: a consumer filtered by it gets a "
            f"third of the events a second that it gets by {'.'.join(fields_last)!r}"
        )
        yield Lint("warning", "key_in_middle", where, reason)
    if contract.key_template is None:
        yield Lint("warning", "no_key", where, "no key: its events have no order of their own")
    yield from _fields(contract, where)


def _fields(contract: Contract, where: str) -> Iterator[Lint]:
    names = field_names(contract.kind)
    hints = typing.get_type_hints(contract.kind)
    if any(map(_is_camel, names)) and any(map(_is_snake, names)):
        yield Lint("warning", "field_style", where, "some fields are snake_case and some camelCase; choose one")
    for name in names:
        if (name == "id" or name.endswith(("_id", "Id"))) and hints.get(name) in (int, float):
            yield Lint("warning", "number_id", f"{where}.{name}", "an id as a number loses zeros and digits; use str")
    routed = {*contract.subject.fields, *(contract.key_template.fields if contract.key_template else ())}
    for name in sorted(routed & private_fields(contract.kind)):
        reason = "it is private, and in the subject or key everybody can see it"
        yield Lint("error", "private_in_subject", f"{where}.{name}", reason)


def _overlaps(app: AppSpec) -> Iterator[Lint]:
    for one, other in combinations(app.catalogue, 2):
        if one.type != other.type and overlaps(one.subject.filter, other.subject.filter):
            reason = f"{one.subject.text!r} overlaps {other.subject.text!r} of {other.type}: no filter tells them apart"
            yield Lint("warning", "subject_overlap", f"event {one.type}", reason)
    ours = workflow_subjects(app.name)
    depths = {each.subject.text.count(".") for each in app.catalogue if not is_subset(each.subject.filter, ours)}
    if len(depths) > 1:
        reason = "its events have subjects of different length, so a '*' finds only some of them"
        yield Lint("warning", "subject_depth", f"app {app.name}", reason)


def _stream(app: AppSpec) -> Iterator[Lint]:
    where = f"stream {app.stream}"
    for subject in app.subjects:
        if subject.split(".")[0] in (">", "*"):
            yield Lint("warning", "broad_subject", where, f"{subject!r} takes subjects of every other application, too")
    if app.stream_config.retention in ("workqueue", "interest"):
        reason = f"retention {app.stream_config.retention!r} deletes what was read: nothing can be replayed"
        yield Lint("warning", "no_history", where, reason)


def _impure(app: AppSpec) -> Iterator[Lint]:
    """Functions that run again on the same events and may return another result."""
    folds = [(f"projection {name}", spec.kind) for name, spec in app.projections.items()]
    folds += [(f"entities {name}", spec.fold.spec.kind) for name, spec in app.entities.items() if spec.fold is not None]
    run: list[tuple[str, str, Any, type | None]] = [
        *((where, name, getattr(kind, name), kind) for where, kind in folds for name in ("key", "apply")),
        *(
            (f"workflow {name}", "react", getattr(spec.kind, "react", None), spec.kind)
            for name, spec in app.workflows.items()
        ),
        *((f"command {name}", "decide", spec.kind.decide, spec.kind) for name, spec in app.commands.items()),
        *(
            (f"event {contract.type}", f"the upcast from version {version}", function, None)
            for contract in app.catalogue
            for version, function in contract.upcasts.items()
        ),
    ]
    for where, what, function, owner in run:
        names = impure_names(function, owner)
        if names:
            reason = (
                f"{what} uses {', '.join(names)}: run again on the same events it comes to another result. Take "
                "times and ids from the event"
            )
            yield Lint("warning", "impure", where, reason)


def _commands(app: AppSpec) -> Iterator[Lint]:
    config = app.stream_config
    if not app.commands:
        return
    where = f"stream {app.stream}"
    if config.allow_atomic is False:
        reason = "allow_atomic=False: a command that stores several events needs atomic batches"
        yield Lint("error", "no_atomic", where, reason)
    limits = ("max_age_s", "max_messages", "max_bytes", "max_messages_per_subject")
    limited = [name for name in limits if (getattr(config, name) or 0) > 0]
    if limited:
        reason = f"{limited[0]} deletes events that commands decide on, and by which a retry is known"
        yield Lint("warning", "commands_forget", where, reason)
    for spec in app.commands.values():
        word = spec.name.rsplit(".", 1)[-1].lower()
        if {word.removesuffix("d"), word.removesuffix("ed")} & IMPERATIVES - {word}:
            reason = f"{word!r} says that it has happened; a command asks for it"
            yield Lint("warning", "past_tense_command", f"command {spec.name}", reason)
        if spec.name in {contract.type for contract in app.catalogue}:
            reason = "a type of event has this name; one word for what is asked, another for what happened"
            yield Lint("error", "command_and_event", f"command {spec.name}", reason)


def _ownership(one: AppSpec, other: AppSpec) -> Iterator[Lint]:
    """Names and subjects that two applications both claim."""
    where = f"app {one.name}"
    if one.name == other.name:
        yield Lint("error", "app_name", where, "two applications have this name, and would share streams and buckets")
    if one.owns_stream and other.owns_stream:
        if one.stream == other.stream:
            yield Lint("error", "stream_owner", where, f"app {other.name} declares stream {one.stream} as well")
        for a in one.subjects:
            for b in other.subjects:
                if one.stream != other.stream and overlaps(a, b):
                    yield Lint("error", "stream_overlap", where, f"{a!r} overlaps {b!r} of app {other.name}")
    for asked, stores in ((one, other), (other, one)):
        for name in asked.commands:
            subject = command_subject(asked.name, name)
            if any(overlaps(subject, each) for each in stores.subjects):
                reason = f"{subject!r} is stored by stream {stores.stream} of app {stores.name}, which would answer it"
                yield Lint("error", "command_stored", f"command {name}", reason)
    shared = {bucket.bucket for bucket in one.buckets} & {bucket.bucket for bucket in other.buckets}
    for bucket in sorted(shared):
        yield Lint("error", "bucket_owner", where, f"app {other.name} declares bucket {bucket} as well")
    for contract in one.catalogue:
        for theirs in other.catalogue:
            same_name = (contract.type, contract.version) == (theirs.type, theirs.version)
            if same_name and contract.kind is not theirs.kind:
                yield Lint("error", "type_owner", f"event {contract.type}", _two_classes(contract, theirs, other))


def _two_classes(contract: Contract, theirs: Contract, other: AppSpec) -> str:
    def qualified_name(kind: type[object]) -> str:
        return f"{kind.__module__}.{kind.__qualname__}"

    ours, others = qualified_name(contract.kind), qualified_name(theirs.kind)
    return f"{ours}, and {others} in app {other.name}: one class says what a type is"
