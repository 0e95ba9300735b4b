"""Waiting calls on a transport that several modules share: requests, room in the buffer, confirmations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

from jetspark.aio.message import Message
from jetspark.aio.transport import Transport
from jetspark.aio.waiter import Waiter
from jetspark.core.headers import HeadersLike
from jetspark.core.subscription import SubscriptionState
from jetspark.core.transport import WRITE_AT_BYTES, forget
from jetspark.errors import BufferFull, JetSparkError, RequestTimeout

__all__ = ["admit", "ask", "drain", "drain_all", "until_done", "when_there_is_room"]


# ---- sending ---------------------------------------------------------------------------------------------------------


async def when_there_is_room(transport: Transport, attempt: Callable[[], Any], deadline: float | None = None) -> Any:
    """Repeat ``attempt`` until it does not raise ``BufferFull``, and return its result.

    Raises:
        TimeoutError: There was no room until the deadline.
    """
    while True:
        transport.flush()
        try:
            return attempt()
        except BufferFull:
            if transport.connection.options.when_full == "raise" or not transport.may_wait():
                raise
        await transport.wait_for_room(deadline)


async def admit(transport: Transport, send: Callable[[], None], timeout_s: float, *, at_once: bool = False) -> None:
    """Call ``send``, which fills the connection's buffer, once there is room; then flush soon, or ``at_once``.

    Raises:
        TimeoutError: There was no room within ``timeout_s``: nothing was sent.
    """
    # In threads: with transport.lock:
    if transport.connection.out_bytes >= WRITE_AT_BYTES:
        await transport.write_and_wait(transport.deadline(timeout_s))
    try:
        send()
    except BufferFull:
        await when_there_is_room(transport, send, transport.deadline(timeout_s))
    if at_once:
        transport.flush()
    elif not transport.flush_is_scheduled:
        transport.flush_soon()


# ---- asking ----------------------------------------------------------------------------------------------------------


async def ask(
    transport: Transport, subject: str, data: bytes, headers: HeadersLike | None, timeout_s: float
) -> Message:
    """Send a request and wait for its first reply; see :meth:`Client.request`."""
    transport.check_may_wait("request")
    connection, what = transport.connection, f"request to {subject!r}"
    deadline = transport.deadline(timeout_s)
    answer, token = transport.new_waiter(), ""
    try:
        with transport.lock:
            try:
                token = connection.request(answer, subject, data, headers)
            except BufferFull:
                attempt = partial(connection.request, answer, subject, data, headers)
                try:
                    token = await when_there_is_room(transport, attempt, deadline)
                except TimeoutError:
                    raise RequestTimeout(what, timeout_s, was_sent=False) from None
            transport.flush_promptly()
        return cast(
            Message, await transport.wait_for(answer, timeout_s, what, deadline)
        )  # the reply removed the request
    except BaseException:
        try:
            forget(transport, token, answer)
        finally:  # repeated, because an interrupt can prevent the first call
            forget(transport, token, answer)
        raise


async def until_done(transport: Transport, start: Callable[[Waiter], None], timeout_s: float, what: str) -> None:
    """Start an operation of the connection and wait until it is done; ``start`` receives the handle to resolve.

    Raises:
        RequestTimeout: The operation was not done within ``timeout_s``.
    """
    transport.check_may_wait(what)
    done = transport.new_waiter()
    try:
        with transport.lock, transport.doubt:
            start(done)
            transport.flush()
        transport.deliver_events()
        await transport.wait_for(done, timeout_s, what)
    finally:
        with transport.lock:
            transport.connection.forget_flush(done)


# ---- subscriptions ---------------------------------------------------------------------------------------------------


async def drain(transport: Transport, subscription: SubscriptionState, timeout_s: float) -> None:
    """Unsubscribe; returns when all messages that the server had sent have arrived.

    Raises:
        RequestTimeout: They have not arrived within ``timeout_s``.
    """
    what = f"drain of {subscription.subject!r}"
    await until_done(transport, partial(transport.connection.drain, subscription), timeout_s, what)


async def drain_all(transport: Transport, subscriptions: list[SubscriptionState], timeout_s: float) -> bool:
    """:func:`drain` for many subscriptions, in one round trip; False if one was not drained in time."""
    if subscriptions:
        transport.check_may_wait("drain")
    deadline, is_done = transport.deadline(timeout_s), True
    handles = [transport.new_waiter() for _ in subscriptions]
    try:
        with transport.lock, transport.doubt:
            for subscription, handle in zip(subscriptions, handles, strict=True):
                transport.connection.drain(subscription, handle)
            transport.flush()
        transport.deliver_events()
        for handle in handles:
            try:
                await transport.wait_for(handle, timeout_s, "drain", deadline)
            except RequestTimeout:
                is_done = False
            except JetSparkError:
                pass  # another caller closed the connection: no more messages will arrive
    finally:
        with transport.lock:
            for handle in handles:
                transport.connection.forget_flush(handle)
    return is_done
