"""Waiting for acknowledgements of single messages from threads."""

from __future__ import annotations

import time
from collections.abc import Sequence

from jetspark.blocking.publisher import AckFuture
from jetspark.errors import RequestTimeout

__all__ = ["NOT_SENT", "error_of", "errors_of", "wait_for"]

# A publish that raises one of these has sent nothing. An interrupted publish may have sent its message.
NOT_SENT = Exception


def wait_for(future: AckFuture, timeout_s: float, what: str) -> None:
    """Wait until the message is stored.

    Raises:
        RequestTimeout: No acknowledgement within ``timeout_s``.
    """
    future.result(timeout_s)


def error_of(future: AckFuture) -> Exception | None:
    """Wait for the acknowledgement; return its error, or None when the message is stored."""
    return future.exception()


def errors_of(futures: Sequence[AckFuture], timeout_s: float) -> list[BaseException | None]:
    """Return the error of each future without raising it; None if it succeeded or is still pending at the timeout."""
    deadline = time.monotonic() + timeout_s
    found: list[BaseException | None] = []
    for future in futures:
        try:
            found.append(future.exception(max(deadline - time.monotonic(), 0.0)))
        except RequestTimeout:
            found.append(None)
    return found
