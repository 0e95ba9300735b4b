"""Buckets, asked of both: the model in ``jetspark.testing`` and a real nats-server, which must agree.

A course is a program made from a seed: it writes, deletes, purges and reads the keys of a bucket, watches them, and
waits until some have gone. It runs with the real client twice, on the server and on the model in virtual time, and must
see the same both times: values, revisions, errors in words. Nothing here knows what is right: the server does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support import seeds

import jetspark
from jetspark import KVConfig, KVEntry
from jetspark.aio.kv import KeyValue
from jetspark.errors import JetSparkError
from jetspark.testing import run_in_virtual_time

STEPS = 40
COURSES, FRESH_COURSES = 8, 3
KEYS = ("a", "b.c", "b.d")
FILTERS: tuple[tuple[str, ...], ...] = ((), ("a",), ("b.*",), ("a", "b.d"), (">",), ("none",))
TTL_S = 1
# A course in which keys go away by themselves is run again when it differs, with longer times: on a busy machine the
# time may have come in the middle of a step. A difference that is real stays.
ATTEMPTS = 3
AT_ONCE = 16


class Watcher:
    """What a watch shows: up to its beginning, and then to the end of the course."""

    def __init__(self, entries: Any) -> None:
        self.beginning: list[str] = []
        self.changes: dict[int, KVEntry] = {}
        self._entries = entries
        self._has_begun = asyncio.Event()
        self._task = asyncio.create_task(self._collect())

    async def begun(self) -> None:
        begun = asyncio.create_task(self._has_begun.wait())
        await asyncio.wait([begun, self._task], return_when=asyncio.FIRST_COMPLETED)
        if not begun.done():
            begun.cancel()
            self._task.result()

    async def _collect(self) -> None:
        async for entry in self._entries:
            if entry is None:
                self._has_begun.set()
            elif self._has_begun.is_set():
                self.changes[entry.revision] = entry
            else:
                self.beginning.append(_shown(entry))

    async def end(self, revision: int) -> None:
        for _ in range(1000):
            if revision in self.changes or not revision:
                break
            await asyncio.sleep(0.01)
        self._task.cancel()
        await asyncio.wait([self._task])

    def explained(self, other: Watcher) -> list[str]:
        """What this one has seen, as far as the other must have seen the same.

        A revision may be gone before it is shown, which is a matter of milliseconds. So of the changes those count that
        both have seen, and the last one of each key.
        """
        last = {entry.key: revision for revision, entry in sorted(self.changes.items())}
        wanted = {*last.values(), *(self.changes.keys() & other.changes.keys())}
        # How many more there are is a matter of milliseconds, too.
        changes = [dataclasses.replace(self.changes[each], pending=0) for each in sorted(wanted)]
        return [*self.beginning, "begun", *map(_shown, changes)]


def _shown(found: Any) -> str:
    """Without what nobody can know before: times."""
    if isinstance(found, KVEntry):
        return f"{found.key} {found.value!r} {found.revision} {found.operation} {found.pending}"
    if isinstance(found, dict):
        return str({key: _shown(found[key]) for key in sorted(found)})
    return str([_shown(each) for each in found]) if isinstance(found, list) else repr(found)


class Course:
    def __init__(self, seed: int, attempt: int) -> None:
        self._rng = random.Random(f"buckets {seed}")
        self._bucket, self._slowness = f"bucket{seed}_{attempt}", 2**attempt
        self.is_timed = self._rng.random() < 0.3
        self._revisions = [1]
        self._has_ttl = False
        self.seen: list[str] = []
        self.watchers: list[tuple[tuple[str, ...], Watcher]] = []

    async def run(self, url: str) -> None:
        async with jetspark.connect(url) as nc:
            js = nc.jetstream()
            kv = await js.create_kv(self._config())
            for _ in range(STEPS):
                await self._step(kv)
            await self._end(kv)

    def _config(self) -> KVConfig:
        rng = self._rng
        return KVConfig(
            bucket=self._bucket,
            history=rng.choice([1, 1, 2, 5]),
            limit_marker_ttl_s=TTL_S * self._slowness if self.is_timed else rng.choice([None, 3600.0]),
            max_value_bytes=rng.choice([None, None, 130]),  # of headers, too
            storage="memory",
        )

    async def _step(self, kv: KeyValue) -> None:
        rng, key = self._rng, self._rng.choice(KEYS)
        value = b"%d" % rng.randrange(100) * rng.choice([0, 1, 1, 1, 60])
        revision = rng.choice([*self._revisions[-3:], rng.randrange(40)])
        is_guarded = rng.choice([None, None, revision])
        filters = rng.choice(FILTERS)
        steps: list[tuple[int, str, Callable[[], Awaitable[Any]]]] = [
            (6, f"put {key} {value!r}", lambda: kv.put(key, value)),
            (4, f"create {key} {value!r}", lambda: kv.create(key, value)),
            (6, f"update {key} {value!r} {revision}", lambda: kv.update(key, value, revision=revision)),
            (3, f"delete {key} {is_guarded}", lambda: kv.delete(key, revision=is_guarded)),
            (2, f"purge {key} {is_guarded}", lambda: kv.purge(key, revision=is_guarded)),
            (3, f"get {key}", lambda: kv.get(key)),
            (2, f"get {key} of the leader", lambda: kv.get(key, direct=False)),
            (3, f"get {key} {revision}", lambda: kv.get(key, revision=revision)),
            (2, f"get {key} at {revision}", lambda: kv.get_at(key, revision)),
            (3, f"history {key}", lambda: kv.history(key)),
            (2, f"keys {filters}", lambda: _sorted_keys(kv, filters)),
            (2, f"snapshot {filters}", lambda: kv.snapshot(filters or (">",))),
            (2, f"snapshot {filters} {revision}", lambda: kv.snapshot(filters or (">",), at=revision)),
            (1, "size", lambda: _size(kv)),
            (1, "purge the deleted", lambda: kv.purge_deletes(0.0)),
            (2, f"transaction {key} {revision}", lambda: self._transaction(kv, key, value, revision)),
            (2 if len(self.watchers) < 3 else 0, f"watch {filters}", lambda: self._watch(kv, filters, revision)),
            # One at a time: which of two goes first is a matter of milliseconds.
            (3 if self._may_expire() else 0, f"create {key} for a while", lambda: self._expiring(kv, key, value)),
            (2 if self._has_ttl else 0, "wait", self._wait),
        ]
        [(_, name, do)] = rng.choices(steps, [weight for weight, _, _ in steps])
        try:
            found = await do()
            if isinstance(found, int):
                self._revisions.append(found)
            self.seen.append(f"{name}: {_shown(found)}")
        except JetSparkError as error:
            self.seen.append(f"{name}: {type(error).__name__} {error}")

    async def _transaction(self, kv: KeyValue, key: str, value: bytes, revision: int) -> dict[str, int]:
        other = self._rng.choice([each for each in KEYS if each != key])
        kind = self._rng.randrange(4)
        async with kv.transaction() as tx:
            await tx.put(key, value)
            if kind == 0:
                await tx.create(other, value)
            elif kind == 1:
                await tx.update(other, value, revision=revision)
            elif kind == 2:
                await tx.delete(other)
            else:
                await tx.purge(other)
        return dict(tx.revisions)

    async def _watch(self, kv: KeyValue, filters: tuple[str, ...], revision: int) -> None:
        options: dict[str, Any] = self._rng.choice(
            [
                {},
                {"include_history": True},
                {"updates_only": True},
                {"meta_only": True},
                {"ignore_deletes": True},
                {"from_revision": max(revision, 1)},
            ]
        )
        self.seen.append(f"  {options}")
        watcher = Watcher(kv.watch(*filters, initial_marker=True, **options))
        self.watchers.append((filters, watcher))
        await watcher.begun()

    def _may_expire(self) -> bool:
        return self.is_timed and not self._has_ttl

    async def _expiring(self, kv: KeyValue, key: str, value: bytes) -> int:
        self._has_ttl = True
        ttl = TTL_S * self._slowness
        try:
            return await kv.create(key, value, ttl=ttl)
        except JetSparkError:
            return await kv.update(key, value, revision=(await kv.get(key)).revision, ttl=ttl)

    async def _wait(self) -> None:
        """Until what had a TTL has gone, and its marker too."""
        self._has_ttl = False
        await asyncio.sleep(2.6 * TTL_S * self._slowness)

    async def _end(self, kv: KeyValue) -> None:
        """Every key is written once more, so that every watch has something to end with."""
        if self._has_ttl:
            await self._wait()
        last = {key: await kv.put(key, b"end") for key in KEYS}
        for filters, watcher in self.watchers:
            wanted = [last[key] for key in KEYS if not filters or any(_matches(each, key) for each in filters)]
            await watcher.end(max(wanted, default=0))


def _matches(pattern: str, key: str) -> bool:
    return pattern in (">", key) or (pattern == "b.*" and key.startswith("b."))


async def _sorted_keys(kv: KeyValue, filters: tuple[str, ...]) -> list[str]:
    return sorted([key async for key in kv.keys(*filters)])


async def _size(kv: KeyValue) -> str:
    state = (await kv.status()).stream.state
    return f"{state.messages} of {state.first_sequence} to {state.last_sequence}, {state.bytes} bytes"


def _on_model(seed: int, attempt: int) -> Course:
    course = Course(seed, attempt)
    run_in_virtual_time(course.run("nats://model"))
    return course


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_random_courses_of_buckets_see_the_same_on_both(url: str) -> None:
    turns = asyncio.Semaphore(AT_ONCE)

    async def run(seed: int) -> None:
        for attempt in range(ATTEMPTS):
            course = Course(seed, attempt)
            async with turns:
                await course.run(url)
            difference = _difference(course, await asyncio.to_thread(_on_model, seed, attempt))
            if difference is None:
                return
            if not course.is_timed or attempt == ATTEMPTS - 1:
                pytest.fail(f"{seeds.again(seed)}\n{difference}")

    await asyncio.gather(*map(run, seeds.tried(range(COURSES), FRESH_COURSES)))


def _difference(heard: Course, told: Course) -> str | None:
    """The first step in which the two differ, and what was before."""
    both = list(zip(heard.seen, told.seen, strict=True))
    for (filters, one), (_, other) in zip(heard.watchers, told.watchers, strict=True):
        both.append((f"watched {filters}: {one.explained(other)}", f"watched {filters}: {other.explained(one)}"))
    for number, (server, model) in enumerate(both):
        if server != model:
            return "\n".join([*(each for each, _ in both[:number]), f"  server {server}", f"  model  {model}"])
    return None
