"""The part of the JetStream API that atomic batches ask, answered by a cluster whose leaders and replicas move.

``STREAM.INFO`` and ``STREAM.MSG.GET`` are the leader's: it shows what it has applied, which may be less than what it
took, and says when it last heard from each replica, with 0 for one that it never heard from since it was elected
(measured on nats-server 2.15.1). Behind a partition the old leader answers as ever, of what it had then. A direct get
is answered by any replica, however far behind. Where there is no leader nobody answers.
"""

from __future__ import annotations

import base64
import datetime
import json
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any

from simulation.world import STREAM

from jetspark.core.headers import Headers, Status, encode
from jetspark.core.subjects import matches
from jetspark.jetstream import wire
from jetspark.testing import Delivery, ModelMessage
from jetspark.testing.model.stream import ModelStream
from jetspark.testing.network import NODES, Front, Publication

_INFO, _GET = f"$JS.API.STREAM.INFO.{STREAM}", f"$JS.API.STREAM.MSG.GET.{STREAM}"
_DIRECT = f"$JS.API.DIRECT.GET.{STREAM}"

# The leader of an idle stream hears from its replicas so often (measured: 1.9 s).
HEARTBEAT_S = 1.9
# How far behind a replica may be, for as long as LAG_CHANGES_S.
LAGS_S = (0.0, 0.0, 1.0, 10.0)
LAG_CHANGES_S = 10.0


class FrontWithApi(Front):
    """Answers what is needed to find out about a batch."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seed = 0
        self._partings: list[list[float]] = []
        """Node, beginning and end of each partition."""
        self._asked = 0

    def cut_off_node(self, node: int, stream: str) -> None:
        super().cut_off_node(node, stream)
        self._partings.append([node, self.clock.now, math.inf])

    def join(self) -> None:
        super().join()
        if self._partings:
            self._partings[-1][2] = min(self._partings[-1][2], self.clock.now)

    def process(self, message: Publication) -> None:
        is_direct = message.subject == _DIRECT or message.subject.startswith(f"{_DIRECT}.")
        if not is_direct and message.subject not in (_INFO, _GET):
            super().process(message)
            return
        for watch in self.watchers:
            watch(message)
        is_parted, model = self.is_parted(message.client), self.model_of(message.client)
        stream = model.stream(STREAM)
        self.say(model.on_time(self.clock.now), by=model)
        self._asked += 1
        if is_direct:
            answer = self._get_direct(stream, message, is_parted=is_parted)
        elif not stream.has_leader:
            return
        else:
            body = (
                self._stream_info(stream, is_parted=is_parted)
                if message.subject == _INFO
                else self._get(stream, json.loads(message.data))
            )
            answer = Delivery(message.reply, json.dumps(body).encode())
        self.say([answer], by=model)

    # ---- the leader --------------------------------------------------------------------------------------------

    def _stream_info(self, stream: ModelStream, *, is_parted: bool) -> dict[str, Any]:
        messages = _applied(stream)
        replicas = stream.config.replicas or 1
        others = [node for node in range(replicas) if node != stream.leader]
        return {
            "config": {"name": STREAM, "subjects": stream.config.subjects, "num_replicas": replicas},
            "state": {
                "messages": len(messages),
                "first_seq": messages[0].sequence if messages else 0,
                "last_seq": stream.applied_sequence,
            },
            "cluster": {
                "leader": f"node{stream.leader}",
                "replicas": [
                    {"name": f"node{node}", "active": self._active_ns(stream, node, is_parted=is_parted)}
                    for node in others
                ],
            },
            "ts": _time(self.clock.now),
        }

    def _active_ns(self, stream: ModelStream, node: int, *, is_parted: bool) -> int:
        """How long ago the leader heard from a replica, 0 if it never has."""
        phase = HEARTBEAT_S * node / NODES
        now = self.clock.now
        beat = phase + HEARTBEAT_S * math.floor(((self.parted_at if is_parted else now) - phase) / HEARTBEAT_S)
        while any(each == node and begin <= beat <= end for each, begin, end in self._partings):
            beat -= HEARTBEAT_S
        return 0 if beat < stream.led_since else 1 + int((now - beat) * 1e9)

    def _get(self, stream: ModelStream, body: dict[str, Any]) -> dict[str, Any]:
        found = _find(_applied(stream), body)
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

    # ---- any replica -------------------------------------------------------------------------------------------

    def _get_direct(self, stream: ModelStream, message: Publication, *, is_parted: bool) -> Delivery:
        rng = random.Random(f"{self.seed} {self._asked}")
        nodes = [self.parted_node] if is_parted else [node for node in range(NODES) if node != self.parted_node]
        node = rng.choice(nodes)
        lag_s = random.Random(f"{self.seed} {node} {self.clock.now // LAG_CHANGES_S}").choice(LAGS_S)
        seen = [each for each in _applied(stream) if node == stream.leader or each.time + lag_s <= self.clock.now]
        of_subject = message.subject.removeprefix(_DIRECT)[1:]
        found = _find(seen, {"last_by_subj": of_subject} if of_subject else json.loads(message.data))
        if found is None:
            return Delivery(message.reply, b"", status=Status(404, "Message Not Found"))
        headers = Headers(found.headers)
        headers.add("Nats-Stream", STREAM)
        headers.add("Nats-Subject", found.subject)
        headers.add("Nats-Sequence", str(found.sequence))
        headers.add("Nats-Time-Stamp", _time(found.time))
        return Delivery(message.reply, found.data, headers)


def _applied(stream: ModelStream) -> Sequence[ModelMessage]:
    last = stream.applied_sequence
    messages = stream.store.messages()
    return messages if last == stream.store.last_sequence else [each for each in messages if each.sequence <= last]


def _find(messages: Sequence[ModelMessage], body: dict[str, Any]) -> ModelMessage | None:
    candidates: Iterable[ModelMessage] = messages
    if "last_by_subj" in body:
        candidates, wanted = reversed(messages), body["last_by_subj"]
    else:
        wanted = body.get("next_by_subj", ">")
    first = body.get("seq", 0)
    since = wire.parse_time(body["start_time"]) if "start_time" in body else None
    for message in candidates:
        is_late_enough = since is None or _moment(message.time) >= since
        if message.sequence >= first and is_late_enough and matches(wanted, message.subject):
            return message
    return None


def _moment(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC)


def _time(seconds: float) -> str:
    return wire.time_text(_moment(seconds))
