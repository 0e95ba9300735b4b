"""``jetspark rebuild`` and ``verify``: the states of a projection from its history, and compared with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from jetspark.cli.apps import EXIT_DIFFERENCE, AppName, with_server
from jetspark.cli.bars import interrupt_message, job_bar
from jetspark.cli.engine_options import EngineOptions
from jetspark.cli.option_groups import JobOptions, OlderEvents, Output, check_combination
from jetspark.core.gc_tuning import seldom_collecting
from jetspark.errors import ConfigError

__all__ = ["rebuild", "verify"]

# A verification prints this many keys; --json has a thousand.
MAX_SHOWN = 20

Projection = Annotated[str, typer.Argument(metavar="PROJECTION", help="The projection's name in the application.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class RebuildChoice:
    """The kind of rebuild, and the use of the new bucket."""

    verify: Annotated[bool, typer.Option("--verify", help="Compare the new bucket with a second, fresh fold.")] = False
    swap: Annotated[bool, typer.Option("--swap", help="Switch the projection to the new bucket.")] = False
    drop_old: Annotated[bool, typer.Option("--drop-old", help="Remove the old bucket after the swap.")] = False
    key: Annotated[
        list[str] | None,
        typer.Option(
            "--key", help="Repair only this key (with windows KEY.WINDOW) in the bucket in use; may be repeated."
        ),
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would change, and write nothing.")] = False
    drop: Annotated[
        str | None,
        typer.Option(
            "--drop",
            metavar="ID",
            help="Only remove the bucket of this rebuild, which is not in use; see jetspark replays.",
        ),
    ] = None
    from_bucket: Annotated[
        str | None,
        typer.Option(
            "--from-bucket",
            metavar="BUCKET",
            help="Begin with the states of this bucket, for streams that no longer have their first events.",
        ),
    ] = None

    def check(self, engine: EngineOptions, job: JobOptions) -> None:
        """
        Raises:
            ConfigError: Options exclude each other, or one needs another.
        """
        fold = {
            "--verify": self.verify,
            "--swap": self.swap,
            "--drop-old": self.drop_old,
            "--from-bucket": self.from_bucket is not None,
            "--resume": job.resume is not None,
        }
        key, spark = {"--key": bool(self.key)}, {"--engine spark": engine.target is not None}
        if self.drop is not None:
            rest = {"--dry-run": self.dry_run, **spark, "--rate": job.rate is not None}
            check_combination("--drop", key | fold | rest, "it only removes a bucket")
        if self.dry_run:
            check_combination("--dry-run", key | fold, "it writes nothing")
        if self.key:
            check_combination("--key", fold | spark, "it repairs keys in the bucket in use")
        if self.drop_old and not self.swap:
            raise ConfigError("--drop-old needs --swap")
        if self.from_bucket is not None:
            given = {"--verify": self.verify, "--resume": job.resume is not None}
            check_combination("--from-bucket", given, "the copied states have no history here, and are copied once")


def rebuild(
    app: AppName,
    projection: Projection,
    choice: RebuildChoice,
    engine: EngineOptions,
    older: OlderEvents,
    job: JobOptions,
    output: Output,
) -> None:
    """Fold the whole history of a projection into a bucket beside the live one, and optionally switch to it.

    The live bucket is not touched before the swap, and live workers may run. With --key, single keys are folded again
    from their first event, and written to the bucket in use, also if they are parked. With --from-bucket, the states of
    a bucket of this version are copied, and the events after its position folded onto them. After an interruption,
    --resume continues.
    """
    from jetspark.app import replay

    choice.check(engine, job)
    servers, drop, rate = output.servers, choice.drop, job.rate
    if drop is not None:
        output.print(with_server(app, servers, lambda js, it: replay.drop_rebuild(js, it, projection, drop)))
        return
    if choice.key:
        keys = choice.key
        with job_bar(output.as_json) as show:
            repaired = with_server(
                app,
                servers,
                lambda js, it: replay.repair_keys(
                    js, it, projection, keys, rate=rate, on_progress=show, archive=older.root
                ),
            )
        output.print(repaired)
        return
    if choice.dry_run:
        with engine.started(app, servers, projection, older.root) as spark, seldom_collecting():
            preview = with_server(
                app,
                servers,
                lambda js, it: replay.preview_rebuild(js, it, projection, rate=rate, engine=spark, archive=older.root),
            )
        output.print(preview)
        return
    _fold(app, projection, choice, engine, older, job, output)


def _fold(
    app: str,
    projection: str,
    choice: RebuildChoice,
    engine: EngineOptions,
    older: OlderEvents,
    job: JobOptions,
    output: Output,
) -> None:
    """Fold into a new bucket, and use it as the options say."""
    from jetspark.app import replay

    given = {
        "--verify": choice.verify,
        "--swap": choice.swap,
        "--drop-old": choice.drop_old,
        "--engine spark": engine.engine == "spark",
    }
    again = " ".join([f"jetspark rebuild {app} {projection}", *(name for name, is_given in given.items() if is_given)])
    again += str(older)
    options = replay.RebuildOptions(
        check=choice.verify,
        swap=choice.swap,
        drop_old=choice.drop_old,
        rate=job.rate,
        resume=job.resume,
        from_bucket=choice.from_bucket,
    )
    servers, archive = output.servers, older.root
    with (
        engine.started(app, servers, projection, archive) as spark,
        job_bar(output.as_json, again) as show,
        seldom_collecting(),
    ):
        done = with_server(
            app,
            servers,
            lambda js, it: replay.rebuild(js, it, projection, options, on_progress=show, engine=spark, archive=archive),
        )
    output.print(done)


def verify(
    app: AppName,
    projection: Projection,
    *,
    to_seq: Annotated[
        int | None, typer.Option("--to-seq", help="The sequence to compare at; by default the end of the stream.")
    ] = None,
    engine: EngineOptions,
    older: OlderEvents,
    rate: Annotated[float | None, typer.Option("--rate", help="Events each second, at most.", min=0.001)] = None,
    output: Output,
) -> None:
    """Compare the bucket of a projection with a fresh fold of its history; exit code 3 if they differ.

    Live workers may run: keys that are beyond the boundary are compared at the sequence of their value.
    """
    from jetspark.app import replay

    options = replay.VerifyOptions(to_seq=to_seq, rate=rate)
    with engine.started(app, output.servers, projection, older.root) as spark, interrupt_message(), seldom_collecting():
        found = with_server(
            app,
            output.servers,
            lambda js, it: replay.verify(js, it, projection, options, engine=spark, archive=older.root),
        )
    output.print(found)
    if not output.as_json:
        for each in found.differences[:MAX_SHOWN]:
            typer.echo(f"  {each}")
        if found.difference_count > MAX_SHOWN:
            typer.echo(f"  and {found.difference_count - MAX_SHOWN} more (--json)")
    if not found.is_equal:
        raise typer.Exit(EXIT_DIFFERENCE)
