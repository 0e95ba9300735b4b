"""Object stores with asyncio. :mod:`jetspark.jetstream.objects` has the requests and their meaning."""

from __future__ import annotations

import datetime
import io
import logging
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import Literal, overload

from jetspark.aio import clock
from jetspark.aio.completion import is_interrupt, run_to_completion
from jetspark.aio.context import DriverContext
from jetspark.aio.files import READ_BYTES, Source, chunks_of, keep
from jetspark.aio.object_reader import ObjectReader
from jetspark.aio.object_writer import ChunkWriter, FastChunkWriter
from jetspark.aio.ordered import Watch
from jetspark.aio.stream import Stream, known_config
from jetspark.core.arguments import unfit
from jetspark.core.headers import HeadersLike
from jetspark.core.numbers import seconds, timeout_of
from jetspark.errors import ConnectionLost, DigestMismatch, JetSparkError, MessageNotFound, RequestTimeout
from jetspark.jetstream.kv import check_bucket
from jetspark.jetstream.objects import (
    COMMIT_ATTEMPTS,
    DEFAULT_CHUNK_BYTES,
    LONG_PUT_S,
    READ_ATTEMPTS,
    BinaryWriter,
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
    link_to,
    meta_subject,
    resolve,
    watch_options,
)
from jetspark.jetstream.ordered import Patience
from jetspark.jetstream.part_file import PartFile
from jetspark.publish.fast_options import FastPublisherOptions

__all__ = ["ObjectStore"]

_logger = logging.getLogger("jetspark.aio")


class ObjectStore:
    """A bucket of objects of any size, each with a name, a digest and metadata.

    An object becomes visible when it is stored completely, and is replaced atomically. Every read is checked against
    the digest that its writer stored. Memory stays bounded for any size, except where a method returns a whole object.

    As with :class:`JetStream`, calls to the server raise ``ServerError`` when it refuses, ``JetStreamUnavailable`` when
    JetStream is not available, and ``RequestTimeout`` when no answer came in time; a write may then be stored or not.
    """

    def __init__(self, context: DriverContext, stream: Stream) -> None:
        self._context = context
        self._stream = stream
        self._objects = Objects(context.api, known_config(stream))
        self._reader = ObjectReader(context, stream)
        self._watch = Watch(context, stream.name, info_of_delivery, lambda info: info.is_deleted)

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
        """Store an object under a name and replace an earlier one; returns when it is stored completely.

        When this raises or is cancelled, the earlier object remains, and the chunks stored so far are removed.
        If the connection is gone for good, the chunks stay until :meth:`purge_orphans` removes them. Cancelled in its
        last step, the object is either stored completely or not at all.

        Args:
            source: Bytes, a :class:`pathlib.Path`, a file opened in binary mode (read in a thread, from where it
                stands, and left open), or an iterator, asynchronous or not, of bytes in pieces of any size.
            chunk_bytes: Size of the messages that hold the object; at most the server's ``max_payload``.
            timeout: Longest time without an acknowledgement (default: the context's); the whole put may take longer. A
                restart takes seconds, the election of a leader up to ten.

        Raises:
            ConfigError: ``source`` is of a type that yields no bytes.
            ServerError: The bucket is full, or sealed.
            RequestTimeout: No chunk was acknowledged for ``timeout`` seconds.
            ConnectionLost: Chunks were lost with the connection, or purged by another client; put the object again.
        """
        meta = ObjectMeta(name=name, description=description, headers=headers, metadata=metadata)
        upload = Upload(uuid.uuid4().hex, chunk_bytes, READ_BYTES)
        upload.info(self.bucket, meta, _now())  # refuse invalid headers before the first chunk
        self._context.connection.address(meta_subject(self.bucket, name))  # and names that are too long
        progress = Progress(self.bucket, name, timeout_of(timeout, self._context.timeout_s))
        sending = self._sending(upload, progress)
        began, is_sent = clock.now(), False
        try:
            async with aclosing(chunks_of(upload, source)) as chunks:
                async for chunk in chunks:
                    await sending.send(chunk)
            await sending.complete()
            if upload.chunks > 1 or clock.now() >= began + LONG_PUT_S:
                with progress.awaited():
                    await self._context.run(self._objects.check_chunks(upload), progress.timeout_s)
            is_sent = True
            return await run_to_completion(partial(self._commit, upload, meta, progress))
        except BaseException as error:
            if not is_sent:
                await run_to_completion(partial(self._abandon, upload, sending, progress))
            elif is_interrupt(error):
                # The object may become visible at any moment: only a repeated commit tells which chunks are unused.
                with suppress(JetSparkError):
                    await self._commit(upload, meta, progress)
            raise

    async def update_meta(self, name: str, meta: ObjectMeta) -> ObjectInfo:
        """Replace the whole metadata of an object; a new name in ``meta`` renames it.

        Raises:
            ObjectNotFound: The object does not exist.
            KeyExists: The new name belongs to another object.
            Conflict: The object was replaced, renamed or deleted at the same time; nothing was changed.
            RequestTimeout: No answer in time. After a rename both names may refer to the object: do not delete either,
                call this again.
        """
        return await run_to_completion(partial(self._update_meta, name, meta))

    async def delete(self, name: str) -> None:
        """Delete an object; a delete marker stays, so that watchers see the deletion.

        Raises:
            ObjectNotFound: The object does not exist.
        """
        await run_to_completion(partial(self._delete, name))

    async def add_link(self, name: str, target: ObjectInfo) -> ObjectInfo:
        """Create a link to an object, in this bucket or another. Reads follow it.

        Raises:
            KeyExists: The name belongs to an object; an existing link is replaced.
        """
        return await self._add_link(name, link_to(target))

    async def add_bucket_link(self, name: str, bucket: str) -> ObjectInfo:
        """Create a link to a whole bucket, which cannot be read; see :attr:`ObjectInfo.link`.

        Raises:
            KeyExists: The name belongs to an object; an existing link is replaced.
        """
        return await self._add_link(name, ObjectLink(bucket=check_bucket(bucket)))

    async def seal(self) -> None:
        """Make the bucket read-only, permanently."""
        await self._stream.seal()

    async def purge_orphans(self, older_than: float = 3600.0) -> int:
        """Remove chunks that belong to no object, left by puts whose process died. Returns how many were removed.

        Chunks are kept while one of the same put is younger than ``older_than`` seconds, because the put may still be
        running. No other call removes orphans. This one reads the metadata of every object, so call it occasionally.
        A put whose source yields nothing for longer than ``older_than`` loses its chunks; it detects that and fails if
        ``older_than`` is 60 seconds or more.

        Raises:
            RequestTimeout: Nothing arrived for as long as the context's ``timeout``; some chunks may be removed.
            StreamRecreated: The bucket was deleted and re-created during the call.
        """
        limit = _now() - datetime.timedelta(seconds=seconds("older_than", older_than))
        # List the chunks first: an object that becomes visible in between then counts as their owner.
        state = (await self._stream.info(subjects_filter=chunk_subject(self.bucket, ">"))).state
        owned = {
            chunk_subject(self.bucket, info.nuid)
            async for info in self._present("purge_orphans")
            if not info.is_deleted
        }
        removed = 0
        for subject in state.subjects.keys() - owned:
            try:
                last = await self._stream.get_message(last_for=subject, direct=False)
            except MessageNotFound:
                continue  # removed in the meantime by the put that sent them
            if last.timestamp < limit:
                removed += await self._stream.purge(subject=subject, up_to_sequence=last.sequence)
        return removed

    # ---- reading -----------------------------------------------------------------------------------------------

    async def info(self, name: str, *, include_deleted: bool = False) -> ObjectInfo:
        """Size, digest and metadata of an object, or of a link itself.

        Raises:
            ObjectNotFound: The object does not exist.
        """
        return await self._context.run(self._objects.info(name, include_deleted=include_deleted))

    async def get_bytes(self, name: str) -> bytes:
        """Return the whole object, checked. Use :meth:`get_file` or :meth:`chunks` for objects larger than memory.

        Raises:
            ObjectNotFound: The object does not exist.
            DigestMismatch: The stored bytes do not match the digest of the put.
        """
        for attempt in range(READ_ATTEMPTS):
            reader, info = await self._resolve(name)
            # Joining a list of chunks would need twice the memory, freshly allocated: that took 40 % of the time.
            whole = io.BytesIO()
            try:
                async with aclosing(reader.read(info)) as chunks:
                    async for chunk in chunks:
                        whole.write(chunk)
                return whole.getvalue()
            except DigestMismatch:
                if attempt == READ_ATTEMPTS - 1 or not await reader.is_replaced(info):
                    raise
        raise AssertionError("unreachable")

    async def get_file(self, name: str, target: str | os.PathLike[str] | BinaryWriter) -> ObjectInfo:
        """Write an object to a file.

        A path is replaced atomically by the whole, checked object, or stays unchanged. A file opened in binary mode is
        written to as the chunks come, in a thread; after an error it has a part of the object.

        Raises:
            ObjectNotFound: The object does not exist.
            DigestMismatch: The stored bytes do not match the digest of the put.
        """
        if not isinstance(target, str | os.PathLike):
            if isinstance(target, type) or not callable(getattr(target, "write", None)):
                raise unfit("target", target, "a path, or a file opened for writing in binary mode")
            reader, info = await self._resolve(name)
            await reader.write_to(info, target)
            return info
        for attempt in range(READ_ATTEMPTS):
            reader, info = await self._resolve(name)
            part = PartFile(target, uuid.uuid4().hex)
            try:
                await reader.write_to(info, part)
                await keep(part)
                return info
            except DigestMismatch:
                if attempt == READ_ATTEMPTS - 1 or not await reader.is_replaced(info):
                    raise
            finally:
                part.discard()
        raise AssertionError("unreachable")

    async def chunks(self, name: str) -> AsyncIterator[bytes]:
        """Yield the content in pieces. They are valid only if the iteration ends without an error.

        Raises:
            ObjectNotFound: The object does not exist.
            DigestMismatch: The stored bytes do not match the digest of the put, or the object was replaced while it was
                read.
        """
        reader, info = await self._resolve(name)
        async with aclosing(reader.read(info)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def list(self) -> AsyncIterator[ObjectInfo]:
        """List all objects and links, each once. Memory grows with the names listed so far.

        Raises:
            RequestTimeout: Nothing arrived for as long as the context's ``timeout``; the whole listing may take longer.
            StreamRecreated: The bucket was deleted and re-created during the call.
        """
        seen: set[str] = set()
        async with aclosing(self._present("list")) as infos:
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
        """Yield all present objects, then every change, without end.

        Survives reconnects and restarts. When an object changes several times between two reads, only the last change
        is yielded.

        Args:
            initial_marker: Yield None once, between the present objects and the changes.
            updates_only: Begin with the next change.
            ignore_deletes: Leave out deletions.

        Raises (while iterating):
            StreamNotFound: The bucket was deleted; usually detected at once, and within 11 seconds.
            StreamRecreated: The bucket was deleted and re-created. The entries yielded so far are from the old one:
                discard them, and watch again.
            RequestTimeout: No answer within the context's ``timeout`` at the start of the watch.
        """
        options = watch_options(self.bucket, updates_only=updates_only)
        return self._watch.changes(options, initial_marker=initial_marker, ignore_deletes=ignore_deletes)

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
                # The metadata may be stored already, or still become so: without its chunks the object would be broken.
                patience.check(clock.now(), error)
                if attempt == COMMIT_ATTEMPTS - 1:
                    raise
            except JetSparkError:
                await self._purge(upload.nuid)
                raise
        if upload.replaced_nuid:
            await self._purge(upload.replaced_nuid)
        return stored

    def _sending(self, upload: Upload, progress: Progress) -> ChunkWriter | FastChunkWriter:
        subject = chunk_subject(self.bucket, upload.nuid)
        config = known_config(self._stream)
        options = fast_options(config, upload, self._context.client.max_payload_bytes, progress.timeout_s)
        if options is None:
            return ChunkWriter(self._context, subject, progress)
        check = self._objects.check_chunks(upload)
        return FastChunkWriter(self._context, subject, progress, FastPublisherOptions(**options), check)

    async def _abandon(self, upload: Upload, sending: ChunkWriter | FastChunkWriter, progress: Progress) -> None:
        timeout_s = self._context.timeout_s
        settle_s = progress.in_flight_wait_s(timeout_s)
        deadline = clock.now() + settle_s
        if await sending.wait_for_outcome(settle_s):
            await self._purge(upload.nuid, progress.clean_up_s(timeout_s, deadline - clock.now()))

    async def _delete(self, name: str) -> None:
        deadline = clock.now() + self._context.timeout_s
        try:
            nuid = await self._context.run(self._objects.delete(name))
            await self._purge(nuid, max(0.0, deadline - clock.now()))
        except BaseException as error:
            if is_interrupt(error):  # its chunks may be orphaned by now
                with suppress(JetSparkError):
                    await self._purge(await self._context.run(self._objects.finish_delete(name)))
            raise

    async def _update_meta(self, name: str, meta: ObjectMeta) -> ObjectInfo:
        try:
            return await self._context.run(self._objects.update_meta(name, meta))
        except BaseException as error:
            if is_interrupt(error) and meta.name != name:  # both names may refer to its chunks
                with suppress(JetSparkError):
                    await self._context.run(self._objects.finish_rename(name, meta.name))
            raise

    async def _purge(self, nuid: str, timeout: float | None = None) -> None:
        """Remove unused chunks. A failure is logged only: it wastes space and does no other harm."""
        try:
            await self._context.run(self._objects.purge_chunks(nuid), timeout)
        except JetSparkError as error:
            _logger.warning(
                "bucket %r: chunks %s not purged (%s); purge_orphans removes them", self.bucket, nuid, error
            )

    async def _add_link(self, name: str, link: ObjectLink) -> ObjectInfo:
        return await self._context.run(self._objects.add_link(name, uuid.uuid4().hex, link, _now()))

    # ---- steps of reading --------------------------------------------------------------------------------------

    async def _resolve(self, name: str) -> tuple[ObjectReader, ObjectInfo]:
        """Follow links from a name to an object; return the reader of its bucket and the object's info."""
        stream, info = await self._context.run(resolve(self._objects, name))
        if stream is None:
            return self._reader, info
        return ObjectReader(self._context, Stream(self._context, stream)), info

    def _present(self, what: str) -> AsyncGenerator[ObjectInfo, None]:
        return self._watch.present(watch_options(self.bucket), f"{what} of object store {self.bucket!r}")

    def __repr__(self) -> str:
        return f"<ObjectStore {self.bucket}>"


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
