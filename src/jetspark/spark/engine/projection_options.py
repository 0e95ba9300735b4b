"""The options of ``jetstream_projection``, which its reader and its writer share. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from jetspark.errors import ConfigError
from jetspark.lake.reading import ArchiveRoot
from jetspark.spark.options import boolean, count, describe, milliseconds, names, option, size, text
from jetspark.spark.stream.source_options import SourceOptions

__all__ = [
    "FORMAT",
    "ConnectingKeywords",
    "ProjectionKeywords",
    "ProjectionOptions",
    "ReadingKeywords",
    "keyword_options",
    "option_text",
    "servers_text",
    "source_options",
]

FORMAT = "jetstream_projection"
# It covers a restart and the election of a leader.
PATIENCE_S = 60.0


class ConnectingKeywords(TypedDict, total=False):
    """Connection options of every format as keywords, for type checkers; servers are a separate argument."""

    user: str
    password: str
    passwordEnv: str
    passwordFile: str
    token: str
    tokenEnv: str
    tokenFile: str
    credentialsFile: str
    nkeySeedFile: str
    tlsCaFile: str
    tlsCertFile: str
    tlsKeyFile: str
    domain: str
    prefix: str
    requestTimeoutMs: int | str


class ReadingKeywords(ConnectingKeywords, total=False):
    """Connection and reading options of the format ``jetstream`` as keywords, for type checkers.

    The stream and the range to read are separate arguments.
    """

    maxOffsetsPerTrigger: int | str
    maxBytesPerTrigger: int | str
    minPartitions: int | str
    maxRecordsPerPartition: int | str
    failOnDataLoss: bool | str
    acceptFilterChange: bool | str
    includeHeaders: bool | str
    fetchTimeoutMs: int | str
    archive: str | ArchiveRoot
    archiveOptions: str


class ProjectionKeywords(ReadingKeywords, total=False):
    """Keywords of :class:`ReadingKeywords`, and the memory limits of tasks that fold."""

    maxHeldRows: int | str
    maxHeldBytes: int | str
    maxKeys: int | str
    patienceMs: int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionOptions(SourceOptions):
    """The stream to read, and the application and projections to fold it into."""

    app: str = option(text, "the application, `package.module:name`", default="")
    app_folder: str = option(text, "where to look for it in the end", default="")
    outline: str = option(text, "what the driver's code declares; workers compare", default="")
    projections: tuple[str, ...] = option(names, "names of projections", default=())
    buckets: tuple[str, ...] = option(names, "the bucket of each", default=())
    events: tuple[str, ...] = option(names, "subjects of the events; `subjects` may be more", default=())
    versions: tuple[str, ...] = option(names, "the version of each; without them any will do", default=())
    letters: bool = option(boolean, "write dead letters of messages that cannot be read", default=True)
    is_stored: bool = option(boolean, "fold into the buckets, and not from nothing", default=True, name="stored")
    report: str | None = option(text, "key of the application's records that is told what a batch write has done")
    records: str | None = option(text, "bucket that says where projections are; they must stay there")
    placed: tuple[str, ...] = option(names, "projections whose bucket was chosen, and not looked up there", default=())
    max_payload_bytes: int = option(
        size, "what the server takes in a message: a state that is larger parks its key", default=1 << 20
    )
    max_held_rows: int = option(
        count, "rows of a task in memory; what is more is sorted through temporary files", default=1_000_000
    )
    max_held_bytes: int = option(size, "bytes of such rows", default=128 << 20)
    max_keys: int = option(count, "keys of a task, whose states are in memory; more are an error", default=1_000_000)
    patience_s: float = option(
        milliseconds, "longest wait for a server that is away", default=PATIENCE_S, name="patienceMs"
    )

    @property
    def wanted_subjects(self) -> tuple[str, ...]:
        return self.events or self.subjects

    def __post_init__(self) -> None:
        SourceOptions.__post_init__(self)
        for name in ("app", "projections", "buckets"):
            if not getattr(self, name):
                raise ConfigError(f"{FORMAT}: the option {name!r} is missing; jetspark.spark.run sets it")
        for name, given in (("buckets", self.buckets), ("versions", self.versions)):
            if given and len(given) != len(self.projections):
                raise ConfigError(
                    f"{FORMAT}: {name}={','.join(given)!r}: expected one for each of {','.join(self.projections)!r}"
                )
        if len(self.stream) != 1:
            raise ConfigError(f"{FORMAT}: {self.which}: expected one stream, that of the application")

    def version_of(self, number: int) -> int:
        """Version of a projection, by its number; 0 if unknown."""
        return int(self.versions[number]) if self.versions else 0

    def check_keys(self, number: int) -> None:
        """
        Raises:
            ConfigError: A task has more keys than it may hold.
        """
        if number > self.max_keys:
            raise ConfigError(
                f"maxKeys={self.max_keys}: a task has more keys than that, and holds their states in memory: "
                "make more partitions, or raise it"
            )


def keyword_options(kind: type[ReadingKeywords], given: Mapping[str, Any]) -> dict[str, str]:
    """Convert keywords of a call into options under their documented names.

    Options that select messages are refused: events would be omitted, although the positions cover them. Unknown names
    are refused later by :func:`~jetspark.spark.options.read_options`.

    Raises:
        ConfigError: The format has an option of that name that callers must not set.
    """
    allowed = {name.lower(): name for name in kind.__annotations__}
    internal = {each.name.lower() for each in describe(ProjectionOptions)} - allowed.keys()
    for name in given:
        if name.lower() in internal:
            raise ConfigError(
                f"option {name!r}: expected to be left to the application, which says what is read, and to the "
                f"arguments of the call; options are {', '.join(sorted(allowed.values()))}"
            )
    return source_options({allowed.get(name.lower(), name): value for name, value in given.items()})


def source_options(given: Mapping[str, Any]) -> dict[str, str]:
    """Keywords as options: an archive with its store's options, offsets of several streams as JSON."""
    options = dict(given)
    if isinstance(root := options.get("archive"), ArchiveRoot):
        options["archive"] = root.uri
        if root.options:
            options["archiveOptions"] = dict(root.options)
    return {
        name: json.dumps(value) if isinstance(value, Mapping) else option_text(value) for name, value in options.items()
    }


def servers_text(servers: Any) -> str:
    """Servers as an option.

    Raises:
        ConfigError: The list is empty or None; as text it would name a server, or mean the local one.
    """
    given = list(servers) if isinstance(servers, Iterable) and not isinstance(servers, str | bytes) else [servers]
    if not given or not all(isinstance(each, str) and each.strip() for each in given):
        raise ConfigError(f"servers={servers!r}: expected a URL, or a list of them, such as 'nats://127.0.0.1:4222'")
    return option_text(given)


def option_text(value: Any) -> str:
    """A value as Spark passes it on."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
