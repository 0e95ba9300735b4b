"""``jetspark replay`` of a handler, and the records of all replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import typer

from jetspark.cli.apps import with_server

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.app import App
    from jetspark.app.replay import HandlerReplayPlan, HandlerReplayRecord, ReplayRecord, ReplayRequest
    from jetspark.errors import ProtocolError

__all__ = ["read_all_records", "replay_to_handler"]


def replay_to_handler(
    app: str,
    handler: str,
    request: ReplayRequest,
    servers: str | None,
    *,
    dry_run: bool,
    effects: bool,
    rate: float | None,
    resume: str | None,
    tell_plan: Callable[[HandlerReplayPlan], Any] | None,
    tell: Callable[[HandlerReplayRecord], Any],
) -> HandlerReplayPlan | HandlerReplayRecord:
    """What was done, or with ``dry_run`` what would be read; ``tell_plan`` hears that first."""
    from jetspark.app.replay import plan_handler_replay, replay_handler

    if dry_run:
        return with_server(app, servers, lambda js, it: plan_handler_replay(js, it, handler, request, rate=rate))
    return with_server(
        app,
        servers,
        lambda js, it: replay_handler(
            js,
            it,
            handler,
            request,
            effects=effects,
            rate=rate,
            resume=resume,
            on_plan=tell_plan,
            on_progress=tell,
        ),
    )


async def read_all_records(js: JetStream, app: App, name: str) -> list[ReplayRecord | HandlerReplayRecord]:
    """The records of the replays of projections and handlers, oldest first."""
    from jetspark.app.projections.bucket_refs import open_records
    from jetspark.app.replay import read_handler_records, read_records

    found: list[ReplayRecord | HandlerReplayRecord] = []
    if app.projections:
        found += await read_records(await open_records(js, app.name), name, on_unreadable=_tell_unreadable)
    if app.handlers:
        found += await read_handler_records(await js.kv(app.spec.handler_bucket), name, on_unreadable=_tell_unreadable)
    return sorted(found, key=lambda record: (record.began, record.id))


def _tell_unreadable(key: str, error: ProtocolError) -> None:
    typer.echo(f"{key} is left out: {error}", err=True)
