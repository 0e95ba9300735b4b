"""Decodes the messages of a stream, and finds the keys of projections that each event concerns. Pure.

There is one loop for all engines, so they cannot disagree about a message. :meth:`EventDecoder.decode` makes an
:class:`EventBatch` of many messages: columns with the event of each message, or the reason why it cannot be decoded.
:meth:`Router.route` makes :class:`KeyColumns` of a batch for each projection: keys, and the index of the event that
each key gets. Live engines, rebuilds and views take the events (:meth:`Router.add_rows`); a Spark task sends the data
of the event, as the message has it, to the task that folds the key.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import compress
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import msgspec

from jetspark.app.contracts.catalogue import Catalogue, contract_of
from jetspark.app.contracts.envelope import RawHeaders, event_id, read_event, whole_reader
from jetspark.app.contracts.faults import user_errors
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.projections.state_header import Identified, digest_of
from jetspark.core.message import CoreMessage
from jetspark.core.subjects import is_subset, on_one_of, reading_filters
from jetspark.errors import ContractViolation
from jetspark.jetstream.info import StoredMessage
from jetspark.state.deliveries import delivery

__all__ = [
    "EventBatch",
    "EventDecoder",
    "Failure",
    "KeyColumns",
    "KeyRows",
    "Recorded",
    "RefusedEvent",
    "Router",
    "Routes",
    "filters_of",
    "raw_data",
    "recorded",
    "recorded_delivery",
]

T = TypeVar("T")


class Recorded(NamedTuple):
    """A message as the stream stores it."""

    sequence: int
    subject: str
    data: bytes
    headers: RawHeaders
    time_us: int
    """When the server stored it, in microseconds since 1970."""


def recorded_delivery(message: CoreMessage) -> Recorded:
    """A consumer's message as the stream stores it; sequence and time are parsed from its reply subject."""
    found = delivery(message)
    return Recorded(found.sequence, message.subject, message.data, message.raw_headers, found.time_ns // 1000)


def recorded(message: Any) -> Recorded:
    """A message of a consumer, or one that was read without a consumer."""
    if isinstance(message, StoredMessage):
        moment = message.timestamp - datetime.datetime.fromtimestamp(0, datetime.UTC)
        time_us = moment // datetime.timedelta(microseconds=1)
        return Recorded(message.sequence, message.subject, message.data, message.headers, time_us)
    return recorded_delivery(message)


class Received(Protocol):
    """The fields of a message that decoding needs."""

    @property
    def subject(self) -> str: ...

    @property
    def data(self) -> bytes: ...


M = TypeVar("M", bound=Received)


class EventEnvelope(Protocol):
    """The fields of an envelope that windows and ``unique_ids`` need."""

    @property
    def id(self) -> str: ...

    @property
    def source(self) -> str: ...

    @property
    def time(self) -> datetime.datetime | None: ...


class EventBatch:
    """The events of many messages, as columns: index ``i`` of each column belongs to message ``i``."""

    __slots__ = ("_recorded", "_times_us", "envelopes", "errors", "events", "sequences")

    def __init__(
        self, sequences: Sequence[int], recorded: Callable[[int], Recorded], times_us: Sequence[int] | None
    ) -> None:
        self._recorded, self._times_us = recorded, times_us
        self.sequences = sequences
        self.events: list[object] = []
        """None for messages on foreign subjects, and for messages that cannot be decoded."""
        self.envelopes: list[EventEnvelope | None] = []
        """Empty unless the decoder was made with ``with_envelopes``; None where ``events`` has None."""
        self.errors: dict[int, ContractViolation] = {}
        """By index: why a message cannot be decoded."""

    def recorded(self, index: int) -> Recorded:
        """Subject, sequence, time, data and headers of one message."""
        return self._recorded(index)

    def time_us(self, index: int) -> int:
        """When the server stored one message, in microseconds since 1970."""
        return self._recorded(index).time_us if self._times_us is None else self._times_us[index]

    def identity(self, index: int) -> bytes:
        """The id of an event in the form in which keys of projections with ``unique_ids`` store it."""
        envelope = self.envelopes[index]
        assert envelope is not None
        return digest_of(envelope.source, event_id(envelope, self._recorded(index).headers))


class EventDecoder:
    """Decodes messages of any form, type and version that a catalogue can read."""

    def __init__(
        self, catalogue: Catalogue, *, is_wanted: Callable[[str], object] | None = None, with_envelopes: bool = False
    ) -> None:
        """
        Args:
            is_wanted: Tells the subjects of events from foreign ones; None if every message is on a wanted subject.
            with_envelopes: Keep the envelope of each event.
        """
        self._catalogue, self._is_wanted, self._with_envelopes = catalogue, is_wanted, with_envelopes

    @cached_property
    def _read_whole(self) -> Callable[[bytes], Any]:
        return whole_reader(self._catalogue)  # at the first use: by then every class is defined

    def decode(
        self,
        messages: Iterable[Received],
        sequences: Sequence[int],
        recorded: Callable[[int], Recorded],
        times_us: Sequence[int] | None = None,
    ) -> EventBatch:
        """Decode many messages; for messages that cannot be decoded ``errors`` has the reason.

        Most messages are in the form that ``encode`` writes, and are decoded in one call. Every other message, and
        every message that this call refuses, goes to :func:`read_event`, which decides.

        Args:
            sequences: The sequences of the messages.
            recorded: Makes a :class:`Recorded` of the message with an index; called for few messages.
            times_us: When the server stored the messages, if that is known without ``recorded``.
        """
        batch = EventBatch(sequences, recorded, times_us)
        is_wanted, read_whole, catalogue = self._is_wanted, self._read_whole, self._catalogue
        with_envelopes = self._with_envelopes
        add_event, add_envelope = batch.events.append, batch.envelopes.append
        for message in messages:
            envelope = event = None
            if is_wanted is None or is_wanted(message.subject):
                try:
                    envelope = read_whole(message.data)
                    event = envelope.data
                except user_errors():
                    index = len(batch.events)
                    _, subject, data, headers, _ = recorded(index)
                    try:
                        envelope, _, event = read_event(subject, data, headers, catalogue)
                    except ContractViolation as error:
                        batch.errors[index] = error
            add_event(event)
            if with_envelopes:
                add_envelope(envelope)
        return batch


class _RawData(msgspec.Struct, gc=False):
    data: msgspec.Raw


_read_raw = msgspec.json.Decoder(_RawData).decode


def raw_data(message: bytes) -> bytes:
    """The data of an event as the message has it; only for messages in the form that ``encode`` writes."""
    return bytes(_read_raw(message).data)


class RefusedEvent(NamedTuple):
    """Stands for an event that must not be applied: it makes its key stuck."""

    error: Exception


class KeyRows:
    """Key, sequence and event of the rows of one projection.

    Up to a hundred thousand rows are held until they are stored. As columns they are no objects that the garbage
    collector would visit again and again.
    """

    __slots__ = ("events", "keys", "sequences")

    def __init__(self, rows: Iterable[tuple[str, int, object]] = ()) -> None:
        self.keys: list[str] = []
        self.sequences: list[int] = []
        self.events: list[object] = []
        for row in rows:
            self.add(*row)

    def add(self, key: str, sequence: int, event: object) -> None:
        self.keys.append(key)
        self.sequences.append(sequence)
        self.events.append(event)

    def extend(self, keys: Iterable[str], sequences: Iterable[int], events: Iterable[object]) -> None:
        """Add many rows, as columns of the same length."""
        self.keys.extend(keys)
        self.sequences.extend(sequences)
        self.events.extend(events)

    def refused(self, error: Exception) -> KeyRows:
        """The same rows with an event that makes each of their keys stuck."""
        refused = RefusedEvent(error)
        events = (Identified(each.id, refused) if isinstance(each, Identified) else refused for each in self.events)
        return KeyRows(zip(self.keys, self.sequences, events, strict=True))

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[tuple[str, int, object]]:
        return zip(self.keys, self.sequences, self.events, strict=True)


class Failure(NamedTuple):
    """Why a message has no key in some projections: it cannot be decoded, or ``key`` raised."""

    projections: tuple[str, ...]
    sequence: int
    error: BaseException


class KeyColumns(NamedTuple):
    """The keys of one projection that a batch of events concerns, in the order of the stream."""

    spec: ProjectionSpec
    keys: list[str]
    """The keys as the bucket spells them."""
    indexes: Sequence[int]
    """For each key the index of its event; a ``range`` over the whole batch if every event has exactly one key."""

    def pick(self, column: Sequence[T]) -> Sequence[T]:
        """The values of a column of the batch, one for each key."""
        return column if isinstance(self.indexes, range) else list(map(column.__getitem__, self.indexes))

    def identities(self, batch: EventBatch) -> list[bytes]:
        """The ids of the events, one for each key."""
        found = {index: batch.identity(index) for index in dict.fromkeys(self.indexes)}
        return [found[index] for index in self.indexes]


class Routes(NamedTuple):
    """Where the events of a batch go."""

    columns: list[KeyColumns]
    failures: dict[int, list[Failure]]
    """By index in the batch."""


class Router:
    """Finds the projections and keys that events concern."""

    def __init__(
        self,
        specs: Iterable[ProjectionSpec],
        catalogue: Catalogue,
        *,
        owns_stream: bool = False,
        beside: Iterable[ProjectionSpec] = (),
        subjects: Sequence[str] | None = None,
        with_envelopes: bool = False,
    ) -> None:
        """
        Args:
            owns_stream: Most messages of the stream are events of the application.
            beside: Projections of other readers. Their events are read and skipped, so that all readers of the same
                stream count the same messages.
            subjects: What the messages were read with, if not with :attr:`reading`.
            with_envelopes: Keep the envelope of each event, also where no projection needs one.
        """
        self.specs = {spec.name: spec for spec in specs}
        self._kinds = [kind for spec in self.specs.values() for kind in spec.events]
        read = [*self.specs.values(), *beside]
        self._read_kinds = [kind for spec in read for kind in spec.events]
        self._may_read_all = owns_stream and not all(spec.filtered for spec in read)
        filters = self.filters
        given = self.reading if subjects is None else subjects
        self.is_wanted = None if set(given) == set(filters) else on_one_of(filters)
        """Tells the subjects of events from others, where more is read; None where the server filters."""
        needs_envelopes = any(spec.window is not None or spec.unique_ids for spec in self.specs.values())
        self._decoder = EventDecoder(
            catalogue, is_wanted=self.is_wanted, with_envelopes=with_envelopes or needs_envelopes
        )

    @property
    def filters(self) -> list[str]:
        """The subjects of all events, without subjects within another one: the server refuses overlapping filters."""
        return filters_of(self._kinds)

    @property
    def reading(self) -> list[str]:
        """The filters to request from the server; an empty list is the whole stream. The decoder skips the rest."""
        return reading_filters(filters_of(self._read_kinds), may_read_all=self._may_read_all)

    def decode(
        self,
        messages: Iterable[Received],
        sequences: Sequence[int],
        recorded: Callable[[int], Recorded],
        times_us: Sequence[int] | None = None,
    ) -> EventBatch:
        """The events of many messages; see :meth:`EventDecoder.decode`."""
        return self._decoder.decode(messages, sequences, recorded, times_us)

    def route(self, batch: EventBatch) -> Routes:
        """The keys of each projection, and why some messages have none.

        Where each event of a projection has one plain key, all keys are found at once.
        """
        events, sequences, found = batch.events, batch.sequences, list[KeyColumns]()
        names = tuple(self.specs)
        failures = {index: [Failure(names, sequences[index], error)] for index, error in batch.errors.items()}
        kinds = set(map(type, events))
        for name, spec in self.specs.items():
            wanted = kinds.intersection(spec.events)
            if not wanted:
                continue
            mine, indexes = events, cast("Sequence[int]", range(len(events)))
            if len(wanted) < len(kinds):
                is_wanted = [type(event) in wanted for event in events]
                mine, indexes = list(compress(events, is_wanted)), list(compress(indexes, is_wanted))
            if (plain := spec.plain_keys_of(mine)) is not None:
                found.append(KeyColumns(spec, plain, indexes))
                continue
            keys, of_keys = list[str](), list[int]()
            for index in indexes:
                try:
                    if spec.window is None:
                        its_keys = spec.keys_of(events[index])
                    else:
                        envelope = batch.envelopes[index]
                        assert envelope is not None
                        its_keys = spec.windowed_keys_of(events[index], envelope.time, batch.time_us(index))
                except user_errors() as error:
                    failures.setdefault(index, []).append(Failure((name,), sequences[index], error))
                    continue
                for key in its_keys:
                    keys.append(key)
                    of_keys.append(index)
            found.append(KeyColumns(spec, keys, of_keys))
        return Routes(found, failures)

    def add_rows(
        self,
        messages: Sequence[M],
        sequences: Sequence[int],
        recorded_of: Callable[[M], Recorded],
        rows: Mapping[str, KeyRows],
    ) -> list[tuple[Recorded, list[Failure]]]:
        """Decode and route many messages, and add the rows of each projection to ``rows``.

        Args:
            sequences: The sequences of the messages.
            recorded_of: Makes a :class:`Recorded` of a message; called for few messages.

        Returns:
            The messages that have no key in some projection, in the order of the stream.
        """
        batch = self.decode(messages, sequences, lambda index: recorded_of(messages[index]))
        columns, failures = self.route(batch)
        for found in columns:
            events: Sequence[object] = found.pick(batch.events)
            if found.spec.unique_ids:
                events = list(map(Identified, found.identities(batch), events))
            rows[found.spec.name].extend(found.keys, found.pick(sequences), events)
        return [(batch.recorded(index), failures[index]) for index in sorted(failures)]


def filters_of(kinds: Iterable[type[object]]) -> list[str]:
    """The subjects of some types of events, without subjects within another one, which the server refuses."""
    filters = list(dict.fromkeys(contract_of(kind).subject.filter for kind in kinds))
    return [each for each in filters if not any(each != other and is_subset(each, other) for other in filters)]
