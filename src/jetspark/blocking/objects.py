# Generated from aio/objects.py by tools/unasync.py; edit that file.
"""Object stores from threads. What they are and what they are asked is in :mod:`jetspark.jetstream.objects`."""

from __future__ import annotations

import datetime
import io
import logging
import os
import uuid
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing, suppress
from functools import partial
from typing import Literal, overload

from jetspark.blocking import clock
from jetspark.blocking.context import DriverContext
from jetspark.blocking.files import READ_BYTES, Source, chunks_of, keep
from jetspark.blocking.finishing import is_interrupt, see_through
from jetspark.blocking.object_reading import ObjectReader
from jetspark.blocking.object_sending import FastSending, Sending
from jetspark.blocking.ordered import Watch
from jetspark.blocking.stream import Stream, known_config
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

_logger = logging.getLogger("jetspark.blocking")


class ObjectStore:
    """A bucket of objects of any size, each with a name, a digest and metadata.

    An object is visible when all of it is stored, and replaced in one moment. Every read is checked against the digest
    its writer left. Memory stays bounded whatever the size, except where a method returns a whole object.

    Like :class:`JetStream`, what asks the server raises ``ServerError`` when it says no, ``JetStreamUnavailable`` when
    nobody answers for it, and ``RequestTimeout`` when no answer came in time: then
    a write may be stored or not.
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
        """Store an object under a name, in place of an earlier one; returns when all of it is stored.

        When this raises, the name has what it had before, and the chunks that were stored are removed
        again. If the connection is gone for good they cannot be: :meth:`purge_orphans` finds them. Interrupted in its
        very last step, the object is either stored as a whole or not at all.

        Args:
            source: Bytes, a :class:`pathlib.Path`, a file opened in binary mode (read from where it
                stands, and left open), or an iterator of bytes in pieces of any size.
            chunk_bytes: Size of the messages it is cut into; at most the server's ``max_payload``.
            timeout: Longest time the server may take to acknowledge anything (default: the context's); all of it may
                take longer. A restart takes seconds, the election of a leader up to ten.

        Raises:
            ConfigError: There are no bytes to be had from ``source``.
            ServerError: The bucket is full, or sealed.
            RequestTimeout: Nothing was acknowledged for ``timeout`` seconds.
            ConnectionLost: The connection went away, and so did chunks, or somebody purged them; put it again.
        """
        meta = ObjectMeta(name=name, description=description, headers=headers, metadata=metadata)
        upload = Upload(uuid.uuid4().hex, chunk_bytes, READ_BYTES)
        upload.info(self.bucket, meta, _now())  # headers that cannot be written are better refused now
        self._context.connection.address(meta_subject(self.bucket, name))  # and so is a name that is too long
        progress = Progress(self.bucket, name, timeout_of(timeout, self._context.timeout_s))
        sending = self._sending(upload, progress)
        began, is_sent = clock.now(), False
        try:
            with closing(chunks_of(upload, source)) as chunks:
                for chunk in chunks:
                    sending.send(chunk)
            sending.complete()
            if upload.chunks > 1 or clock.now() >= began + LONG_PUT_S:
                with progress.awaited():
                    self._context.run(self._objects.check_chunks(upload), progress.timeout_s)
            is_sent = True
            return see_through(partial(self._commit, upload, meta, progress))
        except BaseException as error:
            if not is_sent:
                see_through(partial(self._abandon, upload, sending, progress))
            elif is_interrupt(error):
                # The object may be visible any moment: only doing all of it again tells which chunks nobody needs.
                with suppress(JetSparkError):
                    self._commit(upload, meta, progress)
            raise

    def update_meta(self, name: str, meta: ObjectMeta) -> ObjectInfo:
        """Change what is said about an object, all of it, and its name if ``meta`` has another.

        Raises:
            ObjectNotFound: There is no such object.
            KeyExists: There is one of the new name.
            Conflict: It was replaced, renamed or deleted at the same time; nothing was changed.
            RequestTimeout: No answer in time. If it was to be renamed, both names may have it: do not delete one, call
                this again.
        """
        return see_through(partial(self._update_meta, name, meta))

    def delete(self, name: str) -> None:
        """Delete an object; a mark stays, so that watchers see it.

        Raises:
            ObjectNotFound: There is no such object.
        """
        see_through(partial(self._delete, name))

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
            chunk_subject(self.bucket, info.nuid) for info in self._present("purge_orphans") if not info.is_deleted
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
            DigestMismatch: The bytes in the bucket are not those that were put.
        """
        for attempt in range(READ_ATTEMPTS):
            reader, info = self._resolve(name)
            # Joining a list of chunks would need twice the memory, all of it new: that took 40 % of the time.
            whole = io.BytesIO()
            try:
                with closing(reader.read(info)) as chunks:
                    for chunk in chunks:
                        whole.write(chunk)
                return whole.getvalue()
            except DigestMismatch:
                if attempt == READ_ATTEMPTS - 1 or not reader.is_replaced(info):
                    raise
        raise AssertionError("unreachable")

    def get_file(self, name: str, target: str | os.PathLike[str] | BinaryWriter) -> ObjectInfo:
        """Write an object to a file.

        A path gets the whole object, checked, in one moment, or is left as it is. A file opened in binary mode is
        written to as the chunks come; after an error it has a part of the object.

        Raises:
            ObjectNotFound: There is no such object.
            DigestMismatch: The bytes in the bucket are not those that were put.
        """
        if not isinstance(target, str | os.PathLike):
            if isinstance(target, type) or not callable(getattr(target, "write", None)):
                raise unfit("target", target, "a path, or a file opened for writing in binary mode")
            reader, info = self._resolve(name)
            reader.write_to(info, target)
            return info
        for attempt in range(READ_ATTEMPTS):
            reader, info = self._resolve(name)
            part = PartFile(target, uuid.uuid4().hex)
            try:
                reader.write_to(info, part)
                keep(part)
                return info
            except DigestMismatch:
                if attempt == READ_ATTEMPTS - 1 or not reader.is_replaced(info):
                    raise
            finally:
                part.discard()
        raise AssertionError("unreachable")

    def chunks(self, name: str) -> Iterator[bytes]:
        """The content, piece by piece. The pieces count only when the iteration ends without an error.

        Raises:
            ObjectNotFound: There is no such object.
            DigestMismatch: The bytes in the bucket are not those that were put, or the object was replaced meanwhile.
        """
        reader, info = self._resolve(name)
        with closing(reader.read(info)) as chunks:
            yield from chunks

    def list(self) -> Iterator[ObjectInfo]:
        """Every object, links included, each once. Their names are kept in memory meanwhile.

        Raises:
            RequestTimeout: Nothing came for as long as the context's ``timeout``; the listing as a whole may take
                longer.
            StreamRecreated: The bucket was deleted and made again in the middle.
        """
        seen: set[str] = set()
        with closing(self._present("list")) as infos:
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
            StreamRecreated: The bucket was deleted and made again. The entries shown so far are of the old one:
                forget them, and watch again.
            RequestTimeout: No answer within the context's ``timeout`` when the watch was to begin.
        """
        options = watch_options(self.bucket, updates_only=updates_only)
        return self._watch.changes(options, initial_marker=initial_marker, ignore_deletes=ignore_deletes)

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

    def _sending(self, upload: Upload, progress: Progress) -> Sending | FastSending:
        subject = chunk_subject(self.bucket, upload.nuid)
        config = known_config(self._stream)
        options = fast_options(config, upload, self._context.client.max_payload_bytes, progress.timeout_s)
        if options is None:
            return Sending(self._context, subject, progress)
        check = self._objects.check_chunks(upload)
        return FastSending(self._context, subject, progress, FastPublisherOptions(**options), check)

    def _abandon(self, upload: Upload, sending: Sending | FastSending, progress: Progress) -> None:
        timeout_s = self._context.timeout_s
        settle_s = progress.in_flight_wait_s(timeout_s)
        deadline = clock.now() + settle_s
        if sending.settle(settle_s):
            self._purge(upload.nuid, progress.clean_up_s(timeout_s, deadline - clock.now()))

    def _delete(self, name: str) -> None:
        deadline = clock.now() + self._context.timeout_s
        try:
            nuid = self._context.run(self._objects.delete(name))
            self._purge(nuid, max(0.0, deadline - clock.now()))
        except BaseException as error:
            if is_interrupt(error):  # its chunks may be nobody's by now
                with suppress(JetSparkError):
                    self._purge(self._context.run(self._objects.finish_delete(name)))
            raise

    def _update_meta(self, name: str, meta: ObjectMeta) -> ObjectInfo:
        try:
            return self._context.run(self._objects.update_meta(name, meta))
        except BaseException as error:
            if is_interrupt(error) and meta.name != name:  # both names may have its chunks
                with suppress(JetSparkError):
                    self._context.run(self._objects.finish_rename(name, meta.name))
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

    def _resolve(self, name: str) -> tuple[ObjectReader, ObjectInfo]:
        """The object behind a name, however many links away, and who reads the bucket it is in."""
        stream, info = self._context.run(resolve(self._objects, name))
        if stream is None:
            return self._reader, info
        return ObjectReader(self._context, Stream(self._context, stream)), info

    def _present(self, what: str) -> Generator[ObjectInfo, None, None]:
        return self._watch.present(watch_options(self.bucket), f"{what} of object store {self.bucket!r}")

    def __repr__(self) -> str:
        return f"<ObjectStore {self.bucket}>"


def _now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)
