"""``jetspark replay``, ``rebuild``, ``verify`` and ``replays``: projections, handlers, and their history."""

from __future__ import annotations

import datetime
import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import typer

from jetspark.cli.apps import EXIT_DIFFERENCE, AppName, AsJson, Servers, load_app, with_server
from jetspark.cli.bars import sequence_bar
from jetspark.cli.spark_place import Master, PyFiles, SparkPlace
from jetspark.core.garbage import seldom_collecting
from jetspark.errors import ConfigError

if TYPE_CHECKING:
    from jetspark.app.replay import (
        HandlerReplayPlan,
        HandlerReplayRecord,
        RebuildPreview,
        ReplayPlan,
        ReplayRecord,
        ReplayRequest,
    )
    from jetspark.spark import ReplayEngine

__all__ = ["Engine", "list_replays", "moment_of", "rebuild_projection", "replay_projection", "verify_projection"]


class _Told(Protocol):
    """What a command did, for people and as JSON."""

    def to_dict(self) -> dict[str, Any]: ...


# A verification names this many keys; --json has a thousand.
MAX_SHOWN = 20

Projection = Annotated[str, typer.Argument(metavar="PROJECTION", help="Its name, as the application declares it.")]
Rate = Annotated[float | None, typer.Option("--rate", help="Events each second, at most.", min=0.001)]
Resume = Annotated[str | None, typer.Option("--resume", metavar="ID", help="Go on with one that was interrupted.")]
RepairedKeys = Annotated[
    list[str] | None,
    typer.Option(
        "--key", help="Repair only this key, with windows KEY.WINDOW, in the bucket that is in use; may be repeated."
    ),
]
DroppedRebuild = Annotated[
    str | None,
    typer.Option(
        "--drop",
        metavar="ID",
        help="Only remove the bucket of this rebuild, which is not in use; see jetspark replays.",
    ),
]
FromBucket = Annotated[
    str | None,
    typer.Option(
        "--from-bucket",
        metavar="BUCKET",
        help="Begin with the states of this bucket, for streams that no longer have their first events.",
    ),
]
Engine = Annotated[Literal["live", "spark"], typer.Option("--engine", help="Who folds: this process, or Spark.")]


def replay_projection(
    app: AppName,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of a projection or a handler of the application.")],
    from_seq: Annotated[int | None, typer.Option("--from-seq", help="The first sequence of the stream.")] = None,
    to_seq: Annotated[int | None, typer.Option("--to-seq", help="The last sequence of the stream.")] = None,
    since: Annotated[str | None, typer.Option("--since", help="Events stored at or after this time.")] = None,
    until: Annotated[str | None, typer.Option("--until", help="Events stored before this time.")] = None,
    key: Annotated[
        list[str] | None, typer.Option("--key", help="Only events of this key (with windows KEY.WINDOW); repeatable.")
    ] = None,
    subject: Annotated[str | None, typer.Option("--subject", help="Only events on this subject, or filter.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    effects: Annotated[
        bool, typer.Option("--effects", help="Of a handler: carry out its effects, which are held back otherwise.")
    ] = False,
    engine: Engine = "live",
    master: Master = None,
    py_files: PyFiles = None,
    rate: Rate = None,
    resume: Resume = None,
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Give the keys of a range of events those events that their state lacks, or have a handler handle them again.

    Live workers may go on. On state that is up to date nothing changes: a changed fold needs `jetspark rebuild`. Says
    first what it will read, which keys, and whether all of it is still there. If it is interrupted, --resume goes on.

    A handler is called with the events of the range, and its effects are held back and counted, unless --effects is
    given. Its live consumer is not touched, and no dead letters are written. Exit code 3 if an event failed.
    """
    from jetspark.app.replay import ReplayRequest

    request = ReplayRequest(
        from_seq=from_seq,
        to_seq=to_seq,
        since=moment_of("--since", since),
        until=moment_of("--until", until),
        keys=tuple(key or ()),
        subject=subject,
    )
    if resume is not None:
        _check_resume(has_range=request != ReplayRequest(), is_dry=dry_run)
    replay = _Replay(
        app=app,
        name=name,
        request=request,
        is_dry=dry_run,
        rate=rate,
        resume=resume,
        servers=servers,
        is_json=as_json,
    )
    if replay.is_of_handler():
        if engine != "live":
            raise ConfigError("--engine spark: expected with a projection; handlers are called by this process")
        replay.to_handler(effects=effects)
    elif effects:
        raise ConfigError("--effects: expected with a handler; a projection has none")
    else:
        replay.to_projection(SparkPlace.of(engine, master, py_files))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replay:
    """What ``jetspark replay`` was asked for."""

    app: str
    name: str
    request: ReplayRequest
    is_dry: bool
    rate: float | None
    resume: str | None
    servers: str | None
    is_json: bool

    def is_of_handler(self) -> bool:
        """Whether it is the handler, and not the projection, of this name.

        Raises:
            ConfigError: The application has neither.
        """
        declared = load_app(self.app)
        known = sorted({*declared.handlers, *declared.projections})
        if self.name not in known:
            raise ConfigError(
                f"{self.name!r}: app {declared.name!r} has no projection or handler of this name; it has "
                f"{', '.join(known) or 'none'}"
            )
        return self.name in declared.handlers

    def _resuming(self, more: str = "") -> str:
        return f"jetspark replay {self.app} {self.name}{more}"

    def to_handler(self, *, effects: bool) -> None:
        from jetspark.cli.replay_handler import replay_to_handler

        with _bar(self.is_json, self._resuming(" --effects" if effects else "")) as tell:
            done = replay_to_handler(
                self.app,
                self.name,
                self.request,
                self.servers,
                dry_run=self.is_dry,
                effects=effects,
                rate=self.rate,
                resume=self.resume,
                tell_plan=None if self.is_json else self._say_plan,
                tell=tell,
            )
        self._say(done)
        if getattr(done, "failed", 0):
            raise typer.Exit(EXIT_DIFFERENCE)

    def to_projection(self, place: SparkPlace | None) -> None:
        with _spark(place, self.app, self.servers, self.name) as spark:
            self._say(self._planned(spark) if self.is_dry else self._replayed(spark))

    def _planned(self, spark: ReplayEngine | None) -> ReplayPlan:
        from jetspark.app.replay import plan_replay

        return with_server(
            self.app,
            self.servers,
            lambda js, it: plan_replay(js, it, self.name, self.request, rate=self.rate, engine=spark),
        )

    def _replayed(self, spark: ReplayEngine | None) -> ReplayRecord:
        from jetspark.app.replay import ReplayOptions, run_replay

        with _bar(self.is_json, self._resuming(" --engine spark" if spark is not None else "")) as tell:
            return with_server(
                self.app,
                self.servers,
                lambda js, it: run_replay(
                    js,
                    it,
                    self.name,
                    self.request,
                    ReplayOptions(rate=self.rate, resume=self.resume),
                    on_plan=lambda plan: None if self.is_json else self._say_plan(plan),
                    on_progress=tell,
                    engine=spark,
                ),
            )

    def _say_plan(self, plan: HandlerReplayPlan | ReplayPlan) -> None:
        typer.echo(f"{plan}\n")

    def _say(self, done: HandlerReplayPlan | HandlerReplayRecord | ReplayPlan | ReplayRecord) -> None:
        _echo(done, self.is_json)


def rebuild_projection(
    app: AppName,
    projection: Projection,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the new bucket with a second, fresh fold.")] = False,
    swap: Annotated[bool, typer.Option("--swap", help="Make the new bucket that of the projection.")] = False,
    drop_old: Annotated[bool, typer.Option("--drop-old", help="Remove the old bucket after the swap.")] = False,
    key: RepairedKeys = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would change, and write nothing.")] = False,
    drop: DroppedRebuild = None,
    from_bucket: FromBucket = None,
    engine: Engine = "live",
    master: Master = None,
    py_files: PyFiles = None,
    rate: Rate = None,
    resume: Resume = None,
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Fold the whole history of a projection again, into a bucket beside the live one, and swap it in if asked to.

    The live bucket is not touched before the swap, and live workers go on. With --key single keys are folded again from
    their first event, and written where they are: also keys that are parked. With --from-bucket the states of a bucket
    of this version are copied, and the events after its position folded onto them. If it is interrupted, --resume goes
    on.
    """
    from jetspark.app.replay import drop_rebuild, rebuild

    is_to_fold = bool(key or swap or verify or drop_old or resume is not None or from_bucket is not None)
    place = SparkPlace.of(engine, master, py_files)
    if drop is not None:
        if is_to_fold or dry_run or engine != "live" or rate is not None:
            raise ConfigError("--drop: expected without other options; it folds nothing")
        _echo(with_server(app, servers, lambda js, it: drop_rebuild(js, it, projection, drop)), as_json)
    elif dry_run:
        if is_to_fold:
            raise ConfigError(
                "--dry-run: expected without --key, --swap, --verify, --drop-old, --from-bucket and --resume"
            )
        _echo(_preview(app, projection, place, rate, servers), as_json)
    elif key:
        if swap or verify or drop_old or resume is not None or from_bucket is not None or engine != "live":
            others = "--verify, --swap, --drop-old, --from-bucket, --resume and --engine spark"
            raise ConfigError(f"--key: expected without {others}")
        _echo(_repair(app, projection, key, rate, servers, as_json), as_json)
    else:
        options = {"--verify": verify, "--swap": swap, "--drop-old": drop_old, "--engine spark": engine == "spark"}
        given = "".join(f" {option}" for option, is_given in options.items() if is_given)
        again = f"jetspark rebuild {app} {projection}{given}"
        with _spark(place, app, servers, projection) as spark, _bar(as_json, again) as tell, seldom_collecting():
            start = partial(rebuild, check=verify, swap_in=swap, drop_old=drop_old, rate=rate, resume=resume)
            working = partial(start, from_bucket=from_bucket, on_progress=tell, engine=spark)
            _echo(with_server(app, servers, lambda js, it: working(js, it, projection)), as_json)


def _preview(
    app: str, projection: str, place: SparkPlace | None, rate: float | None, servers: str | None
) -> RebuildPreview:
    from jetspark.app.replay import preview_rebuild

    with _spark(place, app, servers, projection) as spark, seldom_collecting():
        return with_server(app, servers, lambda js, it: preview_rebuild(js, it, projection, rate=rate, engine=spark))


def _repair(
    app: str, projection: str, keys: list[str], rate: float | None, servers: str | None, as_json: bool
) -> ReplayRecord:
    from jetspark.app.replay import repair_keys

    with _bar(as_json) as tell:
        return with_server(
            app, servers, lambda js, it: repair_keys(js, it, projection, keys, rate=rate, on_progress=tell)
        )


def verify_projection(
    app: AppName,
    projection: Projection,
    to_seq: Annotated[int | None, typer.Option("--to-seq", help="The boundary; else the end of the stream.")] = None,
    engine: Engine = "live",
    master: Master = None,
    py_files: PyFiles = None,
    rate: Rate = None,
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """Compare the bucket of a projection with a fresh fold of its history; exit code 3 if they differ.

    Live workers may go on: keys that are beyond the boundary are compared at the sequence that their value says.
    """
    from jetspark.app.replay import VerifyOptions, verify

    place = SparkPlace.of(engine, master, py_files)
    with _spark(place, app, servers, projection) as spark, _telling_interrupts(), seldom_collecting():
        found = with_server(
            app,
            servers,
            lambda js, it: verify(js, it, projection, VerifyOptions(to_seq=to_seq, rate=rate), engine=spark),
        )
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        typer.echo(str(found))
        for each in found.differences[:MAX_SHOWN]:
            typer.echo(f"  {each}")
        if found.difference_count > MAX_SHOWN:
            typer.echo(f"  and {found.difference_count - MAX_SHOWN} more (--json)")
    if not found.is_equal:
        raise typer.Exit(EXIT_DIFFERENCE)


def list_replays(
    app: AppName,
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="Only those of this projection or this handler.")] = "*",
    servers: Servers = None,
    as_json: AsJson = False,
) -> None:
    """List the replays, rebuilds and repairs of an application, oldest first."""
    from jetspark.cli.replay_handler import read_all_records

    records = with_server(app, servers, lambda js, declared: read_all_records(js, declared, name))
    if as_json:
        typer.echo(json.dumps([each.to_dict() for each in records], indent=2))
        return
    for each in records:
        typer.echo(f"{each.began[:19]}Z  {each}")
    typer.echo(f"{len(records)} replays")


def moment_of(name: str, text: str | None) -> datetime.datetime | None:
    """The time that an option names.

    Raises:
        ConfigError: It names none.
    """
    if text is None:
        return None
    try:
        return datetime.datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"{name} {text!r}: expected a time such as 2026-03-20T10:14:30Z") from None


def _check_resume(*, has_range: bool, is_dry: bool) -> None:
    """
    Raises:
        ConfigError: More was given than what to go on with.
    """
    if has_range:
        raise ConfigError("--resume: expected without a range, since it goes on with the one that was asked for")
    if is_dry:
        raise ConfigError("--resume: expected without --dry-run; it goes on with what was planned before")


def _echo(done: _Told, as_json: bool) -> None:
    typer.echo(json.dumps(done.to_dict(), indent=2) if as_json else str(done))


@contextmanager
def _spark(place: SparkPlace | None, app: str, servers: str | None, projection: str) -> Iterator[ReplayEngine | None]:
    """The other engine, if it is wanted."""
    if place is None:
        yield None
        return
    from jetspark.app.replay.history import spec_of
    from jetspark.cli.replay_spark import on_spark

    with on_spark(place, app, servers, spec_of(load_app(app).spec, projection).name) as spark:
        yield spark


@contextmanager
def _bar(as_json: bool, again: str = "") -> Iterator[Callable[[ReplayRecord | HandlerReplayRecord], None]]:
    """Shows how far a command is; where that is interrupted, says how to go on.

    Args:
        again: The command that goes on, but for the id; empty if none does.
    """
    latest: list[ReplayRecord | HandlerReplayRecord] = []

    def where() -> str:
        if not latest:
            return "nothing was begun"
        [record] = latest
        kind = "replay" if record.kind == "handler" else record.kind
        done = f"{kind} {record.id} is at {record.at} of {record.first} to {record.last}"
        return f"{done}; to go on: {again} --resume {record.id}" if again else f"{done}; begin anew, which does no harm"

    with _telling_interrupts(where), sequence_bar(as_json) as tell:

        def show(record: ReplayRecord | HandlerReplayRecord) -> None:
            latest[:] = [record]
            tell(f"{record.kind} {record.id}", record.at, record.last)

        yield show


@contextmanager
def _telling_interrupts(where: Callable[[], str] = lambda: "nothing was written") -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"jetspark: interrupted: {where()}", err=True)
        raise typer.Exit(128 + signal.SIGINT) from None
