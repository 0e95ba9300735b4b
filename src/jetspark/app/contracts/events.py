"""Events as classes: a frozen msgspec Struct whose fields are the contract, and the keywords that name it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, dataclass_transform

import msgspec

from jetspark.app.contracts.catalogue import Contract, Upcast, contract_of
from jetspark.app.contracts.field_rules import private_fields
from jetspark.errors import ConfigError

__all__ = ["Event", "event", "unchanged", "upcast"]

_Kind = TypeVar("_Kind", bound=type[Any])
_Function = TypeVar("_Function", bound=Upcast)

RESERVED = frozenset({"event_id", "event_type", "event_version"})
"""Names of :class:`Event` itself, which no field may have."""


class EventMeta(msgspec.StructMeta):
    """Reads the keywords of an event class, and gives the class its contract."""

    def __new__(
        mcls,
        name: str,
        bases: tuple[type, ...],
        namespace: dict[str, object],
        *,
        type: str | None = None,
        version: int = 1,
        key: str | None = None,
        subject: str | None = None,
        **config: Any,
    ) -> EventMeta:
        for option in ("frozen", "kw_only"):
            if config.setdefault(option, True) is not True:
                raise ConfigError(f"{name}: {option}={config[option]!r}: an event is a fact, always {option}")
        if config.get("array_like"):
            raise ConfigError(f"{name}: array_like=True: the data of an event is an object, whose fields have names")
        # An immutable event is never part of a cycle. Otherwise the collector would visit every event in memory, and
        # every tuple around it: a tenth of a projection's time.
        config.setdefault("gc", False)
        cls = super().__new__(mcls, name, bases, namespace, **config)
        clash = RESERVED.intersection(cls.__struct_fields__)
        if clash:
            raise ConfigError(f"{name}.{min(clash)}: the name belongs to Event itself; call the field something else")
        if type is not None:
            contract = Contract(cls, type=type, version=version, key=key, subject=subject)
            own_id = getattr(cls, "event_id", None)
            if own_id is not Event.event_id:
                contract.id_of = own_id
            attributes = {"__contract__": contract, "event_type": contract.type, "event_version": contract.version}
            for attribute, value in attributes.items():
                setattr(cls, attribute, value)
        elif (version, key, subject) != (1, None, None):
            raise ConfigError(f"{name}: version, key and subject say something of a type: write type=... as well")
        return cls


@dataclass_transform(field_specifiers=(msgspec.field,), frozen_default=True, kw_only_default=True)
class Event(msgspec.Struct, frozen=True, kw_only=True, metaclass=EventMeta):
    """Something that happened: an immutable fact, whose fields are its contract.

    ``class OrderPaid(Event, type="order.paid", version=2, key="order_id", subject="orders.paid.{order_id}")``:

    - ``type`` is the event's name on the wire, permanently; the name of the class may change. A class without it is
      only a base for others.
    - ``version`` counts the changes of its fields that readers have to handle; see :func:`upcast`.
    - ``key`` is the field whose value orders events: those of one key are handled one after the other. A template such
      as ``"{tenant}.{order_id}"`` makes one of several fields.
    - ``subject`` is where it is published, by default the type. Values of fields are escaped, so each is one token,
      and can be read back.

    Strict on writing: an event with a value that its annotations do not allow is not published. Tolerant on reading:
    unknown fields are ignored, and missing ones that have a default get it.

    Floats with the name of money and times without a zone are refused when the class is defined.

    Raises:
        ConfigError: A keyword or a field breaks a rule.
    """

    if TYPE_CHECKING:
        __contract__: ClassVar[Contract]

        def __init_subclass__(
            cls,
            *,
            type: str | None = None,
            version: int = 1,
            key: str | None = None,
            subject: str | None = None,
            rename: Any = None,
            omit_defaults: bool = False,
            forbid_unknown_fields: bool = False,
        ) -> None: ...

    event_type: ClassVar[str]
    """The name on the wire."""
    event_version: ClassVar[int]

    def event_id(self) -> str | None:
        """An id that follows from the content, so that the same fact published again is a duplicate; None is a new id.

        Override it where a fact has a natural identity. It must differ for two facts that may both happen: the second
        ``order.updated`` of an order needs more than the order and the type in its id.
        """
        return None

    def __repr__(self) -> str:
        """All fields but the private ones."""
        try:
            hidden = private_fields(type(self))
        except NameError:  # a type that only exists for type checkers: better nothing than something private
            hidden = frozenset(self.__struct_fields__)
        shown = ", ".join(
            f"{name}={'...' if name in hidden else repr(getattr(self, name))}" for name in self.__struct_fields__
        )
        return f"{type(self).__name__}({shown})"


def event(
    *, type: str, version: int = 1, key: str | None = None, subject: str | None = None
) -> Callable[[_Kind], _Kind]:
    """Make a pydantic model a type of event: ``@event(type="order.paid", subject="orders.paid")``.

    The keywords are those of :class:`Event`. The model should be frozen, since an event is a fact. It is validated by
    pydantic's rules, on writing and on reading; reading is several times slower than with :class:`Event`.

    Raises:
        ConfigError: The class is not a pydantic model, or a keyword or field breaks a rule.
    """

    def register(kind: _Kind) -> _Kind:
        if not hasattr(kind, "model_validate_json"):
            raise ConfigError(
                f"{kind.__name__} is not a pydantic model: write class {kind.__name__}(Event, type={type!r}, ...)"
            )
        contract = Contract(kind, type=type, version=version, key=key, subject=subject)
        contract.id_of = getattr(kind, "event_id", None)
        kind.__contract__ = contract
        return kind

    return register


def unchanged(old: dict[str, object]) -> dict[str, object]:
    """The upcast of data that the next version reads as it is: ``upcast(OrderPaid, from_version=1)(unchanged)``.

    ``jetspark schema check`` verifies this by the rules for schemas.
    """
    return old


def upcast(kind: type, *, from_version: int) -> Callable[[_Function], _Function]:
    """Declare how data of an old version becomes data of the next: ``@upcast(OrderPaid, from_version=1)``.

    The function gets the data as a dict and returns a dict. It must be pure (no clock, no I/O, no randomness), because
    history is read repeatedly and must mean the same each time. Data three versions back passes through three upcasts.

    Raises:
        ConfigError: The version is not older than the class, or has an upcast already.
    """
    contract = contract_of(kind)

    def remember(function: _Function) -> _Function:
        contract.add_upcast(from_version, function)
        return function

    return remember
