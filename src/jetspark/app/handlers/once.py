"""Effects that happen once: recorded calls for the world outside, and transactions for key-value state.

====================  =========================  =================================================================
``ctx.once``          any async function         once its result is recorded it is never called again. A crash after
                                                 the effect and before the record repeats it, with the same
                                                 idempotency key; so does a server that is away until the handler's
                                                 time-out.
``ctx.tx``            keys of one bucket         exactly once: effects and the completion record of the event are one
                                                 atomic batch. The record has the events that the handler returned:
                                                 they are published after the commit, by the next attempt if this one
                                                 dies.
====================  =========================  =================================================================
"""

from __future__ import annotations

import asyncio
import datetime
import inspect
import json
import os
import secrets
import socket
import typing
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakValueDictionary

import msgspec

from jetspark.aio.kv import KeyValue
from jetspark.app.contracts.envelope import Encoded
from jetspark.app.contracts.faults import error_text
from jetspark.app.finite_json import check_finite
from jetspark.app.handlers.retry import RetryIn
from jetspark.app.patience import UNLIMITED_S, patiently
from jetspark.app.topology.names import escape_token
from jetspark.core.arguments import text
from jetspark.core.backoff import Backoff
from jetspark.errors import ConfigError, Conflict, JetSparkError, KeyExists, KeyNotFound, PayloadTooLarge, UsageError

if TYPE_CHECKING:
    from jetspark.app.handlers.context import Context

__all__ = ["EffectTransaction", "OnceRecords", "as_returned", "call_effect", "once_key"]

T = TypeVar("T")

# A record that the server does not confirm is written again after these waits, until the handler's time-out.
RECORD_PAUSE = Backoff(first_s=0.1, max_s=2.0)

_under_way: ContextVar[frozenset[str]] = ContextVar("_under_way", default=frozenset())
"""Keys of the effects that this call is part of, also in tasks that an effect has started."""


def once_key(handler: str, event_id: str, name: str) -> str:
    """The key of an effect's record."""
    return f"once.{handler}.{escape_token(event_id)}.{escape_token(name)}"


class OnceRecords:
    """The recorded effects of one handler.

    Args:
        lease_s: How long a claim excludes other workers; a living worker is cancelled by its time-out before that.
        remember_s: Lifetime of a record. If an event is handled again after that time, its effects are repeated.
    """

    def __init__(
        self,
        records: KeyValue,
        handler: str,
        server_now: Callable[[], Awaitable[datetime.datetime]],
        *,
        lease_s: float,
        remember_s: float,
    ) -> None:
        self._records, self._handler, self._lease_s, self._ttl_s = records, handler, lease_s, remember_s
        self._server_now = server_now
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"

    async def run(
        self,
        context: Context,
        name: str,
        function: Callable[..., Awaitable[object]],
        arguments: tuple[object, ...],
        named: dict[str, object],
        result_type: object = None,
    ) -> Any:
        key = once_key(self._handler, context.event_id, text("once: name", name))
        # Calls wait for each other: a claim of this process excludes neither a second call of the same attempt nor a
        # call that an earlier attempt left running. The second call finds the result of the first.
        lock = self._locks.setdefault(key, asyncio.Lock())
        if lock.locked() and key in _under_way.get():
            raise ConfigError(
                f"once({name!r}) inside of the effect {name!r}: it would wait for itself; expected another name"
            )
        async with lock:
            outer = _under_way.set(_under_way.get() | {key})
            try:
                result = await self._run(key, context, name, function, arguments, named)
            finally:
                _under_way.reset(outer)
        return as_returned(name, result, function, result_type)

    async def _run(
        self,
        key: str,
        context: Context,
        name: str,
        function: Callable[..., Awaitable[object]],
        arguments: tuple[object, ...],
        named: dict[str, object],
    ) -> Any:
        """The result as it is recorded, so that all attempts get the same value."""
        claimed = await self._claim(key)
        if isinstance(claimed, _Recorded):
            return claimed.result
        if "idempotency_key" not in named and _takes(function, "idempotency_key"):
            named = {**named, "idempotency_key": context.idempotency_key(name)}
        try:
            value = await call_effect(function, arguments, named)
        except BaseException:
            # Free the claim, so that the next attempt need not wait for the lease; if this fails, it waits. The error
            # of the effect is raised in any case and decides whether there is a next attempt. Most often it is a
            # cancellation by the time-out: then the effect may be done or not, as after the lease.
            with suppress(JetSparkError):
                await self._records.update(key, b'{"state":"free"}', revision=claimed, ttl=self._ttl_s)
            raise
        # From here on the effect is done and must not be repeated, even if its result cannot be recorded.
        try:
            result = msgspec.json.encode(value)
            check_finite("the result", value, result)
            recorded = json.loads(result, object_pairs_hook=_with_each_name_once)
        except Exception as error:
            raise await self._unusable(key, claimed, name, value, f"nothing that JSON can hold: {error}") from error
        record = b'{"state":"done","result":' + result + b"}"
        try:
            await self._record(key, record, claimed)
        except PayloadTooLarge as error:
            why = f"more than the server stores at a time: {error}"
            raise await self._unusable(key, claimed, name, value, why) from error
        return recorded

    async def _unusable(self, key: str, revision: int, name: str, value: object, why: str) -> ConfigError:
        """Record that the effect is done and has no result that can be recorded; returns the error of each attempt."""
        reason = (
            f"once({name!r}): its result of type {type(value).__name__} is {why}. The effect is done and not repeated; "
            "to have it done again, give the effect another name"
        )
        await self._record(key, json.dumps({"state": "unusable", "reason": reason}).encode(), revision)
        return ConfigError(reason)

    async def _record(self, key: str, record: bytes, revision: int) -> None:
        """Write the record of an effect that is done, with retries: without the record the effect would be repeated."""
        attempts = 0

        async def write() -> None:
            nonlocal attempts
            attempts += 1
            try:
                await self._records.update(key, record, revision=revision, ttl=self._ttl_s)
            except Conflict:
                # After a failure the stored record may be this one, and only the answer was lost. If not, another
                # worker has claimed the effect.
                if attempts == 1 or (await self._records.get(key)).value != record:
                    raise

        await patiently(write, patience_s=UNLIMITED_S, pause=RECORD_PAUSE)

    async def _claim(self, key: str) -> int | _Recorded:
        """Claim the effect; returns the revision of the claim, or the recorded result.

        Raises:
            RetryIn: Another worker has claimed it.
            ConfigError: The effect is done, and its result could not be recorded.
        """
        while True:
            now = (await self._server_now()).timestamp()  # claims of different workers are compared
            claim = msgspec.json.encode({"state": "claimed", "owner": self._owner, "until": now + self._lease_s})
            try:
                return await self._records.create(key, claim, ttl=self._ttl_s)
            except KeyExists:
                pass
            try:
                entry = await self._records.get(key)
                record = json.loads(entry.value)
                if record["state"] == "done":
                    return _Recorded(record["result"])
                if record["state"] == "unusable":
                    raise ConfigError(record["reason"])
                # This worker's own claim is of a cancelled attempt, since a worker runs an event once at a time.
                if record["state"] == "claimed" and record["owner"] != self._owner and record["until"] > now:
                    raise RetryIn(record["until"] - now, f"another worker has claimed {key!r}")
                return await self._records.update(key, claim, revision=entry.revision, ttl=self._ttl_s)
            except (KeyNotFound, Conflict):
                continue  # another worker changed the record in between


class _Recorded:
    def __init__(self, result: object) -> None:
        self.result = result


async def call_effect(
    function: Callable[..., Awaitable[T]], arguments: tuple[object, ...], named: dict[str, object]
) -> T:
    """Call an effect; returns its result.

    A function that is not async has had its effect by the call. To refuse its result would repeat the effect.
    """
    result = function(*arguments, **named)
    return await result if inspect.isawaitable(result) else cast("T", result)


class _Completion(msgspec.Struct, omit_defaults=True):
    """The completion record of an event: its effects are committed, with these events; or it was given up."""

    events: list[Encoded] = []
    is_given_up: bool = False


class EffectTransaction:
    """Reads and writes of one bucket that are committed together with the event's completion record, or not at all.

    If a key that was read has changed at the commit, the handler is run again. Completion records are the keys
    ``_done.<handler>.<event id>`` of the same bucket, and expire after ``remember_s``.
    """

    def __init__(self, bucket: KeyValue, handler: str, event_id: str, *, remember_s: float) -> None:
        self._bucket, self._ttl_s = bucket, remember_s
        self._done_key = f"_done.{handler}.{escape_token(event_id)}"
        self._read: dict[str, int] = {}
        self._writes: dict[str, bytes | None] = {}
        self._has_ended = False

    async def committed(self) -> list[Encoded] | None:
        """The events that the handler returned, if its effects are committed; None if they are not.

        If the event was given up before, attempts may commit again from now on.
        """
        while True:
            try:
                entry = await self._bucket.get(self._done_key)
            except KeyNotFound:
                return None
            completion = msgspec.json.decode(entry.value, type=_Completion)
            if not completion.is_given_up:
                return completion.events
            try:
                await self._bucket.purge(self._done_key, revision=entry.revision, ttl=self._ttl_s)
            except Conflict:
                continue  # another worker changed the record in between

    async def give_up(self) -> list[Encoded] | None:
        """Keep all earlier attempts from committing; if one has committed, return its events.

        The commit of an attempt that timed out may still be on its way to the server. A commit creates the completion
        record, so it is refused once there is one.
        """
        while True:
            try:
                await self._bucket.create(
                    self._done_key, msgspec.json.encode(_Completion(is_given_up=True)), ttl=self._ttl_s
                )
            except KeyExists:
                events = await self.committed()
                if events is not None:
                    return events
            else:
                return None

    async def get(self, key: str) -> bytes | None:
        """The value of a key, or None. Puts and deletes of this transaction are visible.

        Raises:
            UsageError: The transaction has ended, as in :meth:`put`.
        """
        self._check_open("get", key)
        if key in self._writes:
            return self._writes[key]
        try:
            entry = await self._bucket.get(key)
        except KeyNotFound:
            self._read[key] = 0
            return None
        self._read[key] = entry.revision
        return entry.value

    async def put(self, key: str, value: bytes) -> None:
        """Set a key at the commit.

        Raises:
            UsageError: The transaction has ended with the handler, so the value would not be written.
        """
        self._check_open("put", key)
        self._writes[key] = value

    async def delete(self, key: str) -> None:
        """Delete a key at the commit; raises as :meth:`put` does."""
        self._check_open("delete", key)
        self._writes[key] = None

    def end(self) -> None:
        """Refuse reads and writes from now on. A task that the handler left running may still try to write."""
        self._has_ended = True

    def _check_open(self, verb: str, key: str) -> None:
        if self._has_ended:
            raise UsageError(
                f"ctx.tx.{verb}({key!r}) after the handler's transaction has ended: nothing would be written. Await "
                "every task that uses ctx.tx before the handler returns"
            )

    @property
    def write_count(self) -> int:
        """Number of keys that it puts or deletes."""
        return len(self._writes)

    async def commit(self, events: list[Encoded]) -> list[Encoded]:
        """Write all keys and the completion record with ``events``, unless another worker has completed the event.

        Returns the events to publish: these, or the events of the other worker.

        Raises:
            Conflict: A key that was read has changed; nothing was written.
            BatchInDoubt: No answer. The next attempt finds the completion record, or runs the handler again.
        """
        self.end()
        try:
            async with self._bucket.transaction() as tx:
                await tx.create(self._done_key, msgspec.json.encode(_Completion(events)), ttl=self._ttl_s)
                for key, value in self._writes.items():
                    revision = self._read.get(key)
                    if value is None:
                        await tx.delete(key, revision=revision or None)
                    elif revision is None:
                        await tx.put(key, value)
                    elif revision == 0:
                        await tx.create(key, value)
                    else:
                        await tx.update(key, value, revision=revision)
                for key, revision in self._read.items():
                    if key not in self._writes:
                        await tx.expect(key, revision=revision)
        except Conflict:
            others = await self.committed()
            if others is None:
                raise
            return others
        return events


def as_returned(name: str, result: object, function: Callable[..., object], result_type: object = None) -> Any:
    """Convert a recorded result to the type that the function returned, if that type is known.

    Args:
        result_type: The type that the caller wants; None takes the function's annotation, else JSON's types.

    Raises:
        ConfigError: The result is not of the type that the caller wants.
    """
    if result_type is not None:
        try:
            return msgspec.convert(result, result_type, str_keys=True)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"once({name!r}): its recorded result {result!r} is not a {result_type!r}: {error_text(error)}. The "
                "effect is done and not repeated: correct result_type="
            ) from error
    try:
        kind = typing.get_type_hints(function).get("return", Any)
        return msgspec.convert(result, kind, str_keys=True)
    except (NameError, TypeError, ValueError):  # no annotation that helps, or a result that it is wrong about
        return result


def _with_each_name_once(pairs: list[tuple[str, Any]]) -> dict[str, object]:
    """A JSON object; the keys 1 and "1" of a dict have the same name there, and one of their values would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two keys of a dict have the name {twice!r} in JSON")
    return found


def _takes(function: Callable[..., object], name: str) -> bool:
    """True if the function has a parameter of this name."""
    code = getattr(function, "__code__", None)
    if code is not None and not hasattr(function, "__wrapped__"):  # a tenth of the time of a signature
        return name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):  # of a builtin
        return False
