"""Golden files: the contracts of an application in a folder, one file for each type and version.

They are committed beside the code. A file is written when its version is new and never changed afterwards, so a test
that reads them all (:func:`check_contracts`) proves that the present code reads everything that earlier code has
written.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jetspark.app.contracts.contract_records import Finding, Record, check_records, read_record
from jetspark.app.contracts.registry import missing_records
from jetspark.errors import ConfigError

if TYPE_CHECKING:
    from jetspark.app.spec import HasSpec

__all__ = ["check_contracts", "golden_findings", "read_golden", "write_golden"]

ENDING = ".json"


def read_golden(folder: str | Path) -> dict[tuple[str, int], Record]:
    """The records in a folder, by type and version; empty if the folder does not exist.

    Raises:
        ConfigError: A file is not a record, has another contract than its name says, or cannot be read.
    """
    found = {}
    for path in sorted(Path(folder).glob(f"*{ENDING}")):
        try:
            record = read_record(path.read_bytes(), str(path))
        except OSError as error:
            raise ConfigError(f"{path}: expected a golden file that can be read: {error.strerror}") from error
        if path.name != _file_name(record):
            raise ConfigError(f"{path}: it holds {record.type} version {record.version}; expected {_file_name(record)}")
        found[record.type, record.version] = record
    return found


def golden_findings(app: HasSpec, folder: str | Path) -> list[Finding]:
    """Promises in the files that the present code does not keep, and contracts without a file."""
    app = app.spec
    return check_records(app.catalogue, read_golden(folder), app.compatibility)


def write_golden(app: HasSpec, folder: str | Path) -> list[Path]:
    """Write the files that are missing, and return them. Files that are there are left alone, right or wrong.

    Raises:
        ConfigError: A file is not a record, or the folder cannot be written to.
    """
    app = app.spec
    folder = Path(folder)
    records = read_golden(folder)
    findings = check_records(app.catalogue, records, app.compatibility)
    missing = missing_records(app.catalogue, records, findings, app.source)
    written = []
    try:
        if missing:
            folder.mkdir(parents=True, exist_ok=True)
        for record in missing:
            path = folder / _file_name(record)
            path.write_bytes(record.write())
            written.append(path)
    except OSError as error:
        raise ConfigError(f"{folder}: expected a folder that can be written to: {error.strerror}") from error
    return written


def check_contracts(app: HasSpec, folder: str | Path) -> None:
    """Assert that every golden file is kept, and that every type and version has one. For tests.

    Raises:
        AssertionError: A contract does not hold; the message lists field and rule of each.
    """
    app = app.spec
    findings = golden_findings(app, folder)
    if findings:
        listed = "\n".join(map(str, findings))
        raise AssertionError(f"{folder}: write what is new with `jetspark schema fixtures`\n{listed}")


def _file_name(record: Record) -> str:
    return f"{record.type}.v{record.version}{ENDING}"
