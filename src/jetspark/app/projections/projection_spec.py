"""Declarations of projections: their events, the keys of an event, and the fold of an event into a state. Pure.

Between two events a state is bytes: it is decoded for ``apply``, and the result is encoded before the next event. So
the result of ``apply`` does not depend on the micro-batches of an engine, ``apply`` may change the given state in
place, and there is one form of the bytes: JSON with sorted keys.

A key has two spellings, and :class:`ProjectionSpec` converts between them. Users write the text that ``key`` returned,
followed by the window if there are windows: ``ann@example.com``, ``s1.20260331T100000Z``. A bucket spells it in tokens:
``ann=40example=2Ecom`` (:meth:`ProjectionSpec.bucket_key`, :meth:`ProjectionSpec.key_text`).

**Lookups.** An engine folds the rows of one key in stream order, but rows of two keys in any order: on Spark they are
in different processes. So "the state after all events with a lower sequence" is well defined only within one key. A
projection with lookups therefore takes the events of the projections that it looks up, under their keys, and stores
copies of their states beside its own::

    {"lookups": {"customers": [1, {...}]}, "state": {...}}

with the version of the fold that made each copy. To an engine this is a projection like any other. With every engine
the copy is what ``apply`` of the looked-up projection makes of exactly the events before.
"""

from __future__ import annotations

import datetime
import inspect
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import msgspec

from jetspark.app.contracts.catalogue import contract_of
from jetspark.app.contracts.faults import user_errors
from jetspark.app.contracts.field_rules import check_sets
from jetspark.app.contracts.tokens import MAX_KEY_BYTES, escape, is_plain, text_of, unescape
from jetspark.app.finite_json import check_finite
from jetspark.app.projections.state_header import MAX_UNIQUE_IDS, Mark, Parked, room_for
from jetspark.app.projections.windows import Window, is_part
from jetspark.app.topology.names import check_app_name
from jetspark.core.arguments import flag, iterate, unfit
from jetspark.errors import ConfigError
from jetspark.jetstream.kv import KVConfig
from jetspark.state.changes import DELETE

__all__ = ["Invariant", "LookupSpec", "LookupStates", "ProjectionArguments", "ProjectionSpec", "make_spec"]

Invariant: TypeAlias = Callable[[Any], object]
"""Takes a state; returns False, or raises, if it must not be."""

_encode = msgspec.json.Encoder(order="sorted").encode


_EXAMPLE = datetime.datetime(2026, 3, 31, 10, tzinfo=datetime.UTC)
HEADER_ROOM_BYTES = 4096
# The default max_payload of servers, minus room for headers.
MAX_STATE_BYTES = (1 << 20) - HEADER_ROOM_BYTES


# A key is part of subjects, and the server accepts lines of 4096 bytes, so this leaves room for the rest of the line.
# Keys of events have up to 1000 bytes, three times as many if every byte is escaped.
MAX_TOKEN_BYTES = 3 * MAX_KEY_BYTES


class BrokenInvariant(Exception):
    """An invariant is not true of a new state."""


class StateTooLarge(Exception):
    """A new state is larger than the bucket accepts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectionArguments:
    """The arguments of ``App.projection``; :class:`ProjectionSpec` checks them."""

    events: Sequence[type[object]]
    bucket: KVConfig | str
    version: int = 1
    invariants: Sequence[Invariant] = ()
    window: Window | None = None
    lookups: Sequence[ProjectionSpec] = ()
    filtered: bool = False
    unique_ids: int | None = None


class ProjectionSpec:
    """The declaration of one projection; see ``App.projection``."""

    apply_arguments: typing.ClassVar[tuple[str, ...]] = ("state", "event")
    """Parameters of ``apply``; it may have one more, the key."""

    def __init__(self, name: str, kind: type[object], options: ProjectionArguments) -> None:
        self.name = check_app_name(name)
        own = f"projection {name!r}: "
        version, window = options.version, options.window
        self.filtered = flag(f"{own}filtered", options.filtered)
        self.events = tuple(iterate(f"{own}events", options.events, "a list of types of events"))
        if not self.events:
            raise ConfigError(f"projection {name!r}: events=[]: expected at least one type of event")
        for event in self.events:
            contract_of(event)
        self.bucket = KVConfig.of(options.bucket)
        if self.bucket.ttl_s:
            raise ConfigError(
                f"projection {name!r}: ttl_s={self.bucket.ttl_s} of bucket {self.bucket.bucket}: expected none, since "
                "a state that is gone would be folded again from the middle; return DELETE when a key ends"
            )
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ConfigError(f"projection {name!r}: version={version!r}: expected a whole number, 1 or more")
        self.version = version
        functions = "a list of functions of a state"
        self.invariants = tuple(iterate(f"{own}invariants", options.invariants, functions))
        for invariant in self.invariants:
            if not callable(invariant):
                raise unfit(f"{own}invariants", options.invariants, functions)
        if window is not None and not isinstance(window, Window):
            raise ConfigError(f"projection {name!r}: window={window!r}: expected a Window, such as Window(size_s=3600)")
        self.window = window
        self.unique_ids = _unique_ids(own, options.unique_ids, self.bucket)
        """Number of recent event ids stored with each key; 0 for a projection that folds repeated events again."""
        self.plain_mark = "" if self.unique_ids else str(version)
        """The mark of a state that is not stuck; empty with ``unique_ids``, where every mark differs."""
        room = room_for(self.unique_ids)
        limit = self.bucket.max_value_bytes or 0
        self.max_state_bytes = max(limit - 1024, limit // 2) - room if limit > 0 else MAX_STATE_BYTES - room
        self.kind = kind
        try:
            self._fold = kind()
        except TypeError as error:
            raise ConfigError(f"{own}{kind!r}: expected a class that is made without arguments: {error}") from error
        has_key = not self.is_keyed_by_events
        self._key_of = _method(name, self._fold, "key", "event") if has_key else _keys_of_kinds(name, self.events)
        self._apply = _method(name, self._fold, "apply", *self.apply_arguments)
        self._wants_key = len(inspect.signature(self._apply).parameters) > len(self.apply_arguments)
        state = _state_type(name, self._apply)
        try:
            self._decode = msgspec.json.Decoder(state).decode
        except TypeError as error:
            raise ConfigError(f"{own}state: {state}: expected a type that JSON can be decoded into: {error}") from error
        check_sets(state, f"{own}state")
        # Iterables are replaced by tuples, because renewed copies read the options again.
        self.options = replace(
            options, events=self.events, bucket=self.bucket, invariants=self.invariants, lookups=tuple(options.lookups)
        )

    @property
    def is_keyed_by_events(self) -> bool:
        """True without a ``key`` method: the key of an event is the key of its class."""
        return not hasattr(self._fold, "key")

    def keys_of(self, event: object) -> tuple[str, ...]:
        """The keys that an event concerns, in bucket spelling, each once.

        Raises:
            ConfigError: ``key`` returned something with no single spelling, such as a float, or too long a text.
            Exception: Whatever ``key`` raises.
        """
        found = self._key_of(event)
        if found.__class__ is str:
            return (_token(found),)
        if found is None:
            return ()
        if isinstance(found, list | tuple):
            return tuple(dict.fromkeys(_token(text_of(each)) for each in found))
        return (_token(text_of(found)),)

    def plain_keys_of(self, events: Sequence[object]) -> list[str] | None:
        """The results of :meth:`windowed_keys_of` for many events, if each has exactly one plain key.

        None if events must be asked one by one: an event has no key, several keys, a key that needs escaping, or a
        window that depends on more than the event; or ``key`` raises. Checking all keys at once takes 0.08 us for each
        event instead of 0.28.
        """
        window = self.window
        if window is not None and not window.is_by_event_alone:
            return None
        try:
            first = self._key_of(events[0])
            if first.__class__ is not str or not is_plain(first):
                return None  # usually all keys of a projection are of one kind
            keys = list(map(self._key_of, events))
            if set(map(type, keys)) != {str} or not all(keys) or not is_plain("".join(keys)):
                return None
            if max(map(len, keys)) > MAX_TOKEN_BYTES:
                return None
            if window is not None:
                return [f"{key}.{part}" for key, part in zip(keys, map(window.part_of, events), strict=True)]
        except user_errors():
            return None
        return keys

    def windowed_keys_of(self, event: object, sent: datetime.datetime | None, stored_us: int) -> tuple[str, ...]:
        """The keys that an event concerns, with their windows if the projection has windows; see :class:`Window`."""
        keys = self.keys_of(event)
        if self.window is None or not keys:
            return keys
        parts = self.window.parts(event, sent, stored_us)
        if len(keys) == 1 and len(parts) == 1:
            return (f"{keys[0]}.{parts[0]}",)
        return tuple(f"{key}.{part}" for key in keys for part in parts)

    def bucket_key(self, key: object) -> str:
        """The bucket spelling of a user's key: the value that ``key`` returned, or its text.

        With windows it is ``<key>.<window>``, or a tuple of the key and its window, which may be a moment in it.

        Raises:
            ConfigError: The key does not fit this projection, or lacks a window.
        """
        if self.window is None:
            if isinstance(key, tuple):
                raise ConfigError(f"key {key!r} of projection {self.name!r}: expected no tuple; it has no windows")
            return _token(key if isinstance(key, str) else text_of(key))
        if isinstance(key, tuple) and len(key) == 2:
            of, part = key
        else:
            of, point, part = key.rpartition(".") if isinstance(key, str) else (key, "", "")
            if not point or not is_part(part):
                window = self.window.name(_EXAMPLE)
                raise ConfigError(
                    f"key {key!r} of projection {self.name!r}: expected its window, too, such as '{key}.{window}', "
                    f"({key!r}, {window!r}), or with a moment in place of the window"
                )
        return f"{_token(of if isinstance(of, str) else text_of(of))}.{self.window.part(part)}"

    def key_text(self, name: str) -> str:
        """The user's spelling of a key in the bucket; keys that do not fit this projection are returned unchanged."""
        of, point, part = ("", "", name) if self.window is None else name.rpartition(".")
        try:
            if self.window is None:
                return name if "=" not in name and "." not in name else unescape(name)
            return f"{unescape(of)}.{part}" if point and is_part(part) else name
        except ConfigError:
            return name

    def fold(self, key: str, value: bytes | None, event: object) -> bytes | None:
        """Apply an event to a state; returns the new state as canonical JSON, or None if the key has no state now.

        Args:
            key: The key in bucket spelling.

        Raises:
            Exception: Any error of ``apply`` or an invariant; the state is unchanged.
        """
        state = None if value is None else self._decode(value)
        if self._wants_key:
            return self._made(value, self._apply(state, event, self.key_text(key)))
        return self._made(value, self._apply(state, event))

    def _made(self, value: bytes | None, new: object) -> bytes | None:
        """Check and encode the result of ``apply``."""
        if new is DELETE:
            return None
        if new is None:
            if value is not None:
                raise TypeError("apply returned None for a key that has a state: return the new state, or DELETE")
            return None
        encoded = _encode(new)
        check_finite("the state", new, encoded)
        if encoded == b"null":  # it would read as a key without a state
            raise ValueError(f"the state is {new!r}, which JSON writes as null")
        if len(encoded) > self.max_state_bytes:
            raise self._too_large(encoded)
        for invariant in self.invariants:
            said = invariant(new)
            if said is not None and not said:
                raise BrokenInvariant(f"{getattr(invariant, '__name__', invariant)} is not true of {encoded[:200]!r}")
        return encoded

    def _too_large(self, encoded: bytes) -> StateTooLarge:
        return StateTooLarge(f"the state has {len(encoded)} bytes, and at most {self.max_state_bytes} can be stored")

    def decode_state(self, value: bytes) -> Any:
        """A state in the form that ``apply`` gets; None if the value has only copies of looked-up states."""
        return self._decode(value)

    def has_state(self, value: bytes | None) -> bool:
        """True if a value of the bucket has a state of this projection."""
        return value is not None

    def mark(self, parked: Parked | None, ids: bytes) -> str:
        """The mark to store with a state; see ``state_header``."""
        if parked is None and not self.unique_ids:
            return self.plain_mark
        return str(Mark(self.version, parked, self.unique_ids, ids))

    def renewed(self) -> ProjectionSpec:
        """The same projection, with a new object of its class."""
        return make_spec(self.name, self.kind, self.options)

    def within(self, max_payload_bytes: int) -> ProjectionSpec:
        """The same projection for a server with this ``max_payload``: a larger state makes its key stuck.

        The declaration itself assumes the default ``max_payload``.
        """
        limit = max(max_payload_bytes - HEADER_ROOM_BYTES, max_payload_bytes // 2) - room_for(self.unique_ids)
        if limit >= self.max_state_bytes:
            return self
        spec = self.renewed()
        spec.max_state_bytes = limit
        return spec

    def __reduce__(self) -> tuple[Callable[..., ProjectionSpec], tuple[str, type[object], ProjectionArguments]]:
        return make_spec, (self.name, self.kind, self.options)

    @property
    def bucket_config(self) -> KVConfig:
        """The bucket's configuration with batches enabled: stores use fast ingest, repairs an atomic batch."""
        return replace(self.bucket, allow_batched=True, allow_atomic=True)

    def __repr__(self) -> str:
        return f"<Projection {self.name} version {self.version}: bucket {self.bucket.bucket}>"


def make_spec(name: str, kind: type[object], options: ProjectionArguments) -> ProjectionSpec:
    """Create a :class:`ProjectionSpec`, or a :class:`LookupSpec` if there are lookups."""
    return (LookupSpec if options.lookups else ProjectionSpec)(name, kind, options)


def _unique_ids(own: str, unique_ids: object, bucket: KVConfig) -> int:
    """How many ids each key keeps.

    Raises:
        ConfigError: More than fit a header, or than the bucket has room for; or it is not a number.
    """
    if unique_ids is None:
        return 0
    if not isinstance(unique_ids, int) or isinstance(unique_ids, bool) or not 1 <= unique_ids <= MAX_UNIQUE_IDS:
        raise ConfigError(
            f"{own}unique_ids={unique_ids!r}: expected how many ids each key keeps, 1 to {MAX_UNIQUE_IDS}, or None"
        )
    room, limit = room_for(unique_ids), bucket.max_value_bytes or 0
    if 0 < limit <= 2 * room:
        raise ConfigError(
            f"{own}unique_ids={unique_ids} with max_value_bytes={limit} of bucket {bucket.bucket}: the ids take {room} "
            f"bytes of each value: expected fewer ids, or more than {2 * room} bytes"
        )
    return unique_ids


def _token(key: str) -> str:
    """A key as a token of the bucket's keys.

    Raises:
        ConfigError: The key is empty, or longer than the server accepts.
    """
    token = key if is_plain(key) else escape(key)
    if len(token) > MAX_TOKEN_BYTES:
        raise ConfigError(
            f"key {key[:40]!r}..., which takes {len(token)} bytes: expected up to {MAX_TOKEN_BYTES}, with three for "
            "each byte that is no letter, digit, _ or -; use an id, or a hash of the text"
        )
    return token


def _keys_of_kinds(name: str, events: Sequence[type[object]]) -> Callable[[Any], str | None]:
    """The key function of a projection without a ``key`` method.

    Raises:
        ConfigError: A type of event has no key of its own.
    """
    keys = {kind: contract_of(kind).key_of for kind in events}
    without = [kind.__name__ for kind in events if contract_of(kind).key is None]
    if without:
        raise ConfigError(
            f"projection {name!r}: expected `def key(self, event)`, a plain function without I/O, since "
            f"{', '.join(without)} has no key of its own (key= of the event)"
        )
    return lambda event: keys[type(event)](event)


def _method(name: str, fold: object, method: str, *parameters: str) -> Callable[..., Any]:
    found = getattr(fold, method, None)
    wanted = f"def {method}(self, {', '.join(parameters)})"
    if not callable(found) or inspect.iscoroutinefunction(found):
        raise ConfigError(f"projection {name!r}: expected `{wanted}`, a plain function without I/O")
    try:
        inspect.signature(found).bind(*parameters)
    except TypeError:
        try:
            inspect.signature(found).bind(*parameters, "key")
        except TypeError:
            raise ConfigError(f"projection {name!r}: expected `{wanted}`, got {inspect.signature(found)}") from None
    return typing.cast("Callable[..., Any]", found)


def _state_type(name: str, apply: Callable[..., Any]) -> Any:
    """The type of the state by the annotation of ``apply``, without None; Any without an annotation.

    Raises:
        ConfigError: The annotation has a name that cannot be resolved.
    """
    state = next(iter(inspect.signature(apply).parameters))
    # Only this parameter: the annotations of events may name types that exist for type checkers alone.
    annotations = {state: getattr(apply, "__annotations__", {}).get(state, Any)}
    names = getattr(inspect.unwrap(getattr(apply, "__func__", apply)), "__globals__", {})
    try:
        hint = typing.get_type_hints(types.SimpleNamespace(__annotations__=annotations), globalns=names)[state]
    except NameError as error:
        raise ConfigError(
            f"projection {name!r}: {state}: {annotations[state]!r}: {error}; the type of the state is resolved when "
            "the program runs: define it in a module, and do not import it under TYPE_CHECKING"
        ) from None
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        alternatives = [each for each in typing.get_args(hint) if each is not type(None)]
        hint = alternatives[0] if len(alternatives) == 1 else typing.Union[tuple(alternatives)]  # noqa: UP007
    return hint


_NOTHING = msgspec.Raw(b"null")


class _JoinedValue(msgspec.Struct):
    lookups: dict[str, tuple[int, msgspec.Raw]] = {}
    state: msgspec.Raw = _NOTHING


_decode = msgspec.json.Decoder(_JoinedValue).decode


class StaleLookup(Exception):
    """The copy of another projection's state was made by another version of its fold."""


class LookupStates(Mapping[str, Any]):
    """The third argument of ``apply``: the states of its key in the looked-up projections, by their names."""

    def __init__(self, specs: Mapping[str, ProjectionSpec], values: Mapping[str, bytes | None]) -> None:
        self._specs, self._values = specs, values

    def __getitem__(self, name: str) -> Any:
        """A copy of the state, or None if the key has no state in that projection."""
        spec = self._specs[name]
        value = self._values.get(name)
        return None if value is None else spec.decode_state(value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


class LookupSpec(ProjectionSpec):
    """A projection with lookups."""

    apply_arguments = ("state", "event", "lookup")

    def __init__(self, name: str, kind: type[object], options: ProjectionArguments) -> None:
        super().__init__(name, kind, options)
        lookups = self.options.lookups
        if self.window is not None or any(each.window is not None for each in lookups):
            raise ConfigError(
                f"projection {name!r}: lookups= is not supported with window=, neither here nor in a looked-up "
                "projection"
            )
        if self.unique_ids or any(each.unique_ids for each in lookups):
            raise ConfigError(
                f"projection {name!r}: lookups= is not supported with unique_ids=, neither here nor in a looked-up "
                "projection: a copy of another projection's state has no ids"
            )
        self.lookups = {each.name: each for each in lookups}
        self._own = frozenset(self.events)
        self._lookers = {
            kind: [each for each in lookups if kind in each.events] for each in lookups for kind in each.events
        }
        self.events = tuple(dict.fromkeys([*self.events, *self._lookers]))

    def keys_of(self, event: object) -> tuple[str, ...]:
        """The keys of an event in this projection and in the looked-up projections."""
        found = super().keys_of(event) if type(event) in self._own else ()
        for spec in self._lookers.get(type(event), ()):
            found += spec.keys_of(event)
        return tuple(dict.fromkeys(found))

    def plain_keys_of(self, events: Sequence[object]) -> list[str] | None:
        return None  # an event may have keys of several projections

    def fold(self, key: str, value: bytes | None, event: object) -> bytes | None:
        """Apply an event to the state and the copies; ``apply`` sees the copies as they were before the event."""
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
