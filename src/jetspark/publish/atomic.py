"""An atomic batch: all of its messages are stored, one directly after the other, or none. No socket, no clock.

States (``outcome``), and who moves them::

    open ──commit()──> unknown ──PubAck───────────────────────────────> stored
     │                   │  │ └──an error of the server────────────────> not stored
     │                   │  └────resolve()──> stored, or not stored, or still unknown
     │                   └───────the message was not accepted──> open
     └──discard(), a refusal, an acknowledgement that did not come──────> not stored

The server stages what it gets under the batch's id, in order, and stores nothing before the commit; then it checks
every expectation against the stream as it is, and stores all or none. So up to the commit the worst that can happen
is that nothing is stored, whatever gets lost on the way: a batch with a hole is refused. Only between handing the
commit over and its answer nobody knows, hence ``unknown`` from the first to the second.

Messages go out without waiting, but for the first (and every n-th, if asked for): its answer of zero bytes says that
the stream takes batches and has a place for this one. It also means that no copy of the first message is still on its
way, and with that, that a commit which comes late comes too late: see :mod:`jetspark.publish.atomic_resolve`.

Servers before 2.14 know no end-of-batch message: there the last message has to say that it is the last. So each is held
back until the next one is added, and the commit sends the one that is left. All of that happens in :meth:`ask`, so
``wants_ack`` is always true then, and ``pack`` takes nothing.

Invariants: ``sequence`` counts the messages handed to the connection, and only those, so whatever raises before that
leaves the batch as it was. A sequence is handed over once, except after the server said that it took no notice of it.
A commit is handed over at most once. The message that makes the server forget a batch can never be stored.
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

# Between two attempts to open a batch while as many are open as the server allows; doubled each time, jittered.
# A batch on disk takes the server 4 to 6 ms, so a place is free soon or for long not.
RETRY = Backoff(first_s=0.01, max_s=0.5)

# Headers and payloads that go into one pack: a write costs little per message, and the server has something to do while
# the next is packed.
PACK_BYTES = 64 << 10


class Pack:
    """Messages in frames, ready to be handed over together."""

    __slots__ = ("after", "error", "frames", "is_last", "last_subject", "subjects")

    def __init__(self, after: int) -> None:
        self.after = after
        """The sequence before the first of them."""
        self.frames: list[bytes] = []
        self.subjects: dict[str, bytes] = {}
        """Those the batch had not written before."""
        self.last_subject = ""
        self.is_last = False
        """There are no more."""
        self.error: Exception | None = None
        """What is wrong with the message after them; it is not in the batch."""


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
        """``timeout_s`` bounds waiting for a place at the server; ``jitter`` gives random numbers in [0, 1)."""
        flag("ack_first", ack_first)
        if ack_every is not None:
            whole("ack_every", ack_every, instead="or None")
        seconds_above_0("timeout", timeout_s)
        self.id = check_batch_id(batch_id)
        self.outcome: Outcome = "open"
        self.ack: PubAck | None = None
        self.sequence = 0
        """Messages handed to the connection; the end-of-batch message is none."""
        self._holds_back = api.known().lacks(END_OF_BATCH.level)
        self._held: tuple[str, bytes, Headers] | None = None
        self._is_ack_due = ack_first
        self.wants_ack = ack_first or self._holds_back
        """Whether the next message may have to wait: :meth:`ask` instead of :meth:`add`."""
        self._connection, self._api = connection, api
        self._ack_every = ack_every
        self._timeout_s, self._jitter = timeout_s, jitter
        # One template from address to payload, because two take twice the time. There is no % in an id.
        prefix = b"NATS/1.0\r\nNats-Batch-Id: " + batch_id.encode() + b"\r\nNats-Batch-Sequence: "
        self._plain_frame = b"HPUB %b %d %d\r\n" + prefix + b"%d\r\n\r\n%b\r\n"
        self._prefix_bytes = len(prefix) + 4
        self._subjects: dict[str, bytes] = {}
        """Those written, in order, and how they stand in a frame."""
        self._last_subject = ""
        self._msg_ids: set[str] = set()
        self._has_ttl = False
        self._session = 0
        """The connection's, when the first message was handed over."""
        self._denials_before = 0
        """How many publishes of the connection were denied before the first message."""
        self._raises_denials = True
        """Until the batch is over."""
        self._first_has_arrived = False
        self._is_waiting = False
        self._may_be_staged = False
        self._reason = ""

    @property
    def added(self) -> int:
        """Messages in the batch, the one that is held back included."""
        return self.sequence + (self._held is not None)

    # ---- messages ----------------------------------------------------------------------------------------------

    def add(self, subject: str, data: bytes, headers: HeadersLike | None = None) -> None:
        """Hand over a message and wait for nothing. ``headers`` are what ``publish_headers`` made.

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
        self._note(subject, headers)

    def pack(self, messages: Iterator[tuple[str, bytes]]) -> Pack:
        """Take as many messages without options as make a good write, up to the next that wants an acknowledgement.

        They count once :meth:`send` has handed them over. It takes half the time of :meth:`add` for each.
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
                try:  # costs nothing as long as nothing is raised
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
        except Exception as error:  # of the message or of the iterator; those before it are good
            pack.error = error
        return pack

    def send(self, pack: Pack) -> None:
        """Hand over what was packed, all or nothing.

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
        yield from self._ask(request, lambda: self._note(subject, headers))

    def _ask(self, request: Request, note: Callable[[], None]) -> Operation[None]:
        """``note`` counts the message as one that was handed over."""
        is_first = not self.sequence
        self._is_waiting = True
        try:
            reply = yield from self._persist(request, is_first=is_first)
        except (ConfigError, BufferFull):
            raise  # not accepted
        except BaseException as error:
            # No commit was sent and none will be: whatever became of this message, nothing will be stored.
            note()
            self._end("not stored", error, is_first=is_first)
            if isinstance(error, Exception):
                yield from self._drop()
            self._explain(error)
            raise
        finally:
            self._is_waiting = False
        note()
        if reply.data:
            # A server that does not know batches stored the message as one like any other.
            self._end("unknown", reason := "the stream stored a message at once, as if it were not part of a batch")
            raise BatchInDoubt(self.id, reason)
        self._first_has_arrived = True

    def _learn_level(self) -> Operation[None]:
        """Whether the server knows an end-of-batch message, should that have to be asked for."""
        self._is_waiting = True
        try:
            facts = yield from self._api.facts()
        finally:
            self._is_waiting = False
        self._holds_back = self._holds_back or facts.lacks(END_OF_BATCH.level)  # ``wants_ack`` is true already

    def _hold(self, subject: str, data: bytes, headers: HeadersLike | None) -> Operation[None]:
        """Keep a message, which may be the last, and hand over the one before it."""
        fields = self._headers(subject, headers, self.added + 1)
        self._vet(subject, data, fields)
        yield from self._hand_over()
        self._held = subject, data, fields
        self._last_subject = subject
        self._remember(subject, headers)

    def _vet(self, subject: str, data: bytes, fields: Headers) -> None:
        """What a connection would refuse is refused now, and not when it is too late to leave it out."""
        self._connection.address(subject)
        self._connection.payload(data, len(encode(fields)) + len("Nats-Batch-Commit: 1\r\n"))

    def _hand_over(self) -> Operation[None]:
        """The message that is held back, if there is one."""
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
        """Store everything: with ``subject``, this last message too; without, what was added."""
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
            self.outcome, self._reason = "open", ""  # not accepted
            raise
        except BaseException as error:
            self._note_committed(subject, headers)
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
        self._note_committed(subject, headers)
        if ack.batch != self.id or ack.batch_size != self.sequence:
            self._end("unknown", "its acknowledgement was for something else")
            raise BatchInDoubt(
                self.id, f"{self.sequence} messages were acknowledged as {ack.batch_size} of batch {ack.batch!r}"
            )
        self._end("stored", "it is committed")
        self.ack = ack
        return ack

    def _last_request(self) -> Request:
        """The commit of what was added: the message that is held back, or one that only says so."""
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

    def _note_committed(self, subject: str | None, headers: HeadersLike | None) -> None:
        """The commit was handed over, and with it the last message, if it is one."""
        if subject is not None:
            self._note(subject, headers)
        elif self._held is not None:
            self._count_held()

    def give_up(self, timeout_s: float) -> RequestTimeout:
        """The time for handing over a message is over. No commit was sent and none will be: nothing will be stored."""
        error = RequestTimeout(f"a message of batch {self.id!r}", timeout_s, was_sent=False)
        if self.outcome == "open" and not self._is_waiting:
            self._end("not stored", error)
        return error

    def discard(self) -> Operation[None]:
        """Store nothing, and make the server forget what it has."""
        if self._is_waiting or self.outcome in ("stored", "unknown"):
            raise self._misuse()
        if self.outcome == "open":
            self._end("not stored", "it was discarded")
        yield from self._drop()

    def leave(self, *, failed: bool) -> Operation[None]:
        """The block is over: commit what is open, or, if the block failed, see to it that nothing is stored."""
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
        """Find out what became of a commit that was not answered; ``age_s`` is how long ago the batch was made.

        Raises:
            BatchInDoubt: It cannot be known, or not now.
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
        # A server that does not know batches would store each message at once.
        ATOMIC_BATCH.check(self._api.known())
        self._session = self._connection.sessions
        denials = self._connection.denials
        self._denials_before = denials.count
        denials.watch(self)

    def publishes_to(self, subject: str) -> bool:
        """Whether the batch has a message to this subject and raises its denial."""
        return self._raises_denials and self._has_written_to(subject)

    def _has_written_to(self, subject: str) -> bool:
        return subject in self._subjects or subject == self._last_subject

    def _check_denials(self) -> None:
        """Whether the server takes the messages sent so far.

        Raises:
            PermissionDenied: It has denied one of them. No commit was sent, so nothing is stored.
        """
        denied = self._connection.denials.since(self._denials_before, self._has_written_to)
        if denied is not None:
            # Its own messages may still be on their way: the denial can be of a message of before.
            self._connection.leave_denials(self, self._denials_before)
            self._end("not stored", denied)
            raise denied

    def _explain(self, error: BaseException) -> None:
        """A batch is incomplete without a message that was denied: then that is what the caller is told.

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
        """The message's own headers, checked against what was added before, and the batch's."""
        headers = Headers(own)
        if own is not None:
            self._check(subject, headers)
        headers.add("Nats-Batch-Id", self.id)
        headers.add("Nats-Batch-Sequence", str(number))
        if commit is not None:
            headers.add("Nats-Batch-Commit", commit)
        return headers

    def _check(self, subject: str, headers: Headers) -> None:
        """The server would refuse these too, but only at the commit, and the whole batch."""
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

    def _note(self, subject: str, headers: HeadersLike | None) -> None:
        """The message was handed over."""
        self._last_subject = subject  # first: who is interrupted below has to discard the batch, on this subject
        self._count(1)
        self._remember(subject, headers)

    def _remember(self, subject: str, headers: HeadersLike | None) -> None:
        """What later messages are checked against."""
        if subject not in self._subjects:
            self._subjects[subject] = subject.encode()
        if headers is not None:
            headers = Headers(headers)
            self._has_ttl = self._has_ttl or "Nats-TTL" in headers
            if (msg_id := headers.get("Nats-Msg-Id")) is not None:
                self._msg_ids.add(msg_id)

    def _count(self, messages: int) -> None:
        self._may_be_staged = True  # first: a message that counts is one that the server can be made to forget
        self.sequence += messages
        self._is_ack_due = self._ack_every is not None and (self.sequence + 1) % self._ack_every == 0
        self.wants_ack = self._is_ack_due or self._holds_back

    def _persist(self, request: Request, *, is_first: bool) -> Operation[CoreMessage]:
        """The answer; while there is no place for a new batch, which leaves no trace at the server, asked for again.

        Raises:
            ServerError: That is the answer.
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
        """Make the server forget the batch, so that others may have its place; nobody waits for the answer."""
        if not self._may_be_staged:
            return
        self._may_be_staged = False
        headers = {
            "Nats-Batch-Id": self.id,
            "Nats-Batch-Sequence": str(self.sequence),
            # Neither 1 nor eob: nats-server 2.15 answers 10200, drops what it has and raises no advisory.
            "Nats-Batch-Commit": "discard",
            **IMPOSSIBLE,
        }
        denials, before = self._connection.denials, self._denials_before
        subjects = self._subjects or (self._last_subject,)
        subject = next((each for each in subjects if denials.since(before, each.__eq__) is None), None)
        if subject is None:
            return  # each of its messages was denied, and one more would be
        try:
            yield Request(subject, b"", headers, is_silent=True)
        except JetSparkError:
            pass  # then the server forgets it by itself, after some idle seconds; the caller has other worries

    def _end(self, outcome: Outcome, reason: BaseException | str, *, is_first: bool = False) -> None:
        self.outcome, self._raises_denials = outcome, False
        if isinstance(reason, str):
            self._reason = reason
            return
        self._reason = str(reason) or type(reason).__name__
        # A refusal drops the batch, but for a message larger than the stream takes: that leaves a batch with a hole.
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
    """Whether this says that the commit was not carried out; anything else leaves that open."""
    # With 503 nobody was there to receive it. A subscription that is refused, however, concerns the answer only.
    return isinstance(error, ServerError | JetStreamUnavailable) or (
        isinstance(error, PermissionDenied) and error.operation == "publish"
    )


class AtomicBatchBase:
    """What both drivers' batches have in common: the facts."""

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
        """Of the whole batch, once it is stored: ``sequence`` is the last message's, ``batch_size`` their number.

        Raises:
            UsageError: It is not stored, or nobody knows; ``outcome`` says which.
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
