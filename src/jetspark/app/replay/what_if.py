"""Comparison of two versions of a workflow on recorded history; nothing is written to the server."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from jetspark.app.clock import utc_now
from jetspark.app.contracts.catalogue import Catalogue
from jetspark.app.extents import Extent, ReplayRequest
from jetspark.app.server_clock import server_clock
from jetspark.app.spec import AppSpec, HasSpec
from jetspark.app.stream_history import StreamHistory
from jetspark.app.workflows.version_comparison import ComparedRun, HistoryComparison, StepDifference, WorkflowCode
from jetspark.app.workflows.workflow_spec import WorkflowSpec
from jetspark.errors import ConfigError, MessageNotFound, StreamNotFound

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.lake.reading import ArchiveRoot

__all__ = ["NewCode", "WhatIf", "check_request", "comparison_of", "what_if"]

MAX_EXAMPLES = 20
"""Runs that ``str()`` of a result describes."""


class NewCode(NamedTuple):
    """The source text of a module with another version of a workflow. A process needs no file to load it."""

    file: str
    text: str
    package: str = ""
    """The package of the application's module, for relative imports."""

    @classmethod
    def read(cls, path: str | Path, package: str = "") -> NewCode:
        """
        Raises:
            ConfigError: The file cannot be read.
        """
        try:
            return cls(str(path), Path(path).read_text(encoding="utf-8"), package)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"code={str(path)!r} cannot be read: {error}") from error

    def load(self) -> ModuleType:
        """Load the module under a name of its own, beside the application's; once for each process.

        Raises:
            ConfigError: The module raised an error, or called ``sys.exit``.
        """
        digest = hashlib.sha256(repr(self).encode()).hexdigest()[:16]
        name = f"{self.package}._what_if_{digest}" if self.package else f"_what_if_{digest}"
        if (known := sys.modules.get(name)) is not None:
            return known
        module = ModuleType(name)
        module.__file__, module.__package__ = self.file, self.package
        # Types in annotations are resolved there.
        sys.modules[name] = module
        try:
            exec(compile(self.text, self.file, "exec"), vars(module))
        except (Exception, SystemExit) as error:
            # SystemExit with code 0 would end the process as if both versions were equal.
            del sys.modules[name]
            raise ConfigError(f"code={self.file!r} raised {type(error).__name__}: {error}") from error
        return module


def comparison_of(
    app: HasSpec, workflow: str, code: NewCode, *, since: int = 0, keys: Iterable[str] = ()
) -> HistoryComparison:
    """A comparison of an application's workflow with another version of it.

    Raises:
        ConfigError: The application or the new code has no workflow of this name.
    """
    app = app.spec
    spec = app.workflows.get(workflow)
    if spec is None:
        known = ", ".join(sorted(app.workflows)) or "none"
        raise ConfigError(f"workflow {workflow!r}: app {app.name!r} has no workflow of this name; it has {known}")
    old = WorkflowCode(spec, app.catalogue)
    return HistoryComparison(app.name, old, _new_code(app, spec, code), since=since, keys=tuple(keys))


def _new_code(app: AppSpec, old: WorkflowSpec, code: NewCode) -> WorkflowCode:
    """The workflow in an App of the new code, or the only class with ``react``."""
    module = code.load()
    for value in vars(module).values():
        spec = getattr(value, "spec", None)  # value may be an App
        if isinstance(spec, AppSpec) and spec is not app and old.name in spec.workflows:
            return WorkflowCode(spec.workflows[old.name], spec.catalogue)
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and callable(getattr(value, "react", None))
    ]
    if len(classes) != 1:
        found = ", ".join(each.__name__ for each in classes) or "none"
        raise ConfigError(
            f"code={code.file!r}: expected an App with a workflow {old.name!r}, or one class with `react`; such "
            f"classes are {found}"
        )
    version = getattr(classes[0], "version", old.version)
    spec = _class_spec(app.name, old, classes[0], version)
    catalogue = Catalogue(*spec.events)
    known = {(contract.type, contract.version) for contract in catalogue}
    catalogue.add(*(each.kind for each in app.catalogue if (each.type, each.version) not in known))
    return WorkflowCode(spec, catalogue)


def _class_spec(app: str, old: WorkflowSpec, kind: type, version: int) -> WorkflowSpec:
    try:
        return WorkflowSpec(old.name, kind, app=app, key=old.lane_key, events=None, version=version)
    except ConfigError:  # the class does not declare its events
        return WorkflowSpec(old.name, kind, app=app, key=old.lane_key, events=old.events, version=version)


@dataclass(slots=True, kw_only=True)
class WhatIf:
    """The result of a comparison."""

    workflow: str
    extent: Extent
    """The events that both versions decided on. Earlier events led to the states that both begin with."""
    runs: int = 0
    equal: int = 0
    diverged: int = 0
    """Runs where the new version set a timer or sent a command that is not in recorded history."""
    unreadable: int = 0
    """Messages that neither version can read."""
    by_kind: Counter[str] = field(default_factory=Counter)
    """Runs that differ, by the kind of difference."""
    different: list[ComparedRun] = field(default_factory=list)

    @property
    def is_equal(self) -> bool:
        return self.runs == self.equal

    def add(self, run: ComparedRun) -> None:
        self.runs += 1
        if run.is_equal:
            self.equal += 1
            return
        self.diverged += run.diverged is not None
        self.by_kind.update(run.kinds)
        self.different.append(run)

    def to_dict(self) -> dict[str, Any]:
        return {
            "workflow": self.workflow,
            "stream": self.extent.stream,
            "first": self.extent.first,
            "last": self.extent.last,
            "runs": self.runs,
            "equal": self.equal,
            "different": self.runs - self.equal,
            "diverged": self.diverged,
            "unreadable": self.unreadable,
            "by_kind": dict(sorted(self.by_kind.items())),
            "runs_that_differ": [run.to_dict() for run in self.different],
        }

    def __str__(self) -> str:
        head = f"workflow {self.workflow}: {self.extent}: {self.runs} runs compared, {self.equal} equal"
        lines = [f"{head}, {self.runs - self.equal} different"]
        if self.unreadable:
            lines.append(f"  {self.unreadable} messages cannot be read by either version")
        lines += [f"  {count:>8} runs differ in {kind}" for kind, count in sorted(self.by_kind.items())]
        for run in self.different[:MAX_EXAMPLES]:
            lines += [f"  run {run.key} ({run.difference_count} steps differ): first at", *_lines(run)]
        if len(self.different) > MAX_EXAMPLES:
            lines.append(f"  and {len(self.different) - MAX_EXAMPLES} more runs (--json)")
        return "\n".join(lines)


def _lines(run: ComparedRun) -> list[str]:
    lines = []
    for step in run.differences[:1]:
        lines.append(f"    event {step.sequence}, {step.type}, {step.time.isoformat(timespec='seconds')}")
        lines += [f"      {kind}: {_shown(step, kind)}" for kind in step.kinds]
    if (away := run.diverged) is not None:
        before = "at the end of the range" if away.sequence is None else f"before event {away.sequence}"
        due, word = away.due.isoformat(timespec="seconds"), "due" if away.kind == "timer" else "sent"
        lines.append(f"    diverged here: {away.kind} {away.name!r} of the new version is {word} at {due}, {before}")
    return lines


def _shown(step: StepDifference, kind: str) -> str:
    import json

    texts = (json.dumps(each.get(kind), sort_keys=True) for each in (step.old, step.new))
    return " -> ".join(text if len(text) <= 200 else f"{text[:197]}..." for text in texts)


def check_request(request: ReplayRequest) -> None:
    """
    Raises:
        ConfigError: The request selects only some events of a run.
    """
    if request.subject is not None:
        raise ConfigError(f"subject={request.subject!r} must not be set: a run is compared with all of its events")


async def what_if(
    js: JetStream,
    app: HasSpec,
    workflow: str,
    code: NewCode,
    request: ReplayRequest | None = None,
    *,
    archive: ArchiveRoot | str | None = None,
) -> WhatIf:
    """Compare the decisions of another version of a workflow with those of this code, on a range of recorded events.

    The whole stream up to the end of the range is read: the old version brings each run to its state at the beginning
    of the range, where the new version takes over. Nothing is written.

    Args:
        archive: The root of an archive with the stream: older events come from there.

    Raises:
        ConfigError: The workflow is unknown, or the versions disagree on the run of an event.
        DataLoss: The stream no longer has its first events, so the states of its runs are unknown.
    """
    app = app.spec
    request = request or ReplayRequest()
    check_request(request)
    filters = comparison_of(app, workflow, code).filters
    history = StreamHistory(js, app.stream, filters, archive=archive)
    extent = await history.extent(request)
    comparison = comparison_of(app, workflow, code, since=extent.first, keys=request.keys)
    whole = await history.whole(extent.last)
    async with aclosing(history.messages(whole)) as portions:
        async for portion in portions:
            for message in portion.messages:
                comparison.take(message)
    found = WhatIf(workflow=workflow, extent=extent)
    for run in comparison.results(request.until or await _end_of(history, extent)):
        found.add(run)
    found.unreadable = comparison.unreadable
    found.different.sort(key=lambda run: run.key)
    return found


async def _end_of(history: StreamHistory, extent: Extent) -> datetime.datetime:
    """When the first message after a range was stored; without one, the server's time now."""
    behind = dataclasses.replace(extent, first=extent.last + 1, last=await history.last())
    archived = await history.archived(behind)
    if archived is not None and archived.times:
        return archived.times[0]
    try:
        stream = await history.stream()
        return (await stream.get_message(behind.first, next_for=">", direct=False)).timestamp
    except MessageNotFound:
        return await server_clock(history.js, extent.stream).now()
    except StreamNotFound:  # its archive has no message after the range
        return utc_now()
