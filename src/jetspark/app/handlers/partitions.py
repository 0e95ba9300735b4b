"""Partitions: how a handler's events are divided between processes so that each key has one reader. Pure.

A handler with ``partitions=8`` has a stream of its own that the server fills: it *sources* the application's stream,
and a subject transform puts the partition in front of the subject, by a hash of the tokens that are the key::

    ORDERS  orders.o-1.paid  ──server──>  ORDERS_billing_PARTITIONS  parts.orders.billing.5.orders.o-1.paid
                                              └─ consumer billing-p5, read by one worker at a time

Consumers cannot filter by a hash, and a stream of copies is what makes the hash part of the subject. Each partition has
one consumer, with the policy ``pinned_client``: the server delivers to one client at a time, so a worker that was
taken for dead gets nothing more. Which worker *should* read which partition follows from the list of workers
(:func:`assign`): all of them compute the same, and where they disagree for a moment the pin decides.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

from jetspark.app.contracts.catalogue import Contract, contract_of
from jetspark.core.headers import Headers, last_value, restored
from jetspark.errors import ConfigError, ProtocolError
from jetspark.jetstream.config import SubjectTransform

__all__ = [
    "PIN_GROUP",
    "CopiedFrom",
    "assign",
    "copied_from",
    "partition_consumer",
    "partition_filter",
    "partition_prefix",
    "partition_transforms",
    "without_server_headers",
]

PIN_GROUP = "readers"
"""The priority group of a partition's consumer."""

SOURCE = "Nats-Stream-Source"
"""The header with the origin of a copy, which the server sets, replacing a header of this name."""

MAX_PARTITIONS = 256
"""Each has two consumers on the server."""


class CopiedFrom(NamedTuple):
    """Where a message of a partition comes from."""

    stream: str
    sequence: int
    subject: str


def partition_prefix(app: str, handler: str) -> str:
    return f"parts.{app}.{handler}"


def partition_filter(app: str, handler: str, partition: int) -> str:
    """Every message of one partition."""
    return f"{partition_prefix(app, handler)}.{partition}.>"


def partition_consumer(handler: str, partition: int) -> str:
    """The name of a partition's consumer, of the stream of copies and of the retry stream."""
    return f"{handler}-p{partition}"


def partition_transforms(
    app: str, handler: str, partitions: int, events: Sequence[type[object]], key: object
) -> list[SubjectTransform]:
    """How the server makes the subjects of a partitioned handler.

    Raises:
        ConfigError: The key of an event is not in its subject, so that the server cannot see it.
    """
    found: dict[str, SubjectTransform] = {}
    for kind in dict.fromkeys(events):
        contract = contract_of(kind)
        places = ",".join(str(place) for place in _key_places(handler, contract, key))
        source = contract.subject.filter
        number, tokens = 0, []
        for token in source.split("."):
            number += token == "*"
            tokens.append(f"{{{{wildcard({number})}}}}" if token == "*" else token)
        target = f"{partition_prefix(app, handler)}.{{{{partition({partitions},{places})}}}}.{'.'.join(tokens)}"
        transform = found.setdefault(source, SubjectTransform(source=source, destination=target))
        if transform.destination != target:
            raise ConfigError(f"handler {handler!r}: events on {source!r} have their keys at different places in it")
    return list(found.values())


def _key_places(handler: str, contract: Contract, key: object) -> list[int]:
    """Which wildcards of the subject's filter are the key, counted from 1."""
    name, text = contract.kind.__name__, contract.subject.text
    if key is not None and not isinstance(key, str):
        raise ConfigError(
            f"handler {handler!r}: partitions= with a function as key: expected a field of the subject, since the "
            "server divides the events by their subjects"
        )
    if isinstance(key, str):
        fields: tuple[str, ...] = (key,)
    elif contract.key_template is not None:
        fields = contract.key_template.fields
    else:
        fields = ()
    if not fields or not set(fields) <= set(contract.subject.fields):
        raise ConfigError(
            f"handler {handler!r}: partitions= needs the key of {name} in its subject {text!r}, where the server sees "
            f"it; its key is {', '.join(fields) or 'none'}"
        )
    return [contract.subject.fields.index(field) + 1 for field in fields]


def copied_from(headers: bytes | Headers | None, subject: str) -> CopiedFrom:
    """Where a message of a partition was published: ``Nats-Stream-Source`` says ``stream sequence ...``.

    Args:
        headers: ``message.raw_headers``, or those of a stored message.

    Raises:
        ProtocolError: The message is not a copy.
    """
    if isinstance(headers, Headers):
        lines = (f"{name}: {value}" for name, value in headers.multi_items())
        headers = "\r\n".join(lines).encode("utf-8", "surrogateescape")
    words = (last_value(headers, SOURCE) or "").split(" ")
    tokens = subject.split(".", 4)
    if len(words) < 2 or not words[1].isdigit() or len(tokens) < 5:
        raise ProtocolError(
            f"a message on {subject!r} is not a copy of the application's stream: it has no Nats-Stream-Source"
        )
    return CopiedFrom(words[0], int(words[1]), tokens[4])


def without_server_headers(headers: Headers) -> Headers:
    """The headers of the event, without the headers that the server added to the copy."""
    kept = []
    for name, value in headers.multi_items():
        if name not in (SOURCE, "Nats-Pin-Id"):
            kept.append((name, value))
    return restored(kept)


def assign(members: Collection[str], partitions: int) -> dict[str, list[int]]:
    """Assign partitions to workers. Shares differ by one at most, and a joining or leaving worker moves few partitions.

    Each partition goes to the worker with the highest score for it (rendezvous hashing) that has room left. So the
    answer depends on the names alone, and every worker that sees the same others has the same answer.
    """
    names = sorted(members)
    if not names:
        return {}
    small, larger = divmod(partitions, len(names))
    # The workers with one partition more are chosen by score as well, not by the alphabet.
    by_luck = sorted(names, key=lambda name: _score(name, -1))
    room = {name: small + (place < larger) for place, name in enumerate(by_luck)}
    found: dict[str, list[int]] = {name: [] for name in names}
    for partition in range(partitions):
        best = max((name for name in names if room[name]), key=lambda name: _score(name, partition))
        room[best] -= 1
        found[best].append(partition)
    return found


def _score(name: str, partition: int) -> bytes:
    return hashlib.blake2b(f"{partition} {name}".encode(), digest_size=8).digest()
