"""What a fold does to the state of a key."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jetspark.errors import ConfigError
from jetspark.spark.folding import DELETE, Applied, FoldOptions, _next
from jetspark.spark.kv_writing import Change, Current
from jetspark.spark.options import read_options


class Sum:
    def apply(self, state: Any, event: Any, sequence: int) -> Any:
        return DELETE if event is None else (state or 0) + event


def events(*numbers: Any, start: int = 1) -> list[Applied]:
    return [Applied(start + index, number) for index, number in enumerate(numbers)]


def test_a_key_without_a_value_begins_with_none() -> None:
    assert _next("k", None, events(1, 2, 3), Sum()) == (Change("k", b"6", "put", 3, 0), 0)


def test_events_the_value_has_already_are_left_alone() -> None:
    present = Current(b"3", sequence=2, revision=17)
    assert _next("k", present, events(1, 2, 3), Sum()) == (Change("k", b"6", "put", 3, 17), 2)
    assert _next("k", present, events(1, 2), Sum()) == (None, 2)


def test_a_deleted_key_begins_anew_after_its_deletion() -> None:
    gone = Current(None, sequence=5, revision=9)
    assert _next("k", gone, events(1, 2, start=5), Sum()) == (Change("k", b"2", "put", 6, 9), 1)
    assert _next("k", None, events(1, None, 4), Sum()) == (Change("k", b"4", "put", 3, 0), 0)
    assert _next("k", None, events(1, None), Sum()) == (Change("k", b"", "delete", 2, 0), 0)


def test_the_same_state_is_the_same_bytes() -> None:
    class Unordered:
        def apply(self, state: Any, event: Any, sequence: int) -> Any:
            return dict(reversed((state or {"b": 1, "a": 2}).items()))

    once, _ = _next("k", None, events(0), Unordered())
    twice, _ = _next("k", None, events(0, 0), Unordered())
    assert once is not None
    assert twice is not None
    assert once.value == twice.value == json.dumps({"a": 2, "b": 1}, separators=(",", ":")).encode()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"fold": "a:B"}, "'bucket' is missing"),
        ({"bucket": "b"}, "'fold' is missing"),
        ({"bucket": "b", "fold": "a.b"}, "package.module:name"),
        ({"bucket": "b", "fold": "a:B", "buket": "c"}, "did you mean 'bucket'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, str], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        read_options(FoldOptions, "jetstream_fold", options)


def test_a_fold_is_found_by_its_name() -> None:
    options = read_options(FoldOptions, "jetstream_fold", {"bucket": "b", "fold": "collections:Counter"})
    assert type(options.load()).__name__ == "Counter"
    missing = read_options(FoldOptions, "jetstream_fold", {"bucket": "b", "fold": "collections:Missing"})
    with pytest.raises(ConfigError, match="installed where Spark's workers run"):
        missing.load()
