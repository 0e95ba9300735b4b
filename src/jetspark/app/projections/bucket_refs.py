"""The bucket that a projection uses. After a rebuild that is another bucket than the declared one.

The bucket ``<app>_projections`` has a record for each swapped projection under ``<projection>.bucket``: JSON with the
bucket in use and the version of the fold that filled it. The swap is one compare-and-set on this key: readers use the
old bucket before it and the new one after it. Without a record a projection uses the bucket and the version it
declares.
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
    """A bucket, and the version of the fold that filled it."""

    bucket: str
    version: int

    def encode(self) -> bytes:
        return json.dumps({"bucket": self.bucket, "version": self.version}, sort_keys=True).encode()

    @classmethod
    def decode(cls, value: bytes) -> BucketRef:
        """
        Raises:
            ProtocolError: The value is not such a record.
        """
        try:
            fields = json.loads(value)
            bucket, version = fields["bucket"], fields["version"]
        except (ValueError, KeyError, TypeError):
            bucket = version = None
        if not isinstance(bucket, str) or not isinstance(version, int):
            raise ProtocolError(f"the record of a projection's bucket cannot be decoded: {value[:200]!r}")
        return cls(bucket, version)


class Alias(NamedTuple):
    """The bucket in use, and the revision of its record."""

    ref: BucketRef
    revision: int
    """0 without a record: the projection uses the bucket it declares."""


def alias_key(projection: str) -> str:
    """The key of the record in ``<app>_projections``."""
    return f"{projection}.bucket"


def bucket_ref_of(spec: ProjectionSpec, record: bytes | None) -> BucketRef:
    """The bucket that a record names; the declared one without a record."""
    return BucketRef(spec.bucket.bucket, spec.version) if record is None else BucketRef.decode(record)


def check_version(spec: ProjectionSpec, ref: BucketRef) -> BucketRef:
    """``place``, if this code may fold into it.

    Raises:
        UsageError: Another version of the projection filled the bucket.
    """
    if ref.version != spec.version:
        raise UsageError(
            f"projection {spec.name!r} is at version {ref.version} (bucket {ref.bucket}), and this code is version "
            f"{spec.version}: rebuild it and swap (jetspark rebuild --swap), or run the code of version {ref.version}"
        )
    return ref


async def open_records(js: JetStream, app: str) -> KeyValue:
    """Open the bucket with the records of an application's projections.

    Raises:
        StreamNotFound: `jetspark apply` has not created it on this server.
    """
    return await js.kv(projection_bucket(app))


async def find_bucket(records: KeyValue, spec: ProjectionSpec) -> Alias:
    """The bucket in use, read from the leader."""
    try:
        entry = await records.get(alias_key(spec.name), direct=False)
    except KeyNotFound:
        return Alias(bucket_ref_of(spec, None), 0)
    return Alias(BucketRef.decode(entry.value), entry.revision)


async def swap(records: KeyValue, spec: ProjectionSpec, new: BucketRef, *, revision: int) -> int:
    """Switch a projection to another bucket; returns the revision of the record.

    Args:
        revision: The revision of the :class:`Alias` that the decision is based on; 0 if there was no record.

    Raises:
        Conflict: The record has changed since; nothing was written.
    """
    key = alias_key(spec.name)
    if revision == 0:
        return await records.create(key, new.encode())
    return await records.update(key, new.encode(), revision=revision)


async def watch_bucket(records: KeyValue, spec: ProjectionSpec) -> AsyncIterator[Alias]:
    """Yields the bucket in use, then each bucket that the projection is swapped to, until the connection is closed."""
    found = False
    async for entry in records.watch(alias_key(spec.name), initial_marker=True):
        if entry is not None:
            found = True
            yield alias_of(spec, entry)
        elif not found:
            yield Alias(bucket_ref_of(spec, None), 0)


def alias_of(spec: ProjectionSpec, entry: KVEntry) -> Alias:
    """The bucket that an entry of the record names; the declared one if the record was deleted."""
    return Alias(bucket_ref_of(spec, entry.value if entry.operation == "put" else None), entry.revision)
