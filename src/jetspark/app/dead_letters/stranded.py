"""Keys that wait for a letter which is gone.

A key is parked until the letter of its first failed event is handled or discarded. Where somebody purges or deletes the
dead-letter stream, or its limits drop letters, nobody can do that any more: the key would wait for ever, and its later
events with it, each a letter behind one that is not there. A redrive looks for such keys, and lets them go on.

That a letter is not there does not tell that it is gone: a worker parks the key first, and writes the letter, or the
schedule of a retry, after that. It acknowledges the event last. So the consumers are asked first: an event that is
acknowledged had a letter or a schedule before that, and what is not found *afterwards* is gone.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

from jetspark.app.dead_letters.store import HandlerStore
from jetspark.app.handlers.settling import advance
from jetspark.app.topology.names import retry_stream
from jetspark.core.subjects import matches
from jetspark.errors import MessageNotFound
from jetspark.jetstream.info import ConsumerInfo, StoredMessage

if TYPE_CHECKING:
    from jetspark.aio.jetstream import JetStream
    from jetspark.app.application import HandlerSpec
    from jetspark.app.declarations import Declarations

__all__ = ["StrandedKeys"]


class StrandedKeys:
    """Those of one handler, as they are now."""

    def __init__(self, app: Declarations, spec: HandlerSpec, store: HandlerStore) -> None:
        self._app, self._spec, self._store = app, spec, store
        self._events: list[ConsumerInfo] = []
        self._retries: list[ConsumerInfo] = []
        self._last_sequence = 0

    @classmethod
    async def look(cls, js: JetStream, app: Declarations, spec: HandlerSpec) -> StrandedKeys:
        """Ask how far the handler has come; nothing that is parked after this is found to be stranded."""
        found = cls(app, spec, await HandlerStore.open(js, app.name, spec.name))
        for place in app.consumers_of(spec):
            stream = await js.stream(place.stream)
            infos = found._retries if place.stream == retry_stream(app.name) else found._events
            infos.append(await (await stream.consumer(place.name)).info())
        found._last_sequence = (await (await js.stream(app.stream)).info()).state.last_sequence
        return found

    async def keys(self) -> AsyncGenerator[tuple[str, int], None]:
        """Each key, and the sequence of the event that it waits for in vain."""
        records = self._store.records.watch(f"parked.{self._spec.name}.>", initial_marker=True)
        async with aclosing(cast("AsyncGenerator[Any, None]", records)) as entries:
            async for entry in entries:
                if entry is None:
                    return
                if entry.operation == "put":
                    fields = json.loads(entry.value)
                    if await self._is_stranded(fields["key"], fields["head"]):
                        yield fields["key"], fields["head"]

    async def free(self, key: str, head: int) -> None:
        """Have a key go on as if the event that it waits for were done."""
        await self._store.run(advance(key, head))

    async def _is_stranded(self, key: str, head: int) -> bool:
        if self._may_be_delivered(head):
            return False
        async for stored in self._store.all_letters(key=key):
            if stored.letter.origin.sequence == head:
                return False
        return not await self._is_in_retries(head)

    def _may_be_delivered(self, head: int) -> bool:
        """Whether the event may still be on its way from the stream. It was delivered before, since its key waits."""
        if self._spec.partitions is not None:
            # Copies have sequences of their own, so all that can be told is whether anything is on its way at all.
            return any(info.ack_pending for info in self._events)
        # A stream that was made anew has not come so far yet; what comes will be another event.
        return head <= self._last_sequence and any(_has_before_it(info, head) for info in self._events)

    async def _is_in_retries(self, head: int) -> bool:
        """Whether its retry is scheduled or due, or a request to handle it again is there."""
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
        """Whether a message of the retry stream is a schedule, or one that its consumer has still to settle."""
        readers = [
            info
            for info in self._retries
            if any(matches(each, message.subject) for each in info.config.filter_subjects or ())
        ]
        return not readers or any(_has_before_it(info, message.sequence) for info in readers)


def _has_before_it(consumer: ConsumerInfo, sequence: int) -> bool:
    """Whether a consumer has a message still to deliver, or to hear of."""
    if consumer.delivered.stream_sequence < sequence:
        return True
    return consumer.ack_pending > 0 and consumer.ack_floor.stream_sequence < sequence
