"""Commands as classes: the request, the boundary that a decision reads, and the decision itself. Pure."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeVar, dataclass_transform

import msgspec

from jetspark.app.contracts.catalogue import Contract
from jetspark.app.timers import TimerDue
from jetspark.core.numbers import seconds, whole
from jetspark.core.subjects import is_subset, validate_filter
from jetspark.errors import ConfigError

if TYPE_CHECKING:
    import datetime

    from jetspark.app.projections.projection_spec import ProjectionSpec

__all__ = [
    "UNCHANGED",
    "Command",
    "CommandDecision",
    "CommandReply",
    "CommandSpec",
    "Decision",
    "Guarding",
    "Past",
    "PastEvent",
    "reduced",
]

E = TypeVar("E")

Guarding: TypeAlias = Literal["auto", "boundary", "stream"]

MAX_BOUNDARIES = 1000
"""Most filters in one command's boundary: one batch guards at most this many, and comparing more delays the worker."""

_find_wildcard = re.compile(r"[*>]").split
_is_name = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*").fullmatch


class CommandMeta(msgspec.StructMeta):
    """Makes every class below :class:`Command` frozen, with fields that have to be named."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **config: Any) -> CommandMeta:
        for option in ("frozen", "kw_only"):
            if config.setdefault(option, True) is not True:
                raise ConfigError(f"{name}: {option}={config[option]!r}: a command is always {option}")
        return super().__new__(mcls, name, bases, namespace, **config)


@dataclass_transform(field_specifiers=(msgspec.field,), frozen_default=True, kw_only_default=True)
class Command(msgspec.Struct, frozen=True, kw_only=True, metaclass=CommandMeta):
    """A request to the application: its fields are the arguments, ``reads`` returns the boundary of the decision, and
    ``decide`` decides.

    ::

        @app.command("orders.place")
        class PlaceOrder(Command):
            order_id: str

            def reads(self):
                return [f"{ORDER.fill(order_id=self.order_id)}.>"]  # ORDER = Template("orders.{order_id}")

            def decide(self, past):
                if past.of(OrderPlaced):
                    raise Refused("the order exists")
                return [OrderPlaced(order_id=self.order_id)]
    """

    if TYPE_CHECKING:
        __contract__: ClassVar[Contract]

        def __init_subclass__(cls, *, rename: Any = None, omit_defaults: bool = False) -> None: ...

    def reads(self) -> Sequence[str]:
        """The boundary: subjects, wildcards allowed. An event that is stored there before the decision is stored voids
        it.

        Values have to be escaped as in subjects of events, by :class:`Template`: else an id ``*`` reads all of them.
        """
        raise ConfigError(f"{type(self).__name__}: write `def reads(self)`, which returns subjects")

    def decide(self, past: Past) -> object:
        """The events to store, as a list, or a :class:`Decision` with a reply; raise ``Refused(reason)`` to refuse.

        It must be pure: no clock, no I/O, no randomness. It may run several times, and only the last run counts.
        """
        raise ConfigError(f"{type(self).__name__}: write `def decide(self, past)`, which returns events")

    def snapshot_key(self) -> object:
        """The key of the projection whose state becomes ``past.state``; needed with ``snapshot=``."""
        raise ConfigError(f"{type(self).__name__}: write `def snapshot_key(self)`: a key of the projection")


UNCHANGED: Any = msgspec.UNSET
"""The state of a run that stays as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The result of a command (:class:`Command`) or of one step of a workflow (``@app.workflow``)."""

    events: Sequence[object] = ()
    """The events to store."""
    reply: object = None
    """Commands only: the ``data`` of the caller's reply, any JSON value. It is recorded with the events so that a retry
    gets the same reply; keep it small."""
    state: Any = UNCHANGED
    """Workflows only: the run's new state."""
    timers: Mapping[str, tuple[object, TimerDue]] = field(default_factory=dict)
    """By name: an event, and when it is published: seconds from now, a ``timedelta``, or a time with a zone. A
    workflow's names belong to one run; a command's belong to the application, as for ``timers.set``."""
    cancels: Sequence[str] = ()
    """Timers that end. A command needs an event for each of them."""
    commands: Mapping[str, Command] = field(default_factory=dict)
    """Workflows only: commands to send, by name. Each answer comes back as :class:`CommandAnswered`."""
    compensations: Sequence[object] = ()
    """Workflows only: events and commands that undo this step. If the run fails later, they are published and sent,
    last one first."""
    is_done: bool = False
    """Workflows only: the run has ended; its timers are cancelled."""
    failed: str | None = None
    """Workflows only: the reason why the run ended without reaching its goal."""

    def __post_init__(self) -> None:
        if isinstance(self.cancels, str):
            raise ConfigError(f"cancels={self.cancels!r}: expected a list of names, such as [{self.cancels!r}]")
        for name, value in (("events", self.events), ("cancels", self.cancels), ("compensations", self.compensations)):
            if type(value) is not list and type(value) is not tuple and not _is_listing(value):
                raise ConfigError(f"{name}={value!r}: expected a list")
        for name, given in (("timers", self.timers), ("commands", self.commands)):
            if not isinstance(given, Mapping) or not all(isinstance(each, str) for each in given):
                what = "(event, when)" if name == "timers" else "command"
                raise ConfigError(f"{name}={given!r}: expected a dict of name -> {what}")
        for timer, value in self.timers.items():
            if not isinstance(value, tuple | list) or len(value) != 2:
                raise ConfigError(f"timers: {timer!r} is {value!r}: expected (event, when)")
        if not isinstance(self.is_done, bool):
            raise ConfigError(f"is_done={self.is_done!r}: expected True or False")
        if self.failed is not None and not isinstance(self.failed, str):
            raise ConfigError(f"failed={self.failed!r}: expected a text that says why, or None")


def _is_listing(value: object) -> bool:
    """True for an iterable other than a string or a single event (a pydantic model is iterable too)."""
    is_one = hasattr(type(value), "__contract__") or isinstance(value, str | bytes | Mapping)
    return isinstance(value, Iterable) and not is_one


class CommandDecision(NamedTuple):
    """A command's decision, normalised."""

    events: Sequence[object] = ()
    reply: object = None
    timers: Mapping[str, tuple[object, TimerDue]] = {}
    cancels: Sequence[str] = ()

    @classmethod
    def of(cls, decided: object) -> CommandDecision:
        """Normalise the return value of ``decide``.

        Raises:
            ConfigError: The value is neither events nor a decision.
        """
        if type(decided) is list:
            return cls(decided)  # by far the most
        if isinstance(decided, Decision):
            return cls._of_decision(decided)
        if decided is None:
            return cls()
        if hasattr(type(decided), "__contract__"):
            return cls((decided,))
        if isinstance(decided, Iterable) and not isinstance(decided, str | bytes | dict):
            return cls(tuple(decided))
        raise ConfigError(f"decide returned {decided!r}: expected a list of events, or a Decision")

    @classmethod
    def _of_decision(cls, decided: Decision) -> CommandDecision:
        events = decided.events if isinstance(decided.events, list | tuple) else [*decided.events]
        plain = cls(events, decided.reply, decided.timers, decided.cancels)
        if any(getattr(decided, name) != value for name, value in _ONLY_OF_WORKFLOWS.items()):
            raise ConfigError(
                f"decide returned {decided!r}: a command has events, a reply, timers and cancels, and nothing else"
            )
        if (plain.timers or plain.cancels) and not events:
            raise ConfigError(
                f"decide returned {decided!r}: timers are set and ended with an event, by which a retry of the command "
                "is known; expected one"
            )
        return plain


_T = TypeVar("_T")
_ONLY_OF_WORKFLOWS: dict[str, object] = {
    "state": UNCHANGED,
    "commands": {},
    "compensations": (),
    "is_done": False,
    "failed": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandReply:
    """The reply to a decided command."""

    command_id: str
    sequence: int
    """The sequence of the command's last event, for reading your own write; 0 if no event was stored."""
    events: int
    """The number of events it stored."""
    data: Any = None
    """The ``reply`` of the decision."""
    is_repeated: bool = field(default=False, compare=False)
    """True if the command had been decided before; the reply is the recorded one."""

    def data_as(self, kind: type[_T]) -> _T:
        """``data`` as a type that msgspec reads, such as a Struct, a dataclass or a TypedDict.

        Raises:
            ConfigError: The data does not match the type. The command was decided all the same.
        """
        try:
            return msgspec.convert(self.data, kind, str_keys=True)
        except (msgspec.ValidationError, TypeError) as error:
            raise ConfigError(
                f"command {self.command_id!r}: its reply {self.data!r} is not a {kind!r}: {error}"
            ) from error


class PastEvent(NamedTuple):
    """An event inside a boundary."""

    sequence: int
    event: Any
    subject: str
    id: str
    time: datetime.datetime | None
    """The event's time according to its producer."""
    cause: str | None
    """The id of what led to it."""
    command: str | None = None
    """The name of the command that decided it."""
    outcome: bytes | None = None
    """The outcome header, recorded for retries of the command."""
    timer: str | None = None
    """The subject of the timer that has published it."""
    ended: str | None = None
    """The subject of the timer that ended with it."""
    stored: datetime.datetime | None = None
    """The time when the stream stored the event, by the server's clock."""


class Past:
    """The events inside the boundary of a command, oldest first, as of one moment.

    An event of a timer that the server has stored behind the end of the timer, which happens, is left out.
    """

    def __init__(
        self, entries: Sequence[PastEvent], *, version: int = 0, state: Callable[[], object] | None = None
    ) -> None:
        self._entries = entries
        self.version = version
        """The sequence of the last event of the boundary; 0 for an empty boundary."""
        self._state = state

    def __iter__(self) -> Iterator[Any]:
        return (entry.event for entry in self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @cached_property
    def entries(self) -> Sequence[PastEvent]:
        """The events with sequence, id, time and cause."""
        # A copy: the worker caches the list, and decides the next command on it.
        return tuple(self._entries)

    def of(self, kind: type[E]) -> list[E]:
        """The events of one type."""
        return [entry.event for entry in self._entries if isinstance(entry.event, kind)]

    @property
    def state(self) -> Any:
        """The state of the projection's key, with every event of the boundary applied; or None. Needs ``snapshot=``.

        ``past`` itself then has only events that are newer than the snapshot, and some that are not.
        """
        if self._state is None:
            raise ConfigError("past.state: the command has no snapshot; write @app.command(..., snapshot='projection')")
        return self._state()


def reduced(filters: Iterable[str]) -> tuple[str, ...]:
    """The filters in order, without duplicates and without filters that another one covers."""
    unique = sorted(set(filters))
    # Only those with wildcards cover others, and only such as begin as they do, which is quickly seen.
    wide = [(prefix, each) for each in unique if (prefix := _find_wildcard(each)[0]) != each]

    def is_covered(one: str) -> bool:
        return any(one.startswith(prefix) and one != other and is_subset(one, other) for prefix, other in wide)

    return tuple(one for one in unique if not is_covered(one))


@lru_cache(10_000)  # commands come back to the same boundaries, and this takes longer than to decide on them
def _checked_boundary(filters: tuple[str, ...], stored: tuple[str, ...]) -> tuple[str, ...]:
    if len(filters) > MAX_BOUNDARIES:
        raise ConfigError(f"reads returned more than {MAX_BOUNDARIES} subjects: read fewer, or some with a wildcard")
    found = reduced(validate_filter(each) for each in filters)
    if not found:
        raise ConfigError("reads returned nothing: expected at least one subject, or nothing guards the decision")
    for each in found:
        if stored and not any(is_subset(each, subject) for subject in stored):
            raise ConfigError(f"reads returned {each!r}, which the stream does not store: it has {', '.join(stored)}")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """The declaration of a command, ``@app.command(name, ...)``; the options are these fields."""

    name: str
    kind: type[Command]
    snapshot: str | None = None
    """A projection whose state stands for the older part of a long past; see :attr:`Past.state`."""
    remember_s: float = 3600.0
    """How long a decided command is recognised by its id after a restart of the worker; with ``snapshot``."""
    guard: Guarding = "auto"
    """Must not change between reading and storing: ``boundary``, or the whole ``stream``. ``auto`` chooses the stream
    for a boundary with wildcards on a replicated stream, where the server's check of the boundary is not exact."""
    tries: int = 20
    """How often the command is decided again because another writer was first."""
    max_past: int = 100_000
    """Events inside the boundary, at most; more need a snapshot."""

    def __post_init__(self) -> None:
        name, kind = self.name, self.kind
        if not isinstance(name, str) or not _is_name(name):
            raise ConfigError(f"command {name!r}: expected letters, digits, _ and - joined by dots, as 'orders.place'")
        if not inspect.isclass(kind) or not issubclass(kind, Command):
            raise ConfigError(f"command {name!r}: expected a class below Command, got {kind!r}")
        for method in ("reads", "decide", *(("snapshot_key",) if self.snapshot is not None else ())):
            if getattr(kind, method) is getattr(Command, method):
                raise ConfigError(f"command {name!r}: {kind.__name__} has no `def {method}(self, ...)`")
            if inspect.iscoroutinefunction(getattr(kind, method)):
                raise ConfigError(f"command {name!r}: {kind.__name__}.{method} is async: it must be a pure function")
        if self.guard not in ("auto", "boundary", "stream"):
            raise ConfigError(f"guard={self.guard!r}: expected 'auto', 'boundary' or 'stream'")
        whole("tries", self.tries)
        whole("max_past", self.max_past)
        seconds("remember_s", self.remember_s)
        contract = vars(kind).get("__contract__")
        if contract is None:
            contract = Contract(kind, type=name, version=1, key=None, subject=None)
            kind.__contract__ = contract
        if contract.type != name:
            raise ConfigError(f"command {name!r}: {kind.__name__} is command {contract.type!r} already")

    def boundary(self, command: Command, stored: Sequence[str]) -> tuple[str, ...]:
        """The filters that a command reads, without redundant ones.

        Raises:
            ConfigError: ``reads`` did not return a list of subjects, or the stream does not store one of them.
        """
        filters = command.reads()
        if isinstance(filters, str) or not isinstance(filters, Iterable):
            raise ConfigError(f"reads returned {filters!r}: expected a list of subjects")
        return _checked_boundary(tuple(islice(filters, MAX_BOUNDARIES + 1)), tuple(stored))

    def check_snapshot(self, projections: Mapping[str, ProjectionSpec]) -> None:
        """
        Raises:
            ConfigError: The projection does not exist, or its states are not kept by key.
        """
        if self.snapshot is None:
            return
        spec = projections.get(self.snapshot)
        if spec is None:
            known = ", ".join(sorted(projections)) or "the app has none"
            raise ConfigError(f"command {self.name!r}: snapshot={self.snapshot!r}: expected a projection: {known}")
        if spec.window is not None:
            raise ConfigError(
                f"command {self.name!r}: snapshot={self.snapshot!r}: expected a projection without windows"
            )
        if spec.unique_ids:
            raise ConfigError(
                f"command {self.name!r}: snapshot={self.snapshot!r}: expected a projection without unique_ids: the "
                "command folds the newest events onto the state by itself, and knows no ids of those before"
            )
