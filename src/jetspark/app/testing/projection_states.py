"""A test's view of projections: their states, and whether they have folded all events."""

from __future__ import annotations

import json

from jetspark.aio.jetstream import JetStream
from jetspark.app.application import App
from jetspark.app.contracts.catalogue import contract_of
from jetspark.app.projections.bucket_refs import find_bucket, open_records
from jetspark.app.projections.live_options import LiveOptions
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.projections.state_header import is_reserved, position_key
from jetspark.app.testing.stages import Stage, VirtualStage
from jetspark.core.headers import Headers
from jetspark.errors import KeyNotFound, MessageNotFound
from jetspark.jetstream.kv import operation_of

__all__ = ["VIRTUAL_LIVE", "VirtualReaders", "is_behind", "read_states"]

# In virtual time the position is not needed, and renewing a lease costs more than waiting for it after a crash.
VIRTUAL_LIVE = LiveOptions(position_every_s=3600.0, lease_s=600.0)


async def read_states(stage: Stage, js: JetStream, app: App, spec: ProjectionSpec) -> dict[str, object]:
    """The states of a projection, by key; with windows by ``"<key>.<window>"``."""
    place = (await find_bucket(await open_records(js, app.name), spec)).ref
    states: dict[str, object] = {}
    for message in await stage.messages(js, f"KV_{place.bucket}"):
        key = message.subject.removeprefix(f"$KV.{place.bucket}.")
        if is_reserved(key):
            continue
        if operation_of(message.headers or Headers()) == "put":
            states[spec.key_text(key)] = spec.decode_state(message.data)
        else:
            states.pop(spec.key_text(key), None)
    return {key: state for key, state in states.items() if state is not None}


async def is_behind(js: JetStream, app: App) -> bool:
    """True if a projection on a real server has not stored everything; positions are written every second."""
    stream = await js.stream(app.stream)
    records = await open_records(js, app.name)
    for spec in app.projections.values():
        last = 0
        for kind in spec.events:
            try:
                message = await stream.get_message(last_for=contract_of(kind).subject.filter, direct=False)
            except MessageNotFound:
                continue
            last = max(last, message.sequence)
        bucket = await js.kv((await find_bucket(records, spec)).ref.bucket)
        try:
            position = json.loads((await bucket.get(position_key())).value)["sequence"]
        except KeyNotFound:
            position = 0
        if position < last:
            return True
    return False


class VirtualReaders:
    """Tells whether projections on the model have work: an event to read, or a batch that was just stored."""

    def __init__(self, stage: VirtualStage, app: App) -> None:
        self._model, self._app = stage.network.front.model, app
        self._stored: dict[str, int] = {}

    def are_busy(self) -> bool:
        stream = self._model.stream(self._app.stream)
        readers = [each for each in stream.consumers.values() if each.config.durable_name is None]
        stored = {
            each.config.name: each.store.last_sequence
            for each in self._model.streams()
            if each.config.name.startswith("KV_") and each.config.allow_batched
        }
        has_news, self._stored = stored != self._stored, stored
        return has_news or not readers or any(each.num_pending for each in readers)
