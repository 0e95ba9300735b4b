from __future__ import annotations

import dataclasses
import datetime
import json
import time
import typing
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jetspark import errors
from jetspark.errors import ProtocolError, ServerError
from jetspark.jetstream import config as configs
from jetspark.jetstream import wire
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
from jetspark.jetstream.info import AccountInfo, ConsumerInfo, PubAck, StreamInfo, StreamState

UTC = datetime.UTC
NS_PER_S = 1_000_000_000

# Every field with its name and unit as nats-server's Go structs have them, written down independently of config.py.
FULL_STREAM = StreamConfig(
    name="FULL",
    description="everything",
    subjects=["full.>", "more.*"],
    retention="workqueue",
    storage="memory",
    replicas=3,
    max_messages=1000,
    max_messages_per_subject=10,
    max_bytes=1 << 40,
    max_age_s=86_400.5,
    max_message_bytes=1024,
    max_consumers=7,
    discard="new",
    discard_new_per_subject=True,
    duplicate_window_s=0.1,
    allow_direct=True,
    mirror_direct=False,
    allow_rollup=True,
    allow_message_ttl=True,
    subject_delete_marker_ttl_s=60,
    allow_atomic=True,
    allow_message_counter=False,
    allow_message_schedules=True,
    persist_mode="async",
    allow_batched=True,
    deny_delete=True,
    deny_purge=False,
    sealed=False,
    no_ack=True,
    mirror=StreamSource(name="ORIGIN", start_sequence=17, external=External(api_prefix="$JS.hub.API")),
    sources=[
        StreamSource(
            name="A",
            start_time=datetime.datetime(2026, 1, 2, 3, 4, 5, 678900, UTC),
            filter_subject="a.>",
            external=External(api_prefix="$JS.leaf.API", deliver_prefix="deliver.leaf"),
        ),
        StreamSource(
            name="B",
            subject_transforms=[
                SubjectTransform(source="b.*", destination="full.{{wildcard(1)}}"),
                SubjectTransform(source="c", destination="full.c"),
            ],
        ),
    ],
    subject_transform=SubjectTransform(source="old.>", destination="full.>"),
    republish=Republish(source="full.>", destination="copy.>", headers_only=True),
    placement=Placement(cluster="east", tags=["ssd", "big"], preferred="n1"),
    compression="s2",
    first_sequence=100,
    consumer_limits=ConsumerLimits(inactive_threshold_s=30, max_ack_pending=50),
    metadata={"owner": "us"},
)
FULL_STREAM_JSON: dict[str, Any] = {
    "name": "FULL",
    "description": "everything",
    "subjects": ["full.>", "more.*"],
    "retention": "workqueue",
    "storage": "memory",
    "num_replicas": 3,
    "max_msgs": 1000,
    "max_msgs_per_subject": 10,
    "max_bytes": 1_099_511_627_776,
    "max_age": 86_400_500_000_000,
    "max_msg_size": 1024,
    "max_consumers": 7,
    "discard": "new",
    "discard_new_per_subject": True,
    "duplicate_window": 100_000_000,
    "allow_direct": True,
    "mirror_direct": False,
    "allow_rollup_hdrs": True,
    "allow_msg_ttl": True,
    "subject_delete_marker_ttl": 60_000_000_000,
    "allow_atomic": True,
    "allow_msg_counter": False,
    "allow_msg_schedules": True,
    "persist_mode": "async",
    "allow_batched": True,
    "deny_delete": True,
    "deny_purge": False,
    "sealed": False,
    "no_ack": True,
    "mirror": {"name": "ORIGIN", "opt_start_seq": 17, "external": {"api": "$JS.hub.API"}},
    "sources": [
        {
            "name": "A",
            "opt_start_time": "2026-01-02T03:04:05.678900Z",
            "filter_subject": "a.>",
            "external": {"api": "$JS.leaf.API", "deliver": "deliver.leaf"},
        },
        {
            "name": "B",
            "subject_transforms": [
                {"src": "b.*", "dest": "full.{{wildcard(1)}}"},
                {"src": "c", "dest": "full.c"},
            ],
        },
    ],
    "subject_transform": {"src": "old.>", "dest": "full.>"},
    "republish": {"src": "full.>", "dest": "copy.>", "headers_only": True},
    "placement": {"cluster": "east", "tags": ["ssd", "big"], "preferred": "n1"},
    "compression": "s2",
    "first_seq": 100,
    "consumer_limits": {"inactive_threshold": 30_000_000_000, "max_ack_pending": 50},
    "metadata": {"owner": "us"},
}
FULL_CONSUMER = ConsumerConfig(
    name="c",
    durable_name="c",
    description="everything",
    deliver_policy="by_start_time",
    start_time=datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    filter_subjects=["a", "b.>"],
    replay_policy="original",
    headers_only=True,
    ack_policy="explicit",
    ack_wait_s=12.5,
    max_deliver=4,
    backoff_s=[0.1, 1, 2.5],
    max_ack_pending=77,
    sample_frequency="50%",
    max_waiting=5,
    max_batch=10,
    max_expires_s=9,
    max_batch_bytes=1000,
    deliver_subject="push.here",
    deliver_group="workers",
    flow_control=True,
    idle_heartbeat_s=5,
    rate_limit_bits_per_s=1_000_000,
    inactive_threshold_s=3600,
    replicas=1,
    memory_storage=True,
    pause_until=datetime.datetime(2027, 1, 1, tzinfo=UTC),
    priority_groups=["jobs"],
    priority_policy="pinned_client",
    priority_timeout_s=7.25,
    metadata={"owner": "us"},
)
FULL_CONSUMER_JSON: dict[str, Any] = {
    "name": "c",
    "durable_name": "c",
    "description": "everything",
    "deliver_policy": "by_start_time",
    "opt_start_time": "2026-01-02T03:04:05Z",
    "filter_subjects": ["a", "b.>"],
    "replay_policy": "original",
    "headers_only": True,
    "ack_policy": "explicit",
    "ack_wait": 12_500_000_000,
    "max_deliver": 4,
    "backoff": [100_000_000, 1_000_000_000, 2_500_000_000],
    "max_ack_pending": 77,
    "sample_freq": "50%",
    "max_waiting": 5,
    "max_batch": 10,
    "max_expires": 9_000_000_000,
    "max_bytes": 1000,
    "deliver_subject": "push.here",
    "deliver_group": "workers",
    "flow_control": True,
    "idle_heartbeat": 5_000_000_000,
    "rate_limit_bps": 1_000_000,
    "inactive_threshold": 3_600_000_000_000,
    "num_replicas": 1,
    "mem_storage": True,
    "pause_until": "2027-01-01T00:00:00Z",
    "priority_groups": ["jobs"],
    "priority_policy": "pinned_client",
    "priority_timeout": 7_250_000_000,
    "metadata": {"owner": "us"},
}

# ---- arbitrary configurations --------------------------------------------------------------------------------------

NAMES = st.text(st.characters(codec="ascii", categories=["L", "N"], include_characters="-_"), min_size=1, max_size=12)
SUBJECTS = st.lists(NAMES | st.just("*"), min_size=1, max_size=3).map(".".join)
TEXTS = st.text(max_size=8)
COUNTS = st.integers(-1, 2**63 - 1)
# Up to here (48 days) a float of seconds tells every nanosecond apart with room to spare.
DURATIONS = st.integers(0, 2**22 * NS_PER_S).map(lambda value_ns: value_ns / NS_PER_S)
TIMES = st.datetimes(datetime.datetime(1, 1, 2), datetime.datetime(9999, 12, 30), timezones=st.just(UTC))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
EXTRAS = st.dictionaries(TEXTS.map(lambda text: f"future_{text}"), JSON, max_size=2)
METADATA = st.dictionaries(TEXTS, TEXTS, max_size=2)


def _maybe(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | values


TRANSFORMS = st.builds(SubjectTransform, source=SUBJECTS | st.just(""), destination=TEXTS, extra=EXTRAS)
SOURCES = st.builds(
    StreamSource,
    name=NAMES,
    start_sequence=_maybe(st.integers(0, 2**64 - 1)),
    start_time=_maybe(TIMES),
    filter_subject=_maybe(SUBJECTS),
    subject_transforms=_maybe(st.lists(TRANSFORMS, max_size=2)),
    external=_maybe(st.builds(External, api_prefix=NAMES, deliver_prefix=_maybe(SUBJECTS), extra=EXTRAS)),
    extra=EXTRAS,
)
SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "name": NAMES,
    "subjects": _maybe(st.lists(SUBJECTS, max_size=3)),
    "mirror": _maybe(SOURCES),
    "sources": _maybe(st.lists(SOURCES, max_size=2)),
    "subject_transform": _maybe(TRANSFORMS),
    "republish": _maybe(
        st.builds(Republish, source=SUBJECTS, destination=NAMES, headers_only=_maybe(st.booleans()), extra=EXTRAS)
    ),
    "placement": _maybe(
        st.builds(Placement, cluster=_maybe(NAMES), tags=_maybe(st.lists(NAMES, max_size=2)), extra=EXTRAS)
    ),
    "consumer_limits": _maybe(
        st.builds(ConsumerLimits, inactive_threshold_s=_maybe(DURATIONS), max_ack_pending=_maybe(COUNTS), extra=EXTRAS)
    ),
    "metadata": _maybe(METADATA),
    "extra": EXTRAS,
    "backoff_s": _maybe(st.lists(DURATIONS, max_size=3)),
    "priority_groups": _maybe(st.lists(NAMES, max_size=2)),
    "deliver_subject": _maybe(NAMES),
    "deliver_group": _maybe(NAMES),
    "sample_frequency": _maybe(st.integers(0, 100).map(lambda percent: f"{percent}%")),
    # These exclude one another, and take part in a test of their own above.
    "durable_name": st.none(),
    "deliver_policy": st.none(),
    "filter_subject": st.none(),
    "filter_subjects": _maybe(st.lists(SUBJECTS, max_size=3)),
    "start_sequence": st.none(),
    "start_time": _maybe(TIMES),
}


def _values(entry: dataclasses.Field[Any]) -> st.SearchStrategy[Any]:
    if entry.name in SPECIAL:
        return SPECIAL[entry.name]
    unit, hint = entry.metadata.get("unit"), str(entry.type)
    low, high = entry.metadata.get("low", 0), entry.metadata.get("high", 2**63 - 1)
    if unit:
        lengths = st.just(0) | st.integers(round(low * NS_PER_S), 2**22 * NS_PER_S).map(lambda ns: ns / NS_PER_S)
        return _maybe(lengths if unit == "ns" else TIMES)
    if "bool" in hint:
        return _maybe(st.booleans())
    if words := typing.get_args(getattr(configs, hint.removesuffix(" | None"), None)):
        return _maybe(st.sampled_from(words))
    return _maybe(st.integers(low, high) if "int" in hint else TEXTS)


def _configs(kind: Any) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{entry.name: _values(entry) for entry in dataclasses.fields(kind)})


def _through_json(value: Any) -> Any:
    return json.loads(json.dumps(wire.encode(value)))


@settings(deadline=None)
@given(_configs(StreamConfig))
def test_any_stream_configuration_comes_back_as_it_was(config: StreamConfig) -> None:
    assert wire.decode(StreamConfig, _through_json(config)) == config


@settings(deadline=None)
@given(_configs(ConsumerConfig))
def test_any_consumer_configuration_comes_back_as_it_was(config: ConsumerConfig) -> None:
    assert wire.decode(ConsumerConfig, _through_json(config)) == config


# ---- names on the wire ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "expected"), [(FULL_STREAM, FULL_STREAM_JSON), (FULL_CONSUMER, FULL_CONSUMER_JSON)])
def test_every_field_has_the_servers_name_and_unit_both_ways(config: Any, expected: dict[str, Any]) -> None:
    assert wire.encode(config) == expected
    decoded = wire.decode(type(config), expected)
    assert decoded == config
    assert decoded.extra == {}


def test_the_examples_mention_every_field() -> None:
    exclusive = {"extra", "start_sequence", "filter_subject"}
    for config in (FULL_STREAM, FULL_CONSUMER):
        unmentioned = {entry.name for entry in dataclasses.fields(config) if getattr(config, entry.name) is None}
        assert unmentioned <= exclusive


def test_the_fields_the_examples_cannot_have_at_once_are_named_right_too() -> None:
    config = ConsumerConfig(start_sequence=5, deliver_policy="by_start_sequence", filter_subject="a.>")
    expected = {"opt_start_seq": 5, "deliver_policy": "by_start_sequence", "filter_subject": "a.>"}
    assert wire.encode(config) == expected
    assert wire.decode(ConsumerConfig, expected) == config


def test_what_is_none_is_left_out_and_what_is_false_or_zero_is_not() -> None:
    assert wire.encode(StreamConfig(name="S")) == {"name": "S"}
    assert wire.encode(ConsumerConfig()) == {}
    falsy = StreamConfig(name="S", sealed=False, max_age_s=0, max_messages=0, subjects=[], description="", metadata={})
    assert wire.encode(falsy) == {
        "name": "S",
        "sealed": False,
        "max_age": 0,
        "max_msgs": 0,
        "subjects": [],
        "description": "",
        "metadata": {},
    }
    assert wire.decode(StreamConfig, wire.encode(falsy)) == falsy


def test_null_on_the_wire_is_not_mentioned() -> None:
    nulls = {entry.metadata.get("wire", entry.name): None for entry in dataclasses.fields(StreamConfig)}
    del nulls[""]
    assert wire.decode(StreamConfig, nulls | {"name": "S"}) == StreamConfig(name="S")


def test_tuples_and_other_mappings_are_sent_as_lists_and_objects() -> None:
    import types

    config = StreamConfig(
        name="S",
        subjects=("a", "b"),
        sources=(StreamSource(name="A"),),
        metadata=types.MappingProxyType({"k": "v"}),
    )
    assert json.loads(json.dumps(wire.encode(config))) == {
        "name": "S",
        "subjects": ["a", "b"],
        "sources": [{"name": "A"}],
        "metadata": {"k": "v"},
    }
    assert wire.encode(ConsumerConfig(backoff_s=(1, 2))) == {"backoff": [NS_PER_S, 2 * NS_PER_S]}


# ---- what we do not know -------------------------------------------------------------------------------------------


def test_unknown_fields_are_kept_at_every_level_and_sent_back_untouched() -> None:
    new = {"future": {"deep": [1, {"x": None}]}, "count": 2**62}
    fields = {
        "name": "S",
        "sources": [
            {
                "name": "A",
                "external": {"api": "$JS.x.API", **new},
                "subject_transforms": [{"src": "a", "dest": "b", **new}, {"src": "c", "dest": "d"}],
                **new,
            }
        ],
        "mirror": {"name": "M", **new},
        "subject_transform": {"src": "a", "dest": "b", **new},
        "republish": {"src": "a", "dest": "b", **new},
        "placement": {"cluster": "c", **new},
        "consumer_limits": {"max_ack_pending": 1, **new},
        **new,
    }
    config = wire.decode(StreamConfig, fields)
    assert config.extra == new
    assert config.sources is not None
    assert config.sources[0].extra == new
    assert config.sources[0].external is not None
    assert config.sources[0].external.extra == new
    assert wire.encode(config) == fields


def test_what_is_mentioned_wins_over_extra() -> None:
    config = StreamConfig(name="S", max_messages=5, extra={"max_msgs": 7, "max_bytes": 9})
    assert wire.encode(config) == {"name": "S", "max_msgs": 5, "max_bytes": 9}


def test_neither_way_changes_what_it_was_given() -> None:
    fields = {"name": "S", "future": 1, "max_age": 5}
    config = wire.decode(StreamConfig, fields)
    assert fields == {"name": "S", "future": 1, "max_age": 5}
    wire.encode(config)["other"] = 2
    assert config.extra == {"future": 1}


def test_infos_keep_unknown_fields_too() -> None:
    state = wire.decode(StreamState, {"messages": 3, "lost": {"msgs": [1]}})
    assert (state.messages, state.extra) == (3, {"lost": {"msgs": [1]}})


# ---- durations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "value_ns"),
    [
        (0, 0),
        (0.1, 100_000_000),
        (0.3, 300_000_000),
        (1e-9, 1),
        (0.000_001, 1_000),
        (1.1, 1_100_000_000),
        (2.675, 2_675_000_000),
        (12.5, 12_500_000_000),
        (120, 120_000_000_000),
        (3600.123_456_789, 3_600_123_456_789),
        (86_400 * 365, 31_536_000_000_000_000),
        (86_400 * 365.0, 31_536_000_000_000_000),
        (86_400 * 365 * 100, 3_153_600_000_000_000_000),
    ],
)
def test_durations_are_exact_nanoseconds(seconds: float, value_ns: int) -> None:
    assert wire.seconds_to_ns(seconds) == value_ns
    assert isinstance(wire.seconds_to_ns(seconds), int)
    assert wire.ns_to_seconds(value_ns) == seconds


def _there_and_back(value_ns: int) -> int:
    fields = wire.encode(wire.decode(StreamConfig, {"name": "S", "max_age": value_ns}))
    result = fields["max_age"]
    assert isinstance(result, int)
    return result


@settings(deadline=None)
@given(st.integers(0, 2**22 * NS_PER_S))
def test_any_nanoseconds_up_to_48_days_come_back_the_same(value_ns: int) -> None:
    assert _there_and_back(value_ns) == value_ns
    fields = wire.encode(wire.decode(ConsumerConfig, {"backoff": [value_ns]}))
    assert fields == {"backoff": [value_ns]}


@settings(deadline=None)
@example(4_351_576_090_141_129)
@given(st.integers(2**22 * NS_PER_S, 2**23 * NS_PER_S))
def test_any_nanoseconds_up_to_97_days_come_back_the_same(value_ns: int) -> None:
    # The limit of what a float of seconds can hold: from 2**23 s on its steps are wider than a nanosecond.
    assert _there_and_back(value_ns) == value_ns


@settings(deadline=None)
@given(st.integers(0, 2**63 // NS_PER_S))
def test_any_whole_seconds_come_back_the_same(seconds: int) -> None:
    assert _there_and_back(seconds * NS_PER_S) == seconds * NS_PER_S


# ---- times ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("2026-01-02T03:04:05Z", datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("2026-01-02T03:04:05.5Z", datetime.datetime(2026, 1, 2, 3, 4, 5, 500_000, UTC)),
        ("2026-01-02T03:04:05.12Z", datetime.datetime(2026, 1, 2, 3, 4, 5, 120_000, UTC)),
        ("2026-01-02T03:04:05.000001Z", datetime.datetime(2026, 1, 2, 3, 4, 5, 1, UTC)),
        ("2026-01-02T03:04:05.123456789Z", datetime.datetime(2026, 1, 2, 3, 4, 5, 123_456, UTC)),
        ("2026-01-02T03:04:05.999999999Z", datetime.datetime(2026, 1, 2, 3, 4, 5, 999_999, UTC)),
        ("2026-01-02T03:04:05.000000999Z", datetime.datetime(2026, 1, 2, 3, 4, 5, 0, UTC)),
        ("2026-01-02T03:04:05+02:00", datetime.datetime(2026, 1, 2, 1, 4, 5, tzinfo=UTC)),
        ("2026-01-02T03:04:05.25-05:30", datetime.datetime(2026, 1, 2, 8, 34, 5, 250_000, UTC)),
        ("2026-01-01T00:30:00.1+01:00", datetime.datetime(2025, 12, 31, 23, 30, 0, 100_000, UTC)),
        ("2026-01-02T03:04:05+00:00", datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
        ("0001-01-01T00:00:01Z", datetime.datetime(1, 1, 1, 0, 0, 1, tzinfo=UTC)),
    ],
)
def test_time_stamps_are_read_in_any_zone_and_precision(text: str, moment: datetime.datetime) -> None:
    parsed = wire.parse_time(text)
    assert parsed == moment
    assert parsed is not None
    assert parsed.tzinfo is UTC


def test_gos_zero_time_is_no_time() -> None:
    assert wire.parse_time("0001-01-01T00:00:00Z") is None
    state = wire.decode(StreamState, {"first_ts": "0001-01-01T00:00:00Z", "last_ts": "2026-01-02T03:04:05Z"})
    assert state.first_time is None
    assert state.last_time == datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@settings(deadline=None)
@given(TIMES)
def test_any_time_comes_back_the_same(moment: datetime.datetime) -> None:
    assert wire.parse_time(wire.time_text(moment)) == moment


@settings(deadline=None)
@given(TIMES, st.integers(0, 999))
def test_the_last_three_digits_of_a_nanosecond_are_cut_not_rounded(moment: datetime.datetime, rest_ns: int) -> None:
    text = moment.strftime("%Y").zfill(4) + moment.strftime("-%m-%dT%H:%M:%S.%f") + f"{rest_ns:03d}Z"
    assert wire.parse_time(text) == moment


def test_a_time_without_a_zone_is_utc_and_other_zones_are_converted() -> None:
    assert wire.time_text(datetime.datetime(2026, 7, 1, 12)) == "2026-07-01T12:00:00Z"
    paris = datetime.timezone(datetime.timedelta(hours=2))
    assert wire.time_text(datetime.datetime(2026, 7, 1, 12, 0, 0, 5, paris)) == "2026-07-01T10:00:00.000005Z"
    odd = datetime.timezone(datetime.timedelta(hours=-5, minutes=-45))
    assert wire.time_text(datetime.datetime(2026, 7, 1, 20, tzinfo=odd)) == "2026-07-02T01:45:00Z"


def test_nanoseconds_since_the_epoch_are_a_moment() -> None:
    assert wire.time_from_ns(0) == datetime.datetime(1970, 1, 1, tzinfo=UTC)
    # Through a float this one would be a microsecond off.
    assert wire.time_from_ns(1_767_323_045_123_456_789) == datetime.datetime(2026, 1, 2, 3, 4, 5, 123_456, UTC)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "now",
        "2026-01-02",
        "2026-01-02T03:04:05",
        "2026-01-02 03:04:05Z",
        "2026-01-02T03:04:05.Z",
        "2026-01-02T03:04:05z ",
        "2026-13-02T03:04:05Z",
        "2026-02-30T03:04:05Z",
        "2026-01-02T25:04:05Z",
        "0000-01-01T00:00:00Z",
        "2026-01-02T03:04:05+99:00",
        "0001-01-01T00:00:00+01:00",
        "9999-12-31T23:59:59-01:00",
    ],
)
def test_what_is_no_time_stamp_is_the_peers_fault(text: str) -> None:
    with pytest.raises(ProtocolError):
        wire.parse_time(text)
    with pytest.raises(ProtocolError):
        wire.decode(StreamState, {"first_ts": text})


# ---- replies -------------------------------------------------------------------------------------------------------


def _error(**fields: Any) -> bytes:
    return json.dumps({"type": "io.nats.jetstream.api.v1.stream_info_response", "error": fields}).encode()


@pytest.mark.parametrize(
    ("code", "err_code", "description", "kind"),
    [
        (404, 10014, "consumer not found", errors.ConsumerNotFound),
        (404, 10037, "no message found", errors.MessageNotFound),
        (503, 10039, "JetStream not enabled for account", errors.JetStreamNotEnabled),
        (400, 10058, "stream name already in use with a different configuration", errors.StreamNameInUse),
        (404, 10059, "stream not found", errors.StreamNotFound),
        (400, 10071, "wrong last sequence: 7", errors.WrongLastSequence),
        (503, 10076, "JetStream not enabled", errors.JetStreamNotEnabled),
        (400, 10148, "consumer already exists", errors.ConsumerNameInUse),
        (400, 10164, "wrong last sequence", errors.WrongLastSequence),
        (400, 10065, "subjects overlap with an existing stream", ServerError),
        (500, 10012, "start time can not be updated", ServerError),
        (404, 99999, "something new", ServerError),
    ],
)
def test_an_error_has_the_class_of_its_err_code(code: int, err_code: int, description: str, kind: type) -> None:
    with pytest.raises(ServerError) as failure:
        wire.read_reply(_error(code=code, err_code=err_code, description=description))
    assert type(failure.value) is kind
    assert (failure.value.code, failure.value.err_code, failure.value.description) == (code, err_code, description)


def test_an_error_beside_other_fields_is_still_an_error() -> None:
    with pytest.raises(errors.WrongLastSequence):
        wire.read_reply(
            b'{"error":{"code":400,"err_code":10071,"description":"wrong last sequence: 2"},"stream":"S","seq":0}'
        )


def test_an_error_that_says_little_is_still_a_server_error() -> None:
    for body in ({}, {"code": 500}, {"description": "no"}, {"err_code": 1}):
        with pytest.raises(ServerError):
            wire.read_reply(_error(**body))


def test_a_reply_without_an_error_is_its_object() -> None:
    assert wire.read_reply(b'{"success":true}') == {"success": True}
    assert wire.read_reply(b"{}") == {}
    assert wire.read_reply(b'{"error":null,"purged":3}')["purged"] == 3


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" ",
        b"null",
        b"true",
        b"5",
        b'"text"',
        b"[]",
        b'[{"stream":"S"}]',
        b"{",
        b'{"stream":"S"',
        b'{"stream":"S"}}',
        b"-ERR",
        b"\xff\xfe\x00",
        b'{"a":"\xff"}',
        b"{'a':1}",
        b'{"a":' + b"9" * 5000 + b"}",
        b"[" * 200_000,
        b'{"a":' * 200_000,
    ],
    ids=lambda data: repr(data[:12]),
)
def test_what_is_not_a_json_object_is_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError) as failure:
        wire.read_reply(data)
    assert len(str(failure.value)) < 500


@pytest.mark.parametrize(
    "error",
    [
        {"code": "x"},
        {"code": None},
        {"code": 400, "err_code": None},
        {"code": 400, "err_code": []},
        {"code": 400, "err_code": float("nan")},
        {"code": 400, "err_code": float("inf")},
    ],
    ids=str,
)
def test_an_error_with_odd_numbers_is_an_error_of_ours(error: dict[str, Any]) -> None:
    with pytest.raises((ProtocolError, ServerError)):
        wire.read_reply(_error(**error))


@pytest.mark.parametrize("error", ["stream is offline", 5, True, ["no"]])
def test_an_error_of_another_shape_is_not_taken_for_success(error: Any) -> None:
    with pytest.raises((ProtocolError, ServerError)):
        wire.read_reply(json.dumps({"error": error, "success": True}).encode())


@settings(deadline=None)
@given(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_an_object_or_an_error_of_ours(data: bytes) -> None:
    try:
        assert isinstance(wire.read_reply(data), dict)
    except (ProtocolError, ServerError):
        pass


KINDS: list[Any] = [StreamConfig, ConsumerConfig, StreamInfo, ConsumerInfo, AccountInfo, PubAck, StreamState]


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(data=st.data())
def test_any_values_under_known_names_are_read_or_a_protocol_error(kind: Any, data: st.DataObject) -> None:
    names = [entry.metadata.get("wire", entry.name) for entry in dataclasses.fields(kind)]
    fields = data.draw(st.dictionaries(st.sampled_from(names), JSON, max_size=4))
    try:
        assert isinstance(wire.decode(kind, fields), kind)
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (StreamConfig, {}),
        (StreamConfig, {"name": ""}),
        (StreamConfig, {"name": "S", "max_age": "1h"}),
        (StreamConfig, {"name": "S", "max_age": 10**400}),
        (StreamConfig, {"name": "S", "subjects": "a.>"}),
        (StreamConfig, {"name": "S", "subjects": 5}),
        (StreamConfig, {"name": "S", "sources": 5}),
        (StreamConfig, {"name": "S", "sources": ["A"]}),
        (StreamConfig, {"name": "S", "sources": [{}]}),
        (StreamConfig, {"name": "S", "mirror": []}),
        (StreamConfig, {"name": "S", "placement": 1}),
        (ConsumerConfig, {"backoff": 5}),
        (ConsumerConfig, {"backoff": ["x"]}),
        (ConsumerConfig, {"opt_start_time": 5}),
        (ConsumerInfo, {"stream_name": "S", "name": "c"}),
        (StreamInfo, {"config": {"name": "S"}}),
        (PubAck, {"seq": 1}),
    ],
)
def test_what_cannot_be_read_is_a_protocol_error_that_names_the_kind(kind: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="we cannot read"):
        wire.decode(kind, fields)


@pytest.mark.parametrize("fields", [None, 5, "text", ["name"]])
def test_what_is_no_object_is_a_protocol_error(fields: Any) -> None:
    with pytest.raises(ProtocolError, match="StreamConfig we cannot read"):
        wire.decode(StreamConfig, fields)


# ---- API levels ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "level", "name"),
    [
        (StreamConfig(name="S", allow_message_ttl=True), 1, "allow_message_ttl"),
        (StreamConfig(name="S", subject_delete_marker_ttl_s=1), 1, "subject_delete_marker_ttl_s"),
        (StreamConfig(name="S", allow_atomic=True), 2, "allow_atomic"),
        (StreamConfig(name="S", allow_message_counter=True), 2, "allow_message_counter"),
        (StreamConfig(name="S", allow_message_schedules=True), 2, "allow_message_schedules"),
        (StreamConfig(name="S", persist_mode="async"), 2, "persist_mode"),
        (StreamConfig(name="S", allow_batched=True), 4, "allow_batched"),
        (StreamConfig(name="S", allow_message_ttl=True, allow_batched=True, allow_atomic=True), 4, "allow_batched"),
        (ConsumerConfig(pause_until=datetime.datetime(2027, 1, 1, tzinfo=UTC)), 1, "pause_until"),
        (ConsumerConfig(priority_groups=["g"]), 1, "priority_groups"),
        (ConsumerConfig(priority_policy="overflow"), 1, "priority_policy"),
        (ConsumerConfig(priority_timeout_s=1), 1, "priority_timeout_s"),
    ],
)
def test_a_feature_needs_the_level_the_server_gives_it(config: Any, level: int, name: str) -> None:
    assert wire.required_level(config) == (level, name)


def test_plain_fields_and_features_switched_off_need_no_level() -> None:
    for config in (
        StreamConfig(name="S"),
        StreamConfig(name="S", subjects=["a"], max_age_s=5, retention="interest", mirror=StreamSource(name="M")),
        StreamConfig(name="S", allow_atomic=False, allow_batched=False, allow_message_ttl=False),
        StreamConfig(name="S", subject_delete_marker_ttl_s=0),
        StreamConfig(name="S", max_messages=5, replicas=3, allow_rollup=True, first_sequence=7),
        ConsumerConfig(durable_name="c", ack_policy="explicit"),
        ConsumerConfig(start_sequence=7, memory_storage=True, ack_wait_s=5, sample_frequency="50%"),
    ):
        assert wire.required_level(config)[0] == 0


def test_groups_by_priority_need_level_2_and_others_need_less() -> None:
    prioritized = ConsumerConfig(priority_policy="prioritized", priority_groups=["g"])
    assert wire.required_level(prioritized) == (2, "priority_policy")
    overflow = ConsumerConfig(priority_policy="overflow", priority_groups=["g"])
    assert wire.required_level(overflow)[0] < 2


def test_acknowledging_by_flow_control_needs_level_4() -> None:
    # nats-server 2.15.1 notes `_nats.req.level: 4` for such a consumer; an older one calls it invalid JSON.
    assert wire.required_level(ConsumerConfig(ack_policy="flow_control")) == (4, "ack_policy")


# ---- what the server says is read, not judged ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fields", "name", "value"),
    [
        (StreamConfig, {"name": "S", "retention": "telepathic"}, "retention", "telepathic"),
        (StreamConfig, {"name": "S", "num_replicas": 7}, "replicas", 7),
        (StreamConfig, {"name": "S", "max_msgs": -9}, "max_messages", -9),
        (StreamConfig, {"name": "S", "subject_delete_marker_ttl": 1}, "subject_delete_marker_ttl_s", 1e-9),
        (ConsumerConfig, {"ack_policy": "later"}, "ack_policy", "later"),
        (ConsumerConfig, {"sample_freq": "150%"}, "sample_frequency", "150%"),
        (ConsumerConfig, {"inactive_threshold": -1}, "inactive_threshold_s", -1e-9),
        (ConsumerLimits, {"max_ack_pending": -3}, "max_ack_pending", -3),
        (Republish, {"src": ">", "dest": ""}, "destination", ""),
        (External, {"api": "", "deliver": ""}, "api_prefix", ""),
    ],
)
def test_what_we_would_not_send_is_read_and_sent_back(kind: Any, fields: dict[str, Any], name: str, value: Any) -> None:
    # A newer server knows more words, and an older one let other clients' values pass (nats-server 2.15 does).
    read = wire.decode(kind, fields)
    assert getattr(read, name) == value
    assert wire.encode(read) == fields


def test_a_word_of_the_wrong_type_cannot_be_read() -> None:
    fields: Any
    for fields in ({"retention": 5}, {"num_replicas": "3"}, {"metadata": []}, {"sealed": "no"}, {"max_msgs": True}):
        with pytest.raises(ProtocolError, match="StreamConfig we cannot read"):
            wire.decode(StreamConfig, {"name": "S"} | fields)


# ---- small things ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["0", "7", "007", "9" * 20])
def test_a_number_in_a_header_is_its_digits(text: str) -> None:
    assert wire.number_in(text) == int(text)


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.0", " 1", "1_000", "\u00b2", "\u0663", "x", "9" * 21])
def test_what_is_no_number_in_a_header_is_a_protocol_error_that_shows_it(text: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        wire.number_in(text)
    assert str(caught.value) == f"not a number: {text!r}"


def test_a_time_without_a_zone_is_utc_wherever_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        assert wire.time_text(datetime.datetime(2026, 1, 1)) == "2026-01-01T00:00:00Z"
    finally:
        monkeypatch.undo()
        time.tzset()


def test_an_info_with_a_value_of_another_type_cannot_be_read() -> None:
    with pytest.raises(ProtocolError, match="PubAck we cannot read"):
        wire.decode(PubAck, {"stream": 5, "seq": 1})


def test_unknown_fields_are_dropped_where_nothing_keeps_them() -> None:
    @dataclasses.dataclass(frozen=True)
    class Plain:
        name: str = ""

    assert wire.decode(Plain, {"name": "a", "new": 1}) == Plain("a")


def test_a_configuration_is_read_with_the_defaults_of_what_is_not_mentioned_and_not_judged() -> None:
    @dataclasses.dataclass(frozen=True)
    class Config:
        name: str = "a"
        labels: typing.Mapping[str, str] = dataclasses.field(default_factory=dict)

        def __post_init__(self) -> None:
            raise ValueError("we would not send this")

    found = wire.decode(Config, {})
    assert (found.name, found.labels) == ("a", {})


def test_an_error_that_has_no_numbers_has_the_number_0() -> None:
    found = wire.error_of({"error": {"description": "why"}})
    assert found is not None
    assert (found.code, found.err_code) == (0, 0)


def test_the_stream_of_an_error_is_the_one_that_was_asked_or_the_one_that_answered() -> None:
    error = {"code": 400, "err_code": 10071, "description": "wrong last sequence: 3"}
    for asked, said, expected in (("", "SAID", "SAID"), ("ASKED", "SAID", "ASKED"), ("", 5, "")):
        found = wire.error_of({"error": error, "stream": said}, asked)
        assert found is not None
        assert found.stream == expected
