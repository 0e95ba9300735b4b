"""A test kit for applications. It needs no server: handlers run alone, or on a model server in virtual time."""

from jetspark.app.golden import check_contracts
from jetspark.app.testing.alone import EffectCall, HandlerRun, run_handler
from jetspark.app.testing.injecting import InjectedFault
from jetspark.app.testing.kit import TestApp
from jetspark.app.testing.steps import STEPS

__all__ = ["STEPS", "EffectCall", "HandlerRun", "InjectedFault", "TestApp", "check_contracts", "run_handler"]
