"""Pull requests that wait, and what is done to consumers, asked of both: the model and a real nats-server must agree.

Each course is a list of steps. After every step both have said something to each inbox, in this order; that is
compared, headers included, and at the end so is what the consumer says of itself. All courses run at the same time.
"""

from __future__ import annotations

import base64
import datetime
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import jetspark.blocking
from jetspark.errors import NoResponders, RequestTimeout
from jetspark.server import NatsServer
from jetspark.testing import ModelServer

# Silence on the server: nothing more comes to an inbox.
QUIET_S = 0.2

Said = dict[str, list[tuple[Any, ...]]]


class Both:
    """A course of events on the server and on the model."""

    def __init__(self, url: str, name: str) -> None:
        self.name = name
        self._client = jetspark.blocking.connect(url)
        self._client.__enter__()
        self._model = ModelServer()
        self._inboxes: dict[str, jetspark.blocking.Subscription] = {}
        self._pins: dict[str, dict[str, str]] = {"server": {}, "model": {}}
        self._told: Said = defaultdict(list)
        self._step = ""

    def close(self) -> None:
        self._client.__exit__(None, None, None)

    # ---- steps -------------------------------------------------------------------------------------------------

    def stream(self, **fields: Any) -> None:
        config = {"name": self.name, "subjects": [f"{self.name}.>"], "storage": "memory", **fields}
        self.api(f"STREAM.CREATE.{self.name}", config)

    def consumer(self, **fields: Any) -> None:
        config = {"durable_name": "c", "name": "c", "ack_policy": "explicit", **fields}
        body = {"stream_name": self.name, "config": config, "action": "create"}
        self.api(f"CONSUMER.CREATE.{self.name}.c", body)

    def publish(self, count: int, subject: str = "a", size: int = 1) -> None:
        for number in range(count):
            self._both(f"{self.name}.{subject}", b"%d" % number + b"." * (size - 1), f"publish {number}")
        self.compare(f"publish {count}")

    def api(self, what: str, body: dict[str, Any], *, keys: tuple[str, ...] = ("error", "success")) -> None:
        self._both(f"$JS.API.{what}", json.dumps(body).encode(), what, keys)
        self.compare(what)

    def pull(self, inbox: str, *, pin_of: str | None = None, **body: Any) -> None:
        """``pin_of`` sends the pin id that an inbox has got."""
        if inbox not in self._inboxes:
            self._inboxes[inbox] = self._client.subscribe(f"in.{self.name}.{inbox}")
            self._client.flush()
        bodies = {
            peer: json.dumps(body if pin_of is None else {**body, "id": self._pins[peer].get(pin_of, "none")}).encode()
            for peer in ("server", "model")
        }
        subject, reply = f"$JS.API.CONSUMER.MSG.NEXT.{self.name}.c", f"in.{self.name}.{inbox}"
        self._client.publish(subject, bodies["server"], reply=reply)
        self._keep(self._model.publish(subject, bodies["model"], reply=reply, now=time.time()))
        self.compare(f"pull {inbox} {body}")

    def answer(self, sequence: int, word: bytes, delivered: int = 1, place: int | None = None) -> None:
        subject = f"$JS.ACK.{self.name}.c.{delivered}.{sequence}.{place or sequence}.0.0"
        self._both(subject, word, f"{word!r} {sequence}")
        self.compare(f"{word!r} {sequence}")

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)
        self.compare(f"wait {seconds}")

    # ---- comparing ---------------------------------------------------------------------------------------------

    def compare(self, step: str) -> None:
        """What came to each inbox, since the last step and until it is quiet."""
        heard: Said = {}
        for inbox, subscription in self._inboxes.items():
            messages = []
            while True:
                try:
                    messages.append(subscription.next(timeout=QUIET_S if not heard else 0.02))
                except RequestTimeout:
                    break
            said = [self._said("server", inbox, m.subject, m.reply, m.data, m.status, m.headers) for m in messages]
            if said:
                heard[inbox] = said
        self._keep(self._model.on_time(time.time()))
        told, self._told = dict(self._told), defaultdict(list)
        assert told == heard, f"{self.name}, {step}\n  server {heard}\n  model  {told}"

    def compare_info(self) -> None:
        infos = [self._ask_server(f"$JS.API.CONSUMER.INFO.{self.name}.c", b"")]
        infos.append(self._ask_model(f"$JS.API.CONSUMER.INFO.{self.name}.c", b""))
        names = ("error", "num_ack_pending", "num_redelivered", "num_waiting", "num_pending", "paused", "config")
        server, model = ({name: info.get(name) for name in names} for info in infos)
        for state in (server, model):
            if state["config"]:
                state["config"].pop("metadata", None)
        assert model == server, self.name

    def compare_stored(self, stream: str, count: int) -> None:
        """Advisories that a stream has stored, without their ids and times."""
        for sequence in range(1, count + 2):
            subject, body = f"$JS.API.STREAM.MSG.GET.{stream}", json.dumps({"seq": sequence}).encode()
            heard, told = (_advisory(ask(subject, body)) for ask in (self._ask_server, self._ask_model))
            assert told == heard, f"{self.name}, {sequence}\n  server {heard}\n  model  {told}"
            assert ("error" in heard) == (sequence > count), f"{self.name}: {count} expected, of {sequence} {heard}"

    def _both(self, subject: str, data: bytes, step: str, keys: tuple[str, ...] = ("error", "success", "seq")) -> None:
        heard, told = self._ask_server(subject, data), self._ask_model(subject, data)
        for key in keys:
            assert told.get(key) == heard.get(key), f"{self.name}, {step}: {key}\n  {heard}\n  {told}"

    def _ask_server(self, subject: str, data: bytes) -> dict[str, Any]:
        try:
            return dict(json.loads(self._client.request(subject, data, timeout=10).data or b"{}"))
        except NoResponders:
            return {"error": 503}

    def _ask_model(self, subject: str, data: bytes) -> dict[str, Any]:
        said = self._model.publish(subject, data, reply="ask", now=time.time())
        self._keep(said)
        [answer] = [each for each in said if each.subject == "ask"]
        return {"error": answer.status.code} if answer.status is not None else dict(json.loads(answer.data or b"{}"))

    def _keep(self, said: Any) -> None:
        for each in said:
            if each.subject.startswith("in."):
                inbox = each.subject.rpartition(".")[2]
                self._told[inbox].append(
                    self._said("model", inbox, each.shown_subject, each.reply, each.data, each.status, each.headers)
                )

    def _said(
        self, peer: str, inbox: str, subject: str, reply: str | None, data: bytes, status: Any, headers: Any
    ) -> tuple[Any, ...]:
        """Without times and made-up names; of the number that is pending, the server may be a moment behind."""
        fields = dict(headers or {})
        if "Nats-Pin-Id" in fields:
            self._pins[peer][inbox] = fields["Nats-Pin-Id"]
            fields["Nats-Pin-Id"] = "a pin"
        if status is not None:
            return (status.code, status.description, *sorted(fields.items()))
        return (subject, data[:3], *(reply or "").split(".")[4:7], *sorted(fields.items()))


def _advisory(answer: dict[str, Any]) -> dict[str, Any]:
    if "error" in answer:
        return {"error": answer["error"]}
    fields = json.loads(base64.b64decode(answer["message"]["data"]))
    assert fields.pop("id")
    age_s = time.time() - datetime.datetime.fromisoformat(fields.pop("timestamp")).timestamp()
    assert 0 <= age_s < 600
    return {"subject": answer["message"]["subject"], **fields}


def _requests_take_turns(both: Both) -> None:
    both.stream()
    both.consumer()
    both.pull("one", batch=3, expires=20_000_000_000)
    both.pull("two", batch=3, expires=20_000_000_000)
    both.publish(5)


def _requests_expire(both: Both) -> None:
    both.stream()
    both.consumer()
    both.pull("one", batch=3, expires=800_000_000)
    both.publish(1)
    both.wait(1.0)
    both.pull("two", batch=2, no_wait=True, expires=500_000_000)
    both.wait(0.7)


def _requests_meet_max_ack_pending(both: Both) -> None:
    """They are ended when another one expires, or has a heartbeat."""
    both.stream()
    both.consumer(max_ack_pending=2)
    both.publish(5)
    both.pull("one", batch=5, no_wait=True, expires=20_000_000_000)
    both.pull("two", batch=5, no_wait=True, expires=20_000_000_000)
    both.pull("three", batch=5, no_wait=True)
    both.pull("probe", batch=1, expires=2_500_000_000)
    both.wait(2.7)
    both.compare_info()
    both.answer(1, b"+ACK")
    both.pull("three", batch=5, no_wait=True)
    both.pull("beats", batch=1, expires=9_000_000_000, idle_heartbeat=2_500_000_000)
    both.wait(2.7)


def _requests_have_heartbeats(both: Both) -> None:
    both.stream()
    both.consumer()
    both.pull("one", batch=3, expires=9_000_000_000, idle_heartbeat=1_500_000_000)
    both.wait(1.8)
    both.pull("two", batch=1, expires=1_000_000_000, idle_heartbeat=600_000_000)


def _requests_have_a_number_of_bytes(both: Both) -> None:
    both.stream()
    both.consumer()
    both.publish(4, size=100)
    both.pull("one", batch=2, max_bytes=1000, no_wait=True)
    both.pull("two", batch=9, max_bytes=250, no_wait=True)
    both.pull("three", batch=9, max_bytes=20, no_wait=True)


def _a_consumer_is_paused(both: Both) -> None:
    both.stream()
    both.consumer()
    both.publish(2)
    both.api(f"CONSUMER.PAUSE.{both.name}.c", {"pause_until": "2099-01-01T00:00:00Z"}, keys=("error", "paused"))
    both.pull("one", batch=1, expires=20_000_000_000)
    both.pull("two", batch=1, no_wait=True)
    both.compare_info()
    both.api(f"CONSUMER.PAUSE.{both.name}.c", {}, keys=("error", "paused"))
    both.publish(1)


def _a_consumer_is_reset(both: Both) -> None:
    both.stream()
    both.consumer()
    both.publish(4)
    both.pull("one", batch=3, no_wait=True)
    both.answer(1, b"+ACK")
    both.api(f"CONSUMER.RESET.{both.name}.c", {}, keys=("error", "reset_seq"))
    both.pull("two", batch=2, no_wait=True)
    both.api(f"CONSUMER.RESET.{both.name}.c", {"seq": 2}, keys=("error", "reset_seq"))
    both.pull("three", batch=9, no_wait=True)


def _a_reader_is_pinned(both: Both) -> None:
    both.stream()
    both.consumer(priority_policy="pinned_client", priority_groups=["g"], priority_timeout=60_000_000_000)
    both.publish(6)
    both.pull("none", batch=1, no_wait=True)
    both.pull("wrong", batch=1, no_wait=True, group="h")
    both.pull("one", batch=1, no_wait=True, group="g")
    both.pull("two", batch=1, expires=20_000_000_000, group="g")
    both.pull("one", pin_of="one", batch=1, no_wait=True, group="g")
    both.pull("three", pin_of="nobody", batch=1, no_wait=True, group="g")
    both.api(f"CONSUMER.UNPIN.{both.name}.c", {"group": "g"})
    both.pull("one", pin_of="one", batch=1, no_wait=True, group="g")


def _consumers_and_streams_are_deleted(both: Both) -> None:
    both.stream()
    both.consumer()
    both.pull("one", batch=1, expires=20_000_000_000)
    both.api(f"CONSUMER.DELETE.{both.name}.c", {})
    both.pull("two", batch=1, expires=20_000_000_000)
    both.consumer()
    both.pull("three", batch=1, expires=20_000_000_000)
    both.api(f"STREAM.DELETE.{both.name}", {})


def _a_consumer_has_limits(both: Both) -> None:
    both.stream()
    both.consumer(max_waiting=2, max_batch=5, max_expires=30_000_000_000, max_bytes=1000)
    both.pull("one", batch=6, expires=20_000_000_000)
    both.pull("two", batch=1, expires=40_000_000_000)
    both.pull("endless", batch=1, no_wait=True)
    both.pull("three", batch=1, expires=20_000_000_000, max_bytes=2000)
    both.pull("four", batch=5, expires=20_000_000_000)
    both.pull("five", batch=5, expires=20_000_000_000)
    both.pull("six", batch=5, expires=20_000_000_000)


def _deliveries_wait_longer_each_time(both: Both) -> None:
    both.stream()
    both.consumer(backoff=[500_000_000, 1_500_000_000], max_deliver=3)
    both.publish(1)
    both.pull("one", batch=9, expires=20_000_000_000)
    both.wait(0.9)
    both.wait(2.4)


def _only_headers_are_sent(both: Both) -> None:
    both.stream()
    both.consumer(headers_only=True)
    both.publish(2, size=10)
    both.pull("one", batch=2, no_wait=True)


def _requests_are_not_understood(both: Both) -> None:
    both.stream()
    both.consumer()
    both.publish(3)
    both.pull("one", batch=-3, no_wait=True)
    both.pull("two", batch=1, expires=1_000_000_000, idle_heartbeat=900_000_000)
    both.pull("three", batch=1, idle_heartbeat=900_000_000)
    both.pull("four")


def _advisories_are_stored(both: Both) -> None:
    both.stream()
    advisories = f"{both.name}_ADVISORIES"
    subjects = [f"$JS.EVENT.ADVISORY.CONSUMER.{kind}.{both.name}.c" for kind in ("MSG_TERMINATED", "MAX_DELIVERIES")]
    both.api(f"STREAM.CREATE.{advisories}", {"name": advisories, "subjects": subjects, "storage": "memory"})
    both.consumer(max_deliver=1, ack_wait=1_000_000_000)
    both.publish(4)
    both.pull("one", batch=4, no_wait=True)
    both.answer(1, b"+TERM")
    both.answer(2, b"+TERM for a reason")
    both.answer(3, b"+ACK")
    both.wait(1.5)
    both.compare_stored(advisories, 3)


COURSES: list[Callable[[Both], None]] = [
    _requests_take_turns,
    _requests_expire,
    _requests_meet_max_ack_pending,
    _requests_have_heartbeats,
    _requests_have_a_number_of_bytes,
    _a_consumer_is_paused,
    _a_consumer_is_reset,
    _a_reader_is_pinned,
    _consumers_and_streams_are_deleted,
    _a_consumer_has_limits,
    _deliveries_wait_longer_each_time,
    _only_headers_are_sent,
    _requests_are_not_understood,
    _advisories_are_stored,
]


@pytest.fixture(scope="module")
def outcomes() -> Iterator[dict[str, BaseException | None]]:
    """All at once: they mostly wait."""
    with NatsServer(jetstream=True) as server, ThreadPoolExecutor(len(COURSES)) as pool:

        def run(course: Callable[[Both], None]) -> None:
            both = Both(server.url, course.__name__.strip("_"))
            try:
                course(both)
                both.compare_info()
            finally:
                both.close()

        running = {course.__name__: pool.submit(run, course) for course in COURSES}
        yield {name: future.exception() for name, future in running.items()}


@pytest.mark.parametrize("course", COURSES, ids=lambda course: course.__name__.strip("_"))
def test_the_same_is_said(course: Callable[[Both], None], outcomes: dict[str, BaseException | None]) -> None:
    error = outcomes[course.__name__]
    if error is not None:
        raise error
