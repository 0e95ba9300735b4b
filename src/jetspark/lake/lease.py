"""The lease of an archive's writer: a record with a TTL in the stream's account, so that two writers rarely compete.

Two writers are wasteful and never wrong, because a commit is refused if the table has moved. So an owner that cannot
renew its lease continues, and correctness does not depend on clocks. The revision of the record at its creation is the
*epoch* of the owner. It is in each commit, so a writer that was suspended for hours is refused as soon as its successor
has committed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from contextlib import suppress

from jetspark.blocking import JetStream, clock
from jetspark.blocking.kv import KeyValue
from jetspark.errors import Conflict, JetSparkError, KeyExists, KeyNotFound, StreamNotFound
from jetspark.jetstream.kv import KVConfig

__all__ = ["BUCKET", "WriterLease"]

_logger = logging.getLogger("jetspark.lake")

BUCKET = "jetspark_archives"
MARKER_TTL_S = 1.0


class WriterLease:
    """The lease of one stream's archive at one place.

    Args:
        uri: The root of the archive.
        lease_s: Seconds after which the lease of a dead owner is free.
        replicas: Replicas of the bucket, if it is created here.
    """

    def __init__(self, js: JetStream, stream: str, uri: str, *, lease_s: float, replicas: int | None = None) -> None:
        self._js, self._stream, self._lease_s, self._replicas = js, stream, lease_s, replicas
        self._key = hashlib.sha256(f"{stream}\n{uri}".encode(errors="surrogateescape")).hexdigest()[:32]
        self._owner = f"{socket.gethostname()} process {os.getpid()} {os.urandom(4).hex()}".encode()
        self._records: KeyValue | None = None
        self._revision = 0
        self._renew_at = 0.0
        self.epoch = 0
        """The epoch of the lease that this writer owns, or owned last."""

    @property
    def is_owned(self) -> bool:
        return self._revision > 0

    def acquire(self) -> str | None:
        """Acquire the lease if it is free; else the name of its owner."""
        records = self._bucket()
        try:
            self._revision = self.epoch = records.create(self._key, self._owner, ttl=self._lease_s)
        except KeyExists:
            with suppress(KeyNotFound):
                entry = records.get(self._key, direct=False)
                if entry.value != self._owner:
                    return entry.value.decode(errors="replace")
                self._revision = self.epoch = entry.revision  # the answer to our own `create` was lost
            if not self._revision:
                return "a writer that has just ended"
        self._renew_at = clock.now() + self._lease_s / 3
        return None

    def keep(self) -> None:
        """Renew the lease, if that is due. Without an owner afterwards, see :attr:`is_owned`."""
        if not self._revision or clock.now() < self._renew_at:
            return
        self._renew_at = clock.now() + self._lease_s / 3
        try:
            self._revision = self._bucket().update(self._key, self._owner, revision=self._revision, ttl=self._lease_s)
        except Conflict:
            self._revision = 0  # it expired, and may have a new owner
        except JetSparkError as error:
            if not error.may_pass:
                raise
            _logger.warning("lease of the archive of stream %s cannot be renewed: %s", self._stream, error)

    def lose(self) -> None:
        """Another writer has committed with a higher epoch."""
        self._revision = 0

    def release(self) -> None:
        """Free the lease, so that the next writer need not wait until it expires."""
        revision, self._revision = self._revision, 0
        if revision:
            with suppress(JetSparkError):  # it expires anyway
                self._bucket().purge(self._key, revision=revision, ttl=MARKER_TTL_S)

    def _bucket(self) -> KeyValue:
        if self._records is None:
            try:
                self._records = self._js.kv(BUCKET)
            except StreamNotFound:
                description = "Which process writes which archive."
                config = KVConfig(
                    bucket=BUCKET, description=description, limit_marker_ttl_s=MARKER_TTL_S, replicas=self._replicas
                )
                self._records = self._js.create_kv(config)
        return self._records
