"""What a request to replay means in sequences of the stream, and whether all of it is still there. Pure."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.core.arguments import instance, unfit
from jetspark.core.subjects import validate_filter
from jetspark.errors import ConfigError, DataLoss
from jetspark.state.scan import Head

__all__ = ["Extent", "ReplayRequest", "check_is_whole", "check_keys", "extent_of"]

_REMEDY = (
    "events that are gone cannot be replayed; begin at or after the first, restore the stream from a backup, or "
    "rebuild with the states of a bucket that has them (jetspark rebuild --from-bucket)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """Which events: a range by sequence or by time, of some keys or on some subjects. Nothing at all means all."""

    from_seq: int | None = None
    to_seq: int | None = None
    """The last one, included."""
    since: datetime.datetime | None = None
    """Events stored at or after this moment."""
    until: datetime.datetime | None = None
    """Events stored before this moment."""
    keys: tuple[Any, ...] = ()
    """As ``key`` of the projection returns them; with windows ``"<key>.<window>"``, or tuples of the two."""
    subject: str | None = None
    """Only events on subjects that match; wildcards are allowed."""

    def __post_init__(self) -> None:
        for name in ("from_seq", "to_seq"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name}={value!r}: expected a sequence, 1 or more")
        for name in ("since", "until"):
            value = getattr(self, name)
            if (
                value is not None
                and instance(name, value, datetime.datetime, "a datetime with a time zone").tzinfo is None
            ):
                raise ConfigError(f"{name}={value}: expected a time zone, such as {value.isoformat()}Z for UTC")
        if self.from_seq is not None and self.since is not None:
            raise ConfigError("from_seq with since: expected one of the two")
        if self.to_seq is not None and self.until is not None:
            raise ConfigError("to_seq with until: expected one of the two")
        if self.from_seq is not None and self.to_seq is not None and self.from_seq > self.to_seq:
            raise ConfigError(f"from_seq={self.from_seq} is behind to_seq={self.to_seq}")
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise ConfigError(f"since={self.since} is not before until={self.until}")
        if self.subject is not None:
            validate_filter(self.subject)
        check_keys(self.keys)

    def of(self, spec: ProjectionSpec) -> ReplayRequest:
        """The same request, with its keys as text.

        Raises:
            ConfigError: A key is none of the projection's.
        """
        return dataclasses.replace(self, keys=tuple(spec.key_text(spec.bucket_key(key)) for key in self.keys))

    def bucket_keys(self, spec: ProjectionSpec) -> frozenset[str]:
        """The keys as the bucket has them."""
        return frozenset(map(spec.bucket_key, self.keys))

    def to_dict(self) -> dict[str, Any]:
        return {
            "from_seq": self.from_seq,
            "to_seq": self.to_seq,
            "since": None if self.since is None else self.since.isoformat(),
            "until": None if self.until is None else self.until.isoformat(),
            "keys": list(self.keys),
            "subject": self.subject,
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> ReplayRequest:
        def moment(name: str) -> datetime.datetime | None:
            text = fields[name]
            return None if text is None else datetime.datetime.fromisoformat(text)

        return cls(
            from_seq=fields["from_seq"],
            to_seq=fields["to_seq"],
            since=moment("since"),
            until=moment("until"),
            keys=tuple(fields["keys"]),
            subject=fields["subject"],
        )


def check_keys(keys: Any) -> None:
    """
    Raises:
        ConfigError: They are one text, whose characters would be taken for keys, or nothing to iterate over.
    """
    if isinstance(keys, str | bytes | Mapping) or not isinstance(keys, Iterable):
        raise unfit("keys", keys, "several keys, such as ('o-1',)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Sequences of a stream, both ends included; ``last`` is below ``first`` where there is nothing to read."""

    stream: str
    created: str
    """Tells the stream from a later one of the same name."""
    first: int
    last: int

    @property
    def is_empty(self) -> bool:
        return self.last < self.first

    def __str__(self) -> str:
        what = "nothing" if self.is_empty else f"sequences {self.first} to {self.last}"
        return f"{what} of stream {self.stream}"


def extent_of(
    request: ReplayRequest, head: Head, first: int, *, since_seq: int | None = None, until_seq: int | None = None
) -> Extent:
    """The sequences that a request means, frozen at the end that the stream has now.

    Args:
        first: The sequence of the first message that the stream ever had.
        since_seq: Of the first message there is that was stored at or after ``since``; where there is none, the next
            sequence of the stream.
        until_seq: The same of ``until``.

    Raises:
        DataLoss: Messages of the range are gone, or may be: those that a time asks for, and before which the stream
            has nothing left that would be older.
        ConfigError: The range begins behind the end of the stream.
    """
    begin = first if request.from_seq is None else max(request.from_seq, first)
    if since_seq is not None:
        # The first message there is is young enough: those before it, which are gone, may have been as well.
        begin = since_seq if since_seq > head.whole_from else first
    last = head.next - 1
    if request.from_seq is not None and request.from_seq > last:
        raise ConfigError(f"from_seq={request.from_seq}: stream {head.stream!r} ends at {last}")
    if request.to_seq is not None:
        last = min(last, request.to_seq)
    if until_seq is not None:
        last = min(last, until_seq - 1)
    extent = Extent(stream=head.stream, created=head.created, first=begin, last=last)
    check_is_whole(extent, head)
    return extent


def check_is_whole(extent: Extent, head: Head) -> None:
    """
    Raises:
        DataLoss: The stream begins behind the first sequence of the range, and events may be gone with that.
    """
    if not extent.is_empty and extent.first < head.whole_from:
        lost = f"the range {extent.first} to {extent.last} is not all there: {_REMEDY}"
        raise DataLoss(extent.stream, extent.first, head.first, lost)
