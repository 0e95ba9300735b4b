"""The decisions of the JetStream sinks, for both drivers, in the steps of :mod:`jetspark.batcher.effects`. Pure.

*Fast ingest.* Writes pass their messages to one shared publisher, in order, and each waits until its messages are known
to be stored. That is proved by an acknowledgement, which comes after hundreds of messages, or by the end of the
server's batch. So the last running write ends the batch. While other writes run, a write first waits ``linger_s``,
because a later write may bring the acknowledgement.

*Atomic.* A write is one atomic batch, or several if it exceeds the server's limit. Each batch is stored all or none,
and the error has the number of stored items. A batch in doubt is resolved. The server refuses a whole batch if the
stream knows one of its ids; the sink then determines these ids, and stores the other items, all or none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, cast

from jetspark.batcher.effects import Call, SinkSteps, Step
from jetspark.core.connection import Connection
from jetspark.core.headers import Headers, HeadersLike
from jetspark.core.numbers import check_timeout, seconds, whole
from jetspark.core.step_runner import ReadClock, Sleep, Steps
from jetspark.core.subjects import validate_subject
from jetspark.errors import (
    BatchCutShort,
    BatchInDoubt,
    BatchTooLarge,
    ConfigError,
    DuplicateMessageId,
    JetSparkError,
    PermissionDenied,
    ProtocolError,
    ServerError,
    TooManyBatches,
    UsageError,
    WrongLastSequence,
)
from jetspark.jetstream.features import END_OF_BATCH, facts_of
from jetspark.jetstream.publishing import header_block, publish_headers
from jetspark.publish.atomic_resolve import IMPOSSIBLE
from jetspark.publish.fast_options import FastPublisherKeywords, FastPublisherOptions
from jetspark.publish.outgoing import Item, are_plain, data_of

__all__ = ["Atomic", "Ingest", "ItemMessages", "ToMessage", "Turn", "check_publisher"]

T = TypeVar("T")
R = TypeVar("R")

ToMessage: TypeAlias = Callable[[Any], tuple[str, bytes] | tuple[str, bytes, HeadersLike | None]]
"""Returns the subject, the data and optionally the headers of an item's message."""

# The server's default limit; the server states its limit only when it refuses a larger batch.
DEFAULT_MAX_MESSAGES = 1000
# Attempts, because other clients may store some of the ids between the check and the commit.
ROUNDS = 3
RESOLVE_PAUSE_S = 0.2
PROBE_PAUSE_S = 0.02
_ID = "Nats-Msg-Id"


# ---- messages --------------------------------------------------------------------------------------------------------


class ItemMessages(Generic[T]):
    """Converts items to messages."""

    def __init__(
        self, subject: str | None, to_message: ToMessage | None, id_of: Callable[[T], str] | None = None
    ) -> None:
        if (subject is None) == (to_message is None):
            raise ConfigError("expected either subject=, for items that are bytes, or to_message=")
        if subject is not None:
            validate_subject(subject)
        for name, value in (("to_message", to_message), ("id_of", id_of)):
            if value is not None and not callable(value):
                raise ConfigError(f"{name}={value!r}: expected a function of an item")
        self._subject, self._to_message, self.id_of = subject, to_message, id_of

    def plain(self, batch: Sequence[T]) -> list[Item]:
        """The messages of a batch: subject, data, and headers (with the id) where there are any.

        Raises:
            TypeError, ConfigError: An item cannot be converted to a message.
        """
        if self._subject is None:
            items = [self._made(item) for item in batch]
        else:
            subject, data = self._subject, cast(Sequence[bytes], batch)
            items = [(subject, item if type(item) is bytes else _bytes(item)) for item in data]
        if self.id_of is None:
            return items
        return [
            (item[0], item[1], self._named(item[2] if len(item) == 3 else None, self.id_of(each)))
            for item, each in zip(items, batch, strict=True)
        ]

    def _made(self, item: T) -> Item:
        assert self._to_message is not None
        made = self._to_message(item)
        if not isinstance(made, tuple) or not 2 <= len(made) <= 3:
            raise TypeError(f"to_message returned {made!r}: expected (subject, data) or (subject, data, headers)")
        return (made[0], made[1]) if len(made) == 2 or made[2] is None else made

    def _named(self, headers: HeadersLike | bytes | None, msg_id: str) -> Headers:
        if not isinstance(msg_id, str):
            raise ConfigError(f"id_of returned {msg_id!r}: expected a str")
        assert not isinstance(headers, bytes)
        named = publish_headers(headers, msg_id, None, None)
        assert named is not None
        return named if isinstance(named, Headers) else Headers(named)

    def blocks(self, batch: Sequence[T]) -> list[Item]:
        """Like :meth:`plain`, but with encoded header blocks where ``id_of`` is used, which is faster."""
        if self.id_of is None:
            return self.plain(batch)
        return [(item[0], item[1], _block(item)) for item in self.plain(batch)]

    def check(self, connection: Connection, items: Sequence[Item]) -> None:
        """Check that all these messages of :meth:`blocks` can be sent, before any of them is.

        Raises:
            InvalidSubject, InvalidHeader, PayloadTooLarge: A message cannot be sent.
        """
        # Bytes for one subject, which was checked: only their size can be invalid.
        only_sizes_differ = self._subject is not None and self.id_of is None
        if only_sizes_differ and max(map(len, map(data_of, items)), default=0) <= connection.info.max_payload_bytes:
            return
        check(connection, items)


def check(connection: Connection, items: Sequence[Item]) -> None:
    """Check that all messages can be sent, before any of them is.

    Raises:
        InvalidSubject, InvalidHeader, PayloadTooLarge: A message cannot be sent.
    """
    if are_plain(connection, items):
        return
    last_subject, max_bytes = None, connection.info.max_payload_bytes
    for item in items:
        subject, data = item[0], item[1]
        if subject != last_subject:
            connection.address(subject)
            last_subject = subject
        if len(item) == 3 or len(data) > max_bytes or type(data) is not bytes:
            connection.payload(data, len(_block(item)))


def _bytes(item: object) -> bytes:
    if isinstance(item, bytearray | memoryview):
        return bytes(item)
    raise TypeError(f"an item is {type(item).__name__}: expected bytes, or give the sink to_message")


def _block(item: Item) -> bytes:
    headers = item[2] if len(item) == 3 else None
    return headers if isinstance(headers, bytes) else b"" if headers is None else header_block(headers)


# ---- fast ingest -----------------------------------------------------------------------------------------------------


class Turn(Protocol):
    """A fair lock: callers get it in the order of their requests."""

    def acquire(self) -> Any: ...

    def release(self) -> None: ...


def check_publisher(message_ids: bool, options: FastPublisherKeywords) -> None:
    """Check the publisher options of a sink.

    Raises:
        ConfigError: An option is unknown, or would lose messages.
    """
    if "id_prefix" in options:
        # Positions restart with each publisher, so its ids would repeat those of stored messages.
        raise ConfigError("id_prefix: expected id_of instead, which gives an item the same id in every run")
    FastPublisherOptions.of(message_ids, options)  # checks the other options


class Ingest(Generic[T]):
    """Writes that share one publisher."""

    def __init__(self, messages: ItemMessages[T], make: Callable[[], Any], turn: Turn, *, linger_s: float) -> None:
        """``make`` returns a new publisher."""
        self._messages, self._make, self._turn = messages, make, turn
        self._linger_s = seconds("linger_s", linger_s)
        self.publisher: Any = None
        self._under_way = 0
        self._is_closed = False

    def write(self, batch: Sequence[T]) -> SinkSteps:
        items = yield Call(partial(self._messages.blocks, batch))
        if not items:
            return
        self._under_way += 1
        try:
            yield Call(self._turn.acquire)
            try:
                publisher = yield from self._usable()
                yield Call(partial(self._messages.check, publisher._connection, items))
                first = publisher.accepted + 1
                try:
                    last = yield Call(partial(publisher._publish_checked, items))
                except JetSparkError as error:
                    raise _blame(publisher, first, error) from error.__cause__
            finally:
                self._turn.release()
            # A single write need not linger: no other write can bring its acknowledgement.
            linger_s = self._linger_s if self._under_way > 1 else 0.0
            try:
                yield Call(partial(publisher.wait_published, last, linger_s=linger_s))
            except JetSparkError as error:
                raise _blame(publisher, first, error) from error.__cause__
        finally:
            self._under_way -= 1

    def _usable(self) -> Steps[Step, Any]:
        """The present publisher, or a new one after it gave up; its writes have received the error."""
        if self._is_closed:
            raise UsageError("the sink is closed; make another one")
        if self.publisher is not None and self.publisher.failure is not None:
            old, self.publisher = self.publisher, None
            try:
                yield Call(partial(old.close, 0.0))
            except JetSparkError:
                pass  # the failure is known already
        if self.publisher is None:
            self.publisher = yield Call(self._make)
        return self.publisher

    def close(self, timeout: float | None) -> SinkSteps:
        self._is_closed = True
        publisher = self.publisher
        if publisher is not None:
            yield Call(partial(publisher.close, timeout))


def _blame(publisher: Any, first: int, error: JetSparkError) -> JetSparkError:
    """The error to raise from a failed write.

    A message that the stream refuses, or the server denies, ends the publisher, and so fails all later writes. Nothing
    of these is stored, and their messages are not at fault: they get ``BatchCutShort``.
    """
    refused = publisher.published() + 1
    if error is publisher.failure and isinstance(error, ServerError | PermissionDenied) and refused < first:
        return BatchCutShort("", 0, f"the stream refused a message of another write: {error}")
    return error


# ---- atomic ----------------------------------------------------------------------------------------------------------


class Atomic(Generic[T]):
    """Writes that are atomic batches."""

    def __init__(
        self,
        js: Any,
        connection_of: Callable[[Any], Connection],
        messages: ItemMessages[T],
        outcome_of: Callable[[Any], Any],
        *,
        max_messages: int,
        timeout_s: float | None,
        doubt_s: float,
    ) -> None:
        """``connection_of`` returns the connection of ``js``, ``outcome_of`` the acknowledgement of a future; both are
        the driver's."""
        check_timeout(timeout_s)
        self._js, self._connection_of = js, connection_of
        self._messages, self._outcome_of = messages, outcome_of
        self._timeout_s, self._doubt_s = timeout_s, seconds("doubt_s", doubt_s)
        self.max_messages = whole("max_messages", max_messages)
        """Most messages of one batch; lowered to the server's limit once that is known."""

    @property
    def _connection(self) -> Connection:
        return self._connection_of(self._js)

    def write(self, batch: Sequence[T]) -> SinkSteps:
        items = yield Call(partial(self._messages.plain, batch))
        yield Call(partial(check, self._connection, items))
        stored = 0
        while stored < len(items):
            part = items[stored : stored + self.max_messages]
            try:
                yield from self._store(part)
            except BatchTooLarge as error:
                if error.limit is None or not 1 <= error.limit < len(part):
                    if not stored:
                        raise
                    raise _so_far(stored, error) from error
                self.max_messages = min(self.max_messages, error.limit)
            except Exception as error:
                if not stored:
                    raise
                raise _so_far(stored, error) from error
            else:
                stored += len(part)

    def _store(self, part: list[Item]) -> SinkSteps:
        missing = _without_repeats(part)
        for last_round in range(ROUNDS, 0, -1):
            try:
                return (yield from self._commit(missing))
            except DuplicateMessageId:
                if last_round == 1 or not all(map(_id_of, missing)):
                    raise
            missing = yield from self._unknown(missing)
            if not missing:
                return  # an earlier write has stored all these items

    def _commit(self, part: list[Item]) -> SinkSteps:
        """Store one atomic batch. If this raises, nothing of it is stored, except with ``BatchInDoubt``."""
        batch = self._js.atomic_batch(timeout=self._timeout_s)._enter()
        try:
            head: list[Item] = part[:-1]
            last: Item | None = part[-1]
            if not head and self._knows_end_of_batch:
                # A single message that is also the commit could not be resolved after its session is lost.
                head, last = part, None
            if all(len(item) == 2 for item in head):
                yield Call(partial(batch.add_many, head))
            else:
                for item in head:
                    yield Call(partial(batch.add, item[0], item[1], headers=item[2] if len(item) == 3 else None))
            if last is None:
                yield Call(batch.commit)
            else:
                headers = last[2] if len(last) == 3 else None
                yield Call(partial(batch.commit, last[0], last[1], headers=headers))
        except BatchInDoubt as error:
            if batch.outcome == "unknown":
                yield from self._resolve(batch, error)
            else:
                raise
        except BaseException:
            if batch.outcome in ("open", "not stored"):
                try:
                    yield Call(batch.discard)  # frees its place among the open batches, without waiting for an answer
                except JetSparkError:
                    pass  # the server will abandon the batch by itself
            raise

    @property
    def _knows_end_of_batch(self) -> bool:
        level = facts_of(self._connection.info).level
        return level is not None and level >= END_OF_BATCH.level  # an unknown version counts as too old

    def _resolve(self, batch: Any, doubt: BatchInDoubt) -> SinkSteps:
        """Return when the batch is known to be stored.

        Raises:
            BatchCutShort: It is not stored.
            BatchInDoubt: The outcome could not be determined within ``doubt_s``.
        """
        began = yield ReadClock()
        while True:
            try:
                outcome = yield Call(batch.resolve)
                break
            except BatchInDoubt as error:
                # With a cause, the stream did not answer, which may pass. Otherwise the doubt is permanent.
                if error.__cause__ is None or (yield ReadClock()) - began > self._doubt_s:
                    raise
            yield Sleep(RESOLVE_PAUSE_S)
        if outcome != "stored":
            raise BatchCutShort(batch.id, 0, "its commit was not answered, and had no effect") from doubt.__cause__

    def _unknown(self, part: list[Item]) -> Steps[Step, list[Item]]:
        """The messages whose ids the stream does not know.

        The server checks the ids of an atomic batch before its expectations. So a batch of one message with an
        impossible expectation is refused as a duplicate if its id is known, and for its expectation otherwise. It is
        never stored. If a server used the opposite order, every id would seem unknown, and the write would fail with
        the original error. (A plain message cannot be used: nats-server 2.15 checks its expectation first.) All probes
        are sent before the first answer, because each takes a millisecond or two on file storage.
        """
        began = yield ReadClock()
        waiting, missing = list(range(len(part))), list[int]()
        while waiting:
            name = self._js.atomic_batch().id
            futures = []
            for index in waiting:
                future = yield Call(partial(self._probe, f"{name}-{index}", part[index]))
                futures.append(future)
            turned_away: list[int] = []
            failure: Exception | None = None
            for index, future in zip(waiting, futures, strict=True):
                try:
                    yield Call(partial(self._outcome_of, future))
                except DuplicateMessageId:
                    pass
                except WrongLastSequence:
                    missing.append(index)
                except TooManyBatches as error:  # other clients have too many batches open
                    turned_away.append(index)
                    if (yield ReadClock()) - began > self._doubt_s:
                        failure = error
                except Exception as error:
                    failure = error
                else:
                    failure = ProtocolError(f"a message on {part[index][0]!r} was stored against its expectation")
            if failure is not None:
                raise failure
            waiting = turned_away
            if waiting:
                yield Sleep(PROBE_PAUSE_S)
        return [part[index] for index in sorted(missing)]

    def _probe(self, batch_id: str, item: Item) -> Any:
        headers = {"Nats-Batch-Id": batch_id, "Nats-Batch-Sequence": "1", "Nats-Batch-Commit": "1", **IMPOSSIBLE}
        return self._js.publish_async(item[0], b"", msg_id=_id_of(item), headers=headers)


def _so_far(stored: int, error: Exception) -> Exception:
    batch_id = getattr(error, "batch_id", "")
    if isinstance(error, BatchInDoubt):
        return BatchInDoubt(batch_id, error.reason, stored)
    return BatchCutShort(batch_id, stored, str(error))


def _id_of(item: Item) -> str | None:
    headers = item[2] if len(item) == 3 else None
    return None if headers is None or isinstance(headers, bytes) else Headers(headers).get(_ID)


def _without_repeats(part: list[Item]) -> list[Item]:
    """Keep the first message of each id, as a stream would; a batch with a repeated id would be refused as a whole."""
    seen: set[str] = set()
    kept = []
    for item in part:
        msg_id = _id_of(item) if len(item) == 3 else None
        if msg_id is None or msg_id not in seen:
            kept.append(item)
        if msg_id is not None:
            seen.add(msg_id)
    return kept
