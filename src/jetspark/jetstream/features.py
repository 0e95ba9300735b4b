"""Features of a server by its release, checked before using one that an older server would silently ignore.

Source of the facts. A server counts the features of its JetStream as an API level and reports it in its INFO, so the
usual case costs nothing: JetStream belongs to the connected server. With a domain or a prefix, or through a leaf node
without JetStream, it belongs to another server. Its level is the answer to one request per session of the connection
(``$JS.API.INFO``), sent when a feature depends on it; see ``Api.facts``. Single messages cause no request or lookup,
except messages with a TTL.

A feature is not refused if the level is unknown (the request is not allowed, or not imported). Nor does the connected
server represent a whole cluster that is being upgraded. Batches therefore also recognise the answer of a server that
took one of their messages for a plain one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from jetspark.core.handshake import ServerInfo
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
    """The version of the server that answers for JetStream, as far as it is known."""

    level: int | None
    """None if unknown."""
    version: str
    """Empty if only the level is known."""

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
    """A feature, and the API level that a server needs for it."""

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
    """The facts in a server's own INFO."""
    level = info.fields.get("api_lvl")
    if isinstance(level, int):
        return ServerFacts(level, info.version)
    # INFO has the level from 2.12 on; 2.11 has a level and does not report it. Without a version it is unknown.
    release = release_of(info.version)
    return ServerFacts(None if release is None else int(release >= (2, 11)), info.version)


def release_of(version: str) -> tuple[int, int] | None:
    found = re.match(r"v?(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def check_config(fields: list[tuple[str, int, str]], facts: ServerFacts) -> None:
    """``fields`` are the fields that are set: name, level, and the release for fields older than levels.

    Raises:
        FeatureUnavailable: The server would ignore a field, or not understand it.
    """
    for name, level, release in sorted(fields, key=lambda field: -field[1]):
        facts.require(name, level)
        present = release_of(facts.version)
        if release and present is not None and present < (release_of(release) or present):
            raise FeatureUnavailable(name, release, facts.version)


def level_in(reply: dict[str, Any]) -> int | None:
    """The API level in the answer to ``INFO``; servers before 2.11 have none, and the answer may be malformed."""
    api = reply.get("api")
    level = api.get("level", 0) if isinstance(api, dict) else None
    return level if isinstance(level, int) else None
