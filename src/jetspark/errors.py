"""Every exception JetSpark raises, as one tree. The branch is a class, and says who has to act.

::

    JetSparkError
    ├── CallerError                         the program: change the call
    │   ├── ConfigError (ValueError)            a value we cannot use
    │   │   ├── InvalidSubject                  ... a subject NATS does not allow
    │   │   ├── InvalidEvent                    ... an event that its own contract does not allow
    │   │   ├── InvalidHeader                   ... a header that would break the frame
    │   │   └── PayloadTooLarge                 ... more bytes than the server accepts
    │   ├── TopologyRefused                     changes to the server that lose something, or that it cannot make
    │   ├── UsageError (RuntimeError)           a call at the wrong time
    │   │   ├── ConnectionClosed                ... use after close() or drain()
    │   │   ├── NotAwaited (AttributeError)     ... what connect() returned was used, and not awaited
    │   │   └── BatcherClosed                   ... add() after shutdown()
    │   │       └── BatcherBroken               ... or after the batcher itself failed
    │   └── MissingExtra (ImportError)          an optional dependency is not installed
    ├── NetworkError                        nobody: the other side is away or too slow, right now   may pass
    │   ├── ConnectionLost (ConnectionError)    the connection went away
    │   │   └── NoServersAvailable              ... and none of the servers could be reached
    │   ├── RequestTimeout (TimeoutError)       no answer in time
    │   │   ├── CommandInDoubt                  ... to a command, which may have been decided: ask again with its id
    │   │   └── WorkflowNotOver                 ... a run of a workflow did not end within the caller's time
    │   ├── BufferFull                          the network takes nothing, and the send buffer is full
    │   ├── WindowFull                          as many messages as allowed wait for their acknowledgement
    │   ├── NoResponders                        nobody listens on the subject
    │   │   └── NoWorkers                       ... and it is the subject of a command
    │   ├── WorkersBusy                         the worker that got a command has its queue full: nothing was decided
    │   ├── JetStreamUnavailable                nobody answers for JetStream, or for this stream
    │   ├── BatchInDoubt                        nobody knows how a batch ended
    │   ├── BatcherTimeout (TimeoutError)       the sink is too slow for the caller's timeout; the call had no effect
    │   ├── FlushTimeout (TimeoutError)         a write took too long; nobody knows what of it is stored
    │   ├── CircuitOpen                         the sink failed so often that it is left alone for a while
    │   ├── HandlerStalled                      a worker held events without progress, and has ended: start it again
    │   └── DroppedOnShutdown                   the sink was not done when the shutdown's time was over     (final)
    ├── ServerFault                         the operator: the server refuses, or cannot
    │   ├── ProtocolError                       bytes that are not the NATS protocol
    │   ├── AuthenticationFailed                it did not accept our credentials
    │   ├── PermissionDenied (PermissionError)  we may not use this subject
    │   ├── FeatureUnavailable                  it is too old for something that was asked for
    │   ├── ServerRefused                       any other -ERR, in its own words                        may pass
    │   ├── BatchCutShort                       it ended a fast batch early; stored says how far it came    may pass
    │   ├── EmbeddedServerError                 a nats-server of our own did not start or died
    │   ├── CommandFailed                       a worker could not decide a command: its code or its history is wrong
    │   └── ServerError                         JetStream refused a request     may pass: codes 408, 409, 429, 503
    │       ├── StreamNotFound                  ... there is no such stream
    │       ├── StreamNameInUse                 ... one of that name exists, with another configuration
    │       ├── ConsumerNotFound                ... there is no such consumer
    │       ├── ConsumerNameInUse               ... one of that name exists, with another configuration
    │       ├── MessageNotFound                 ... there is no such message
    │       ├── WrongLastSequence               ... somebody else wrote first
    │       ├── AtomicPublishDisabled           ... the stream does not allow atomic batches
    │       ├── BatchIncomplete                 ... it lost an atomic batch: idle, a restart, a lost message    may pass
    │       ├── BatchTooLarge                   ... more messages than an atomic batch may have; limit says how many
    │       ├── DuplicateMessageId              ... a message of the atomic batch is stored already
    │       ├── TooManyBatches                  ... as many batches as it allows are open                       may pass
    │       ├── BatchPublishDisabled            ... the stream does not allow fast ingest
    │       ├── BatchUnknown                    ... it does not know the fast batch (any more)                  may pass
    │       ├── JetStreamNotEnabled             ... JetStream is off, for the server or the account             (final)
    │       └── InsufficientResources           ... a limit of the server or the account is reached
    └── DataError                           the data: what is stored is not what was expected
        ├── KeyNotFound (KeyError)              the key has no value
        ├── Conflict                            somebody else wrote first; keys says where
        │   ├── KeyExists                       ... and the key was to be new
        │   ├── BoundaryConflict                ... inside the boundary of a command, as often as it was decided
        │   └── WrongVersion                    ... inside the boundary of a command, after its expected_version
        ├── CommandRefused                      a command was decided on, and the decision is no
        ├── ObjectNotFound (KeyError)           there is no such object
        ├── DigestMismatch                      an object's bytes differ from those put
        ├── ContractViolation                   a message is not what the contract of its event says
        │   ├── NotJson                         ... its body is no JSON at all
        │   ├── NotAnEnvelope                   ... its body is JSON, and no CloudEvent
        │   ├── UnknownEventType                ... nobody declared its type
        │   ├── UnknownEventVersion             ... its type is known, and its version is not
        │   ├── MissingField                    ... a field that its contract requires is not there
        │   ├── WrongFieldType                  ... a field has a value of another type
        │   ├── BrokenRule                      ... a field has the right type and a value that is not allowed
        │   └── UpcastFailed                    ... the function that should make it a newer version raised an error
        ├── ContractFrozen                      a type and version is recorded already, and means something else
        ├── StateParked                         a projected state does not go on: an event could not be applied
        ├── TopologyDrift                       the server is not as the application declares
        ├── ProjectionDiffers                   the state of a projection is not what its events make of it
        ├── DataLoss                            messages that were to be read are gone
        ├── StreamRecreated                     the stream has the name of the one that was read before, and is another
        └── StreamWentBack                      the stream ends before the position that was read

``may_pass`` of an error says whether the same call may succeed later although nobody does anything: the one question
of every retry. Whether to repeat it is *safe* is another one: a publish that timed out may be stored.

Facts are attributes, so that callers never parse messages. Every class survives ``pickle``: Spark carries errors
between processes. ``args`` alone must rebuild them; a cause that is one of these errors travels along, because whether
the end of a batch may pass is for its cause to say.
"""

from __future__ import annotations

from typing import Any

from jetspark.codes import Code

__all__ = [
    "AtomicPublishDisabled",
    "AuthenticationFailed",
    "BatchCutShort",
    "BatchInDoubt",
    "BatchIncomplete",
    "BatchPublishDisabled",
    "BatchTooLarge",
    "BatchUnknown",
    "BatcherBroken",
    "BatcherClosed",
    "BatcherTimeout",
    "BoundaryConflict",
    "BrokenRule",
    "BufferFull",
    "CallerError",
    "CircuitOpen",
    "CommandFailed",
    "CommandInDoubt",
    "CommandRefused",
    "ConfigError",
    "Conflict",
    "ConnectionClosed",
    "ConnectionLost",
    "ConsumerNameInUse",
    "ConsumerNotFound",
    "ContractFrozen",
    "ContractViolation",
    "DataError",
    "DataLoss",
    "DigestMismatch",
    "DroppedOnShutdown",
    "DuplicateMessageId",
    "EmbeddedServerError",
    "FeatureUnavailable",
    "FlushTimeout",
    "HandlerStalled",
    "InsufficientResources",
    "InvalidEvent",
    "InvalidHeader",
    "InvalidSubject",
    "JetSparkError",
    "JetStreamNotEnabled",
    "JetStreamUnavailable",
    "KeyExists",
    "KeyNotFound",
    "MessageNotFound",
    "MissingExtra",
    "MissingField",
    "NetworkError",
    "NoResponders",
    "NoServersAvailable",
    "NoWorkers",
    "NotAnEnvelope",
    "NotAwaited",
    "NotJson",
    "ObjectNotFound",
    "PayloadTooLarge",
    "PermissionDenied",
    "ProjectionDiffers",
    "ProtocolError",
    "RequestTimeout",
    "ServerError",
    "ServerFault",
    "ServerRefused",
    "StateParked",
    "StreamNameInUse",
    "StreamNotFound",
    "StreamRecreated",
    "StreamWentBack",
    "TooManyBatches",
    "TopologyDrift",
    "TopologyRefused",
    "UnknownEventType",
    "UnknownEventVersion",
    "UpcastFailed",
    "UsageError",
    "WindowFull",
    "WorkersBusy",
    "WorkflowNotOver",
    "WrongFieldType",
    "WrongLastSequence",
    "WrongVersion",
]


class JetSparkError(Exception):
    """Root of every error JetSpark raises."""

    @property
    def may_pass(self) -> bool:
        """Whether the same call may succeed later although nobody does anything.

        It does not say that a repetition is safe: what timed out may have been done.
        """
        return False

    def __reduce__(self) -> tuple[Any, ...]:
        # Python leaves causes behind. Those of other kinds it may not be able to carry, and nothing asks for them.
        reduced = super().__reduce__()
        assert isinstance(reduced, tuple)
        cls, args, *rest = reduced
        state = dict(rest[0] or {}) if rest else {}
        if isinstance(self.__cause__, JetSparkError):
            state["__cause__"] = self.__cause__
        return (cls, args, state) if state else (cls, args)


class CallerError(JetSparkError):
    """The program has to change: a value or a call that cannot work."""


class NetworkError(JetSparkError):
    """The other side is away or too slow right now: server, network, or a batcher's sink.

    It may pass, but for :class:`DroppedOnShutdown`, and for a :class:`BatchInDoubt` whose cause may not.
    """

    @property
    def may_pass(self) -> bool:
        return True


class ServerFault(JetSparkError):
    """The server refuses, or is not able to: its operator, its configuration or its limits have to change."""


class DataError(JetSparkError):
    """What is stored is not what the call expected: read again, and decide again."""


class ConfigError(CallerError, ValueError):
    """A value the caller gave cannot be used; the message names it and what would work."""


class InvalidSubject(ConfigError):
    """A subject or filter that NATS does not allow."""

    def __init__(self, subject: str, reason: str) -> None:
        super().__init__(subject, reason)
        self.subject, self.reason = subject, reason

    def __str__(self) -> str:
        return f"subject {self.subject!r}: {self.reason}"


class InvalidHeader(ConfigError):
    """A header name or value that would break the frame it travels in."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"header {self.name!r}: {self.reason}"


class InvalidEvent(ConfigError):
    """An event that its own contract does not allow; it was not published. ``field`` and ``rule`` say why."""

    def __init__(self, event_type: str, version: int, field: str, rule: str) -> None:
        super().__init__(event_type, version, field, rule)
        self.event_type, self.version, self.field, self.rule = event_type, version, field, rule

    def __str__(self) -> str:
        where = f", field {self.field!r}" if self.field else ""
        return f"event {self.event_type!r} version {self.version}{where}: {self.rule}; it was not published"


class PayloadTooLarge(ConfigError):
    """Headers and payload together exceed the server's ``max_payload``; nothing was sent.

    ``subject`` is there when the message had been accepted before: the server it was accepted for allowed more.
    """

    def __init__(self, size_bytes: int, max_payload_bytes: int, subject: str = "") -> None:
        super().__init__(size_bytes, max_payload_bytes, subject)
        self.size_bytes, self.max_payload_bytes, self.subject = size_bytes, max_payload_bytes, subject

    def __str__(self) -> str:
        to_subject = f" to {self.subject!r}" if self.subject else ""
        return (
            f"message{to_subject} of {self.size_bytes} bytes (headers and payload): the server accepts "
            f"{self.max_payload_bytes}; split it, or raise max_payload in the server's configuration"
        )


class TopologyRefused(CallerError):
    """Changes to the server that can lose something, or that it cannot make; ``steps`` says which. Nothing was done."""

    def __init__(self, app: str, steps: tuple[str, ...]) -> None:
        super().__init__(app, steps)
        self.app, self.steps = app, steps

    def __str__(self) -> str:
        listed = "\n".join(self.steps)
        return f"app {self.app!r}: these changes are not made without allow, or not at all; nothing was done\n{listed}"


class UsageError(CallerError, RuntimeError):
    """A call that makes no sense in the present state."""


class NotAwaited(UsageError, AttributeError):
    """What ``connect`` returned was used as a client; it becomes one when awaited, or entered by ``async with``."""


class ConnectionClosed(UsageError):
    """The connection or subscription was closed or drained before this call."""


class BatcherClosed(UsageError):
    """The batcher accepts nothing more: its shutdown has begun. The item was not accepted."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return f"batcher {self.name!r} is shut down: the item was not accepted"


class BatcherBroken(BatcherClosed):
    """The batcher itself failed, which nothing mends but a new one; ``__cause__`` says why."""

    def __str__(self) -> str:
        return f"batcher {self.name!r} is broken: what it held is not written, and it accepts nothing more"


class MissingExtra(CallerError, ImportError):
    """A feature needs an optional dependency that is not installed."""

    def __init__(self, feature: str, extra: str) -> None:
        super().__init__(feature, extra)
        self.feature, self.extra = feature, extra

    def __str__(self) -> str:
        return f"{self.feature} needs the extra {self.extra!r}: pip install 'jetspark[{self.extra}]'"


class ProtocolError(ServerFault):
    """The peer sent bytes that are not the NATS protocol; the connection is dropped and re-established."""


class ConnectionLost(NetworkError, ConnectionError):
    """The connection went away while this operation depended on it.

    ``unconfirmed_messages`` counts the publishes that had left for the server and that no reply from it confirms:
    each was either processed or lost, and only the caller can find out which.
    """

    def __init__(self, reason: str, unconfirmed_messages: int = 0) -> None:
        super().__init__(reason, unconfirmed_messages)
        self.reason, self.unconfirmed_messages = reason, unconfirmed_messages

    def __str__(self) -> str:
        if not self.unconfirmed_messages:
            return self.reason
        return f"{self.reason} ({self.unconfirmed_messages} published messages are unconfirmed)"


class NoServersAvailable(ConnectionLost):
    """Every server was tried as often as allowed; ``failures`` has the last error of each, by address."""

    def __init__(self, failures: dict[str, str]) -> None:
        reason = "; ".join(f"{server}: {failure}" for server, failure in failures.items())
        super().__init__(f"no NATS server could be reached: {reason}")
        self.args = (failures,)
        self.failures = failures


class RequestTimeout(NetworkError, TimeoutError):
    """No answer arrived in time. The request may or may not have been carried out.

    Unless ``was_sent`` is False: then all the time went by waiting for room in the send buffer, and nothing was sent.
    """

    def __init__(self, what: str, timeout_s: float, was_sent: bool = True) -> None:
        super().__init__(what, timeout_s, was_sent)
        self.what, self.timeout_s, self.was_sent = what, timeout_s, was_sent

    def __str__(self) -> str:
        if not self.was_sent:
            return f"{self.what}: no room in the send buffer within {self.timeout_s:g} s; nothing was sent"
        return f"{self.what}: no answer within {self.timeout_s:g} s"


class CommandInDoubt(RequestTimeout):
    """No answer to a command came in time: its events are stored, or will be, or not.

    Call again with the same ``command_id``: a command that was decided is answered with the reply of the first time.
    """

    def __init__(self, command: str, command_id: str, timeout_s: float) -> None:
        super().__init__(f"command {command!r}", timeout_s)
        self.args = (command, command_id, timeout_s)
        self.command, self.command_id = command, command_id

    def __str__(self) -> str:
        return (
            f"command {self.command!r}: no answer within {self.timeout_s:g} s, so it may or may not be decided. "
            f"Call again with command_id={self.command_id!r}: what was decided is answered again, not decided twice"
        )


class WorkflowNotOver(RequestTimeout):
    """A run of a workflow did not end within the time that the caller gave it.

    ``status`` is the last one that the server reported: None where there was no run, ``"unknown"`` without a report.
    """

    def __init__(self, workflow: str, key: str, timeout_s: float, status: str | None) -> None:
        super().__init__(f"run {key!r} of workflow {workflow!r}", timeout_s)
        self.args = (workflow, key, timeout_s, status)
        self.workflow, self.key, self.status = workflow, key, status

    def __str__(self) -> str:
        status = {None: "it has not begun", "unknown": "the server did not report its status"}.get(
            self.status, f"it is {self.status}"
        )
        return f"run {self.key!r} of workflow {self.workflow!r} is not over after {self.timeout_s:g} s: {status}"


class BufferFull(NetworkError):
    """The message was not accepted: the network does not take what is published, and the send buffer is full."""

    def __init__(self, buffered_bytes: int, limit_bytes: int) -> None:
        super().__init__(buffered_bytes, limit_bytes)
        self.buffered_bytes, self.limit_bytes = buffered_bytes, limit_bytes

    def __str__(self) -> str:
        return (
            f"{self.buffered_bytes} of {self.limit_bytes} bytes wait for the network: the message was not accepted; "
            "wait for room or raise send_buffer_bytes"
        )


class WindowFull(NetworkError):
    """The message was not accepted: ``max_outstanding`` earlier ones still wait for their acknowledgement."""

    def __init__(self, max_outstanding: int) -> None:
        super().__init__(max_outstanding)
        self.max_outstanding = max_outstanding

    def __str__(self) -> str:
        return (
            f"{self.max_outstanding} messages wait for their acknowledgement: the message was not accepted; wait for "
            "some of them, or raise max_outstanding"
        )


class NoResponders(NetworkError):
    """Nobody is subscribed to the request's subject, so no answer can come."""

    def __init__(self, subject: str) -> None:
        super().__init__(subject)
        self.subject = subject

    def __str__(self) -> str:
        return f"no responders on {self.subject!r}: nothing is subscribed to it"


class NoWorkers(NoResponders):
    """No worker serves the command right now. Nothing was decided."""

    def __init__(self, app: str, command: str, subject: str) -> None:
        super().__init__(subject)
        self.args = (app, command, subject)
        self.app, self.command = app, command

    def __str__(self) -> str:
        return (
            f"command {self.command!r}: no worker of app {self.app!r} is running (nothing is subscribed to "
            f"{self.subject!r}). Start one: `await app.run(servers)`, or `jetspark run module:app`"
        )


class WorkersBusy(NetworkError):
    """A worker takes no more commands: as many as it may hold are waiting. Nothing was decided; call again soon."""

    def __init__(self, command: str, waiting: int) -> None:
        super().__init__(command, waiting)
        self.command, self.waiting = command, waiting

    def __str__(self) -> str:
        return (
            f"command {self.command!r}: the worker is busy, {self.waiting} commands are waiting: nothing was decided. "
            "Call again in a moment, or run more workers"
        )


class AuthenticationFailed(ServerFault):
    """The server did not accept our credentials. Retrying with the same ones will not help."""

    def __init__(self, server: str, reason: str) -> None:
        super().__init__(server, reason)
        self.server, self.reason = server, reason

    def __str__(self) -> str:
        return f"{self.server} refused the credentials: {self.reason}"


class PermissionDenied(ServerFault, PermissionError):
    """The server does not let this user publish or subscribe to ``subject``.

    ``operation`` is ``"publish"`` or ``"subscribe"``.
    """

    def __init__(self, operation: str, subject: str) -> None:
        super().__init__(operation, subject)
        self.operation, self.subject = operation, subject

    def __str__(self) -> str:
        return f"permission denied: this user may not {self.operation} to {self.subject!r}"


class ServerRefused(ServerFault):
    """The server reported an error that belongs to the connection, not to one operation; ``text`` is its wording."""

    def __init__(self, server: str, text: str) -> None:
        super().__init__(server, text)
        self.server, self.text = server, text

    def __str__(self) -> str:
        return f"{self.server}: {self.text}"

    @property
    def may_pass(self) -> bool:
        return True


class ServerError(ServerFault):
    """JetStream refused a request. ``err_code`` says exactly why; the ones users act on have a class of their own.

    ``stream`` and ``consumer`` are the names of those the request was about; empty where it was about none, and where
    the server does not say: of a message that it refuses in the middle of a fast batch it names no stream.
    """

    def __init__(self, code: int, err_code: int, description: str, stream: str = "", consumer: str = "") -> None:
        super().__init__(code, err_code, description, stream, consumer)
        self.code, self.err_code, self.description = code, err_code, description
        self.stream, self.consumer = stream, consumer

    @property
    def bucket(self) -> str:
        """The name of the key-value bucket or object store whose stream this is about; empty if it is neither."""
        kind, _, name = self.stream.partition("_")
        return name if kind in ("KV", "OBJ") else ""

    def __str__(self) -> str:
        about = f"{self._about}: " if self._about else ""
        return f"{about}{self.description} ({self._codes})"

    @property
    def _codes(self) -> str:
        return f"code {self.code}, err_code {self.err_code}"

    @property
    def _about(self) -> str:
        of_stream = f"stream {self.stream!r}" if self.stream else ""
        if not self.consumer:
            return of_stream
        return f"consumer {self.consumer!r}{' of ' if of_stream else ''}{of_stream}"

    @property
    def may_pass(self) -> bool:
        # Codes as of HTTP: no answer from the leader, an id that is just being stored, too many requests, nobody leads
        # or no room. 500 is what configurations are refused with, so it is final.
        return self.code in (408, 409, 429, 503)


class StreamNotFound(ServerError):
    """There is no stream of that name; ``stream`` is the name. Of a bucket or object store, ``bucket`` is its own."""

    def __str__(self) -> str:
        if not self.stream:
            return super().__str__()
        kind = "object store" if self.stream.startswith("OBJ_") else "bucket"
        what = f"{kind} {self.bucket!r}, which is the stream {self.stream!r}" if self.bucket else self._about
        return f"there is no {what}: {self.description} ({self._codes})"


class StreamNameInUse(ServerError):
    """A stream of that name exists with another configuration; update it, or get it."""


class ConsumerNotFound(ServerError):
    """There is no consumer of that name, or no more; ``consumer`` is the name, ``stream`` where it was looked for."""


class ConsumerNameInUse(ServerError):
    """A consumer of that name exists with another configuration; update it, or get it."""


class MessageNotFound(ServerError):
    """There is no message with that sequence, or none on that subject; ``wanted`` says which was asked for."""

    def __init__(
        self,
        code: int,
        err_code: int,
        description: str,
        stream: str = "",
        consumer: str = "",
        wanted: str = "",
    ) -> None:
        super().__init__(code, err_code, description, stream, consumer)
        self.args = (code, err_code, description, stream, consumer, wanted)
        self.wanted = wanted

    @property
    def _about(self) -> str:
        return ", ".join(part for part in (super()._about, self.wanted) if part)


class WrongLastSequence(ServerError):
    """The stream or subject has moved on since: somebody else wrote first. Read again, and decide again."""


class AtomicPublishDisabled(ServerError):
    """The stream does not allow atomic batches: nothing was stored."""

    def __str__(self) -> str:
        return f"{super().__str__()}; turn it on with js.update_stream(StreamConfig(name=..., allow_atomic=True))"


class BatchIncomplete(ServerError):
    """The server no longer has all of an atomic batch: nothing of it is stored.

    It was idle for too long, its leader changed, the server was restarted, or a message was lost. Send it again.
    """

    @property
    def may_pass(self) -> bool:
        return True


class BatchTooLarge(ServerError):
    """An atomic batch has more messages than the server allows: nothing of it is stored. Split it."""

    @property
    def limit(self) -> int | None:
        """How many it allows; None when it does not say."""
        number = self.description.rpartition(":")[2].strip()
        return int(number) if number.isdecimal() else None


class DuplicateMessageId(ServerError):
    """A message of an atomic batch has an id the stream knows already: nothing of the batch is stored.

    This is also what sending a batch again is answered with when it had been stored.
    """


class TooManyBatches(ServerError):
    """As many batches are open as the server allows, for the stream or in all: nothing was stored. Try again later."""

    @property
    def may_pass(self) -> bool:
        return True


class JetStreamNotEnabled(ServerError):
    """JetStream is switched off, on this server (``err_code`` 10076) or for this account (10039)."""

    def __str__(self) -> str:
        if self.err_code == Code.NOT_ENABLED_FOR_ACCOUNT:
            remedy = "put `jetstream: enabled` into the account's configuration, or use an account that has it"
        else:
            remedy = "start nats-server with -js, or put `jetstream {}` into its configuration"
        return f"{super().__str__()}; {remedy}"

    @property
    def may_pass(self) -> bool:
        return False


class InsufficientResources(ServerError):
    """A limit is reached: of the server, of the account, or of both together. The message says which, and what helps.

    A disk that is full before the server's limit is reached is none of these: then nats-server 2.15 does not answer a
    publish at all, which becomes a ``RequestTimeout``, and says in its log why.
    """

    def __str__(self) -> str:
        remedy = _LIMITS.get(self.err_code)
        return f"{super().__str__()}; {remedy}" if remedy else super().__str__()


_LESS = "delete or purge what is not needed, give streams limits (max_bytes, max_age_s)"
# By err_code: which limit that is, and what helps.
_LIMITS: dict[int, str] = {
    Code.ACCOUNT_RESOURCES_EXCEEDED: (
        f"the account's streams hold all that it may store (max_store, max_memory): {_LESS}, or raise the limit"
    ),
    Code.INSUFFICIENT_RESOURCES: (
        "the streams of all accounts hold all that the server may store (max_file_store or max_memory_store in its "
        f"`jetstream` block; by default three quarters of the disk free at its start): {_LESS}, or raise the limit"
    ),
    Code.MAXIMUM_CONSUMERS: (
        "the account, or the stream, may have no more consumers (max_consumers): delete some, or raise the limit"
    ),
    Code.MAXIMUM_STREAMS: "the account may have no more streams (max_streams): delete some, or raise the limit",
    Code.MEMORY_EXCEEDED: (
        "max_bytes is set aside at once, and is more than is left of the server's max_memory_store or of the account's "
        "max_memory: lower it, or raise those"
    ),
    Code.STORAGE_EXCEEDED: (
        "max_bytes is set aside at once, and is more than is left of the server's max_file_store or of the account's "
        "max_store: lower it, or raise those"
    ),
}


class BatchPublishDisabled(ServerError):
    """The stream does not allow fast ingest: nothing was stored."""

    def __str__(self) -> str:
        return f"{super().__str__()}; turn it on with js.update_stream(StreamConfig(name=..., allow_batched=True))"


class BatchUnknown(ServerError):
    """The server knows no such fast batch: it was idle for too long, or the server was restarted."""

    @property
    def may_pass(self) -> bool:
        return True


class BatchCutShort(ServerFault):
    """The server ended a fast batch early. The first ``stored`` messages are stored, and none after them."""

    def __init__(self, batch_id: str, stored: int, reason: str) -> None:
        super().__init__(batch_id, stored, reason)
        self.batch_id, self.stored, self.reason = batch_id, stored, reason

    def __str__(self) -> str:
        return f"batch {self.batch_id!r} was ended after {self.stored} stored messages: {self.reason}"

    @property
    def may_pass(self) -> bool:
        # It says how far the batch came; its cause says why no further.
        return self.__cause__.may_pass if isinstance(self.__cause__, JetSparkError) else True


class BatchInDoubt(NetworkError):
    """Nobody knows how a batch ended: ``reason`` says why.

    The first ``stored`` messages are stored for sure; each of the others may be stored or not.
    """

    def __init__(self, batch_id: str, reason: str, stored: int = 0) -> None:
        super().__init__(batch_id, reason, stored)
        self.batch_id, self.reason, self.stored = batch_id, reason, stored

    def __str__(self) -> str:
        known = f"the first {self.stored} messages are stored, " if self.stored else ""
        return f"batch {self.batch_id!r}: {known}nobody knows about the rest: {self.reason}"

    @property
    def may_pass(self) -> bool:
        # It says how far the batch came; its cause says why no further.
        return self.__cause__.may_pass if isinstance(self.__cause__, JetSparkError) else True


class KeyNotFound(DataError, KeyError):
    """The key has no value: it never had one, or it was deleted."""

    def __init__(self, bucket: str, key: str) -> None:
        super().__init__(bucket, key)
        self.bucket, self.key = bucket, key

    def __str__(self) -> str:
        return f"no value for {self.key!r} in bucket {self.bucket!r}"


class Conflict(DataError):
    """Somebody else wrote first, so nothing was written. Read ``keys`` again, and decide again."""

    def __init__(self, bucket: str, keys: tuple[str, ...]) -> None:
        super().__init__(bucket, keys)
        self.bucket, self.keys = bucket, keys

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.keys))
        return f"{names} in bucket {self.bucket!r} changed since it was read: nothing was written"


class KeyExists(Conflict):
    """The key was to be new and has a value already."""

    def __str__(self) -> str:
        return f"{', '.join(map(repr, self.keys))} in bucket {self.bucket!r} already has a value"


class BoundaryConflict(Conflict):
    """Others wrote inside the boundary of a command each time it had been decided. Nothing was stored; call again."""

    def __init__(self, stream: str, keys: tuple[str, ...], tries: int) -> None:
        super().__init__(stream, tuple(keys))
        self.args = (stream, tuple(keys), tries)
        self.stream, self.boundary, self.tries = stream, self.keys, tries

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.boundary))
        return (
            f"stream {self.stream!r}: {names} changed before the events could be stored, {self.tries} times: nothing "
            "was stored. Call again with the same command_id, or read a narrower boundary"
        )

    @property
    def may_pass(self) -> bool:
        return True


class WrongVersion(Conflict):
    """The boundary of a command has an event after ``expected_version``. Nothing was stored; look again, and decide."""

    def __init__(self, stream: str, keys: tuple[str, ...], expected: int, found: int) -> None:
        super().__init__(stream, tuple(keys))
        self.args = (stream, tuple(keys), expected, found)
        self.stream, self.boundary, self.expected, self.found = stream, self.keys, expected, found

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.boundary))
        return (
            f"stream {self.stream!r}: {names} has an event with sequence {self.found}, after "
            f"expected_version={self.expected}: nothing was stored"
        )


class CommandRefused(DataError):
    """A command was decided on, and the decision is no: ``reason`` says why. Nothing was stored.

    ``decide`` raises it, as ``jetspark.app.Refused``, and ``call`` does on the caller's side. A refusal is not
    recorded: the same command, called again later, is decided anew.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return str(self.reason)


class ObjectNotFound(DataError, KeyError):
    """There is no object of that name: there never was one, or it was deleted."""

    def __init__(self, bucket: str, name: str) -> None:
        super().__init__(bucket, name)
        self.bucket, self.name = bucket, name

    def __str__(self) -> str:
        return f"no object {self.name!r} in bucket {self.bucket!r}"


class DigestMismatch(DataError):
    """The bytes read of an object are not those that were put: ``reason`` says what differs. Discard them all."""

    def __init__(self, bucket: str, name: str, reason: str) -> None:
        super().__init__(bucket, name, reason)
        self.bucket, self.name, self.reason = bucket, name, reason

    def __str__(self) -> str:
        return f"object {self.name!r} in bucket {self.bucket!r} is damaged: {self.reason}"


class ContractViolation(DataError):
    """A message is not what the contract of its event says. It never will be: put it aside, and go on.

    ``field`` names what is wrong (empty for the whole message), ``rule`` the rule that it breaks.
    """

    def __init__(
        self, subject: str, event_type: str = "", version: int | None = None, field: str = "", rule: str = ""
    ) -> None:
        super().__init__(subject, event_type, version, field, rule)
        self.subject, self.event_type, self.version, self.field, self.rule = subject, event_type, version, field, rule

    @property
    def kind(self) -> str:
        """``"semantic"`` if the message has the right form and a value that is not allowed, else ``"structural"``."""
        return "structural"

    def __str__(self) -> str:
        what = f", event {self.event_type!r}" if self.event_type else ""
        which = "" if self.version is None else f" version {self.version}"
        where = f", field {self.field!r}" if self.field else ""
        return f"message on {self.subject!r}{what}{which}{where}: {self.rule}"


class NotJson(ContractViolation):
    """The body of a message is not JSON."""


class NotAnEnvelope(ContractViolation):
    """The body of a message is JSON, and lacks what every event says of itself, such as its type and id."""


class UnknownEventType(ContractViolation):
    """Nobody declared the type of an event; ``rule`` lists the known ones."""


class UnknownEventVersion(ContractViolation):
    """The type of an event is known, and its version is not: no class has it, and no upcast starts from it."""


class MissingField(ContractViolation):
    """A field that the contract requires is not there."""


class WrongFieldType(ContractViolation):
    """A field has a value of another type than the contract says."""


class BrokenRule(ContractViolation):
    """A field has the right type, and a value that the contract does not allow."""

    @property
    def kind(self) -> str:
        return "semantic"


class UpcastFailed(ContractViolation):
    """The function that should make a newer version of an event raised an error, which is ``__cause__``."""


class ContractFrozen(DataError):
    """A type and version of an event is recorded already, with another meaning; ``changes`` says where."""

    def __init__(self, event_type: str, version: int, changes: tuple[str, ...]) -> None:
        super().__init__(event_type, version, changes)
        self.event_type, self.version, self.changes = event_type, version, changes

    def __str__(self) -> str:
        listed = "\n".join(self.changes)
        return (
            f"event {self.event_type!r} version {self.version} is recorded with another meaning, and a version never "
            f"changes; give the new one another version\n{listed}"
        )


class TopologyDrift(DataError):
    """The server is not as the application declares; ``steps`` is the difference. Apply it, or change the code."""

    def __init__(self, app: str, steps: tuple[str, ...]) -> None:
        super().__init__(app, steps)
        self.app, self.steps = app, steps

    def __str__(self) -> str:
        listed = "\n".join(self.steps)
        return f"the server is not as app {self.app!r} declares; see `jetspark plan`, then `jetspark apply`\n{listed}"


class JetStreamUnavailable(NetworkError):
    """Nobody answers, so nothing was done: JetStream is off, no stream stores the subject, or it has no leader.

    ``reason`` says which of them it is, as far as what the server says of itself tells, and what helps.
    """

    def __init__(self, subject: str, reason: str = "") -> None:
        super().__init__(subject, reason)
        self.subject, self.reason = subject, reason

    def __str__(self) -> str:
        guess = "JetStream is not enabled, no stream stores this subject, or a leader is being elected"
        return f"nobody answers on {self.subject!r}: {self.reason or guess}"


class ProjectionDiffers(DataError):
    """The state of a projection is not what its events make of it; ``differences`` names some of the keys."""

    def __init__(self, projection: str, bucket: str, count: int, differences: tuple[str, ...]) -> None:
        super().__init__(projection, bucket, count, differences)
        self.projection, self.bucket, self.count, self.differences = projection, bucket, count, differences

    def __str__(self) -> str:
        more = f"; and {self.count - len(self.differences)} more" if self.count > len(self.differences) else ""
        return (
            f"projection {self.projection!r}: {self.count} keys of bucket {self.bucket} are not what their events make "
            f"of them: {'; '.join(self.differences)}{more}"
        )


class StateParked(DataError):
    """A key of a projection does not go on, because an event could not be applied to it. Rebuild the key.

    ``sequence`` is that of the event; 0 if it was not an event.
    """

    def __init__(self, projection: str, key: str, sequence: int, reason: str) -> None:
        super().__init__(projection, key, sequence, reason)
        self.projection, self.key, self.sequence, self.reason = projection, key, sequence, reason

    def __str__(self) -> str:
        where = f" at event {self.sequence}" if self.sequence else ""
        return f"key {self.key!r} of projection {self.projection!r} is parked{where}: {self.reason}"


class DataLoss(DataError):
    """Messages that were to be read are gone from the stream: its limits evicted them, or it was purged.

    ``remedy`` says what helps where they are read; it may be empty.
    """

    def __init__(self, stream: str, wanted: int, first: int, remedy: str = "") -> None:
        super().__init__(stream, wanted, first, remedy)
        self.stream, self.wanted, self.first, self.remedy = stream, wanted, first, remedy

    def __str__(self) -> str:
        lost = (
            f"stream {self.stream!r}: sequence {self.wanted} is wanted and the first there is is {self.first}, "
            f"so {self.first - self.wanted} sequences are gone (limits, a purge, or deletes)"
        )
        return f"{lost}; {self.remedy}" if self.remedy else lost


class StreamRecreated(DataError):
    """The stream has the name of the one that was read before, and is another."""

    def __init__(self, stream: str, known: str, found: str, remedy: str = "start with a new checkpoint") -> None:
        super().__init__(stream, known, found, remedy)
        self.stream, self.known, self.found, self.remedy = stream, known, found, remedy

    def __str__(self) -> str:
        return (
            f"stream {self.stream!r} was deleted and created anew: what was read is of the one created at {self.known},"
            f" and this one was created at {self.found}; {self.remedy}"
        )


class StreamWentBack(DataError):
    """The stream ends before the offset: it was restored from something older, or the offset is not of this stream."""

    def __init__(self, stream: str, wanted: int, end: int) -> None:
        super().__init__(stream, wanted, end)
        self.stream, self.wanted, self.end = stream, wanted, end

    def __str__(self) -> str:
        return (
            f"stream {self.stream!r}: sequence {self.wanted} is wanted and the stream's next one is {self.end}; "
            "it was restored from an older state, or the offset is another stream's"
        )


class BatcherTimeout(NetworkError, TimeoutError):
    """An add, a flush or a shutdown took longer than its ``timeout``."""

    def __init__(self, name: str, what: str, timeout_s: float) -> None:
        super().__init__(name, what, timeout_s)
        self.name, self.what, self.timeout_s = name, what, timeout_s

    def __str__(self) -> str:
        return f"batcher {self.name!r}: {self.what} after {self.timeout_s:g} s"


class FlushTimeout(NetworkError, TimeoutError):
    """The sink did not finish a write in time. Nobody knows what of the batch it took, and it may still take more."""

    def __init__(self, name: str, items: int, timeout_s: float) -> None:
        super().__init__(name, items, timeout_s)
        self.name, self.items, self.timeout_s = name, items, timeout_s

    def __str__(self) -> str:
        return f"batcher {self.name!r}: a write of {self.items} items took longer than flush_timeout={self.timeout_s:g}"


class HandlerStalled(NetworkError):
    """A worker held events of a handler that made no progress, and has ended so that a supervisor starts another one.

    With ``still_runs`` the handler's own code has not ended either, however often it was cancelled: only the end of the
    process ends it.
    """

    def __init__(self, handler: str, what: str, still_runs: bool = False) -> None:
        super().__init__(handler, what, still_runs)
        self.handler, self.what, self.still_runs = handler, what, still_runs

    def __str__(self) -> str:
        more = "; it was cancelled and still runs, until the process ends" if self.still_runs else ""
        return f"handler {self.handler!r} has stalled: {self.what}{more}"


class DroppedOnShutdown(NetworkError):
    """The item was accepted, and not known to be written when the time of the shutdown was over.

    ``state`` is "waiting", or "being written" when the sink had it. It may be written yet, while the process lives.
    """

    def __init__(self, name: str, state: str) -> None:
        super().__init__(name, state)
        self.name, self.state = name, state

    def __str__(self) -> str:
        return f"batcher {self.name!r}: the time of the shutdown was over while the item was {self.state}"

    @property
    def may_pass(self) -> bool:
        return False


class CircuitOpen(NetworkError):
    """The sink was not tried: it failed too often lately. It is tried again in ``retry_in_s`` seconds."""

    def __init__(self, retry_in_s: float) -> None:
        super().__init__(retry_in_s)
        self.retry_in_s = retry_in_s

    def __str__(self) -> str:
        return f"the sink failed too often and is left alone for another {self.retry_in_s:.3g} s"


class FeatureUnavailable(ServerFault):
    """The server is too old for ``feature``."""

    def __init__(self, feature: str, needed: str, present: str) -> None:
        super().__init__(feature, needed, present)
        self.feature, self.needed, self.present = feature, needed, present

    def __str__(self) -> str:
        return f"{self.feature} needs nats-server {self.needed} or newer, and this is {self.present}"


class EmbeddedServerError(ServerFault):
    """A nats-server started by JetSpark could not be found, did not start, or died; ``log`` is what it last said."""

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(reason, log)
        self.reason, self.log = reason, log

    def __str__(self) -> str:
        return f"{self.reason}\n--- nats-server log ---\n{self.log}" if self.log else self.reason


class CommandFailed(ServerFault):
    """A worker could not decide a command, and would not next time: its code, or the history it reads, is wrong.

    Nothing was stored.
    """

    def __init__(self, command: str, reason: str) -> None:
        super().__init__(command, reason)
        self.command, self.reason = command, reason

    def __str__(self) -> str:
        return f"command {self.command!r}: {self.reason}"
