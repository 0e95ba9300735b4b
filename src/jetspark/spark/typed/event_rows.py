"""Typed rows of the messages that tasks read."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pyarrow as pa
from pyspark.sql.types import StructType

from jetspark.app.application import App
from jetspark.app.columns.event_columns import ENVELOPE
from jetspark.app.columns.typed_rows import ARCHIVE_COLUMNS, TypedRows, typed_schema
from jetspark.app.contracts.catalogue import Contract
from jetspark.core.message import CoreMessage
from jetspark.core.subjects import on_one_of
from jetspark.errors import ConfigError
from jetspark.jetstream.info import StoredMessage
from jetspark.spark.schema import SCHEMA, Columns
from jetspark.spark.typed.event_options import EventOptions
from jetspark.state.scan import Range

__all__ = ["EventRowMaker", "arrow_schema"]

_logger = logging.getLogger("jetspark.spark")

_RAW = StructType([SCHEMA[name] for name in ("subject", "stream", "sequence", "timestamp", "headers")])


def arrow_schema(contracts: Sequence[Contract], *, keeps: bool) -> pa.Schema:
    """The columns of a read; see :func:`~jetspark.app.columns.typed_rows.typed_schema`."""
    return typed_schema(contracts, keeps=keeps, is_flat=len(contracts) == 1)


class EventRowMaker:
    """Makes record batches of typed events; a :class:`~jetspark.spark.stream.reading.RowMaker`."""

    needs_contents = True
    archive_columns = ARCHIVE_COLUMNS

    def __init__(
        self, app: App, contracts: Sequence[Contract], options: EventOptions, schema: pa.Schema, part: Range
    ) -> None:
        """
        Raises:
            ConfigError: The columns are not those of the types here: the driver's code declares other fields.
        """
        _check_columns(schema, arrow_schema(contracts, keeps=options.keeps), options)
        self._types, self._part, wanted = options.type, part, options.event_subjects
        self._typed = TypedRows(
            app.catalogue,
            contracts,
            schema,
            is_flat=len(contracts) == 1,
            unreadable=options.unreadable,
            is_wanted=None if set(part.subjects) == set(wanted) else on_one_of(wanted),
        )
        self._has_headers = options.include_headers
        self._raw = Columns(_RAW, has_headers=options.include_headers, created="")

    def of_messages(self, stream: str, messages: Sequence[CoreMessage]) -> pa.RecordBatch:
        return self._typed.make(messages, self._raw.of_messages(stream, messages))

    def of_stored(self, stream: str, messages: Sequence[StoredMessage]) -> pa.RecordBatch:
        return self._typed.make(messages, self._raw.of_stored(stream, messages))

    def of_archived(self, stream: str, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Convert rows of an archive that have :attr:`archive_columns`."""
        return self._typed.of_archived(rows, has_headers=self._has_headers)

    def warn(self) -> None:
        """Log how many messages could not be read."""
        if self._typed.unreadable:
            part, typed = self._part, self._typed
            _logger.warning(
                "stream %s, sequences %d to %d: %d messages cannot be read as %s; the first: %s",
                *(part.stream, part.start, part.end - 1, typed.unreadable, ", ".join(self._types), typed.first_error),
            )


def _check_columns(asked: pa.Schema, own: pa.Schema, options: EventOptions) -> None:
    """Check a schema, which may have some of the columns, and of ``_event`` some of the fields."""
    for field in asked:
        known = own.field(field.name) if field.name in own.names else None
        is_same = known is not None and known.type == field.type
        if known is not None and field.name == ENVELOPE and pa.types.is_struct(field.type):
            is_same = set(field.type) <= set(known.type)
        if not is_same:
            expected = f"expected {known.type}" if known is not None else f"the columns are {', '.join(own.names)}"
            raise ConfigError(
                f"column {field.name!r} as {field.type}: {expected}. If it is not a schema of your own, the driver has "
                f"another app {options.app!r} than this worker: ship the same code to all, and start a new session, "
                "since workers keep what they have imported"
            )
