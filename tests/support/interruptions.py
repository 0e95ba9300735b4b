"""Interrupting a call anywhere: at a step of the event loop, at a bytecode of a thread, by a signal, by a timeout.

An asyncio operation is cancelled after a number of the loop's steps. A blocking one gets a ``KeyboardInterrupt``: at a
certain bytecode of our own code (one where the interpreter looks for signals), by a signal in the main thread, or set
from outside in another thread. The last two also hit the standard library and system calls.
"""

from __future__ import annotations

import asyncio
import ctypes
import dis
import functools
import inspect
import signal
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jetspark
from jetspark.blocking.publisher import AckFuture
from support.drivers import _IMMEDIATE, _ITERATING

__all__ = ["Call", "Ended", "InPlace", "Interrupt", "Interruption", "counted", "innermost", "run_in_place", "wrap"]

# What waits for nothing in either driver.
IMMEDIATE = _IMMEDIATE | {"published", "unpublished", "stats", "try_add", "reply_subject"}
SOURCE = str(Path(jetspark.__file__).parent)
HANGS_AFTER_S = 20.0
CALLS = {"CALL", "CALL_FUNCTION_EX", "CALL_KW"}

Call = Callable[[], Awaitable[Any]]


class Interrupt(KeyboardInterrupt):
    """What a blocking call is interrupted with."""


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


# ---- blocking objects, awaited without a loop ------------------------------------------------------------------------


class InPlace:
    """A blocking object whose methods can be awaited, and which is called in the thread that awaits.

    So a coroutine written for asyncio runs from its beginning to its end in :func:`run_in_place`, as a plain call.
    """

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if name in _ITERATING or inspect.isgeneratorfunction(value):
            return lambda *args, **kwargs: _iterate(value(*args, **kwargs))
        if name in IMMEDIATE:
            return lambda *args, **kwargs: wrap(value(*args, **kwargs))
        if not inspect.ismethod(value):
            return value

        async def call(*args: Any, **kwargs: Any) -> Any:
            return wrap(value(*args, **kwargs))

        return call

    def __aiter__(self) -> AsyncIterator[Any]:
        return _iterate(iter(self._target))

    async def __aenter__(self) -> InPlace:
        self._target.__enter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        self._target.__exit__(*exc_info)


def wrap(value: Any) -> Any:
    if isinstance(value, list):
        return [wrap(each) for each in value]
    is_ours = type(value).__module__.startswith(("jetspark.blocking", "jetspark.batcher.blocking"))
    return InPlace(value) if is_ours and not isinstance(value, AckFuture) else value


async def _iterate(iterator: Any) -> AsyncIterator[Any]:
    try:
        for value in iterator:
            yield wrap(value)
    finally:
        iterator.close()


def run_in_place(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits for a loop."""
    try:
        work.send(None)
    except StopIteration as finished:
        return finished.value
    finally:
        work.close()
    raise AssertionError("it waits for an event loop")


# ---- interrupting a thread -------------------------------------------------------------------------------------------


def at_bytecode(call: Call, number: int | None) -> Ended:
    """Interrupt before the ``number``-th bytecode of ours (None only counts them).

    Generators that are being closed are left alone: nothing can be raised out of one that is collected.
    """
    ended = Ended()

    def trace_frame(frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode" and frame.f_lasti in _places(frame.f_code):
            is_late = number is not None and ended.steps >= number
            if is_late and not isinstance(sys.exc_info()[1], GeneratorExit):
                ended.was_interrupted = True
                raise Interrupt(f"in {frame.f_code.co_qualname}, line {frame.f_lineno}")
            ended.steps += 1
        return trace_frame

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace_frame

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        ended.result = run_in_place(call())
    except BaseException as error:
        ended.error = error
    finally:
        sys.settrace(before)
    return ended


@functools.cache
def _places(code: CodeType) -> frozenset[int]:
    """Where CPython looks for signals: at the beginning of a function, before a jump back, and after a call; before a
    call too, which stands for one that waits and is interrupted. None comes between the end of a ``with`` block and
    the call of ``__exit__(None, None, None)``."""
    places: set[int] = set()
    before: list[dis.Instruction] = []
    for step in dis.get_instructions(code):
        constants = [each for each in before[-5:] if each.opname != "PRECALL"][-3:]
        leaves_with = len(constants) == 3 and all(
            each.opname == "LOAD_CONST" and each.argval is None for each in constants
        )
        if (
            (before and (before[-1].opname == "RESUME" or before[-1].opname in CALLS))
            or "JUMP_BACKWARD" in step.opname
            or (step.opname in CALLS and not leaves_with)
        ):
            places.add(step.offset)
        before.append(step)
    return frozenset(places)


def by_signal(call: Call, delay_s: float) -> Ended:
    """Interrupt the main thread by a signal, as Ctrl-C does, after some time."""
    ended = Ended()
    is_over = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if not is_over.is_set():
            ended.was_interrupted = True
            is_over.set()
            raise Interrupt(_place(frame))

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
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(Interrupt))
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
        if ended.was_interrupted and not isinstance(ended.error, asyncio.CancelledError | Interrupt):
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
