"""A test kit for applications. It needs no server: handlers run alone, or on a model server in virtual time."""

from jetspark.app.golden import check_contracts
from jetspark.app.testing.alone import EffectCall, HandlerRun, run_handler
from jetspark.app.testing.kit import TestApp

__all__ = ["EffectCall", "HandlerRun", "TestApp", "check_contracts", "run_handler"]
