"""The options of reading and writing buckets."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, fields

from jetspark.blocking.steps import ProcedureRunner
from jetspark.errors import ConfigError
from jetspark.jetstream.kv import check_bucket, check_filter
from jetspark.spark.connections import patiently
from jetspark.spark.options import Connecting, boolean, check_disjoint, choice, count, milliseconds, names, option, text
from jetspark.spark.stream.source_options import SourceOptions, moment, pairs
from jetspark.state import tables

__all__ = ["FORMAT", "BucketOptions", "ReadOptions", "StreamOptions", "WriteOptions"]

FORMAT = "jetstream_kv"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketOptions(Connecting):
    """Options of reading and of writing buckets."""

    bucket: str = option(text, "the bucket; required", default="")
    patience_s: float = option(
        milliseconds,
        "longest wait for a server that is away, before the task or query fails",
        default=60.0,
        name="patienceMs",
    )

    def __post_init__(self) -> None:
        Connecting.__post_init__(self)
        if not self.bucket:
            raise ConfigError(f"{FORMAT}: bucket: expected the name of one")
        check_bucket(self.bucket)

    def connecting(self) -> Connecting:
        """The part that says how to connect, by which connections are kept."""
        return Connecting(**{entry.name: getattr(self, entry.name) for entry in fields(Connecting)})

    def open(self, keys: Sequence[str] = (), *, is_first_contact: bool = False) -> tables.BucketView:
        return patiently(
            self.connecting(),
            lambda js: ProcedureRunner(js).run(tables.open_bucket(self.bucket, keys)),
            patience_s=self.patience_s,
            is_first_contact=is_first_contact,
        )

    def for_ranges(self) -> SourceOptions:
        """The same for reading ranges of the stream behind the bucket."""
        ways = {entry.name: getattr(self, entry.name) for entry in fields(Connecting)}
        return SourceOptions(**ways, stream=(f"KV_{self.bucket}",), fetch_timeout_s=self.patience_s)


def moment_of_table(value: str) -> int | datetime.datetime:
    """A revision, or ISO 8601."""
    if value.strip().replace("_", "").lstrip("-").isdecimal():
        return count(value)
    try:
        return moment(value)
    except ValueError:
        raise ValueError("a revision, or a time such as 2026-03-20T10:14:30Z") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions(BucketOptions):
    """The options of ``read``."""

    keys: tuple[str, ...] = option(
        names, "only these keys, with commas between them; `*` is one token, a last `>` the rest", default=()
    )
    history: bool = option(boolean, "every revision the bucket still has, not only the last of each key", default=False)
    as_of: int | datetime.datetime | None = option(  # noqa: RUF009
        moment_of_table, "the table as it was when the bucket was at this revision, or at this time (ISO 8601)"
    )
    archive: str | None = option(
        text, "with `asOf` or `history`: root of an archive of the bucket's stream `KV_<bucket>`, for older revisions"
    )
    archive_options: tuple[tuple[str, str], ...] = option(
        pairs, "options of the archive's store, as JSON", default=(), secret=True
    )
    include_deletes: bool | None = option(
        boolean, "rows for deleted and purged keys too; by default with `history` only"
    )
    num_partitions: int | None = option(
        count, "how many tasks read; by default one for a table of the present, else one for each 100,000 revisions"
    )
    fail_on_data_loss: bool = option(
        boolean, "fail when values are gone that the table had at its moment; `false` leaves them out", default=True
    )

    def __post_init__(self) -> None:
        BucketOptions.__post_init__(self)
        for each in self.keys:
            check_filter(each)
        check_disjoint("keys", self.keys)
        if self.archive is not None and self.as_of is None and not self.history:
            raise ConfigError(f"{FORMAT}: archive={self.archive!r}: expected together with asOf or history")
        if self.archive_options and self.archive is None:
            raise ConfigError(f"{FORMAT}: archiveOptions: expected together with archive")

    @property
    def with_deletes(self) -> bool:
        return self.history if self.include_deletes is None else self.include_deletes


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions(BucketOptions):
    """The options of ``readStream``."""

    keys: tuple[str, ...] = option(
        names, "only these keys, with commas between them; `*` is one token, a last `>` the rest", default=()
    )
    starting_offsets: str = option(
        text, "where a new query begins: `earliest`, `latest`, or a revision", default="earliest"
    )
    max_offsets_per_trigger: int | None = option(count, "a micro-batch covers at most this many revisions")
    include_deletes: bool = option(boolean, "rows for deletions and purges too", default=True)
    num_partitions: int = option(count, "how many tasks read a micro-batch", default=1)
    accept_filter_change: bool = option(
        boolean,
        "go on from a checkpoint of other `keys`; what those left out before it is never read",
        default=False,
    )

    def __post_init__(self) -> None:
        BucketOptions.__post_init__(self)
        for each in self.keys:
            check_filter(each)
        check_disjoint("keys", self.keys)
        start = self.starting_offsets
        if start not in ("earliest", "latest") and not (start.isdecimal() and len(start) < 20 and int(start) > 0):
            raise ConfigError(f"{FORMAT}: startingOffsets={start!r}: expected earliest, latest or a revision")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions(BucketOptions):
    """The options of ``write`` and ``writeStream``."""

    guard: str = option(
        choice("none", "revision", "sequence"),
        "`none`: what is written last stays; `revision`: write where the column `revision` is still the key's last; "
        "`sequence`: write where the column `sequence` is newer than what is stored",
        default="none",
    )
    on_conflict: str = option(
        choice("fail", "skip"),
        "with `guard=revision`, keys that others have written: fail the job, or leave them out and log how many",
        default="fail",
    )
    batch_size: int = option(
        count, "rows that are brought together before they are written; of one key only the last is", default=10_000
    )

    def __post_init__(self) -> None:
        BucketOptions.__post_init__(self)
        if self.on_conflict == "skip" and self.guard != "revision":
            raise ConfigError(f"{FORMAT}: onConflict=skip with guard={self.guard}: expected guard=revision")
