"""``jetspark archive``: archives of streams in a lake; run, list, verify, trim, compact and restore them."""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from jetspark.cli.apps import EXIT_DIFFERENCE, Servers, connection_options, load_app
from jetspark.cli.bars import interrupt_message, sequence_bar
from jetspark.cli.engine_options import EngineOptions, SparkTarget
from jetspark.cli.option_groups import Output, Reported, with_groups
from jetspark.cli.signals import EndSignal
from jetspark.cli.tables import TerminalTable
from jetspark.core.gc_tuning import seldom_collecting
from jetspark.errors import ConfigError, NetworkError, StreamNotFound

if TYPE_CHECKING:
    from jetspark.app.archive import TypedTables
    from jetspark.blocking import JetStream
    from jetspark.lake import ArchiveOptions, ArchivePosition, ArchiveTable, Snapshot
    from jetspark.lake.archiver import ArchiveEngine

__all__ = ["archive"]

R = TypeVar("R", bound=Reported)

archive = typer.Typer(
    name="archive", no_args_is_help=True, help="Archives of streams in a lake, which outlive their retention."
)

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

Target = Annotated[
    str,
    typer.Argument(
        metavar="STREAM|MODULE:APP", help="A stream; or an application: its stream of events, and its dead letters."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the archive is."""

    to: Annotated[
        str, typer.Option("--to", metavar="URI", help="The archive: a folder, or a URI such as s3://bucket/folder.")
    ]
    storage_option: Annotated[
        list[str] | None,
        typer.Option(
            "--storage-option",
            metavar="KEY=VALUE",
            help="Option of the object store, such as aws_endpoint; may be repeated. Others come from the environment.",
        ),
    ] = None

    @property
    def options(self) -> dict[str, str]:
        """
        Raises:
            ConfigError: An option has no value.
        """
        found = {}
        for each in self.storage_option or ():
            name, equals, value = each.partition("=")
            if not equals or not name:
                # Not shown whole: it may be a secret.
                raise ConfigError(f"--storage-option {name}: expected KEY=VALUE, such as aws_region=eu-west-1")
            found[name] = value
        return found

    def tables(self, streams: Sequence[str] = ()) -> list[ArchiveTable]:
        """The tables of streams, or all.

        Raises:
            ConfigError: A stream has none.
        """
        from jetspark.lake import find_tables

        found = [each for each in find_tables(self.to, options=self.options) if each.snapshot() is not None]
        names = sorted({each.identity.stream for each in found})
        for stream in streams:
            if stream not in names:
                raise ConfigError(f"{self.to}: no archive of stream {stream!r}; it has {', '.join(names) or 'none'}")
        return [each for each in found if not streams or each.identity.stream in streams]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """How an archive is written."""

    once: Annotated[bool, typer.Option("--once", help="End when everything is archived that the stream has now.")] = (
        False
    )
    every: Annotated[
        str, typer.Option("--every", metavar="TIME", help="Longest time that a message waits, such as 60s or 5m.")
    ] = "60s"
    format: Annotated[
        Literal["delta", "parquet", "iceberg"] | None,
        typer.Option("--format", help="Format of new tables, by default delta; existing ones keep theirs."),
    ] = None
    on_loss: Annotated[
        Literal["fail", "record"],
        typer.Option(
            "--on-loss", help="If messages were removed before they were archived: end, or list them as lost."
        ),
    ] = "fail"
    typed: Annotated[
        bool,
        typer.Option("--typed", help="Also write a Delta table for each type of event. TARGET is an application."),
    ] = False
    lease: Annotated[
        float,
        typer.Option("--lease", help="Seconds until another process takes over from a dead one; 0: no lease.", min=0),
    ] = 30.0

    def options(self, place: Place) -> ArchiveOptions:
        from jetspark.lake import ArchiveOptions

        return ArchiveOptions(
            to=place.to,
            format=self.format,
            storage_options=place.options,
            every_s=seconds_of("--every", self.every),
            on_loss=self.on_loss,
            lease_s=self.lease or None,
        )


@archive.command()
@with_groups
def run(target: Target, place: Place, writer: WriterOptions, engine: EngineOptions, servers: Servers = None) -> None:
    """Archive a stream until SIGTERM or Ctrl-C, then commit the messages read so far, and exit with code 0.

    Each message is in the archive exactly once, whenever a process is killed. A second process waits until the first
    one ends. An idle stream commits nothing. A stream that was re-created gets a new table.
    """
    from jetspark.lake import archive_streams

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    connection, streams, options = connection_options(servers), _streams(target), writer.options(place)
    typed = _typed_tables(target, place) if writer.typed else None
    spark = engine.target
    end_signal = EndSignal()
    with _connected(connection) as js, sequence_bar(not writer.once) as show, seldom_collecting():

        def write(engine: ArchiveEngine | None) -> None:
            archive_streams(
                js,
                streams,
                options,
                once=writer.once,
                stop=end_signal.wait,
                engine=engine,
                on_commit=None if typed is None else typed.on_commit,
                on_progress=show,
            )
            if typed is not None and writer.once:
                typed.finish()

        if spark is None:
            write(None)
            return
        # In a thread, since Spark takes Ctrl-C for itself in the main thread, and raises it amid calls to Java.
        with ThreadPoolExecutor(1) as beside:
            beside.submit(_on_spark, spark, connection, write).result()


def _typed_tables(target: str, place: Place) -> TypedTables:
    """The typed tables of an application, brought to the position of the archive.

    Raises:
        ConfigError: The target is a stream.
    """
    if ":" not in target:
        raise ConfigError(
            f"--typed with the stream {target!r}: expected an application, MODULE:APP, which has the types"
        )
    from jetspark.app.archive import TypedTables

    app = load_app(target)
    typed = TypedTables(app.catalogue, app.spec.stream, place.to, storage_options=place.options)
    typed.catch_up()
    return typed


def _on_spark(target: SparkTarget, connection: dict[str, Any], write: Callable[[ArchiveEngine], None]) -> None:
    from jetspark.cli.run_spark import spark_options
    from jetspark.spark import SparkArchiver, session

    spark = session("jetspark-archive", master=target.master, py_files=target.py_files)
    try:
        write(SparkArchiver(spark, **spark_options(connection)))
    finally:
        spark.stop()


@archive.command()
@with_groups
def ls(
    *,
    stream: Annotated[str | None, typer.Option("--stream", help="Only tables of this stream.")] = None,
    place: Place,
    output: Output,
) -> None:
    """List the tables of an archive, and how many sequences each is behind its stream, if a server can be reached."""
    tables = [each for each in place.tables() if stream in (None, each.identity.stream)]
    with ExitStack() as resources:
        js = None
        with suppress(NetworkError):
            js = resources.enter_context(_connected(connection_options(output.servers)))
        rows = [
            _listed(table, snapshot, _behind(js, snapshot.position))
            for table in tables
            if (snapshot := table.snapshot()) is not None
        ]
    if output.as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    shown = TerminalTable("STREAM", "CREATED", "FORMAT", "FIRST", "NEXT", "ROWS", "BYTES", "FILES", "BEHIND")
    for each in rows:
        shown.add(*(str(value) for name, value in each.items() if name != "uri"))
    shown.end()
    typer.echo(f"{len(rows)} tables")


@archive.command()
@with_groups
def verify(
    target: Target,
    *,
    full: Annotated[bool, typer.Option("--full", help="Read the sequences of all rows.")] = False,
    against_stream: Annotated[
        bool, typer.Option("--against-stream", help="Compare the messages that the stream still has with their rows.")
    ] = False,
    place: Place,
    output: Output,
) -> None:
    """Prove that each sequence is in the archive once, or known to be deleted or lost; exit code 3 if not.

    The statistics of the table are the proof where they add up; rows are read where they do not.
    """
    from jetspark.lake import ArchiveVerification, ArchiveVerifyOptions, verify_archive

    options = ArchiveVerifyOptions(full=full)
    tables = place.tables(_streams(target))

    def work(against: JetStream | None, tables: Sequence[ArchiveTable]) -> list[ArchiveVerification]:
        return _each(
            tables, output, lambda table, show: verify_archive(table, options, against=against, on_progress=show)
        )

    if against_stream:
        with _connected(connection_options(output.servers)) as js:
            found = work(js, _present(js, tables))
    else:
        found = work(None, tables)
    if not all(each.is_complete for each in found):
        raise typer.Exit(EXIT_DIFFERENCE)


@archive.command()
@with_groups
def trim(
    target: Target,
    *,
    keep: Annotated[
        str,
        typer.Option("--keep", metavar="TIME", help="The stream keeps messages that are younger, such as 7d or 12h."),
    ] = "7d",
    ignore_consumers: Annotated[
        bool,
        typer.Option("--ignore-consumers", help="Also remove messages that a consumer has not acknowledged."),
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Remove them; without --yes they are only compared and counted.")
    ] = False,
    place: Place,
    output: Output,
) -> None:
    """Remove messages from the stream that are in the archive, each compared with its row. Exit code 3 if one differs.

    The trim ends before the first message that the stream still needs: an unacknowledged one, a timer, or the state of
    a subject.
    """
    from jetspark.lake import TrimOptions, trim_archive

    options = TrimOptions(keep_s=seconds_of("--keep", keep), ignore_consumers=ignore_consumers, dry_run=not yes)
    tables = place.tables(_streams(target))
    with _connected(connection_options(output.servers)) as js:
        found = _each(
            _present(js, tables), output, lambda table, show: trim_archive(js, table, options, on_progress=show)
        )
    if not all(each.is_verified for each in found):
        raise typer.Exit(EXIT_DIFFERENCE)
    if not yes and not output.as_json and any(each.removed for each in found):
        typer.echo("--yes removes them")


@archive.command()
@with_groups
def compact(
    target: Target,
    *,
    remove_after: Annotated[
        str,
        typer.Option(
            "--remove-after", metavar="TIME", help="Age from which files that are not in the table are removed."
        ),
    ] = "7d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")] = False,
    place: Place,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Merge the small files of each day, and remove old files that are not in the table. An archiver may run.

    Each merged file is compared with the files that it replaces, then one commit swaps them. The replaced files are
    removed later, because readers of older versions of the table need them.
    """
    from jetspark.lake import CompactOptions, compact_archive

    options = CompactOptions(remove_after_s=seconds_of("--remove-after", remove_after), dry_run=dry_run)
    _each(
        place.tables(_streams(target)),
        Output(as_json=json_),
        lambda table, show: compact_archive(table, options, on_progress=show),
    )


@archive.command()
@with_groups
def restore(
    stream: Annotated[str, typer.Argument(metavar="STREAM", help="The archived stream.")],
    *,
    into: Annotated[
        str,
        typer.Option("--into", metavar="STREAM", help="A stream for restored messages only; it needs allow_atomic."),
    ],
    subject: Annotated[
        str, typer.Option("--subject", help="The subject of restored messages, such as 'restored.{subject}'.")
    ] = "{subject}",
    from_seq: Annotated[int | None, typer.Option("--from-seq", help="The first sequence.")] = None,
    to_seq: Annotated[int | None, typer.Option("--to-seq", help="The last sequence.")] = None,
    created: Annotated[
        str | None, typer.Option("--created", help="Which stream of this name, if several were archived: see ls.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count the messages.")] = False,
    place: Place,
    output: Output,
) -> None:
    """Publish archived messages into another stream, with their original stream, sequence and time in headers.

    After an interruption, the same command continues: the target stream says how far it is. No message is published
    twice.
    """
    from jetspark.lake import RestoreOptions, restore_archive

    tables = [each for each in place.tables([stream]) if created in (None, each.identity.created)]
    if len(tables) != 1:
        known = ", ".join(each.identity.created for each in place.tables([stream]))
        raise ConfigError(
            f"--created {created or ''}: streams named {stream!r} were created at {known}; give one of them"
        )
    end = None if to_seq is None else to_seq + 1
    options = RestoreOptions(into=into, subject=subject, start=from_seq, end=end, dry_run=dry_run)
    with _connected(connection_options(output.servers)) as js:
        _each(tables, output, lambda table, show: restore_archive(js, table, options, on_progress=show))


def seconds_of(option: str, text: str) -> float:
    """A time such as 60s, 5m, 12h or 7d.

    Raises:
        ConfigError: The text is something else.
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"{option} {text}: expected a time such as 60s, 5m, 12h or 7d")
    return float(match[1]) * _UNITS[match[2]]


def _streams(target: str) -> list[str]:
    """The streams of a target: of an application its events and its dead letters, which nothing else can replace."""
    if ":" not in target:
        return [target]
    from jetspark.app.topology.names import dead_letter_stream

    app = load_app(target)
    declared = {each.name for each in app.topology().streams}
    return [app.spec.stream, *declared.intersection([dead_letter_stream(app.name)])]


@contextmanager
def _connected(connection: dict[str, Any]) -> Iterator[JetStream]:
    from jetspark.blocking import connect

    with connect(**connection) as client:
        yield client.jetstream()


def _present(js: JetStream, tables: Sequence[ArchiveTable]) -> list[ArchiveTable]:
    """The tables of the present streams, without those of earlier streams of the same names.

    Raises:
        StreamNotFound: A stream does not exist.
        ConfigError: None of the tables is of a present stream.
    """
    from jetspark.state.scan import head_of

    found = [
        each for each in tables if head_of(js.stream(each.identity.stream).info()).created == each.identity.created
    ]
    if not found:
        raise ConfigError(f"the archive has {tables[0].identity}, and the stream was re-created since then")
    return found


def _each(
    tables: Sequence[ArchiveTable], output: Output, work: Callable[[ArchiveTable, Callable[[int, int], None]], R]
) -> list[R]:
    """Work on tables, one after the other, with a progress bar; print each result, as JSON in an array."""
    results = []
    for table in tables:
        name = table.identity.stream
        with interrupt_message(lambda: "it is safe to begin again"), sequence_bar(output.as_json) as show:
            results.append(work(table, functools.partial(show, name)))
        if not output.as_json:
            typer.echo(str(results[-1]))
    if output.as_json:
        typer.echo(json.dumps([each.to_dict() for each in results], indent=2))
    return results


def _listed(table: ArchiveTable, snapshot: Snapshot, behind: int | str) -> dict[str, Any]:
    position = snapshot.position
    return {
        "stream": position.identity.stream,
        "created": position.identity.created,
        "format": table.format,
        "first": position.first,
        "next": position.next,
        "rows": sum(each.rows for each in snapshot.files),
        "bytes": sum(each.size_bytes for each in snapshot.files),
        "files": len(snapshot.files),
        "behind": behind,
        "uri": table.uri,
    }


def _behind(js: JetStream | None, position: ArchivePosition) -> int | str:
    """Sequences that the archive lacks; or why it can lack none."""
    from jetspark.state.scan import head_of

    if js is None:
        return "-"
    identity = position.identity
    try:
        head = head_of(js.stream(identity.stream).info())
    except StreamNotFound:
        return "deleted"
    return head.next - position.next if head.created == identity.created else "re-created"
