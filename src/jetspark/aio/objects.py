"""Object stores with asyncio. What they are and what they are asked is in :mod:`jetspark.jetstream.objects`."""

from __future__ import annotations

import asyncio
import datetime
import functools
import io
import logging
import os
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from contextlib import aclosing
from typing import Any, Literal, TypeAlias, TypeVar, cast, overload

from jetspark.aio import clock
from jetspark.aio.context import Context
from jetspark.aio.fast import FastPublisher
from jetspark.aio.ordered import Reading
from jetspark.aio.publisher import AckFuture
from jetspark.aio.stream import Stream
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
    AHEAD_BYTES,
    BLOCK_BYTES,
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

_logger = logging.getLogger("jetspark.aio")

T = TypeVar("T")

Source: TypeAlias = BytesLike | os.PathLike[str] | BinaryReader | AsyncIterable[BytesLike] | Iterable[BytesLike]


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
        self._finishing: set[asyncio.Future[Any]] = set()

    @property
    def bucket(self) -> str:
        return self._objects.name

    # ---- writing -----------------------------------------------------------------------------------------------

    async def put(
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

        When this raises or is cancelled, the name has what it had before, and the chunks that were stored are removed
        again. If the connection is gone for good they cannot be: :meth:`purge_orphans` finds them. Cancelled in its
        very last step, the object is either stored as a whole or not at all.

        Args:
            source: Bytes, a :class:`pathlib.Path`, a file opened in binary mode (read in a thread, from where it
                stands, and left open), or an iterator, asynchronous or not, of bytes in pieces of any size.
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
        upload = Upload(uuid.uuid4().hex, chunk_bytes, AHEAD_BYTES)
        upload.info(self.bucket, meta, _now())  # headers that cannot be written are better refused now
        progress = Progress(self.bucket, name, timeout_of(timeout, self._context.timeout_s))
        sending = self._sending(upload, progress)
        began = clock.now()
        try:
            async with aclosing(_chunks(upload, source)) as chunks:
                async for chunk in chunks:
                    await sending.send(chunk)
            await sending.complete()
            if clock.now() >= began + LONG_PUT_S:
                with progress.awaited():
                    await self._context.run(self._objects.check_chunks(upload), progress.timeout_s)
        except BaseException:
            await self._see_through(self._abandon(upload, sending, progress))
            raise
        return await self._see_through(self._commit(upload, meta, progress))

    async def update_meta(self, name: str, meta: ObjectMeta) -> ObjectInfo:
        """Change what is said about an object, all of it, and its name if ``meta`` has another.

        Raises:
            ObjectNotFound: There is no such object.
            KeyExists: There is one of the new name.
            Conflict: It was replaced at the same time; nothing was changed.
        """
        return await self._context.run(self._objects.update_meta(name, meta))

    async def delete(self, name: str) -> None:
        """Delete an object; a mark stays, so that watchers see it.

        Raises:
            ObjectNotFound: There is no such object.
        """
        await self._see_through(self._delete(name))

    async def add_link(self, name: str, target: ObjectInfo) -> ObjectInfo:
        """A name that leads to an object, in this bucket or another. Reading follows it.

        Raises:
            KeyExists: There is an object of that name; a link is replaced.
        """
        return await self._add_link(name, link_to(target))

    async def add_bucket_link(self, name: str, bucket: str) -> ObjectInfo:
        """A name that leads to a whole bucket; see :attr:`ObjectInfo.link`. It cannot be read.

        Raises:
            KeyExists: There is an object of that name; a link is replaced.
        """
        return await self._add_link(name, ObjectLink(bucket=check_bucket(bucket)))

    async def seal(self) -> None:
        """Make the bucket read-only, for ever."""
        await self._stream.seal()

    async def purge_orphans(self, older_than: float = 3600.0) -> int:
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
        state = (await self._stream.info(subjects_filter=chunk_subject(self.bucket, ">"))).state
        owned = {
            chunk_subject(self.bucket, info.nuid)
            async for info in self._initial("purge_orphans")
            if not info.is_deleted
        }
        removed = 0
        for subject in state.subjects.keys() - owned:
            try:
                last = await self._stream.get_message(last_for=subject, direct=False)
            except MessageNotFound:
                continue  # removed meanwhile by the put that sent them
            if last.timestamp < limit:
                removed += await self._stream.purge(subject=subject, up_to_sequence=last.sequence)
        return removed

    # ---- reading -----------------------------------------------------------------------------------------------

    async def info(self, name: str, *, include_deleted: bool = False) -> ObjectInfo:
        """Size, digest and metadata of an object; a link's are its own.

        Raises:
            ObjectNotFound: There is no such object.
        """
        return await self._context.run(self._objects.info(name, include_deleted=include_deleted))

    async def get_bytes(self, name: str) -> bytes:
        """The whole object, checked. Prefer :meth:`get_file` or :meth:`chunks` for one that may not fit into memory.

        Raises:
            ObjectNotFound: There is no such object.
            DigestMismatch: The bucket does not have what was put.
        """
        for attempt in range(READ_ATTEMPTS):
            store, info = await self._resolve(name)
            # Joining a list of chunks would need twice the memory, all of it new: that took 40 % of the time.
            whole = io.BytesIO()
            try:
                async for chunk in store._read(info):
                    whole.write(chunk)
                return whole.getvalue()
            except DigestMismatch:
                if attempt == READ_ATTEMPTS - 1 or not await store._is_replaced(info):
                    raise
        raise AssertionError("unreachable")

    async def get_file(self, name: str, target: str | os.PathLike[str] | BinaryWriter) -> ObjectInfo:
        """Write an object to a file.

        A path gets the whole object, checked, in one moment, or is left as it is. A file opened in binary mode is
        written to as the chunks come, in a thread; after an error it has a part of the object.

        Raises:
            ObjectNotFound: There is no such object.
            DigestMismatch: The bucket does not have what was put.
        """
        if not isinstance(target, str | os.PathLike):
            store, info = await self._resolve(name)
            await store._write_to(info, target)
            return info
        for attempt in range(READ_ATTEMPTS):
            store, info = await self._resolve(name)
            part = _PartFile(target)
            try:
                await store._write_to(info, part)
                await self._see_through(asyncio.to_thread(part.keep))
                return info
            except DigestMismatch:
                if attempt == READ_ATTEMPTS - 1 or not await store._is_replaced(info):
                    raise
            finally:
                part.discard()
        raise AssertionError("unreachable")

    async def chunks(self, name: str) -> AsyncIterator[bytes]:
        """The content, piece by piece. What was yielded counts only when the iteration ends without an error.

        Raises:
            ObjectNotFound: There is no such object.
            DigestMismatch: The bucket does not have what was put, or it was replaced meanwhile.
        """
        store, info = await self._resolve(name)
        async with aclosing(store._read(info)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def list(self) -> AsyncIterator[ObjectInfo]:
        """Every object, links included, each once. Their names are kept in memory meanwhile.

        Raises:
            RequestTimeout: Nothing came for as long as the context's ``timeout``; the listing as a whole may take
                longer.
            StreamRecreated: The bucket was deleted and made again in the middle.
        """
        seen: set[str] = set()
        async with aclosing(self._initial("list")) as infos:
            async for info in infos:
                if not info.is_deleted and info.name not in seen:
                    seen.add(info.name)
                    yield info

    @overload
    def watch(
        self, *, initial_marker: Literal[False] = False, updates_only: bool = False, ignore_deletes: bool = False
    ) -> AsyncIterator[ObjectInfo]: ...

    @overload
    def watch(
        self, *, initial_marker: Literal[True], updates_only: bool = False, ignore_deletes: bool = False
    ) -> AsyncIterator[ObjectInfo | None]: ...

    def watch(
        self, *, initial_marker: bool = False, updates_only: bool = False, ignore_deletes: bool = False
    ) -> AsyncIterator[ObjectInfo | None]:
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

    async def status(self) -> ObjectStoreStatus:
        """The bucket's configuration and size."""
        return await self._context.run(self._objects.status())

    # ---- steps of writing --------------------------------------------------------------------------------------

    async def _commit(self, upload: Upload, meta: ObjectMeta, progress: Progress) -> ObjectInfo:
        info = upload.info(self.bucket, meta, _now())
        patience = Patience(progress.what, progress.timeout_s, clock.now())
        for attempt in range(COMMIT_ATTEMPTS):
            try:
                committing = self._objects.commit(upload, info)
                stored = await self._context.run(committing, patience.left_s(clock.now(), progress.timeout_s))
                break
            except (RequestTimeout, ConnectionLost) as error:
                # Perhaps it is stored, perhaps it will be: removing its chunks now would leave a damaged object.
                patience.check(clock.now(), error)
                if attempt == COMMIT_ATTEMPTS - 1:
                    raise
            except JetSparkError:
                await self._purge(upload.nuid)
                raise
        if upload.replaced_nuid:
            await self._purge(upload.replaced_nuid)
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

    async def _abandon(self, upload: Upload, sending: _Sending | _FastSending, progress: Progress) -> None:
        settle_s, purge_s = progress.clean_up_s(self._context.timeout_s)
        if await sending.settle(settle_s):
            await self._purge(upload.nuid, purge_s)

    async def _delete(self, name: str) -> None:
        deadline = clock.now() + self._context.timeout_s
        nuid = await self._context.run(self._objects.delete(name))
        await self._purge(nuid, max(0.0, deadline - clock.now()))

    async def _purge(self, nuid: str, timeout: float | None = None) -> None:
        """Remove chunks nobody refers to. Should that fail, all is well but for the space they take."""
        try:
            await self._context.run(self._objects.purge_chunks(nuid), timeout)
        except JetSparkError as error:
            _logger.warning(
                "chunks %s are left in bucket %r (purge_orphans removes them): %s", nuid, self.bucket, error
            )

    async def _add_link(self, name: str, link: ObjectLink) -> ObjectInfo:
        return await self._context.run(self._objects.add_link(name, uuid.uuid4().hex, link, _now()))

    async def _see_through(self, work: Coroutine[Any, Any, T]) -> T:
        """Do it to its end, even if cancelled meanwhile; a second cancellation no longer waits for that end."""
        task = asyncio.ensure_future(work)
        self._finishing.add(task)  # the loop itself would let go of it
        task.add_done_callback(self._finishing.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # the cancellation is what the caller gets to see
            raise

    # ---- steps of reading --------------------------------------------------------------------------------------

    async def _resolve(self, name: str) -> tuple[ObjectStore, ObjectInfo]:
        """The object behind a name, however many links away, and the bucket it is in."""
        stream, info = await self._context.run(resolve(self._objects, name))
        return (self if stream is None else ObjectStore(self._context, Stream(self._context, stream))), info

    async def _read(self, info: ObjectInfo) -> AsyncGenerator[bytes, None]:
        download = Download(info)
        subject = chunk_subject(self.bucket, info.nuid)
        config = self._stream.cached_info.config
        read = self._read_direct if config.allow_direct else self._read_singly
        pauses = lag_pauses(config)
        sequence = 0
        while True:
            async with aclosing(read(sequence + 1, subject, download)) as messages:
                async for message in messages:
                    sequence = message.sequence
                    yield download.feed(message.data)
            if not download.is_short or not pauses:
                break
            await clock.sleep(pauses.pop(0))
        download.finish()

    async def _read_direct(self, start: int, subject: str, download: Download) -> AsyncGenerator[StoredMessage, None]:
        """What is there, in requests of bounded size; one reads ahead as much as that, and no more.

        An ordered consumer is a tenth to a quarter faster, but if the chunks it waits for are purged, by somebody who
        replaces the object, it waits for ever.
        """
        missing = 0
        while not missing:
            missing = download.max_messages
            some = self._stream.get_messages(start, subject=subject, max_messages=missing)
            async with aclosing(cast("AsyncGenerator[StoredMessage, None]", some)) as messages:
                async for message in messages:
                    start = message.sequence + 1
                    missing -= 1
                    yield message

    async def _read_singly(self, start: int, subject: str, download: Download) -> AsyncGenerator[StoredMessage, None]:
        """The same for buckets of old clients, which do not allow direct gets."""
        for _ in range(download.missing_chunks + 1):
            try:
                message = await self._stream.get_message(start, next_for=subject, direct=False)
            except MessageNotFound:
                return
            start = message.sequence + 1
            yield message

    async def _is_replaced(self, info: ObjectInfo) -> bool:
        try:
            return (await self.info(info.name)).nuid != info.nuid
        except ObjectNotFound:
            return True

    async def _write_to(self, info: ObjectInfo, file: BinaryWriter) -> None:
        """Write a block in a thread while the next one comes."""
        loop = asyncio.get_running_loop()
        writing: asyncio.Future[None] | None = None
        block: deque[bytes] = deque()
        block_bytes = 0
        try:
            async with aclosing(self._read(info)) as chunks:
                async for chunk in chunks:
                    block.append(chunk)
                    block_bytes += len(chunk)
                    if block_bytes >= BLOCK_BYTES:
                        if writing is not None:
                            await asyncio.shield(writing)
                        writing = loop.run_in_executor(None, write_chunks, file, block)
                        block, block_bytes = deque(), 0
            if writing is not None:
                await asyncio.shield(writing)
            writing = loop.run_in_executor(None, write_chunks, file, block)
            await asyncio.shield(writing)
        finally:
            # The file is the caller's again when this returns: nobody must be writing to it. Hence the shields: a
            # cancelled future says that it is done, and its thread writes on.
            if writing is not None and not writing.done():
                await asyncio.wait({writing})

    async def _watch(
        self, options: OrderedOptions, *, initial_marker: bool, ignore_deletes: bool
    ) -> AsyncIterator[ObjectInfo | None]:
        reading = Reading(self._context, self._stream.name, options)
        is_initial = True
        try:
            await reading.start()
            while True:
                message = await reading.next(until_idle=is_initial)
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
            await reading.close()

    async def _initial(self, what: str) -> AsyncGenerator[ObjectInfo, None]:
        """What a watch begins with, and no more."""
        listing = f"{what} of object store {self.bucket!r}"
        reading = Reading(self._context, self._stream.name, watch_options(self.bucket), listing=listing)
        try:
            await reading.start()
            while (message := await reading.next(until_idle=True)) is not None:
                yield info_of_delivery(message)
        finally:
            await reading.close()

    def __repr__(self) -> str:
        return f"<ObjectStore {self.bucket}>"


class _Sending:
    """The chunks of one put on their way: at most ``WINDOW_BYTES`` wait for their acknowledgement."""

    def __init__(self, context: Context, subject: str, progress: Progress) -> None:
        self._context, self._subject, self._progress = context, subject, progress
        self._waiting: deque[tuple[AckFuture, int]] = deque()
        self._waiting_bytes = 0
        self._is_anything_stored = False

    async def send(self, chunk: bytes) -> None:
        while self._waiting and self._waiting_bytes + len(chunk) > WINDOW_BYTES:
            await self._take_one()
        with self._progress.awaited():  # the network may take no more
            future = await self._context.publisher.publish(self._subject, chunk, None, self._progress.timeout_s)
        self._waiting.append((future, len(chunk)))
        self._waiting_bytes += len(chunk)

    async def complete(self) -> None:
        while self._waiting:
            await self._take_one()

    async def settle(self, timeout: float) -> bool:
        """After a failure: wait until nothing is on its way any more; whether something may be stored."""
        futures = [future for future, _ in self._waiting]
        if futures:
            await asyncio.wait(futures, timeout=timeout)
        for future in futures:
            error = future.exception() if future.done() else None
            self._is_anything_stored |= not isinstance(error, ServerError | JetStreamUnavailable)
        return self._is_anything_stored

    async def _take_one(self) -> None:
        future, size_bytes = self._waiting[0]
        with self._progress.awaited():
            # Unlike `await future`, this does not cancel it when we are cancelled, and so does not forget it.
            if not (await asyncio.wait({future}, timeout=self._progress.timeout_s))[0]:
                raise RequestTimeout(f"chunk on {self._subject!r}", self._progress.timeout_s)
            future.result()
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

    async def send(self, chunk: bytes) -> None:
        if self._publisher is None:
            if self._first is None:
                self._first = chunk
                return
            FAST_INGEST.check(self._context.api.known())
            self._publisher = FastPublisher(self._context, self._options)._enter()
            self._flushed_at = clock.now()
            first, self._first = self._first, None
            with self._progress.awaited():
                await self._publisher.publish(self._subject, first)
        with self._progress.awaited():
            await self._publisher.publish(self._subject, chunk)
        if (now := clock.now()) >= self._flushed_at + FLUSH_EVERY_S:
            self._flushed_at = now
            with self._progress.awaited():
                await self._publisher.flush()

    async def complete(self) -> None:
        if self._publisher is not None:
            with self._progress.awaited():
                # First what may take long: cancelled, it leaves a publisher that can still tell when all has arrived.
                await self._publisher.flush()
                await self._publisher.close()
                if self._publisher.batches > 1:
                    await self._context.run(self._check, self._progress.timeout_s)
        elif self._first is not None:
            self._single = _Sending(self._context, self._subject, self._progress)
            await self._single.send(self._first)
            await self._single.complete()

    async def settle(self, timeout: float) -> bool:
        """After a failure: wait until nothing is on its way any more; whether something may be stored."""
        if self._single is not None:
            return await self._single.settle(timeout)
        if self._publisher is None:
            return False
        try:
            # The end of the batch is acknowledged after everything before it.
            await self._publisher.close(timeout)
        except (ServerError, JetStreamUnavailable):
            return self._publisher.published() > 0
        except JetSparkError as error:
            _logger.debug("chunks of a failed put may still arrive: %s", error)
        return True


async def _chunks(upload: Upload, source: Source) -> AsyncGenerator[bytes, None]:
    if isinstance(source, AsyncIterable):
        async for piece in source:
            for chunk in upload.feed(piece):
                yield chunk
        for chunk in upload.finish():
            yield chunk
    elif isinstance(source, os.PathLike):
        async with aclosing(_chunks_ahead(_path_steps(upload, source))) as chunks:
            async for chunk in chunks:
                yield chunk
    elif hasattr(source, "read") or _is_large(upload, source):
        async with aclosing(_chunks_ahead(steps(upload, source))) as chunks:
            async for chunk in chunks:
                yield chunk
    else:
        # A block is hashed in about a millisecond, and who knows which thread an iterator wants to be asked in.
        for some in steps(upload, source):
            for chunk in some:
                yield chunk


async def _chunks_ahead(reading: Iterator[list[bytes]]) -> AsyncGenerator[bytes, None]:
    """Read and hash in a thread, one step ahead of what is sent."""
    loop = asyncio.get_running_loop()
    step = functools.partial(next, reading, None)
    coming = loop.run_in_executor(None, step)
    try:
        while (some := await coming) is not None:
            coming = loop.run_in_executor(None, step)
            for chunk in some:
                yield chunk
    finally:
        # A read that is under way cannot be stopped; what it brings, or raises, is of no interest any more.
        if not coming.cancel() and not coming.cancelled():
            coming.exception()


def _is_large(upload: Upload, source: Source) -> bool:
    return isinstance(source, bytes | bytearray | memoryview) and memoryview(source).nbytes > upload.block_bytes


def _path_steps(upload: Upload, path: os.PathLike[str]) -> Iterator[list[bytes]]:
    """The file is opened and closed where it is read: in a thread that nobody may be waiting for any more."""
    with open(path, "rb") as file:
        yield from steps(upload, file)


class _PartFile:
    """A file that takes its place when it is complete. Used from one thread at a time."""

    def __init__(self, target: str | os.PathLike[str]) -> None:
        self._target = target
        self._path = f"{os.fspath(target)}.{uuid.uuid4().hex}.part"
        self._file: io.BufferedWriter | None = None

    def write(self, data: bytes) -> int:
        if self._file is None:
            self._file = open(self._path, "wb")  # noqa: SIM115
        return self._file.write(data)

    def keep(self) -> None:
        self.write(b"")  # so that there is a file, even an empty one
        self._close()
        os.replace(self._path, self._target)
        self._file = None

    def discard(self) -> None:
        """Remove what is there, unless it was kept."""
        if self._file is not None:
            self._close()
            os.remove(self._path)

    def _close(self) -> None:
        assert self._file is not None
        self._file.close()


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
