"""Lag: how far handlers, projections, archives and other readers are behind, and where that is going."""

from jetspark.app.lag.checkpoints import checkpoint_readers
from jetspark.app.lag.measures import PositionReader
from jetspark.app.lag.monitor import LagMonitor, lag
from jetspark.app.lag.outlook import LagOutlook
from jetspark.app.lag.report import DeadLetterLag, LagPart, LagReport, LagRow

__all__ = [
    "DeadLetterLag",
    "LagMonitor",
    "LagOutlook",
    "LagPart",
    "LagReport",
    "LagRow",
    "PositionReader",
    "checkpoint_readers",
    "lag",
]
