"""Streaming queries: stopping one between micro-batches, how far it is behind, and its errors without Spark's traces.

Spark takes no metrics from Python sources: ``metrics`` in a query's progress stays empty. The progress does show
offsets, which are the positions of the query. The server has the ends of the streams and the time of the first unread
message.
"""

from __future__ import annotations

import ast
import datetime
import json
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetspark.blocking import JetStream
from jetspark.blocking.context import context_of
from jetspark.errors import ConfigError, JetSparkError, MessageNotFound, UsageError
from jetspark.spark.offsets import Offset, StreamPosition
from jetspark.spark.stream.heads import server_time
from jetspark.state.scan import head_of

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["Lag", "failure_of", "lag", "plain_failures", "stop_between_batches", "streams_of"]

POLL_S = 0.1


def stop_between_batches(query: StreamingQuery, within_s: float) -> None:
    """Stop a query after its present micro-batch, or in the middle of it after ``within_s``.

    Stopping in the middle loses nothing, but Spark prints a page of errors and runs the micro-batch again.

    Raises:
        UsageError: The query has failed.
    """
    last, deadline = _last_batch(query), time.monotonic() + within_s
    while query.status["isTriggerActive"] and _last_batch(query) == last and time.monotonic() < deadline:
        time.sleep(POLL_S)
    time.sleep(POLL_S)  # a failed query ends a moment after its micro-batch
    failure = None if query.isActive else query.exception()
    query.stop()
    if failure is not None:
        raise failure_of(str(failure)) from failure


def _last_batch(query: StreamingQuery) -> int | None:
    """Number of the last completed micro-batch."""
    progress = query.lastProgress
    return None if progress is None else progress["batchId"]


def failure_of(text: str) -> UsageError:
    """The last error of JetSpark that a trace names; the whole text if it names none."""
    found = re.findall(r"jetspark\.errors\.\w+: (.+)", text)
    return UsageError(found[-1] if found else text)


@contextmanager
def plain_failures() -> Iterator[None]:
    """Raise errors of tasks and planners in the words that our code raised there, without Spark's traces."""
    try:
        yield
    except JetSparkError:
        raise
    except Exception as error:
        if "jetspark.errors." not in str(error):
            raise
        raise failure_of(str(error)) from error


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a query is behind one stream."""

    messages: int
    """Sequences after the query's offset. With ``subjects`` or deleted messages fewer of them are rows."""
    bytes: int
    """Estimated bytes of these messages, by the stream's mean message size."""
    seconds: float
    """Age of the first unread message; 0.0 if all are read."""


def lag(query: StreamingQuery | Mapping[str, Any], js: JetStream) -> dict[str, Lag]:
    """How far a query is behind its streams now, by the name of the stream (``KV_<bucket>`` for a bucket).

    Sends one request for each stream and one for its first unread message. Ages are by the server's clock.

    Args:
        query: A streaming query, or one entry of its progress.

    Raises:
        ConfigError: The query has no JetStream source, or has not finished a batch yet.
        StreamNotFound: A stream was deleted.
    """
    progress = query if isinstance(query, Mapping) else query.lastProgress
    positions: dict[str, tuple[StreamPosition, tuple[str, ...]]] = {}
    for source in (progress or {}).get("sources", ()):
        offset = _offset(source["endOffset"])
        if offset is not None:
            positions |= {name: (position, offset.subjects or ()) for name, position in offset.streams.items()}
    if not positions:
        raise ConfigError("lag: no JetStream source of the query has finished a batch yet; call lag() again later")
    return {name: _lag(js, name, *found) for name, found in positions.items()}


def streams_of(source: Mapping[str, Any]) -> list[str]:
    """The streams of one source in a progress report; none of a source that is not ours."""
    offset = _offset(source["endOffset"])
    return [] if offset is None else list(offset.streams)


def _offset(text: Any) -> Offset | None:
    """Parse an offset in a progress report: JSON, as text or decoded, or the ``repr`` of a dict."""
    found = text
    if isinstance(text, str):
        try:
            found = json.loads(text)
        except ValueError:
            try:
                found = ast.literal_eval(text)
            except (ValueError, SyntaxError):
                return None
    if not isinstance(found, dict) or "streams" not in found:
        return None
    return Offset.from_json(found)


def _lag(js: JetStream, name: str, position: StreamPosition, subjects: tuple[str, ...]) -> Lag:
    info = js.stream(name).cached_info
    head = head_of(info)
    begin = max(head.first, position.next)
    messages = max(0, head.next - begin)
    if not messages:
        return Lag(0, 0, 0.0)
    waiting = [found for found in (_first(js, head.stream, begin, each) for each in _filters(name, subjects)) if found]
    now = server_time(info)
    seconds = max(((now - since).total_seconds() for since in waiting), default=0.0)
    return Lag(messages, int(messages * head.bytes_per_sequence), max(0.0, seconds))


def _filters(name: str, subjects: tuple[str, ...]) -> list[str]:
    # The filters of a bucket are keys; before them stands the subject of the bucket or of its origin.
    prefix = "$KV.*." if name.startswith("KV_") and not any(each.startswith("$KV.") for each in subjects) else ""
    return [f"{prefix}{each}" for each in subjects or (">",)]


def _first(js: JetStream, stream: str, sequence: int, subject: str) -> datetime.datetime | None:
    try:
        context = context_of(js)
        query = {"seq": sequence, "next_by_subj": subject}
        found = context.run(context.api.get_message(stream, query, direct=False))
    except MessageNotFound:
        return None
    moment: datetime.datetime = found.timestamp
    return moment
