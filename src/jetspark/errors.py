"""Every exception that JetSpark raises, as one tree. The first level of the tree names the party that has to act.

::

    JetSparkError
    ├── CallerError                         the program: change the call
    │   ├── ConfigError (ValueError)            a value we cannot use
    │   │   ├── InvalidSubject                  ... a subject NATS does not allow
    │   │   ├── InvalidEvent                    ... an event that its own contract does not allow
    │   │   ├── InvalidRows                     ... rows of a frame that their contract does not allow as events
    │   │   ├── InvalidHeader                   ... a header that would break the frame
    │   │   └── PayloadTooLarge                 ... more bytes than the server accepts
    │   ├── TopologyRefused                     changes to the server that lose something, or that it cannot make
    │   ├── UsageError (RuntimeError)           a call at the wrong time
    │   │   ├── ConnectionClosed                ... use after close() or drain()
    │   │   ├── NotAwaited (AttributeError)     ... what connect() returned was used, and not awaited
    │   │   └── BatcherClosed                   ... add() after shutdown()
    │   │       └── BatcherBroken               ... or after the batcher itself failed
    │   └── MissingExtra (ImportError)          an optional dependency is not installed
    ├── NetworkError                        no one: the other side is away or too slow right now        may pass
    │   ├── ConnectionLost (ConnectionError)    the connection went away
    │   │   └── NoServersAvailable              ... and none of the servers could be reached
    │   ├── RequestTimeout (TimeoutError)       no answer in time
    │   │   ├── CommandInDoubt                  ... to a command, which may have been decided: ask again with its id
    │   │   └── WorkflowNotOver                 ... a run of a workflow did not end within the caller's time
    │   ├── BufferFull                          the network takes nothing, and the send buffer is full
    │   ├── WindowFull                          as many messages as allowed wait for their acknowledgement
    │   ├── NoResponders                        the subject has no subscriber
    │   │   └── NoWorkers                       ... and it is the subject of a command
    │   ├── WorkersBusy                         the worker that got a command has its queue full: nothing was decided
    │   ├── JetStreamUnavailable                JetStream, or this stream, has no server that answers
    │   ├── StoreUnavailable                    the object store of an archive does not answer, or is overloaded
    │   ├── BatchInDoubt                        the end of a batch is unknown: its messages may be stored or not
    │   ├── BatcherTimeout (TimeoutError)       the sink is too slow for the caller's timeout; the call had no effect
    │   ├── FlushTimeout (TimeoutError)         a write took too long; any part of its items may be stored
    │   ├── CircuitOpen                         the sink failed so often that it is not tried for a while
    │   ├── HandlerStalled                      a worker held events without progress, and has ended: start another
    │   └── DroppedOnShutdown                   the sink was not done when the shutdown's time was over     (final)
    ├── ServerFault                         the operator: the server refuses, or cannot
    │   ├── ProtocolError                       bytes that are not the NATS protocol
    │   ├── AuthenticationFailed                it did not accept our credentials
    │   ├── PermissionDenied (PermissionError)  we may not use this subject
    │   ├── FeatureUnavailable                  it is too old for something that was asked for
    │   ├── ServerRefused                       any other -ERR, in its own words                        may pass
    │   ├── BatchCutShort                       it ended a fast batch early; stored says how far it came    may pass
    │   ├── EmbeddedServerError                 a nats-server of our own did not start or died
    │   ├── StoreRefused                        the store of an archive refuses: permissions, no bucket, a full disk
    │   ├── CommandFailed                       a worker could not decide a command: its code or its history is wrong
    │   └── ServerError                         JetStream refused a request     may pass: codes 408, 409, 429, 503
    │       ├── StreamNotFound                  ... the stream does not exist
    │       ├── StreamNameInUse                 ... one of that name exists, with another configuration
    │       ├── ConsumerNotFound                ... the consumer does not exist
    │       ├── ConsumerNameInUse               ... one of that name exists, with another configuration
    │       ├── MessageNotFound                 ... the message does not exist
    │       ├── WrongLastSequence               ... another writer was first
    │       ├── AtomicPublishDisabled           ... the stream does not allow atomic batches
    │       ├── BatchIncomplete                 ... it lost an atomic batch: idle, a restart, a lost message    may pass
    │       ├── BatchTooLarge                   ... more messages than an atomic batch may have; limit says how many
    │       ├── DuplicateMessageId              ... a message of the atomic batch is stored already
    │       ├── TooManyBatches                  ... as many batches as it allows are open                       may pass
    │       ├── BatchPublishDisabled            ... the stream does not allow fast ingest
    │       ├── BatchUnknown                    ... it does not know the fast batch (any more)                  may pass
    │       ├── JetStreamNotEnabled             ... JetStream is off, for the server or the account             (final)
    │       └── InsufficientResources           ... a limit of the server or the account is reached
    └── DataError                           the data: the stored data differ from what the call expected
        ├── KeyNotFound (KeyError)              the key has no value
        ├── Conflict                            another writer was first; keys says where
        │   ├── KeyExists                       ... and the key was to be new
        │   ├── BoundaryConflict                ... inside the boundary of a command, as often as it was decided
        │   └── WrongVersion                    ... inside the boundary of a command, after its expected_version
        ├── ArchiveMoved                        another writer has committed to an archive: nothing was changed
        ├── ArchiveDamaged                      a table of an archive is not as JetSpark writes it
        ├── CommandRefused                      a command was decided on, and the decision is no
        ├── ObjectNotFound (KeyError)           the object does not exist
        ├── DigestMismatch                      an object's bytes differ from those put
        ├── ContractViolation                   a message is not what the contract of its event says
        │   ├── NotJson                         ... its body is not JSON
        │   ├── NotAnEnvelope                   ... its body is JSON, and no CloudEvent
        │   ├── UnknownEventType                ... its type is not declared
        │   ├── UnknownEventVersion             ... its type is known, and its version is not
        │   ├── MissingField                    ... a field that its contract requires is not there
        │   ├── WrongFieldType                  ... a field has a value of another type
        │   ├── BrokenRule                      ... a field has the right type and a value that is not allowed
        │   └── UpcastFailed                    ... the function that should make it a newer version raised an error
        ├── UnreadableEvent                     a message that a read of typed events was to return is not a valid event
        ├── ContractFrozen                      a type and version is recorded already, and means something else
        ├── StateParked                         a projected state is stuck: an event could not be applied
        ├── TopologyDrift                       the server is not as the application declares
        ├── ProjectionDiffers                   the stored state of a projection differs from a fold of its events
        ├── DataLoss                            messages that were to be read are gone
        ├── StreamRecreated                     the stream was deleted and re-created since it was read
        └── StreamWentBack                      the stream ends before the position that was read

``may_pass`` of an error answers the one question of every retry: may the same call succeed later although neither
the program nor the server is changed? It does not say that a repetition is *safe*: a publish that timed out may be
stored.

Facts are attributes, so that callers never parse messages. Every class survives ``pickle``, because Spark carries
 errors between processes: ``args`` alone rebuilds an error. A cause that is a JetSparkError is carried along, because
 the ``may_pass`` of a batch depends on it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from jetspark.codes import Code

__all__ = [
    "ArchiveDamaged",
    "ArchiveMoved",
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
    "InvalidRows",
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
    "StoreRefused",
    "StoreUnavailable",
    "StreamNameInUse",
    "StreamNotFound",
    "StreamRecreated",
    "StreamWentBack",
    "TooManyBatches",
    "TopologyDrift",
    "TopologyRefused",
    "UnknownEventType",
    "UnknownEventVersion",
    "UnreadableEvent",
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
    """The root of every error that JetSpark raises.

    A class whose facts are only stored is a dataclass; ``args`` are then its fields, in order.
    """

    @property
    def may_pass(self) -> bool:
        """True if the same call may succeed later, although neither the program nor the server is changed.

        A repetition may still be unsafe: an operation that timed out may have been done.
        """
        return False

    def __post_init__(self) -> None:
        # Only dataclasses get here. Keyword arguments would be missing in the `args` that Python sets, and in a pickle.
        self.args = tuple(getattr(self, each.name) for each in fields(self))  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        # Python's own state leaves causes out. Other kinds of causes may not be picklable, and `may_pass` ignores them.
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
    """The other side (a server, the network, or a batcher's sink) is away or too slow right now.

    It may pass, but for :class:`DroppedOnShutdown`, and for a :class:`BatchInDoubt` whose cause may not.
    """

    @property
    def may_pass(self) -> bool:
        return True


class ServerFault(JetSparkError):
    """The server refuses, or cannot comply: its configuration, its limits or its version have to change."""


class DataError(JetSparkError):
    """The stored data are not as the call expected: read again, then decide again."""


class ConfigError(CallerError, ValueError):
    """A value the caller gave cannot be used; the message names it and what would work."""


@dataclass(eq=False, repr=False)
class InvalidSubject(ConfigError):
    """A subject or filter that NATS does not allow."""

    subject: str
    reason: str

    def __str__(self) -> str:
        return f"subject {self.subject!r}: {self.reason}"


@dataclass(eq=False, repr=False)
class InvalidHeader(ConfigError):
    """A header name or value that would break the frame it travels in."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"header {self.name!r}: {self.reason}"


@dataclass(eq=False, repr=False)
class InvalidEvent(ConfigError):
    """An event that its own contract does not allow; it was not published. ``field`` and ``rule`` say why."""

    event_type: str
    version: int
    field: str
    rule: str

    def __str__(self) -> str:
        where = f", field {self.field!r}" if self.field else ""
        return f"event {self.event_type!r} version {self.version}{where}: {self.rule}; it was not published"


@dataclass(eq=False, repr=False)
class InvalidRows(ConfigError):
    """Rows of a frame that their contract does not allow as events; none of these rows was published.

    ``reasons`` has one text for each field and rule that is broken: how many rows break it, and the first of them.
    """

    where: str
    rows: int
    invalid: int
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"{self.invalid} of {self.rows} rows of {self.where} are not valid events, and none was published: "
            f"{'; '.join(self.reasons)}. Correct or filter such rows, or set invalid=dead_letter to publish the others"
        )


@dataclass(eq=False, repr=False)
class PayloadTooLarge(ConfigError):
    """Headers and payload together exceed the server's ``max_payload``; nothing was sent.

    ``subject`` is there when the message had been accepted before: the server it was accepted for allowed more.
    """

    size_bytes: int
    max_payload_bytes: int
    subject: str = ""

    def __str__(self) -> str:
        to_subject = f" to {self.subject!r}" if self.subject else ""
        return (
            f"message{to_subject} of {self.size_bytes} bytes (headers and payload): the server accepts "
            f"{self.max_payload_bytes}; split it, or raise max_payload in the server's configuration"
        )


@dataclass(eq=False, repr=False)
class TopologyRefused(CallerError):
    """Changes to the server that can lose something, or that it cannot make; ``steps`` says which. Nothing was done."""

    app: str
    steps: tuple[str, ...]

    def __str__(self) -> str:
        listed = "\n".join(self.steps)
        return f"app {self.app!r}: these changes need allow, or are not possible; nothing was done\n{listed}"


class UsageError(CallerError, RuntimeError):
    """A call that makes no sense in the present state."""


class NotAwaited(UsageError, AttributeError):
    """The result of ``connect`` was used as a client. It becomes one when awaited, or entered by ``async with``."""


class ConnectionClosed(UsageError):
    """The batcher's shutdown has begun, so it accepts no more items. The item was not accepted."""


@dataclass(eq=False, repr=False)
class BatcherClosed(UsageError):
    """The batcher accepts nothing more: its shutdown has begun. The item was not accepted."""

    name: str

    def __str__(self) -> str:
        return f"batcher {self.name!r} is shut down: the item was not accepted"


class BatcherBroken(BatcherClosed):
    """The batcher itself failed and cannot recover; create a new one. ``__cause__`` is the failure."""

    def __str__(self) -> str:
        return f"batcher {self.name!r} is broken: what it held is not written, and it accepts nothing more"


@dataclass(eq=False, repr=False)
class MissingExtra(CallerError, ImportError):
    """A feature needs an optional dependency that is not installed."""

    feature: str
    extra: str

    def __str__(self) -> str:
        return f"{self.feature} needs the extra {self.extra!r}: pip install 'jetspark[{self.extra}]'"


class ProtocolError(ServerFault):
    """The peer sent bytes that are not the NATS protocol; the connection is dropped and re-established."""


@dataclass(eq=False, repr=False)
class ConnectionLost(NetworkError, ConnectionError):
    """The connection went away while this operation depended on it.

    ``unconfirmed_messages`` counts the publishes that had left for the server and that no reply from it confirms:
    each was either processed or lost, and only the caller can find out which.
    """

    reason: str
    unconfirmed_messages: int = 0

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


@dataclass(eq=False, repr=False)
class RequestTimeout(NetworkError, TimeoutError):
    """No answer arrived in time. The request may or may not have been carried out.

    Unless ``was_sent`` is False: then all the time went by waiting for room in the send buffer, and nothing was sent.
    """

    what: str
    timeout_s: float
    was_sent: bool = True

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
    """A run of a workflow did not end within the caller's time.

    ``status`` is the last reported status: None if the run does not exist, ``"unknown"`` if no server answered.
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


@dataclass(eq=False, repr=False)
class BufferFull(NetworkError):
    """The message was not accepted: the send buffer is full, because the network takes data too slowly."""

    buffered_bytes: int
    limit_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.buffered_bytes} of {self.limit_bytes} bytes wait for the network: the message was not accepted; "
            "wait for room or raise send_buffer_bytes"
        )


@dataclass(eq=False, repr=False)
class WindowFull(NetworkError):
    """The message was not accepted: ``max_outstanding`` earlier ones still wait for their acknowledgement."""

    max_outstanding: int

    def __str__(self) -> str:
        return (
            f"{self.max_outstanding} messages wait for their acknowledgement: the message was not accepted; wait for "
            "some of them, or raise max_outstanding"
        )


@dataclass(eq=False, repr=False)
class NoResponders(NetworkError):
    """The request's subject has no subscriber, so no answer can come."""

    subject: str

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


@dataclass(eq=False, repr=False)
class WorkersBusy(NetworkError):
    """A worker takes no more commands: as many as it may hold are waiting. Nothing was decided; call again soon."""

    command: str
    waiting: int

    def __str__(self) -> str:
        return (
            f"command {self.command!r}: the worker is busy, {self.waiting} commands are waiting: nothing was decided. "
            "Call again in a moment, or run more workers"
        )


@dataclass(eq=False, repr=False)
class AuthenticationFailed(ServerFault):
    """The server did not accept our credentials. Retrying with the same ones will not help."""

    server: str
    reason: str

    def __str__(self) -> str:
        return f"{self.server} refused the credentials: {self.reason}"


@dataclass(eq=False, repr=False)
class PermissionDenied(ServerFault, PermissionError):
    """The server does not let this user publish or subscribe to ``subject``.

    ``operation`` is ``"publish"`` or ``"subscribe"``.
    """

    operation: str
    subject: str

    def __str__(self) -> str:
        return f"permission denied: this user may not {self.operation} to {self.subject!r}"


@dataclass(eq=False, repr=False)
class ServerRefused(ServerFault):
    """The server reported an error that belongs to the connection, not to one operation; ``text`` is its wording."""

    server: str
    text: str

    def __str__(self) -> str:
        return f"{self.server}: {self.text}"

    @property
    def may_pass(self) -> bool:
        return True


@dataclass(eq=False, repr=False)
class ServerError(ServerFault):
    """JetStream refused a request. ``err_code`` says exactly why; the ones users act on have a class of their own.

    ``stream`` and ``consumer`` are the names of those the request was about; empty where it was about none, and where
    the server does not say: of a message that it refuses in the middle of a fast batch it names no stream.
    """

    code: int
    err_code: int
    description: str
    stream: str = ""
    consumer: str = ""

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
        # Codes as in HTTP: no answer from the leader, an id that is being stored right now, too many requests, no
        # leader or no room. 500 is the code for refused configurations, so it is final.
        return self.code in (408, 409, 429, 503)


class StreamNotFound(ServerError):
    """The stream ``stream`` does not exist. For the stream of a bucket or object store, ``bucket`` is its name."""

    def __str__(self) -> str:
        if not self.stream:
            return super().__str__()
        kind = "object store" if self.stream.startswith("OBJ_") else "bucket"
        what = f"{kind} {self.bucket!r}, which is the stream {self.stream!r}" if self.bucket else self._about
        return f"there is no {what}: {self.description} ({self._codes})"


class StreamNameInUse(ServerError):
    """A stream of that name exists with another configuration; update it, or get it."""


class ConsumerNotFound(ServerError):
    """The consumer ``consumer`` does not exist in ``stream``, or was deleted."""


class ConsumerNameInUse(ServerError):
    """A consumer of that name exists with another configuration; update it, or get it."""


@dataclass(eq=False, repr=False)
class MessageNotFound(ServerError):
    """The stream has no message with that sequence, or none on that subject; ``wanted`` names the request."""

    wanted: str = ""

    @property
    def _about(self) -> str:
        return ", ".join(part for part in (super()._about, self.wanted) if part)


class WrongLastSequence(ServerError):
    """The stream or subject has a newer message than expected: another writer was first. Read again, decide again."""


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
    """The stream, or the server, has its maximum of open batches: nothing was stored. Try again later."""

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

    A disk that fills up before the server's limit is reached does not raise this error: nats-server 2.15 then does not
    answer a publish, which becomes a ``RequestTimeout``, and logs the reason.
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


@dataclass(eq=False, repr=False)
class BatchCutShort(ServerFault):
    """The server ended a fast batch early. The first ``stored`` messages are stored, and none after them.

    In a cluster, the leader may have changed in the meantime. Then some messages after them may be stored as well.
    """

    batch_id: str
    stored: int
    reason: str

    def __str__(self) -> str:
        return f"batch {self.batch_id!r} was ended after {self.stored} stored messages: {self.reason}"

    @property
    def may_pass(self) -> bool:
        # It says how far the batch came; its cause says why no further.
        return self.__cause__.may_pass if isinstance(self.__cause__, JetSparkError) else True


@dataclass(eq=False, repr=False)
class BatchInDoubt(NetworkError):
    """The end of a batch is unknown: ``reason`` says why.

    The first ``stored`` messages are stored for sure; each of the others may be stored or not.
    """

    batch_id: str
    reason: str
    stored: int = 0

    def __str__(self) -> str:
        known = f"the first {self.stored} messages are stored, the rest" if self.stored else "its messages"
        return f"batch {self.batch_id!r}: {known} may or may not be stored: {self.reason}"

    @property
    def may_pass(self) -> bool:
        # It says how far the batch came; its cause says why no further.
        return self.__cause__.may_pass if isinstance(self.__cause__, JetSparkError) else True


@dataclass(eq=False, repr=False)
class KeyNotFound(DataError, KeyError):
    """The key has no value: it never had one, or it was deleted."""

    bucket: str
    key: str

    def __str__(self) -> str:
        return f"no value for {self.key!r} in bucket {self.bucket!r}"


@dataclass(eq=False, repr=False)
class Conflict(DataError):
    """Another writer was first, so nothing was written. Read ``keys`` again, then decide again."""

    bucket: str
    keys: tuple[str, ...]

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


@dataclass(eq=False, repr=False)
class ArchiveMoved(DataError):
    """Another writer has committed to an archive since it was read. Nothing was changed; read its position again."""

    archive: str
    expected: int
    """The position that the commit was made from: the first sequence that the archive did not cover."""
    found: int | None
    """The position of the archive now; None if it is unknown."""

    def __str__(self) -> str:
        now = "elsewhere" if self.found is None else f"at sequence {self.found}"
        return (
            f"archive {self.archive}: it was at sequence {self.expected} and is now {now}, so another writer has "
            "committed to it; nothing was changed. Run one writer for each archive"
        )


@dataclass(eq=False, repr=False)
class ArchiveDamaged(DataError):
    """A table of an archive is not as JetSpark writes it: a file is missing, or another program has changed it."""

    archive: str
    reason: str

    def __str__(self) -> str:
        return f"archive {self.archive}: {self.reason}"


@dataclass(eq=False, repr=False)
class StoreUnavailable(NetworkError):
    """The object store of an archive did not answer, or was overloaded. A write may have happened."""

    uri: str
    reason: str

    def __str__(self) -> str:
        return f"store {self.uri} does not answer: {self.reason}"


@dataclass(eq=False, repr=False)
class StoreRefused(ServerFault):
    """The store of an archive refused: permissions, a missing bucket, a full disk, a wrong key."""

    uri: str
    reason: str

    def __str__(self) -> str:
        return f"store {self.uri} refused: {self.reason}"


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


@dataclass(eq=False, repr=False)
class CommandRefused(DataError):
    """A command was decided on, and the decision is no: ``reason`` says why. Nothing was stored.

    ``decide`` raises it, as ``jetspark.app.Refused``, and ``call`` does on the caller's side. A refusal is not
    recorded: the same command, called again later, is decided again.
    """

    reason: str

    def __str__(self) -> str:
        return str(self.reason)


@dataclass(eq=False, repr=False)
class ObjectNotFound(DataError, KeyError):
    """The object does not exist: it was never put, or it was deleted."""

    bucket: str
    name: str

    def __str__(self) -> str:
        return f"no object {self.name!r} in bucket {self.bucket!r}"


@dataclass(eq=False, repr=False)
class DigestMismatch(DataError):
    """The bytes read differ from the object that was put: ``reason`` says how. Discard all of them."""

    bucket: str
    name: str
    reason: str

    def __str__(self) -> str:
        return f"object {self.name!r} in bucket {self.bucket!r} is damaged: {self.reason}"


@dataclass(eq=False, repr=False)
class ContractViolation(DataError):
    """A message breaks the contract of its event, and always will: store it elsewhere and continue with the next one.

    ``field`` names the faulty field (empty for the whole message), ``rule`` the rule that it breaks.
    """

    subject: str
    event_type: str = ""
    version: int | None = None
    field: str = ""
    rule: str = ""

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
    """The type of an event is not declared; ``rule`` lists the known types."""


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


@dataclass(eq=False, repr=False)
class UnreadableEvent(DataError):
    """A message that a read of typed events was to return as a row is not a valid event of its type.

    ``reason`` is a :class:`ContractViolation` in words.
    """

    stream: str
    sequence: int
    subject: str
    reason: str

    def __str__(self) -> str:
        return (
            f"stream {self.stream!r}, sequence {self.sequence}, subject {self.subject!r}: {self.reason}. Repair the "
            "contract, such as by an upcast; or set unreadable='keep' to read such messages as rows with their reason, "
            "or 'drop' to leave them out and count them"
        )


@dataclass(eq=False, repr=False)
class ContractFrozen(DataError):
    """A type and version of an event is recorded already, with another meaning; ``changes`` says where."""

    event_type: str
    version: int
    changes: tuple[str, ...]

    def __str__(self) -> str:
        listed = "\n".join(self.changes)
        return (
            f"event {self.event_type!r} version {self.version} is recorded with another meaning, and a version never "
            f"changes; give the new one another version\n{listed}"
        )


@dataclass(eq=False, repr=False)
class TopologyDrift(DataError):
    """The server is not as the application declares; ``steps`` is the difference. Apply it, or change the code."""

    app: str
    steps: tuple[str, ...]

    def __str__(self) -> str:
        listed = "\n".join(self.steps)
        return f"the server is not as app {self.app!r} declares; see `jetspark plan`, then `jetspark apply`\n{listed}"


@dataclass(eq=False, repr=False)
class JetStreamUnavailable(NetworkError):
    """JetStream did not answer, so nothing was done: it is off, no stream stores the subject, or it has no leader.

    ``reason`` names the cause, as far as the server's INFO tells it, and a remedy.
    """

    subject: str
    reason: str = ""

    def __str__(self) -> str:
        guess = "JetStream is not enabled, no stream stores this subject, or a leader is being elected"
        return f"no answer on {self.subject!r}: {self.reason or guess}"


@dataclass(eq=False, repr=False)
class ProjectionDiffers(DataError):
    """The stored state of a projection differs from a fold of its events; ``differences`` names some of the keys."""

    projection: str
    bucket: str
    count: int
    differences: tuple[str, ...]

    def __str__(self) -> str:
        more = f"; and {self.count - len(self.differences)} more" if self.count > len(self.differences) else ""
        return (
            f"projection {self.projection!r}: {self.count} keys of bucket {self.bucket} differ from a fold of their "
            f"events: {'; '.join(self.differences)}{more}"
        )


@dataclass(eq=False, repr=False)
class StateParked(DataError):
    """A key of a projection is stuck, because an event could not be applied to it. Rebuild the key.

    ``sequence`` is the event's sequence; 0 if the cause was not an event.
    """

    projection: str
    key: str
    sequence: int
    reason: str

    def __str__(self) -> str:
        where = f" at event {self.sequence}" if self.sequence else ""
        return f"key {self.key!r} of projection {self.projection!r} is parked{where}: {self.reason}"


@dataclass(eq=False, repr=False)
class DataLoss(DataError):
    """Messages that were to be read are gone from the stream: its limits evicted them, or it was purged.

    ``remedy`` says what helps where they are read; it may be empty.
    """

    stream: str
    wanted: int
    first: int
    remedy: str = ""

    def __str__(self) -> str:
        lost = (
            f"stream {self.stream!r}: sequence {self.wanted} is needed and the first stored one is {self.first}, "
            f"so {self.first - self.wanted} sequences are gone (limits, a purge, or deletes)"
        )
        return f"{lost}; {self.remedy}" if self.remedy else lost


@dataclass(eq=False, repr=False)
class StreamRecreated(DataError):
    """The stream was deleted and re-created since it was read, so positions in the old one mean nothing in this one."""

    stream: str
    known: str
    found: str
    remedy: str = "start with a new checkpoint"

    def __str__(self) -> str:
        return (
            f"stream {self.stream!r} was deleted and re-created: the one read before was created at {self.known}, "
            f"and this one at {self.found}; {self.remedy}"
        )


@dataclass(eq=False, repr=False)
class StreamWentBack(DataError):
    """The stream ends before the offset: it was restored from something older, or the offset is not of this stream."""

    stream: str
    wanted: int
    end: int
    is_reused: bool = False
    """The stream has grown since, so ``end`` is a sequence that it has given to two messages."""

    def __str__(self) -> str:
        if self.is_reused:
            return (
                f"stream {self.stream!r}: the message at sequence {self.end} is not the one that was read there; the "
                "stream was restored from an older state and has given its sequences again: archive it below another "
                "root"
            )
        return (
            f"stream {self.stream!r}: sequence {self.wanted} is needed and the stream's next one is {self.end}; "
            "it was restored from an older state, or the offset is another stream's"
        )


@dataclass(eq=False, repr=False)
class BatcherTimeout(NetworkError, TimeoutError):
    """An add, a flush or a shutdown took longer than its ``timeout``."""

    name: str
    what: str
    timeout_s: float

    def __str__(self) -> str:
        return f"batcher {self.name!r}: {self.what} after {self.timeout_s:g} s"


@dataclass(eq=False, repr=False)
class FlushTimeout(NetworkError, TimeoutError):
    """The sink did not finish a write in time. It may have stored any part of the batch, and may still be writing."""

    name: str
    items: int
    timeout_s: float

    def __str__(self) -> str:
        return f"batcher {self.name!r}: a write of {self.items} items took longer than flush_timeout={self.timeout_s:g}"


@dataclass(eq=False, repr=False)
class HandlerStalled(NetworkError):
    """A worker held events of a handler that made no progress, and has ended so that a supervisor starts another one.

    With ``still_runs`` the handler's own code has not ended either, however often it was cancelled: only the end of the
    process ends it.
    """

    handler: str
    what: str
    still_runs: bool = False

    def __str__(self) -> str:
        more = "; it was cancelled and still runs, until the process ends" if self.still_runs else ""
        return f"handler {self.handler!r} has stalled: {self.what}{more}"


@dataclass(eq=False, repr=False)
class DroppedOnShutdown(NetworkError):
    """The item was accepted, and not known to be written when the time of the shutdown was over.

    ``state`` is "waiting", or "being written" when the sink had it. It may be written yet, while the process lives.
    """

    name: str
    state: str

    def __str__(self) -> str:
        return f"batcher {self.name!r}: the shutdown timed out while the item was {self.state}"

    @property
    def may_pass(self) -> bool:
        return False


@dataclass(eq=False, repr=False)
class CircuitOpen(NetworkError):
    """The sink was not tried: it failed too often lately. It is tried again in ``retry_in_s`` seconds."""

    retry_in_s: float

    def __str__(self) -> str:
        return f"the sink failed too often; the next attempt is in {self.retry_in_s:.3g} s"


@dataclass(eq=False, repr=False)
class FeatureUnavailable(ServerFault):
    """The server is too old for ``feature``."""

    feature: str
    needed: str
    present: str

    def __str__(self) -> str:
        return f"{self.feature} needs nats-server {self.needed} or newer, and this is {self.present}"


@dataclass(eq=False, repr=False)
class EmbeddedServerError(ServerFault):
    """A nats-server of JetSpark was not found, did not start, or died; ``log`` has the end of its log."""

    reason: str
    log: str = ""

    def __str__(self) -> str:
        return f"{self.reason}\n--- nats-server log ---\n{self.log}" if self.log else self.reason


@dataclass(eq=False, repr=False)
class CommandFailed(ServerFault):
    """A worker could not decide a command, and would not next time: its code, or the history it reads, is wrong.

    Nothing was stored.
    """

    command: str
    reason: str

    def __str__(self) -> str:
        return f"command {self.command!r}: {self.reason}"
