"""The options of reading a stream. Pure."""

from __future__ import annotations

import datetime
import json
import re
from dataclasses import dataclass

from jetspark.core.subjects import validate_filter
from jetspark.errors import ConfigError
from jetspark.jetstream.checks import check_name
from jetspark.lake.hybrid import Archives
from jetspark.lake.reading import ArchiveRoot
from jetspark.spark.offsets import Limits, Sizes, Where
from jetspark.spark.options import Connecting, boolean, check_disjoint, count, milliseconds, names, option, size, text

__all__ = ["Bound", "SourceOptions", "moment", "pairs"]


@dataclass(frozen=True, slots=True)
class Bound:
    """Where reading starts or ends: one place for all streams, or one for each by name."""

    everywhere: Where | None = None
    by_stream: tuple[tuple[str, Where], ...] = ()

    def of(self, stream: str | None) -> Where | None:
        """None when nothing is said of this stream."""
        return self.everywhere if stream is None else dict(self.by_stream).get(stream, self.everywhere)


_BOUND = 'earliest, latest, a sequence, or JSON such as {"ORDERS": 1201}'
# Kafka's numbers for the two, which people have in their scripts.
_KAFKAS: dict[int, Where] = {-2: "earliest", -1: "latest"}


def bound(value: str) -> Bound:
    text = value.strip()
    if not text.startswith("{"):
        return Bound(_where(text))
    try:
        found = json.loads(text)
    except ValueError:
        raise ValueError(_BOUND) from None
    return Bound(None, tuple(sorted((str(name), _where(each)) for name, each in found.items())))


def pattern(value: str) -> str:
    """A regular expression."""
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"a regular expression such as ORDERS_.* ({error})") from None
    return value


def _where(value: object) -> Where:
    if isinstance(value, str):
        lowered = value.lower()
        if lowered == "earliest":
            return "earliest"
        if lowered == "latest":
            return "latest"
        try:
            value = int(lowered)
        except ValueError:
            raise ValueError(_BOUND) from None
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(_BOUND)
    if value in _KAFKAS:
        return _KAFKAS[value]
    if value < 1:
        raise ValueError("a sequence of 1 or more")
    return value


def moment(value: str) -> datetime.datetime:
    """Epoch milliseconds or ISO 8601; without a zone it is UTC."""
    text = value.strip()
    try:
        if text.lstrip("-").isdecimal():
            return datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(milliseconds=int(text))
        found = datetime.datetime.fromisoformat(text)
        return found.replace(tzinfo=datetime.UTC) if found.tzinfo is None else found.astimezone(datetime.UTC)
    except (ValueError, OverflowError):
        raise ValueError("milliseconds since 1970 or ISO 8601 such as 2026-03-20T10:14:30Z") from None


def pairs(value: str) -> tuple[tuple[str, str], ...]:
    """A JSON object of texts."""
    try:
        found = json.loads(value)
        if isinstance(found, dict) and all(isinstance(each, str) for each in found.values()):
            return tuple(sorted(found.items()))
    except ValueError:
        pass
    raise ValueError('JSON such as {"aws_region": "eu-west-1"}')


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions(Connecting):
    """Streams and filters to read, the range, and the limits of batches and partitions."""

    stream: tuple[str, ...] = option(
        names, "stream to read, or several with commas between them; this or `streamPattern` is required", default=()
    )
    stream_pattern: str | None = option(
        pattern, "every stream whose whole name this regular expression matches, also those created later"
    )
    subjects: tuple[str, ...] = option(
        names, "only messages on these subjects, wildcards allowed; the server filters", default=()
    )
    starting_offsets: Bound | None = option(  # noqa: RUF009
        bound,
        'first sequence to read: `earliest`, `latest`, a number, or JSON `{"ORDERS": 1201}`; '
        "by default `latest` for streaming and `earliest` for batch",
    )
    ending_offsets: Bound | None = option(  # noqa: RUF009
        bound, "batch: the sequence to stop *before*, as above; by default `latest`, what is there when it is planned"
    )
    starting_timestamp: datetime.datetime | None = option(  # noqa: RUF009
        moment, "instead of `startingOffsets`: the first message stored at or after; epoch ms or ISO 8601"
    )
    ending_timestamp: datetime.datetime | None = option(  # noqa: RUF009
        moment, "batch, instead of `endingOffsets`: up to the first message stored at or after, without it"
    )
    max_offsets_per_trigger: int | None = option(count, "streaming: most messages a micro-batch takes")
    max_bytes_per_trigger: int | None = option(
        size, "streaming: most bytes a micro-batch takes, by the mean size of the stream's messages"
    )
    min_partitions: int = option(count, "cut into at least this many partitions, if there are as many rows", default=1)
    max_records_per_partition: int = option(count, "cut into partitions of at most this many messages", default=100_000)
    fail_on_data_loss: bool = option(
        boolean,
        "fail when messages that were to be read are gone from the stream; `false` logs how many and goes on",
        default=True,
    )
    accept_filter_change: bool = option(
        boolean,
        "streaming: go on from a checkpoint of other `subjects`; what those left out before it is never read",
        default=False,
    )
    include_headers: bool = option(boolean, "fill the column `headers`, which is null otherwise", default=False)
    fetch_timeout_s: float = option(
        milliseconds,
        "a task fails when nothing has come for this long though the stream has it",
        default=120.0,
        name="fetchTimeoutMs",
    )
    archive: str | None = option(
        text, "root of an archive with the stream: older messages come from there; a folder, or a URI such as s3://..."
    )
    archive_options: tuple[tuple[str, str], ...] = option(
        pairs,
        'options of the archive\'s store, as JSON such as `{"aws_region": "eu-west-1"}`; credentials are better in the '
        "environment of driver and executors",
        default=(),
        secret=True,
    )

    def archives(self) -> Archives:
        """The archives of the streams; none without the option."""
        root = None if self.archive is None else ArchiveRoot(self.archive, dict(self.archive_options))
        # Of streams that a pattern matches, new ones may have no archive yet.
        return Archives(root, may_lack=self.stream_pattern is not None)

    @property
    def wanted_subjects(self) -> tuple[str, ...]:
        """Subjects that become rows: a checkpoint must not have skipped any of them."""
        return self.subjects

    def __post_init__(self) -> None:
        # Not super(): a dataclass with slots is a new class, and super() would refer to the original one.
        Connecting.__post_init__(self)
        if bool(self.stream) == (self.stream_pattern is not None):
            raise ConfigError(
                "stream: expected the name of a stream, or several with commas between them; or streamPattern instead"
            )
        for name in self.stream:
            check_name("stream", name)
        if len(set(self.stream)) < len(self.stream):
            raise ConfigError(f"stream={','.join(self.stream)!r}: expected each of them once")
        for subject in self.subjects:
            validate_filter(subject)
        check_disjoint("subjects", self.subjects)
        for name, first, second in (
            ("starting", self.starting_offsets, self.starting_timestamp),
            ("ending", self.ending_offsets, self.ending_timestamp),
        ):
            if first is not None and second is not None:
                raise ConfigError(f"{name}Offsets with {name}Timestamp: expected one of the two")
        for option_name, given in (
            ("startingOffsets", self.starting_offsets),
            ("endingOffsets", self.ending_offsets),
        ):
            for name, _ in given.by_stream if given is not None else ():
                if not self.has(name):
                    raise ConfigError(f"{option_name}: {name!r} is not one of {self.which}")
        self._check_order()
        if self.archive_options and self.archive is None:
            raise ConfigError("archiveOptions: expected together with archive")

    def has(self, name: str) -> bool:
        """True if the options select a stream of this name."""
        return name in self.stream if self.stream_pattern is None else bool(re.fullmatch(self.stream_pattern, name))

    @property
    def which(self) -> str:
        """The streams, for errors."""
        given = self.stream_pattern
        return f"stream={','.join(self.stream)!r}" if given is None else f"streamPattern={given!r}"

    def _named(self) -> set[str | None]:
        """Streams of which something may be said; None is any other one."""
        bounds = [each for each in (self.starting_offsets, self.ending_offsets) if each is not None]
        return {*self.stream, *(name for each in bounds for name, _ in each.by_stream)} or {None}

    def _check_order(self) -> None:
        for name in self._named():
            start = self.starting_offsets.of(name) if self.starting_offsets is not None else None
            end = self.ending_offsets.of(name) if self.ending_offsets is not None else None
            if end == "earliest":
                raise ConfigError("endingOffsets=earliest: nothing is before that; expected latest or a sequence")
            if isinstance(start, int) and isinstance(end, int) and start > end:
                raise ConfigError(f"startingOffsets={start} is behind endingOffsets={end}, which is exclusive")
        if (
            self.starting_timestamp is not None
            and self.ending_timestamp is not None
            and self.starting_timestamp > self.ending_timestamp
        ):
            raise ConfigError(
                f"startingTimestamp={self.starting_timestamp} is behind endingTimestamp={self.ending_timestamp}"
            )

    def for_batch(self) -> SourceOptions:
        """These, if they are for a batch.

        Raises:
            ConfigError: Some are for streaming only.
        """
        for name, value in (
            ("maxOffsetsPerTrigger", self.max_offsets_per_trigger),
            ("maxBytesPerTrigger", self.max_bytes_per_trigger),
        ):
            if value is not None:
                raise ConfigError(f"{name}: for streaming only; a batch is bounded by endingOffsets")
        if self.starting_offsets is not None and any(
            self.starting_offsets.of(name) == "latest" for name in self._named()
        ):
            raise ConfigError("startingOffsets=latest: a batch would have no rows; expected earliest or a sequence")
        return self

    def for_streaming(self) -> SourceOptions:
        """These, if they are for streaming.

        Raises:
            ConfigError: Some are for a batch only.
        """
        for name, value in (("endingOffsets", self.ending_offsets), ("endingTimestamp", self.ending_timestamp)):
            if value is not None:
                raise ConfigError(f"{name}: for a batch only; for what is there now use trigger(availableNow=True)")
        return self

    @property
    def sizes(self) -> Sizes:
        return Sizes(min_partitions=self.min_partitions, max_records=self.max_records_per_partition)

    @property
    def limits(self) -> Limits:
        return Limits(self.max_offsets_per_trigger, self.max_bytes_per_trigger)
