"""The two faces of the package."""

from __future__ import annotations

import inspect
import re
from types import ModuleType

import pytest

import jetspark
import jetspark.batcher
import jetspark.batcher.blocking
import jetspark.blocking

FACES = pytest.mark.parametrize(
    ("asyncio", "blocking"), [(jetspark, jetspark.blocking), (jetspark.batcher, jetspark.batcher.blocking)]
)


@FACES
def test_both_faces_have_the_same_names(asyncio: ModuleType, blocking: ModuleType) -> None:
    assert sorted(asyncio.__all__) == sorted(blocking.__all__)
    assert len(set(asyncio.__all__)) == len(asyncio.__all__)


def _of_a_driver(value: object) -> bool:
    return re.match(r"jetspark(\.batcher)?\.(aio|blocking)\b", getattr(value, "__module__", "")) is not None


@FACES
def test_every_name_is_there_and_the_shared_ones_are_the_same_object(asyncio: ModuleType, blocking: ModuleType) -> None:
    for name in asyncio.__all__:
        ours, theirs = getattr(asyncio, name), getattr(blocking, name)
        assert (ours is theirs) != _of_a_driver(ours), name


@FACES
def test_both_faces_have_the_same_methods_with_the_same_arguments(asyncio: ModuleType, blocking: ModuleType) -> None:
    for name in asyncio.__all__:
        one, other = getattr(asyncio, name), getattr(blocking, name)
        if inspect.isclass(one) and _of_a_driver(one):
            assert _public(one) == _public(other), name


def test_both_ways_to_connect_have_the_same_arguments() -> None:
    assert list(inspect.signature(jetspark.connect).parameters) == list(
        inspect.signature(jetspark.blocking.connect).parameters
    )


def _public(kind: type) -> dict[str, list[str] | None]:
    return {
        name: list(inspect.signature(member).parameters) if inspect.isfunction(member) else None
        for name, member in inspect.getmembers(kind)
        if not name.startswith("_")
    }
