"""What a server can do, by its release: asked for before something is used that an older one ignores without a word.

How it is known. A server counts the features of its JetStream as an API level and says it in its INFO, so the usual
case costs nothing: JetStream is that of the server we are connected to. With a domain or a prefix, or through a leaf
node without JetStream of its own, it is another server's, whose level is the answer to one request for each session of
the connection (``$JS.API.INFO``), made when something depends on it; see ``Api.facts``. Nothing is asked or looked up
for single messages, except for those with a TTL.

What cannot be known (the request is not allowed, or not imported) is not refused. Nor does the connected server speak
for all of a cluster that is being upgraded. Batches therefore also recognise the answer of a server that took one of
their messages for a plain one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from jetspark.core.info import ServerInfo
from jetspark.errors import FeatureUnavailable

__all__ = [
    "ATOMIC_BATCH",
    "BATCH_GET",
    "CONSUMER_PAUSE",
    "CONSUMER_RESET",
    "CONSUMER_UNPIN",
    "END_OF_BATCH",
    "FAST_INGEST",
    "LAST_GET",
    "MESSAGE_TTL",
    "Feature",
    "ServerFacts",
    "check_config",
    "facts_of",
]

# The first release with each API level. 2.12 began with 2; its later ones say 3, which brought nothing used here.
RELEASES = {1: "2.11", 2: "2.12", 3: "2.12", 4: "2.14", 5: "2.15"}


class ServerFacts(NamedTuple):
    """What is known of the server that answers for JetStream."""

    level: int | None
    """None: nobody said."""
    version: str
    """Empty where only the level is known."""

    def lacks(self, level: int) -> bool:
        return self.level is not None and self.level < level

    def require(self, name: str, level: int) -> None:
        """Raises:
        FeatureUnavailable: The server is too old.
        """
        if self.lacks(level):
            release = RELEASES.get(level, f"with API level {level}")
            raise FeatureUnavailable(name, release, self.version or f"of API level {self.level}")


UNKNOWN = ServerFacts(None, "")


@dataclass(frozen=True, slots=True)
class Feature:
    """Something a server must know to be asked for it."""

    name: str
    level: int

    def check(self, facts: ServerFacts) -> None:
        facts.require(self.name, self.level)


MESSAGE_TTL = Feature("ttl", 1)
BATCH_GET = Feature("get_messages", 1)
LAST_GET = Feature("get_last_messages", 1)
CONSUMER_PAUSE = Feature("consumer.pause", 1)
CONSUMER_UNPIN = Feature("consumer.unpin", 1)
ATOMIC_BATCH = Feature("atomic_batch", 2)
CONSUMER_RESET = Feature("consumer.reset", 4)
END_OF_BATCH = Feature("commit() without a last message", 4)
FAST_INGEST = Feature("fast ingest (fast_batch, fast_publisher)", 4)


def facts_of(info: ServerInfo) -> ServerFacts:
    """Of a server, from its own INFO."""
    level = info.fields.get("api_lvl")
    if isinstance(level, int):
        return ServerFacts(level, info.version)
    # INFO tells the level from 2.12 on; 2.11 has one and does not say so. Without a version we know nothing.
    release = release_of(info.version)
    return ServerFacts(None if release is None else int(release >= (2, 11)), info.version)


def release_of(version: str) -> tuple[int, int] | None:
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def check_config(fields: list[tuple[str, int, str]], facts: ServerFacts) -> None:
    """``fields`` are those that are mentioned: name, level, and the release for those older than levels.

    Raises:
        FeatureUnavailable: The server would ignore one of them, or not understand it.
    """
    for name, level, release in sorted(fields, key=lambda field: -field[1]):
        facts.require(name, level)
        present = release_of(facts.version)
        if release and present is not None and present < (release_of(release) or present):
            raise FeatureUnavailable(name, release, facts.version)


def level_in(reply: dict[str, Any]) -> int | None:
    """The API level in the answer to ``INFO``; servers before 2.11 have none, and others may not be servers."""
    api = reply.get("api")
    level = api.get("level", 0) if isinstance(api, dict) else None
    return level if isinstance(level, int) else None
