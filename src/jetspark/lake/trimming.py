"""Removes messages from a stream that are verified in its archive.

Every message that a trim would remove is compared with its row, byte for byte, and the coverage of the archive up to
there is verified. Then the stream is purged up to a sequence. The trim ends before the first message that the stream
needs: a message without its acknowledgement by a consumer, a pending timer, or the state of a subject.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, fields
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from jetspark.blocking import JetStream
from jetspark.blocking.steps import ProcedureRunner
from jetspark.errors import ConfigError, StreamRecreated
from jetspark.jetstream.config import StreamConfig
from jetspark.lake.archive import ArchiveTable
from jetspark.lake.position import StreamIdentity
from jetspark.lake.verification import (
    ArchiveVerification,
    ArchiveVerifyOptions,
    OnProgress,
    last_commit,
    verify_archive,
)
from jetspark.publish.steps import Connect, Procedure
from jetspark.state.losses import NO_LIMIT_PER_SUBJECT, holds_passing_messages
from jetspark.state.scan import Head, head_of, sequence_at

__all__ = ["Trim", "TrimOptions", "trim_archive"]

# A timer, and a message that replaced the others of its subject.
_NEEDED = {"Nats-Schedule": "a timer", "Nats-Rollup": "the state"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrimOptions:
    """Options of :func:`trim_archive`."""

    keep_s: float = 7 * 86_400.0
    """The stream keeps messages that are younger, archived or not."""
    ignore_consumers: bool = False
    """Also remove messages that consumers have not acknowledged; they will not get them."""
    dry_run: bool = False
    """Only verify, and say what would be removed."""

    def __post_init__(self) -> None:
        if self.keep_s < 0:
            raise ConfigError(f"keep_s={self.keep_s:g}: expected 0 or more")


@dataclass(slots=True, kw_only=True)
class Trim:
    """The result of a trim, or with ``dry_run`` its plan."""

    stream: str
    dry_run: bool
    first: int
    """The stream's first sequence before the trim."""
    limit: int
    """Messages before this sequence are removed."""
    reason: str
    """The reason why not more is removed."""
    verification: ArchiveVerification | None = None
    """The verification of the removed messages; None without any."""
    removed: int = 0
    """Messages that were removed, or would be."""

    @property
    def is_verified(self) -> bool:
        """False if the archive is not complete; nothing was removed then."""
        return self.verification is None or self.verification.is_complete

    def to_dict(self) -> dict[str, Any]:
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        verification = None if self.verification is None else self.verification.to_dict()
        return found | {"verified": self.is_verified, "verification": verification}

    def __str__(self) -> str:
        if self.verification is None:
            return f"stream {self.stream}: nothing to remove before sequence {self.limit}: {self.reason}"
        if not self.is_verified:
            return f"{self.verification}\nstream {self.stream}: nothing removed, because the archive is not complete"
        what = f"{self.removed} messages before sequence {self.limit} {'would be ' if self.dry_run else ''}removed"
        return f"{self.verification}\nstream {self.stream}: {what}; kept from there on: {self.reason}"


def trim_archive(
    js: JetStream,
    table: ArchiveTable,
    options: TrimOptions | None = None,
    *,
    on_progress: OnProgress | None = None,
) -> Trim:
    """Remove the archived messages of a stream, up to the first message that the stream needs.

    Nothing is removed if the archive is not complete, or differs from the stream: see ``is_verified`` of the result.

    Raises:
        ConfigError: The table does not exist, or the messages of the stream are work or state, and not history.
        StreamRecreated: The table is of an earlier stream of this name.
    """
    options = options or TrimOptions()
    snapshot = last_commit(table)
    identity, runner = table.identity, ProcedureRunner(js)
    head, config, limit = runner.run(_look(identity.stream, options.keep_s))
    _check(head, config, identity)
    reason = f"younger than {options.keep_s:g} s" if limit < head.next else "the end of the stream"
    if limit > snapshot.position.next:
        limit, reason = snapshot.position.next, "not archived yet"
    if not options.ignore_consumers:
        for each in js.stream(identity.stream).consumers():
            at = each.delivered if each.config.ack_policy == "none" else each.ack_floor
            if (each.pending or each.ack_pending) and at.stream_sequence + 1 < limit:
                limit, reason = at.stream_sequence + 1, f"consumer {each.name} has not acknowledged it"
    trim = Trim(stream=identity.stream, dry_run=options.dry_run, first=head.first, limit=limit, reason=reason)
    if limit <= head.first:
        return trim
    needed = _Needed(is_wanted=holds_passing_messages(config))
    trim.verification = verify_archive(
        table,
        ArchiveVerifyOptions(full=True, start=head.first, end=limit),
        against=js,
        on_progress=on_progress,
        on_compared=needed.look,
    )
    if needed.found is not None:
        trim.limit, trim.reason = needed.found
    trim.removed = needed.before
    if trim.is_verified and not options.dry_run and trim.limit > head.first:
        runner.run(_purge(identity, trim.limit))
    return trim


def _look(stream: str, keep_s: float) -> Procedure[tuple[Head, StreamConfig, int]]:
    """The stream, and the sequence of its first message that is to stay because of its age."""
    api = yield Connect()
    info = yield from api.stream_info(stream)
    head, now = head_of(info), info.timestamp or datetime.datetime.now(datetime.UTC)
    return head, info.config, (yield from sequence_at(api, head, now - datetime.timedelta(seconds=keep_s)))


def _purge(identity: StreamIdentity, limit: int) -> Procedure[None]:
    api = yield Connect()
    _check_created(head_of((yield from api.stream_info(identity.stream))), identity)
    yield from api.purge_stream(identity.stream, up_to_sequence=limit - 1)


def _check(head: Head, config: StreamConfig, identity: StreamIdentity) -> None:
    _check_created(head, identity)
    if config.retention not in (None, "limits"):
        raise ConfigError(
            f"stream {config.name!r} has {config.retention} retention: its messages are work to be done, and the "
            "server removes them"
        )
    if 0 < (config.max_messages_per_subject or 0) < NO_LIMIT_PER_SUBJECT:
        raise ConfigError(
            f"stream {config.name!r} has max_messages_per_subject: its messages are the state of their subjects, and a "
            "trim would remove it"
        )


def _check_created(head: Head, identity: StreamIdentity) -> None:
    if head.created != identity.created:
        raise StreamRecreated(identity.stream, identity.created, head.created, "trim with the present stream's archive")


class _Needed:
    """Looks for the first message that the stream needs, and counts those before it."""

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self.before = 0
        self.found: tuple[int, str] | None = None
        """Its sequence, and the reason."""

    def look(self, rows: pa.Table) -> None:
        if self.found is not None:
            return
        at: list[tuple[int, str]] = []
        if self._is_wanted:
            for header, what in _NEEDED.items():
                has = pc.is_valid(pc.map_lookup(rows.column("headers"), pa.scalar(header), "first"))
                at += [(index, what) for index in pc.indices_nonzero(has)[:1].to_pylist()]
        if at:
            index, what = min(at)
            subject = rows.column("subject")[index].as_py()
            self.found = rows.column("sequence")[index].as_py(), f"{what} of subject {subject}"
        self.before += min(at)[0] if at else len(rows)
