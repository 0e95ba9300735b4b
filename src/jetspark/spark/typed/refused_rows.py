"""Rows that are not valid events: counted until the task fails, or stored as dead letters.

A dead letter of a row has the row as JSON, with the metadata columns, and the reason. Its handler is ``spark``, a name
that no handler has: a redrive leaves it alone, because the row is repaired where it comes from. Its origin is the
query, the batch, the partition and the number of the row with a checksum, so a batch that runs again writes it once.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from zlib import crc32

import pyarrow as pa

from jetspark.app.clock import utc_now
from jetspark.app.contracts.catalogue import Contract
from jetspark.app.stored_events import SPARK_ROWS, FailureCause, Origin, StoredEvent
from jetspark.core.headers import Headers
from jetspark.errors import InvalidEvent, InvalidRows
from jetspark.spark.tasks import TaskId

__all__ = ["Reason", "RefusedRows", "invalid_rows"]

MAX_REASONS = 5
"""Reasons that an error names."""
MAX_TEXT = 200
_INDEX = re.compile(r"\[\d+\]")


@dataclass(slots=True)
class Reason:
    """A field and a rule that rows break."""

    text: str
    first: str
    """The first of these rows."""
    count: int = 0


def invalid_rows(where: str, rows: int, invalid: int, reasons: Iterable[Reason]) -> InvalidRows:
    """The error about rows, with the reasons that most of them have."""
    shown = sorted(reasons, key=lambda each: -each.count)[:MAX_REASONS]
    texts = [f"{each.count} x {each.text} (first: {each.first})" for each in shown]
    if left := invalid - sum(each.count for each in shown):
        texts.append(f"{left} for other reasons")
    return InvalidRows(where, rows, invalid, tuple(texts))


@dataclass(slots=True)
class RefusedRows:
    """The refused rows of one task."""

    task_id: TaskId
    store_letters: Callable[[list[StoredEvent]], None] | None = None
    """None where an invalid row fails the task."""
    count: int = 0
    reasons: dict[tuple[str, str, str], Reason] = field(default_factory=dict)
    """By type, field and rule; empty if rows become dead letters."""
    _letters: list[StoredEvent] = field(default_factory=list)

    @property
    def are_stored(self) -> bool:
        return self.store_letters is not None

    def add(
        self,
        first: int,
        batch: pa.RecordBatch,
        row: int,
        contract: Contract | None,
        event: object,
        name: str,
        rule: str,
    ) -> None:
        """Refuse a row of a batch whose first row is the task's row ``first``."""
        self.count += 1
        type = "" if contract is None else contract.type
        group = (type, _INDEX.sub("[]", name), rule)
        if not self.are_stored and group not in self.reasons and len(self.reasons) >= MAX_REASONS:
            return
        values = batch.slice(row, 1).to_pylist()[0]
        key = _key(contract, event, values)
        if self.are_stored:
            self._letters.append(self._letter(first + row, contract, key, name, rule, values))
            return
        known = self.reasons.get(group)
        if known is None:
            what = f"{type} " * bool(type) + (f"field {group[1]!r}: " if name else "")
            where = f"row {first + row} of partition {self.task_id.partition}"
            where += "" if key is None else f", key {key!r}"
            known = self.reasons[group] = Reason(f"{what}{rule}"[:MAX_TEXT], where)
        known.count += 1

    def check(self, rows: int) -> None:
        """
        Raises:
            InvalidRows: Rows were refused.
        """
        if self.count:
            raise invalid_rows(f"partition {self.task_id.partition}", rows, self.count, self.reasons.values())

    def store(self) -> None:
        """Store the dead letters of the rows that were refused since the last call."""
        if self._letters and self.store_letters is not None:
            letters, self._letters = self._letters, []
            self.store_letters(letters)

    def _letter(
        self, row: int, contract: Contract | None, key: str | None, name: str, rule: str, values: dict[str, object]
    ) -> StoredEvent:
        body = json.dumps(values, default=_as_json, ensure_ascii=False).encode("utf-8", "surrogatepass")
        query, batch, partition = self.task_id
        type, version = ("", 0) if contract is None else (contract.type, contract.version)
        error = InvalidEvent(type, version, name, rule)
        cause = FailureCause(
            error=f"{InvalidEvent.__module__}.{InvalidEvent.__qualname__}",
            message=str(error)[:2000],
            is_transient=False,
            fingerprint=hashlib.sha256(f"{type}\n{_INDEX.sub('[]', name)}".encode()).hexdigest()[:12],
        )
        return StoredEvent(
            handler=SPARK_ROWS,
            key=key,
            origin=Origin(f"spark:{query}:{batch}:{partition}", row, crc32(body)),
            subject=contract.subject.filter if contract is not None else "",
            data=body,
            headers=Headers({"Content-Type": "application/json"}),
            attempts=1,
            status="open",
            cause=cause,
            failed=utc_now().isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        )


def _key(contract: Contract | None, event: object, values: dict[str, object]) -> str | None:
    """The key of a row, as far as it can be told."""
    if contract is None or contract.key is None:
        return None
    try:
        found = contract.key_of(event) if event is not None else values.get(contract.key)
    except Exception:  # the value that a key is made of may be the one that is wrong
        return None
    return found if isinstance(found, str) and 0 < len(found) <= MAX_TEXT else None


def _as_json(value: object) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
