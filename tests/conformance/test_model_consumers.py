"""Pull consumers, asked of both: the model in ``jetspark.testing`` and a real nats-server, which must agree.

A program is a list of steps made from a seed: publish, pull, answer a delivery, delete, purge, wait. Each step is done
on the server and then, at the same time by the clock, on the model; what they say is compared after every step, and so
is what the consumer says of itself. Nothing here knows what is right: the server does.
"""

from __future__ import annotations

import json
import math
import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support import seeds

import jetspark.blocking
from jetspark.errors import NoResponders, RequestTimeout
from jetspark.testing import Delivery, ModelServer

ACK_WAIT_S = 0.8
DELAY_S = 0.5
# Waiting this long is past every ack_wait and every delay, and far from their borders.
LONG_S = 1.3
# Deliveries that are this far apart expire one after the other; closer ones by sequence.
APART_S = 0.03
# Silence on the server: nothing more comes to an inbox.
QUIET_S = 0.15
# The two are asked one after the other, so no step begins this shortly before an ack_wait or a delay ends. On a machine
# that is busy one may end within a step all the same, or two at a time that should have ended one after the other. So a
# program in which time passes is run again when it differs, with longer times: a difference that is real stays.
BORDER_S = 0.1
ATTEMPTS = 4

PROGRAMS, FRESH_PROGRAMS = 40, 10
# These have found something once: a nak with a delay after one without, the end of a message that was given up, one
# that wakes no request of a consumer that does not want it, an old answer to ``all``, max_deliver at the end of an
# ack_wait, and the first sequence of a consumer that finds no last message.
FOUND = [700109, 700320, 700561, 701126, 701415, 701597]

Said = tuple[Any, ...]


class RealPeer:
    """A server, spoken to by a client that knows nothing of consumers."""

    def __init__(self, url: str, name: str) -> None:
        self._client = jetspark.blocking.connect(url)
        self._client.__enter__()
        self._inbox = self._client.subscribe(f"in.{name}.>")

    def close(self) -> None:
        self._client.__exit__(None, None, None)

    def ask(self, subject: str, data: bytes) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = json.loads(self._client.request(subject, data, timeout=10).data or b"{}")
        except NoResponders:
            return {"error": 503}
        return answer

    def send(self, subject: str, data: bytes, reply: str, count: int | None) -> list[Said]:
        """Returns what comes: as many as expected, or until it is quiet."""
        self._client.publish(subject, data, reply=reply)
        said: list[Said] = []
        while count is None or len(said) < count:
            try:
                message = self._inbox.next(timeout=QUIET_S if count is None else 5.0)
            except RequestTimeout:
                break
            said.append(_said(message.subject, message.reply, message.data, message.status, message.headers))
        return said

    def more(self) -> list[Said]:
        """What has come meanwhile, until it is quiet."""
        said: list[Said] = []
        while True:
            try:
                message = self._inbox.next(timeout=QUIET_S)
            except RequestTimeout:
                return said
            said.append(_said(message.subject, message.reply, message.data, message.status, message.headers))


class ModelPeer:
    def __init__(self) -> None:
        self.server = ModelServer()
        self._waiting: list[Said] = []

    def ask(self, subject: str, data: bytes) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        for each in self.server.publish(subject, data, reply="ask", now=time.time()):
            if each.subject == "ask":
                answer = {"error": each.status.code} if each.status is not None else json.loads(each.data or b"{}")
            else:
                self._keep(each)
        return answer

    def send(self, subject: str, data: bytes, reply: str, count: int | None) -> list[Said]:
        for each in self.server.publish(subject, data, reply=reply, now=time.time()):
            self._keep(each)
        return self.more()

    def more(self) -> list[Said]:
        for each in self.server.on_time(time.time()):
            self._keep(each)
        said, self._waiting = self._waiting, []
        return said

    def next_deadline(self) -> float:
        """After everything that has happened until now."""
        for each in self.server.on_time(time.time()):
            self._keep(each)
        deadline = self.server.next_deadline()
        return math.inf if deadline is None else deadline

    def _keep(self, each: Delivery) -> None:
        if each.subject.startswith("in."):
            subject = each.shown_subject or each.subject
            self._waiting.append(_said(subject, each.reply, each.data, each.status, each.headers or {}))


def _said(subject: str, reply: str | None, data: bytes, status: Any, headers: Any) -> Said:
    """What was said, without what nobody can know before: times and made-up names."""
    fields = sorted((name, value) for name, value in dict(headers).items() if name != "Nats-Pin-Id")
    if status is not None:
        return (status.code, status.description, *fields)
    tokens = (reply or "").split(".")
    return (subject, data, *tokens[4:7], tokens[8], *fields) if len(tokens) == 9 else (subject, data, *fields)


_RELEVANT = ("num_ack_pending", "num_redelivered", "num_waiting", "num_pending")


class Undecided(Exception):
    """The two differ, and a deadline has passed while they were asked."""


class Program:
    """One course of events on both."""

    def __init__(self, seed: int, attempt: int, url: str) -> None:
        self._rng = random.Random(f"consumers {seed}")
        self._name = f"S{seed}_{attempt}"
        self._slowness = 2**attempt
        self._real, self._model = RealPeer(url, self._name), ModelPeer()
        self._acks: list[str] = []
        """Ack subjects of the server, which have its time stamps; the model does not look at those."""
        # Either time passes, or requests wait for room among the unacknowledged. With both, it would matter which of
        # two messages expires a millisecond earlier.
        self.is_timed = self._rng.random() < 0.4
        self._pulls = self._published = 0
        self._is_waiting = False
        self._border = math.inf
        """From then on the next ack_wait or delay may have ended, those included that begin with this step."""
        self._policy = ""
        self.log: list[str] = []

    def close(self) -> None:
        self._real.close()

    def run(self, steps: int) -> None:
        self._create()
        waits = 0
        for _ in range(steps):
            if self.is_timed:
                time.sleep(APART_S * self._slowness)
                self._step_over_borders()
            roll = self._rng.random()
            if roll < 0.25:
                self._publish()
            elif roll < 0.55:
                self._pull()
            elif roll < 0.90:
                self._answer()
            elif roll < 0.94:
                self._remove()
            elif waits < 2 and self.is_timed:
                waits += 1
                self._note("wait")
                time.sleep(LONG_S * self._slowness)
                self._step_over_borders()
                self._pull()
            self._compare_info()

    # ---- steps -------------------------------------------------------------------------------------------------

    def _create(self) -> None:
        rng = self._rng
        fields: dict[str, Any] = {"name": self._name, "subjects": [f"{self._name}.>"], "storage": "memory"}
        if rng.random() < 0.2:
            fields["max_msgs_per_subject"] = 3
        self._both(f"$JS.API.STREAM.CREATE.{self._name}", fields)
        for _ in range(rng.randrange(4)):
            self._publish()
        consumer: dict[str, Any] = {
            "name": "c",
            "durable_name": "c",
            "ack_policy": rng.choices(["explicit", "all", "none"], [8, 1, 1])[0],
        }
        if consumer["ack_policy"] != "none":
            # Where no time is to pass, not even the half minute that a busy machine may take for a program.
            consumer["ack_wait"] = round((ACK_WAIT_S * self._slowness if self.is_timed else 3600.0) * 1e9)
        consumer["deliver_policy"] = rng.choices(["all", "new", "last", "last_per_subject"], [7, 1, 1, 1])[0]
        if rng.random() < 0.3 or consumer["deliver_policy"] == "last_per_subject":
            consumer["filter_subject"] = f"{self._name}.{rng.choice(['a', 'a', '*'])}"
        # The server's floor stays behind where ``all`` acknowledges a message that was given up; the model's does not.
        if rng.random() < 0.4 and consumer["ack_policy"] != "all":
            consumer["max_deliver"] = rng.randrange(1, 4)
        if rng.random() < 0.4 and consumer["ack_policy"] != "none" and not self.is_timed:
            consumer["max_ack_pending"] = rng.randrange(1, 4)
        self._note(str(consumer))
        self._policy = consumer["deliver_policy"]
        self._both(
            f"$JS.API.CONSUMER.CREATE.{self._name}.c"
            + (f".{consumer['filter_subject']}" if consumer.get("filter_subject", "*")[-1] != "*" else ""),
            {"stream_name": self._name, "config": consumer, "action": "create"},
        )
        self._compare_info()

    def _publish(self) -> None:
        self._published += 1
        subject = f"{self._name}.{self._rng.choice('ab')}"
        self._note(f"publish {subject}")
        self._both(subject, b"%d" % self._published)

    def _pull(self) -> None:
        self._pulls += 1
        batch = self._rng.randrange(1, 6)
        reply = f"in.{self._name}.{self._pulls}"
        data = json.dumps({"batch": batch, "no_wait": True}).encode()
        self._note(f"pull {batch}")
        self._settle_info()
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._name}.c"
        told = self._model.send(subject, data, reply, None)
        heard = self._real.send(subject, data, reply, len(told) or None)
        self._note(f"    {heard}")
        self._compare(f"pull {self._pulls}", heard, told)
        self._keep_acks(heard)

    def _keep_acks(self, heard: list[Said]) -> None:
        self._acks += [f"$JS.ACK.{self._name}.c.{each[2]}.{each[3]}.{each[4]}.0.0" for each in heard if len(each) >= 6]

    def _answer(self) -> None:
        if not self._acks:
            return
        subject = self._rng.choice(self._acks)
        word = self._rng.choices(
            [
                b"+ACK",
                b"-NAK",
                b'-NAK {"delay": %d}' % (DELAY_S * self._slowness * 1e9),
                b"+WPI",
                b"+TERM",
                b"+TERM no use",
            ],
            [6, 3, 1 if self.is_timed else 0, 1, 1, 1],
        )[0]
        self._note(f"{word.decode()} {subject}")
        self._both(subject, word)

    def _remove(self) -> None:
        if self._policy == "last_per_subject":
            # nats-server 2.15.1 does not go on when what it was to begin with is gone. The model does.
            return
        if self._rng.random() < 0.8 and self._published:
            sequence = self._rng.randrange(1, self._published + 1)
            self._note(f"delete {sequence}")
            self._both(f"$JS.API.STREAM.MSG.DELETE.{self._name}", {"seq": sequence})
        else:
            self._note("purge")
            self._both(f"$JS.API.STREAM.PURGE.{self._name}", {})

    # ---- comparing ---------------------------------------------------------------------------------------------

    def _note(self, text: str) -> None:
        self.log.append(text)

    def _both(self, subject: str, body: dict[str, Any] | bytes) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        heard, told = self._real.ask(subject, data), self._model.ask(subject, data)
        for key in ("error", "purged", "seq", "success"):
            self._compare(f"{subject}: {key}", heard.get(key), told.get(key))

    def _step_over_borders(self) -> None:
        """Wait until no ack_wait and no delay ends soon."""
        border_s = BORDER_S * self._slowness
        while (deadline := self._model.next_deadline()) - border_s < (now := time.time()):
            time.sleep(max(deadline + border_s - now, border_s))
        self._border = min(deadline, now + DELAY_S * self._slowness) - border_s / 2

    def _compare(self, what: str, heard: Any, told: Any) -> None:
        if told != heard and time.time() > self._border:
            raise Undecided(what)
        assert told == heard, f"{what}\n  server {heard}\n  model  {told}\n" + "\n".join(self.log)

    def _infos(self) -> tuple[dict[str, Any], dict[str, Any]]:
        subject = f"$JS.API.CONSUMER.INFO.{self._name}.c"
        return _state(self._real.ask(subject, b"")), _state(self._model.ask(subject, b""))

    def _settle_info(self) -> None:
        """The server's consumers hear of a new message a moment after its publisher."""
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            heard, told = self._infos()
            if heard == told:
                return
            time.sleep(0.002)

    def _compare_info(self) -> None:
        """What the consumer says of itself, and what those got who have been waiting."""
        self._settle_info()
        if self._is_waiting:
            heard, told = self._real.more(), self._model.more()
            self._note(f"    then {heard}")
            # The number that is pending is left out: the server counts a new message a moment after it is stored.
            self._compare("meanwhile", [each[:5] for each in heard], [each[:5] for each in told])
            self._keep_acks(heard)
        heard_info, told_info = self._infos()
        self._is_waiting = bool(heard_info["num_waiting"])
        self._compare("info", heard_info, told_info)


def _state(info: dict[str, Any]) -> dict[str, Any]:
    state = {key: info[key] for key in _RELEVANT}
    for key in ("delivered", "ack_floor"):
        state[key] = (info[key]["consumer_seq"], info[key]["stream_seq"])
    return state


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_random_programs_say_the_same_on_both(url: str) -> None:
    def run(seed: int) -> bool:
        for attempt in range(ATTEMPTS):
            program = Program(seed, attempt, url)
            try:
                program.run(25)
                return True
            except AssertionError as error:
                error.add_note(f"{seeds.again(seed)}")
                if not program.is_timed or attempt == ATTEMPTS - 1:
                    raise
            except Undecided:
                pass
            finally:
                program.close()
        return False

    wanted = seeds.given() or [*range(PROGRAMS), *FOUND, *seeds.fresh(FRESH_PROGRAMS)]
    with ThreadPoolExecutor(16) as pool:
        is_decided = [each.result() for each in [pool.submit(run, seed) for seed in wanted]]
    assert sum(is_decided) > 0.8 * len(wanted), "the machine is too busy to compare times"
