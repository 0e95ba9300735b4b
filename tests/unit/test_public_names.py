"""The two faces of the package."""

from __future__ import annotations

import inspect

import jetspark
import jetspark.blocking


def test_both_faces_have_the_same_names() -> None:
    assert sorted(jetspark.__all__) == sorted(jetspark.blocking.__all__)
    assert len(set(jetspark.__all__)) == len(jetspark.__all__)


def _of_a_driver(value: object) -> bool:
    return getattr(value, "__module__", "").startswith(("jetspark.aio", "jetspark.blocking"))


def test_every_name_is_there_and_the_shared_ones_are_the_same_object() -> None:
    for name in jetspark.__all__:
        ours, theirs = getattr(jetspark, name), getattr(jetspark.blocking, name)
        assert (ours is theirs) != _of_a_driver(ours), name


def test_both_faces_have_the_same_methods_with_the_same_arguments() -> None:
    for name in jetspark.__all__:
        one, other = getattr(jetspark, name), getattr(jetspark.blocking, name)
        if inspect.isclass(one) and _of_a_driver(one):
            assert _public(one) == _public(other), name
    assert list(inspect.signature(jetspark.connect).parameters) == list(
        inspect.signature(jetspark.blocking.connect).parameters
    )


def _public(kind: type) -> dict[str, list[str] | None]:
    return {
        name: list(inspect.signature(member).parameters) if inspect.isfunction(member) else None
        for name, member in inspect.getmembers(kind)
        if not name.startswith("_")
    }
