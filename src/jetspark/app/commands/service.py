"""Workers as a service of NATS: what ``$SRV.PING``, ``INFO`` and ``STATS`` are answered with, for ``nats service ls``.

The protocol is that of the official clients (``io.nats.micro.v1``). Pure, but for the answers' subscriptions, which the
worker makes.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field

import msgspec

__all__ = ["Endpoint", "ServiceRecord"]

QUEUE_GROUP = "q"
"""The default queue group of NATS services."""
_VERBS = ("PING", "INFO", "STATS")


@dataclass(slots=True)
class Endpoint:
    """One command's endpoint, and its statistics."""

    name: str
    subject: str
    metadata: dict[str, str] = field(default_factory=dict)
    num_requests: int = 0
    num_errors: int = 0
    last_error: str = ""
    processing_time_ns: int = 0

    def count(self, seconds: float, error: BaseException | None) -> None:
        """Note that a request was answered."""
        self.num_requests += 1
        self.processing_time_ns += int(seconds * 1e9)
        if error is not None:
            self.num_errors += 1
            self.last_error = f"{type(error).__name__}: {error}"[:500]

    def info(self) -> dict[str, object]:
        return {
            "name": self.name,
            "subject": self.subject,
            "queue_group": QUEUE_GROUP,
            "metadata": self.metadata,
        }

    def stats(self) -> dict[str, object]:
        return {
            "name": self.name,
            "subject": self.subject,
            "queue_group": QUEUE_GROUP,
            "num_requests": self.num_requests,
            "num_errors": self.num_errors,
            "last_error": self.last_error,
            "processing_time": self.processing_time_ns,
            "average_processing_time": self.processing_time_ns // max(1, self.num_requests),
            "data": {},
        }


@dataclass(slots=True, kw_only=True)
class ServiceRecord:
    """A worker's entry in service discovery."""

    name: str
    id: str
    version: str
    description: str
    metadata: dict[str, str]
    started: datetime.datetime
    endpoints: list[Endpoint]

    def subjects(self) -> dict[str, str]:
        """The subjects it answers on, and the verb of each."""
        return {
            subject: verb
            for verb in _VERBS
            for subject in (f"$SRV.{verb}", f"$SRV.{verb}.{self.name}", f"$SRV.{verb}.{self.name}.{self.id}")
        }

    def answer(self, verb: str) -> bytes:
        """The response to a verb."""
        found: dict[str, object] = {
            "type": f"io.nats.micro.v1.{verb.lower()}_response",
            "name": self.name,
            "id": self.id,
            "version": self.version,
            "metadata": self.metadata,
        }
        if verb == "INFO":
            found |= {"description": self.description, "endpoints": [each.info() for each in self.endpoints]}
        elif verb == "STATS":
            found |= {"started": self.started, "endpoints": [each.stats() for each in self.endpoints]}
        return msgspec.json.encode(found)
