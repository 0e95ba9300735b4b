from __future__ import annotations

import copy
import dataclasses
import datetime
import pickle
import re
from typing import Any

import pytest

from jetspark.errors import ConfigError, InvalidSubject
from jetspark.jetstream.checks import check_name
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

NOON = datetime.datetime(2026, 1, 2, 12, tzinfo=datetime.UTC)

# One of each, smallest possible.
EXAMPLES = [
    Placement(),
    SubjectTransform(),
    External(api_prefix="$JS.hub.API"),
    StreamSource(name="S"),
    Republish(destination="copy.>"),
    ConsumerLimits(),
    StreamConfig(name="S"),
    ConsumerConfig(),
]

STREAM_SECONDS = ["max_age_s", "duplicate_window_s", "subject_delete_marker_ttl_s"]
CONSUMER_SECONDS = ["ack_wait_s", "max_expires_s", "idle_heartbeat_s", "inactive_threshold_s", "priority_timeout_s"]
ALL_SECONDS = [(StreamConfig, name) for name in STREAM_SECONDS] + [(ConsumerConfig, name) for name in CONSUMER_SECONDS]


def _make(kind: type, **changes: Any) -> Any:
    return kind(**({"name": "S"} if kind is StreamConfig else {}), **changes)


# ---- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["S", "orders", "a-b_c", "KV_x", "$weird", "größe", "a:b", "0", "x" * 255])
def test_a_name_that_is_one_token_and_one_folder_is_returned_as_it_is(name: str) -> None:
    assert check_name("name", name) == name


@pytest.mark.parametrize("character", [".", "*", ">", "/", "\\", " ", "\t", "\r", "\n", "\f"])
def test_a_name_with_a_character_the_server_refuses_says_which(character: str) -> None:
    for name in (character, f"a{character}", f"{character}b", f"a{character}b"):
        expected = f"bucket={name!r}: {character!r} not allowed; use letters, digits, '-' and '_'"
        with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
            check_name("bucket", name)


def test_every_bad_character_is_named_once() -> None:
    with pytest.raises(ConfigError, match=re.escape("name='a.b.c *': ' ', '*', '.' not allowed")):
        check_name("name", "a.b.c *")


@pytest.mark.parametrize("name", ["", None])
def test_a_name_is_needed(name: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"name={name!r}: expected a name")):
        StreamConfig(name=name)


@pytest.mark.parametrize("name", [5, b"orders"])
def test_a_name_that_is_no_text_is_a_config_error(name: Any) -> None:
    with pytest.raises(ConfigError, match="name="):
        StreamConfig(name=name)
    with pytest.raises(ConfigError, match="durable_name="):
        ConsumerConfig(durable_name=name)


@pytest.mark.parametrize("name", ["", "a.b", "a b", "*", ">", "a/b", "a\\b"])
def test_streams_sources_and_consumers_all_check_their_names(name: str) -> None:
    with pytest.raises(ConfigError, match=r"^name="):
        StreamConfig(name=name)
    with pytest.raises(ConfigError, match=r"^name="):
        StreamSource(name=name)
    with pytest.raises(ConfigError, match=r"^name="):
        ConsumerConfig(name=name)
    with pytest.raises(ConfigError, match=r"^durable_name="):
        ConsumerConfig(durable_name=name)


def test_a_consumer_may_have_no_name_one_or_the_same_twice() -> None:
    ConsumerConfig()
    ConsumerConfig(name="c")
    ConsumerConfig(durable_name="c")
    ConsumerConfig(name="c", durable_name="c")
    expected = "name='a' with durable_name='b': expected one, or the same"
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
        ConsumerConfig(name="a", durable_name="b")


# ---- shape ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", EXAMPLES, ids=lambda config: type(config).__name__)
def test_configurations_do_not_change_and_take_keywords_only(config: Any) -> None:
    for entry in dataclasses.fields(config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, entry.name, None)
    with pytest.raises(TypeError, match="positional"):
        type(config)("S")
    with pytest.raises(TypeError, match="max_mesages"):
        type(config)(max_mesages=1)


@pytest.mark.parametrize("config", EXAMPLES, ids=lambda config: type(config).__name__)
def test_configurations_survive_pickle_and_copy(config: Any) -> None:
    config = dataclasses.replace(config, extra={"new": {"deep": [1]}})
    assert pickle.loads(pickle.dumps(config)) == config
    assert copy.deepcopy(config) == config


@pytest.mark.parametrize("config", EXAMPLES, ids=lambda config: type(config).__name__)
def test_each_configuration_has_an_extra_of_its_own(config: Any) -> None:
    other = copy.deepcopy(config)
    needed = ("name", "api_prefix", "destination")
    fresh = type(config)(**{name: getattr(config, name) for name in needed if getattr(config, name, None)})
    assert fresh.extra == other.extra == {}
    assert fresh.extra is not config.extra


@pytest.mark.parametrize("kind", [StreamConfig, ConsumerConfig])
def test_nothing_is_mentioned_by_default(kind: type) -> None:
    config = _make(kind)
    mentioned = {entry.name for entry in dataclasses.fields(kind) if getattr(config, entry.name) not in (None, {})}
    assert mentioned == ({"name"} if kind is StreamConfig else set())


# ---- subjects and other lists --------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["orders.>", "o", ""])
def test_one_text_is_not_a_list_of_subjects(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"subjects={text!r}: expected a list of subjects")):
        StreamConfig(name="S", subjects=text)
    with pytest.raises(ConfigError, match=re.escape(f"filter_subjects={text!r}: expected a list of subjects")):
        ConsumerConfig(filter_subjects=text)


def test_one_text_is_not_a_list_of_groups_or_tags() -> None:
    with pytest.raises(ConfigError, match="priority_groups='jobs'"):
        ConsumerConfig(priority_groups="jobs")
    with pytest.raises(ConfigError, match="tags='ssd'"):
        Placement(tags="ssd")


@pytest.mark.parametrize("subject", ["", ".", "a..b", ".a", "a.", "a b", "a.>.b", "a\r\nb", "a\x00"])
def test_a_subject_nats_does_not_allow_is_refused_where_it_is_written(subject: str) -> None:
    with pytest.raises(InvalidSubject) as stream:
        StreamConfig(name="S", subjects=["fine", subject])
    assert stream.value.subject == subject
    with pytest.raises(InvalidSubject):
        ConsumerConfig(filter_subjects=["fine", subject])
    if subject:
        with pytest.raises(InvalidSubject):
            ConsumerConfig(filter_subject=subject)


def test_wildcards_are_fine_in_subjects_and_filters() -> None:
    StreamConfig(name="S", subjects=["a", "b.*.c", "d.>", ">", "*"])
    StreamConfig(name="S", subjects=("a", "b"))
    StreamConfig(name="S", subjects=[])
    ConsumerConfig(filter_subject="a.*.>")
    ConsumerConfig(filter_subjects=["a", "b.>"])


def test_a_consumer_has_one_filter_or_several_not_both() -> None:
    with pytest.raises(ConfigError, match=r"^filter_subject with filter_subjects: expected one of the two$"):
        ConsumerConfig(filter_subject="a", filter_subjects=["b"])
    ConsumerConfig(filter_subject="", filter_subjects=["b"])
    ConsumerConfig(filter_subject="a", filter_subjects=[])


# ---- durations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), ALL_SECONDS)
@pytest.mark.parametrize("value", [-1, -0.001, float("-inf")])
def test_durations_below_zero_are_refused(kind: type, name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}: expected seconds of 0 or more")):
        _make(kind, **{name: value})


@pytest.mark.parametrize(("kind", "name"), ALL_SECONDS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), "5"])
def test_durations_that_are_no_number_of_seconds_are_refused(kind: type, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r}: expected")):
        _make(kind, **{name: value})


@pytest.mark.parametrize(("kind", "name"), ALL_SECONDS)
@pytest.mark.parametrize("value", [0, 0.0, 1, 1.25, 1e7])
def test_durations_of_zero_or_more_are_kept(kind: type, name: str, value: float) -> None:
    assert getattr(_make(kind, **{name: value}), name) == value


def test_limits_for_consumers_check_their_duration_too() -> None:
    with pytest.raises(ConfigError, match="inactive_threshold_s=-1: expected seconds of 0 or more"):
        ConsumerLimits(inactive_threshold_s=-1)


def test_every_step_of_a_backoff_is_zero_or_more() -> None:
    with pytest.raises(ConfigError, match=re.escape("backoff_s=[1, -2]: expected seconds of 0 or more")):
        ConsumerConfig(backoff_s=[1, -2])
    with pytest.raises(ConfigError, match=r"backoff_s="):
        ConsumerConfig(backoff_s=[1, float("nan")])
    ConsumerConfig(backoff_s=[])
    ConsumerConfig(backoff_s=(0, 1, 2.5))


# ---- where a consumer starts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["all", "last", "new", "by_start_time", "last_per_subject"])
def test_a_start_sequence_goes_with_its_own_policy_only(policy: Any) -> None:
    expected = f"start_sequence=7 with deliver_policy={policy!r}: expected 'by_start_sequence', or leave it out"
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
        ConsumerConfig(start_sequence=7, deliver_policy=policy)


@pytest.mark.parametrize("policy", ["all", "last", "new", "by_start_sequence", "last_per_subject"])
def test_a_start_time_goes_with_its_own_policy_only(policy: Any) -> None:
    expected = f"start_time with deliver_policy={policy!r}: expected 'by_start_time', or leave it out"
    with pytest.raises(ConfigError, match=f"^{re.escape(expected)}$"):
        ConsumerConfig(start_time=NOON, deliver_policy=policy)


def test_a_start_may_leave_its_policy_out() -> None:
    ConsumerConfig(start_sequence=7)
    ConsumerConfig(start_sequence=7, deliver_policy="by_start_sequence")
    ConsumerConfig(start_time=NOON)
    ConsumerConfig(start_time=NOON, deliver_policy="by_start_time")


def test_a_consumer_starts_at_a_sequence_or_at_a_time() -> None:
    # The server refuses both (10094), in words that name fields the caller did not write.
    with pytest.raises(ConfigError, match="start_sequence"):
        ConsumerConfig(start_sequence=7, start_time=NOON)
