"""Write the blocking driver's twins of asyncio modules.

``python tools/unasync.py`` (or ``make generate``) writes ``blocking/kv.py`` from ``aio/kv.py``, and so on for
:data:`GENERATED`. ``--check`` writes nothing: it compares, shows what differs, and fails. Every other module of the two
drivers is written by hand, because threads differ from tasks there: ``tests/unit/test_unasync.py`` lists them.

A module is rewritten token by token. ``async`` and ``await`` go, names and the words of texts change as the tables
say. Then ruff takes unused imports away, makes ``yield from`` of loops that only yield, and formats.
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
    "consumer",
    "context",
    "jetstream",
    "kv",
    "message",
    "object_reading",
    "object_sending",
    "objects",
    "ordered",
    "part_file",
    "pull",
    "push",
    "steps",
    "stream",
)

NAMES = {
    "AsyncGenerator": "Generator",
    "AsyncIterator": "Iterator",
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
    r"\bcancelled\b": "interrupted",
    r"\bCancelled\b": "Interrupted",
}

MENDED_BY = "python tools/unasync.py"


def header(name: str) -> str:
    return f"# Generated from aio/{name}.py by tools/unasync.py; edit that file.\n"


def rewritten(source: str) -> str:
    """The text with its tokens replaced; what is imported and how it is formatted is not mended yet."""
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
