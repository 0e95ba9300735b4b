"""Which release of nats-server can do what."""

from __future__ import annotations

from typing import Any

import pytest

from jetspark.core.handshake import ServerInfo
from jetspark.errors import FeatureUnavailable
from jetspark.jetstream import features
from jetspark.jetstream.features import Feature, ServerFacts

ALL = [each for each in vars(features).values() if isinstance(each, Feature)]

# As the release notes of nats-server tell it, beginning with those of 2.11: what each release brought.
BROUGHT = {
    "2.11": {"ttl", "get_messages", "get_last_messages", "consumer.pause", "consumer.unpin"},
    "2.12": {"atomic_batch"},
    "2.14": {"consumer.reset", "commit() without a last message", "fast ingest (fast_batch, fast_publisher)"},
}
# What their INFO says; 2.11 has a level and does not say so.
SAID: dict[str, dict[str, Any]] = {
    "2.10.29": {},
    "2.11.0": {},
    "2.12.0": {"api_lvl": 2},
    "2.12.9": {"api_lvl": 3},
    "2.14.0": {"api_lvl": 4},
    "2.15.1": {"api_lvl": 5},
}


@pytest.mark.parametrize("version", SAID)
def test_a_server_can_what_its_release_and_those_before_it_brought(version: str) -> None:
    facts = features.facts_of(ServerInfo(version=version, fields=SAID[version]))
    refused = {}
    for feature in ALL:
        try:
            feature.check(facts)
        except FeatureUnavailable as error:
            refused[feature.name] = error.needed
    assert refused == {name: release for release, names in BROUGHT.items() if release > version for name in names}
    assert {feature.name for feature in ALL} == set().union(*BROUGHT.values())


@pytest.mark.parametrize(("level", "release"), [(1, "2.11"), (2, "2.12"), (3, "2.12"), (4, "2.14"), (5, "2.15")])
def test_a_refusal_names_the_first_release_that_has_the_level(level: int, release: str) -> None:
    ServerFacts(level, "").require("something", level)
    with pytest.raises(FeatureUnavailable, match=f"something needs nats-server {release}"):
        ServerFacts(level - 1, "").require("something", level)


def test_what_nobody_said_is_not_refused() -> None:
    features.UNKNOWN.require("something", 99)


@pytest.mark.parametrize(
    ("reply", "level"),
    [({"api": {"level": 4}}, 4), ({"api": {}}, 0), ({}, None), ({"api": 5}, None), ({"api": {"level": "4"}}, None)],
)
def test_the_answer_of_a_server_tells_its_level(reply: dict[str, Any], level: int | None) -> None:
    assert features.level_in(reply) == level
