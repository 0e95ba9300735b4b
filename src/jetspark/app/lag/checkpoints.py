"""The position of a Spark query, from its checkpoint folder. No Spark is needed, and the query need not run.

Spark writes the planned end of batch ``n`` to ``offsets/n`` before the batch, and ``commits/n`` after it. So the query
has read what the newest batch with both files ends at.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jetspark.app.lag.measures import PositionReader
from jetspark.errors import ConfigError

__all__ = ["checkpoint_readers"]

# Offsets of version 1 do not name their filters, so all of the stream counts.
_READABLE = (1, 2)


def checkpoint_readers(folder: str | Path, name: str | None = None) -> list[PositionReader]:
    """The readers of a query, one for each stream of its JetStream sources.

    Args:
        folder: The query's ``checkpointLocation``, in a file system of this machine.
        name: The name of the query in reports; by default that of the folder.

    Raises:
        ConfigError: The folder is not a checkpoint, no batch of it is complete, or no source of it is JetStream.
    """
    path = Path(folder)
    batches = {each.name for each in path.glob("offsets/*")} & {each.name for each in path.glob("commits/*")}
    done = [int(each) for each in batches if each.isdecimal()]
    if not done:
        raise ConfigError(
            f"checkpoint {str(folder)!r}: expected a folder with offsets and commits of a complete batch; give the "
            "query's checkpointLocation, once its first batch is done"
        )
    lines = (path / "offsets" / str(max(done))).read_text(encoding="utf-8").splitlines()
    try:
        offsets = [found for line in lines[2:] if (found := _offset(line))]
        readers = [each for offset in offsets for each in _readers(offset, name or path.name)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"checkpoint {str(folder)!r}: its offset cannot be read ({error!r})") from None
    if not readers:
        raise ConfigError(f"checkpoint {str(folder)!r}: no source of the query is JetStream")
    return readers


def _offset(line: str) -> dict[str, Any] | None:
    """The offset of a JetStream source; None for the line of another source."""
    found = json.loads(line) if line.startswith("{") else None
    return found if isinstance(found, dict) and found.get("version") in _READABLE and "streams" in found else None


def _readers(offset: dict[str, Any], name: str) -> list[PositionReader]:
    filters = [str(each) for each in offset.get("subjects") or ()]
    return [
        PositionReader(
            kind="spark",
            name=name,
            stream=stream,
            next=int(position["next"]),
            created=str(position["created"]),
            filters=tuple(_subject(stream, each) for each in filters),
        )
        for stream, position in offset["streams"].items()
    ]


def _subject(stream: str, filter: str) -> str:
    # The filters of a bucket are keys; before them stands the subject of the bucket or of its origin.
    return f"$KV.*.{filter}" if stream.startswith("KV_") and not filter.startswith("$KV.") else filter
