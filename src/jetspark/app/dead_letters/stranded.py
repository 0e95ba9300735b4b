"""Keys that cannot continue because dead letters or records were removed by hand. A redrive repairs them.

A key is parked until the dead letter of its first failed event is handled or discarded. Two things can be gone:

* *stranded*: the dead-letter stream was purged or deleted, or its limits dropped the dead letter. The key would wait
  permanently, and its later events with it, each a dead letter behind one that is not there;
* *unrecorded*: the record that says that the key is parked was purged, and no worker requests the dead letters behind.

A missing dead letter alone does not tell that it is gone: a worker parks the key first, and writes the dead letter, or
the schedule of a retry, after that. It acknowledges the event last. So the consumers are asked first: an event that is
acknowledged had a dead letter or a schedule before that, and what is not found *afterwards* is gone.

The parked records are read once, and compared with the dead letters as a redrive lists them. Only keys that do not
match are looked up one by one, so their cost does not grow with the number of keys that are in order.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar, cast

from jetspark.app.dead_letters.listing import DeadLetterFilter
from jetspark.app.dead_letters.retries import each_retry
from jetspark.app.handlers.consumers import consumers_of
from jetspark.app.handlers.handler_steps import ReadParked
from jetspark.app.handlers.handler_store import HandlerStore
from jetspark.app.handlers.procedures import advance, restore
from jetspark.app.stored_events import StoredEvent
from jetspark.app.topology.names import retry_stream
from jetspark.core.subjects import matches
from jetspark.errors import ConsumerNotFound, MessageNotFound, StreamNotFound
from jetspark.jetstream.info import ConsumerInfo, StoredMessage

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.app.handlers.handler_spec import HandlerSpec
    from jetspark.app.spec import AppSpec

__all__ = ["KeyRepairs", "side_by_side"]

T = TypeVar("T")
R = TypeVar("R")

# Keys that are looked up or repaired at a time: a few requests each.
AT_ONCE = 32


class KeyRepairs:
    """The parked keys of one handler, and those whose records do not match their dead letters."""

    def __init__(self, js: JetStream, app: AppSpec, spec: HandlerSpec, store: HandlerStore) -> None:
        self._js, self._app, self._spec, self._store = js, app, spec, store
        self._events: list[ConsumerInfo] | None = []
        """None if a consumer is missing: the handler has never run, or will start again from the first event."""
        self._retries: list[ConsumerInfo] = []
        self._last_sequence = 0
        self._heads: dict[str, int] = {}
        """Parked keys, and the events they wait for."""
        self._found: set[str] = set()
        """Parked keys whose event has a dead letter."""
        self._behind: set[str] = set()
        """Keys with dead letters behind another, and no record."""

    @classmethod
    async def look(cls, js: JetStream, app: AppSpec, spec: HandlerSpec, chosen: DeadLetterFilter) -> KeyRepairs:
        """Read how far the handler is, and its parked keys; dead letters must be listed after this."""
        found = cls(js, app, spec, await HandlerStore.open(js, app.name, spec.name))
        try:
            await found._look()
        except (StreamNotFound, ConsumerNotFound):
            found._events = None
        await found._read_heads(chosen)
        return found

    async def _look(self) -> None:
        assert self._events is not None
        for place in consumers_of(self._app, self._spec):
            stream = await self._js.stream(place.stream)
            infos = self._retries if place.stream == retry_stream(self._app.name) else self._events
            infos.append(await (await stream.consumer(place.name)).info())
        self._last_sequence = (await (await self._js.stream(self._app.stream)).info()).state.last_sequence

    async def _read_heads(self, chosen: DeadLetterFilter) -> None:
        keys = [self._store.parked_key(value) for name, value in chosen.where if name == "key"]
        watch = self._store.records.watch(keys[0] if keys else f"parked.{self._spec.name}.>", initial_marker=True)
        async with aclosing(cast("AsyncGenerator[Any, None]", watch)) as entries:
            async for entry in entries:
                if entry is None:
                    return
                if entry.operation == "put":
                    fields = json.loads(entry.value)
                    self._heads[fields["key"]] = fields["head"]

    def add(self, dead_letter: StoredEvent) -> None:
        """A dead letter of the handler was listed."""
        key = dead_letter.key
        if key is None:
            return
        head = self._heads.get(key)
        if head == dead_letter.origin.sequence:
            self._found.add(key)
        elif head is None and dead_letter.status == "behind":
            self._behind.add(key)

    async def free_stranded(self, chosen: DeadLetterFilter, *, is_dry_run: bool) -> list[str]:
        """Let keys continue whose dead letters are gone, as if the event they wait for were done; returns them."""
        if self._events is None:
            return []
        left = [
            key
            for key, head in self._heads.items()
            if key not in self._found and chosen.accepts_key(key) and not self._may_be_delivered(head)
        ]
        if not left:
            return []
        scheduled = {
            retry.event.origin.sequence
            async for retry in each_retry(self._js, self._app.name, DeadLetterFilter(handler=self._spec.name))
        }
        left = [key for key in left if self._heads[key] not in scheduled]
        stranded = [
            key for key, is_one in zip(left, await side_by_side(self._is_stranded, left), strict=True) if is_one
        ]
        if not is_dry_run:
            await side_by_side(lambda key: self._store.run_key_steps(advance(key, self._heads[key])), stranded)
        return stranded

    async def restore_unrecorded(self, chosen: DeadLetterFilter, *, is_dry_run: bool) -> list[str]:
        """Park keys again that have dead letters behind another and no record; returns them."""
        keys = sorted(key for key in self._behind if chosen.accepts_key(key))
        ask = self._has_no_record if is_dry_run else self._restore
        return [key for key, is_one in zip(keys, await side_by_side(ask, keys), strict=True) if is_one]

    async def _restore(self, key: str) -> bool:
        return await self._store.run_key_steps(restore(key))

    async def _has_no_record(self, key: str) -> bool:
        return await self._store.perform(ReadParked(key)) is None

    async def _is_stranded(self, key: str) -> bool:
        head = self._heads[key]
        async for _ in self._store.all_dead_letters(key=key, sequence=head):
            return False
        return not await self._is_in_retries(head)

    def _may_be_delivered(self, head: int) -> bool:
        """True if the server may redeliver the event. It was delivered before, since its key waits."""
        assert self._events is not None
        if self._spec.partitions is not None:
            # Copies have sequences of their own, so only the fact that some event is pending is known.
            return any(info.ack_pending for info in self._events)
        # A re-created stream may have fewer events so far, and its later ones are not this event.
        return head <= self._last_sequence and any(_has_before_it(info, head) for info in self._events)

    async def _is_in_retries(self, head: int) -> bool:
        """True if its retry is scheduled or due, or its redrive is requested."""
        name, origin = f"retry.{self._app.name}.{self._spec.name}", f"{self._app.stream}.{head}.*"
        for subject in (f"{name}.*.{origin}", f"{name}.*.*.{origin}"):
            try:
                last = await self._store.retries.get_message(last_for=subject, direct=False)
            except MessageNotFound:
                continue
            if self._is_waiting(last):
                return True
        return False

    def _is_waiting(self, message: StoredMessage) -> bool:
        """True if a message of the retry stream is a schedule, or is not acknowledged by its consumer."""
        readers = [
            info
            for info in self._retries
            if any(matches(each, message.subject) for each in info.config.filter_subjects or ())
        ]
        return not readers or any(_has_before_it(info, message.sequence) for info in readers)


async def side_by_side(work: Callable[[T], Coroutine[object, None, R]], items: Iterable[T]) -> list[R]:
    """Do the same for many items, a bounded number at a time; returns the results in order."""
    left, results = list(items), list[R]()
    for start in range(0, len(left), AT_ONCE):
        results += await asyncio.gather(*map(work, left[start : start + AT_ONCE]))
    return results


def _has_before_it(consumer: ConsumerInfo, sequence: int) -> bool:
    """True if a consumer has not delivered a message, or awaits an acknowledgement of one up to it."""
    if consumer.delivered.stream_sequence < sequence:
        return True
    return consumer.ack_pending > 0 and consumer.ack_floor.stream_sequence < sequence
