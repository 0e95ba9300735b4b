"""Interrupting a call anywhere, to see in which state it leaves things: at a bytecode of a thread, by a signal, from
another thread, at a step of the event loop, by a timeout.

A signal's handler runs on the main thread, between two bytecodes. A trace function sees each bytecode before it is
executed and can raise there, so a test can try every place, one after the other, and a failure has a number that
reproduces it. A signal, and an exception that is set from another thread, also hit the standard library and system
calls. An asyncio operation is cancelled after a number of the loop's steps, or by a timeout.
"""

from __future__ import annotations

import asyncio
import ctypes
import dis
import functools
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Literal, TypeVar

import jetspark
from support.in_place import run_in_place

__all__ = ["KINDS", "Call", "Ended", "Interrupt", "Interrupted", "Interruption", "Places", "at_bytecode"]
__all__ += ["apart", "count_places", "counted", "innermost", "sample"]

Call = Callable[[], Coroutine[Any, Any, Any]]
Places = Literal["signals", "any"]
"""``"signals"`` are the places where CPython itself looks for signals: at the beginning of a function, after a call, at
a jump backwards, and before a call, which stands for one that waits and is interrupted. ``"any"`` is all bytecodes,
which is more than can happen: nothing comes between the end of a ``with`` block and its ``__exit__``."""

SOURCE = str(Path(jetspark.__file__).parent)
_USED = tuple(str(Path(module.__file__ or "")) for module in (threading, sys.modules["selectors"]))
"""What our code waits in."""
_CALLS = frozenset({"CALL", "CALL_FUNCTION_EX", "CALL_KW"})
_LOOKS_AFTERWARDS = _CALLS | {"RESUME"}
HANGS_AFTER_S = 60.0


class Interrupted(KeyboardInterrupt):
    """What a blocking call is interrupted with."""


T = TypeVar("T")


@dataclass
class Ended:
    """How an interrupted operation ended."""

    result: Any = None
    error: BaseException | None = None
    steps: int = 0
    """Loop steps or bytecodes it took."""
    was_interrupted: bool = False
    """Whether the interruption came before it was over."""

    @property
    def is_complete(self) -> bool:
        return self.error is None


# ---- at a bytecode ---------------------------------------------------------------------------------------------------


class Interrupt:
    """``with Interrupt(number) as interrupt``: raise at that place of the block, counted from 0; None only counts.

    Only our own code is interrupted, and what it uses of ``threading`` and ``selectors``, unless ``below`` names
    something else. With ``spares_generators``, the next place after a generator was closed: nothing can be raised out
    of one that is collected.
    """

    def __init__(
        self,
        number: int | None,
        *,
        at: Places = "signals",
        below: tuple[str, ...] = (SOURCE, *_USED),
        spares_generators: bool = False,
    ) -> None:
        self._number, self._at, self._below = number, at, below
        self._spares_generators = spares_generators
        self.count = 0
        """Places passed so far."""
        self.place = ""
        """Where it was raised; empty when it was not."""

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        sys.settrace(self._on_call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        sys.settrace(self._before)

    def _on_call(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(self._below) or _is_collecting(frame):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._on_opcode

    def _on_opcode(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode" and (self._at == "any" or frame.f_lasti in _signal_offsets(frame.f_code)):
            if self._number is not None and self.count >= self._number and self._may_raise():
                code = frame.f_code
                self.place = f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_qualname} +{frame.f_lasti}"
                raise Interrupted(self.place)  # after which nothing is traced any more
            self.count += 1
        return self._on_opcode

    def _may_raise(self) -> bool:
        return not (self._spares_generators and isinstance(sys.exc_info()[1], GeneratorExit))


def _is_collecting(frame: FrameType | None) -> bool:
    """Whether this is part of a ``__del__``, from which nothing can be raised."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


@functools.cache
def _signal_offsets(code: CodeType) -> frozenset[int]:
    return frozenset(_find_signal_offsets(code))


def _find_signal_offsets(code: CodeType) -> Iterator[int]:
    handlers = {
        offset: entry.target
        for entry in dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]  # typeshed lacks it
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


def apart(call: Callable[[], T]) -> T:
    """Call in a generator, which has a state of handled exceptions of its own.

    An interrupt at one of ``"any"`` places, raised within the clean-up of an ``except``, leaves that ``except``'s
    exception there as handled (CPython 3.11). Without the generator, every exception that is raised later in this
    thread would have it as its context, also in other tests.
    """

    def calling() -> Iterator[T]:
        yield call()

    return next(calling())


def at_bytecode(call: Call, number: int | None) -> Ended:
    """Interrupt before the ``number``-th place of ours (None only counts them)."""
    ended = Ended()
    try:
        with Interrupt(number, below=(SOURCE,), spares_generators=True) as interrupt:
            ended.result = apart(lambda: run_in_place(call()))
    except BaseException as error:
        ended.error = error
    ended.steps, ended.was_interrupted = interrupt.count, bool(interrupt.place)
    return ended


# ---- by others -------------------------------------------------------------------------------------------------------


def by_signal(call: Call, delay_s: float) -> Ended:
    """Interrupt the main thread by a signal, as Ctrl-C does, after some time."""
    ended = Ended()
    is_over = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not is_over.is_set():
            ended.was_interrupted = True
            is_over.set()
            raise Interrupted(_place(frame))

    def send() -> None:
        time.sleep(delay_s)
        if not is_over.is_set():
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)

    sender = threading.Thread(target=send, name="interrupting")
    before = signal.signal(signal.SIGUSR2, interrupt)
    try:
        sender.start()
        ended.result = run_in_place(call())
        is_over.set()
    except BaseException as error:
        is_over.set()
        ended.error = error
    finally:
        sender.join()
        signal.signal(signal.SIGUSR2, before)
    return ended


def in_thread(call: Call, delay_s: float) -> Ended:
    """Interrupt a thread other than the main one after some time, at its next bytecode."""
    ended = Ended()
    lock = threading.Lock()
    is_over = False

    def work() -> None:
        nonlocal is_over
        try:
            try:
                ended.result = run_in_place(call())
            finally:
                with lock:
                    is_over = True
        except BaseException as error:
            ended.error = error

    thread = threading.Thread(target=work, name="interrupted", daemon=True)
    thread.start()
    time.sleep(delay_s)
    with lock:
        if not is_over and thread.ident is not None:
            ended.was_interrupted = True
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Interrupted))
    thread.join(HANGS_AFTER_S)
    assert not thread.is_alive(), f"hangs after it was interrupted:\n{_stack(thread)}"
    return ended


def innermost(error: BaseException | None) -> str:
    """The name of the last function of ours that an error came through."""
    steps = traceback.extract_tb(error.__traceback__) if error is not None else []
    names = [step.name for step in steps if step.filename.startswith(SOURCE)]
    return names[-1] if names else ""


def _place(frame: FrameType | None) -> str:
    while frame is not None and not frame.f_code.co_filename.startswith(SOURCE):
        frame = frame.f_back
    return "elsewhere" if frame is None else f"in {frame.f_code.co_qualname}, line {frame.f_lineno}"


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame is not None else "(gone)"


# ---- interrupting a task ---------------------------------------------------------------------------------------------


async def at_loop_step(call: Call, number: int | None) -> Ended:
    """Cancel after ``number`` steps of the loop (None only counts them)."""
    ended = Ended()
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(call())

    def step() -> None:
        if task.done():
            return
        if ended.steps == number:
            ended.was_interrupted = task.cancel()
            return
        ended.steps += 1
        loop.call_soon(step)

    loop.call_soon(step)
    return await _ended(ended, task)


async def by_timeout(call: Call, delay_s: float) -> Ended:
    ended = Ended()

    async def limited() -> Any:
        async with asyncio.timeout(delay_s) as limit:
            try:
                return await call()
            finally:
                ended.was_interrupted = limit.when() is not None and limit.expired()

    task = asyncio.ensure_future(limited())
    ended = await _ended(ended, task)
    if isinstance(ended.error, TimeoutError) and not isinstance(ended.error, jetspark.JetSparkError):
        ended.was_interrupted = True
        ended.error = asyncio.CancelledError("by a timeout")
    return ended


async def _ended(ended: Ended, task: asyncio.Future[Any]) -> Ended:
    done, _ = await asyncio.wait({task}, timeout=HANGS_AFTER_S)
    if not done:
        where = task.get_stack() if isinstance(task, asyncio.Task) else ""
        task.cancel()
        raise AssertionError(f"hangs after it was cancelled: {where}")
    try:
        ended.result = task.result()
    except BaseException as error:
        ended.error = error
    return ended


# ---- one face for both -----------------------------------------------------------------------------------------------


@dataclass
class Interruption:
    """Where to interrupt: ``share`` of the way through an operation, in one of the ways its driver has."""

    kind: str
    share: float

    async def of(self, call: Call, steps: int, took_s: float) -> Ended:
        number, delay_s = int(self.share * (steps + 1)), self.share * took_s
        match self.kind:
            case "step":
                ended = await at_loop_step(call, number)
            case "timeout":
                ended = await by_timeout(call, delay_s)
            case "bytecode":
                ended = at_bytecode(call, number)
            case "signal":
                ended = by_signal(call, delay_s)
            case "thread":
                ended = in_thread(call, delay_s)
            case _:
                raise AssertionError(self.kind)
        if ended.was_interrupted and not isinstance(ended.error, asyncio.CancelledError | Interrupted):
            raise AssertionError(f"it was interrupted and ended with {ended.result!r}") from ended.error
        if ended.error is not None and not ended.was_interrupted:
            raise ended.error
        return ended


KINDS = {
    "asyncio": ["step", "step", "step", "timeout"],
    "uvloop": ["step", "step", "step", "timeout"],
    "blocking": ["bytecode", "bytecode", "signal", "thread"],
}


async def counted(call: Call, driver: str) -> tuple[Ended, float]:
    """The operation uninterrupted: its steps and how long it took."""
    began = time.perf_counter()
    ended = at_bytecode(call, None) if driver == "blocking" else await at_loop_step(call, None)
    if ended.error is not None:
        raise ended.error
    return ended, time.perf_counter() - began
