"""Which keys a handler keeps in order, as text for the metadata of its consumer, and what another text changes. Pure.

``order.paid=order_id, order.shipped=parcel``: by type the field, the template, or the function, which is known by its
name alone; ``-`` is no order. So ``plan`` sees that a handler has other keys than the workers before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jetspark.app.contracts.catalogue import contract_of

__all__ = ["KEYS", "changed_keys", "key_record"]

KEYS = "jetspark-keys"
"""The name in the metadata."""
_NONE = "-"


def key_record(events: Sequence[type[object]], key: str | Callable[[Any], Any] | None, *, in_order: bool) -> str:
    """The text for a handler of these events."""
    found = {}
    for kind in events:
        contract = contract_of(kind)
        own = contract.key if key is None else key if isinstance(key, str) else _name(key)
        found[contract.type] = own or _NONE if in_order else _NONE
    return ", ".join(f"{type}={own}" for type, own in sorted(found.items()))


def changed_keys(found: str, declared: str) -> list[str]:
    """What changes for the types that both texts have, each as ``order.paid: order_id -> customer``."""
    before, after = _read(found), _read(declared)
    return [f"{type}: {before[type]} -> {own}" for type, own in after.items() if before.get(type, own) != own]


def _read(record: str) -> dict[str, str]:
    parts = (each.partition("=") for each in record.split(", "))
    return {type: own for type, _, own in parts}


def _name(function: Callable[..., object]) -> str:
    # Without its module, which is `__main__` in a program that is run itself, and another one for `jetspark apply`.
    return f"{getattr(function, '__qualname__', None) or type(function).__qualname__}()"
