"""Taking a lease while the server is away now and then."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from jetspark.app.projections import leases
from jetspark.app.projections.leases import Lease
from jetspark.core.backoff import Backoff
from jetspark.errors import ConfigError, JetSparkError, KeyExists, RequestTimeout


class Records:
    """A bucket that answers as it is told, one answer for each question."""

    def __init__(self, *creates: JetSparkError | int, watches: tuple[JetSparkError | None, ...] = ()) -> None:
        self._creates, self._watches = list(creates), list(watches)

    async def create(self, key: str, value: bytes, *, ttl: float) -> int:
        answer = self._creates.pop(0)
        if isinstance(answer, JetSparkError):
            raise answer
        return answer

    async def watch(self, key: str, *, initial_marker: bool) -> AsyncIterator[None]:
        answer = self._watches.pop(0)
        if answer is not None:
            raise answer
        yield None  # nobody has it

    @property
    def is_done(self) -> bool:
        return not self._creates and not self._watches


async def _acquire(records: Any, monkeypatch: pytest.MonkeyPatch) -> Lease:
    monkeypatch.setattr(leases, "PAUSE", Backoff(0.0, 0.0))
    lease = Lease(records, "lease.x", "me")
    await lease.acquire()
    return lease


async def test_a_lease_is_waited_for_through_outages_of_every_question(monkeypatch: pytest.MonkeyPatch) -> None:
    away, taken = RequestTimeout("a question", 1.0), KeyExists("records", ("lease.x",))
    records = Records(away, taken, taken, 7, watches=(away, None))
    lease = await _acquire(records, monkeypatch)
    assert records.is_done
    assert lease._revision == 7


async def test_an_error_that_does_not_pass_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError):
        await _acquire(Records(ConfigError("no")), monkeypatch)
