"""What time does to messages, asked of both: the model in ``jetspark.testing`` and a real nats-server must agree.

All courses run at the same time, since they wait: each publishes what it has at the beginning, and is looked at again
and again. What is there then is compared, headers included; of times only whether they are about right.
"""

from __future__ import annotations

import datetime
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import pytest
from support import seeds

import jetspark.blocking
from jetspark.errors import MessageNotFound
from jetspark.server import NatsServer
from jetspark.testing import ModelServer
from jetspark.testing.model.schedules import due_text, next_due

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


# What the server takes for a schedule and what not. None of them fires while the courses run, or only in a rare second.
PATTERNS = (
    *("@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly", "@Daily", "@decade"),
    *("0 0 0 1 1 *", " 0  0 0 1  1 * ", "0\t0 0 1 1 *", "0 0 0 1 1", "0 0 0 1 1 * *"),
    *("0 0 0 29 2 *", "0 0 0 30 2 *", "0 0 0 1 JAN *", "0 0 0 1 jan ?", "0 0 0 1 january *", "0 0 0 1 1 sun-Mon"),
    *("60 0 0 1 1 *", "0 60 0 1 1 *", "0 0 24 1 1 *", "0 0 0 0 1 *", "0 0 0 32 1 *", "0 0 0 1 0 *", "0 0 0 1 13 *"),
    *("0 0 0 1 1 7", "*/0 0 0 1 1 *", "*/70 0 0 1 1 *", "5/7 0 0 1 1 *", "5-2 0 0 1 1 *", "1-2-3 0 0 1 1 *"),
    *(
        "*-5 0 0 1 1 *",
        "*/5/2 0 0 1 1 *",
        "1,2, 0 0 1 1 *",
        "+5 0 0 1 1 *",
        "-5 0 0 1 1 *",
        "0 0 0 L 1 *",
        "x 0 0 1 1 *",
    ),
    *(
        "@every 10",
        "@every 1m0.5s",
        "@every 9500ms",
        "@every 0.9s",
        "@every  9s",
        "@every +9s",
        "@every 1h1h",
        "@every h",
    ),
    *("@at 2030-01-01T00:00:00Z", "@at  2030-01-01T00:00:00Z", "@at tomorrow"),
)

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
            Published("s6", b"", {"Nats-Schedule": "@every 1.5s", "Nats-Schedule-Target": "fraction"}),
            Published("s7", b"7", {"Nats-Schedule": "* * * * * *", "Nats-Schedule-Target": "cron", "X-Own": "kept"}),
            Published(
                "s8",
                b"8",
                {
                    "Nats-Schedule": "*/2 * * ? * SUN-SAT",
                    "Nats-Schedule-Target": "zone",
                    "Nats-Schedule-Time-Zone": "Asia/Kolkata",
                },
            ),
        ],
    ),
    "patterns": Course(
        {"allow_msg_schedules": True},
        [
            *(
                Published(f"s{number}", b"", {"Nats-Schedule": pattern, "Nats-Schedule-Target": "t"})
                for number, pattern in enumerate(PATTERNS)
            ),
            *(
                Published(
                    "zone",
                    b"",
                    {"Nats-Schedule": pattern, "Nats-Schedule-Target": "t", "Nats-Schedule-Time-Zone": zone},
                )
                for pattern in ("@yearly", "0 0 0 1 1 *", "@at +9", "@every 9s", "nonsense", "* * *")
                for zone in ("Europe/Berlin", "UTC", "Mars/Crater", "Europe", "europe/berlin", "../x", "/etc", "")
            ),
            Published("zone", b"", {"Nats-Schedule-Time-Zone": "Mars/Crater"}),
            Published(
                "zone",
                b"",
                {"Nats-Schedule": "* *", "Nats-Schedule-Target": "*", "Nats-Schedule-Time-Zone": "Mars/Crater"},
            ),
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
            Published("d", b"5"),
            Published("d", b"6", {"Nats-TTL": "1s"}),
            Published("e", b"7", {"Nats-TTL": "3s"}),
            Published("e", b"8", {"Nats-TTL": "1s"}),
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
        if value.startswith(("@at +", "@at -")):
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


@pytest.mark.parametrize("seed", seeds.tried([1], count=1))
def test_the_next_time_of_a_cron_schedule_is_the_same(client: jetspark.blocking.Client, seed: int) -> None:
    """Schedules that fire within seconds: what they publish says when they fire again, in months or years it may be."""
    for lead_s in (2, 4, 8, 16):  # a busy machine may not have set all of them in time
        soon = datetime.datetime.fromtimestamp(math.ceil(time.time()) + lead_s, datetime.UTC)
        schedules = _schedules(random.Random(seed), soon)
        client.request("$JS.API.STREAM.DELETE.CRON", b"")
        _set_all(client, schedules)
        if time.time() < soon.timestamp() - 0.5:
            break
    stream = client.jetstream().stream("CRON")
    for number, (pattern, zone) in enumerate(schedules):
        while not (fired := stream.get_last_messages([f"cron.fired.{number}"])):
            assert time.time() < soon.timestamp() + 60, (pattern, zone)
            time.sleep(0.1)
        due = next_due(pattern, zone, soon.timestamp())
        assert due is not None
        assert due_text(due, zone) == fired[0].headers.get("Nats-Schedule-Next"), (pattern, zone, soon)


def _set_all(client: jetspark.blocking.Client, schedules: list[tuple[str, str]]) -> None:
    config = {"name": "CRON", "subjects": ["cron.>"], "allow_msg_schedules": True, "allow_direct": True}
    client.request("$JS.API.STREAM.CREATE.CRON", json.dumps(config).encode())
    for number, (pattern, zone) in enumerate(schedules):
        headers = {
            "Nats-Schedule": pattern,
            "Nats-Schedule-Target": f"cron.fired.{number}",
            "Nats-Schedule-Time-Zone": zone,
        }
        answer = json.loads(client.request(f"cron.set.{number}", headers=headers).data)
        assert "error" not in answer, (pattern, zone)


SCHEDULES = 60
ZONES = (
    "UTC",
    "Europe/Berlin",
    "Asia/Kolkata",
    "America/New_York",
    "America/Santiago",
    "Australia/Lord_Howe",
    "Africa/Cairo",
)


def _schedules(rng: random.Random, moment: datetime.datetime) -> list[tuple[str, str]]:
    chosen = [_cron_at(rng, moment, rng.choice(ZONES)) for _ in range(SCHEDULES)]
    return chosen + [each for zone in ZONES for each in _near_changed_clocks(moment, zone)]


def _cron_at(rng: random.Random, moment: datetime.datetime, zone: str) -> tuple[str, str]:
    """A schedule that fires at a moment, and at others."""
    at = moment.astimezone(ZoneInfo(zone))
    # A second of its own: it fires once, and not again within the test.
    return " ".join([str(at.second), *(_field(rng, *each) for each in _fields(at))]), zone


def _fields(at: datetime.datetime) -> list[tuple[int, int, int]]:
    return [(at.minute, 0, 59), (at.hour, 0, 23), (at.day, 1, 31), (at.month, 1, 12), (at.isoweekday() % 7, 0, 6)]


def _field(rng: random.Random, value: int, low: int, high: int) -> str:
    other = rng.randint(low, high)
    step = rng.randint(1, high)
    return rng.choice(
        [
            "*",
            "?",
            str(value),
            f"{value},{other}",
            f"{min(value, other)}-{max(value, other)}",
            f"{value % step + (step if value % step < low else 0)}/{step}",
            f"{other},{value}-{high}",
        ]
    )


def _near_changed_clocks(moment: datetime.datetime, zone: str) -> Iterator[tuple[str, str]]:
    """Schedules that fire next on a day on which the clock of their zone is changed; early that day, if it can be."""
    at = moment.astimezone(ZoneInfo(zone))
    hours = ",".join(sorted({str(at.hour), *(str(each) for each in (0, 1, 2, 5) if each <= at.hour)}))
    days = [at + datetime.timedelta(days=days) for days in range(1, 366)]
    for before, day in itertools.pairwise(days):
        if before.utcoffset() != day.utcoffset():
            yield f"{at.second} {at.minute} {hours} {at.day},{day.day} {at.month},{day.month} *", zone


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
