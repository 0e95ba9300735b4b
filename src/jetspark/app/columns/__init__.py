"""Events as Arrow columns, in both directions: ``EventColumns(contract)``."""

from jetspark.app.columns.column_types import ColumnFault
from jetspark.app.columns.event_columns import ENVELOPE, UNREADABLE, ArrowRows, EventColumns, EventRows

__all__ = ["ENVELOPE", "UNREADABLE", "ArrowRows", "ColumnFault", "EventColumns", "EventRows"]
