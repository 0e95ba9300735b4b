"""Records an application's effects in a run: its events and writes, their order, and its final state."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jetspark.app.application import App
from jetspark.app.causes import current_cause
from jetspark.app.stored_events import StoredEvent
from jetspark.app.testing.fault_injection import Injector
from jetspark.app.testing.steps import SeenStep, StepMoment
from jetspark.testing.model import ModelServer
from jetspark.testing.network import Publication

if TYPE_CHECKING:
    from jetspark.app.testing.failures import Scenario
    from jetspark.app.testing.kit import TestApp

__all__ = ["EVENT_ID", "ObservedRun", "RunObserver"]

EVENT_ID = "reliability-{}"
"""Ids of the published events, counted from 1."""


@dataclass(slots=True, kw_only=True)
class ObservedRun:
    """The end of a run, in forms that can be compared."""

    published: dict[str, str]
    """Events that the application published, by id."""
    written: dict[str, set[str]]
    """The contents that attempts wrote under each id, whether the write was stored or a duplicate."""
    state: dict[str, bytes]
    """The values of its buckets, by bucket and key."""
    dead_letters: list[str]
    order_problem: str | None
    starts: int
    end: str
    """Why work has not ended; empty if it has."""
    effects: list[str] | None = None
    scenario: Scenario | None = None


class RunObserver:
    """Watches a run from its beginning."""

    def __init__(self, app: App, injector: Injector) -> None:
        self._app = app
        self._written: dict[str, set[str]] = defaultdict(set)
        self._lanes: dict[tuple[str, str], list[str]] = defaultdict(list)
        """Events of each handler and key whose handler has ended well, by id."""
        self.starts = 0
        """How often handlers were started."""
        injector.observers.append(self._on_step)

    def _on_step(self, when: StepMoment, step: SeenStep, what: object) -> None:
        if step.name == "RunHandler":
            self._on_run(when, step.handler or "", what)
        elif step.name == "Publish" and when == "before" and isinstance(what, Publication):
            id = what.headers.get("Nats-Msg-Id") if what.headers is not None else None
            if id is not None:
                self._written[id].add(_text(what.data))

    def _on_run(self, when: StepMoment, handler: str, event: object) -> None:
        if when == "before":
            self.starts += 1
        cause, spec = current_cause.get(), self._app.handlers[handler]
        if cause is None or not spec.in_order or spec.batch is not None:
            return
        ended = self._lanes[handler, _key_of(cause, spec.key)]
        if when == "after":
            ended.append(cause.id)

    def conclude(self, test: TestApp, end: str) -> ObservedRun:
        """Look at what there is in the end."""
        model = test.network.front.model
        published: dict[str, str] = {}
        sequences: dict[str, int] = {}
        for stream in model.streams():
            for message in model.messages(stream.config.name):
                id = message.headers.get("Nats-Msg-Id") if message.headers is not None else None
                if id is not None and id in self._written:
                    published.setdefault(id, _text(message.data))
                if id is not None and stream.config.name == self._app.stream:
                    sequences.setdefault(id, message.sequence)
        return ObservedRun(
            published=published,
            written=self._written,
            state=self._state(model),
            dead_letters=[_dead_letter_text(each) for each in test.dead_letters],
            order_problem=self.order_problem(sequences),
            starts=self.starts,
            end=end,
        )

    def _state(self, model: ModelServer) -> dict[str, bytes]:
        state: dict[str, bytes] = {}
        of_handlers = {spec.bucket for spec in self._app.handlers.values() if spec.bucket}
        for bucket in sorted(of_handlers | {each.bucket for each in self._app.spec.buckets}):
            for message in model.messages(f"KV_{bucket}"):
                key = message.subject.removeprefix(f"$KV.{bucket}.")
                if key.startswith("_done."):
                    continue  # the mark of a transaction, under the id of its event
                if message.headers is not None and "KV-Operation" in message.headers:
                    state.pop(f"{bucket}: {key}", None)
                else:
                    state[f"{bucket}: {key}"] = message.data
        return state

    def order_problem(self, sequences: dict[str, int]) -> str | None:
        """Events of a key have ended well, each for the first time, in the order in which they were stored."""
        if not self._lanes:
            return None
        problems = []
        for (handler, key), ended in self._lanes.items():
            first = [id for id in dict.fromkeys(ended) if id in sequences]
            if first != sorted(first, key=sequences.__getitem__):
                problems.append(f"handler {handler!r}, key {key!r}: {', '.join(first)}")
        return "; ".join(problems)


def _key_of(cause: Any, key: Any) -> str:
    if key is None:
        return str(cause.key)
    return str(getattr(cause.event, key) if isinstance(key, str) else key(cause.event))


def _text(body: bytes) -> str:
    """The data of an event, which is what its application decides about."""
    try:
        fields = json.loads(body)
        return f"{fields['type']} {json.dumps(fields['data'], sort_keys=True)}"
    except (ValueError, KeyError, TypeError):
        return repr(body)


def _dead_letter_text(dead_letter: StoredEvent) -> str:
    cause = (
        f"{dead_letter.cause.error}: {dead_letter.cause.message}" if dead_letter.cause is not None else "behind another"
    )
    return f"{dead_letter.handler} of {dead_letter.subject} ({cause})"
