"""Names of an application's streams, buckets, subjects and consumers, defined once for workers, topology and command
line.

::

    the app's stream   timers.<app>.<name>                                a timer
                       timers.<app>.<name>.cancelled                      a cancelled timer: its event no longer counts
                       states.<app>.<kind>.<key>                          the state of an entity, or of a run; in a
                                                                          stream KV_<bucket>: $KV.<bucket>.<kind>.<key>
                       workflows.<app>.<workflow>.<run>.sent, .answered   a command of a run, and its answer
    <APP>_DLQ          dlq.<app>.<handler>.<key>.<origin>                 one message for each dead letter
    <APP>_RETRY        retry.<app>.<handler>.wait.<origin>                a server schedule, until the retry is due
                       retry.<app>.<handler>.due.<origin>                 where the schedule publishes
                       retry.<app>.<handler>.redrive.<n>.<origin>         a dead letter to be redriven
                       retry.<app>.<handler>.due-<p>, .redrive-<p>.<n>    the same of partition p
    <APP>_ADVISORIES   $JS.EVENT.ADVISORY.CONSUMER.<kind>.<stream>.<c>    of consumer c: events no longer delivered
    <APP>_<handler>_PARTITIONS   parts.<app>.<handler>.<p>.<subject>      copies of events, with their partition
    bucket <app>_handlers                                                 parked keys, attempts, markers, redrives,
                                                                          workers of handlers with partitions
    bucket <app>_projections                                              buckets in use, leases, records of replays

``<origin>`` is ``<stream>.<sequence>.<microseconds>``. The time when the stream stored the event distinguishes a
re-created stream from an earlier one of the same name.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from jetspark.app.contracts.tokens import escape
from jetspark.errors import ConfigError

__all__ = [
    "ADVISORY_KINDS",
    "MARKER_TTL_S",
    "advisory_consumer_name",
    "advisory_stream",
    "advisory_subject",
    "check_app_name",
    "dead_letter_stream",
    "escape_token",
    "handler_bucket",
    "is_bookkeeping",
    "is_hash",
    "partition_stream",
    "projection_bucket",
    "retry_stream",
]

ADVISORY_KINDS = ("MSG_TERMINATED", "MAX_DELIVERIES")
"""Advisories of the server for an event that it stops delivering although it was not acknowledged."""

MARKER_TTL_S = 60.0
"""How long a watcher of a bucket can see that a key was removed by its TTL."""

_is_name = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*").fullmatch
# A subject has room for a few thousand bytes; a key longer than this is known by its hash.
_MAX_TOKEN = 120
# No escaped text begins so: "=" is followed by two hexadecimal digits, or stands alone.
_HASH = "=sha256="


def check_app_name(name: str) -> str:
    """The name, if it can be part of stream, bucket and subject names."""
    if not isinstance(name, str) or not _is_name(name):
        raise ConfigError(f"name={name!r}: expected letters, digits, '-' and '_', beginning with a letter or digit")
    return name


def dead_letter_stream(app: str) -> str:
    """The stream of an application's dead letters."""
    return f"{app.upper()}_DLQ"


def retry_stream(app: str) -> str:
    """The stream in which long waits are stored."""
    return f"{app.upper()}_RETRY"


def advisory_consumer_name(app: str, handler: str) -> str:
    """The consumer by which the workers of a handler share the server's advisories about its events."""
    return f"{app}-{handler}"


def advisory_stream(app: str) -> str:
    """The stream of the server's advisories about events that it no longer delivers."""
    return f"{app.upper()}_ADVISORIES"


def advisory_subject(kind: str, stream: str, consumer: str) -> str:
    """The subject of an advisory about a consumer, such as one of the kind ``MSG_TERMINATED``."""
    return f"$JS.EVENT.ADVISORY.CONSUMER.{kind}.{stream}.{consumer}"


def handler_bucket(app: str) -> str:
    """The bucket of everything handlers remember."""
    return f"{app}_handlers"


def projection_bucket(app: str) -> str:
    """The bucket with the records of projections, apart from their state."""
    return f"{app}_projections"


def escape_token(text: str) -> str:
    """One subject token or part of a bucket's key for any text; a result longer than 120 becomes its SHA-256."""
    token = escape(text)
    return token if len(token) <= _MAX_TOKEN else f"{_HASH}{hashlib.sha256(text.encode()).hexdigest()}"


def is_hash(token: str) -> bool:
    """True if a token of :func:`escape_token` is a hash, from which the text cannot be recovered."""
    return token.startswith(_HASH)


def partition_stream(app: str, handler: str) -> str:
    """The stream of copies of a handler with partitions."""
    return f"{app.upper()}_{handler}_PARTITIONS"


def is_bookkeeping(app: str, streams: Iterable[str], subject: str) -> bool:
    """True if workers of handlers publish there on their own account: records, dead letters, retries, or
    acknowledgements of messages that they read from ``streams``.
    """
    if subject.startswith("$JS.ACK."):
        return any(f".{each}." in subject for each in streams)
    return subject.startswith((f"$KV.{handler_bucket(app)}.", f"dlq.{app}.", f"retry.{app}."))
