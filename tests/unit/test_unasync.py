"""The twins of the two drivers: which are generated, and how."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def unasync() -> ModuleType:
    spec = importlib.util.spec_from_file_location("unasync", ROOT / "tools" / "unasync.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# Why each of them is written twice. A module that could be generated is not to be listed here.
HAND_WRITTEN = {
    "__init__": "the blocking one also exports what `jetspark` itself does for asyncio",
    "ack_future": "a subclass of asyncio's future, against one that threads wait for and are called back by",
    "iterable_input": "a batch may take from the caller's iterator itself where no lock is held meanwhile",
    "message_condition": "who reads the socket while it waits",
    "callbacks": "callbacks in tasks or threads",
    "clock": "two clocks",
    "client_shutdown": "what becomes of a client that nobody closed; an end that is interrupted",
    "credentials": "with asyncio, a function that gives credentials is awaited",
    "files": "with asyncio, files are read and written in other threads",
    "completion": "how a generator is begun; a cancellation can wait for the end of a step, an interrupt cannot",
    "connect_result": "what `connect` returns is awaited or entered with asyncio",
    "transport": "the event loop, or sockets and a thread",
    "waiter": "futures and timers, or bare locks",
    "socket_watch": "an event loop has a selector of its own, and is woken by others",
}


def test_every_module_of_a_driver_is_generated_or_declared_as_hand_written(unasync: ModuleType) -> None:
    source = ROOT / "src" / "jetspark"
    modules = {path.stem for driver in ("aio", "blocking") for path in (source / driver).glob("*.py")}
    assert modules == {*unasync.GENERATED, *HAND_WRITTEN}
    assert set(unasync.GENERATED) & set(HAND_WRITTEN) == set()
    for name in unasync.GENERATED:
        first = (source / "blocking" / f"{name}.py").read_text(encoding="utf-8").splitlines()[0]
        assert first == f"# Generated from aio/{name}.py by tools/unasync.py; edit that file."


def test_the_architecture_page_names_them(unasync: ModuleType) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    generated, *by_hand = re.findall(r"^\* (?:Generated|Written).*?\.$", page, re.M | re.S)

    def names(*items: str) -> set[str]:
        return set(re.findall(r"`(\w+)`", "".join(items)))

    assert names(generated) == set(unasync.GENERATED)
    assert names(*by_hand) == set(HAND_WRITTEN) - {"__init__"}


def test_the_generated_modules_are_what_their_sources_say(unasync: ModuleType) -> None:
    assert unasync.drifted() == [], "`make generate` mends this"


def test_every_rule_has_something_to_do(unasync: ModuleType) -> None:
    """A table that keeps what nobody needs any more is not read."""
    text = "".join(
        (ROOT / "src" / "jetspark" / "aio" / f"{name}.py").read_text(encoding="utf-8") for name in unasync.GENERATED
    )
    assert [name for name in [*unasync.NAMES, *unasync.WRAPPERS] if not re.search(rf"\b{name}\b", text)] == []
    assert [phrase for phrase in unasync.PHRASES if not re.search(phrase, text)] == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("async def f():\n    return await g(await h())\n", "def f():\n    return g(h())\n"),
        ("async with a as b:\n    async for c in d:\n        e\n", "with a as b:\n    for c in d:\n        e\n"),
        ("x = [y async for y in z]\n", "x = [y for y in z]\n"),
        ("async def __aenter__(self): ...\n", "def __enter__(self): ...\n"),
        ("async def __aexit__(self): ...\n", "def __exit__(self): ...\n"),
        ("def __aiter__(self): ...\n", "def __iter__(self): ...\n"),
        ("def f() -> AsyncIterator[int]: ...\n", "def f() -> Iterator[int]: ...\n"),
        ("x: AsyncGenerator[dict[str, int], None]\n", "x: Generator[dict[str, int], None, None]\n"),
        ("x: Callable[[int], Awaitable[list[int]]]\n", "x: Callable[[int], list[int]]\n"),
        ("from collections.abc import Awaitable\n", "from collections.abc import Awaitable\n"),
        ("from jetspark.aio import clock\n", "from jetspark.blocking import clock\n"),
        ("from contextlib import aclosing, asynccontextmanager\n", "from contextlib import closing, contextmanager\n"),
        ("for x in aiter(y): ...\n", "for x in iter(y): ...\n"),
        ('"""Streams with asyncio."""\n', '"""Streams from threads."""\n'),
        ('"""``async with a() as b``, await c"""\n', '"""``with a() as b``, c"""\n'),
        ('x = "async for y in z"\n', 'x = "for y in z"\n'),
        ('"""An error, or cancelled. Cancelled twice."""\n', '"""An error, or interrupted. Interrupted twice."""\n'),
        ("x = 1  # the task is cancelled\n", "x = 1  # the task is interrupted\n"),
        ('cast("AsyncGenerator[Message, None]", x)\n', 'cast("Generator[Message, None, None]", x)\n'),
        ("with progress.awaited(): is_cancelled = x\n", "with progress.awaited(): is_cancelled = x\n"),
        ('"""What is awaited."""\n', '"""What is awaited."""\n'),
        (
            "def f():\n    a()\n    # In threads: with b, c:\n    d()\n\n    if e:\n        g()\n\n\nh()\n",
            "def f():\n    a()\n    with b, c:\n        d()\n\n        if e:\n            g()\n\n\nh()\n",
        ),
        (
            "try:\n    # In threads: with a:\n    b()\nexcept C:\n    d()\n",
            "try:\n    with a:\n        b()\nexcept C:\n    d()\n",
        ),
        ("a()\n# In threads: b()\nc()\n", "a()\nb()\nc()\n"),
        ("if a:  # asyncio only\n    b()\n\n    c()\nd()\n", "d()\n"),
        ("a()\nb()  # asyncio only\nc()\n", "a()\nc()\n"),
        ("def f(x: Iterable[A] | AsyncIterable[A]): ...\n", "def f(x: Iterable[A]): ...\n"),
        ("x = (\n    await y,\n    z[0][1],\n)\n", "x = (\n    y,\n    z[0][1],\n)\n"),
    ],
)
def test_a_rule(unasync: ModuleType, given: str, expected: str) -> None:
    assert unasync.rewritten(given) == expected


SOURCE = '''"""Things with asyncio."""

from collections.abc import AsyncIterator, Awaitable, Callable

from jetspark.aio import clock


async def some(source: AsyncIterator[int], wait: Callable[[], Awaitable[None]]) -> AsyncIterator[int]:
    await wait()
    async for each in source:
        yield each
    await some_function_with_a_long_name_that_is_only_just_too_long_for_one_line_with_await_(
        clock.now(), clock.now(), 1
    )
'''
TWIN = '''# Generated from aio/things.py by tools/unasync.py; edit that file.
"""Things from threads."""

from collections.abc import Callable, Iterator

from jetspark.blocking import clock


def some(source: Iterator[int], wait: Callable[[], None]) -> Iterator[int]:
    wait()
    yield from source
    some_function_with_a_long_name_that_is_only_just_too_long_for_one_line_with_await_(clock.now(), clock.now(), 1)
'''


def test_the_twin_is_formatted_and_imports_what_it_uses(unasync: ModuleType, tmp_path: Path) -> None:
    _write(tmp_path, "aio", SOURCE)
    assert unasync.generated("things", tmp_path) == TWIN


def test_a_twin_that_was_edited_or_is_missing_is_found(unasync: ModuleType, tmp_path: Path) -> None:
    _write(tmp_path, "aio", SOURCE)
    [missing] = unasync.drifted(tmp_path, ("things",))
    assert "+def some(" in missing
    _write(tmp_path, "blocking", TWIN)
    assert unasync.drifted(tmp_path, ("things",)) == []
    _write(tmp_path, "blocking", TWIN.replace("wait()\n", "wait(); wait()\n"))
    [edited] = unasync.drifted(tmp_path, ("things",))
    assert "-    wait(); wait()" in edited
    _write(tmp_path, "blocking", TWIN.replace("\n", " \n", 1))  # not only the first lines, and not only the words
    assert len(unasync.drifted(tmp_path, ("things",))) == 1


def test_the_command_says_how_to_mend_it(
    unasync: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert unasync.main(["--check"]) == 0
    monkeypatch.setattr(unasync, "drifted", lambda: ["--- blocking/kv.py\n"])
    assert unasync.main(["--check"]) == 1
    assert "1 generated files differ from their sources; `make generate` mends them" in capsys.readouterr().out
    assert unasync.main(["--mend"]) == 2


def _write(root: Path, driver: str, text: str) -> None:
    folder = root / "src" / "jetspark" / driver
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "things.py").write_text(text, encoding="utf-8")
