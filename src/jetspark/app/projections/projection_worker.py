"""Runs the projections of an application: the process with the lease runs the engines, other processes stand by.

A pass over the stream (:class:`LivePass`) has one engine, or two if some projections are far behind. An engine reads
from the lowest position of its projections, so a projection that starts at the first event would delay all others. Such
projections get an engine of their own. It requests the same subjects as the other engine and skips events it does not
need, so both engines count the same sequences. When the second engine has nearly caught up, both store their states,
and the pass restarts with one engine.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from jetspark.aio.context import context_of
from jetspark.aio.jetstream import JetStream
from jetspark.aio.kv import KeyValue
from jetspark.app.contracts.catalogue import Catalogue
from jetspark.app.patience import UNLIMITED_S, patiently
from jetspark.app.projections.bucket_refs import BucketRef, check_version, find_bucket, open_records, watch_bucket
from jetspark.app.projections.fold_crashes import FoldCrashes
from jetspark.app.projections.leases import Lease, LeaseLost, PartitionShares
from jetspark.app.projections.live_engine import PAUSE, LiveEngine, LiveSetup, end_tasks, open_projections
from jetspark.app.projections.live_options import LiveCounts, LiveOptions, RestartPass
from jetspark.app.projections.live_projection import LiveProjection
from jetspark.app.projections.positions import FoldPosition
from jetspark.app.projections.projection_spec import ProjectionSpec
from jetspark.app.topology.names import escape_token
from jetspark.errors import JetSparkError, UsageError

if TYPE_CHECKING:
    from jetspark.app.spec import AppSpec

__all__ = ["LivePass", "ProjectionWorker", "far_behind"]

_logger = logging.getLogger("jetspark.app")
T = TypeVar("T")

# If an orderly end takes longer than this, the worker checks whether the server still answers.
SILENCE_S = 5.0


class _OtherSpecs(Exception):
    """The set of projections that are at the version of this code has changed."""


class ProjectionWorker:
    """Folds the projections of an application while this process has their lease.

    If a projection is swapped to another version of its fold, this worker releases it to workers with that code and
    continues with the rest. The name of the lease has the projections, so the two kinds of workers do not compete.

    Args:
        specs: The projections to run.
        owner: A name that no other process has.
    """

    def __init__(
        self,
        app: AppSpec,
        specs: Sequence[ProjectionSpec],
        js: JetStream,
        *,
        catalogue: Catalogue,
        options: LiveOptions | None = None,
        owner: str | None = None,
    ) -> None:
        self.app, self._js, self._catalogue = app, js, catalogue
        self._declared = self._specs = tuple(specs)
        """The given projections, and those of them that are at the version of this code."""
        self._options = options or LiveOptions()
        self._owner = owner or secrets.token_hex(8)
        self.counts = LiveCounts()
        self._pass: LivePass | None = None
        self._is_stopping = False
        self.is_active = False
        """True while this process has the lease."""

    @property
    def name(self) -> str:
        return "+".join(sorted(spec.name for spec in self._specs))

    async def run(self) -> None:
        """Work until :meth:`stop` is called or the task is cancelled.

        Raises:
            UsageError: A projection is at another version at the start, or its bucket is of another stream.
            StreamRecreated, StreamWentBack, StreamNotFound: The stream was re-created, restored or deleted.
            JetSparkError: The server refuses a request permanently.
        """
        records = await self._trying(lambda: open_records(self._js, self.app.name))
        for spec, ref in (await self._trying(lambda: self._find_buckets(records))).items():
            check_version(spec, ref)
        while not self._is_stopping:
            try:
                await self._run_specs(records)
            except _OtherSpecs:
                await self._choose(records)

    async def _run_specs(self, records: KeyValue) -> None:
        """
        Raises:
            _OtherSpecs: A projection was swapped to another version, or back.
        """
        if not self._specs:
            await self._until_swapped(records)
        if self._options.partitions > 1:
            await self._run_partitions(records)
            return
        key = f"lease.{escape_token(self.name)}"
        lease = Lease(records, key, self._owner, lease_s=self._options.lease_s)
        while not self._is_stopping:
            await lease.acquire()
            self.is_active = True
            crashes = FoldCrashes(records, self.name)
            try:
                await self._trying(crashes.begin)
                await self._work(lease, records, crashes=crashes)
            except LeaseLost as error:
                _logger.warning("app %s: projections: %s; this process stands by", self.app.name, error)
                await lease.leave(error.owner)
            finally:
                self.is_active = False
                await asyncio.gather(crashes.end(), lease.release())

    async def _run_partitions(self, records: KeyValue) -> None:
        options = self._options
        shares = PartitionShares(
            records, self.name, self._owner, partitions=options.partitions, lease_s=options.lease_s
        )
        balancing = asyncio.create_task(shares.run())
        try:
            while not self._is_stopping:
                await shares.release_unwanted()
                if shares.wanted:
                    self.is_active = True
                    await self._work_on(shares, shares.wanted, records, balancing)
                    self.is_active = False
                else:
                    await self._until_changed(shares, balancing)
        finally:
            self.is_active = False
            await end_tasks(balancing)
        if not balancing.cancelled():
            balancing.result()

    async def _until_changed(self, shares: PartitionShares, balancing: asyncio.Task[None]) -> None:
        changed = asyncio.create_task(shares.changed.wait())
        try:
            await asyncio.wait([changed, balancing], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end_tasks(changed)
        if balancing.done():
            balancing.result()

    async def _work_on(
        self, shares: PartitionShares, held: frozenset[int], records: KeyValue, balancing: asyncio.Task[None]
    ) -> None:
        """Fold some partitions until the set of partitions changes."""
        work = asyncio.create_task(self._work(None, records, held))
        changed = asyncio.create_task(self._until_others(shares, held, balancing))
        try:
            await asyncio.wait([work, changed], return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not shares.lost and self._pass is not None:
                self._pass.end()  # store the events that were read, for the next owner
                await asyncio.wait([work], timeout=self._options.lease_s / 2)
        finally:
            await end_tasks(work, changed)
        for task in (work, changed):
            if not task.cancelled():
                task.result()

    async def _until_others(self, shares: PartitionShares, held: frozenset[int], balancing: asyncio.Task[None]) -> None:
        while shares.wanted == held:
            shares.changed.clear()
            await self._until_changed(shares, balancing)

    async def _trying(self, work: Callable[[], Awaitable[T]]) -> T:
        """Retry without limit what the server does not answer."""
        return await patiently(work, patience_s=UNLIMITED_S, pause=PAUSE, on_wait=self._log_failure)

    def _log_failure(self, error: JetSparkError) -> None:
        _logger.warning("app %s: projections: %s; trying again", self.app.name, error)

    async def _find_buckets(self, records: KeyValue) -> dict[ProjectionSpec, BucketRef]:
        return {spec: (await find_bucket(records, spec)).ref for spec in self._declared}

    async def _choose(self, records: KeyValue) -> None:
        """Choose the projections whose buckets are at the version of this code."""
        refs = await self._trying(lambda: self._find_buckets(records))
        self._specs = tuple(spec for spec, ref in refs.items() if ref.version == spec.version)
        others = {spec: ref for spec, ref in refs.items() if spec not in self._specs}
        for spec, ref in others.items():
            try:
                check_version(spec, ref)
            except UsageError as error:
                _logger.error("app %s: %s. This worker leaves it to workers with that code", self.app.name, error)
        self.counts.other_versions = {spec.name: ref.version for spec, ref in others.items()}

    async def _until_swapped(self, records: KeyValue) -> None:
        """
        Raises:
            _OtherSpecs: A projection was swapped.
        """
        while True:
            found = await self._trying(lambda: self._find_buckets(records))
            if any(ref.version == spec.version for spec, ref in found.items()):
                raise _OtherSpecs
            try:
                async with _beside([self._follow(records, spec, ref) for spec, ref in found.items()]) as watching:
                    await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
                    for task in watching:
                        if task.done():
                            task.result()
            except RestartPass:
                pass
            except JetSparkError as error:
                if not error.may_pass:
                    raise
                await asyncio.sleep(PAUSE.wait_s(1))

    async def stop(self, runners: asyncio.Task[None], timeout: float) -> None:
        """Stop reading and store the events that were read, within ``timeout`` seconds.

        Args:
            runners: The task of :meth:`run`.
        """
        self._is_stopping = True
        if self._pass is None:
            runners.cancel()
        else:
            self._pass.end()
        first_s = min(timeout, SILENCE_S)
        done, _ = await asyncio.wait([runners], timeout=first_s)
        if not done and await self._can_store():
            done, _ = await asyncio.wait([runners], timeout=timeout - first_s)
        if not done:
            runners.cancel()
            await asyncio.wait([runners])

    async def _can_store(self) -> bool:
        """True if the server answers; without it, the next worker reads the unstored events again."""
        try:
            await context_of(self._js).client.flush(SILENCE_S / 5)
        except JetSparkError:
            return False
        return True

    async def _work(
        self,
        lease: Lease | None,
        records: KeyValue,
        held: frozenset[int] | None = None,
        crashes: FoldCrashes | None = None,
    ) -> None:
        failures = 0
        while not self._is_stopping:
            before = self.counts.position
            try:
                await self._run_once(lease, records, held, crashes)
                return
            except RestartPass as reason:
                _logger.warning("app %s: %s", self.app.name, reason)
            except JetSparkError as error:
                if not error.may_pass:
                    raise
                self._log_failure(error)
            self.counts.restarts += 1
            failures = 0 if self.counts.position > before else failures + 1
            if failures:
                await asyncio.sleep(PAUSE.wait_s(failures))

    async def _run_once(
        self, lease: Lease | None, records: KeyValue, held: frozenset[int] | None, crashes: FoldCrashes | None
    ) -> None:
        found = await self._find_buckets(records)
        if self._specs != tuple(spec for spec, ref in found.items() if ref.version == spec.version):
            raise _OtherSpecs
        live = [LiveProjection(spec, found[spec], self._js, self._options, held) for spec in self._specs]
        setup = LiveSetup(self.app, self._js, self._catalogue, self._options, self.counts, crashes)
        self._pass = LivePass(setup, live)
        watching = [self._follow(records, spec, ref) for spec, ref in found.items()]
        try:
            keeping = [] if lease is None else [lease.keep()]
            async with _beside([*keeping, *watching]) as others:
                main = asyncio.create_task(self._pass.run())
                try:
                    await asyncio.wait([main, *others], return_when=asyncio.FIRST_COMPLETED)
                    for task in (main, *others):
                        if task.done():
                            task.result()
                finally:
                    await end_tasks(main)
        finally:
            self._pass = None

    async def _follow(self, records: KeyValue, spec: ProjectionSpec, ref: BucketRef) -> None:
        """Raise when a projection is swapped to another bucket."""
        async for alias in watch_bucket(records, spec):
            if alias.ref != ref:
                raise RestartPass(f"projection {spec.name!r} was swapped to bucket {alias.ref.bucket}")
        await asyncio.Event().wait()  # the connection is closed: the engine raises the error


@asynccontextmanager
async def _beside(work: Sequence[Coroutine[object, None, None]]) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Run coroutines as tasks that are cancelled at the end of the block."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        yield tasks
    finally:
        await end_tasks(*tasks)


# Two engines are merged once the gap is below `apart_after / NEAR`; the faster one waits while that gap is read.
NEAR = 10


def far_behind(starts: Sequence[int], apart_after: int) -> list[bool]:
    """For each position: True if it lags the furthest one by more than ``apart_after``."""
    return [max(starts) - start > apart_after for start in starts]


class LivePass:
    """Runs the engines from the stored positions until a change of a bucket, a merge, or :meth:`end`."""

    def __init__(self, setup: LiveSetup, projections: Sequence[LiveProjection]) -> None:
        self._setup, self._projections = setup, list(projections)
        self._options, self._counts = setup.options, setup.counts
        self._engines: list[LiveEngine] = []
        self._is_ending = False

    def end(self) -> None:
        """Stop reading, and store the events that were read."""
        self._is_ending = True
        for engine in self._engines:
            engine.end()

    async def run(self) -> None:
        """
        Raises:
            RestartPass: A bucket or the stream has changed, or two engines are merged.
            JetSparkError: A request failed.
        """
        beginning = await open_projections(self._setup.js, self._setup.app.stream, self._projections)
        if not self._is_ending:
            await self._run(beginning)

    async def _run(self, beginning: FoldPosition) -> None:
        are_far = far_behind([projection.start for projection in self._projections], self._options.apart_after)
        behind = [projection for projection, is_far in zip(self._projections, are_far, strict=True) if is_far]
        front = [projection for projection in self._projections if projection not in behind]
        groups = [group for group in (front, behind) if group]
        self._engines = [self._engine(group, groups) for group in groups]
        self._counts.apart = [projection.spec.name for projection in behind]
        tasks = [asyncio.create_task(engine.run(beginning)) for engine in self._engines]
        meeting = asyncio.create_task(self._meet() if behind else asyncio.Event().wait())
        try:
            await asyncio.wait([*tasks, meeting], return_when=asyncio.FIRST_COMPLETED)
            if meeting.done():
                self.end()
            if self._is_ending:
                await asyncio.wait(tasks)
        finally:
            await end_tasks(*tasks, meeting)
        for task in tasks:
            if not task.cancelled():
                task.result()
        if behind and not meeting.cancelled():
            self._counts.joins += 1
            names = ", ".join(self._counts.apart)
            raise RestartPass(f"projections {names} have caught up; their engine is merged with the other one")

    def _engine(self, group: list[LiveProjection], groups: list[list[LiveProjection]]) -> LiveEngine:
        beside = [projection for other in groups if other is not group for projection in other]
        return LiveEngine(self._setup, group, beside=beside, counts_position=group is groups[-1])

    async def _meet(self) -> bool:
        """Return when the gap between the two engines is small enough to merge them."""
        front, behind = self._engines
        while True:
            if front.through - behind.through <= self._options.apart_after // NEAR:
                return True
            await asyncio.sleep(self._options.position_every_s)
