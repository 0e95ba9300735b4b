"""The workflow of ``support.fulfilment`` with timers of a moment, which Spark's workers import by name."""

from __future__ import annotations

from support.fulfilment import fulfilment

PAYMENT_S = 0.4

app = fulfilment(PAYMENT_S)
