"""The declaration of a handler: the events it reads, how it runs, and what happens when it fails. Pure."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypedDict

from jetspark.app.handlers.partitions import MAX_PARTITIONS, partition_transforms
from jetspark.app.handlers.retry import Breaker, RetryPolicy
from jetspark.app.handlers.signatures import check_events, check_function, check_key
from jetspark.app.topology.names import MARKER_TTL_S, check_app_name
from jetspark.core.arguments import flag, instance, suggestion, text, unfit
from jetspark.core.numbers import rate, seconds, seconds_above_0, whole
from jetspark.errors import ConfigError

__all__ = [
    "BatchHandlerOptions",
    "HandlerFunction",
    "HandlerOptions",
    "HandlerSpec",
    "Idempotence",
    "WorkflowOptions",
    "check_options",
]

MIN_ACK_WAIT_S = 0.001
"""With a shorter time, an event would be redelivered again and again before a worker could begin it."""

REMEMBER_S = 7 * 86400.0
"""How long the records of completed effects are kept."""

Idempotence: TypeAlias = Literal["none", "transaction"]
HandlerFunction: TypeAlias = Callable[..., Coroutine[object, None, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSpec:
    """The declaration of a handler: the events it reads, how it runs, and what happens when it fails."""

    function: HandlerFunction
    events: tuple[type[object], ...]
    """The event types it handles, versions below theirs included."""
    durable: str
    """The name of its consumer, and its own."""
    key: str | Callable[[Any], str] | None = None
    """Field or function that says which events must stay in order; None takes the event's own key."""
    in_order: bool = True
    """Events of one key run one after the other."""
    concurrency: int = 16
    rate: float | None = None
    """Starts per second; None means no limit."""
    burst: int | None = None
    timeout: float = 30.0
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    dead_letter: bool = True
    """Failures end in the dead letters; without, they are logged and dropped."""
    idempotent: Idempotence = "none"
    bucket: str | None = None
    """The bucket of its effects, for ``idempotent="transaction"``."""
    remember_s: float = REMEMBER_S
    """How long results of ``ctx.once`` and completion records of transactions are kept. If an event is handled again
    after that time, for example by a redrive, its effects are repeated."""
    breaker: Breaker | None = None
    ack_wait_s: float = 30.0
    max_messages: int = 1024
    """Messages held at a time: running, waiting for their turn, or for a retry."""
    max_bytes: int = 64 << 20
    """Bytes of those messages; one message is always let in."""
    partitions: int | None = None
    """Parts that its keys are divided into, each with one worker at a time, so that order holds across processes."""
    takeover_s: float = 5.0
    """With partitions: how long after a worker fell silent another one takes its partitions; 1 or more."""
    filtered: bool | None = None
    """True: the server filters the handler's events. False: the handler reads the whole stream and skips other events,
    which is the default if it takes several subjects with wildcards from the app's own stream."""
    batch: int | None = None
    """Events in one call, at most; None is a handler of single events."""
    batch_wait_s: float = 0.2
    """How long a batch that is not full waits for more."""

    def __post_init__(self) -> None:
        check_app_name(self.durable)
        where = f"handler {self.durable!r}"
        check_events(where, self.events)
        check_function(where, self.function, self.events, is_batch=self.batch is not None)
        if self.key is not None:
            check_key(where, self.key, self.events)
        for name in ("concurrency", "max_messages", "max_bytes"):
            whole(name, getattr(self, name))
        for name in ("max_messages", "max_bytes"):
            if getattr(self, name) < 2:
                raise ConfigError(f"{name}={getattr(self, name)}: expected 2 or more, since one is kept for retries")
        for name in ("timeout", "ack_wait_s"):
            seconds_above_0(name, getattr(self, name))
        if self.ack_wait_s < MIN_ACK_WAIT_S:
            raise ConfigError(f"ack_wait_s={self.ack_wait_s!r}: expected seconds, {MIN_ACK_WAIT_S:g} or more")
        for name in ("remember_s", "takeover_s", "batch_wait_s"):
            seconds(name, getattr(self, name))
        for name in ("in_order", "dead_letter"):
            flag(name, getattr(self, name))
        if self.filtered is not None:
            flag("filtered", self.filtered)
        instance("retry", self.retry, RetryPolicy, "a Retry")
        if self.breaker is not None:
            instance("breaker", self.breaker, Breaker, "a Breaker, or None for none")
        if self.rate is not None:
            rate("rate", self.rate, instead="or None for no limit")
        if self.burst is not None:
            whole("burst", self.burst, instead="or None for those of one second")
        # An unknown word would silently mean effects that happen twice.
        if self.idempotent not in typing.get_args(Idempotence):
            raise unfit("idempotent", self.idempotent, "'none' or 'transaction'")
        if self.bucket is not None:
            text("bucket", self.bucket, "the name of a bucket")
        if not MARKER_TTL_S <= self.remember_s < math.inf:
            raise ConfigError(f"remember_s={self.remember_s!r}: expected seconds, {MARKER_TTL_S:g} or more")
        if self.partitions is not None:
            self._check_partitions(self.partitions)
        if self.batch is not None:
            if (
                isinstance(self.batch, bool)
                or not isinstance(self.batch, int)
                or not 1 <= self.batch <= self.max_messages
            ):
                raise ConfigError(f"batch={self.batch!r}: expected 1 to max_messages={self.max_messages}")
            if self.in_order or self.idempotent != "none":
                raise ConfigError("a batch handler takes in_order=False and idempotent='none'")
        if self.idempotent == "transaction" and self.bucket is None:
            raise ConfigError("idempotent='transaction': expected bucket=, the bucket of its effects")

    def _check_partitions(self, partitions: int) -> None:
        if self.filtered is False:
            raise ConfigError(
                "filtered=False with partitions=: expected one of the two; copies are of its events alone"
            )
        whole("partitions", partitions, high=MAX_PARTITIONS, instead="or None for none")
        if not self.in_order or self.batch is not None:
            raise ConfigError("partitions= keeps the order of keys: expected in_order=True, and no batch handler")
        if not 1 <= self.takeover_s < math.inf:
            raise ConfigError(f"takeover_s={self.takeover_s!r}: expected seconds, 1 or more")
        if self.max_messages < 16 * partitions:
            raise ConfigError(
                f"max_messages={self.max_messages} with partitions={partitions}: expected {16 * partitions} or more, "
                "since one worker may read all of them"
            )
        # Raises where the key is not in the subject: while the program starts, and not in the server.
        partition_transforms("app", self.durable, partitions, self.events, self.key)

    @property
    def name(self) -> str:
        return self.durable


class BatchHandlerOptions(TypedDict, total=False):
    """Keyword arguments of ``app.batch_handler``: fields of :class:`HandlerSpec`."""

    rate: float | None
    burst: int | None
    timeout: float
    retry: RetryPolicy
    dead_letter: bool
    breaker: Breaker | None
    ack_wait_s: float
    max_messages: int
    max_bytes: int
    filtered: bool | None


class HandlerOptions(BatchHandlerOptions, total=False):
    """Keyword arguments of ``app.handler``: fields of :class:`HandlerSpec`."""

    key: str | Callable[[Any], str] | None
    in_order: bool
    concurrency: int
    idempotent: Idempotence
    bucket: str | None
    remember_s: float
    partitions: int | None
    takeover_s: float


class WorkflowOptions(TypedDict, total=False):
    """Keyword arguments of ``app.workflow``: fields of :class:`HandlerSpec`."""

    concurrency: int
    timeout: float
    retry: RetryPolicy
    rate: float | None
    burst: int | None
    ack_wait_s: float
    max_messages: int
    max_bytes: int
    partitions: int | None
    takeover_s: float
    breaker: Breaker | None
    filtered: bool | None


def check_options(durable: str, options: Mapping[str, object], known: type[object]) -> None:
    names = known.__required_keys__ | known.__optional_keys__  # type: ignore[attr-defined]  # a TypedDict
    unknown = sorted(set(options) - names)
    if unknown:
        meant = suggestion(unknown[0], names)
        raise ConfigError(
            f"handler {durable!r}: {', '.join(unknown)}: expected some of {', '.join(sorted(names))}{meant}"
        )
