"""Waiting for acknowledgements of single messages from threads."""

from __future__ import annotations

import time
from collections.abc import Sequence

from jetspark.blocking.publisher import AckFuture
from jetspark.errors import RequestTimeout

__all__ = ["NOT_SENT", "error_of", "errors_of", "wait_for"]

# A publish that ends with one of these has sent nothing; one that was interrupted may have.
NOT_SENT = Exception


def wait_for(future: AckFuture, timeout_s: float, what: str) -> None:
    """Until the message is stored.

    Raises:
        RequestTimeout: There was no acknowledgement in time.
    """
    future.result(timeout_s)


def error_of(future: AckFuture) -> Exception | None:
    """Wait, and return what went wrong, if anything did."""
    return future.exception()


def errors_of(futures: Sequence[AckFuture], timeout_s: float) -> list[BaseException | None]:
    """What went wrong with each, as far as it is known after ``timeout_s``; nobody is made to raise it."""
    deadline = time.monotonic() + timeout_s
    found: list[BaseException | None] = []
    for future in futures:
        try:
            found.append(future.exception(max(deadline - time.monotonic(), 0.0)))
        except RequestTimeout:
            found.append(None)
    return found
