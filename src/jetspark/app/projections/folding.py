"""What the messages of a stream do to the keys of projections. Pure: every engine folds with this.

A :class:`Router` makes rows of a message: which projections it concerns, and which keys. A :class:`KeyState` takes the
rows of one key by ascending sequence, beginning at or before the first that it has not, and without leaving one out.
Then, whatever an engine does twice or somebody else has done already, the bytes are the same:

* an event at or below the sequence of the state is in it, and changes nothing;
* an event whose id the state has among those it keeps (``unique_ids``) was folded before, and changes nothing;
* an event that ``apply`` or an invariant refuses parks its key: the state stays as it was, and later events wait;
* what is stored is stored by compare-and-set on the revision it was folded from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from jetspark.app.contracts.catalogue import Catalogue, contract_of
from jetspark.app.contracts.envelope import Envelope, RawHeaders, event_id, read_event, whole_reader
from jetspark.app.contracts.faults import user_errors
from jetspark.app.projections.marks import Parked, mark_of, parked_of
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.projections.recent_ids import ID_BYTES, Identified, digest_of, is_among
from jetspark.core.message import CoreMessage
from jetspark.core.subjects import is_subset, on_one_of, reading_filters
from jetspark.errors import ContractViolation, UsageError
from jetspark.state.changes import Change, Current
from jetspark.state.deliveries import delivery

__all__ = [
    "Failure",
    "KeyRows",
    "KeyState",
    "Received",
    "Recorded",
    "Router",
    "Routing",
    "Row",
    "Spread",
    "identity_of",
    "recorded_delivery",
]


class Recorded(NamedTuple):
    """A message as the stream has it."""

    sequence: int
    subject: str
    data: bytes
    headers: RawHeaders
    time_us: int
    """When it was stored, in microseconds: what every engine can see of it."""


def recorded_delivery(message: CoreMessage) -> Recorded:
    """What projections see of a message that a consumer has sent."""
    place = delivery(message)
    return Recorded(place.sequence, message.subject, message.data, message.raw_headers, place.time_ns // 1000)


class Received(Protocol):
    """What every message has that a :class:`Recorded` can be made of."""

    @property
    def subject(self) -> str: ...

    @property
    def data(self) -> bytes: ...


M = TypeVar("M", bound=Received)


class Row(NamedTuple):
    """An event on its way to one key of one projection."""

    projection: str
    key: str
    """As the bucket has it."""
    sequence: int
    event: Any
    """An :class:`~jetspark.app.projections.recent_ids.Identified` where the projection has ``unique_ids``."""


def identity_of(envelope: Any, headers: RawHeaders) -> bytes:
    """The id of an event, as a key of a projection with ``unique_ids`` keeps it."""
    return digest_of(envelope.source, event_id(envelope, headers))


class _Refused(NamedTuple):
    """In place of an event that must not be applied."""

    error: Exception


class KeyRows:
    """Key, sequence and event of rows: what is left when the projection is known.

    Rows are kept until they are stored, a hundred thousand of them. As columns they have no object of their own that
    the garbage collector would look at again and again.
    """

    __slots__ = ("events", "keys", "sequences")

    def __init__(self, rows: Iterable[tuple[str, int, Any]] = ()) -> None:
        self.keys: list[str] = []
        self.sequences: list[int] = []
        self.events: list[Any] = []
        for row in rows:
            self.add(*row)

    def add(self, key: str, sequence: int, event: Any) -> None:
        self.keys.append(key)
        self.sequences.append(sequence)
        self.events.append(event)

    def extend(self, keys: Iterable[str], sequences: Iterable[int], events: Iterable[Any]) -> None:
        """Add many rows, as columns of the same length."""
        self.keys.extend(keys)
        self.sequences.extend(sequences)
        self.events.extend(events)

    def refused(self, error: Exception) -> KeyRows:
        """The same rows, of which each parks its key."""
        refused = _Refused(error)
        events = (Identified(each.id, refused) if isinstance(each, Identified) else refused for each in self.events)
        return KeyRows(zip(self.keys, self.sequences, events, strict=True))

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[tuple[str, int, Any]]:
        return zip(self.keys, self.sequences, self.events, strict=True)


Spread: TypeAlias = "tuple[Recorded, Envelope | None, Any, list[tuple[str, tuple[str, ...]]], list[Failure]]"
"""A message, its envelope, its event, its keys by projection, and why it has none for others."""


class Failure(NamedTuple):
    """A message that no key can be parked for, because it cannot be read, or its key cannot be told."""

    projections: tuple[str, ...]
    sequence: int
    error: BaseException


class Routing(NamedTuple):
    """Where a message goes."""

    rows: list[Row]
    failures: list[Failure]


class Router:
    """Knows which events concern which projections."""

    def __init__(
        self,
        specs: Iterable[ProjectionSpec],
        catalogue: Catalogue,
        *,
        owns_stream: bool = False,
        beside: Iterable[ProjectionSpec] = (),
    ) -> None:
        """
        Args:
            owns_stream: Most of what the stream has is events of the application.
            beside: Projections whose events are read, too, and passed by: so readers of the same stream count alike.
        """
        self.specs = {spec.name: spec for spec in specs}
        self._catalogue = catalogue
        self._of_kind: dict[type[Any], list[ProjectionSpec]] = {}
        for spec in self.specs.values():
            for kind in spec.events:
                self._of_kind.setdefault(kind, []).append(spec)
        read = [*self.specs.values(), *beside]
        self._read_kinds = [kind for spec in read for kind in spec.events]
        self._may_read_all = owns_stream and not all(spec.filtered for spec in read)
        filters = self.filters
        self.is_wanted = None if self.reading == filters else on_one_of(filters)
        """Tells the subjects of events from others, where more is read; None where the server does."""

    @property
    def filters(self) -> list[str]:
        """What has to be read: the subjects of all events. One within another is left out, as the server wants it."""
        return _filters_of(self._of_kind)

    @property
    def reading(self) -> list[str]:
        """What to ask the server for; an empty list is everything. What is not on :attr:`filters` is left out here."""
        return reading_filters(_filters_of(self._read_kinds), may_read_all=self._may_read_all)

    def route(self, message: Recorded) -> Routing:
        """The rows of a message. One that no projection asked for has none."""
        for _, envelope, event, found, failures in self.spread([message]):
            rows = []
            for name, keys in found:
                is_identified = keys and self.specs[name].unique_ids
                of = Identified(identity_of(envelope, message.headers), event) if is_identified else event
                rows += [Row(name, key, message.sequence, of) for key in keys]
            return Routing(rows, failures)
        return Routing([], [])

    @cached_property
    def _read_whole(self) -> Callable[[bytes], Any]:
        return whole_reader(self._catalogue)  # when it is needed: by then every class is defined

    def sort(
        self,
        messages: Sequence[M],
        sequences: Sequence[int],
        recorded_of: Callable[[M], Recorded],
        rows: Mapping[str, KeyRows],
    ) -> list[tuple[Recorded, list[Failure]]]:
        """The rows of many messages, by projection, added to ``rows``; returns the messages that cannot be read.

        Of each message it finds what :meth:`spread` finds. This is the inner loop of live engines and rebuilds: most
        messages are read at once, nothing is made of a message but its event, and where every event has one plain key
        the rows are added as columns.

        Args:
            sequences: Those of the messages.
            recorded_of: Makes a :class:`Recorded` of a message; few need one.
        """
        failures: dict[int, list[Failure]] = {}
        events, envelopes = self._read_all(messages, sequences, recorded_of, failures)
        kinds = set(map(type, events))
        for name, spec in self.specs.items():
            wanted = kinds.intersection(spec.events)
            if not wanted:
                continue
            mine, of_events, of_sequences, taken = rows[name], events, sequences, events
            if spec.unique_ids:
                # What the key is asked of stays the event; what the key is given has its id, too.
                taken = [
                    Identified(identity_of(envelope, recorded_of(message).headers), event)
                    if type(event) in wanted
                    else None
                    for message, envelope, event in zip(messages, envelopes, events, strict=True)
                ]
            of_taken = taken
            if len(wanted) < len(kinds):
                is_wanted = [type(event) in wanted for event in events]
                of_events, of_sequences = list(compress(events, is_wanted)), list(compress(sequences, is_wanted))
                of_taken = list(compress(taken, is_wanted)) if spec.unique_ids else of_events
            if (plain := spec.plain_keys_of(of_events)) is not None:
                mine.extend(plain, of_sequences, of_taken)
                continue
            for place, event in enumerate(events):
                if type(event) not in wanted:
                    continue
                try:
                    if spec.window is None:
                        keys = spec.keys_of(event)
                    else:
                        time_us = recorded_of(messages[place]).time_us
                        keys = spec.windowed_keys_of(event, envelopes[place].time, time_us)
                except user_errors() as error:
                    failures.setdefault(place, []).append(Failure((name,), sequences[place], error))
                    continue
                for key in keys:
                    mine.add(key, sequences[place], taken[place])
        return [(recorded_of(messages[place]), failures[place]) for place in sorted(failures)]

    def _read_all(
        self,
        messages: Sequence[M],
        sequences: Sequence[int],
        recorded_of: Callable[[M], Recorded],
        failures: dict[int, list[Failure]],
    ) -> tuple[list[Any], list[Any]]:
        """The event of each message, and its envelope where somebody needs it; None for a message that has none.

        Why a message cannot be read is noted in ``failures``, by its place.
        """
        catalogue, is_wanted, read_whole = self._catalogue, self.is_wanted, self._read_whole
        needs_envelopes = any(spec.window is not None or spec.unique_ids for spec in self.specs.values())
        events, envelopes = list[Any](), list[Any]()
        add_event = events.append
        for message in messages:
            envelope = event = None
            if is_wanted is None or is_wanted(message.subject):
                try:
                    envelope = read_whole(message.data)
                    event = envelope.data
                except user_errors():
                    recorded = recorded_of(message)
                    try:
                        envelope, _, event = read_event(recorded.subject, recorded.data, recorded.headers, catalogue)
                    except ContractViolation as error:
                        place = len(events)
                        failures[place] = [Failure(tuple(self.specs), sequences[place], error)]
            add_event(event)
            if needs_envelopes:
                envelopes.append(envelope)
        return events, envelopes

    def spread(self, messages: Iterable[Recorded]) -> Iterator[Spread]:
        """The keys of each of many messages; of none that is on no filter."""
        of_kind, catalogue, nothing = self._of_kind, self._catalogue, list[Failure]()
        is_wanted = self.is_wanted
        for message in messages:
            sequence, subject, data, headers, time_us = message
            if is_wanted is not None and not is_wanted(subject):
                continue
            try:
                envelope, _, event = read_event(subject, data, headers, catalogue)
            except ContractViolation as error:
                yield message, None, None, [], [Failure(tuple(self.specs), sequence, error)]
                continue
            found, failures = [], nothing
            for spec in of_kind.get(type(event), ()):
                try:
                    if spec.window is None:
                        found.append((spec.name, spec.keys_of(event)))
                    else:
                        found.append((spec.name, spec.windowed_keys_of(event, envelope.time, time_us)))
                except user_errors() as error:
                    failures = [*failures, Failure((spec.name,), sequence, error)]
            yield message, envelope, event, found, failures


def _filters_of(kinds: Iterable[type[Any]]) -> list[str]:
    filters = list(dict.fromkeys(contract_of(kind).subject.filter for kind in kinds))
    return [each for each in filters if not any(each != other and is_subset(each, other) for other in filters)]


class KeyState:
    """One key in hand: as the bucket had it, and with the events since."""

    __slots__ = ("_loaded", "_was_parked", "applied", "ids", "known", "parked", "sequence", "value", "waiting")

    def __init__(self, spec: ProjectionSpec, key: str, loaded: Current) -> None:
        """
        Raises:
            UsageError: The bucket has a state that another version of the projection has made, or the same one with
                another ``unique_ids``.
        """
        parked: Parked | None = None
        ids = b""
        # Most keys are new to the bucket, or have the mark of a state that this version made: nothing to look at.
        if loaded.revision and loaded.mark != spec.plain_mark:
            mark, parked = mark_of(loaded), parked_of(loaded)
            if mark is not None and mark.version != spec.version:
                raise UsageError(
                    f"key {key!r} of projection {spec.name!r} was made by its version {mark.version}, and this is "
                    f"version {spec.version}: rebuild it (jetspark rebuild), or run the version that made it"
                )
            if mark is not None:
                if mark.unique_ids != spec.unique_ids:
                    raise UsageError(
                        f"key {key!r} of projection {spec.name!r} was made with unique_ids={mark.unique_ids or None}, "
                        f"and this code has unique_ids={spec.unique_ids or None}: give the projection another version "
                        "and rebuild it (jetspark rebuild)"
                    )
                ids = mark.ids
        self._loaded = loaded
        self.value = loaded.value
        self.sequence = loaded.sequence
        self.ids = ids
        """The ids of the last events that the key has taken, where the projection has ``unique_ids``."""
        self.parked = self._was_parked = parked
        self.applied = self.known = self.waiting = 0

    def apply(self, spec: ProjectionSpec, key: str, sequence: int, event: Any) -> None:
        """Take the next event of the key."""
        if sequence <= self.sequence:
            self.known += 1
        elif self.parked is not None:
            self.waiting += 1
        else:
            self.fold(spec, key, sequence, event)

    def fold(self, spec: ProjectionSpec, key: str, sequence: int, event: Any) -> None:
        """Take an event of a sequence that is new, of a key that is not parked."""
        had, id = self.value, b""
        if spec.unique_ids:
            id, event = event
            if is_among(id, self.ids):
                self.known += 1
                return
        try:
            if type(event) is _Refused:
                raise event.error
            value = spec.fold(key, had, event)
        except user_errors() as error:
            self.parked = Parked(sequence, f"{type(error).__name__}: {error}")
            return
        self.applied += 1
        if id:
            # Also of an event that was ignored: stored again, it is the same event.
            self.ids = (self.ids + id)[-spec.unique_ids * ID_BYTES :]
        elif value is None and had is None:
            return  # a key that is not there, and whose event was ignored
        self.value, self.sequence = value, sequence

    def stored(self, change: Change, revision: int) -> None:
        """The bucket has a change that was made of this; there may be events since."""
        value = change.value if change.operation == "put" else None
        self._loaded = Current(value, change.sequence or 0, revision, change.mark)
        if self.parked is None:
            return
        mark = mark_of(self._loaded)
        self._was_parked = mark.parked if mark is not None else None
        if self._was_parked is not None and self._was_parked.sequence == self.parked.sequence:
            self.parked = self._was_parked  # with as much of the reason as a header has room for

    @property
    def loaded(self) -> Current:
        """What the bucket has, as far as is known."""
        return self._loaded

    @property
    def is_parked_in_bucket(self) -> bool:
        return self._was_parked is not None

    def change(self, spec: ProjectionSpec, key: str) -> Change | None:
        """What has to be stored; None if the bucket has it all."""
        loaded = self._loaded
        if self.sequence == loaded.sequence and self.parked == self._was_parked:
            return None
        is_plain = self.parked is None and not spec.unique_ids
        mark = spec.plain_mark if is_plain else spec.mark(self.parked, self.ids)
        if self.value is None:
            return Change(key, b"", "delete", self.sequence, loaded.revision, mark=mark)
        return Change(key, self.value, "put", self.sequence, loaded.revision, mark=mark)
