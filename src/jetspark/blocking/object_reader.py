# Generated from aio/object_reader.py by tools/unasync.py; edit that file.
"""Reading the chunks of an object, from threads."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import cast

from jetspark.blocking import clock
from jetspark.blocking.context import DriverContext
from jetspark.blocking.files import write_to
from jetspark.blocking.stream import Stream, known_config
from jetspark.errors import MessageNotFound, ObjectNotFound
from jetspark.jetstream.info import StoredMessage
from jetspark.jetstream.objects import BinaryWriter, Download, ObjectInfo, Objects, chunk_subject, lag_pauses

__all__ = ["ObjectReader"]


class ObjectReader:
    """Reads the objects of one bucket, each checked against its digest."""

    def __init__(self, context: DriverContext, stream: Stream) -> None:
        self._context, self._stream = context, stream
        self._objects = Objects(context.api, known_config(stream))

    def is_replaced(self, info: ObjectInfo) -> bool:
        """True if the name now belongs to another object, or the object was deleted."""
        try:
            return (self._context.run(self._objects.info(info.name, include_deleted=False))).nuid != info.nuid
        except ObjectNotFound:
            return True

    def write_to(self, info: ObjectInfo, file: BinaryWriter) -> None:
        """Write the content to a file."""
        write_to(file, self.read(info))

    def read(self, info: ObjectInfo) -> Generator[bytes, None, None]:
        """Yield the content in pieces; the digest is checked at the end."""
        download = Download(info)
        subject = chunk_subject(self._objects.name, info.nuid)
        config = known_config(self._stream)
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
        """Yield the stored chunks with direct gets of bounded size, which also bounds the read-ahead.

        An ordered consumer is 10 to 25 % faster, but would wait without end for chunks that a replacing put purges.
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
        """Yield the stored chunks one by one, for buckets of old clients, which do not allow direct gets."""
        for _ in range(download.missing_chunks + 1):
            try:
                message = self._stream.get_message(start, next_for=subject, direct=False)
            except MessageNotFound:
                return
            start = message.sequence + 1
            yield message
