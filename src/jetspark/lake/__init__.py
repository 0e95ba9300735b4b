"""Archives of streams in a lake: tables that outlive the retention of their streams. Needs the extra ``lake``."""

from jetspark.lake import _extra as _extra
from jetspark.lake.archive import ArchiveTable, find_tables, open_table
from jetspark.lake.archiver import ArchiveCommit, archive_streams
from jetspark.lake.compaction import Compaction, CompactOptions, compact_archive
from jetspark.lake.position import ArchivePosition, DataFile, Snapshot, StreamIdentity
from jetspark.lake.range_writing import ArchiveOptions
from jetspark.lake.restoring import Restoration, RestoreOptions, restore_archive
from jetspark.lake.trimming import Trim, TrimOptions, trim_archive
from jetspark.lake.verification import ArchiveVerification, ArchiveVerifyOptions, FileFault, verify_archive

__all__ = [
    "ArchiveCommit",
    "ArchiveOptions",
    "ArchivePosition",
    "ArchiveTable",
    "ArchiveVerification",
    "ArchiveVerifyOptions",
    "CompactOptions",
    "Compaction",
    "DataFile",
    "FileFault",
    "Restoration",
    "RestoreOptions",
    "Snapshot",
    "StreamIdentity",
    "Trim",
    "TrimOptions",
    "archive_streams",
    "compact_archive",
    "find_tables",
    "open_table",
    "restore_archive",
    "trim_archive",
    "verify_archive",
]
