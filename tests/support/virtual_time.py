"""An event loop in virtual time: nothing is waited for, and a run with a seed is the same every time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

# One step of the loop takes this long, so that time passes also while nobody sleeps.
STEP_S = 1e-6


class _Selector(selectors.SelectSelector):
    """Instead of waiting it is later. Nothing here reads from sockets but the loop's own wake-up pipe."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._virtual = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "every task waits for another one"
        self._virtual.now += max(timeout, STEP_S)
        try:
            self._virtual.on_step()
        except BaseException:
            self._virtual.on_step = lambda: None  # one complaint is enough; the loop has to end its tasks
            raise
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """``on_step`` is called between any two steps of the loop: what it looks at is what another thread could see."""

    def __init__(self, on_step: Callable[[], None] = lambda: None) -> None:
        self.now = 1000.0
        self.on_step = on_step
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now


def run(main: Callable[[VirtualLoop], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        runner.run(main(loop))
