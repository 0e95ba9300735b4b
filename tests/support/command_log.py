"""A log in memory, and workers that decide commands on it: every step of a command, without a server."""

from __future__ import annotations

import datetime
import random
from typing import Any

from jetspark.app import App, Command, CommandReply
from jetspark.app.causes import Cause
from jetspark.app.commands.boundaries import BoundaryCache, SnapshotState
from jetspark.app.commands.decider import (
    Append,
    Appended,
    AppendMoved,
    CommandRequest,
    CommandSteps,
    Decider,
    LastMessage,
    ReadLasts,
    ReadSnapshot,
    ReadStreamEnd,
    ReadTail,
    StreamEnd,
)
from jetspark.core.headers import Headers
from jetspark.core.step_runner import Sleep
from jetspark.core.subjects import matches
from jetspark.jetstream.info import StoredMessage

NOW = datetime.datetime(2026, 3, 15, 12, 0, tzinfo=datetime.UTC)


class Log:
    """A stream, as far as commands use one."""

    def __init__(
        self, *, forgets_guards: bool = False, subjects: tuple[str, ...] = ("accounts.>", "ledgers.>")
    ) -> None:
        self.messages: list[StoredMessage] = []
        self.late: list[Append] = []
        """Appends that are still on their way."""
        self.snapshots: dict[str, SnapshotState] = {}
        self.reads = self.looks = 0
        self.first = 1
        """The sequence of the next message, if there is none."""
        self.created = self.now = NOW
        self.replicas, self.subjects = 1, subjects
        self._forgets_guards = forgets_guards

    @property
    def end(self) -> int:
        return self.messages[-1].sequence if self.messages else self.first - 1

    def last(self, filter: str) -> int:
        return max((each.sequence for each in self.messages if matches(filter, each.subject)), default=0)

    def last_message(self, filter: str) -> LastMessage:
        last = self.last(filter)
        headers = {each.sequence: each.headers for each in self.messages}.get(last, Headers())
        return LastMessage(last, headers.get("Nats-Msg-Id"))

    def perform(self, step: Any) -> Any:
        match step:
            case ReadTail(filter, after, _, limit):
                self.reads += 1
                found = [each for each in self.messages if each.sequence > after and matches(filter, each.subject)]
                return found[:limit]
            case ReadLasts(filters):
                return [self.last_message(filter) for filter in filters]
            case ReadStreamEnd():
                self.looks += 1
                return StreamEnd(self.end, self.created, self.replicas, self.subjects)
            case ReadSnapshot(_, key):
                return self.snapshots.get(key, SnapshotState(None, 0))
            case Append():
                return self.append(step)
            case Sleep():
                return None
        raise AssertionError(step)

    def append(self, step: Append) -> Appended | AppendMoved:
        if not self._forgets_guards:
            if step.last_sequence is not None and step.last_sequence != self.end:
                return AppendMoved()
            for message in step.messages:
                if message.guard is not None and self.last(message.guard.filter) != message.guard.last:
                    return AppendMoved()
        for message in step.messages:
            self.store(message.encoded.subject, message.encoded.data, message.encoded.headers)
        return Appended(self.end)

    def store(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> None:
        message = StoredMessage(
            stream="LOG",
            subject=subject,
            sequence=self.end + 1,
            timestamp=self.now,
            data=data,
            headers=Headers(headers),
        )
        self.messages.append(message)


class Worker:
    """One process: what it remembers is its own."""

    def __init__(self, app: App, log: Log, *, replicas: int = 1, cache: int = 1000, rng: Any = random) -> None:
        self.app, self.log = app, log
        app.catalogue.check()
        log.replicas, log.looks = replicas, -1
        self.deciding = Decider(
            app.spec,
            log.perform(ReadStreamEnd()),
            catalogue=app.catalogue,
            cache=BoundaryCache(cache),
            clock=lambda: log.now,
            random_bits=rng.getrandbits,
        )

    def steps(self, command: Command, id: str, expected_version: int | None = None) -> CommandSteps[CommandReply]:
        spec = next(spec for spec in self.app.commands.values() if spec.kind is type(command))
        request = CommandRequest(command=command, cause=Cause(id, id), expected_version=expected_version)
        return self.deciding.run(spec, request, self.deciding.boundary(spec, command))

    def call(self, command: Command, id: str, expected_version: int | None = None) -> CommandReply:
        return self.finish(self.steps(command, id, expected_version))

    def finish(self, steps: CommandSteps[CommandReply], answer: Any = None) -> CommandReply:
        try:
            while True:
                answer = self.log.perform(steps.send(answer))
        except StopIteration as finished:
            reply: CommandReply = finished.value
            return reply
