"""Subjects, filters and queue names: what NATS accepts, and which filter matches which subject.

A subject is a list of non-empty tokens joined by dots. A wildcard is a *whole* token: ``*`` stands for
exactly one token, and ``>``, only as the last token, for one or more. Inside a longer token both are ordinary
characters, so ``a.b*c`` is a subject one can publish to; the server reads it the same way.

The server checks next to nothing when it receives a publish: a space in the subject shifts every later field
of the frame, and a message with an empty token vanishes without a word. For a line that is too long it ends the
connection, and all that was sent with it is in doubt. Hence the checks here, before anything is sent. What passes
costs one regular expression and a look at its length; finding words for what does not may take its time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NoReturn

from jetspark.errors import InvalidSubject

__all__ = [
    "MAX_LINE_BYTES",
    "MAX_SUBJECT_BYTES",
    "ApiSubject",
    "check_line",
    "common_filter",
    "is_subject",
    "is_subset",
    "matches",
    "on_one_of",
    "overlaps",
    "reading_filters",
    "validate_filter",
    "validate_queue",
    "validate_subject",
]

# The server's default `max_control_line`, less the sizes in the line of a message. It does not say which one it has.
MAX_LINE_BYTES = 4096 - 24
# Leaves room for a reply subject of ours.
MAX_SUBJECT_BYTES = MAX_LINE_BYTES - 128

# The server's own list of blanks (a form feed is one), NUL, and lone surrogates, which have no UTF-8 form.
# Other control characters are unwise but legal, and a stream may hold them already: they stay addressable.
_FORBIDDEN = r"\x00\t\n\f\r \ud800-\udfff"
_CHAR = rf"[^.{_FORBIDDEN}]"

# A token that is not a wildcard either starts with another character or has more than one. Written this way nothing is
# matched twice, and the possessive quantifiers keep long bad input from backtracking.
_LITERAL = rf"(?:[^.*>{_FORBIDDEN}]{_CHAR}*+|[*>]{_CHAR}++)"
_NOT_TAIL = rf"(?:[^.>{_FORBIDDEN}]{_CHAR}*+|>{_CHAR}++)"

_is_subject = re.compile(rf"(?:{_LITERAL}\.)*+{_LITERAL}").fullmatch
_is_filter = re.compile(rf"(?:{_NOT_TAIL}\.)*+(?:{_NOT_TAIL}|>)").fullmatch
_is_queue = re.compile(rf"[^{_FORBIDDEN}]++").fullmatch
_find_forbidden = re.compile(rf"[{_FORBIDDEN}]").search

_CHARACTER_NAMES = {
    "\x00": "a NUL character",
    "\t": "a tab",
    "\n": "a line feed",
    "\f": "a form feed",
    "\r": "a carriage return",
    " ": "a space",
}


class ApiSubject(str):
    """A subject the server itself answers on, whose last part is a filter: it may have wildcards.

    JetStream wants a consumer's filter in the subject of the request that creates it, so that permissions can say who
    may consume what. The server takes wildcards in a publish for ordinary characters. A message of a user never has
    such a subject: nothing but a subscription to the very same filter would receive it.
    """

    __slots__ = ()


def validate_subject(subject: str) -> str:
    """Return ``subject`` unchanged if a message can be published to it.

    Raises:
        InvalidSubject: It is empty, has an empty token, a blank or NUL, or a wildcard token; the reason says
            where, and what to write instead.
    """
    if isinstance(subject, str) and _is_subject(subject):
        return subject
    _refuse_subject(subject)


def is_subject(text: str) -> bool:
    """True if a message can be published to ``text``: a subject, not a filter."""
    return _is_subject(text) is not None


def validate_filter(subject: str) -> str:
    """Return ``subject`` unchanged if it can be subscribed to, wildcards included.

    Raises:
        InvalidSubject: As for `validate_subject`, or ``>`` stands anywhere but at the end. The server would
            answer later, with an error that does not name the subject.
    """
    if isinstance(subject, str) and _is_filter(subject):
        return subject
    _refuse_filter(subject)


def validate_queue(name: str) -> str:
    """Return ``name`` unchanged if it can name a queue group. Dots and wildcards in it have no meaning.

    Raises:
        InvalidSubject: It is empty or contains a blank or NUL.
    """
    if isinstance(name, str) and _is_queue(name):
        return name
    _refuse_characters(name, "a queue group name")
    raise InvalidSubject(name, "a queue group name may not be empty; leave it out to subscribe alone")


def check_line(line: str, max_bytes: int = MAX_LINE_BYTES) -> None:
    """Check the length of a frame's line: a subject, alone or with a reply subject or queue group behind it.

    :func:`validate_subject` does not: longer subjects are valid where they are not sent in such a line.

    Raises:
        InvalidSubject: The line is too long; the server would end the connection.
    """
    if len(line) * 4 > max_bytes and (size := len(line.encode())) > max_bytes:
        raise InvalidSubject(line, f"it has {size} bytes, and {max_bytes} are the most; shorten it")


def matches(filter: str, subject: str) -> bool:
    """True if a message published to ``subject`` reaches a subscription to ``filter``.

    Both must be valid; invalid ones get an arbitrary answer, not an error.
    """
    if filter == subject:
        return True
    if "*" not in filter and ">" not in filter:
        return False
    wanted, tokens = filter.split("."), subject.split(".")
    if wanted[-1] == ">":
        # `>` stands for at least one token: `a.>` does not match `a`.
        if len(tokens) < len(wanted):
            return False
        wanted.pop()
    elif len(tokens) != len(wanted):
        return False
    # Once a trailing `>` is gone, every remaining wanted token has a partner.
    return all(want in (token, "*") for want, token in zip(wanted, tokens, strict=False))


def overlaps(a: str, b: str) -> bool:
    """True if some subject matches both filters; the server refuses two streams with such filters."""
    tokens_a, tokens_b = a.split("."), b.split(".")
    for token_a, token_b in zip(tokens_a, tokens_b, strict=False):
        if token_a == ">" or token_b == ">":
            return True
        if token_a != token_b and token_a != "*" and token_b != "*":
            return False
    return len(tokens_a) == len(tokens_b)


def is_subset(a: str, b: str) -> bool:
    """True if every subject that matches ``a`` also matches ``b``."""
    tokens_a, tokens_b = a.split("."), b.split(".")
    for token_a, token_b in zip(tokens_a, tokens_b, strict=False):
        if token_b == ">":
            return True
        if token_a == ">" or (token_b != "*" and token_a != token_b):
            return False
    return len(tokens_a) == len(tokens_b)


def common_filter(filters: Sequence[str]) -> str:
    """A filter that matches all subjects of these filters, and few others: ``a.*.*`` for ``a.*.x`` and ``a.*.y``."""
    common: list[str] = []
    parts = [each.split(".") for each in filters]
    for tokens in zip(*parts, strict=False):
        if ">" in tokens:
            return ".".join([*common, ">"])
        common.append(tokens[0] if len({*tokens}) == 1 else "*")
    if len({*map(len, parts)}) > 1:  # `a` and `a.b`: `a.>` would not match `a`
        common[-1] = ">"
    return ".".join(common)


def reading_filters(filters: Sequence[str], *, may_read_all: bool = False) -> list[str]:
    """The filters to request from the server to read all of some filters: the same, a single wider one, or none.

    The server refuses filters that overlap. And for filters with wildcards a consumer inspects, for each message, many
    subjects of a block of the stream. With ten thousand subjects it delivers 0.3 to 0.7 thousand messages a second for
    three filters, 2 to 15 thousand for one, and 60 to 150 thousand without (measured, 2.15.1). A reader that receives
    more than it wants drops the rest by :func:`on_one_of`.

    Args:
        may_read_all: Most of the stream is wanted, so that reading all of it is cheaper than filters with wildcards.
    """
    unique = list(dict.fromkeys(filters))
    widest = [each for each in unique if not any(each != other and is_subset(each, other) for other in unique)]
    has_wildcards = any(token in ("*", ">") for each in widest for token in each.split("."))
    if may_read_all and has_wildcards:
        return []
    return [common_filter(widest)] if has_wildcards else widest


def on_one_of(filters: Sequence[str]) -> Callable[[str], object]:
    """A fast test that a subject matches one of some filters."""
    patterns = [
        r"\.".join({"*": r"[^.]+", ">": r".+"}.get(token, re.escape(token)) for token in each.split("."))
        for each in filters
    ]
    return re.compile("|".join(patterns), re.DOTALL).fullmatch


def _refuse_subject(subject: str) -> NoReturn:
    """Explain why the fast check refused a subject."""
    tokens = _refuse_malformed(subject, "a subject")
    wildcard = next(token for token in tokens if token in ("*", ">"))
    raise InvalidSubject(
        subject,
        f"the wildcard {wildcard!r} is for subscribing, and a message goes to exactly one subject; "
        f"put a name in place of {wildcard!r}",
    )


def _refuse_filter(subject: str) -> NoReturn:
    """Explain why the fast check refused a filter."""
    tokens = _refuse_malformed(subject, "a filter")
    *body, last = tokens
    remedy = ".".join(["*" if token == ">" else token for token in body] + [last])
    raise InvalidSubject(
        subject,
        f"'>' may only be the last token, where it stands for all the rest; "
        f"'*' stands for exactly one token, so use {remedy!r}",
    )


def _refuse_malformed(subject: str, what: str) -> list[str]:
    """Raise for the faults that subjects and filters share. Without one, a wildcard is at fault: return the tokens."""
    _refuse_characters(subject, what)
    if not subject:
        raise InvalidSubject(subject, f"{what} may not be empty; name at least one token, such as 'orders'")
    tokens = subject.split(".")
    if "" in tokens:
        if not any(tokens):
            raise InvalidSubject(subject, f"{what} needs names between its dots, such as 'orders.created'")
        where = "has two dots in a row"
        if not tokens[0]:
            where = "starts with a dot"
        elif not tokens[-1]:
            where = "ends with a dot"
        remedy = ".".join(token for token in tokens if token)
        raise InvalidSubject(subject, f"it {where}, and tokens may not be empty; did you mean {remedy!r}?")
    return tokens


def _refuse_characters(subject: str, what: str) -> None:
    if not isinstance(subject, str):
        raise InvalidSubject(subject, f"{what} must be a str, not {type(subject).__name__}")
    found = _find_forbidden(subject)
    if found is None:
        return
    character = found[0]
    name = _CHARACTER_NAMES.get(character)
    if name is None:
        reason = f"{what} is sent as UTF-8, which has no {character!r}; decode its bytes by their own encoding"
    else:
        reason = f"{what} may not contain {name}; replace or remove it"
    raise InvalidSubject(subject, f"{reason} (position {found.start()})")
