"""Where a projection is, as far as it is pure."""

from __future__ import annotations

import pytest

from jetspark.app import Event
from jetspark.app.projections.buckets import ProjectionPlace, alias_key, check_version, place_of
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.errors import ProtocolError, UsageError


class Counted(Event, type="place.counted", version=1, key="name", subject="counts.{name}"):
    name: str


class Counts:
    def key(self, event: Counted) -> str:
        return event.name

    def apply(self, state: int | None, event: Counted) -> int:
        return (state or 0) + 1


SPEC = ProjectionSpec("counts", Counts, events=[Counted], bucket="counts", version=2)


def test_a_projection_is_where_it_declares_until_it_is_swapped() -> None:
    assert place_of(SPEC, None) == ProjectionPlace("counts", 2)
    assert place_of(SPEC, ProjectionPlace("counts_v3", 3).encode()) == ProjectionPlace("counts_v3", 3)
    assert alias_key("counts") == "counts.bucket"


def test_code_of_another_version_is_refused_with_the_remedy() -> None:
    assert check_version(SPEC, ProjectionPlace("counts", 2)) == ProjectionPlace("counts", 2)
    with pytest.raises(UsageError, match=r"version 3.*this code is version 2: rebuild"):
        check_version(SPEC, ProjectionPlace("counts_v3", 3))


@pytest.mark.parametrize("value", [b"", b"{", b"[]", b'{"bucket": 1, "version": 1}', b'{"bucket": "a"}'])
def test_a_record_that_is_none_is_an_error(value: bytes) -> None:
    with pytest.raises(ProtocolError, match="not readable"):
        ProjectionPlace.decode(value)
