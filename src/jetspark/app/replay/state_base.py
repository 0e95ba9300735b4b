"""States to begin a rebuild with, for streams that no longer have their first events: the states of a bucket.

A bucket of a projection has a position: all events up to that sequence are in its states. A copy of the states, with
the later events folded onto them, equals a fold of the whole history, and needs no earlier event. So a rebuild may
start from it if the bucket was folded by the same version, from the same stream, and without a gap, and if the stream
still has all later events. Any other bucket is refused, since its states could be wrong.

The bucket may be the one in use, and its workers may run: a state that is copied later has a later sequence. A key that
is written during a read of the bucket may be missing in it, but is in the next read, which begins at the revision where
the last one ended. The copy is complete when a read finds no write. If writes do not stop, the workers are paused for
the last read.

A parked key is copied with its state before the event it is parked at, and folded again from that event, if the stream
still has it. Otherwise the key stays parked.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from jetspark.aio.steps import ProcedureRunner
from jetspark.app.projections.positions import FoldPosition
from jetspark.app.projections.state_header import Mark, mark_of, parked_of
from jetspark.app.replay.live_bucket import paused_engines, stored_position
from jetspark.app.replay.verification import check_is_complete, contents_of
from jetspark.errors import ConfigError, StreamNotFound, StreamRecreated, UsageError
from jetspark.state.changes import Change, Current, newer, some_keys
from jetspark.state.tables import open_bucket

if TYPE_CHECKING:
    from jetspark.aio.kv import KeyValue
    from jetspark.app.projections.projection_spec import ProjectionSpec
    from jetspark.app.replay.history import History
    from jetspark.state.store import StateBucket

__all__ = ["Copied", "StateBase"]

# After this many reads of a bucket that is being written, its live engines are paused.
ROUNDS_BESIDE = 3
MAX_ROUNDS = 20


@dataclass(slots=True)
class Copied:
    """Counts of a copy."""

    written: int = 0
    parked: int = 0
    """Keys that stay parked."""


class StateBase:
    """A bucket whose states a rebuild copies; made by :meth:`find`."""

    def __init__(self, history: History, bucket: str, position: FoldPosition, created: str) -> None:
        self._js, self._spec, self.bucket, self.position = history.js, history.spec, bucket, position
        self._created = created
        self._runner = ProcedureRunner(history.js)
        self.begin = position.sequence + 1
        """The first sequence that has to be folded onto the states."""

    @classmethod
    async def find(cls, history: History, bucket: str) -> StateBase:
        """Check a bucket, and find the first event that has to be folded onto its states.

        Raises:
            ConfigError: The bucket does not exist.
            UsageError: The bucket is not of a projection, or of another version or stream; or another program has
                written some of its keys.
            DataLoss: The bucket was folded without events that the stream had dropped.
        """
        js, spec, runner = history.js, history.spec, ProcedureRunner(history.js)
        try:
            created = (await runner.run(open_bucket(bucket))).created
            position = (await stored_position(js, bucket)).position
        except StreamNotFound as error:
            raise ConfigError(f"from_bucket={bucket!r}: there is no such bucket") from error
        beginning = FoldPosition.beginning(history.name, (await history.facts()).created)
        found = cls(history, bucket, _checked(position, beginning, spec, bucket), created)
        first = (await history.head(found.position.last_event)).whole_from
        # A parked key is folded from the event it is parked at, if the stream has that event and all later ones.
        found.begin = min([found.begin, *(each for each in await found._parked() if each >= first)])
        return found

    async def _parked(self) -> list[int]:
        """The events at which keys are parked; only headers are read."""
        parked: dict[str, int] = {}
        async with aclosing(self._pieces(0, wants_data=False)) as pieces:
            async for _, piece in pieces:
                for key, current in self._own(piece).items():
                    why = parked_of(current)
                    if why is not None and why.sequence:
                        parked[key] = why.sequence
                    else:
                        parked.pop(key, None)
        return list(parked.values())

    def _own(self, piece: Mapping[str, Current]) -> Mapping[str, Current]:
        """The same keys, after a check that this version of the projection has written them.

        Raises:
            UsageError: Another version, or another program, has written some of them.
        """
        spec, others = self._spec, list[str]()
        for key, current in piece.items():
            mark = mark_of(current)
            if mark is None or (mark.version, mark.unique_ids) != (spec.version, spec.unique_ids):
                others.append(spec.key_text(key))
        if others:
            raise UsageError(
                f"from_bucket={self.bucket!r}: {some_keys(sorted(others))}: not made by version {spec.version} of "
                f"projection {spec.name!r}, so it is unknown which events are in them: take another bucket, or remove "
                "the keys that another program has written there"
            )
        return piece

    async def _pieces(self, after: int, *, wants_data: bool) -> AsyncGenerator[tuple[int, dict[str, Current]], None]:
        """The keys that were written after a revision, each portion with the last revision of the bucket.

        Raises:
            StreamRecreated: The bucket was deleted, and created again.
        """
        view = await self._runner.run(open_bucket(self.bucket))
        if view.created != self._created:
            raise StreamRecreated(view.stream, self._created, view.created)
        first, last = max(after + 1, view.info.state.first_sequence), view.info.state.last_sequence
        if first <= last:
            scan = view.scan(first, last, wants_data=wants_data)
            async with aclosing(self._runner.pieces(scan)) as pieces:
                async for piece in pieces:
                    yield last, dict(contents_of(view, piece))
        yield last, {}

    async def copy(self, target: StateBucket, begin: int, records: KeyValue) -> Copied:
        """Store the states in another bucket, unless that has the same or later states.

        Args:
            begin: The first sequence that is folded onto the states.

        Raises:
            UsageError: A key cannot be copied; or keys are written faster than they are copied.
        """
        done, storing, through = Copied(), ProcedureRunner(self._js), 0
        async with AsyncExitStack() as stack:
            for number in range(MAX_ROUNDS):
                if number == ROUNDS_BESIDE:
                    owner = f"copy-{secrets.token_hex(4)}"
                    await stack.enter_async_context(paused_engines(records, self._spec.name, owner))
                last = through
                async with aclosing(self._pieces(through, wants_data=True)) as pieces:
                    async for last, piece in pieces:  # noqa: B007
                        states = self._own(piece).items()
                        changes = [change for each in states if (change := self._change(*each, begin)) is not None]
                        known = await storing.run(target.load_all([each.key for each in changes]))
                        written = newer(changes, known)
                        done.written += (await storing.run(target.store_all(written))).written
                        done.parked += sum(_is_parked(each) for each in written)
                if last == through:
                    return done
                through = last
        raise UsageError(
            f"from_bucket={self.bucket!r}: it is written faster than it is copied, although the workers are paused: "
            "stop other writers, such as a Spark stream, until the rebuild is done"
        )

    def _change(self, key: str, current: Current, begin: int) -> Change | None:
        """The write of a state to the copy; None for a key without a state."""
        mark = mark_of(current)
        assert mark is not None
        parked = mark.parked
        if parked is not None and parked.sequence >= begin:
            parked = None  # the key is folded again from there
        if current.value is None and not current.sequence and parked is None:
            return None
        if current.value is not None:
            try:
                self._spec.decode_state(current.value)
            except msgspec.MsgspecError as error:
                raise UsageError(
                    f"from_bucket={self.bucket!r}: the state of key {self._spec.key_text(key)!r} is not one of "
                    f"projection {self._spec.name!r}: {error}; take the bucket of this projection"
                ) from error
        mark_text = self._spec.mark(parked, mark.ids)
        if current.value is None:
            return Change(key, b"", "delete", current.sequence, mark=mark_text)
        return Change(key, current.value, "put", current.sequence, mark=mark_text)


def _is_parked(change: Change) -> bool:
    mark = Mark.read(change.mark)
    return mark is not None and mark.parked is not None


def _checked(position: FoldPosition | None, beginning: FoldPosition, spec: ProjectionSpec, bucket: str) -> FoldPosition:
    own = f"from_bucket={bucket!r}: "
    if position is None:
        raise UsageError(
            f"{own}it has no position, so it is unknown which events are in it: expected the bucket of a projection, "
            "or one that a rebuild has created"
        )
    if (position.stream, position.created) != (beginning.stream, beginning.created):
        raise UsageError(
            f"{own}it was made of stream {position.stream!r} as it was created at {position.created}, and stream "
            f"{beginning.stream!r} was created at {beginning.created}: its events have other sequences"
        )
    if position.version != spec.version:
        raise UsageError(
            f"{own}it was made by version {position.version} of the fold, and this code is version {spec.version}: "
            "another fold needs the whole history, from the stream or a backup of it"
        )
    check_is_complete(position, spec.name, beginning.stream, bucket)
    return position
