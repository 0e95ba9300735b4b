"""What time does to messages, asked of both: the model in ``jetspark.testing`` and a real nats-server must agree.

All courses run at the same time, since they wait: each publishes what it has at the beginning, and is looked at again
and again. What is there then is compared, headers included; of times only whether they are about right.
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

import jetspark.blocking
from jetspark.errors import MessageNotFound
from jetspark.server import NatsServer
from jetspark.testing import ModelServer

# Looked at these many seconds after the beginning: half-way between the moments at which something happens.
LOOKS_S = (0.6, 1.7, 2.7, 4.6)

# On a busy machine a look may come late, when something is about to happen: the two are asked one after the other, and
# the server's timers are late as well. So what differs is looked at again, for less than the time between two events,
# and then all courses are run again: a difference that is real stays.
AGAIN, AGAIN_S = 4, 0.1
ATTEMPTS = 3

Headers = dict[str, str]


class Published(NamedTuple):
    subject: str
    data: bytes = b""
    headers: Headers | None = None


class Course(NamedTuple):
    config: dict[str, Any]
    messages: list[Published]


COURSES = {
    # The first, so that all of it is published before the next whole second.
    "repeated": Course(
        {"allow_msg_schedules": True, "allow_msg_ttl": True},
        [
            Published("s1", b"one", {"Nats-Schedule": "@every 1s", "Nats-Schedule-Target": "each", "X-Own": "kept"}),
            Published("s2", b"two", {"Nats-Schedule": "@every 2s", "Nats-Schedule-Target": "second"}),
            Published("s3", b"x", {"Nats-Schedule": "@every 1s", "Nats-Schedule-Target": "never"}),
            Published("end", b"", {"Nats-Scheduler": "s3", "Nats-Schedule-Next": "purge"}),
            Published(
                "s4", b"y", {"Nats-Schedule": "@every 1s", "Nats-Schedule-Target": "t", "Nats-Schedule-TTL": "1s"}
            ),
            Published("s5", b"", {"Nats-Schedule": "@every 0s", "Nats-Schedule-Target": "none"}),
            Published("s5", b"", {"Nats-Schedule": "@every -1s", "Nats-Schedule-Target": "none"}),
            Published("s5", b"", {"Nats-Schedule": "@every", "Nats-Schedule-Target": "none"}),
            Published("s5", b"", {"Nats-Schedule": "@every soon", "Nats-Schedule-Target": "none"}),
            Published("s5", b"", {"Nats-Schedule": "* * *", "Nats-Schedule-Target": "none"}),
            Published("s5", b"", {"Nats-Schedule": "@sometimes", "Nats-Schedule-Target": "none"}),
        ],
    ),
    "ttl": Course(
        {"allow_msg_ttl": True},
        [
            Published("a", b"1", {"Nats-TTL": "1s"}),
            Published("b", b"2", {"Nats-TTL": "2"}),
            Published("c", b"3", {"Nats-TTL": "never"}),
            Published("d", b"4"),
            Published("e", b"5", {"Nats-TTL": "0.5s"}),
            Published("f", b"6", {"Nats-TTL": "junk"}),
        ],
    ),
    "ttl_off": Course({}, [Published("a", b"1", {"Nats-TTL": "1s"}), Published("b", b"1", {"Nats-TTL": "x"})]),
    "markers": Course(
        {"allow_msg_ttl": True, "subject_delete_marker_ttl": 1_000_000_000, "max_msgs_per_subject": 5},
        [
            Published("a", b"1", {"Nats-TTL": "1s"}),
            Published("b", b"2", {"Nats-TTL": "1s"}),
            Published("b", b"3"),
            Published("c", b"4", {"Nats-TTL": "2s"}),
        ],
    ),
    "raised": Course(
        {"allow_msg_ttl": True, "subject_delete_marker_ttl": 2_000_000_000, "max_msgs_per_subject": 5},
        [Published("a", b"1", {"Nats-TTL": "1s"})],
    ),
    "max_age": Course(
        {"max_age": 1_000_000_000, "duplicate_window": 1_000_000_000, "allow_msg_ttl": True},
        [Published("a", b"1"), Published("b", b"2", {"Nats-TTL": "2s"}), Published("c", b"3", {"Nats-TTL": "never"})],
    ),
    "schedules": Course(
        {"allow_msg_schedules": True, "allow_msg_ttl": True},
        [
            Published("s1", b"one", {"Nats-Schedule": "@at +1", "Nats-Schedule-Target": "fired", "X-Own": "kept"}),
            Published("s2", b"two", {"Nats-Schedule": "@at -10", "Nats-Schedule-Target": "past"}),
            Published("s3", b"old", {"Nats-Schedule": "@at +1", "Nats-Schedule-Target": "moved", "Nats-Msg-Id": "m"}),
            Published("s3", b"new", {"Nats-Schedule": "@at +2", "Nats-Schedule-Target": "moved"}),
            Published("s4", b"x", {"Nats-Schedule": "@at +1", "Nats-Schedule-Target": "never"}),
            Published("end", b"", {"Nats-Scheduler": "s4", "Nats-Schedule-Next": "purge"}),
            Published("s5", b"y", {"Nats-Schedule": "@at +1", "Nats-Schedule-Target": "t", "Nats-Schedule-TTL": "1s"}),
            Published("s6", b"", {"Nats-Schedule": "@at +1", "Nats-Schedule-Target": "s6"}),
            Published("s6", b"", {"Nats-Schedule": "@at +1", "Nats-Schedule-Target": "*"}),
            Published("s6", b"", {"Nats-Schedule": "@at +1"}),
            Published("s6", b"", {"Nats-Schedule": "nonsense", "Nats-Schedule-Target": "fired"}),
        ],
    ),
    "schedules_in_batches": Course(
        {"allow_msg_schedules": True, "allow_msg_ttl": True, "allow_atomic": True},
        [
            Published("s1", b"x", {"Nats-Schedule": "@at +1", "Nats-Schedule-Target": "never"}),
            Published(
                "end",
                b"",
                {
                    "Nats-Scheduler": "s1",
                    "Nats-Schedule-Next": "purge",
                    "Nats-Batch-Id": "one",
                    "Nats-Batch-Sequence": "1",
                    "Nats-Batch-Commit": "1",
                },
            ),
        ],
    ),
    "schedules_off": Course(
        {},
        [
            Published("s", b"", {"Nats-Schedule": "@at +1", "Nats-Schedule-Target": "t"}),
            Published("end", b"", {"Nats-Scheduler": "s", "Nats-Schedule-Next": "purge"}),
        ],
    ),
    "ends": Course(
        {"allow_msg_schedules": True, "allow_atomic": True},
        [
            Published("plain", b"no schedule"),
            Published("end", b"1", {"Nats-Scheduler": "plain", "Nats-Schedule-Next": "purge"}),
            Published("end", b"2", {"Nats-Scheduler": "end", "Nats-Schedule-Next": "purge"}),
            Published("end", b"3", {"Nats-Scheduler": "*", "Nats-Schedule-Next": "purge"}),
            Published("end", b"4", {"Nats-Scheduler": "", "Nats-Schedule-Next": "purge"}),
            Published("end", b"5", {"Nats-Scheduler": "none"}),
            Published("end", b"6", {"Nats-Scheduler": "none", "Nats-Schedule-Next": "2030-01-01T00:00:00Z"}),
            Published("end", b"7", {"Nats-Scheduler": "none", "Nats-Schedule-Next": "purge"}),
            Published("end", b"8", {"Nats-Schedule-Next": "purge"}),
            Published("s1", b"x", {"Nats-Schedule": "@at +1", "Nats-Schedule-Target": "never"}),
            Published("s1", b"replaced", {"Nats-Rollup": "sub"}),
        ],
    ),
}


def _headers(name: str, headers: Headers | None, began: float) -> Headers | None:
    """With the stream's own subjects and absolute times."""
    if headers is None:
        return None
    result = {}
    for key, value in headers.items():
        if value.startswith("@at "):
            moment = datetime.datetime.fromtimestamp(began + float(value[4:]), datetime.UTC)
            value = f"@at {moment.isoformat().replace('+00:00', 'Z')}"
        elif key in ("Nats-Schedule-Target", "Nats-Scheduler"):
            value = f"{name}.{value}"
        result[key] = value
    return result


@pytest.fixture(scope="module")
def client() -> Iterator[jetspark.blocking.Client]:
    with NatsServer(jetstream=True) as server, jetspark.blocking.connect(server.url) as nc:
        yield nc


def test_messages_age_and_schedules_fire_in_the_same_way(client: jetspark.blocking.Client) -> None:
    for attempt in range(ATTEMPTS):
        try:
            return _run_courses(client)
        except AssertionError:
            if attempt == ATTEMPTS - 1:
                raise
            for name in COURSES:
                client.request(f"$JS.API.STREAM.DELETE.{name}", b"")


def _run_courses(client: jetspark.blocking.Client) -> None:
    model = ModelServer()

    def ask_model(subject: str, data: bytes, headers: Headers | None = None) -> dict[str, Any]:
        [answer] = [
            each
            for each in model.publish(subject, data, reply="me", headers=headers, now=time.time())
            if each.subject == "me"
        ]
        return dict(json.loads(answer.data))

    # Repeated schedules fire at whole seconds of the server's clock: at the beginning, one has just passed.
    time.sleep(1.05 - time.time() % 1.0)
    began = time.time()
    for name, course in COURSES.items():
        config = json.dumps({"name": name, "subjects": [f"{name}.>"], "storage": "memory", **course.config}).encode()
        client.request(f"$JS.API.STREAM.CREATE.{name}", config)
        assert "error" not in ask_model(f"$JS.API.STREAM.CREATE.{name}", config)
        for subject, data, given in course.messages:
            headers = _headers(name, given, began)
            heard = json.loads(client.request(f"{name}.{subject}", data, headers=headers).data)
            assert ask_model(f"{name}.{subject}", data, headers) == heard, (name, subject, given)
    for look_s in LOOKS_S:
        time.sleep(max(0.0, began + look_s - time.time()))
        for name in COURSES:
            for _ in range(AGAIN):
                if _in_model(model, name) == _in_server(client, name):
                    break
                time.sleep(AGAIN_S)
            else:
                assert _in_model(model, name) == _in_server(client, name), (name, look_s)


Found = list[tuple[str, bytes, list[tuple[str, str]]]]


def _in_server(client: jetspark.blocking.Client, name: str) -> Found:
    stream = client.jetstream().stream(name)
    found = []
    for sequence in range(1, stream.info().state.last_sequence + 1):
        try:
            message = stream.get_message(sequence)
        except MessageNotFound:
            continue
        found.append((message.subject, message.data, sorted(dict(message.headers or {}).items())))
    return sorted(found)


def _in_model(model: ModelServer, name: str) -> Found:
    model.on_time(time.time())
    return sorted((each.subject, each.data, sorted(dict(each.headers or {}).items())) for each in model.messages(name))
