"""Ranges to replay: the request, its sequences in the stream, and the check that the stream still has all of them.

Pure.
"""

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
    "events that are gone cannot be replayed; begin at or after the first, read them from an archive of the stream "
    "(--archive), or rebuild with the states of a bucket that has them (jetspark rebuild --from-bucket)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayRequest:
    """The events to replay: a range by sequence or by time, and optionally only some keys or subjects. Default: all."""

    from_seq: int | None = None
    to_seq: int | None = None
    """The last sequence, included."""
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
            raise ConfigError("from_seq and since exclude each other: expected one of the two")
        if self.to_seq is not None and self.until is not None:
            raise ConfigError("to_seq and until exclude each other: expected one of the two")
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
            ConfigError: The projection cannot have such a key.
        """
        return dataclasses.replace(self, keys=tuple(spec.key_text(spec.bucket_key(key)) for key in self.keys))

    def bucket_keys(self, spec: ProjectionSpec) -> frozenset[str]:
        """The keys as the bucket spells them."""
        return frozenset(map(spec.bucket_key, self.keys))


def check_keys(keys: Any) -> None:
    """
    Raises:
        ConfigError: The value is one text, whose characters would be taken for keys, or is not iterable.
    """
    if isinstance(keys, str | bytes | Mapping) or not isinstance(keys, Iterable):
        raise unfit("keys", keys, "several keys, such as ('o-1',)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Sequences of a stream, both ends included; ``last`` is below ``first`` where there is nothing to read."""

    stream: str
    created: str
    """When the stream was created: a later stream of the same name has another time."""
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
    """The sequences of a request, up to the end that the stream has now.

    Args:
        first: The sequence of the first message that the stream ever had.
        since_seq: The sequence of the first remaining message stored at or after ``since``; without such a message, the
            next sequence of the stream.
        until_seq: The same for ``until``.

    Raises:
        DataLoss: Messages of the range are gone, or may be: the range begins at a time, and the stream has no older
            message left.
        ConfigError: The range begins behind the end of the stream.
    """
    begin = first if request.from_seq is None else max(request.from_seq, first)
    if since_seq is not None:
        # Even the first remaining message is in the range: removed messages before it may have been as well.
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
        DataLoss: The stream begins behind the first sequence of the range, so events of the range may be gone.
    """
    loss = head.first_loss(extent.first, extent.last + 1)
    if loss is not None:
        lost = f"the range {extent.first} to {extent.last} is not all there: {_REMEDY}"
        raise DataLoss(extent.stream, loss.start, loss.stop, lost)
