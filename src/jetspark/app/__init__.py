"""Event applications: typed events, handlers with retries and dead letters, effects that happen once."""

from jetspark.app.application import App, HandlerSpec
from jetspark.app.retry import Breaker, HandlerTimeout, Reject, Retry, RetryIn, Skip

__all__ = [
    "App",
    "Breaker",
    "HandlerSpec",
    "HandlerTimeout",
    "Reject",
    "Retry",
    "RetryIn",
    "Skip",
]
