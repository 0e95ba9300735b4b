"""Refuse numbers that JSON does not have, before they are stored as another value.

msgspec writes ``null`` for a float that is NaN or infinite, so it would be read back as None.
"""

from __future__ import annotations

import math
import re

import msgspec

__all__ = ["check_finite"]

_pack = msgspec.msgpack.Encoder().encode
# A float64 of MessagePack whose exponent has all bits set. Other bytes may look like one: then the value decides.
_may_have_one = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]").search


def check_finite(what: str, value: object, data: bytes) -> None:
    """Check that no number of ``value`` was lost in ``data``, its JSON.

    A lost number is a null, so most values cost no more than the search for one. A value with a null is encoded once
    more, as MessagePack, which has these numbers: for a state of 1 KB 2 us, where walking through it takes 30.

    Raises:
        ValueError: A number is NaN or infinite; the message says which one and where.
    """
    if b"null" not in data:
        return
    try:
        packed = _pack(value)
    except (TypeError, ValueError, OverflowError):  # an integer of more than 64 bits
        packed = None
    if packed is None or _may_have_one(packed):
        _check(what, msgspec.to_builtins(value), "")


def _check(what: str, value: object, path: str) -> None:
    if isinstance(value, float):
        if not math.isfinite(value):
            found = f"has {value!r} at {path.lstrip('.')}" if path else f"is {value!r}"
            raise ValueError(f"{what} {found}, which JSON has no number for")
    elif isinstance(value, dict):
        for name, inner in value.items():
            _check(what, inner, f"{path}.{name}")
    elif isinstance(value, list | tuple | set | frozenset):
        for index, inner in enumerate(value):
            _check(what, inner, f"{path}[{index}]")
