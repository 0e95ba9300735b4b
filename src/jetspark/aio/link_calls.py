"""Waiting calls on a link that several modules share: requests, room in the buffer, confirmations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from jetspark.aio.message import Message
from jetspark.aio.transport import Link
from jetspark.aio.waiter import Waiter
from jetspark.core.headers import HeadersLike
from jetspark.core.link import WRITE_AT_BYTES, forget
from jetspark.core.subscription import SubscriptionState
from jetspark.errors import BufferFull, JetSparkError, RequestTimeout

__all__ = ["admit", "ask", "drain", "drain_all", "until_done", "when_there_is_room"]


# ---- sending ---------------------------------------------------------------------------------------------------------


async def when_there_is_room(link: Link, attempt: Callable[[], Any], deadline: float | None = None) -> Any:
    """Repeat ``attempt`` until it does not raise ``BufferFull``, and return its result.

    Raises:
        TimeoutError: There was no room until the deadline.
    """
    while True:
        link.flush()
        try:
            return attempt()
        except BufferFull:
            if link.connection.options.when_full == "raise" or not link.may_wait():
                raise
        await link.wait_for_room(deadline)


async def admit(link: Link, send: Callable[[], None], timeout_s: float, *, at_once: bool = False) -> None:
    """Call ``send``, which fills the connection's buffer, once there is room; then flush soon, or ``at_once``.

    Raises:
        TimeoutError: There was no room within ``timeout_s``: nothing was sent.
    """
    # In threads: with link.lock:
    if link.connection.out_bytes >= WRITE_AT_BYTES:
        await link.write_and_wait(link.deadline(timeout_s))
    try:
        send()
    except BufferFull:
        await when_there_is_room(link, send, link.deadline(timeout_s))
    if at_once:
        link.flush()
    elif not link.flush_is_scheduled:
        link.flush_soon()


# ---- asking ----------------------------------------------------------------------------------------------------------


async def ask(link: Link, subject: str, data: bytes, headers: HeadersLike | None, timeout_s: float) -> Message:
    """Send a request and wait for its first reply; see :meth:`Client.request`."""
    link.check_may_wait("request")
    connection, what = link.connection, f"request to {subject!r}"
    deadline = link.deadline(timeout_s)
    answer, token = link.new_waiter(), ""
    try:
        with link.lock:
            try:
                token = connection.request(answer, subject, data, headers)
            except BufferFull:
                attempt = partial(connection.request, answer, subject, data, headers)
                try:
                    token = await when_there_is_room(link, attempt, deadline)
                except TimeoutError:
                    raise RequestTimeout(what, timeout_s, was_sent=False) from None
            link.flush_promptly()
        return cast(Message, await link.wait_for(answer, timeout_s, what, deadline))  # the reply removed the request
    except BaseException:
        try:
            forget(link, token, answer)
        finally:  # repeated, because an interrupt can prevent the first call
            forget(link, token, answer)
        raise


async def until_done(link: Link, start: Callable[[Waiter], None], timeout_s: float, what: str) -> None:
    """Start an operation of the connection and wait until it is done; ``start`` receives the handle to resolve.

    Raises:
        RequestTimeout: The operation was not done within ``timeout_s``.
    """
    link.check_may_wait(what)
    done = link.new_waiter()
    try:
        with link.lock, link.doubt:
            start(done)
            link.flush()
        link.deliver_events()
        await link.wait_for(done, timeout_s, what)
    finally:
        with link.lock:
            link.connection.forget_flush(done)


# ---- subscriptions ---------------------------------------------------------------------------------------------------


async def drain(link: Link, subscription: SubscriptionState, timeout_s: float) -> None:
    """Unsubscribe; returns when all messages that the server had sent have arrived.

    Raises:
        RequestTimeout: They have not arrived within ``timeout_s``.
    """
    what = f"drain of {subscription.subject!r}"
    await until_done(link, partial(link.connection.drain, subscription), timeout_s, what)


async def drain_all(link: Link, subscriptions: list[SubscriptionState], timeout_s: float) -> bool:
    """:func:`drain` for many subscriptions, in one round trip; False if one was not drained in time."""
    if subscriptions:
        link.check_may_wait("drain")
    deadline, is_done = link.deadline(timeout_s), True
    handles = [link.new_waiter() for _ in subscriptions]
    try:
        with link.lock, link.doubt:
            for subscription, handle in zip(subscriptions, handles, strict=True):
                link.connection.drain(subscription, handle)
            link.flush()
        link.deliver_events()
        for handle in handles:
            try:
                await link.wait_for(handle, timeout_s, "drain", deadline)
            except RequestTimeout:
                is_done = False
            except JetSparkError:
                pass  # another caller closed the connection: no more messages will arrive
    finally:
        with link.lock:
            for handle in handles:
                link.connection.forget_flush(handle)
    return is_done
