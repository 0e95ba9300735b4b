"""Projections that look up what another one has for their key, as of the event before. Pure.

An engine folds the rows of one key in the order of the stream, and of two keys in any order: on Spark they are in
different processes. So there is one place where "the state after all events with a lower sequence" has a meaning that
every engine agrees on, which is the key's own. A projection with lookups therefore takes the events of the projections
it looks up as its own, under their keys, and keeps what those make of them beside its state::

    {"lookups": {"customers": [1, {...}]}, "state": {...}}

with the version of the fold that made each copy. To an engine this is a projection like any other: bytes, of one key,
folded from the events of that key in their order. Whatever an engine does, the copy is what the looked-up projection's
``apply`` makes of exactly the events before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.errors import ConfigError

__all__ = ["LookupSpec", "LookupStates"]

_NOTHING = msgspec.Raw(b"null")


class _JoinedValue(msgspec.Struct):
    lookups: dict[str, tuple[int, msgspec.Raw]] = {}
    state: msgspec.Raw = _NOTHING


_decode = msgspec.json.Decoder(_JoinedValue).decode
_encode = msgspec.json.Encoder(order="sorted").encode


class StaleLookup(Exception):
    """The copy of another projection's state was made by another version of its fold."""


class LookupStates(Mapping[str, Any]):
    """What ``apply`` is given as its third argument: the states of its key in other projections, by their names."""

    def __init__(self, specs: Mapping[str, ProjectionSpec], values: Mapping[str, bytes | None]) -> None:
        self._specs, self._values = specs, values

    def __getitem__(self, name: str) -> Any:
        """The state, or None if the key has none there. A copy: changing it changes nothing."""
        spec = self._specs[name]
        value = self._values.get(name)
        return None if value is None else spec.decode_state(value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


class LookupSpec(ProjectionSpec):
    """A projection with lookups; see the module."""

    apply_arguments = ("state", "event", "lookup")

    def __init__(self, name: str, kind: type[Any], *, lookups: Sequence[ProjectionSpec], **options: Any) -> None:
        super().__init__(name, kind, **options)
        if self.window is not None or any(each.window is not None for each in lookups):
            raise ConfigError(f"projection {name!r}: lookups= with window=: expected one of the two, here and there")
        if self.unique_ids or any(each.unique_ids for each in lookups):
            raise ConfigError(
                f"projection {name!r}: lookups= with unique_ids=: expected one of the two, here and there: a copy of "
                "another projection's state has no ids of its own"
            )
        self.lookups = {each.name: each for each in lookups}
        self._own = frozenset(self.events)
        self._lookers = {
            kind: [each for each in lookups if kind in each.events] for each in lookups for kind in each.events
        }
        self.events = tuple(dict.fromkeys([*self.events, *self._lookers]))

    def keys_of(self, event: Any) -> tuple[str, ...]:
        """Its own keys of an event, and those of the projections it looks up."""
        found = super().keys_of(event) if type(event) in self._own else ()
        for spec in self._lookers.get(type(event), ()):
            found += spec.keys_of(event)
        return tuple(dict.fromkeys(found))

    def plain_keys_of(self, events: Sequence[Any]) -> list[str] | None:
        return None  # an event may have keys of several projections

    def fold(self, key: str, value: bytes | None, event: Any) -> bytes | None:
        """The state with the copies beside it. ``apply`` sees the copies as they were before the event."""
        held = _JoinedValue() if value is None else _decode(value)
        copies: dict[str, bytes | None] = {name: self._copy_of(name, *each) for name, each in held.lookups.items()}
        own = None if held.state == _NOTHING else bytes(held.state)
        new = own
        if type(event) in self._own and key in super().keys_of(event):
            state = None if own is None else super().decode_state(own)
            more = (self.key_text(key),) if self._wants_key else ()
            new = self._made(own, self._apply(state, event, LookupStates(self.lookups, dict(copies)), *more))
        for spec in self._lookers.get(type(event), ()):
            if key in spec.keys_of(event):
                copies[spec.name] = spec.fold(key, copies.get(spec.name), event)
        found = {
            name: (self.lookups[name].version, msgspec.Raw(copy)) for name, copy in copies.items() if copy is not None
        }
        if new is None and not found:
            return None
        joined = _JoinedValue(found, _NOTHING if new is None else msgspec.Raw(new))
        encoded = _encode(joined)
        if len(encoded) > self.max_state_bytes:
            raise self._too_large(encoded)
        return encoded

    def _copy_of(self, name: str, version: int, copy: msgspec.Raw) -> bytes:
        if version != self.lookups[name].version:
            raise StaleLookup(
                f"its copy of {name!r} was made by version {version}, and {name!r} is version "
                f"{self.lookups[name].version}: give projection {self.name!r} another version, too, and rebuild it"
            )
        return bytes(copy)

    def decode_state(self, value: bytes) -> Any:
        state = _decode(value).state
        return None if state == _NOTHING else super().decode_state(bytes(state))

    def has_state(self, value: bytes | None) -> bool:
        return value is not None and _decode(value).state != _NOTHING

    @property
    def options(self) -> dict[str, Any]:
        own = tuple(kind for kind in self.events if kind in self._own)
        return {**super().options, "events": own, "lookups": tuple(self.lookups.values())}
