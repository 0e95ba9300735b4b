"""Archives of streams in a lake: tables that outlive the retention of their streams. Needs the extra ``lake``.

Spark's Python processes import single modules of this package, so each name is loaded when it is used.
"""

from typing import TYPE_CHECKING

from jetspark.lake import _extra as _extra

if TYPE_CHECKING:
    from jetspark.lake.archive import ArchiveTable, find_tables, open_table
    from jetspark.lake.archiver import ArchiveCommit, archive_streams
    from jetspark.lake.compaction import Compaction, CompactOptions, compact_archive
    from jetspark.lake.position import ArchivePosition, DataFile, Snapshot, StreamIdentity
    from jetspark.lake.range_writing import ArchiveOptions
    from jetspark.lake.restoring import Restoration, RestoreOptions, restore_archive
    from jetspark.lake.trimming import Trim, TrimOptions, trim_archive
    from jetspark.lake.verification import ArchiveVerification, ArchiveVerifyOptions, FileFault, verify_archive
else:

    def __getattr__(name):
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        homes = {
            "archive": ("ArchiveTable", "find_tables", "open_table"),
            "archiver": ("ArchiveCommit", "archive_streams"),
            "compaction": ("Compaction", "CompactOptions", "compact_archive"),
            "position": ("ArchivePosition", "DataFile", "Snapshot", "StreamIdentity"),
            "range_writing": ("ArchiveOptions",),
            "restoring": ("Restoration", "RestoreOptions", "restore_archive"),
            "trimming": ("Trim", "TrimOptions", "trim_archive"),
            "verification": ("ArchiveVerification", "ArchiveVerifyOptions", "FileFault", "verify_archive"),
        }
        [home] = [home for home, names in homes.items() if name in names]
        globals()[name] = found = getattr(import_module(f"jetspark.lake.{home}"), name)
        return found

    def __dir__():
        return sorted(__all__)


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
