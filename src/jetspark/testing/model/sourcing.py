"""Streams filled with copies of another one: one source, with subject transforms that may divide by a hash.

Messages acknowledged at the source are copied at once and in order, each once. Measured on nats-server 2.15.1:
a copy has the headers of its original and ``Nats-Stream-Source``, and the time at which it was copied;
``partition(n,1,2)`` is the 32-bit FNV-1a hash of the tokens, one after the other, modulo ``n``. The pause of some 12 s
after a clean restart is not modelled.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jetspark.core.headers import Headers
from jetspark.core.subjects import matches
from jetspark.errors import ConfigError
from jetspark.jetstream.config import StreamConfig, SubjectTransform
from jetspark.testing.model.replies import Delivery
from jetspark.testing.model.stream import ModelStream

__all__ = ["Copying", "partition_of"]

_find_function = re.compile(r"\{\{\s*(wildcard|partition)\(([0-9, ]+)\)\s*\}\}")


@dataclass(slots=True)
class Copying:
    """The copying of one stream into another, and its progress."""

    target: str
    source: str
    transforms: tuple[SubjectTransform, ...]
    last: int = 0
    """The last message of the source that was copied or skipped."""

    @classmethod
    def of(cls, config: StreamConfig) -> Copying | None:
        """
        Raises:
            ConfigError: The model does not support one of its fields.
        """
        if not config.sources:
            return None
        [first, *more] = config.sources
        if more or first.external or first.start_sequence or first.start_time or first.filter_subject:
            raise ConfigError("sources: the model knows one source with subject transforms; use a real server")
        transforms = tuple(first.subject_transforms or ())
        for each in transforms:
            if re.search(r"\{\{", _find_function.sub("", each.destination)):
                raise ConfigError(
                    f"{each.destination!r}: the model knows wildcard() and partition(); use a real server"
                )
        return cls(config.name, first.name, transforms)

    def run(self, source: ModelStream, target: ModelStream, now: float) -> list[Delivery]:
        """Copy new messages, and deliver them."""
        store = source.store
        up_to = store.acknowledged if store.is_replicated else store.last_sequence
        if self.last >= up_to or not target.has_leader:
            return []
        before = target.store.last_sequence
        for message in store.messages_from(self.last + 1):
            if message.sequence > up_to:
                break
            subject = self._subject_of(message.subject)
            if subject is not None:
                headers = Headers(message.headers)
                headers["Nats-Stream-Source"] = self._origin(message.sequence, message.subject)
                target.store.append(subject, message.data, headers, now)
        self.last = up_to
        if target.store.last_sequence == before:
            return []
        target.store.promise(target.store.last_sequence)
        return target.serve(now)

    def _origin(self, sequence: int, subject: str) -> str:
        filters = "\f".join(each.source for each in self.transforms) or ">"
        targets = "\f".join(each.destination for each in self.transforms) or ">"
        return f"{self.source} {sequence} {filters} {targets} {subject} model"

    def _subject_of(self, subject: str) -> str | None:
        if not self.transforms:
            return subject
        for each in self.transforms:
            if matches(each.source, subject):
                pairs = zip(each.source.split("."), subject.split("."), strict=False)
                wild = [token for pattern, token in pairs if pattern == "*"]
                return _find_function.sub(lambda found, wild=wild: _call(found, wild), each.destination)  # type: ignore[misc]
        return None


def _call(found: re.Match[str], wild: list[str]) -> str:
    numbers = [int(each) for each in found[2].split(",")]
    if found[1] == "wildcard":
        return wild[numbers[0] - 1]
    return str(partition_of("".join(wild[each - 1] for each in numbers[1:]), numbers[0]))


def partition_of(text: str, partitions: int) -> int:
    """The value of the server's ``partition()``."""
    value = 2166136261
    for byte in text.encode():
        value = (value ^ byte) * 16777619 & 0xFFFFFFFF
    return value % partitions
