"""Object stores for threads. What they are and what they are asked is in :mod:`jetspark.jetstream.objects`."""

from __future__ import annotations

import datetime
import io
import logging
import os
import uuid
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from typing import Literal, TypeAlias, cast, overload

from jetspark.blocking import clock
from jetspark.blocking.context import Context
from jetspark.blocking.fast import FastPublisher
from jetspark.blocking.ordered import Reading
from jetspark.blocking.publisher import AckFuture
from jetspark.blocking.stream import Stream
from jetspark.core.headers import HeadersLike
from jetspark.core.numbers import seconds, timeout_of
from jetspark.errors import (
    ConnectionLost,
    DigestMismatch,
    JetSparkError,
    JetStreamUnavailable,
    MessageNotFound,
    ObjectNotFound,
    RequestTimeout,
    ServerError,
)
from jetspark.jetstream.features import FAST_INGEST
from jetspark.jetstream.info import StoredMessage
from jetspark.jetstream.kv import check_bucket
from jetspark.jetstream.objects import (
    COMMIT_ATTEMPTS,
    DEFAULT_CHUNK_BYTES,
    FLUSH_EVERY_S,
    LONG_PUT_S,
    READ_ATTEMPTS,
    WINDOW_BYTES,
    BinaryReader,
    BinaryWriter,
    BytesLike,
    Download,
    ObjectInfo,
    ObjectLink,
    ObjectMeta,
    Objects,
    ObjectStoreStatus,
    Progress,
    Upload,
    chunk_subject,
    fast_options,
    info_of_delivery,
    lag_pauses,
    link_to,
    resolve,
    steps,
    watch_options,
    write_chunks,
)
from jetspark.jetstream.operations import Operation
from jetspark.jetstream.ordered import OrderedOptions, Patience
from jetspark.publish.fast_publisher import FastPublisherOptions

__all__ = ["ObjectStore"]

_logger = logging.getLogger("jetspark.blocking")

Source: TypeAlias = BytesLike | os.PathLike[str] | BinaryReader | Iterable[BytesLike]


class ObjectStore:
    """A bucket of objects of any size, each with a name, a digest and metadata.

    An object is visible when all of it is stored, and replaced in one moment. Every read is checked against the digest
    its writer left. Memory stays bounded whatever the size, except where a method returns a whole object.

    Like :class:`JetStream`, what asks the server raises ``ServerError`` when it says no, ``JetStreamUnavailable`` when
    nobody answers for it, and ``RequestTimeout`` when no answer came in time: then
    a write may be stored or not.
    """

    def __init__(self, context: Context, stream: Stream) -> None:
        self._context = context
        self._stream = stream
        self._objects = Objects(context.api, stream.cached_info.config)

    @property
    def bucket(self) -> str:
        return self._objects.name

    # ---- writing -----------------------------------------------------------------------------------------------

    def put(
        self,
        name: str,
        source: Source,
        *,
        description: str | None = None,
        headers: HeadersLike | None = None,
        metadata: Mapping[str, str] | None = None,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        timeout: float | None = None,
    ) -> ObjectInfo:
        """Store an object under a name, in place of what was there; returns when all of it is stored.

        When this raises, the name has what it had before, and the chunks that were stored are removed again. If the
        connection is gone for good they cannot be: :meth:`purge_orphans` finds them. Interrupted in its very last step,
        the object is either stored as a whole or not at all.

        Args:
            source: Bytes, a :class:`pathlib.Path`, a file opened in binary mode (read from where it stands, and left
                open), or an iterator of bytes in pieces of any size.
            chunk_bytes: Size of the messages it is cut into; at most the server's ``max_payload``.
            timeout: Longest time the server may take to acknowledge anything (default: the context's); all of it may
                take longer. A restart takes seconds, the election of a leader up to ten.

        Raises:
            ConfigError: There are no bytes to be had from ``source``.
            ServerError: The bucket is full, or sealed.
            RequestTimeout: Nothing was acknowledged for ``timeout`` seconds.
            ConnectionLost: The connection went away, and so did chunks; put it again.
        """
        meta = ObjectMeta(name=name, description=description, headers=headers, metadata=metadata)
        upload = Upload(uuid.uuid4().hex, chunk_bytes)
        upload.info(self.bucket, meta, _now())  # headers that cannot be written are better refused now
        progress = Progress(self.bucket, name, timeout_of(timeout, self._context.timeout_s))
        sending = self._sending(upload, progress)
        began, is_sent = clock.now(), False
        try:
            with closing(_chunks(upload, source)) as chunks:
                for chunk in chunks:
                    sending.send(chunk)
            sending.complete()
            if clock.now() >= began + LONG_PUT_S:
                with progress.awaited():
                    self._context.run(self._objects.check_chunks(upload), progress.timeout_s)
            is_sent = True
            return self._commit(upload, meta, progress)
        except BaseException as error:
            if not is_sent:
                self._abandon(upload, sending, progress)
            elif not isinstance(error, Exception):
                # Interrupted, and the object may be visible any moment: only doing all of it again tells which chunks
                # nobody needs.
                with suppress(JetSparkError):
                    self._commit(upload, meta, progress)
            raise

    def update_meta(self, name: str, meta: ObjectMeta) -> ObjectInfo:
        """Change what is said about an object, all of it, and its name if ``meta`` has another.

        Raises:
            ObjectNotFound: There is no such object.
            KeyExists: There is one of the new name.
            Conflict: It was replaced at the same time; nothing was changed.
        """
        return self._context.run(self._objects.update_meta(name, meta))

    def delete(self, name: str) -> None:
        """Delete an object; a mark stays, so that watchers see it.

        Raises:
            ObjectNotFound: There is no such object.
        """
        self._delete(name)

    def add_link(self, name: str, target: ObjectInfo) -> ObjectInfo:
        """A name that leads to an object, in this bucket or another. Reading follows it.

        Raises:
            KeyExists: There is an object of that name; a link is replaced.
        """
        return self._add_link(name, link_to(target))

    def add_bucket_link(self, name: str, bucket: str) -> ObjectInfo:
        """A name that leads to a whole bucket; see :attr:`ObjectInfo.link`. It cannot be read.

        Raises:
            KeyExists: There is an object of that name; a link is replaced.
        """
        return self._add_link(name, ObjectLink(bucket=check_bucket(bucket)))

    def seal(self) -> None:
        """Make the bucket read-only, for ever."""
        self._stream.seal()

    def purge_orphans(self, older_than: float = 3600.0) -> int:
        """Remove chunks that belong to no object: what a put left whose process died. Returns how many.

        Chunks are kept if some of the same object are younger than ``older_than`` seconds: its put may be under way.
        Nobody else removes them, and this reads the metadata of every object: call it now and then. A put whose source
        stands still for longer than ``older_than`` finds out that its chunks are gone, and fails, if that is 60 seconds
        or more.

        Raises:
            RequestTimeout: Nothing came for as long as the context's ``timeout``; some may be removed.
            StreamRecreated: The bucket was deleted and made again in the middle.
        """
        limit = _now() - datetime.timedelta(seconds=seconds("older_than", older_than))
        # Chunks first: an object that becomes visible in between is then seen to own them.
        state = (self._stream.info(subjects_filter=chunk_subject(self.bucket, ">"))).state
        owned = {
            chunk_subject(self.bucket, info.nuid) for info in self._initial("purge_orphans") if not info.is_deleted
        }
        removed = 0
        for subject in state.subjects.keys() - owned:
            try:
                last = self._stream.get_message(last_for=subject, direct=False)
            except MessageNotFound:
                continue  # removed meanwhile by the put that sent them
            if last.timestamp < limit:
                removed += self._stream.purge(subject=subject, up_to_sequence=last.sequence)
        return removed

    # ---- reading -----------------------------------------------------------------------------------------------

    def info(self, name: str, *, include_deleted: bool = False) -> ObjectInfo:
        """Size, digest and metadata of an object; a link's are its own.

        Raises:
            ObjectNotFound: There is no such object.
        """
        return self._context.run(self._objects.info(name, include_deleted=include_deleted))

    def get_bytes(self, name: str) -> bytes:
        """The whole object, checked. Prefer :meth:`get_file` or :meth:`chunks` for one that may not fit into memory.

        Raises:
            ObjectNotFound: There is no such object.
            DigestMismatch: The bucket does not have what was put.
        """
        for attempt in range(READ_ATTEMPTS):
            store, info = self._resolve(name)
            # Joining a list of chunks would need twice the memory, all of it new: that took 40 % of the time.
            whole = io.BytesIO()
            try:
                for chunk in store._read(info):
                    whole.write(chunk)
                return whole.getvalue()
            except DigestMismatch:
                if attempt == READ_ATTEMPTS - 1 or not store._is_replaced(info):
                    raise
        raise AssertionError("unreachable")

    def get_file(self, name: str, target: str | os.PathLike[str] | BinaryWriter) -> ObjectInfo:
        """Write an object to a file.

        A path gets the whole object, checked, in one moment, or is left as it is. A file opened in binary mode is
        written to as the chunks come; after an error it has a part of the object.

        Raises:
            ObjectNotFound: There is no such object.
            DigestMismatch: The bucket does not have what was put.
        """
        if not isinstance(target, str | os.PathLike):
            store, info = self._resolve(name)
            store._write_to(info, target)
            return info
        for attempt in range(READ_ATTEMPTS):
            store, info = self._resolve(name)
            part = f"{os.fspath(target)}.{uuid.uuid4().hex}.part"
            try:
                with open(part, "wb") as file:
                    store._write_to(info, file)
                os.replace(part, target)
                return info
            except DigestMismatch:
                if attempt == READ_ATTEMPTS - 1 or not store._is_replaced(info):
                    raise
            finally:
                _remove(part)
        raise AssertionError("unreachable")

    def chunks(self, name: str) -> Iterator[bytes]:
        """The content, piece by piece. What was yielded counts only when the iteration ends without an error.

        Raises:
            ObjectNotFound: There is no such object.
            DigestMismatch: The bucket does not have what was put, or it was replaced meanwhile.
        """
        store, info = self._resolve(name)
        with closing(store._read(info)) as chunks:
            yield from chunks

    def list(self) -> Iterator[ObjectInfo]:
        """Every object, links included, each once. Their names are kept in memory meanwhile.

        Raises:
            RequestTimeout: Nothing came for as long as the context's ``timeout``; the listing as a whole may take
                longer.
            StreamRecreated: The bucket was deleted and made again in the middle.
        """
        seen: set[str] = set()
        with closing(self._initial("list")) as infos:
            for info in infos:
                if not info.is_deleted and info.name not in seen:
                    seen.add(info.name)
                    yield info

    @overload
    def watch(
        self, *, initial_marker: Literal[False] = False, updates_only: bool = False, ignore_deletes: bool = False
    ) -> Iterator[ObjectInfo]: ...

    @overload
    def watch(
        self, *, initial_marker: Literal[True], updates_only: bool = False, ignore_deletes: bool = False
    ) -> Iterator[ObjectInfo | None]: ...

    def watch(
        self, *, initial_marker: bool = False, updates_only: bool = False, ignore_deletes: bool = False
    ) -> Iterator[ObjectInfo | None]:
        """Every object there is, then every change, for ever.

        Survives reconnects and restarts. Of an object that changes several times while nobody looks only the last
        change is seen.

        Args:
            initial_marker: Yield None once, where the present ends and changes begin.
            updates_only: Begin with the next change.
            ignore_deletes: Leave out deletions.

        Raises (while iterating):
            StreamNotFound: The bucket was deleted; found out at once as a rule, and within 11 seconds.
            StreamRecreated: The bucket was deleted and made again. What was shown is of the old one: forget it, and
                watch again.
            RequestTimeout: No answer within the context's ``timeout`` when the watch was to begin.
        """
        options = watch_options(self.bucket, updates_only=updates_only)
        return self._watch(options, initial_marker=initial_marker, ignore_deletes=ignore_deletes)

    def status(self) -> ObjectStoreStatus:
        """The bucket's configuration and size."""
        return self._context.run(self._objects.status())

    # ---- steps of writing --------------------------------------------------------------------------------------

    def _commit(self, upload: Upload, meta: ObjectMeta, progress: Progress) -> ObjectInfo:
        info = upload.info(self.bucket, meta, _now())
        patience = Patience(progress.what, progress.timeout_s, clock.now())
        for attempt in range(COMMIT_ATTEMPTS):
            try:
                committing = self._objects.commit(upload, info)
                stored = self._context.run(committing, patience.left_s(clock.now(), progress.timeout_s))
                break
            except (RequestTimeout, ConnectionLost) as error:
                # Perhaps it is stored, perhaps it will be: removing its chunks now would leave a damaged object.
                patience.check(clock.now(), error)
                if attempt == COMMIT_ATTEMPTS - 1:
                    raise
            except JetSparkError:
                self._purge(upload.nuid)
                raise
        if upload.replaced_nuid:
            self._purge(upload.replaced_nuid)
        return stored

    def _sending(self, upload: Upload, progress: Progress) -> _Sending | _FastSending:
        subject = chunk_subject(self.bucket, upload.nuid)
        config = self._stream.cached_info.config
        options = fast_options(config, upload, self._context.client.max_payload_bytes, progress.timeout_s)
        if options is None:
            return _Sending(self._context, subject, progress)
        return _FastSending(
            self._context,
            subject,
            progress,
            FastPublisherOptions(**options),
            self._objects.check_chunks(upload),
        )

    def _abandon(self, upload: Upload, sending: _Sending | _FastSending, progress: Progress) -> None:
        settle_s, purge_s = progress.clean_up_s(self._context.timeout_s)
        if sending.settle(settle_s):
            self._purge(upload.nuid, purge_s)

    def _delete(self, name: str) -> None:
        deadline = clock.now() + self._context.timeout_s
        try:
            nuid = self._context.run(self._objects.delete(name))
            self._purge(nuid, max(0.0, deadline - clock.now()))
        except BaseException as error:
            if not isinstance(error, Exception):  # interrupted: its chunks may be nobody's by now
                with suppress(JetSparkError):
                    self._purge(self._context.run(self._objects.finish_delete(name)))
            raise

    def _purge(self, nuid: str, timeout: float | None = None) -> None:
        """Remove chunks nobody refers to. Should that fail, all is well but for the space they take."""
        try:
            self._context.run(self._objects.purge_chunks(nuid), timeout)
        except JetSparkError as error:
            _logger.warning(
                "chunks %s are left in bucket %r (purge_orphans removes them): %s", nuid, self.bucket, error
            )

    def _add_link(self, name: str, link: ObjectLink) -> ObjectInfo:
        return self._context.run(self._objects.add_link(name, uuid.uuid4().hex, link, _now()))

    # ---- steps of reading --------------------------------------------------------------------------------------

    def _resolve(self, name: str) -> tuple[ObjectStore, ObjectInfo]:
        """The object behind a name, however many links away, and the bucket it is in."""
        stream, info = self._context.run(resolve(self._objects, name))
        return (self if stream is None else ObjectStore(self._context, Stream(self._context, stream))), info

    def _read(self, info: ObjectInfo) -> Generator[bytes, None, None]:
        download = Download(info)
        subject = chunk_subject(self.bucket, info.nuid)
        config = self._stream.cached_info.config
        read = self._read_direct if config.allow_direct else self._read_singly
        pauses = lag_pauses(config)
        sequence = 0
        while True:
            with closing(read(sequence + 1, subject, download)) as messages:
                for message in messages:
                    sequence = message.sequence
                    yield download.feed(message.data)
            if not download.is_short or not pauses:
                break
            clock.sleep(pauses.pop(0))
        download.finish()

    def _read_direct(self, start: int, subject: str, download: Download) -> Generator[StoredMessage, None, None]:
        """What is there, in requests of bounded size; one reads ahead as much as that, and no more.

        An ordered consumer is a tenth to a quarter faster, but if the chunks it waits for are purged, by somebody who
        replaces the object, it waits for ever.
        """
        missing = 0
        while not missing:
            missing = download.max_messages
            some = self._stream.get_messages(start, subject=subject, max_messages=missing)
            with closing(cast("Generator[StoredMessage, None, None]", some)) as messages:
                for message in messages:
                    start = message.sequence + 1
                    missing -= 1
                    yield message

    def _read_singly(self, start: int, subject: str, download: Download) -> Generator[StoredMessage, None, None]:
        """The same for buckets of old clients, which do not allow direct gets."""
        for _ in range(download.missing_chunks + 1):
            try:
                message = self._stream.get_message(start, next_for=subject, direct=False)
            except MessageNotFound:
                return
            start = message.sequence + 1
            yield message

    def _is_replaced(self, info: ObjectInfo) -> bool:
        try:
            return (self.info(info.name)).nuid != info.nuid
        except ObjectNotFound:
            return True

    def _write_to(self, info: ObjectInfo, file: BinaryWriter) -> None:
        with closing(self._read(info)) as chunks:
            write_chunks(file, chunks)

    def _watch(
        self, options: OrderedOptions, *, initial_marker: bool, ignore_deletes: bool
    ) -> Iterator[ObjectInfo | None]:
        reading = Reading(self._context, self._stream.name, options)
        is_initial = True
        try:
            reading.start()
            while True:
                message = reading.next(until_idle=is_initial)
                if message is not None:
                    info = info_of_delivery(message)
                    if not (ignore_deletes and info.is_deleted):
                        yield info
                elif is_initial and reading.is_caught_up:
                    is_initial = False
                    if initial_marker:
                        yield None
                else:
                    return
        finally:
            reading.close()

    def _initial(self, what: str) -> Generator[ObjectInfo, None, None]:
        """What a watch begins with, and no more."""
        listing = f"{what} of object store {self.bucket!r}"
        reading = Reading(self._context, self._stream.name, watch_options(self.bucket), listing=listing)
        try:
            reading.start()
            while (message := reading.next(until_idle=True)) is not None:
                yield info_of_delivery(message)
        finally:
            reading.close()

    def __repr__(self) -> str:
        return f"<ObjectStore {self.bucket}>"


class _Sending:
    """The chunks of one put on their way: at most ``WINDOW_BYTES`` wait for their acknowledgement."""

    def __init__(self, context: Context, subject: str, progress: Progress) -> None:
        self._context, self._subject, self._progress = context, subject, progress
        self._waiting: deque[tuple[AckFuture, int]] = deque()
        self._waiting_bytes = 0
        self._is_anything_stored = False
        self._is_in_hand = False
        """Stays true when publishing is interrupted: then nobody has the future of what may be on its way."""

    def send(self, chunk: bytes) -> None:
        while self._waiting and self._waiting_bytes + len(chunk) > WINDOW_BYTES:
            self._take_one()
        self._is_in_hand = True
        try:
            with self._progress.awaited():  # the network may take no more
                future = self._context.publisher.publish(self._subject, chunk, None, self._progress.timeout_s)
            self._waiting.append((future, len(chunk)))
        except Exception:
            self._is_in_hand = False  # it was not sent
            raise
        self._is_in_hand = False
        self._waiting_bytes += len(chunk)

    def complete(self) -> None:
        while self._waiting:
            self._take_one()

    def settle(self, timeout: float) -> bool:
        """After a failure: wait until nothing is on its way any more; whether something may be stored."""
        deadline = clock.now() + timeout
        for future, _ in self._waiting:
            try:
                error = future.exception(max(deadline - clock.now(), 0.0))
            except RequestTimeout:
                error = None
            self._is_anything_stored |= not isinstance(error, ServerError | JetStreamUnavailable)
        if self._is_in_hand:
            self._is_anything_stored = True
            with suppress(JetSparkError):
                self._context.publisher.complete(max(deadline - clock.now(), 0.0))
        return self._is_anything_stored

    def _take_one(self) -> None:
        future, size_bytes = self._waiting[0]
        with self._progress.awaited():
            future.result(self._progress.timeout_s)
        self._is_anything_stored = True
        self._waiting.popleft()
        self._waiting_bytes -= size_bytes


class _FastSending:
    """The chunks of one put on their way over fast ingest, through restarts and changes of leader.

    A single chunk goes the plain way: a fast batch takes one round trip more.
    """

    def __init__(
        self, context: Context, subject: str, progress: Progress, options: FastPublisherOptions, check: Operation[None]
    ) -> None:
        self._context, self._subject, self._progress = context, subject, progress
        self._options, self._check = options, check
        self._first: bytes | None = None
        self._single: _Sending | None = None
        self._publisher: FastPublisher | None = None
        self._flushed_at = 0.0

    def send(self, chunk: bytes) -> None:
        if self._publisher is None:
            if self._first is None:
                self._first = chunk
                return
            FAST_INGEST.check(self._context.api.known())
            self._publisher = FastPublisher(self._context, self._options)._enter()
            self._flushed_at = clock.now()
            first, self._first = self._first, None
            with self._progress.awaited():
                self._publisher.publish(self._subject, first)
        with self._progress.awaited():
            self._publisher.publish(self._subject, chunk)
        if (now := clock.now()) >= self._flushed_at + FLUSH_EVERY_S:
            self._flushed_at = now
            with self._progress.awaited():
                self._publisher.flush()

    def complete(self) -> None:
        if self._publisher is not None:
            with self._progress.awaited():
                # First what may take long: interrupted, it leaves a publisher that can still tell when all has arrived.
                self._publisher.flush()
                self._publisher.close()
                if self._publisher.batches > 1:
                    self._context.run(self._check, self._progress.timeout_s)
        elif self._first is not None:
            self._single = _Sending(self._context, self._subject, self._progress)
            self._single.send(self._first)
            self._single.complete()

    def settle(self, timeout: float) -> bool:
        """After a failure: wait until nothing is on its way any more; whether something may be stored."""
        if self._single is not None:
            return self._single.settle(timeout)
        if self._publisher is None:
            return False
        try:
            # The end of the batch is acknowledged after everything before it.
            self._publisher.close(timeout)
        except (ServerError, JetStreamUnavailable):
            return self._publisher.published() > 0
        except JetSparkError as error:
            _logger.debug("chunks of a failed put may still arrive: %s", error)
        return True


def _chunks(upload: Upload, source: Source) -> Generator[bytes, None, None]:
    if isinstance(source, os.PathLike):
        with open(source, "rb") as file:
            for some in steps(upload, file):
                yield from some
    else:
        for some in steps(upload, source):
            yield from some


def _remove(path: str) -> None:
    try:
        os.remove(path)
    except FileNotFoundError:
        pass  # it was renamed, or never made


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
