"""The options of ``jetstream_events``: those of the format ``jetstream``, and the application with its types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from jetspark.app import App
from jetspark.app.contracts.catalogue import Contract
from jetspark.app.projections.router import filters_of
from jetspark.core.subjects import reading_filters
from jetspark.errors import ConfigError
from jetspark.spark.engine.app_files import load_app, locate_app
from jetspark.spark.options import boolean, choice, names, option, read_options, text
from jetspark.spark.stream.source_options import SourceOptions

__all__ = ["FORMAT", "EventOptions", "TypedRead", "contracts_of", "typed_read"]

FORMAT = "jetstream_events"


@dataclass(frozen=True, slots=True, kw_only=True)
class EventOptions(SourceOptions):
    """The application and its types. ``stream`` and ``subjects`` come from the application unless they are set."""

    app: str = option(text, "the application, `package.module:name`", default="")
    app_folder: str = option(
        text, "where its module is, if workers cannot import it otherwise; by default the driver's folder", default=""
    )
    type: tuple[str, ...] = option(names, "type of event to read, or several with commas between them", default=())
    unreadable: str = option(
        choice("fail", "drop", "keep"),
        "a message that is not a valid event: `fail` the task, `drop` it and log how many, or `keep` it as a row with "
        "the column `_unreadable`",
        default="fail",
    )
    filtered: bool = option(
        boolean,
        "let the server filter by the subjects of the events, for types that are a small part of the stream; without "
        "it, all of the application's own stream is read and other messages are skipped",
        default=False,
    )
    event_subjects: tuple[str, ...] = option(
        names, "internal: the subjects of the events; `subjects` may be more", default=()
    )

    @property
    def wanted_subjects(self) -> tuple[str, ...]:
        return self.event_subjects

    @property
    def keeps(self) -> bool:
        return self.unreadable == "keep"


class TypedRead(NamedTuple):
    """A read of some types of events of an application."""

    options: EventOptions
    app: App
    contracts: list[Contract]


def typed_read(given: Mapping[str, str]) -> TypedRead:
    """Complete the options of a read from the application, which is imported.

    Raises:
        ConfigError: An option is invalid, or the application or a type does not exist.
    """
    values = {name.lower(): value for name, value in given.items()}
    if not values.get("app"):
        raise ConfigError(f"{FORMAT}: the option 'app' is missing: expected 'package.module:name'")
    if "appfolder" not in values:
        values["appfolder"] = locate_app(values["app"]).folder
    app = load_app(values["app"], values["appfolder"])
    contracts = contracts_of(app, names(values["type"]) if values.get("type") else ())
    is_own_stream = "stream" not in values and "streampattern" not in values
    if is_own_stream:
        values["stream"] = app.stream
    if not values["appfolder"]:
        del values["appfolder"]
    if "subjects" in values:
        values["eventsubjects"] = values["subjects"]
    else:
        filters = filters_of([each.kind for each in contracts])
        is_filtered = boolean(values.get("filtered", "false"))
        asked = reading_filters(filters, may_read_all=is_own_stream and app.spec.owns_stream and not is_filtered)
        values["eventsubjects"] = ",".join(filters)
        if asked:
            values["subjects"] = ",".join(asked)
    return TypedRead(read_options(EventOptions, FORMAT, values), app, contracts)


def contracts_of(app: App, types: tuple[str, ...]) -> list[Contract]:
    """The contracts of the classes that events of some types are read as.

    Raises:
        ConfigError: A type is missing or unknown.
    """
    known = sorted({each.type for each in app.catalogue})
    for name in types:
        if name not in known:
            raise ConfigError(f"type={name!r}: app {app.name!r} has {', '.join(known) or 'no events'}")
    if not types:
        raise ConfigError(f"{FORMAT}: the option 'type' is missing: expected one or more of {', '.join(known)}")
    found = [reading.contract for (name, _), reading in sorted(app.catalogue.readings.items()) if name in types]
    unique = list(dict.fromkeys(found))
    return sorted(unique, key=lambda each: (types.index(each.type), each.version))
