"""Wrong values of every field of every configuration are refused where they are written."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from jetspark.errors import ConfigError
from jetspark.jetstream.checks import check_config, check_name, check_types
from jetspark.jetstream.config import (
    ConsumerConfig,
    ConsumerLimits,
    External,
    Placement,
    Republish,
    StreamConfig,
    StreamSource,
    SubjectTransform,
)
from jetspark.jetstream.kv import KVConfig
from jetspark.jetstream.objects import ObjectStoreConfig

NAN, INF = float("nan"), float("inf")
NOW = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
DAY = datetime.date(2026, 1, 2)

# What is wrong for a kind of field, whatever its name.
NOT_A_NAME: list[Any] = ["", "a.b", "a b", "*", ">", "a/b", "a\\b", "a\tb", "x" * 256, "\ud800", 5, True, b"S", ["S"]]
NOT_A_BUCKET: list[Any] = [*NOT_A_NAME, "größe", "a:b", "$x"]
NOT_A_TEXT: list[Any] = [5, True, b"text", ["text"], {"a": "b"}, "\ud800"]
NOT_A_DESCRIPTION: list[Any] = [*NOT_A_TEXT, "x" * 4097, "é" * 2049]
NOT_A_FLAG: list[Any] = [0, 1, "yes", "true", [], 1.0]
NOT_A_NUMBER: list[Any] = ["5", 1.5, 5.0, True, [5], NAN, INF, 2**64, b"5"]
NOT_A_LIMIT: list[Any] = [*NOT_A_NUMBER, -2, 2**63]
NOT_A_COUNT: list[Any] = [*NOT_A_LIMIT, -1]
NOT_A_SEQUENCE: list[Any] = [*NOT_A_NUMBER, -1]
NOT_REPLICAS: list[Any] = [*NOT_A_COUNT, 6]
NOT_SECONDS: list[Any] = ["5", "1h", -1, -0.001, NAN, INF, -INF, True, [5], datetime.timedelta(1), 1e10, 10**400]
NOT_A_TIME: list[Any] = ["2026-01-02T00:00:00Z", 1.5, 0, True, DAY, [NOW]]
NOT_A_SUBJECT: list[Any] = ["a..b", ".a", "a.", "a b", "a\r\nb", "a\x00", "\ud800", 5, True, b"a", ["a"]]
NOT_A_FILTER: list[Any] = [*NOT_A_SUBJECT, "a.>.b"]
NOT_SUBJECTS: list[Any] = ["a.>", b"a", 5, {"a": "b"}, {"a"}, ["fine", ""], *([each] for each in NOT_A_FILTER)]
NOT_METADATA: list[Any] = ["a", ["a"], {"a": 5}, {5: "a"}, {"a": None}, [("a", "b")], {"a": "\ud800"}, {"\ud800": "a"}]
NOT_EXTRA: list[Any] = ["a", ["a"], {5: "a"}, 5]
NOT_A_CONFIG: list[Any] = ["S", {"name": "S"}, 5, True, StreamConfig(name="S")]
NOT_CONFIGS: list[Any] = [StreamSource(name="S"), "S", ["S"], [{"name": "S"}], [None], {"S": StreamSource(name="S")}]


def not_a_word(*words: str) -> list[Any]:
    return ["", words[0].upper(), f"{words[0]} ", 5, True, [words[0]], words[0].encode()]


WRONG: dict[type, dict[str, list[Any]]] = {
    StreamConfig: {
        "name": [*NOT_A_NAME, None],
        "description": NOT_A_DESCRIPTION,
        "subjects": NOT_SUBJECTS,
        "retention": [*not_a_word("limits"), "work_queue", "work-queue"],
        "storage": [*not_a_word("file"), "disk"],
        "replicas": [*NOT_REPLICAS, 0],
        "max_messages": NOT_A_LIMIT,
        "max_messages_per_subject": NOT_A_LIMIT,
        "max_bytes": NOT_A_LIMIT,
        "max_age_s": [*NOT_SECONDS, 0.05],
        "max_message_bytes": [*NOT_A_LIMIT, 2**31],
        "max_consumers": NOT_A_LIMIT,
        "discard": [*not_a_word("old"), "reject"],
        "discard_new_per_subject": NOT_A_FLAG,
        "duplicate_window_s": [*NOT_SECONDS, 0.05],
        "allow_direct": NOT_A_FLAG,
        "mirror_direct": NOT_A_FLAG,
        "allow_rollup": NOT_A_FLAG,
        "allow_message_ttl": NOT_A_FLAG,
        "subject_delete_marker_ttl_s": [*NOT_SECONDS, 0.5],
        "allow_atomic": NOT_A_FLAG,
        "allow_message_counter": NOT_A_FLAG,
        "allow_message_schedules": NOT_A_FLAG,
        "persist_mode": not_a_word("async"),
        "allow_batched": NOT_A_FLAG,
        "deny_delete": NOT_A_FLAG,
        "deny_purge": NOT_A_FLAG,
        "sealed": NOT_A_FLAG,
        "no_ack": NOT_A_FLAG,
        "mirror": [*NOT_A_CONFIG, [StreamSource(name="S")]],
        "sources": NOT_CONFIGS,
        "subject_transform": [*NOT_A_CONFIG, Republish(destination="a")],
        "republish": [*NOT_A_CONFIG, SubjectTransform(source="a", destination="b")],
        "placement": NOT_A_CONFIG,
        "compression": [*not_a_word("s2"), "zstd", "gzip"],
        "first_sequence": NOT_A_SEQUENCE,
        "consumer_limits": NOT_A_CONFIG,
        "metadata": NOT_METADATA,
        "extra": NOT_EXTRA,
    },
    ConsumerConfig: {
        "name": NOT_A_NAME,
        "durable_name": NOT_A_NAME,
        "description": NOT_A_DESCRIPTION,
        "deliver_policy": [*not_a_word("all"), "deliver_all", "by_sequence"],
        "start_sequence": [*NOT_A_SEQUENCE, 0],
        "start_time": NOT_A_TIME,
        "filter_subject": NOT_A_FILTER,
        "filter_subjects": NOT_SUBJECTS,
        "replay_policy": not_a_word("instant"),
        "headers_only": NOT_A_FLAG,
        "ack_policy": [*not_a_word("explicit"), "manual"],
        "ack_wait_s": NOT_SECONDS,
        "max_deliver": NOT_A_LIMIT,
        "backoff_s": [5, "1s", ["1"], [-1], [NAN], [INF], [True], [1, None], {1: 2}],
        "max_ack_pending": NOT_A_LIMIT,
        "sample_frequency": ["abc", "150%", "-1%", "50 %", 50, True, 0.5],
        "max_waiting": NOT_A_COUNT,
        "max_batch": NOT_A_COUNT,
        "max_expires_s": [*NOT_SECONDS, 0.0001],
        "max_batch_bytes": NOT_A_COUNT,
        "deliver_subject": [*NOT_A_SUBJECT, "", "a.*", "a.>"],
        "deliver_group": ["", "a b", "a\r\n", 5, True, ["a"]],
        "flow_control": NOT_A_FLAG,
        "idle_heartbeat_s": [*NOT_SECONDS, 0.05],
        "rate_limit_bits_per_s": NOT_A_SEQUENCE,
        "inactive_threshold_s": NOT_SECONDS,
        "replicas": NOT_REPLICAS,
        "memory_storage": NOT_A_FLAG,
        "pause_until": NOT_A_TIME,
        "priority_groups": ["jobs", [""], ["a b"], ["x" * 17], [5], 5, [None], {"a"}],
        "priority_policy": [*not_a_word("overflow"), "pinned"],
        "priority_timeout_s": NOT_SECONDS,
        "metadata": NOT_METADATA,
        "extra": NOT_EXTRA,
    },
    KVConfig: {
        "bucket": [*NOT_A_BUCKET, None],
        "description": NOT_A_DESCRIPTION,
        "history": [*NOT_A_COUNT, 0, 65],
        "ttl_s": [*NOT_SECONDS, 0.05],
        "limit_marker_ttl_s": [*NOT_SECONDS, 0, 0.5],
        "max_bytes": NOT_A_LIMIT,
        "max_value_bytes": [*NOT_A_LIMIT, 2**31],
        "storage": not_a_word("file"),
        "replicas": [*NOT_REPLICAS, 0],
        "compression": not_a_word("s2"),
        "placement": NOT_A_CONFIG,
        "republish": NOT_A_CONFIG,
        "mirror": [*NOT_A_CONFIG, KVConfig(bucket="b")],
        "sources": NOT_CONFIGS,
        "allow_atomic": NOT_A_FLAG,
        "allow_batched": NOT_A_FLAG,
        "metadata": NOT_METADATA,
    },
    ObjectStoreConfig: {
        "bucket": [*NOT_A_BUCKET, None],
        "description": NOT_A_DESCRIPTION,
        "ttl_s": [*NOT_SECONDS, 0.05],
        "max_bytes": NOT_A_LIMIT,
        "storage": not_a_word("file"),
        "replicas": [*NOT_REPLICAS, 0],
        "compression": not_a_word("s2"),
        "placement": NOT_A_CONFIG,
        "metadata": NOT_METADATA,
    },
    Placement: {
        "cluster": [*NOT_A_TEXT, ""],
        "tags": ["ssd", [""], [5], 5, {"a"}],
        "preferred": [*NOT_A_TEXT, ""],
        "extra": NOT_EXTRA,
    },
    SubjectTransform: {"source": NOT_A_FILTER, "destination": NOT_A_TEXT, "extra": NOT_EXTRA},
    External: {
        "api_prefix": [*NOT_A_SUBJECT, "", "$JS.>", None],
        "deliver_prefix": NOT_A_FILTER,
        "extra": NOT_EXTRA,
    },
    StreamSource: {
        "name": [*NOT_A_NAME, None],
        "start_sequence": NOT_A_SEQUENCE,
        "start_time": NOT_A_TIME,
        "filter_subject": NOT_A_FILTER,
        "subject_transforms": [SubjectTransform(), ["a"], [Republish(destination="a")], [None]],
        "external": NOT_A_CONFIG,
        "extra": NOT_EXTRA,
    },
    Republish: {
        "source": NOT_A_FILTER,
        "destination": [*NOT_A_TEXT, "", None],
        "headers_only": NOT_A_FLAG,
        "extra": NOT_EXTRA,
    },
    ConsumerLimits: {"inactive_threshold_s": NOT_SECONDS, "max_ack_pending": NOT_A_LIMIT, "extra": NOT_EXTRA},
}
NEEDED = {"name": "S", "bucket": "b", "api_prefix": "$JS.hub.API", "destination": "copy.>"}


def _make(kind: type, **changes: Any) -> Any:
    required = {
        entry.name: NEEDED[entry.name]
        for entry in dataclasses.fields(kind)
        if entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING
    }
    return kind(**(required | changes))


@pytest.mark.parametrize("kind", WRONG, ids=lambda kind: kind.__name__)
def test_every_field_has_a_row_of_wrong_values(kind: type) -> None:
    assert set(WRONG[kind]) == {entry.name for entry in dataclasses.fields(kind)}


ROWS = [(kind, name) for kind, fields in WRONG.items() for name in fields]


@pytest.mark.parametrize(("kind", "name"), ROWS, ids=[f"{kind.__name__}-{name}" for kind, name in ROWS])
def test_a_wrong_value_is_refused_by_field_value_and_remedy(kind: type, name: str) -> None:
    for value in WRONG[kind][name]:
        with pytest.raises(ConfigError) as refused:
            _make(kind, **{name: value})
        said = str(refused.value)
        assert name in said, (value, said)
        assert re.search(r"expected|not allowed|may not|must be|UTF-8|did you mean|use |put a name", said), (
            value,
            said,
        )
        shown = value[-1] if isinstance(value, list) and value else value
        assert repr(shown)[:10] in said or repr(value)[:10] in said, (value, said)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            lambda: StreamConfig(name="S", retention="work_queue"),  # type: ignore[arg-type]
            "retention='work_queue': expected one of 'limits', 'interest', 'workqueue'",
        ),
        (
            lambda: StreamConfig(name="S", retention=5),  # type: ignore[arg-type]
            "retention=5: expected one of 'limits', 'interest', 'workqueue'",
        ),
        (
            lambda: StreamConfig(name="S", max_age_s="5"),  # type: ignore[arg-type]
            "max_age_s='5': expected seconds of 0 or more",
        ),
        (
            lambda: ConsumerConfig(backoff_s=(1, -2)),
            "backoff_s=(1, -2): expected seconds of 0 or more",
        ),
        (lambda: StreamConfig(name="S", replicas=True), "replicas=True: expected a whole number, 1 to 5"),
        (lambda: StreamConfig(name="S", max_messages=-2), "max_messages=-2: expected -1 or more"),
        (lambda: StreamConfig(name="S", max_age_s=0.05), "max_age_s=0.05: expected 0, or 0.1 seconds or more"),
        (
            lambda: StreamConfig(name="S", max_age_s=1e10),
            "max_age_s=10000000000.0: expected at most 9223372036 seconds",
        ),
        (lambda: StreamConfig(name="S", sealed=1), "sealed=1: expected True or False"),  # type: ignore[arg-type]
        (
            lambda: StreamConfig(name="S", mirror="M"),  # type: ignore[arg-type]
            "mirror='M': expected a StreamSource",
        ),
        (
            lambda: StreamConfig(name="S", sources="M"),  # type: ignore[arg-type]
            "sources='M': expected a list of StreamSource",
        ),
        (
            lambda: StreamConfig(name="S", metadata={"a": 5}),  # type: ignore[dict-item]
            "metadata={'a': 5}: expected a dict of str to str",
        ),
        (
            lambda: StreamConfig(name="S", subjects=["a..b"]),
            "subject 'a..b': it has two dots in a row, and tokens may not be empty; did you mean 'a.b'? (in subjects)",
        ),
    ],
)
def test_what_is_said_of_a_wrong_value(config: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        config()


# ---- values that are just right --------------------------------------------------------------------------------------

LIMIT = [-1, 0, 2**63 - 1]
COUNT = [0, 2**63 - 1]
SECONDS = [0, 0.001, 9_000_000_000]
ALLOWED: dict[type, dict[str, list[Any]]] = {
    StreamConfig: {
        "name": ["x" * 255],
        "description": ["", "x" * 4096, "é" * 2048],
        "replicas": [1, 5],
        "max_messages": LIMIT,
        "max_messages_per_subject": LIMIT,
        "max_bytes": LIMIT,
        "max_age_s": [0, 0.1],
        "max_message_bytes": [-1, 2**31 - 1],
        "max_consumers": LIMIT,
        "subject_delete_marker_ttl_s": [0, 1],
        "first_sequence": [0, 2**64 - 1],
    },
    ConsumerConfig: {
        "start_sequence": [1, 2**64 - 1],
        "ack_wait_s": SECONDS,
        "max_deliver": LIMIT,
        "max_ack_pending": LIMIT,
        "sample_frequency": ["", "0%", "50", "100%"],
        "max_waiting": COUNT,
        "max_batch": COUNT,
        "max_expires_s": [0, 0.001],
        "inactive_threshold_s": SECONDS,
        "replicas": [0, 5],
        "priority_groups": [["x" * 16, "A-z_0/="]],
        "priority_timeout_s": SECONDS,
    },
    ConsumerLimits: {"inactive_threshold_s": SECONDS, "max_ack_pending": LIMIT},
    KVConfig: {"history": [1, 64], "replicas": [1, 5], "max_bytes": LIMIT, "max_value_bytes": [-1, 2**31 - 1]},
    ObjectStoreConfig: {"replicas": [1, 5], "max_bytes": LIMIT},
}


@pytest.mark.parametrize("kind", ALLOWED, ids=lambda kind: kind.__name__)
def test_the_first_and_the_last_value_that_is_allowed_are_kept(kind: type) -> None:
    for name, values in ALLOWED[kind].items():
        for value in values:
            assert getattr(_make(kind, **{name: value}), name) == value


# ---- a configuration as an argument ----------------------------------------------------------------------------------


def test_a_configuration_is_taken_as_it_is_and_a_name_for_one_that_has_nothing_else() -> None:
    config = StreamConfig(name="S", max_bytes=5)
    assert check_config(StreamConfig, config) is config
    assert check_config(StreamConfig, config, name="name") is config
    assert check_config(StreamConfig, "S", name="name") == StreamConfig(name="S")


@pytest.mark.parametrize(
    ("kind", "given", "name", "said"),
    [
        (StreamConfig, "S", None, "config='S': expected a StreamConfig"),
        (StreamConfig, 5, "name", "config=5: expected a StreamConfig, or a name"),
        (ObjectStoreConfig, None, None, "config=None: expected an ObjectStoreConfig"),
        (
            ConsumerConfig,
            {"name": "c"},
            None,
            "config={'name': 'c'}: expected a ConsumerConfig; ConsumerConfig(**config) makes one of a dict",
        ),
    ],
)
def test_what_is_no_configuration_is_refused_with_what_to_write_instead(
    kind: type, given: Any, name: str | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(said)}$"):
        check_config(kind, given, name=name)


# ---- what a server says ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Said:
    """Some fields as a server might tell them."""

    name: str = field(metadata={"check": check_name})
    size: int
    note: str | None = None
    parts: Sequence[dict[str, Any]] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


SAID: dict[str, Any] = {"name": "S", "size": 1}


@pytest.mark.parametrize(
    "changes",
    [{}, {"size": 0}, {"size": -5}, {"name": "a.b"}, {"note": ""}, {"parts": [{}, {"a": 1}]}, {"extra": None}],
    ids=str,
)
def test_what_a_server_says_is_believed_when_its_shape_is_right(changes: dict[str, Any]) -> None:
    check_types(Said(**(SAID | changes)))


@pytest.mark.parametrize(
    "changes",
    [{"size": None}, {"size": "1"}, {"size": True}, {"name": ""}, {"name": None}, {"note": 5}, {"parts": [5]}],
    ids=str,
)
def test_what_a_server_says_is_refused_by_name_when_its_shape_is_wrong(changes: dict[str, Any]) -> None:
    [(name, value)] = changes.items()
    with pytest.raises(ConfigError, match=f"^{name}={re.escape(repr(value))}: expected "):
        check_types(Said(**(SAID | changes)))
