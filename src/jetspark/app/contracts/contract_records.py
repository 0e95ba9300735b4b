"""Records of contracts, in a bucket or in files: the schema of each type and version, and examples of whole messages.

A record is written once and never changed. So it can be compared with the code of today: the same version must still
have the same schema, and an older version must still be readable (see :mod:`jetspark.app.contracts.compatibility`).
Where an upcast lies between them no rule can decide that, so the examples are read, by the code that would read
messages.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from jetspark.app.contracts.catalogue import Catalogue, Contract
from jetspark.app.contracts.compatibility import DEFAULT_MODE, Mode, directions, older_to_check, unreadable
from jetspark.app.contracts.envelope import decode, encode
from jetspark.app.contracts.events import unchanged
from jetspark.app.contracts.samples import samples
from jetspark.app.contracts.schemas import Schema, differences, document, write
from jetspark.errors import ConfigError, ContractViolation

__all__ = ["Finding", "Record", "Records", "check_records", "read_record", "record_of"]

# Of a fixed day, so that a file of it never changes.
_TIME = datetime.datetime(2026, 3, 15, 10, 15, 30, tzinfo=datetime.UTC)
_ID = "00000000-0000-8000-8000-000000000001"


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The recorded contract of one version of an event type."""

    type: str
    version: int
    schema: Schema
    examples: dict[str, dict[str, Any]]
    """Whole envelopes, by name."""

    @property
    def name(self) -> str:
        """The record's key in a bucket, and the name of its file without the ending."""
        return f"{self.type}.{self.version}"

    def write(self) -> bytes:
        """The record's bytes: sorted and indented, so that people can read them too."""
        content = {"type": self.type, "version": self.version, "schema": self.schema, "examples": self.examples}
        return write(content)


Records: TypeAlias = Mapping[tuple[str, int], Record]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A recorded promise that the present code does not keep."""

    type: str
    version: int
    """The version of the class in the code; 0 for a type that the code no longer has."""
    against: int
    """The recorded version it was compared with."""
    rule: str
    """``changed``, ``not_recorded``, ``not_readable``, or a rule of compatibility."""
    direction: str = ""
    """``backward`` (the new one cannot read the old) or ``forward`` (the other way round)."""
    field: str = ""
    reason: str = ""

    @property
    def is_breaking(self) -> bool:
        """True if a reader or writer breaks; recording a new version breaks neither."""
        return self.rule != "not_recorded"

    def __str__(self) -> str:
        where = f" {self.direction} with version {self.against}" if self.direction else ""
        field = f", {self.field}" if self.field else ""
        return f"{self.type} version {self.version or self.against}{where}{field}: {self.reason} ({self.rule})"


def record_of(contract: Contract, source: str) -> Record:
    """The record of a contract.

    Raises:
        ConfigError: The schema does not allow an example to be made.
    """
    schema = document(contract)
    examples = {}
    for name, data in samples(schema, contract.kind.__name__).items():
        try:
            event = contract.convert(data)
            body = encode(event, id=_ID, source=source, time=_TIME).data
        except (ValueError, msgspec.MsgspecError, ContractViolation) as error:
            raise ConfigError(
                f"{contract.kind.__name__}: the {name} example of its schema is refused: {error}; "
                "add an example to the field with Annotated[..., msgspec.Meta(examples=[...])]"
            ) from error
        examples[name] = json.loads(body)
    return Record(type=contract.type, version=contract.version, schema=schema, examples=examples)


def read_record(data: bytes, where: str) -> Record:
    """A record by its bytes.

    Raises:
        ConfigError: The bytes are not a record; ``where`` is in the message.
    """
    try:
        return msgspec.json.decode(data, type=Record)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{where}: expected a contract as jetspark writes it: {error}") from error


def check_records(catalogue: Catalogue, records: Records, mode: Mode = DEFAULT_MODE) -> list[Finding]:
    """Compare the code with the records; findings in order of type and version.

    Raises:
        ConfigError: The catalogue itself is wrong.
    """
    catalogue.check()
    found = [finding for contract in catalogue for finding in _same_version(contract, records)]
    for type in sorted({contract.type for contract in catalogue} | {type for type, _ in records}):
        newest = max((each for each in catalogue if each.type == type), key=lambda each: each.version, default=None)
        found += _older_versions(catalogue, newest, type, records, mode)
    return sorted(found, key=lambda finding: (finding.type, finding.against, finding.version))


def _same_version(contract: Contract, records: Records) -> Iterator[Finding]:
    record = records.get((contract.type, contract.version))
    facts: dict[str, Any] = {"type": contract.type, "version": contract.version, "against": contract.version}
    if record is None:
        yield Finding(rule="not_recorded", reason="this version is new", **facts)
        return
    for change in differences(record.schema, document(contract)):
        reason = f"{change}: a version never changes once it is recorded; make it version {contract.version + 1}"
        yield Finding(rule="changed", field=change.path, reason=reason, **facts)


def _older_versions(
    catalogue: Catalogue, newest: Contract | None, type: str, records: Records, mode: Mode
) -> Iterator[Finding]:
    is_backward, is_forward = directions(mode)
    known = sorted(version for recorded, version in records if recorded == type)
    older = [version for version in known if newest is None or version < newest.version]
    chosen = older_to_check(mode, older)
    if is_backward:
        for version in [*chosen, *known[len(older) :]]:
            yield from _readable(catalogue, newest, records[type, version])
    if newest is not None:
        schema = document(newest)
        for version in chosen:
            record = records[type, version]
            facts: dict[str, Any] = {"type": type, "version": newest.version, "against": version}
            if is_backward and _is_unchanged(newest, version):
                for each in unreadable(schema, record.schema):
                    yield Finding(rule=each.rule, direction="backward", field=each.path, reason=each.reason, **facts)
            if is_forward:
                for each in unreadable(record.schema, schema):
                    yield Finding(rule=each.rule, direction="forward", field=each.path, reason=each.reason, **facts)


def _readable(catalogue: Catalogue, newest: Contract | None, record: Record) -> Iterator[Finding]:
    """Read the examples of a record as messages are read."""
    facts: dict[str, Any] = {
        "type": record.type,
        "version": newest.version if newest is not None else 0,
        "against": record.version,
        "direction": "backward",
    }
    for name, envelope in sorted(record.examples.items()):
        try:
            decode(record.name, msgspec.json.encode(envelope), None, catalogue)
        except ContractViolation as error:
            reason = f"its {name} example cannot be read: {error.rule}"
            yield Finding(rule="not_readable", field=error.field, reason=reason, **facts)
            return


def _is_unchanged(contract: Contract, version: int) -> bool:
    """True if data of the older version reaches the class unchanged, so that the rules for schemas decide."""
    steps = [contract.upcasts.get(step) for step in range(version, contract.version)]
    return all(step is unchanged for step in steps)
