"""Contracts: the agreed form of one version of one event type, and the catalogue of an application's contracts.

A :class:`Contract` belongs to a class: its wire name and version, where its events go, which field is their key, how
their data is written and read. A class stands for exactly one version; older versions live on as *upcasts*, pure
functions from the data of one version to that of the next, so that a handler only ever meets the newest class.

A :class:`Catalogue` finds the contract for the type and version of a message. It has each type and version once.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import msgspec

from jetspark.app.contracts.field_rules import check_fields, check_in_subject, field_names, has_sets
from jetspark.app.contracts.tokens import Template, text_of
from jetspark.errors import ConfigError, InvalidEvent

__all__ = ["Catalogue", "Contract", "Decoding", "Upcast", "contract_of", "returned_types"]

Upcast: TypeAlias = Callable[[dict[str, object]], dict[str, object]]

_is_type = re.compile(r"[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*").fullmatch
_ENCODER = msgspec.json.Encoder()
_SORTING_ENCODER = msgspec.json.Encoder(order="deterministic")


class Contract:
    """One version of an event type: name, key, subject, and the encoding of its data."""

    def __init__(self, kind: type[Any], *, type: str, version: int, key: str | None, subject: str | None) -> None:
        if not isinstance(type, str) or not _is_type(type):
            raise ConfigError(
                f"{kind.__name__}: type={type!r}: expected names of letters, digits, _ and - joined by dots, "
                "such as 'order.paid'"
            )
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ConfigError(f"{kind.__name__}: version={version!r}: expected a whole number, 1 or more")
        if key is not None and (not isinstance(key, str) or not key):
            raise ConfigError(f"{kind.__name__}: key={key!r}: expected a field's name, or several as '{{a}}.{{b}}'")
        if subject is not None and not isinstance(subject, str):
            raise ConfigError(f"{kind.__name__}: subject={subject!r}: expected a text such as 'orders.{{order_id}}'")
        self.kind = kind
        self.is_pydantic = not issubclass(kind, msgspec.Struct)
        self.type = type
        self.version = version
        self.subject = Template(type if subject is None else subject)
        """The subject of its events; without ``subject=`` it is the type itself."""
        self.key = key
        self.key_template, self.key_of = _key_functions(key)
        """The key of an event as text; None if the type has no key."""
        self.id_of: Callable[[Any], str | None] | None = None
        """The id of an event derived from its content, if the class defines one."""
        self.upcasts: dict[int, Upcast] = {}
        """Upcasts by the version they start from; each leads to the next."""
        self._is_checked = False
        self._write: Callable[[Any], bytes] = _write_pydantic if self.is_pydantic else _ENCODER.encode
        """``_write_sorted`` where sets are in it, once that is known."""
        self.decode: Callable[[Any], Any] = self._decode_first
        """Read the data of this very version: JSON bytes in, event out, with msgspec's or pydantic's errors."""
        try:
            self.check()
        except NameError:
            pass  # A type is defined further down in the module: asked again at the first use.

    def check(self) -> None:
        """Check what needs the types of the fields: once, and as soon as they are all defined."""
        if self._is_checked:
            return
        for template, where in ((self.subject, "subject"), (self.key_template, "key")):
            for name in () if template is None else template.fields:
                check_in_subject(self.kind, name, f"{where}={template.text!r}" if template else where)
        check_fields(self.kind)
        if has_sets(self.kind):
            self._write = self._write_sorted
        self._is_checked = True

    def _decode_first(self, data: object) -> Any:
        """The first call of ``decode``: by then every type of the module is defined, so the decoder can be built."""
        return self.decoder()(data)

    def decoder(self) -> Callable[[Any], Any]:
        """``decode`` as it stays, for those who keep it; only when every type of the module is defined."""
        if self.decode == self._decode_first:
            self.check()
            self.decode = self._validate_json if self.is_pydantic else msgspec.json.Decoder(self.kind).decode
        return self.decode

    def _validate_json(self, data: Any) -> object:
        return self.kind.model_validate_json(bytes(data))

    def convert(self, data: dict[str, object]) -> Any:
        """Read data that is parsed already, such as what an upcast returned."""
        self.check()
        # Keys of JSON are text, whatever they stand for.
        return self.kind.model_validate(data) if self.is_pydantic else msgspec.convert(data, self.kind, str_keys=True)

    def encode(self, event: object) -> bytes:
        """Encode the data of an event and decode it again; data that does not come back equal is refused.

        Raises:
            InvalidEvent: A field has a value that its type or its rules do not allow.
        """
        try:
            if not self._is_checked:
                self.check()
            data = self._write(event)
            if self.decode(data) == event:
                return data
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
            raise InvalidEvent(self.type, self.version, *_first_fault(error)) from error
        raise InvalidEvent(self.type, self.version, *self._changed(event, data))

    def _write_sorted(self, event: object) -> bytes:
        """Write sets in the order of their elements, so that the same event has the same bytes in every process."""
        if self.is_pydantic:
            return _write_pydantic_sorted(event)
        try:
            return _SORTING_ENCODER.encode(event)
        except TypeError:  # dicts whose keys are no texts, which it does not sort
            return _ENCODER.encode(msgspec.to_builtins(event, order="deterministic", str_keys=True))

    def _changed(self, event: object, data: bytes) -> tuple[str, str]:
        """The field that is not read back as it was written."""
        again = self.decode(data)
        for name in field_names(self.kind):
            written, read = getattr(event, name), getattr(again, name)
            if written != read:
                return name, f"{written!r} would be read back as {read!r}"
        return "", f"{event!r} would be read back as {again!r}"

    def key_in(self, subject: str) -> str | None:
        """The key of an event according to its NATS subject; None if the subject does not contain it."""
        values = self.subject.values_of(subject) or {}
        if self.key in values:  # the name of one field
            return values[self.key]
        template = self.key_template
        if template is None or not values.keys() >= set(template.fields):
            return None
        return template.fill(**{name: values[name] for name in template.fields})

    def add_upcast(self, from_version: int, function: Upcast) -> None:
        """Remember how data of a version becomes data of the next.

        Raises:
            ConfigError: The step has an upcast already, or the version is not an older one.
        """
        if not isinstance(from_version, int) or not 1 <= from_version < self.version:
            raise ConfigError(
                f"upcast of {self.kind.__name__} from_version={from_version!r}: its version is {self.version}, so "
                f"expected 1 to {self.version - 1}"
                if self.version > 1
                else f"upcast of {self.kind.__name__}: version 1 has no older version to come from"
            )
        if from_version in self.upcasts:
            raise ConfigError(
                f"upcast of {self.kind.__name__} from_version={from_version}: both "
                f"{_qualified_name(self.upcasts[from_version])} and {_qualified_name(function)}; keep one"
            )
        self.upcasts[from_version] = function

    def chain(self, version: int) -> tuple[Upcast, ...]:
        """The upcasts that lead from an older version to this one, in order."""
        return tuple(self.upcasts[step] for step in range(version, self.version))

    def check_upcasts(self) -> None:
        """Check that the upcasts lead to this version without a hole.

        Raises:
            ConfigError: An upcast in between is missing.
        """
        if not self.upcasts:
            return
        first = min(self.upcasts)
        for version in range(first, self.version):
            if version not in self.upcasts:
                raise ConfigError(
                    f"{self.kind.__name__}: version {first} cannot be read, because no upcast leads from version "
                    f"{version} to {version + 1}; write @upcast({self.kind.__name__}, from_version={version})"
                )

    def __repr__(self) -> str:
        return f"<Contract {self.type} version {self.version}: {self.kind.__qualname__}>"


def contract_of(kind: object) -> Contract:
    """The contract of an event, or of its class.

    Raises:
        ConfigError: The class has no contract.
    """
    found = getattr(kind, "__contract__", None)
    cls = kind if isinstance(kind, type) else type(kind)
    # An attribute is inherited, a contract is not: a subclass has other fields and needs a name of its own.
    if isinstance(found, Contract) and found.kind is cls:
        return found
    raise ConfigError(
        f"{cls.__name__} is not an event type: write class {cls.__name__}(Event, type=..., version=1), or register a "
        "pydantic model with event(...)"
    )


class Decoding(NamedTuple):
    """How data of one version is decoded: into which class, by which upcasts."""

    contract: Contract
    upcasts: tuple[Upcast, ...]


class Catalogue:
    """The event types of an application, each version once."""

    def __init__(self, *kinds: type[object]) -> None:
        self._contracts: dict[tuple[str, int], Contract] = {}
        self._readings: dict[tuple[str, int], Decoding] | None = None
        self.add(*kinds)

    def add(self, *kinds: type[object]) -> None:
        """Add classes; a class that is present already changes nothing.

        Raises:
            ConfigError: A class is not an event type, or another class has the same type and version.
        """
        for kind in kinds:
            if kind in self:
                continue
            contract = contract_of(kind)
            known = self._contracts.setdefault((contract.type, contract.version), contract)
            if known is not contract:
                raise ConfigError(
                    f"type {contract.type!r} version {contract.version} is both {_qualified_name(known.kind)} and "
                    f"{_qualified_name(kind)}; give one of them another type or version"
                )
            self._readings = None

    def declared(self, event: object) -> Contract:
        """The contract of an event that is to be published, or of its class.

        Raises:
            ConfigError: The argument is not an event, or its class is not in the catalogue: other programs could not
                read it.
        """
        contract = contract_of(event)
        if self._contracts.get((contract.type, contract.version)) is not contract:
            raise _undeclared(contract)
        return contract

    def declared_version(self, event: object) -> Contract:
        """The contract of an event, as :meth:`declared`; here it may be of a class of the same type and version."""
        contract = contract_of(event)
        if (contract.type, contract.version) not in self._contracts:
            raise _undeclared(contract)
        return contract

    def __contains__(self, kind: object) -> bool:
        contract = getattr(kind, "__contract__", None)
        if not isinstance(contract, Contract) or contract.kind is not kind:  # it is inherited
            return False
        return self._contracts.get((contract.type, contract.version)) is contract

    def __iter__(self) -> Iterator[Contract]:
        """Every contract, by type and version."""
        return iter([contract for _, contract in sorted(self._contracts.items())])

    def __len__(self) -> int:
        return len(self._contracts)

    @property
    def readings(self) -> dict[tuple[str, int], Decoding]:
        """Every (type, version) that can be read, and how. A version with an upcast is read as the newer class.

        Raises:
            ConfigError: A chain of upcasts has a hole.
        """
        if self._readings is None:
            self._readings = self._resolve()
        return self._readings

    def versions(self, type: str) -> list[int]:
        """The versions of a type that can be read, in order; none if the type is not known."""
        return sorted(version for known, version in self.readings if known == type)

    def check(self) -> None:
        """Check what only shows when all classes and upcasts are defined.

        Raises:
            ConfigError: A field breaks a rule, or a chain of upcasts has a hole.
        """
        for contract in self:
            contract.check()
        self._readings = None
        self.readings  # noqa: B018 - resolves the chains, which is the check

    def _resolve(self) -> dict[tuple[str, int], Decoding]:
        found: dict[tuple[str, int], Decoding] = {}
        for contract in self:  # older versions first, so that the newest class that can be reached wins
            contract.check_upcasts()
            found[contract.type, contract.version] = Decoding(contract, ())
            for version in contract.upcasts:
                found[contract.type, version] = Decoding(contract, contract.chain(version))
        return found


def _write_pydantic(event: Any) -> bytes:
    # The error of decoding the result says more than these warnings.
    data: str = event.model_dump_json(by_alias=True, warnings=False)
    return data.encode()


def _write_pydantic_sorted(event: Any) -> bytes:
    from jetspark.app.contracts.schemas import sets_in_order

    schema = type(event).model_json_schema(mode="serialization")
    return _ENCODER.encode(sets_in_order(msgspec.json.decode(_write_pydantic(event)), schema, schema))


def _undeclared(contract: Contract) -> ConfigError:
    name = contract.kind.__name__
    return ConfigError(
        f"{name} is not declared, so other programs of the application could not read it: write @app.register above "
        f"its class, or App(..., events=[{name}])"
    )


def _key_functions(key: str | None) -> tuple[Template | None, Callable[[Any], str | None]]:
    if key is None:
        return None, lambda event: None
    if "{" in key:
        template = Template(key)
        return template, template.format

    def one_field(event: object) -> str:
        # A key is not a token: it is the value itself.
        value = getattr(event, key)
        return value if value.__class__ is str else text_of(value)

    return Template(f"{{{key}}}"), one_field


def _first_fault(error: Exception) -> tuple[str, str]:
    """Field and rule of what msgspec or pydantic complains about."""
    from jetspark.app.contracts.faults import fault_of

    fault = fault_of(error)
    return fault.field, fault.rule


def _qualified_name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


def returned_types(function: Callable[..., object]) -> list[type]:
    """The event types in the return annotation of a handler."""
    try:
        hint = typing.get_type_hints(function).get("return")
    except (NameError, TypeError):
        return []  # a type that only exists for type checkers: it can be registered
    alternatives = typing.get_args(hint) or (hint,)
    flat = [inner for each in alternatives for inner in (typing.get_args(each) or (each,))]
    return [each for each in flat if isinstance(each, type) and "__contract__" in vars(each)]
