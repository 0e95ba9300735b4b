"""The contracts of an application in a bucket: written once for each type and version, never changed."""

from __future__ import annotations

from jetspark.aio.jetstream import JetStream
from jetspark.aio.kv import KeyValue
from jetspark.app.contracts.catalogue import Catalogue
from jetspark.app.contracts.contract_records import Finding, Record, Records, read_record, record_of
from jetspark.app.contracts.schemas import differences
from jetspark.errors import ContractFrozen, KeyExists, StreamNotFound

__all__ = ["ContractRegistry", "missing_records", "read_registry"]


class ContractRegistry:
    """The recorded contracts of one application: a bucket with a key ``<type>.<version>`` for each."""

    def __init__(self, kv: KeyValue) -> None:
        self._kv = kv

    async def load(self) -> dict[tuple[str, int], Record]:
        """Every record, by type and version, all as of one moment."""
        entries = await self._kv.snapshot([">"])
        found = [read_record(entry.value, f"bucket {self._kv.bucket!r}, key {key!r}") for key, entry in entries.items()]
        return {(record.type, record.version): record for record in found}

    async def add(self, record: Record) -> bool:
        """Record a contract; False if it is recorded already, with the same meaning.

        Raises:
            ContractFrozen: The version is recorded with another meaning.
        """
        try:
            await self._kv.create(record.name, record.write())
        except KeyExists:
            entry = await self._kv.get(record.name)
            known = read_record(entry.value, f"bucket {self._kv.bucket!r}, key {record.name!r}")
            changes = differences(known.schema, record.schema)
            if changes:
                raise ContractFrozen(record.type, record.version, tuple(map(str, changes))) from None
            return False
        return True


async def read_registry(js: JetStream, bucket: str) -> dict[tuple[str, int], Record]:
    """Every record of a bucket; empty if the bucket does not exist."""
    try:
        kv = await js.kv(bucket)
    except StreamNotFound:
        return {}
    return await ContractRegistry(kv).load()


def missing_records(catalogue: Catalogue, records: Records, findings: list[Finding], source: str) -> list[Record]:
    """Contracts to record: those without a record, of types without a breaking finding."""
    broken = {finding.type for finding in findings if finding.is_breaking}
    return [
        record_of(contract, source)
        for contract in catalogue
        if (contract.type, contract.version) not in records and contract.type not in broken
    ]
