"""Events as Arrow columns, in both directions: ``EventColumns(contract)``."""

from jetspark.app.columns.column_types import ColumnFault
from jetspark.app.columns.event_columns import ArrowRows, EventColumns, EventRows

__all__ = ["ArrowRows", "ColumnFault", "EventColumns", "EventRows"]
