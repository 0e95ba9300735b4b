r"""Message headers: a mapping with several values per name, and the block they travel in.

::

    NATS/1.0\r\n                    or, from the server:   NATS/1.0 503 No Responders\r\n
    Name: value\r\n
    \r\n

The server compares header names byte by byte: ``nats-msg-id`` is stored, but deduplicates nothing. So the
case a caller writes is the case that is sent, and the case received is the case kept. *Lookup* ignores case,
because people do; where one message carries two spellings of a name, the exact spelling answers, and only if
it is absent the first other one. Server headers looked up in the server's spelling are therefore never
shadowed by an application's ``nats-sequence``.

Values are text. Bytes that are not UTF-8 come in as lone surrogates (``surrogateescape``) and go out as the
same bytes. Spaces and tabs before a value belong to the frame, as in Go's client, so `Headers` drops them at
once and what a sender reads back is what a receiver will see.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NoReturn, TypeAlias, TypeVar, overload

from jetspark.core.arguments import iterate, unfit
from jetspark.errors import InvalidHeader, ProtocolError

__all__ = [
    "Headers",
    "HeadersLike",
    "Status",
    "decode",
    "decode_status",
    "encode",
    "last_value",
    "readable",
    "restored",
    "with_values",
]

T = TypeVar("T")

_VERSION = "NATS/1.0"
_PREFIX = b"NATS/1.0"
_PREFIX_SIZE = len(_PREFIX)

# Printable ASCII without the colon, as the NATS header specification (ADR-4) has it.
_is_name = re.compile(r"[!-9;-~]++").fullmatch
# The code ends at a blank or at the end: `NATS/1.0 5031` has no status we could name.
_status_line = re.compile(rb"NATS/1\.0[ \t]+(\d{3})(?:[ \t]+([^\r\n]*?))?[ \t]*\r\n").match
_ONLY_STRINGS = {str}
_EXCERPT_CHARS = 80


@dataclass(frozen=True, slots=True)
class Status:
    """The status in the first line of a header block, such as 503 ``No Responders``."""

    code: int
    description: str = ""


class Headers(MutableMapping[str, str]):
    """Header names with one or more values each, in order; lookup ignores case, the wire does not.

    As a mapping it shows the *first* value of each name; `get_all` and `multi_items` show the rest. Iteration
    yields names as they were spelled, in the order they first came. Setting or deleting a name affects every
    spelling of it. Two are equal when names (case included) and values are; the order of names is ignored.

    Every name and value is checked on the way in and raises `InvalidHeader`, so a `Headers` the program built
    can always be sent. Received ``Headers`` keep their sender's text, and `encode` checks it again.
    """

    __slots__ = ("_values",)

    def __init__(self, headers: HeadersLike = None) -> None:
        # Spelling -> values; no list is ever empty.
        self._values: dict[str, list[str]] = {}
        if headers is not None:
            self._add_all(headers)

    def __getitem__(self, name: str) -> str:
        spelling = self._find(name)
        if spelling is None:
            raise KeyError(name)
        return self._values[spelling][0]

    def __setitem__(self, name: str, value: str | Sequence[str]) -> None:
        """Replace every value, under every spelling, by ``value``; an empty sequence removes the name."""
        values = _checked_values(name, value)
        for spelling in self._spellings(name):
            if spelling != name or not values:
                del self._values[spelling]
        if values:
            self._values[name] = values

    def __delitem__(self, name: str) -> None:
        spellings = self._spellings(name)
        if not spellings:
            raise KeyError(name)
        for spelling in spellings:
            del self._values[spelling]

    @overload
    def get(self, name: str, /) -> str | None: ...
    @overload
    def get(self, name: str, /, default: str | T) -> str | T: ...
    def get(self, name: str, /, default: str | T | None = None) -> str | T | None:
        """The first value of ``name``, or ``default``; without the exception that a mapping's own would raise."""
        spelling = self._find(name)
        return default if spelling is None else self._values[spelling][0]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._find(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        """The number of spellings, which is what iteration yields."""
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Headers):
            return self._values == other._values
        if isinstance(other, Mapping):
            return self._values == {name: [value] if isinstance(value, str) else value for name, value in other.items()}
        return NotImplemented

    def __repr__(self) -> str:
        shown = {name: values[0] if len(values) == 1 else values for name, values in self._values.items()}
        return f"Headers({shown!r})"

    def __reduce__(self) -> tuple[object, ...]:
        # Not through __init__, which would refuse some received names. New lists keep copies apart.
        return with_values, ({name: values.copy() for name, values in self._values.items()},)

    def get_all(self, name: str) -> list[str]:
        """Every value of ``name`` in order, ``[]`` without any; the list is the caller's."""
        spelling = self._find(name)
        return [] if spelling is None else self._values[spelling].copy()

    def add(self, name: str, value: str) -> None:
        """Append a value, keeping those already there. Another spelling of the name stays apart."""
        if not isinstance(value, str):
            raise InvalidHeader(str(name), f"value of type {type(value).__name__}: expected str")
        checked = _checked_values(name, value)
        self._values.setdefault(name, []).extend(checked)

    def multi_items(self) -> list[tuple[str, str]]:
        """Every (name, value) pair: the lines of the block, values of one spelling side by side."""
        return [(name, value) for name, values in self._values.items() for value in values]

    def update(self, headers: HeadersLike = None, /, **named: str) -> None:  # type: ignore[override]
        """Set each name in ``headers`` and ``named``, all its values at once."""
        for part in (Headers(headers), Headers(named)):
            for name, values in part._values.items():
                self[name] = values

    def copy(self) -> Headers:
        """An independent copy; changing one leaves the other alone."""
        return with_values({name: values.copy() for name, values in self._values.items()})

    def _find(self, name: str) -> str | None:
        """The spelling that answers for ``name``: itself if present, else the first but for case."""
        if name in self._values:
            return name
        spellings = self._spellings(name)
        return spellings[0] if spellings else None

    def _spellings(self, name: str) -> list[str]:
        # A message has a handful of headers, so a scan beats keeping a second index in step.
        lowered = name.lower()
        return [spelling for spelling in self._values if spelling.lower() == lowered]

    def _add_all(self, headers: HeadersLike) -> None:
        if isinstance(headers, Headers):
            self._values = {name: values.copy() for name, values in headers._values.items()}
        elif isinstance(headers, Mapping):
            for name, value in headers.items():
                if values := _checked_values(name, value):
                    self._values[name] = values
        elif headers is not None:
            for name, single in _pairs(headers):
                self.add(name, single)


HeadersLike: TypeAlias = Headers | Mapping[str, str | Sequence[str]] | Sequence[tuple[str, str]] | None
"""The argument types for headers. An empty sequence in a mapping leaves the name out."""


def encode(headers: HeadersLike) -> bytes:
    """The block for ``headers``, ready for an HPUB frame; no headers at all give a valid, empty block.

    Raises:
        InvalidHeader: A name or value would break the frame, or would read differently at the other end.
    """
    pairs: Collection[tuple[str, str]]
    # The commonest argument by far, a plain dict of strings, skips building a Headers.
    if type(headers) is dict and set(map(type, headers.values())) == _ONLY_STRINGS:
        pairs = headers.items()
    elif isinstance(headers, Iterator):
        # A publish that has to wait for room is tried again, and would then find the iterator empty.
        raise InvalidHeader(type(headers).__name__, "an iterator can be read only once; give a list of pairs")
    else:
        pairs = (headers if isinstance(headers, Headers) else Headers(headers)).multi_items()
    text = _VERSION
    for name, value in pairs:
        if not _is_valid_name(name):
            _refuse_name(name)
        text += f"\r\n{name}: {value}"
    # One look at the whole block instead of one at each value: every line break must be one of ours.
    if text.count("\n") != len(pairs) or text.count("\r") != len(pairs):
        for name, value in pairs:
            _check_value(name, value)
    try:
        return f"{text}\r\n\r\n".encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        for name, value in pairs:
            _check_value(name, value)
        raise


def decode(raw: bytes) -> Headers:
    """The headers in a received block; the status in its first line, if any, is `decode_status`'s to read.

    Names and values are kept as they came, even those `Headers` would not let a caller set.

    Raises:
        ProtocolError: No version line, no closing blank line, or a line without ``name:``. The server
            does not look inside a block, so the fault is the publisher's, not the connection's.
    """
    if raw[:_PREFIX_SIZE] != _PREFIX:
        raise ProtocolError(f"header block starts with {_excerpt(raw)}: expected {_VERSION}")
    if raw[-4:] != b"\r\n\r\n":
        raise ProtocolError(f"header block ends with {_excerpt(raw[-20:])}: expected a blank line")
    lines = raw[:-4].decode("utf-8", "surrogateescape").split("\r\n")
    if len(lines[0]) > _PREFIX_SIZE and lines[0][_PREFIX_SIZE] not in " \t":
        raise ProtocolError(f"header block starts with {_excerpt(raw)}: expected {_VERSION}")
    values: dict[str, list[str]] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon or not name:
            raise ProtocolError(f"header line {_excerpt(line)}: expected 'Name: value'")
        value = value.lstrip(" \t")
        if name in values:
            values[name].append(value)
        else:
            values[name] = [value]
    return with_values(values)


def readable(raw: bytes | None) -> Headers:
    """The readable lines of a block, for readers that must not stop at a message because of its publisher.

    As :func:`decode`, but lines without ``name:`` are left out, and neither the version nor the closing blank line is
    required.
    """
    if not raw:
        return Headers()
    try:
        return decode(raw)
    except ProtocolError:
        pass
    values: dict[str, list[str]] = {}
    for line in raw.decode("utf-8", "surrogateescape").split("\r\n"):
        name, colon, value = line.partition(":")
        if colon and name:
            values.setdefault(name, []).append(value.lstrip(" \t"))
    return with_values(values)


def last_value(raw: bytes | None, name: str) -> str | None:
    """The last value that a block has of a name, in this very spelling.

    It finds a header that the server has appended, also behind a block that its publisher did not close: the server
    takes two bytes off for the blank line, so that its header continues the publisher's last line.
    """
    begin = (raw or b"").rfind(f"{name}:".encode())
    if raw is None or begin < 0:
        return None
    end = raw.find(b"\r\n", begin)
    value = raw[begin + len(name) + 1 : end if end >= 0 else len(raw)]
    return value.decode("utf-8", "surrogateescape").lstrip(" \t")


def decode_status(raw: bytes) -> Status | None:
    """The status in the first line of a block, or None for an ordinary message; nothing else is parsed.

    Raises:
        ProtocolError: The first line is neither the version alone nor the version and a three-digit code.
    """
    if raw.startswith(b"NATS/1.0\r\n"):
        return None
    found = _status_line(raw)
    if found is None:
        raise ProtocolError(f"header block starts with {_excerpt(raw)}: expected {_VERSION} and a status")
    description = found[2]
    return Status(int(found[1]), description.decode("utf-8", "surrogateescape") if description else "")


def _pairs(headers: object) -> Iterator[tuple[str, str]]:
    """
    Raises:
        ConfigError: It is neither a mapping nor a sequence of pairs.
    """
    expected = "a mapping of names to values, or a list of (name, value)"
    if isinstance(headers, str | bytes):  # a sequence, too, and one of two characters even reads as a pair
        raise unfit("headers", headers, expected)
    for pair in iterate("headers", headers, expected):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise unfit("headers", headers, expected)
        yield pair[0], pair[1]


def restored(pairs: Sequence[tuple[str, str]]) -> Headers:
    """Headers that were received, which may be some that :class:`Headers` would not let a caller set."""
    values: dict[str, list[str]] = {}
    for name, value in pairs:
        values.setdefault(name, []).append(value)
    return with_values(values)


def with_values(values: dict[str, list[str]]) -> Headers:
    """Received headers, by name; the lists belong to them from now on."""
    headers = Headers()
    headers._values = values
    return headers


def _checked_values(name: str, value: str | Sequence[str]) -> list[str]:
    if not _is_valid_name(name):
        _refuse_name(name)
    if isinstance(value, str):
        return [_check_value(name, value)]
    # bytes are a sequence too, of numbers; sending those would surprise.
    if isinstance(value, bytes | bytearray | memoryview) or not isinstance(value, Sequence):
        raise InvalidHeader(name, f"value of type {type(value).__name__}: expected str or a sequence of str")
    return [_check_value(name, each) for each in value]


def _check_value(name: str, value: str) -> str:
    """The value as it will be received, without leading blanks."""
    if not isinstance(value, str):
        raise InvalidHeader(name, f"value of type {type(value).__name__}: expected str")
    if "\r" in value or "\n" in value:
        raise InvalidHeader(
            name,
            f"value {_excerpt(value)} contains a line break, which ends a header; add one value per line, "
            "or move the text into the payload",
        )
    try:
        value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise InvalidHeader(name, f"value {_excerpt(value)} cannot be written as UTF-8: {error.reason}") from None
    return value.lstrip(" \t")


# A program sends the same few names again and again; a cache hit takes a quarter of the expression's time.
@lru_cache(maxsize=256)
def _is_valid_name(name: object) -> bool:
    return isinstance(name, str) and _is_name(name) is not None


def _refuse_name(name: object) -> NoReturn:
    if not isinstance(name, str):
        raise InvalidHeader(repr(name), f"name of type {type(name).__name__}: expected str")
    if not name:
        raise InvalidHeader(name, "a name may not be empty")
    bad = next(character for character in name if not _is_name(character))
    raise InvalidHeader(
        name, f"a name may not contain {bad!r}; use ASCII letters, digits and punctuation other than ':'"
    )


def _excerpt(text: bytes | str) -> str:
    """A repr short enough for an error message, whatever a peer sent."""
    return repr(text) if len(text) <= _EXCERPT_CHARS else f"{text[:_EXCERPT_CHARS]!r}..."
