"""Typed tables beside the raw archive of an application's stream: one for each type of event."""

from jetspark.app.archive.typed_tables import TypedTables

__all__ = ["TypedTables"]
