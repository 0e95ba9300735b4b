"""Archives for tests of their readers: some range of a stream, in so many files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jetspark.blocking import JetStream
from jetspark.blocking.steps import ProcedureRunner
from jetspark.lake.archive import open_table
from jetspark.lake.parquet_files import DataFileWriter, read_rows
from jetspark.lake.position import Snapshot, StreamIdentity
from jetspark.lake.rows import rows_of
from jetspark.state.scan import Range, RangeScan, head_of

__all__ = ["archive_stream", "compact_archive"]


def archive_stream(
    js: JetStream,
    root: Path | str,
    stream: str,
    *,
    until: int | None = None,
    files: int = 1,
    lost: Sequence[range] = (),
    format: str | None = None,
    options: Mapping[str, str] | None = None,
) -> int:
    """Archive what a stream has behind its archive, up to ``until``, exclusive; returns the archive's next sequence."""
    head = head_of(js.stream(stream).info())
    identity = StreamIdentity(stream, head.created)
    table = open_table(str(root), identity, format=format, options=options)
    base = table.open_for_writing(head.first, epoch=1)
    start, end = base.position.next, head.next if until is None else until
    size = max(1, -(-(end - start) // files))
    for begin in range(start, end, size):
        part = Range(stream, head.created, begin, min(begin + size, end), is_earliest=True)
        with DataFileWriter(table.store, identity, begin) as writer:
            for piece in ProcedureRunner(js).pieces(RangeScan(part)):
                writer.write(rows_of(stream, piece))
            made = writer.finish(part.end, lost=lost)
        base = table.log.commit(base, replace(base.position, next=part.end), add=made)
    return base.position.next


def compact_archive(js: JetStream, root: Path | str, stream: str) -> Snapshot:
    """Replace all files of an archive by one, and delete them at once."""
    table = open_table(str(root), StreamIdentity(stream, head_of(js.stream(stream).info()).created))
    base = table.snapshot()
    assert base is not None
    with DataFileWriter(table.store, table.identity, base.position.first) as writer:
        for file in base.files:
            for rows in read_rows(table.store, file):
                writer.write(rows)
        made = writer.finish(base.position.next)
    found = table.log.commit(base, base.position, add=made, remove=base.files)
    table.store.delete([each.path for each in base.files])
    return found
