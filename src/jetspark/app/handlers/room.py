"""The room for messages in a worker, divided between its pulls: the stream or its partitions, and their retries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self, TypeAlias

from jetspark.app.handlers.machine import Credit

if TYPE_CHECKING:
    from jetspark.app.handlers.lanes import WorkItem
    from jetspark.app.handlers.machine import HandlerMachine

__all__ = ["Hold", "Room", "Side"]

Side: TypeAlias = Literal["stream", "retries"]

# Retries and redrives may fill one part in this many of a handler's room; the rest is for its stream.
RETRY_SHARE = 8


class Room:
    """The free places of a handler in one process.

    Two pulls never request the same room, so together they keep to the machine's bounds: the room that a pull has
    requested is reserved until its messages are received.
    """

    def __init__(self, machine: HandlerMachine) -> None:
        limits = machine.limits
        self._machine = machine
        kept = Credit(max(1, limits.max_messages // RETRY_SHARE), max(1, limits.max_bytes // RETRY_SHARE))
        self._sizes: dict[Side, Credit] = {
            "retries": kept,
            "stream": Credit(limits.max_messages - kept.messages, limits.max_bytes - kept.bytes),
        }
        self._asked: dict[Side, Credit] = {"stream": Credit(0, 0), "retries": Credit(0, 0)}
        self._of_retries = Credit(0, 0)
        self._retries: set[WorkItem] = set()

    @property
    def of_stream(self) -> int:
        """Number of held messages that came from the stream."""
        return self._machine.held - self._of_retries.messages

    def free(self, side: Side, shares: int) -> Credit:
        """The room that one of ``shares`` pulls may request now."""
        used = self._of_retries
        if side == "stream":
            used = Credit(self._machine.held - used.messages, self._machine.held_bytes - used.bytes)
        size, asked = self._sizes[side], self._asked[side]
        messages, in_bytes = size.messages - used.messages, size.bytes - used.bytes
        # A share of the room that is not held, and no more than is not reserved.
        return Credit(
            min(max(1, messages // shares), messages - asked.messages),
            min(max(1, in_bytes // shares), in_bytes - asked.bytes),
        )

    def taken(self, side: Side, credit: Credit) -> Hold:
        """Reserve room within the ``with`` block."""
        return Hold(self._asked, side, credit)

    def add_retry(self, item: WorkItem) -> None:
        """Count a retry or redrive that the worker holds now."""
        if item not in self._retries:
            self._retries.add(item)
            self._of_retries = Credit(len(self._retries), self._of_retries.bytes + item.size_bytes)

    def drop_retry(self, item: WorkItem) -> None:
        """Count it no more. A second call changes nothing: a batch that is interrupted may release its items twice."""
        if item in self._retries:
            self._retries.remove(item)
            self._of_retries = Credit(len(self._retries), self._of_retries.bytes - item.size_bytes)


class Hold:
    """The room that one pull has reserved."""

    def __init__(self, asked: dict[Side, Credit], side: Side, credit: Credit) -> None:
        self._asked, self._side, self._credit = asked, side, Credit(0, 0)
        self.resize(credit)

    def resize(self, credit: Credit) -> None:
        total, mine = self._asked[self._side], self._credit
        self._asked[self._side] = Credit(
            total.messages - mine.messages + credit.messages, total.bytes - mine.bytes + credit.bytes
        )
        self._credit = credit

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.resize(Credit(0, 0))
