"""Commands of a workflow: the event that stores a decided command, and the event that brings its answer back. Pure.

::

    step ──one batch──> state, events, timers, CommandSent
                                                  │ a handler sends it, under the id of this event
                                                  v
    next step <── CommandAnswered <── any worker of the command

The command is stored in the step's batch, so neither exists without the other. Its id is that of the event that stores
it, so it is decided once, however often it is sent (:mod:`jetspark.app.commands.decider`).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, NamedTuple

from jetspark.app.contracts.events import Event
from jetspark.errors import ConfigError

__all__ = ["CommandAnswered", "CommandKinds", "CommandSent", "workflow_subjects"]


class CommandAnswered(Event):
    """The outcome of a command that a workflow has sent: take it in ``react``, by the name the command was given.

    ``case CommandAnswered(name="reserve", refused=None)`` is a command that was decided.
    """

    run: str
    """The key of the run."""
    name: str
    """The one in ``Decision.commands``."""
    command: str
    """The command's name: ``@app.command("stock.reserve")``."""
    command_id: str
    refused: str | None = None
    """The reason of a refusal; None if the command was decided."""
    reply: Any = None
    """The ``reply`` of the command's decision."""
    sequence: int = 0
    """The sequence of the last event that the command has stored; 0 without events."""


class CommandSent(Event):
    """A command that a workflow has decided on; a handler of the application sends it."""

    run: str
    name: str
    command: str
    fields: dict[str, Any]
    is_awaited: bool = True
    """The run waits for the answer. Where it is over by then, a refusal becomes a dead letter."""


class CommandKinds(NamedTuple):
    """The types of events that one workflow stores its commands and their answers as."""

    sent: type[CommandSent]
    answered: type[CommandAnswered]

    @classmethod
    def of(cls, app: str, workflow: str, key: str | None) -> CommandKinds:
        """
        Args:
            key: The field of the workflow's events that names the run, if it is a field. The command events have it
                too, so that all events of a run are in one partition.

        Raises:
            ConfigError: The command events use this field name for something else.
        """
        names = {CommandSent: "sent", CommandAnswered: "answered"}
        made = []
        for base, word in names.items():
            key_field = "run" if key is None else key
            if key_field != "run" and key_field in base.__struct_fields__:
                raise ConfigError(
                    f"workflow {workflow!r}: key={key!r}: {base.__name__} has a field of this name that means "
                    "something else; give a function as key, or the field another name"
                )
            subject = f"{workflow_subjects(app)[:-1]}{workflow}.{{{key_field}}}.{word}"
            keywords = {"type": f"{workflow}.command_{word}", "key": key_field, "subject": subject}
            more: dict[str, type] = {} if key_field == "run" else {key_field: str}
            made.append(types.new_class(base.__name__, (base,), keywords, _with_fields(more)))
        return cls(*made)

    def make_sent(self, run: str, **fields: Any) -> CommandSent:
        return self.sent(run=run, **self._key_field(self.sent, run), **fields)

    def make_answered(self, sent: CommandSent, **fields: Any) -> CommandAnswered:
        same: dict[str, Any] = {"name": sent.name, "command": sent.command}
        return self.answered(run=sent.run, **self._key_field(self.answered, sent.run), **same, **fields)

    def _key_field(self, kind: type[Event], run: str) -> dict[str, Any]:
        (key_field,) = kind.__contract__.subject.fields
        return {} if key_field == "run" else {key_field: run}


def workflow_subjects(app: str) -> str:
    """The subjects of workflow commands and their answers."""
    return f"workflows.{app}.>"


def _with_fields(fields: dict[str, type]) -> Callable[[dict[str, object]], None]:
    def fill(namespace: dict[str, Any]) -> None:
        namespace["__annotations__"] = fields
        namespace["__module__"] = __name__

    return fill
