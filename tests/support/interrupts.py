"""Raise KeyboardInterrupt at a chosen step of a call, to see in which state it leaves things.

A signal's handler runs on the main thread, between two bytecodes. A trace function sees each bytecode before it is
executed and can raise there, so a test can try every place, one after the other, and a failure has a number that
reproduces it.

``at="signals"`` chooses the places where CPython itself looks for signals: at the beginning of a function, after a
call, at a jump backwards, and before a call, which stands for one that waits and is interrupted. ``at="any"`` is all
bytecodes, which is more than can happen: nothing comes between the end of a ``with`` block and its ``__exit__``.
"""

from __future__ import annotations

import dis
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Literal

import jetspark

__all__ = ["Interrupt", "Places", "count_places", "sample"]

Places = Literal["signals", "any"]

_OURS = str(Path(jetspark.__file__).parent)
_THEIRS = tuple(str(Path(module.__file__ or "")) for module in (threading, sys.modules["selectors"]))
_CALLS = frozenset({"CALL", "CALL_FUNCTION_EX", "CALL_KW"})
_LOOKS_AFTERWARDS = _CALLS | {"RESUME"}


class Interrupt:
    """``with Interrupt(number) as interrupt``: raise at that place of the block, counted from 0; None only counts.

    Only our own code is interrupted, and what it uses of ``threading`` and ``selectors``.
    """

    def __init__(self, number: int | None, *, at: Places = "signals", below: str = _OURS) -> None:
        self._number, self._at, self._below = number, at, below
        self._offsets: dict[CodeType, frozenset[int]] = {}
        self.count = 0
        """Places passed so far."""
        self.place = ""
        """Where it was raised; empty when it was not."""

    def __enter__(self) -> Interrupt:
        sys.settrace(self._on_call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(None)

    def _on_call(self, frame: FrameType, event: str, arg: object) -> Any:
        name = frame.f_code.co_filename
        if (not name.startswith(self._below) and name not in _THEIRS) or _is_collecting(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._on_opcode

    def _on_opcode(self, frame: FrameType, event: str, arg: object) -> Any:
        if event != "opcode":
            return self._on_opcode
        if self._at == "signals":
            offsets = self._offsets.get(frame.f_code)
            if offsets is None:
                offsets = self._offsets[frame.f_code] = frozenset(_signal_offsets(frame.f_code))
            if frame.f_lasti not in offsets:
                return self._on_opcode
        self.count += 1
        if self.count - 1 == self._number:
            code = frame.f_code
            self.place = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_qualname} +{frame.f_lasti}"
            raise KeyboardInterrupt(self.place)
        return self._on_opcode


def _is_collecting(frame: FrameType | None) -> bool:
    """Whether this is part of a ``__del__``, from which nothing can be raised."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def _signal_offsets(code: CodeType) -> Iterator[int]:
    handlers = {
        offset: entry.target
        for entry in dis.Bytecode(code).exception_entries
        for offset in range(entry.start, entry.end, 2)
    }
    before: list[dis.Instruction] = []
    for step in dis.get_instructions(code):
        # What is raised after a call is raised by the call; where another handler is in charge of the next step,
        # raising there would not be the same.
        is_after = (
            bool(before)
            and before[-1].opname in _LOOKS_AFTERWARDS
            and handlers.get(before[-1].offset) == handlers.get(step.offset)
        )
        is_before = step.opname in _CALLS and not _leaves_with(before)
        if is_after or is_before or "JUMP_BACKWARD" in step.opname:
            yield step.offset
        before.append(step)


def _leaves_with(before: list[dis.Instruction]) -> bool:
    """Whether the call that follows is ``__exit__(None, None, None)``."""
    arguments = [step for step in before[-5:] if step.opname != "PRECALL"][-3:]
    return len(arguments) == 3 and all(step.opname == "LOAD_CONST" and step.argval is None for step in arguments)


def count_places(call: Callable[[], object], *, at: Places = "signals") -> int:
    """How many places the call passes."""
    with Interrupt(None, at=at) as counting:
        call()
    return counting.count


def sample(places: int, at_most: int, seed: int) -> list[int]:
    """All places, or ``at_most`` of them, chosen by the seed."""
    if places <= at_most:
        return list(range(places))
    return sorted(random.Random(seed).sample(range(places), at_most))
