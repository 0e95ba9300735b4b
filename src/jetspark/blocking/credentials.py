"""Calling the user's credentials function, which may be slow or hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from jetspark.errors import RequestTimeout

__all__ = ["SecretAsking"]


class _Call(threading.Thread):
    """One call of the user's function on its own thread."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(name="jetspark-credentials", daemon=True)
        self._function = function
        self.result: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.result = self._function()
        except Exception as error:
            self.error = error


class SecretAsking:
    """Calls the user's function on a thread of its own, so that a function that hangs does not block reconnects.

    While a call hangs, the function is not called again, so at most one such thread exists.
    """

    def __init__(self) -> None:
        self._asking: _Call | None = None

    def ask(self, source: Callable[[], Any], timeout_s: float) -> Any:
        """Return the credentials.

        Raises:
            RequestTimeout: The function did not return within ``timeout_s``.
            Exception: Any error of the function.
        """
        if self._asking is None or not self._asking.is_alive():
            self._asking = _Call(source)
            self._asking.start()
        asking = self._asking
        asking.join(timeout_s)
        if asking.is_alive():
            raise RequestTimeout("the function that gives the credentials", timeout_s)
        self._asking = None
        if asking.error is not None:
            raise asking.error
        return asking.result
