"""In which bucket a projection is. A projection that was rebuilt is in another bucket than the one it declares.

The bucket ``<app>_projections`` has a record for each projection that was swapped, under ``<projection>.bucket``: JSON
with the bucket in use, and the version of the fold that made it. One key, written by compare-and-set, is the whole
swap: who reads it before is in the old bucket, who reads it afterwards in the new one. Without a record a projection is
in the bucket it declares, at the version it declares.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import NamedTuple

from jetspark.aio.jetstream import JetStream
from jetspark.aio.kv import KeyValue
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.topology.names import projection_bucket
from jetspark.errors import KeyNotFound, ProtocolError, UsageError
from jetspark.jetstream.kv import KVEntry

__all__ = [
    "Alias",
    "BucketRef",
    "alias_key",
    "alias_of",
    "bucket_ref_of",
    "check_version",
    "find_bucket",
    "open_records",
    "swap",
    "watch_bucket",
]


class BucketRef(NamedTuple):
    """Where a projection is."""

    bucket: str
    version: int
    """Of the fold that made what is there."""

    def encode(self) -> bytes:
        return json.dumps({"bucket": self.bucket, "version": self.version}, sort_keys=True).encode()

    @classmethod
    def decode(cls, value: bytes) -> BucketRef:
        """
        Raises:
            ProtocolError: It is no such record.
        """
        try:
            fields = json.loads(value)
            bucket, version = fields["bucket"], fields["version"]
        except (ValueError, KeyError, TypeError):
            bucket = version = None
        if not isinstance(bucket, str) or not isinstance(version, int):
            raise ProtocolError(f"the record of a projection's bucket is not readable: {value[:200]!r}")
        return cls(bucket, version)


class Alias(NamedTuple):
    """A place, and the revision of the record that says so."""

    place: BucketRef
    revision: int
    """0 if there is no record: the projection is where it declares."""


def alias_key(projection: str) -> str:
    """The key of the record in ``<app>_projections``."""
    return f"{projection}.bucket"


def bucket_ref_of(spec: ProjectionSpec, record: bytes | None) -> BucketRef:
    """Where a projection is, according to its record; None if it has none."""
    return BucketRef(spec.bucket.bucket, spec.version) if record is None else BucketRef.decode(record)


def check_version(spec: ProjectionSpec, place: BucketRef) -> BucketRef:
    """The place, if this code may fold into it.

    Raises:
        UsageError: Another version of the projection has made what is there.
    """
    if place.version != spec.version:
        raise UsageError(
            f"projection {spec.name!r} is at version {place.version} (bucket {place.bucket}), and this code is version "
            f"{spec.version}: rebuild it and swap (jetspark rebuild --swap), or run the code of version {place.version}"
        )
    return place


async def open_records(js: JetStream, app: str) -> KeyValue:
    """The bucket of what is known of an application's projections.

    Raises:
        StreamNotFound: The application was not applied to this server.
    """
    return await js.kv(projection_bucket(app))


async def find_bucket(records: KeyValue, spec: ProjectionSpec) -> Alias:
    """Where a projection is now."""
    try:
        entry = await records.get(alias_key(spec.name), direct=False)
    except KeyNotFound:
        return Alias(bucket_ref_of(spec, None), 0)
    return Alias(BucketRef.decode(entry.value), entry.revision)


async def swap(records: KeyValue, spec: ProjectionSpec, new: BucketRef, *, revision: int) -> int:
    """Say that a projection is in another bucket from now on; returns the revision of the record.

    Args:
        revision: That of the :class:`Alias` it was decided on; 0 if there was no record.

    Raises:
        Conflict: Somebody else has swapped it meanwhile; nothing was written.
    """
    key = alias_key(spec.name)
    if revision == 0:
        return await records.create(key, new.encode())
    return await records.update(key, new.encode(), revision=revision)


async def watch_bucket(records: KeyValue, spec: ProjectionSpec) -> AsyncIterator[Alias]:
    """Where a projection is now, then each place that it is swapped to, until the connection is closed."""
    found = False
    async for entry in records.watch(alias_key(spec.name), initial_marker=True):
        if entry is not None:
            found = True
            yield alias_of(spec, entry)
        elif not found:
            yield Alias(bucket_ref_of(spec, None), 0)


def alias_of(spec: ProjectionSpec, entry: KVEntry) -> Alias:
    """What an entry of the record says; a record that was deleted says what is declared."""
    return Alias(bucket_ref_of(spec, entry.value if entry.operation == "put" else None), entry.revision)
