"""The part of both drivers' transactions (writing several keys of a bucket together) that does not wait. Pure."""

from __future__ import annotations

from jetspark.jetstream.kv import Bucket, Writes
from jetspark.publish.atomic import AtomicBatchBase, Outcome
from jetspark.publish.block import Block

__all__ = ["TransactionBase"]


class TransactionBase(Block):
    """The writes of a transaction, and its outcome."""

    _batch: AtomicBatchBase

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._writes = Writes(bucket)
        self.revisions: dict[str, int] = {}
        """The revision of each written key, once committed; deleted keys included."""

    @property
    def outcome(self) -> Outcome:
        """``"open"``, ``"stored"``, ``"not stored"``, or ``"unknown"`` when the commit was not answered."""
        return self._batch.outcome

    @property
    def _open(self) -> Writes:
        """The writes, to add one.

        Raises:
            UsageError: The block has not begun, or is over.
        """
        self._check_inside()
        return self._writes

    def _store_revisions(self) -> None:
        if self._batch.outcome == "stored":
            self.revisions = self._writes.revisions(self._batch.ack)
