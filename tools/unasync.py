"""Write the blocking driver's twins of asyncio modules.

``python tools/unasync.py`` (or ``make generate``) writes ``blocking/kv.py`` from ``aio/kv.py``, and so on for
:data:`GENERATED`. ``--check`` writes nothing: it compares, shows what differs, and fails. Every other module of the two
drivers is written by hand, because threads differ from tasks there: ``tests/unit/test_unasync.py`` lists them.

What only threads need is a comment in the asyncio module, where it costs nothing: of ``# In threads: with
transport.lock:`` the twin has the statement, around the rest of the block. What only asyncio needs goes: a statement
whose first line ends with ``# asyncio only``, and the type ``AsyncIterable`` where it is one of several.

Then a module is rewritten token by token. ``async`` and ``await`` go, names and the words of texts change as the tables
say. At last ruff takes unused imports away, makes ``yield from`` of loops that only yield, and formats.
"""

from __future__ import annotations

import difflib
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DRIVERS = Path("src") / "jetspark"

GENERATED = (
    "atomic",
    "client",
    "connector",
    "consumer",
    "context",
    "exports",
    "fast",
    "batch_input",
    "jetstream",
    "kv",
    "transport_calls",
    "message",
    "object_reader",
    "object_writer",
    "objects",
    "ordered",
    "publisher",
    "pull",
    "push",
    "runner",
    "source",
    "step_runner",
    "steps",
    "stream",
    "stream_message",
    "subscription",
)

NAMES = {
    "AsyncGenerator": "Generator",
    "AsyncIterator": "Iterator",
    "ContextBase": "SharedContextBase",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "__aiter__": "__iter__",
    "aclosing": "closing",
    "aio": "blocking",
    "aiter": "iter",
    "asynccontextmanager": "contextmanager",
}
# Of the type ``Awaitable[None]`` only the part in brackets is left.
WRAPPERS = {"Awaitable"}

# In strings, docstrings and comments; the longer one first where one is a part of the other.
PHRASES = {
    r"\basync (with|for)\b": r"\1",
    r"\bawait ": "",
    r"\bcontextlib\.aclosing\b": "contextlib.closing",
    r"\bjetspark\.aio\b": "jetspark.blocking",
    r"\bwith asyncio\b": "from threads",
    r"\ban asynchronous iterator\b": "an iterator",
    r"\bAsyncGenerator\[(\w+), None\]": r"Generator[\1, None, None]",
    r"\bread in a thread, from\b": "read from",
    r", asynchronous or not,": "",
    r"\bas the chunks come, in a thread;": "as the chunks come;",
    r"\braises or is cancelled,": "raises,",  # interrupted, a thread may have sent it
    r"\bcancelled\b": "interrupted",
    r"\bCancelled\b": "Interrupted",
    r"\ba cancellation\b": "an interrupt",
    r"\bSeveral tasks\b": "Several threads",
    # What is true of threads only.
    r"NATS that heals itself\.": "NATS that heals itself, for any number of threads.",
    r"\ba function \(plain or\n( +)async\) that": r"a\n\1function that",
    r"on the event loop; keep it quick": "on the connection's thread; keep it quick",
    r"; by default this waits\.": ", or in ``on_event``; else this waits.",
    r"\n +UsageError: From another event loop [^\n]+": "",
    r"Called \(and awaited, if it returns an awaitable\) with one message after the other;": (
        "Called with one message after the other, on a thread of the subscription's own;"
    ),
    r"(beside ``drain``, waits for that one, at most ``timeout``, and returns\.)\n": (
        r"\1 In\n        ``on_event`` it does not wait for the server's confirmation.\n"
    ),
    r"``sequence`` tells how many were added\.\n": (
        "``sequence`` tells how many were added; the iterable may\n        have been read up to 500 messages further.\n"
    ),
}

ONLY_THREADS = re.compile(r"( *)# In threads: (.+\n)")
ONLY_ASYNCIO = re.compile(r"( *)\w.*  # asyncio only\n")
ONLY_ASYNCIO_TYPE = re.compile(r" \| AsyncIterable\[\w+\]")

MENDED_BY = "python tools/unasync.py"


def header(name: str) -> str:
    return f"# Generated from aio/{name}.py by tools/unasync.py; edit that file.\n"


def for_threads(source: str) -> str:
    """The text with what only threads need, and without what only asyncio has."""
    lines = ONLY_ASYNCIO_TYPE.sub("", source).splitlines(keepends=True)
    found: list[str] = []
    while lines:
        line = lines.pop(0)
        if (statement := ONLY_ASYNCIO.fullmatch(line)) is not None:
            del lines[: _block_length(lines, len(statement[1]) + 1)]
        elif (statement := ONLY_THREADS.fullmatch(line)) is not None:
            indentation, text = statement.groups()
            found.append(indentation + text)
            if text.endswith(":\n"):
                length = _block_length(lines, len(indentation))
                lines[:length] = ["    " * bool(each.strip()) + each for each in lines[:length]]
        else:
            found.append(line)
    return "".join(found)


def _block_length(lines: list[str], indentation: int) -> int:
    """How many of these lines come before the first that is indented less."""
    for length, line in enumerate(lines):
        if line.strip() and len(line) - len(line.lstrip(" ")) < indentation:
            return length
    return len(lines)


def rewritten(source: str) -> str:
    """The text with its tokens replaced; what is imported and how it is formatted is not mended yet."""
    source = for_threads(source)
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    pieces: list[str] = []
    done = 0
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    for index, token in enumerate(tokens):
        begin, end = (starts[row - 1] + column for row, column in (token.start, token.end))
        text = _replacement(tokens, index)
        if text is None:
            continue
        pieces += source[done:begin], text
        done = end
        if not text and token.type == tokenize.NAME:
            done += len(source[end:]) - len(source[end:].lstrip(" "))
    return "".join(pieces) + source[done:]


def _replacement(tokens: list[tokenize.TokenInfo], index: int) -> str | None:
    """What stands in place of a token; None to leave it."""
    token = tokens[index]
    if token.type == tokenize.NAME:
        if token.string in ("async", "await") or (token.string in WRAPPERS and tokens[index + 1].string == "["):
            return ""
        return NAMES.get(token.string)
    if token.type == tokenize.OP and token.string in "[]":
        opening = index if token.string == "[" else _opening(tokens, index)
        before = tokens[opening - 1].string
        if before in WRAPPERS:
            return ""
        if before == "AsyncGenerator" and token.string == "]":
            return ", None]"  # a generator's type says what it returns, too
        return None
    if token.type in TEXTS:
        text = token.string
        for phrase, instead in PHRASES.items():
            text = re.sub(phrase, instead, text)
        return None if text == token.string else text
    return None


# From Python 3.12 on, f-strings are several tokens.
TEXTS = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def _opening(tokens: list[tokenize.TokenInfo], closing: int) -> int:
    """Where the bracket is that ``tokens[closing]`` closes."""
    depth = 0
    for index in range(closing, -1, -1):
        if tokens[index].type == tokenize.OP:
            depth += {"]": 1, "[": -1}.get(tokens[index].string, 0)
        if depth == 0:
            return index
    raise ValueError(f"line {tokens[closing].start[0]}: a bracket that nothing opens")


def tidied(text: str, path: Path) -> str:
    """As ruff wants it, by the rules for ``path``."""
    ruff = Path(sys.executable).with_name("ruff")
    fixes = ("check", "--quiet", "--fix-only", "--unsafe-fixes", "--select", "I,F401,UP028,C416")
    for command in (fixes, ("format", "--quiet")):
        done = subprocess.run(
            [ruff, *command, "--stdin-filename", str(path), "-"],
            input=text,
            capture_output=True,
            text=True,
            cwd=ROOT,
            check=True,
        )
        text = done.stdout
    return text


def generated(name: str, root: Path = ROOT) -> str:
    """The whole text of ``blocking/<name>.py``."""
    source = (root / DRIVERS / "aio" / f"{name}.py").read_text(encoding="utf-8")
    return tidied(header(name) + rewritten(source), DRIVERS / "blocking" / f"{name}.py")


def drifted(root: Path = ROOT, names: tuple[str, ...] = GENERATED) -> list[str]:
    """What differs between the files and what they should be, as a diff for each."""
    found = []
    for name in names:
        path = DRIVERS / "blocking" / f"{name}.py"
        there = (root / path).read_text(encoding="utf-8") if (root / path).exists() else ""
        wanted = generated(name, root)
        if there != wanted:
            lines = difflib.unified_diff(
                there.splitlines(keepends=True), wanted.splitlines(keepends=True), str(path), f"from aio/{name}.py"
            )
            found.append("".join(lines))
    return found


def main(arguments: list[str]) -> int:
    if arguments not in ([], ["--check"]):
        print(f"usage: {MENDED_BY} [--check]", file=sys.stderr)
        return 2
    if arguments:
        differences = drifted()
        print("".join(differences), end="")
        if differences:
            print(f"{len(differences)} generated files differ from their sources; `make generate` mends them")
        return bool(differences)
    for name in GENERATED:
        (ROOT / DRIVERS / "blocking" / f"{name}.py").write_text(generated(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
