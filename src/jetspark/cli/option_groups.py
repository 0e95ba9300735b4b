"""Options that several commands share. Each group is a dataclass, which a command takes as one parameter."""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol, get_type_hints

import typer

from jetspark.cli.apps import AsJson, Servers
from jetspark.errors import ConfigError

if TYPE_CHECKING:
    from jetspark.app.replay import ReplayRequest
    from jetspark.lake.reading import ArchiveRoot

__all__ = ["EventRange", "JobOptions", "OlderEvents", "Output", "WorkflowRange", "check_combination", "with_groups"]


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer reads it: each parameter with a dataclass becomes one parameter for each of its fields."""
    hints = get_type_hints(command, include_extras=True)
    options: list[inspect.Parameter] = []
    groups: dict[str, type[Any]] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        kind = hints[name]
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            groups[name] = kind
            fields = get_type_hints(kind, include_extras=True)
            given = [(each.name, fields[each.name], each.default) for each in dataclasses.fields(kind)]
        else:
            given = [(name, kind, parameter.default)]
        for option, annotation, default in given:
            default = inspect.Parameter.empty if default is dataclasses.MISSING else default
            options.append(
                inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )

    def run(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{each.name: values.pop(each.name) for each in dataclasses.fields(kind)})
        command(**values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {each.name: each.annotation for each in options}
    vars(run)["__signature__"] = inspect.Signature(options)
    return run


def check_combination(option: str, given: Mapping[str, bool], reason: str) -> None:
    """Refuse an option together with others.

    Args:
        given: The other options, each with True if it was given.

    Raises:
        ConfigError: At least one of them was given; the message names those.
    """
    if refused := [name for name, is_given in given.items() if is_given]:
        raise ConfigError(f"{option} cannot be combined with {', '.join(refused)}: {reason}")


class Reported(Protocol):
    """A result that prints as text and as JSON."""

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """The server to connect to, and the output format."""

    servers: Servers = None
    as_json: AsJson = False

    def print(self, result: Reported) -> None:
        typer.echo(json.dumps(result.to_dict(), indent=2) if self.as_json else str(result))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options of work that can be resumed."""

    rate: Annotated[float | None, typer.Option("--rate", help="Events each second, at most.", min=0.001)] = None
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="ID", help="Continue the interrupted work with this id.")
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OlderEvents:
    """The archive that events come from that the stream no longer has."""

    archive: Annotated[
        str | None,
        typer.Option(
            "--archive",
            metavar="URI",
            help="An archive with the stream, for older events: a folder, or a URI such as s3://bucket/folder.",
        ),
    ] = None
    storage_option: Annotated[
        list[str] | None,
        typer.Option(
            "--storage-option",
            metavar="KEY=VALUE",
            help="With --archive: an option of the object store, such as aws_endpoint; may be repeated.",
        ),
    ] = None

    @property
    def root(self) -> ArchiveRoot | None:
        """
        Raises:
            ConfigError: There are options for a store without an archive, or one has no value.
        """
        if self.archive is None:
            if self.storage_option:
                raise ConfigError("--storage-option needs --archive")
            return None
        from jetspark.lake.reading import ArchiveRoot  # says which extra is missing, if it is

        pairs = [each.partition("=") for each in self.storage_option or ()]
        for name, equals, _ in pairs:
            if not equals or not name:  # not shown whole: it may be a secret
                raise ConfigError(f"--storage-option {name}: expected KEY=VALUE, such as aws_region=eu-west-1")
        return ArchiveRoot(self.archive, {name: value for name, _, value in pairs})

    def __str__(self) -> str:
        """As it was given, with a space before it, but for options of the store; empty without an archive."""
        return "" if self.archive is None else f" --archive {shlex.quote(self.archive)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRange:
    """The events to replay."""

    from_seq: Annotated[int | None, typer.Option("--from-seq", help="The first sequence of the stream.")] = None
    to_seq: Annotated[int | None, typer.Option("--to-seq", help="The last sequence of the stream.")] = None
    since: Annotated[str | None, typer.Option("--since", help="Events stored at or after this time.")] = None
    until: Annotated[str | None, typer.Option("--until", help="Events stored before this time.")] = None
    key: Annotated[
        list[str] | None, typer.Option("--key", help="Only events of this key (with windows KEY.WINDOW); repeatable.")
    ] = None
    subject: Annotated[
        str | None, typer.Option("--subject", help="Only events on this subject; wildcards are allowed.")
    ] = None

    def request(self) -> ReplayRequest:
        """
        Raises:
            ConfigError: A time is not readable, or the range is not valid.
        """
        return _request_of(self, subject=self.subject)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkflowRange:
    """The events of a workflow to decide on again."""

    from_seq: Annotated[
        int | None, typer.Option("--from-seq", help="The first sequence that the new version decides on.")
    ] = None
    to_seq: Annotated[
        int | None, typer.Option("--to-seq", help="The last sequence that the new version decides on.")
    ] = None
    since: Annotated[str | None, typer.Option("--since", help="The new version takes over at this time.")] = None
    until: Annotated[str | None, typer.Option("--until", help="Only events stored before this time.")] = None
    key: Annotated[list[str] | None, typer.Option("--key", help="Only this run; may be repeated.")] = None

    def request(self) -> ReplayRequest:
        """
        Raises:
            ConfigError: A time is not readable, or the range is not valid.
        """
        return _request_of(self)


def _request_of(range: EventRange | WorkflowRange, subject: str | None = None) -> ReplayRequest:
    from jetspark.app.replay import ReplayRequest

    return ReplayRequest(
        from_seq=range.from_seq,
        to_seq=range.to_seq,
        since=_time_of("--since", range.since),
        until=_time_of("--until", range.until),
        keys=tuple(range.key or ()),
        subject=subject,
    )


def _time_of(name: str, text: str | None) -> datetime.datetime | None:
    try:
        return None if text is None else datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{name} {text!r}: expected a time such as 2026-03-20T10:14:30Z") from None
