"""The arguments of a handler besides its event: a context, and objects of the lifespan, by type."""

from __future__ import annotations

import datetime
import inspect
import logging
import typing
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from jetspark.app.contracts.catalogue import Contract, contract_of
from jetspark.app.contracts.envelope import Decoded, Encoded, derived_id, encode
from jetspark.app.timers import FiredTimer, Seconds, Timers
from jetspark.errors import ConfigError
from jetspark.jetstream.info import PubAck

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.app.entities.entities import Entities
    from jetspark.app.handlers.lanes import WorkItem
    from jetspark.app.handlers.once import EffectTransaction, OnceRecords

__all__ = ["Context", "Dependencies", "injected_parameters", "open_lifespans", "plan_arguments"]

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSurroundings:
    """The parts of a handler's contexts that are the same for all its events."""

    app: str
    handler: str
    source: str
    stream: str
    js: JetStream
    once: OnceRecords | None
    clock: Callable[[], datetime.datetime]
    log: logging.Logger
    is_replay: bool = False
    entities: Callable[[Context, str], Entities] | None = None
    declared: Callable[[Any], Contract] = contract_of
    server_now: Callable[[], Awaitable[datetime.datetime]] | None = None


class Context:
    """The event that is being handled, and what a handler does beside its own work.

    Everything that has to be the same when the event is handled again follows from the event's id: the ids of events
    that are published, ``new_id()``, and the keys of ``once``.
    """

    __slots__ = (
        "_app",
        "_changes",
        "_clock",
        "_count",
        "_declared",
        "_entities",
        "_handler",
        "_ids",
        "_js",
        "_once",
        "_server_now",
        "_source",
        "_timers",
        "_tx",
        "attempt",
        "decoded",
        "delivered",
        "is_replay",
        "key",
        "log",
        "redrives",
        "sequence",
        "stream",
    )

    def __init__(self, decoded: Decoded, item: WorkItem, surroundings: HandlerSurroundings) -> None:
        self.decoded = decoded
        """The event with its envelope."""
        self.stream, self.sequence = surroundings.stream, item.sequence
        """Where the event was published; the same for each delivery and redrive."""
        self.key = item.key
        """Events of the same key are handled one after the other."""
        self.attempt = item.attempts
        """1 for the first start."""
        self.delivered = item.delivered
        self.redrives = item.redrives
        """Number of redrives of its dead letter."""
        self.is_replay = surroundings.is_replay
        """True if the event comes from ``jetspark replay``, and not from the live consumer of the handler."""
        self._app, self._handler, self._source = surroundings.app, surroundings.handler, surroundings.source
        self._js, self._once, self._clock = surroundings.js, surroundings.once, surroundings.clock
        self._entities, self._declared = surroundings.entities, surroundings.declared
        self._server_now = surroundings.server_now
        self._changes: dict[str, int] = {}
        """How many changes of an entity were begun, by the subject of its state."""
        self._count = 0
        self._ids = 0
        self._timers = 0
        self._tx: EffectTransaction | None = None
        self.log = logging.LoggerAdapter(
            surroundings.log,
            {
                "handler": self._handler,
                "event_id": decoded.id,
                "event_type": decoded.type,
                "key": self.key,
                "stream": self.stream,
                "sequence": self.sequence,
                "attempt": self.attempt,
                "correlation_id": decoded.correlation_id,
            },
        )
        """A logger that adds the event's ids to its records."""

    @property
    def event_id(self) -> str:
        """The producer's id of the event."""
        return self.decoded.id

    @property
    def correlation_id(self) -> str:
        return self.decoded.correlation_id

    @property
    def traceparent(self) -> str | None:
        """The trace of the event, in W3C form. Events that the handler publishes are part of the same trace."""
        return self.decoded.traceparent

    @property
    def is_redrive(self) -> bool:
        return self.redrives > 0

    def now(self) -> datetime.datetime:
        """The current time, in UTC; tests may set it."""
        return self._clock()

    def new_id(self) -> str:
        """A new id. The n-th call returns the same id whenever the event is handled again."""
        self._ids += 1
        return derived_id(self.decoded.id, f"{self._handler}:id", self._ids)

    def idempotency_key(self, name: str) -> str:
        """A key for an effect outside, the same for each attempt, for services that accept idempotency keys."""
        return derived_id(self.decoded.id, f"{self._handler}:once:{name}", 0)

    async def publish(self, event: object, *, cancels: str | None = None) -> PubAck:
        """Publish an event that this one led to.

        Its id comes from its ``event_id()``, or is derived from this event and the number of the call. So a retry
        publishes no duplicate within the stream's duplicate window, and the same id after it, if ``event_id()`` returns
        the same in each attempt. The event is published now, even if this attempt fails. A handler with
        ``idempotent="transaction"`` should return events instead: they are published after the commit.

        Args:
            cancels: The name of a timer that ends with it, in one step; see :meth:`is_current_timer`.

        Raises:
            InvalidEvent: A field breaks the contract; the event was not published.
            ConfigError: The application does not declare it: write ``@app.register`` above its class.
        """
        encoded = self.encode(event)
        return await (self.send(encoded) if cancels is None else self._send_ending(cancels, encoded))

    async def _send_ending(self, timer: str, encoded: Encoded) -> PubAck:
        return await self.timers.publish_ending(timer, encoded)

    def encode(self, event: object) -> Encoded:
        """The message that :meth:`publish` would send. It counts as a call of ``publish``."""
        self._count += 1
        return self.encode_as(event, derived_id(self.decoded.id, self._handler, self._count))

    async def schedule(
        self,
        event: object,
        *,
        at: datetime.datetime | None = None,
        after: Seconds | None = None,
        name: str | None = None,
    ) -> str:
        """Schedule an event that this one led to; returns the name of its timer.

        A handler that runs again within the stream's duplicate window sets the timer no second time, even if it has
        fired.

        Args:
            at: The time, with a time zone.
            after: Seconds from now by the server's clock, or a ``timedelta``.
            name: The name of the timer, by which it can be cancelled. It replaces a timer of the same name. The default
                is derived from this event and the number of the call.

        Raises:
            ConfigError: The application has no timers (``App(timers=True)``), or the time is not valid.
            InvalidEvent: A field breaks the contract.
        """
        self._timers += 1
        id = derived_id(self.decoded.id, f"{self._handler}:timer", self._timers)

        def encode_one(event: object, time: datetime.datetime | None) -> Encoded:
            return self.encode_as(event, id, time)

        timers = self._timers_of(encode_one)
        await timers.set(name or id, event, at=at, after=after, set_id=id)
        return name or id

    def entities(self, name: str) -> Entities:
        """The entities of one kind: ``async with ctx.entities("orders").change(key) as change``.

        A change is made once, also if the event is handled again: the state remembers the last 16 changes of the
        entity. The first change of an entity in one attempt is identified with the first in the next.

        Raises:
            ConfigError: The application has no such kind.
        """
        if self._entities is None:
            raise ConfigError("ctx.entities: this context has none")
        return self._entities(self, name)

    @property
    def js(self) -> JetStream:
        """The JetStream context, for operations other than events."""
        return self._js

    @property
    def timer(self) -> FiredTimer | None:
        """The timer that published the event, if any."""
        return FiredTimer.of(self.decoded)

    async def is_current_timer(self) -> bool:
        """False if the timer that published the event was set again or ended since it fired; True for other events.

        A timer is ended by ``timers.cancel`` or ``publish(cancels=)``; once these have returned, its event does not
        count, even if it was stored later. The stream's leader is read, so the answer is that at the time of the call.
        A cancel is remembered for a week.

        Not for timers that entities or commands end: there compare the id that ``set_timer`` returned, which is this
        event's, with the one in the state, or look for the event in the boundary (see the page on timers). Workflows
        check by themselves.
        """
        fired = self.timer
        return fired is None or await self.timers.is_current(fired, self.decoded, self.sequence)

    @property
    def timers(self) -> Timers:
        """The timers of the whole application: of its handlers, workflows and clients."""
        return self._timers_of(self._encode_new)

    def _timers_of(self, encode: Callable[..., Encoded]) -> Timers:
        return Timers(
            self._app, self.stream, self._js, encode, self._clock, from_leader=True, server_now=self._server_now
        )

    def _encode(self, event: object, id: str, time: datetime.datetime | None = None) -> Encoded:
        cause = self.decoded
        return encode(
            event,
            id=id,
            source=self._source,
            # The time of the cause, if it has one: a retry must write the same bytes.
            time=time or cause.time or self.now(),
            correlation_id=cause.correlation_id,
            causation_id=cause.id,
            traceparent=cause.traceparent,
        )

    def encode_as(self, event: object, id: str, time: datetime.datetime | None = None) -> Encoded:
        """The message of an event that this one led to; ``id`` is for an event without an id of its own."""
        own = self._declared(event).id_of
        return self._encode(event, (own(event) if own is not None else None) or id, time)

    def change_id(self, subject: str) -> str:
        """The id of the next change of an entity, the same if the event is handled again."""
        count = self._changes[subject] = self._changes.get(subject, 0) + 1
        return derived_id(self.decoded.id, f"{self._handler}:change:{subject}", count)

    def _encode_new(self, event: object, time: datetime.datetime | None = None) -> Encoded:
        return self.encode_as(event, self.new_id(), time)

    async def send(self, encoded: Encoded) -> PubAck:
        """Publish a message of :meth:`encode`."""
        return await self._js.publish(encoded.subject, encoded.data, headers=encoded.headers)

    @overload
    async def once(
        self,
        name: str,
        function: Callable[..., Awaitable[object]],
        *arguments: object,
        result_type: type[R],
        **named: object,
    ) -> R: ...

    @overload
    async def once(
        self, name: str, function: Callable[..., Awaitable[T]], *arguments: object, **named: object
    ) -> T: ...

    async def once(
        self,
        name: str,
        function: Callable[..., Awaitable[object]],
        *arguments: object,
        result_type: object = None,
        **named: object,
    ) -> Any:
        """Call ``function`` once and record its result as JSON; later attempts return the recorded result.

        Every attempt gets the same value, the first one included: of ``result_type``, else of the return annotation of
        ``function``, else of JSON's own types, where a tuple is a list and a datetime a text.

        The effect is claimed, done, and recorded, in this order. It is not repeated while its record exists
        (``remember_s`` of the handler, a week by default). A crash between the effect and its record repeats it, and so
        does a server that is away until the handler's time-out. A repeated effect has the same idempotency key, which
        is passed to a parameter ``idempotency_key`` of the function. If the function raises, the next attempt calls it
        again.

        Args:
            name: The name of the effect, unique in the handler.
            function: An async function. JSON must be able to hold its result, so neither NaN nor infinity, and it must
                fit into a message. A function that is not async is called as well, and blocks the event loop.
            result_type: The type that the recorded result is converted to; not passed to ``function``.

        Raises:
            RetryIn: Another worker has claimed the effect.
            ConfigError: The effect is done, and its result cannot be recorded, or is not of ``result_type``; or it is
                called inside of itself.
        """
        if self._once is None:
            raise ConfigError("ctx.once: this context has no records")
        return await self._once.run(self, name, function, arguments, named, result_type)

    @property
    def tx(self) -> EffectTransaction:
        """Effects on the bucket of a handler with ``idempotent="transaction"``, which happen exactly once."""
        if self._tx is None:
            raise ConfigError('ctx.tx: declare the handler with idempotent="transaction" and bucket=')
        return self._tx


class Dependencies:
    """The objects that the lifespans yielded, found by type."""

    def __init__(self, objects: Sequence[object] = ()) -> None:
        self._objects = list(objects)

    def find(self, wanted: object, handler: str, parameter: str) -> Any:
        """The one object of a type, or of a type's name if the type is not known.

        Raises:
            ConfigError: No object has the type, or several have it.
        """
        if isinstance(wanted, str):
            found = [each for each in self._objects if wanted in (kind.__name__ for kind in type(each).__mro__)]
        else:
            found = [each for each in self._objects if isinstance(wanted, type) and isinstance(each, wanted)]
        if len(found) == 1:
            return found[0]
        what = wanted if isinstance(wanted, str) else getattr(wanted, "__name__", repr(wanted))
        known = ", ".join(type(each).__name__ for each in self._objects) or "nothing"
        raise ConfigError(
            f"handler {handler!r}, parameter {parameter!r}: expected one {what} from the lifespan, found {len(found)}; "
            f"it yielded {known}"
        )


def plan_arguments(
    function: Callable[..., object], handler: str, dependencies: Dependencies
) -> tuple[bool, dict[str, object]]:
    """Look up a handler's arguments; returns True if it takes its context, and the arguments by name.

    The class ``Context`` stands for the context, which is different for each event.

    Raises:
        ConfigError: A parameter has a type of which the lifespan has no object.
    """
    wanted = injected_parameters(function, f"handler {handler!r}")
    named = {
        name: Context if kind is Context else dependencies.find(kind, handler, name) for name, kind in wanted.items()
    }
    return Context in wanted.values(), named


def injected_parameters(function: Callable[..., object], where: str) -> dict[str, object]:
    """The parameters of a handler besides its event: ``Context``, a type, or a type's name if it is not known.

    Raises:
        ConfigError: A parameter has no annotation, or cannot be passed by its name.
    """
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError):
        hints = {}  # types that exist only inside a function: found by their names
    found: dict[str, object] = {}
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        wanted = hints.get(parameter.name, parameter.annotation)
        is_context = wanted is Context or wanted == "Context"
        if not is_context and parameter.default is not inspect.Parameter.empty:
            continue
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            stars = "*" if parameter.kind is inspect.Parameter.VAR_POSITIONAL else "**"
            name = stars + parameter.name
            raise ConfigError(f"{where}: parameter {name!r}: expected one parameter for each object it needs")
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise ConfigError(f"{where}: parameter {parameter.name!r} is positional-only: it is given by its name")
        if wanted is inspect.Parameter.empty:
            raise ConfigError(f"{where}: parameter {parameter.name!r} needs a type annotation")
        found[parameter.name] = Context if is_context else wanted
    return found


@asynccontextmanager
async def open_lifespans(functions: Sequence[Callable[[], AsyncIterator[object]]]) -> AsyncIterator[Dependencies]:
    """Run each lifespan up to its ``yield``; at the end run the rest of each, in reverse order."""
    async with AsyncExitStack() as stack:
        found: list[Any] = []
        for function in functions:
            steps = function()
            try:
                made = await anext(steps)
            except StopAsyncIteration:
                name = getattr(function, "__name__", repr(function))
                raise ConfigError(f"lifespan {name!r}: expected one yield, and it ended without") from None
            stack.push_async_callback(_end_lifespan, steps)
            found += made if isinstance(made, tuple) else [made]
        yield Dependencies(found)


async def _end_lifespan(steps: AsyncIterator[object]) -> None:
    # Resumed without an error: the code after the ``yield`` cleans up, however the application ended.
    try:
        await anext(steps)
    except StopAsyncIteration:
        return
    raise ConfigError("lifespan: expected one yield, and it came to a second one")
