"""Requests that wait for their answers, and names that a connection uses once. Pure; time is an argument.

A connection's inbox has a random prefix (:func:`new_inbox`); the driver supplies the random bits. Every other name of
the connection (of replies, batches, and objects at the server) consists of that inbox and a number that is used once
(:class:`Names`). Each request has a reply subject of its own, ``<inbox>.<token>``. :class:`Collector` ends a request
with many answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from jetspark.core.message import CoreMessage, is_no_responders
from jetspark.core.numbers import seconds_above_0, whole
from jetspark.core.subjects import validate_subject
from jetspark.core.subscription import Done, Event, Failed, SubscriptionState
from jetspark.errors import NoResponders

__all__ = ["Collector", "Names", "Requests", "new_inbox"]

# ---- names -----------------------------------------------------------------------------------------------------------


_MASK = (1 << 64) - 1
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def new_inbox(prefix: str, random_bits: int) -> str:
    """``prefix`` and a token made of 64 of ``random_bits``.

    The token has 11 characters, enough that no two connections draw the same. A longer one would cost bytes in every
    message to be answered, and in every message of an ordered consumer, whose name contains it.
    """
    digits, random_bits = [], random_bits & _MASK
    while random_bits:
        random_bits, digit = divmod(random_bits, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return validate_subject(f"{prefix}.{''.join(digits) or '0'}")


class Names:
    """Names of one connection, each made of its inbox and a number that is used once."""

    def __init__(self, inbox: str) -> None:
        """``inbox`` is a subject prefix no other connection has."""
        self.inbox = inbox
        self._last_token = 0

    def next_token(self) -> int:
        """A number that this connection has not used."""
        self._last_token += 1
        return self._last_token

    def new_inbox(self) -> str:
        """A reply subject that no other subscription uses."""
        return f"{self.inbox}.many.{self.next_token()}"

    def new_name(self) -> str:
        """A name for an object at the server, such as a consumer."""
        return f"{self.inbox.rpartition('.')[2]}-{self.next_token()}"

    def new_batch(self) -> tuple[str, str]:
        """A prefix of reply subjects and a batch id below it."""
        return self.inbox.rpartition(".")[0], self.new_name()


# ---- requests --------------------------------------------------------------------------------------------------------


class Requests:
    """Waiting requests, by the token of the reply subject."""

    def __init__(self, names: Names) -> None:
        self.prefix = f"{names.inbox}."
        self.replies: SubscriptionState | None = None
        """Where all answers arrive; None before the first request, and when we may not subscribe to it."""
        self._waiting: dict[str, tuple[Any, str]] = {}
        """By token: handle, subject."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def filter(self) -> str:
        """The subject of the one subscription for all answers."""
        return f"{self.prefix}*"

    def add(self, token: str, handle: Any, subject: str) -> None:
        self._waiting[token] = (handle, subject)

    def forget(self, token: str) -> None:
        """Drop a request after a timeout or a cancellation; a late answer is ignored."""
        self._waiting.pop(token, None)

    def forget_handle(self, handle: Any) -> None:
        """:meth:`forget` for callers without a token: they were interrupted before they got it."""
        for token in [token for token, (waiting, _) in self._waiting.items() if waiting is handle]:
            del self._waiting[token]

    def take(self, events: list[Event]) -> None:
        """Read the answers that have arrived in ``replies``."""
        assert self.replies is not None
        self.answer(self.replies.arrived, events)
        self.replies.arrived.clear()

    def answer(self, answers: Iterable[CoreMessage], events: list[Event]) -> None:
        """Complete the requests that these messages answer."""
        prefix = self.prefix
        skip = len(prefix)
        for message in answers:
            # The server chooses the subscription of a message; only the whole subject identifies its request.
            waiting = self._waiting.pop(message.subject[skip:], None) if message.subject.startswith(prefix) else None
            if waiting is None:
                continue  # timed out or cancelled before the answer came, or a second answer
            handle, subject = waiting
            if is_no_responders(message):
                events.append(Failed(handle, NoResponders(subject)))
            else:
                events.append(Done(handle, message))

    def fail_all(self, error: Exception, events: list[Event]) -> None:
        events.extend(Failed(handle, error) for handle, _ in self._waiting.values())
        self._waiting.clear()  # after the events: an interrupt before this line repeats them, and loses none

    def fail_subject(self, subject: str, error: Exception, events: list[Event]) -> bool:
        """Fail the requests to a subject that we may not publish to; False if no request waits there."""
        # A scan, not an index by subject: it is done when permissions are wrong, and the index would be kept for every
        # request.
        tokens = [token for token, (_, asked) in self._waiting.items() if asked == subject]
        events.extend(Failed(self._waiting.pop(token)[0], error) for token in tokens)
        return bool(tokens)

    def fail_reply(self, reply: bytes, error: Exception, events: list[Event]) -> bool:
        """Fail the request of an unsent message; False if the reply subject belongs to no request."""
        prefix = self.prefix.encode()
        if not reply.startswith(prefix):
            return False
        waiting = self._waiting.pop(reply[len(prefix) :].decode(), None)
        if waiting is not None:
            events.append(Failed(waiting[0], error))
        return True


# ---- many answers ----------------------------------------------------------------------------------------------------


M = TypeVar("M", bound=CoreMessage)


class Collector:
    """Decides, answer by answer, whether to wait for another one and for how long."""

    def __init__(self, subject: str, *, now: float, timeout_s: float, stall_s: float | None, max_messages: int) -> None:
        max_messages = whole("max_messages", max_messages, low=0)
        self._subject = subject
        self._deadline = now + seconds_above_0("timeout", timeout_s)
        self._stall_s = None if stall_s is None else seconds_above_0("stall", stall_s)
        self._stalls_at: float | None = None
        self._max_messages = max_messages
        self._received = 0

    def wait_s(self, now: float) -> float:
        """How long the next answer may take; 0 or less when no more is wanted."""
        if self._max_messages and self._received >= self._max_messages:
            return 0.0
        deadline = self._deadline if self._stalls_at is None else min(self._deadline, self._stalls_at)
        return deadline - now

    def accept(self, message: M, *, now: float, stop: Callable[[M], bool] | None) -> bool:
        """True if this message is an answer; False if it is the end marker.

        Raises:
            NoResponders: The subject has no subscriber.
        """
        if is_no_responders(message):
            raise NoResponders(self._subject)
        if stop is not None and stop(message):
            return False
        self._received += 1
        if self._stall_s is not None:
            self._stalls_at = now + self._stall_s
        return True
