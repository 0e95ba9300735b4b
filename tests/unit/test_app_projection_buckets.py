"""Where a projection is, as far as it is pure."""

from __future__ import annotations

import pytest

from jetspark.app import Event
from jetspark.app.projections.bucket_refs import BucketRef, alias_key, bucket_ref_of, check_version
from jetspark.app.projections.projection_spec import ProjectionArguments, ProjectionSpec
from jetspark.errors import ProtocolError, UsageError


class Counted(Event, type="place.counted", version=1, key="name", subject="counts.{name}"):
    name: str


class Counts:
    def key(self, event: Counted) -> str:
        return event.name

    def apply(self, state: int | None, event: Counted) -> int:
        return (state or 0) + 1


SPEC = ProjectionSpec("counts", Counts, ProjectionArguments(events=[Counted], bucket="counts", version=2))


def test_a_projection_is_where_it_declares_until_it_is_swapped() -> None:
    assert bucket_ref_of(SPEC, None) == BucketRef("counts", 2)
    assert bucket_ref_of(SPEC, BucketRef("counts_v3", 3).encode()) == BucketRef("counts_v3", 3)
    assert alias_key("counts") == "counts.bucket"


def test_code_of_another_version_is_refused_with_the_remedy() -> None:
    assert check_version(SPEC, BucketRef("counts", 2)) == BucketRef("counts", 2)
    with pytest.raises(UsageError, match=r"version 3.*this code is version 2: rebuild"):
        check_version(SPEC, BucketRef("counts_v3", 3))


@pytest.mark.parametrize("value", [b"", b"{", b"[]", b'{"bucket": 1, "version": 1}', b'{"bucket": "a"}'])
def test_a_record_that_is_none_is_an_error(value: bytes) -> None:
    with pytest.raises(ProtocolError, match="cannot be decoded"):
        BucketRef.decode(value)
