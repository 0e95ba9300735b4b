"""Archives in tests: made by the real archiver, and checked twice: by ``verify``, and by a count of DuckDB's own."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb

from jetspark.blocking import JetStream
from jetspark.lake import (
    ArchiveOptions,
    ArchiveTable,
    ArchiveVerification,
    ArchiveVerifyOptions,
    archive_streams,
    find_tables,
    verify_archive,
)

__all__ = ["archive", "archiving", "counted", "only_table", "proved", "writer_process"]

WRITER = """
import json, logging, signal, sys, threading
from jetspark.blocking import connect
from jetspark.lake import ArchiveOptions, archive_streams

logging.basicConfig(level=logging.INFO)
url, streams, options = sys.argv[1], sys.argv[2].split(","), json.loads(sys.argv[3])
with connect(url) as client:
    archive_streams(client.jetstream(), streams, ArchiveOptions(**options))
"""


def writer_process(url: str, streams: str, to: str | Path, log: Path, **options: Any) -> subprocess.Popen[bytes]:
    """An archiver as a process of its own, to be killed."""
    given = {"to": str(to), "lease_s": None} | options
    with log.open("ab") as output:
        return subprocess.Popen([sys.executable, "-c", WRITER, url, streams, json.dumps(given)], stderr=output)


@contextlib.contextmanager
def archiving(js: JetStream, stream: str, to: str | Path, **options: Any) -> Iterator[Future[None]]:
    """An archiver in a thread, which is stopped at the end; its errors are raised there."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as beside:
        calls = {name: options.pop(name) for name in ("on_progress", "on_commit") if name in options}
        given = ArchiveOptions(**({"to": str(to), "lease_s": None} | options))
        running = beside.submit(archive_streams, js, [stream], given, stop=stop.wait, **calls)
        try:
            yield running
        finally:
            stop.set()
        running.result(60)


def archive(js: JetStream, stream: str, to: str | Path, **options: Any) -> None:
    """Archive what a stream has now."""
    archive_streams(js, [stream], ArchiveOptions(to=str(to), **options), once=True)


def only_table(to: str | Path, **arguments: Any) -> ArchiveTable:
    [table] = find_tables(str(to), **arguments)
    return table


def proved(table: ArchiveTable, js: JetStream | None = None, *, lost: Sequence[int] = ()) -> ArchiveVerification:
    """Check that a table is complete and equal to what the stream still has; another engine counts the same."""
    found = verify_archive(table, ArchiveVerifyOptions(full=True), against=js)
    assert found.is_complete, str(found)
    assert [sequence for each in found.lost for sequence in each] == list(lost)
    rows, distinct, first, last = counted(table)
    assert (rows, distinct) == (found.rows, found.rows)
    assert found.rows + found.deleted + len(lost) == found.next - found.first
    if rows:
        assert found.first <= first <= last < found.next
    # The statistics alone say the same.
    assert verify_archive(table).to_dict() | {"compared": found.compared} == found.to_dict()
    return found


def counted(table: ArchiveTable) -> tuple[int, int, int, int]:
    """Rows, different sequences, first and last sequence, as DuckDB counts them in the files of the last commit."""
    snapshot = table.snapshot()
    assert snapshot is not None
    with tempfile.TemporaryDirectory() as folder:
        paths = table.locations(snapshot)
        if "://" in table.uri:  # DuckDB would have to download an extension
            for number, file in enumerate(snapshot.files):
                data = table.store.get(file.path)
                assert data is not None
                paths[number] = str(Path(folder, f"{number}.parquet"))
                Path(paths[number]).write_bytes(data)
        if not paths:
            return 0, 0, 0, 0
        query = "SELECT count(*), count(DISTINCT sequence), min(sequence), max(sequence) FROM read_parquet($paths)"
        with duckdb.connect() as database:
            [row] = database.execute(query, {"paths": paths}).fetchall()
    return row
