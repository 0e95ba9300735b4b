"""An atomic batch: all of its messages are stored, one directly after the other, or none. No socket, no clock.

States (``outcome``), and who moves them::

    open ──commit()──> unknown ──PubAck───────────────────────────────> stored
     │                   │  │ └──an error of the server────────────────> not stored
     │                   │  └────resolve()──> stored, or not stored, or still unknown
     │                   └───────the message was not accepted──> open
     └──discard(), a refusal, an acknowledgement that did not come──────> not stored

The server stages messages under the batch's id, in order, and stores nothing before the commit; then it checks every
expectation against the present stream, and stores all or none. So before the commit nothing can be stored, whatever is
lost on the way: a batch with a hole is refused. Only between the handover of the commit and its answer the outcome is
unknown, hence the state ``unknown``.

Messages go out without waiting, except the first (and every n-th, if requested): its empty answer confirms that the
stream accepts batches and has room for this one. It also means that no copy of the first message is still on its way,
and with that, that a late commit is refused: see :mod:`jetspark.publish.atomic_resolve`.

Servers before 2.14 have no end-of-batch message: the last message has to carry the commit. So each message is held back
until the next one is added, and the commit sends the remaining one. All of that happens in :meth:`ask`, so
``wants_ack`` is always true then, and ``pack`` takes no messages.

Invariants: ``sequence`` counts exactly the messages handed to the connection, so an error before the handover leaves
the batch as it was. A sequence is handed over once, except after the server reported that it ignored it. A commit is
handed over at most once. The message that makes the server drop a batch can never be stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

from jetspark.codes import Code
from jetspark.core import frames
from jetspark.core.arguments import flag
from jetspark.core.backoff import Backoff
from jetspark.core.connection import Connection
from jetspark.core.headers import Headers, HeadersLike, encode
from jetspark.core.message import CoreMessage
from jetspark.core.numbers import seconds_above_0, whole
from jetspark.core.step_runner import Sleep
from jetspark.core.subjects import matches, validate_filter
from jetspark.errors import (
    BatchIncomplete,
    BatchInDoubt,
    BufferFull,
    ConfigError,
    ConnectionClosed,
    FeatureUnavailable,
    JetSparkError,
    JetStreamUnavailable,
    PermissionDenied,
    RequestTimeout,
    ServerError,
    TooManyBatches,
    UsageError,
)
from jetspark.jetstream import wire
from jetspark.jetstream.features import ATOMIC_BATCH, END_OF_BATCH
from jetspark.jetstream.info import PubAck
from jetspark.jetstream.operations import Api, Operation, Request
from jetspark.jetstream.publishing import check_batch_id, read_pub_ack
from jetspark.publish.atomic_resolve import IMPOSSIBLE, Doubt, find
from jetspark.publish.outgoing import last_message, unsendable

__all__ = ["AtomicBatchBase", "AtomicMachine", "Outcome", "Pack"]

Outcome: TypeAlias = Literal["open", "stored", "not stored", "unknown"]

# Pauses before another attempt to open a batch while the server has its maximum of open batches; doubled each time,
# jittered. The server needs 4 to 6 ms for a batch on disk, so there is room soon or not for long.
RETRY = Backoff(first_s=0.01, max_s=0.5)

# Size of headers and payloads in one pack: large enough that a write costs little per message, small enough that the
# server starts on it while the next is packed.
PACK_BYTES = 64 << 10


class Pack:
    """Messages in frames, ready to be handed over together."""

    __slots__ = ("after", "error", "frames", "is_last", "last_subject", "subjects")

    def __init__(self, after: int) -> None:
        self.after = after
        """The sequence before its first message."""
        self.frames: list[bytes] = []
        self.subjects: dict[str, bytes] = {}
        """Its subjects that are new in the batch, and their encoded form."""
        self.last_subject = ""
        self.is_last = False
        """True if the iterator has ended."""
        self.error: Exception | None = None
        """The error of the message behind these; that message is not in the batch."""


class AtomicMachine:
    """One atomic batch."""

    def __init__(
        self,
        connection: Connection,
        api: Api,
        batch_id: str,
        *,
        ack_first: bool,
        ack_every: int | None = None,
        timeout_s: float,
        jitter: Callable[[], float],
    ) -> None:
        """``timeout_s`` bounds the wait for room at the server; ``jitter`` gives random numbers in [0, 1)."""
        flag("ack_first", ack_first)
        if ack_every is not None:
            whole("ack_every", ack_every, instead="or None")
        seconds_above_0("timeout", timeout_s)
        self.id = check_batch_id(batch_id)
        self.outcome: Outcome = "open"
        self.ack: PubAck | None = None
        self.sequence = 0
        """Number of messages handed to the connection, without the end-of-batch message."""
        self._holds_back = api.known().lacks(END_OF_BATCH.level)
        self._held: tuple[str, bytes, Headers] | None = None
        self._is_ack_due = ack_first
        self.wants_ack = ack_first or self._holds_back
        """True if the next message may have to wait: use :meth:`ask` instead of :meth:`add`."""
        self._connection, self._api = connection, api
        self._ack_every = ack_every
        self._timeout_s, self._jitter = timeout_s, jitter
        # One template from address to payload, because two take twice the time. An id contains no %.
        prefix = b"NATS/1.0\r\nNats-Batch-Id: " + batch_id.encode() + b"\r\nNats-Batch-Sequence: "
        self._plain_frame = b"HPUB %b %d %d\r\n" + prefix + b"%d\r\n\r\n%b\r\n"
        self._prefix_bytes = len(prefix) + 4
        self._subjects: dict[str, bytes] = {}
        """The subjects written so far, in order, and their encoded form."""
        self._last_subject = ""
        self._msg_ids: set[str] = set()
        self._has_ttl = False
        self._session = 0
        """The connection's session at the handover of the first message."""
        self._denials_before = 0
        """The connection's number of denied publishes before the first message."""
        self._raises_denials = True
        """True until the batch is over."""
        self._first_has_arrived = False
        self._is_waiting = False
        self._may_be_staged = False
        self._reason = ""

    @property
    def added(self) -> int:
        """Number of messages in the batch, including a message that is held back."""
        return self.sequence + (self._held is not None)

    # ---- messages ----------------------------------------------------------------------------------------------

    def add(self, subject: str, data: bytes, headers: HeadersLike | None = None) -> None:
        """Hand over a message without waiting. ``headers`` come from ``publish_headers``.

        Raises:
            ConfigError: The message cannot be part of this batch.
            BufferFull: Not accepted; try again when there is room.
            UsageError: The batch is over.
        """
        if self.outcome != "open" or self._is_waiting:
            raise self._misuse()
        if not self.sequence:
            self._begin()
        number = self.sequence + 1
        connection = self._connection
        if connection.denials.count != self._denials_before:
            self._check_denials()
        try:
            address = self._subjects.get(subject) or connection.address(subject)
        except TypeError:
            raise unsendable((subject, data)) from None
        if headers is None:  # nearly always
            header_bytes = self._header_bytes(number)
            data = connection.payload(data, header_bytes)
            frame = self._plain_frame % (address, header_bytes, header_bytes + len(data), number, data)
        else:
            block = encode(self._headers(subject, headers, number))
            data = connection.payload(data, len(block))
            frame = frames.HPUB % (address, len(block), len(block) + len(data), block, data)
        connection.publish_frames([frame])
        self._count_sent(subject, headers)

    def pack(self, messages: Iterator[tuple[str, bytes]]) -> Pack:
        """Encode messages without options for one write, up to the next that needs an acknowledgement.

        They count when :meth:`send` has handed them over. It takes half the time of :meth:`add` for each.
        """
        if self.outcome != "open" or self._is_waiting:
            raise self._misuse()
        if not self.added:
            self._begin()
        if self._holds_back:
            return Pack(self.sequence)
        number, size_bytes = self.sequence, 0
        last = None if self._ack_every is None else (number // self._ack_every + 1) * self._ack_every - 1
        pack = Pack(number)
        ready, subjects, known, connection = pack.frames, pack.subjects, self._subjects, self._connection
        frame, max_bytes = self._plain_frame, connection.info.max_payload_bytes
        header_bytes, next_power = 0, 0
        try:
            while number != last and size_bytes < PACK_BYTES:
                message = next(messages)
                try:  # free unless it raises
                    subject, data = message
                    address = known.get(subject) or subjects.get(subject)
                except (TypeError, ValueError):
                    raise unsendable(message, "messages", "each to be (subject, data)") from None
                number += 1
                if number >= next_power:
                    header_bytes, next_power = self._header_bytes(number), 10 ** len(str(number))
                if address is None:
                    address = subjects[subject] = connection.address(subject)
                if type(data) is not bytes or header_bytes + len(data) > max_bytes:
                    data = connection.payload(data, header_bytes)
                ready.append(frame % (address, header_bytes, header_bytes + len(data), number, data))
                size_bytes += header_bytes + len(data)
                pack.last_subject = subject
        except StopIteration:
            pack.is_last = True
        except Exception as error:  # from the message or the iterator; the messages before it are good
            pack.error = error
        return pack

    def send(self, pack: Pack) -> None:
        """Hand over a pack, completely or not at all.

        Raises:
            BufferFull: Not accepted; try again when there is room.
        """
        if self.outcome != "open" or self._is_waiting:
            raise self._misuse()
        if self.sequence != pack.after:
            raise UsageError(f"batch {self.id!r} got a message while others were packed: make one call after the other")
        self._check_denials()
        if pack.frames:
            self._connection.publish_frames(pack.frames)
            self._count(len(pack.frames))
            self._subjects |= pack.subjects
            self._last_subject = pack.last_subject

    def ask(self, subject: str, data: bytes, headers: HeadersLike | None = None) -> Operation[None]:
        """Hand over a message and wait for its acknowledgement."""
        if self.outcome != "open" or self._is_waiting:
            raise self._misuse()
        if not self.added:
            yield from self._learn_level()
            self._begin()
        if self._holds_back:
            yield from self._hold(subject, data, headers)
            return
        request = Request(
            subject,
            data,
            self._headers(subject, headers, self.sequence + 1),
            may_be_leaderless=not self.sequence,
        )
        yield from self._ask(request, lambda: self._count_sent(subject, headers))

    def _ask(self, request: Request, count_sent: Callable[[], None]) -> Operation[None]:
        """Send a message and read its answer; ``count_sent`` counts it as handed over."""
        is_first = not self.sequence
        self._is_waiting = True
        try:
            reply = yield from self._persist(request, is_first=is_first)
        except (ConfigError, BufferFull):
            raise  # not accepted
        except BaseException as error:
            # No commit was sent and none will be: nothing can be stored, whether this message arrived or not.
            count_sent()
            self._end("not stored", error, is_first=is_first)
            if isinstance(error, Exception):
                yield from self._drop()
            self._explain(error)
            raise
        finally:
            self._is_waiting = False
        count_sent()
        if reply.data:
            # A server without batch support stored it as a plain message.
            self._end("unknown", reason := "the stream stored a message at once, as if it were not part of a batch")
            raise BatchInDoubt(self.id, reason)
        self._first_has_arrived = True

    def _learn_level(self) -> Operation[None]:
        """Find out whether the server supports an end-of-batch message, by a request if necessary."""
        self._is_waiting = True
        try:
            facts = yield from self._api.facts()
        finally:
            self._is_waiting = False
        self._holds_back = self._holds_back or facts.lacks(END_OF_BATCH.level)  # ``wants_ack`` is true already

    def _hold(self, subject: str, data: bytes, headers: HeadersLike | None) -> Operation[None]:
        """Hold a message back, since it may be the last, and hand over the one before it."""
        fields = self._headers(subject, headers, self.added + 1)
        self._vet(subject, data, fields)
        yield from self._hand_over()
        self._held = subject, data, fields
        self._last_subject = subject
        self._remember(subject, headers)

    def _vet(self, subject: str, data: bytes, fields: Headers) -> None:
        """Raise now for a message that the connection would refuse later, when it could not be left out any more."""
        self._connection.address(subject)
        self._connection.payload(data, len(encode(fields)) + len("Nats-Batch-Commit: 1\r\n"))

    def _hand_over(self) -> Operation[None]:
        """Hand over the message that is held back, if any."""
        if self._held is None:
            return
        subject, data, fields = self._held
        if self._is_ack_due:
            request = Request(subject, data, fields, may_be_leaderless=not self.sequence)
            yield from self._ask(request, self._count_held)
            return
        self._is_waiting = True
        try:
            yield Request(subject, data, fields, is_silent=True)
        finally:
            self._is_waiting = False
        self._count_held()

    def _count_held(self) -> None:
        self._held = None
        self._count(1)

    # ---- the end -----------------------------------------------------------------------------------------------

    def commit(
        self, subject: str | None = None, data: bytes = b"", headers: HeadersLike | None = None
    ) -> Operation[PubAck]:
        """Store the batch; with ``subject`` including this last message, without it as it is."""
        if self.outcome != "open" or self._is_waiting:
            raise self._misuse()
        if subject is not None:
            if not self.added:
                self._begin()
            fields = self._headers(subject, headers, self.added + 1, commit="1")
            if self._held is not None:
                self._vet(subject, data, fields)
                yield from self._hand_over()
            request = Request(subject, data, fields, may_be_leaderless=not self.sequence)
        else:
            last_message(subject, data, headers)
            request = self._last_request()
        is_first = not self.sequence
        if self._connection.is_closed:
            self._end("not stored", closed := ConnectionClosed("the connection was closed before the batch's commit"))
            raise closed
        self.outcome, self._reason = "unknown", "its commit was not answered"
        self._is_waiting = True
        try:
            reply = yield from self._persist(request, is_first=is_first)
            ack = read_pub_ack(reply)
        except (ConfigError, BufferFull):
            self.outcome, self._reason = "open", ""  # the connection did not accept it
            raise
        except BaseException as error:
            self._count_commit(subject, headers)
            if _is_refusal(error):
                self._end("not stored", error, is_first=is_first)
                yield from self._drop()
                self._explain(error)
                raise
            if isinstance(error, Exception):
                raise BatchInDoubt(self.id, f"the commit was not answered: {error}") from error
            raise  # cancelled, or interrupted
        finally:
            self._is_waiting = False
            self._raises_denials = self.outcome == "open"
        self._count_commit(subject, headers)
        if ack.batch != self.id or ack.batch_size != self.sequence:
            self._end("unknown", "its acknowledgement was for another batch")
            raise BatchInDoubt(
                self.id, f"{self.sequence} messages were acknowledged as {ack.batch_size} of batch {ack.batch!r}"
            )
        self._end("stored", "it is committed")
        self.ack = ack
        return ack

    def _last_request(self) -> Request:
        """The commit of the added messages: the message that is held back, or an end-of-batch message."""
        if not self.added:
            raise UsageError(f"batch {self.id!r} has no messages: there is nothing to commit")
        if self._held is not None:
            subject, data, fields = self._held
            fields = Headers(fields)
            fields.add("Nats-Batch-Commit", "1")
            return Request(subject, data, fields, may_be_leaderless=not self.sequence)
        END_OF_BATCH.check(self._api.known())
        fields = self._headers(self._last_subject, None, self.sequence + 1, commit="eob")
        return Request(self._last_subject, b"", fields)

    def _count_commit(self, subject: str | None, headers: HeadersLike | None) -> None:
        """Count the commit as handed over, and the last message with it."""
        if subject is not None:
            self._count_sent(subject, headers)
        elif self._held is not None:
            self._count_held()

    def give_up(self, timeout_s: float) -> RequestTimeout:
        """End the batch after a timeout of a handover. No commit was sent and none will be: nothing will be stored."""
        error = RequestTimeout(f"a message of batch {self.id!r}", timeout_s, was_sent=False)
        if self.outcome == "open" and not self._is_waiting:
            self._end("not stored", error)
        return error

    def discard(self) -> Operation[None]:
        """Store nothing, and make the server drop the staged messages."""
        if self._is_waiting or self.outcome in ("stored", "unknown"):
            raise self._misuse()
        if self.outcome == "open":
            self._end("not stored", "it was discarded")
        yield from self._drop()

    def leave(self, *, failed: bool) -> Operation[None]:
        """End the block: commit an open batch, or, if the block failed, make sure that nothing is stored."""
        if self.outcome == "open" and not failed and self.added:
            try:
                yield from self.commit()
            except (FeatureUnavailable, BufferFull) as error:
                self._end("not stored", error)
                yield from self._drop()
                raise
            return
        if self.outcome == "open":
            self._end("not stored", "its block was left by an exception" if failed else "it had no messages")
        if self.outcome == "not stored":
            yield from self._drop()

    def resolve(self, age_s: float) -> Operation[Outcome]:
        """Find out whether a commit without an answer was stored; ``age_s`` is the time since the batch was created.

        Raises:
            BatchInDoubt: It cannot be determined, or not now.
        """
        if self.outcome == "open" or self._is_waiting:
            raise self._misuse()
        if self.outcome != "unknown":
            return self.outcome
        doubt = Doubt(
            batch_id=self.id,
            size=self.sequence,
            subjects=tuple(dict.fromkeys((self._last_subject, *reversed(self._subjects)))),
            may_expire=self._has_ttl,
            may_still_arrive=lambda: not self._first_has_arrived and self._connection.sessions != self._session,
            age_s=age_s,
            timeout_s=self._timeout_s,
        )
        self._is_waiting = True
        try:
            ack = yield from find(self._api, doubt)
        except BatchInDoubt:
            raise
        except JetSparkError as error:
            raise BatchInDoubt(self.id, f"the stream does not answer: {error}") from error
        finally:
            self._is_waiting = False
        self._may_be_staged = False
        self.ack = ack
        self._end("stored" if ack is not None else "not stored", "its commit was not answered and had no effect")
        return self.outcome

    # ---- small steps -------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        # A server without batch support would store each message at once.
        ATOMIC_BATCH.check(self._api.known())
        self._session = self._connection.sessions
        denials = self._connection.denials
        self._denials_before = denials.count
        denials.watch(self)

    def publishes_to(self, subject: str) -> bool:
        """True if the batch has a message to this subject and raises its denial."""
        return self._raises_denials and self._has_written_to(subject)

    def _has_written_to(self, subject: str) -> bool:
        return subject in self._subjects or subject == self._last_subject

    def _check_denials(self) -> None:
        """Check that no message of the batch was denied.

        Raises:
            PermissionDenied: A message was denied. No commit was sent, so nothing is stored.
        """
        denied = self._connection.denials.since(self._denials_before, self._has_written_to)
        if denied is not None:
            # Its own messages may still be on their way: the denial can concern a message published before.
            self._connection.leave_denials(self, self._denials_before)
            self._end("not stored", denied)
            raise denied

    def _explain(self, error: BaseException) -> None:
        """Raise the denial instead, if a denied message is the reason why the batch is incomplete.

        Raises:
            PermissionDenied: With the subject of the message.
        """
        if isinstance(error, BatchIncomplete):
            denied = self._connection.denials.since(self._denials_before, self._has_written_to)
            if denied is not None:
                self._reason = str(denied)
                raise denied from error

    def _header_bytes(self, number: int) -> int:
        return self._prefix_bytes + len(str(number))

    def _headers(self, subject: str, own: HeadersLike | None, number: int, commit: str | None = None) -> Headers:
        """The message's own headers, checked against the batch so far, and the batch's headers."""
        headers = Headers(own)
        if own is not None:
            self._check(subject, headers)
        headers.add("Nats-Batch-Id", self.id)
        headers.add("Nats-Batch-Sequence", str(number))
        if commit is not None:
            headers.add("Nats-Batch-Commit", commit)
        return headers

    def _check(self, subject: str, headers: Headers) -> None:
        """Refuse headers for which the server would refuse the whole batch at the commit."""
        for name in headers:
            if name.lower().startswith("nats-batch-"):
                raise ConfigError(f"header {name}: the batch sets it; choose another name")
        if self.added and "Nats-Expected-Last-Sequence" in headers:
            raise ConfigError(
                f"expect.last_sequence={headers['Nats-Expected-Last-Sequence']} on message {self.added + 1} of a "
                "batch: the server compares it on the first only; expect it there"
            )
        if "Nats-Expected-Last-Subject-Sequence" in headers:
            guard = headers.get("Nats-Expected-Last-Subject-Sequence-Subject")
            expected = subject if guard is None else validate_filter(guard)
            written = self._written(expected)
            if written is not None:
                raise ConfigError(
                    f"expect.last_subject_sequence of {expected!r}: this batch has written {written!r} already, and "
                    "the server compares with the stream before the batch; expect it on the first such message"
                )
        msg_id = headers.get("Nats-Msg-Id")
        if msg_id in self._msg_ids:
            raise ConfigError(f"msg_id={msg_id!r}: another message of this batch has it; give each its own")

    def _written(self, expected: str) -> str | None:
        if expected in self._subjects:
            return expected
        if "*" not in expected and ">" not in expected:
            return None
        return next((subject for subject in self._subjects if matches(expected, subject)), None)

    def _count_sent(self, subject: str, headers: HeadersLike | None) -> None:
        """Count a message that was handed over."""
        self._last_subject = subject  # first: after an interrupt below, the batch is discarded through this subject
        self._count(1)
        self._remember(subject, headers)

    def _remember(self, subject: str, headers: HeadersLike | None) -> None:
        """Store the facts that later messages are checked against."""
        if subject not in self._subjects:
            self._subjects[subject] = subject.encode()
        if headers is not None:
            headers = Headers(headers)
            self._has_ttl = self._has_ttl or "Nats-TTL" in headers
            if (msg_id := headers.get("Nats-Msg-Id")) is not None:
                self._msg_ids.add(msg_id)

    def _count(self, messages: int) -> None:
        self._may_be_staged = True  # first: the server can be made to drop every counted message
        self.sequence += messages
        self._is_ack_due = self._ack_every is not None and (self.sequence + 1) % self._ack_every == 0
        self.wants_ack = self._is_ack_due or self._holds_back

    def _persist(self, request: Request, *, is_first: bool) -> Operation[CoreMessage]:
        """The answer to a request. While the server has no room for a new batch, the request is repeated: it left no
        trace.

        Raises:
            ServerError: The server refused the request.
        """
        waited_s, failures = 0.0, 0
        while True:
            reply = yield request
            error = wire.error_of(wire.read_object(reply.data)) if reply.data else None
            if error is None:
                return reply
            failures += 1
            pause_s = RETRY.wait_s(failures) * (0.5 + self._jitter())
            if not is_first or not isinstance(error, TooManyBatches) or waited_s + pause_s > self._timeout_s:
                raise error
            yield Sleep(pause_s)
            waited_s += pause_s

    def _drop(self) -> Operation[None]:
        """Make the server drop the batch, so that it has room for others; the answer is not waited for."""
        if not self._may_be_staged:
            return
        self._may_be_staged = False
        headers = {
            "Nats-Batch-Id": self.id,
            "Nats-Batch-Sequence": str(self.sequence),
            # Neither 1 nor eob: nats-server 2.15 answers 10200, drops the batch and raises no advisory.
            "Nats-Batch-Commit": "discard",
            **IMPOSSIBLE,
        }
        denials, before = self._connection.denials, self._denials_before
        subjects = self._subjects or (self._last_subject,)
        subject = next((each for each in subjects if denials.since(before, each.__eq__) is None), None)
        if subject is None:
            return  # each of its messages was denied, and another one would be
        try:
            yield Request(subject, b"", headers, is_silent=True)
        except JetSparkError:
            pass  # then the server drops it by itself, after some idle seconds

    def _end(self, outcome: Outcome, reason: BaseException | str, *, is_first: bool = False) -> None:
        self.outcome, self._raises_denials = outcome, False
        if isinstance(reason, str):
            self._reason = reason
            return
        self._reason = str(reason) or type(reason).__name__
        # A refusal drops the batch, except for a message larger than the stream accepts: that leaves a batch with a
        # hole.
        is_dropped = isinstance(reason, ServerError) and reason.err_code != Code.MESSAGE_TOO_LARGE
        if is_dropped or (is_first and _is_refusal(reason)):
            self._may_be_staged = False

    def _misuse(self) -> UsageError:
        if self.outcome == "stored":
            return UsageError(f"batch {self.id!r} is over: its {self.sequence} messages are stored")
        if self.outcome == "not stored":
            return UsageError(f"batch {self.id!r} is over and nothing of it is stored: {self._reason}")
        if self._is_waiting:
            return UsageError(f"batch {self.id!r} waits for an answer: make one call after the other")
        if self.outcome == "unknown":
            return UsageError(f"batch {self.id!r} is over: {self._reason}; resolve() finds out whether it is stored")
        return UsageError(f"batch {self.id!r} is open: there is nothing to resolve before its commit")


def _is_refusal(error: BaseException) -> bool:
    """True if the commit was certainly not carried out; after any other error it may have been."""
    # With 503 no server received it. A refused subscription, however, concerns only the answer.
    return isinstance(error, ServerError | JetStreamUnavailable) or (
        isinstance(error, PermissionDenied) and error.operation == "publish"
    )


class AtomicBatchBase:
    """The facts of both drivers' batches."""

    _machine: AtomicMachine

    @property
    def id(self) -> str:
        """The batch's name at the server and in the headers of every message it stored."""
        return self._machine.id

    @property
    def sequence(self) -> int:
        """Messages added so far."""
        return self._machine.added

    @property
    def ack(self) -> PubAck:
        """The acknowledgement of a stored batch: ``sequence`` is the last message's, ``batch_size`` their number.

        Raises:
            UsageError: It is not stored, or that is unknown; ``outcome`` says which.
        """
        if self._machine.ack is None:
            raise UsageError(f"the batch has no acknowledgement: its outcome is {self._machine.outcome!r}")
        return self._machine.ack

    @property
    def outcome(self) -> Outcome:
        """``"open"``, ``"stored"``, ``"not stored"``, or ``"unknown"`` when the commit was not answered."""
        return self._machine.outcome

    def __repr__(self) -> str:
        return f"<AtomicBatch {self.id}: {self.sequence} messages, {self.outcome}>"
