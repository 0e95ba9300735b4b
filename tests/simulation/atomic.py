"""Atomic batches in virtual time: the operations' driver, the part of the JetStream API they ask, and their checker.

The API is that of a leader: it tells what is in the stream and when, and is silent while there is none.
"""

from __future__ import annotations

import base64
import datetime
import json
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from simulation.checkers import Violation
from simulation.world import STREAM, Burst, Run, World

from jetspark.core.headers import encode
from jetspark.core.message import CoreMessage
from jetspark.core.subjects import matches
from jetspark.errors import BatchInDoubt, BufferFull, JetSparkError, JetStreamUnavailable, NoResponders, RequestTimeout
from jetspark.jetstream import wire
from jetspark.jetstream.operations import LEADERLESS_RETRIES, LEADERLESS_WAIT_S, Api, Pause, Request
from jetspark.publish.atomic import AtomicMachine
from jetspark.testing import Delivery, StoredMessage
from jetspark.testing.network import Front, Published

_INFO, _GET = f"$JS.API.STREAM.INFO.{STREAM}", f"$JS.API.STREAM.MSG.GET.{STREAM}"


class FrontWithApi(Front):
    """Answers what is needed to find out about a batch."""

    def process(self, message: Published) -> None:
        if message.subject not in (_INFO, _GET):
            super().process(message)
            return
        stream = self.model._stream(STREAM)
        self.say(self.model.on_time(self.clock.now))
        if not stream.has_leader:
            return
        answer = self._stream_info() if message.subject == _INFO else self._get(json.loads(message.data))
        self.say([Delivery(message.reply, json.dumps(answer).encode())])

    def _stream_info(self) -> dict[str, Any]:
        stream = self.model._stream(STREAM)
        messages = self.model.messages(STREAM)
        replicas = stream.config.replicas or 1
        return {
            "config": {"name": STREAM, "subjects": stream.config.subjects, "num_replicas": replicas},
            "state": {
                "messages": len(messages),
                "first_seq": messages[0].sequence if messages else 0,
                "last_seq": self.model.last_sequence(STREAM),
            },
            "cluster": {
                "leader": "one",
                "replicas": [{"name": f"other{number}", "active": 0, "lag": 0} for number in range(1, replicas)],
            },
            "ts": _time(self.clock.now),
        }

    def _get(self, body: dict[str, Any]) -> dict[str, Any]:
        found = _find(self.model.messages(STREAM), body)
        if found is None:
            return {"error": {"code": 404, "err_code": 10037, "description": "no message found"}}
        message = {
            "subject": found.subject,
            "seq": found.sequence,
            "data": base64.b64encode(found.data).decode(),
            "time": _time(found.time),
        }
        if found.headers is not None:
            message["hdrs"] = base64.b64encode(encode(found.headers)).decode()
        return {"message": message}


def _find(messages: Any, body: dict[str, Any]) -> StoredMessage | None:
    if "last_by_subj" in body:
        messages, wanted = reversed(messages), body["last_by_subj"]
    else:
        wanted = body.get("next_by_subj", ">")
    first = body.get("seq", 0)
    since = wire.parse_time(body["start_time"]) if "start_time" in body else None
    for message in messages:
        is_late_enough = since is None or _moment(message.time) >= since
        if message.sequence >= first and is_late_enough and matches(wanted, message.subject):
            return message  # type: ignore[no-any-return]
    return None


def _moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def _time(seconds: float) -> str:
    return wire.time_text(_moment(seconds))


@dataclass(slots=True)
class Sent:
    """A batch that was tried."""

    machine: AtomicMachine
    numbers: range
    failure: Exception | None = None


class AtomicRun(Run):
    """Batch after batch; what became of those in doubt is asked until it is known, or cannot be."""

    def __init__(self, world: World, name: str, bursts: list[Burst], *, machine: type[AtomicMachine] = AtomicMachine):
        super().__init__(world, name, bursts)
        self.checkers.append(AllOrNothing())
        self.batches: list[Sent] = []
        self._class = machine
        self._script: Generator[Request | Pause, Any, None] | None = None
        self._timeout_s = 2.0
        self._is_over = False

    paced: Any = None
    settles_within_s = 600.0

    @property
    def is_over(self) -> bool:
        return self._is_over

    def start(self) -> None:
        self._script = self._live()
        self._go(lambda script: next(script))

    def _live(self) -> Generator[Request | Pause, Any, None]:
        die, number = self.world.die, 1
        while not self.link.machine.is_connected:
            yield Pause(0.05)
        for burst in self.bursts:
            yield Pause(burst.after_s)
            machine = self._class(
                self.link.machine,
                Api(),
                f"{self.name}-{number}",
                ack_first=die.random() < 0.8,
                ack_every=die.choice([None, None, 3]),
                timeout_s=self._timeout_s,
                jitter=die.random,
            )
            began = self.clock.now
            batch = Sent(machine, range(number, number + burst.messages))
            self.batches.append(batch)
            try:
                yield from self._send(machine, batch.numbers, ends_with_message=die.random() < 0.5)
            except JetSparkError as error:
                batch.failure = error
                yield from machine.leave(failed=True)
            number += burst.messages
            for _ in range(12):
                if machine.outcome != "unknown":
                    break
                yield Pause(2.0)
                try:
                    yield from machine.resolve(self.clock.now - began)
                except BatchInDoubt:
                    pass  # not now, or never: 24 seconds are longer than most outages

    def _send(
        self, machine: AtomicMachine, numbers: range, *, ends_with_message: bool
    ) -> Generator[Request | Pause, Any, None]:
        last = numbers[-1] if ends_with_message else 0
        for number in numbers:
            item = self.item(number)
            headers = item[2] if len(item) == 3 and not isinstance(item[2], bytes) else None
            if number == last:
                yield from machine.commit(item[0], item[1], headers)
            elif machine.wants_ack:
                yield from machine.ask(item[0], item[1], headers)
            else:
                while True:
                    try:
                        machine.add(item[0], item[1], headers)
                        break
                    except BufferFull:
                        yield Pause(0.05)
                self.link.schedule_flush()
                if self.world.die.random() < 0.2:
                    yield Pause(self.world.die.choice([0.0, 0.01, 1.0, 11.0]))
        if not last:
            yield from machine.commit()

    # ---- what the drivers' ``_run`` does -----------------------------------------------------------------------

    def _go(self, advance: Callable[[Generator[Request | Pause, Any, None]], Request | Pause]) -> None:
        assert self._script is not None
        try:
            step = advance(self._script)
        except StopIteration:
            self._is_over = True
            return
        if isinstance(step, Pause):
            self.clock.after(step.seconds, lambda: self._go(lambda script: script.send(None)))
        else:
            self._ask(step, LEADERLESS_RETRIES if step.may_be_leaderless else 0)
        self.link.settle()

    def _ask(self, request: Request, retries: int) -> None:
        connection = self.link.machine
        if request.is_silent:
            try:
                connection.publish(request.subject, request.data, headers=request.headers)
            except BufferFull as error:
                refused = error
                self._go(lambda script: script.throw(refused))
                return
            self.link.schedule_flush()
            self.clock.after(0.0, lambda: self._go(lambda script: script.send(None)))
            return

        def answered(message: CoreMessage | None, error: Exception | None) -> None:
            timer.cancel()
            if isinstance(error, NoResponders) and retries:
                self.clock.after(LEADERLESS_WAIT_S, lambda: self._ask(request, retries - 1))
                return
            if isinstance(error, NoResponders):
                error = JetStreamUnavailable(request.subject)
            if error is not None:
                problem = error
                self._go(lambda script: script.throw(problem))
            else:
                self._go(lambda script: script.send(message))

        def out_of_patience() -> None:
            connection.forget(token)
            self._go(lambda script: script.throw(RequestTimeout(request.subject, self._timeout_s)))

        try:
            token = connection.request(answered, request.subject, request.data, request.headers)
        except BufferFull:
            self.link.call_when_there_is_room(lambda: self._ask(request, retries))
            return
        except JetSparkError as error:
            refused_at_once = error
            self._go(lambda script: script.throw(refused_at_once))
            return
        timer = self.clock.after(self._timeout_s, out_of_patience)
        self.link.schedule_flush()

    # ---- nothing is paced --------------------------------------------------------------------------------------

    def on_event(self, event: Any) -> None:
        """Requests outlive sessions by themselves."""

    def step(self) -> None:
        """The script goes on by itself."""

    def deadline(self) -> float | None:
        return None

    def describe(self) -> str:
        return ", ".join(
            f"{batch.machine.id} {batch.numbers} {batch.machine.outcome} {batch.failure!r}" for batch in self.batches
        )


class AllOrNothing:
    """A batch is stored as a whole, in one piece and in order, or not at all; and as its outcome says, for ever."""

    def look(self, world: World, run: Run) -> None:
        """Nothing to see before the end."""

    def finish(self, world: World, run: Run) -> None:
        assert isinstance(run, AtomicRun)
        if not run.is_over:
            raise Violation(f"{run.name}: not over, long after everything was well; {run.describe()}")
        places: dict[int, list[int]] = {}
        for message in world.model.messages(STREAM):
            owner, number, _ = message.data.split(b":", 2)
            if owner.decode() == run.name:
                places.setdefault(int(number), []).append(message.sequence)
        for batch in run.batches:
            stored = [place for number in batch.numbers for place in places.get(number, ())]
            if stored and stored != list(range(stored[0], stored[0] + len(batch.numbers))):
                raise Violation(f"{run.name}: stored in part: {batch.numbers} at {stored}; {run.describe()}")
            outcome = batch.machine.outcome
            if outcome == "stored":
                ack = batch.machine.ack
                if not stored or ack is None or ack.sequence != stored[-1]:
                    raise Violation(f"{run.name}: said to be stored: {batch.numbers} {ack}; {run.describe()}")
            elif outcome == "not stored" and stored:
                raise Violation(f"{run.name}: said not to be stored: {batch.numbers} at {stored}; {run.describe()}")
            elif outcome == "open":
                raise Violation(f"{run.name}: never ended: {batch.numbers}; {run.describe()}")
