"""How long a test waits for what has to happen, before it says that it did not.

It guards against a hang and measures nothing: a machine that has much else to do may take a minute for what takes a
second. Where time is the subject, a test has a bound of its own, and compares with something much longer.
"""

from __future__ import annotations

__all__ = ["PATIENCE_S"]

# Well below the 300 s after which pytest ends a test, so that what fails says where.
PATIENCE_S = 120.0
