"""Publishes archived messages into a stream of their own, in order, each exactly once.

The target stream is its own record of the progress: each message has its original stream and sequence in its headers,
so the last message of the target says where to continue. Messages are stored in atomic batches, and each batch is
conditional on the target's last sequence. So a batch is stored once or not at all, whenever a process is killed, and of
two processes that restore into the same stream only one stores a message.

Headers that mean something to the server, such as ``Nats-Msg-Id`` or ``Nats-Rollup``, would act a second time. They are
renamed with the prefix of the others.
"""

from __future__ import annotations

import base64
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa

from jetspark.blocking import JetStream
from jetspark.core.backoff import Backoff
from jetspark.core.headers import Headers, decode
from jetspark.core.subjects import matches
from jetspark.errors import ConfigError, InvalidHeader, JetSparkError, MessageNotFound, ProtocolError, WrongLastSequence
from jetspark.jetstream.info import StoredMessage, StreamInfo
from jetspark.jetstream.publishing import Expect
from jetspark.jetstream.wire import parse_time, time_from_ns
from jetspark.lake.archive import ArchiveTable
from jetspark.lake.position import StreamIdentity
from jetspark.lake.rows import messages_of
from jetspark.lake.verification import OnProgress, last_commit, rows_between
from jetspark.state.patience import Attempts

__all__ = ["RESTORED", "Restoration", "RestoreOptions", "restore_archive"]

_logger = logging.getLogger("jetspark.lake")

RESTORED = "Jetspark-Restored-"
"""Before the names of the headers of a restored message."""
STREAM, CREATED, SEQUENCE = f"{RESTORED}Stream", f"{RESTORED}Created", f"{RESTORED}Sequence"
TIME, BLOCK = f"{RESTORED}Time", f"{RESTORED}Headers"
_RENAMED = ("nats-", RESTORED.lower())
# Half of what a server accepts by default.
BATCH_MESSAGES = 500
BATCH_BYTES = 4 << 20
PATIENCE_S = 60.0
PAUSE = Backoff(first_s=0.1, max_s=5.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """Options of :func:`restore_archive`."""

    into: str
    """The stream to publish into. It needs `allow_atomic`, and has only restored messages."""
    subject: str = "{subject}"
    """The subject of restored messages; ``{subject}`` is the original one."""
    start: int | None = None
    """The first sequence; by default the archive's."""
    end: int | None = None
    """The end of the sequences, exclusive; by default the archive's."""
    dry_run: bool = False
    """Only count."""

    def __post_init__(self) -> None:
        if "{subject}" not in self.subject:
            raise ConfigError(f"subject={self.subject!r}: expected {{subject}} in it, such as 'restored.{{subject}}'")


@dataclass(slots=True, kw_only=True)
class Restoration:
    """The result of a restore, or with ``dry_run`` its plan."""

    stream: str
    created: str
    into: str
    dry_run: bool
    start: int
    """The first sequence; after an interruption, the one to continue with."""
    end: int
    restored: int = 0
    """Messages published by this call, or to be published."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.start >= self.end:
            return f"stream {self.into}: everything is there already"
        what = "would be restored" if self.dry_run else "restored"
        return (
            f"{self.restored} messages of stream {self.stream}, sequences {self.start}-{self.end - 1}, {what} "
            f"into stream {self.into}"
        )


def restore_archive(
    js: JetStream, table: ArchiveTable, options: RestoreOptions, *, on_progress: OnProgress | None = None
) -> Restoration:
    """Publish the messages of a range of an archive into another stream. Called again, it continues.

    Args:
        on_progress: Called with a sequence of the archive, and the last one.

    Raises:
        ConfigError: The target stream cannot be used, or the table does not exist.
        StreamNotFound: The target stream does not exist.
        ArchiveDamaged: A file is missing or cannot be read.
        RequestTimeout: The server was away for a minute.
    """
    snapshot = last_commit(table)
    position, files = snapshot.position, snapshot.files
    target = _Target(js, table.identity, options)
    start = max(position.first, options.start or 0, target.next)
    end = max(start, min(position.next, options.end or position.next))
    done = Restoration(
        stream=position.identity.stream,
        created=position.identity.created,
        into=options.into,
        dry_run=options.dry_run,
        start=start,
        end=end,
    )
    if options.dry_run:
        done.restored = sum(rows.num_rows for rows in rows_between(table, files, start, end))
        return done
    before, attempts = target.last, Attempts(PATIENCE_S, PAUSE)
    while True:
        try:
            target.look()
            for batch in _batches(rows_between(table, files, max(start, target.next), end)):
                target.store(batch)
                attempts.progress(time.monotonic())
                if on_progress is not None:
                    on_progress(target.next, end)
            done.restored = target.last - before
            return done
        except JetSparkError as error:
            # The outcome of a batch is unknown, or another process restores as well. The target shows which.
            wait_s = attempts.wait_s(time.monotonic())
            if wait_s is None or not (error.may_pass or isinstance(error, WrongLastSequence)):
                raise
            _logger.info("restoring into stream %s: %s; trying again", options.into, error)
        time.sleep(wait_s)


def _batches(batches: Iterator[pa.RecordBatch]) -> Iterator[list[StoredMessage]]:
    """The messages of rows, as many at a time as are stored together."""
    batch: list[StoredMessage] = []
    size = 0
    for rows in batches:
        for message in messages_of(rows):
            batch.append(message)
            size += len(message.data) + len(message.raw_headers or b"")
            if len(batch) >= BATCH_MESSAGES or size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


class _Target:
    """The stream that messages are restored into."""

    def __init__(self, js: JetStream, identity: StreamIdentity, options: RestoreOptions) -> None:
        self._js, self._identity, self._into, self._subject = js, identity, options.into, options.subject
        if options.into == identity.stream and self._info().created == parse_time(identity.created):
            raise ConfigError(f"into={options.into!r}: expected another stream than the archived one")
        self.last = 0
        """The last sequence of the target."""
        self.next = 0
        """The first sequence of the archive that the target does not have."""
        self.look()

    def look(self) -> None:
        """Read how far the target is.

        Raises:
            ConfigError: It has other messages than those of this archive.
        """
        info = self._info()
        if not info.config.allow_atomic:
            raise ConfigError(f"stream {self._into!r}: set allow_atomic, so that a batch is stored once or not at all")
        self._subjects = info.config.subjects or [self._into]
        self.last = info.state.last_sequence
        if not self.last:
            return
        identity = self._identity
        try:
            headers = self._js.stream(self._into).get_message(self.last, direct=False).headers
        except MessageNotFound:
            headers = Headers()
        if (headers.get(STREAM), headers.get(CREATED)) != (identity.stream, identity.created):
            raise ConfigError(
                f"stream {self._into!r}: its last message, {self.last}, was not restored from stream "
                f"{identity.stream!r}, created {identity.created}, so nothing says how far a restore is; restore into "
                "a new stream"
            )
        self.next = int(headers[SEQUENCE]) + 1

    def store(self, messages: list[StoredMessage]) -> None:
        """Store messages after the last message of the target.

        Raises:
            WrongLastSequence: Another program stored a message there.
        """
        with self._js.atomic_batch() as batch:
            expect: Expect | None = Expect(stream=self._into, last_sequence=self.last)
            for message in messages:
                batch.add(self._subject_of(message), message.data, headers=self._headers(message), expect=expect)
                expect = None
        assert batch.ack is not None
        self.last, self.next = batch.ack.sequence, messages[-1].sequence + 1

    def _info(self) -> StreamInfo:
        return self._js.stream(self._into).info()

    def _subject_of(self, message: StoredMessage) -> str:
        subject = self._subject.replace("{subject}", message.subject)
        if not any(matches(each, subject) for each in self._subjects):
            raise ConfigError(
                f"sequence {message.sequence}: stream {self._into!r} does not store subject {subject!r}, but "
                f"{', '.join(self._subjects)}; give it the subject, or map the subjects with --subject"
            )
        return subject

    def _headers(self, message: StoredMessage) -> Headers:
        identity, time_ns = self._identity, message.time_ns or 0
        found: dict[str, str | list[str]] = {
            STREAM: identity.stream,
            CREATED: identity.created,
            SEQUENCE: str(message.sequence),
            TIME: f"{time_from_ns(time_ns):%Y-%m-%dT%H:%M:%S}.{time_ns % 10**9:09}Z",
        }
        try:
            own = decode(message.raw_headers) if message.raw_headers is not None else Headers()
            values: dict[str, list[str]] = {}
            for name, value in own.multi_items():
                values.setdefault(f"{RESTORED}{name}" if name.lower().startswith(_RENAMED) else name, []).append(value)
            return Headers({**found, **values})
        except (InvalidHeader, ProtocolError):
            # The server stores any block that a publisher writes, and a client sends only correct ones.
            return Headers({**found, BLOCK: base64.b64encode(message.raw_headers or b"").decode()})
