"""Calling a handler in a replay: with its effects, or with all of them held back and counted.

Effects through the handler's context can be held back:

* an event that is published, scheduled or returned is encoded, so its contract is checked, and counted; it is not
  published;
* ``ctx.once`` returns a recorded result. Without a record the function is not called, and the handler ends there: its
  result is unknown, and so is the rest of the handler;
* a transaction reads its bucket as it is now, and its writes are counted. Questions about timers are answered as of
now;
* at ``ctx.entities``, at the cancellation of a timer, and at any part of ``ctx.js`` but ``publish``, the handler ends.

Other effects, through an object of the lifespan for instance, cannot be held back: the handler has to check
``ctx.is_replay``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, NoReturn, cast

from jetspark.aio.context import context_of
from jetspark.app.handlers.context import Context
from jetspark.app.handlers.invocation import HandlerCalls, returned_events
from jetspark.app.handlers.once import EffectTransaction, OnceRecords, as_returned, once_key
from jetspark.app.timers import is_cancel
from jetspark.errors import KeyNotFound
from jetspark.jetstream.info import PubAck

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.aio.kv import KeyValue
    from jetspark.app.contracts.envelope import Decoded
    from jetspark.app.handlers.lanes import WorkItem

__all__ = ["EffectHeldBack", "EffectReplayCalls", "HeldBack", "HeldBackCalls"]


class EffectHeldBack(BaseException):
    """An effect whose result is not known was not carried out. No ``except Exception`` of a handler catches it."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class HeldBack:
    """The effects that one call of a handler did not carry out."""

    def __init__(self) -> None:
        self.published: Counter[str] = Counter()
        """Events, by type."""
        self.effects: Counter[str] = Counter()
        """Effects of ``ctx.once`` that are not recorded, by name."""
        self.recorded: Counter[str] = Counter()
        """Effects of ``ctx.once`` whose recorded result was returned."""
        self.writes = 0
        """Keys that transactions would have written."""

    def end_at(self, name: str) -> NoReturn:
        """End the handler at an effect whose result is unknown."""
        self.effects[name] += 1
        raise EffectHeldBack(name)


class EffectReplayCalls(HandlerCalls):
    """Calls with all effects, except effects that are recorded as done."""

    is_replay = True


class HeldBackCalls(HandlerCalls):
    """Calls without effects."""

    is_replay = True

    def __init__(self, *arguments: Any, records: KeyValue, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._records = records
        self.held_back: dict[int, HeldBack] = {}
        """Keyed by the sequence of the event."""

    def _context(self, item: WorkItem, decoded: Decoded) -> Context:
        held_back = self.held_back.setdefault(item.sequence, HeldBack())
        context = super()._context(item, decoded)
        context._js = cast("JetStream", _HeldBackPublisher(self._js, self._app.stream, held_back))
        context._entities = lambda _, name: held_back.end_at(f"entities of {name}")
        context._once = _RecordedOnly(self._records, self._spec.name, held_back)
        return context

    async def _call_in_transaction(self, item: WorkItem, decoded: Decoded) -> None:
        if self._effects is None:
            assert self._spec.bucket is not None
            self._effects = await self._js.kv(self._spec.bucket)
        context = self._context(item, decoded)
        transaction = context._tx = EffectTransaction(
            self._effects, self._spec.name, decoded.id, remember_s=self._spec.remember_s
        )
        try:
            result = await self._function(decoded.event, **self._named(context))
        finally:
            transaction.end()
        for encoded in [context.encode(event) for event in returned_events(result)]:
            await context.send(encoded)
        self.held_back[item.sequence].writes += transaction.write_count


class _HeldBackPublisher:
    """Takes the place of a ``JetStream`` in a context: counts publishes, and ends the handler at other calls."""

    def __init__(self, js: JetStream, stream: str, held_back: HeldBack) -> None:
        self._context = context_of(js)
        self._stream, self._held_back = stream, held_back

    async def publish(self, subject: str, data: bytes = b"", **options: Any) -> PubAck:
        if _ends_timer(subject, data):
            if is_cancel(options.get("headers")):
                self._held_back.end_at("timers")  # the message itself ends the timer
        else:
            self._held_back.published[_type_of(subject, data)] += 1
        return PubAck(stream=self._stream, sequence=0)

    async def stream(self, name: str) -> None:
        """Used by ``ctx.timers`` to list timers."""
        self._held_back.end_at("timers" if name == self._stream else "ctx.js.stream")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._held_back.end_at(f"ctx.js.{name}")


def _ends_timer(subject: str, data: bytes) -> bool:
    """True for a message that ends a timer. The event in the same batch is counted."""
    return not data and subject.startswith("timers.")


def _type_of(subject: str, data: bytes) -> str:
    """The type of an event; for other messages their subject."""
    try:
        return str(json.loads(data)["type"])
    except (ValueError, TypeError, KeyError):
        return subject


async def _no_claims() -> NoReturn:
    """The server's time for claims. A replay claims no effect."""
    raise AssertionError


class _RecordedOnly(OnceRecords):
    """Returns recorded results, and calls no function."""

    def __init__(self, records: KeyValue, handler: str, held_back: HeldBack) -> None:
        super().__init__(records, handler, _no_claims, lease_s=1.0, remember_s=1.0)
        self._held_back = held_back

    async def run(
        self,
        context: Context,
        name: str,
        function: Callable[..., Awaitable[Any]],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        result_type: Any = None,
    ) -> Any:
        try:
            record = json.loads((await self._records.get(once_key(self._handler, context.event_id, name))).value)
        except KeyNotFound:
            record = {}
        if record.get("state") == "done":
            self._held_back.recorded[name] += 1
            return as_returned(name, record["result"], function, result_type)
        self._held_back.end_at(name)
