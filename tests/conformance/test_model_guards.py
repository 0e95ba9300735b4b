"""Guarded messages, alone and in atomic batches, and the reads that go with them: model and server must agree.

Both are told the same, drawn from a few subjects and filters that overlap, with expectations that are right or nearly.
"""

from __future__ import annotations

import datetime
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

import jetspark.blocking
from jetspark.core.subjects import matches
from jetspark.jetstream.config import StreamConfig
from jetspark.jetstream.wire import time_text
from jetspark.server import NatsServer
from jetspark.testing import ModelServer

SUBJECTS = ["g.a", "g.b", "g.a.x", "g.a.y", "g.b.x"]
FILTERS = [*SUBJECTS, "g.>", "g.a.>", "g.*.x", "g.b.*", "other.>"]


@pytest.fixture(scope="module")
def client() -> Iterator[jetspark.blocking.Client]:
    with NatsServer() as server, jetspark.blocking.connect(server.url) as client:
        yield client


class Guarded:
    """One course on both."""

    def __init__(self, client: jetspark.blocking.Client, seed: int) -> None:
        self.rng, self.client, self.model = random.Random(seed), client, ModelServer()
        self.stored: list[str] = []
        self.began: list[float] = []
        config = StreamConfig(name="GUARDS", subjects=["g.>"], allow_atomic=True, allow_direct=True)
        client.jetstream().create_stream(config)
        self.model.create_stream(config, now=time.time())

    def close(self) -> None:
        self.client.jetstream().delete_stream("GUARDS")

    def last(self, filter: str) -> int:

        return max((i for i, subject in enumerate(self.stored, 1) if matches(filter, subject)), default=0)

    def headers(self, subject: str) -> dict[str, str]:
        """Some expectation, or none; mostly one that holds."""
        found: dict[str, str] = {}
        if self.rng.random() < 0.8:
            filter = self.rng.choice(FILTERS)
            expected = max(0, self.last(filter) + self.rng.choice((0, 0, 0, 0, 0, -1, 1)))
            found["Nats-Expected-Last-Subject-Sequence"] = str(expected)
            if filter != subject:
                found["Nats-Expected-Last-Subject-Sequence-Subject"] = filter
        if self.rng.random() < 0.15:
            found["Nats-Expected-Last-Sequence"] = str(max(0, len(self.stored) + self.rng.choice((0, 0, -1))))
        return found

    def ask(self, subject: str, data: bytes, headers: dict[str, str] | None = None) -> Any:
        """What both say to a message; the server's words are returned, if they are the same."""
        answer = self.client.request(subject, data, headers=headers, timeout=10)
        said = self.model.publish(subject, data, reply="ask", headers=headers, now=time.time())
        [told] = [each for each in said if each.subject == "ask"]
        if answer.status is not None or "Nats-Sequence" in answer.headers:
            heard = answer.status.code if answer.status is not None else answer.headers["Nats-Sequence"]
            assert told.status is not None or told.headers is not None
            seen = told.status.code if told.status is not None else told.headers and told.headers["Nats-Sequence"]
        else:
            heard, seen = _content(answer.data), _content(told.data)
        assert seen == heard, f"{subject} {data!r} {headers}: the server says {heard!r}, the model {seen!r}"
        return heard

    def append(self, number: int) -> None:
        subjects = self.rng.choices(SUBJECTS, k=self.rng.choice((1, 1, 2, 3)))
        if len(subjects) == 1:
            answer = self.ask(subjects[0], b"x", self.headers(subjects[0]))
        else:
            for place, subject in enumerate(subjects, 1):
                headers = {"Nats-Batch-Id": f"b{number}", "Nats-Batch-Sequence": str(place), **self.headers(subject)}
                if place == len(subjects):
                    headers["Nats-Batch-Commit"] = "1"
                answer = self.ask(subject, b"x", headers)
        if isinstance(answer, dict) and "error" not in answer:
            self.stored += subjects
            assert answer["seq"] == len(self.stored)

    def read(self) -> None:
        filter = self.rng.choice(FILTERS)
        query: dict[str, Any] = {"last_by_subj": filter}
        self.ask("$JS.API.STREAM.MSG.GET.GUARDS", json.dumps(query).encode())
        self.ask("$JS.API.DIRECT.GET.GUARDS", json.dumps(query).encode())
        query = {"seq": self.rng.randint(1, len(self.stored) + 1), "next_by_subj": filter}
        self.ask("$JS.API.STREAM.MSG.GET.GUARDS", json.dumps(query).encode())

    def read_since(self, filter: str, since: str) -> Any:
        query = {"start_time": since, "next_by_subj": filter}
        return self.ask("$JS.API.DIRECT.GET.GUARDS", json.dumps(query).encode())


def _content(data: bytes) -> Any:
    found = json.loads(data or b"{}")
    message = found.get("message") or {}
    return {name: found[name] for name in ("error", "seq", "count") if name in found} | {"of": message.get("seq")}


@pytest.mark.parametrize("seed", range(3))
def test_guards_are_checked_alike_and_reads_find_the_same(client: jetspark.blocking.Client, seed: int) -> None:
    course = Guarded(client, seed)
    try:
        for number in range(100):
            course.append(number)
            course.read()
        assert len(course.stored) > 20

        time.sleep(0.05)
        middle = time_text(datetime.datetime.now(datetime.UTC))
        time.sleep(0.05)
        before = len(course.stored)
        course.ask("g.b", b"later", {})
        assert course.read_since("g.b", middle) == str(before + 1)
        assert course.read_since("g.a.>", middle) == 404
    finally:
        course.close()
