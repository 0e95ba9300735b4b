"""The one rule of loops that outlast an outage. Time is stated."""

from __future__ import annotations

import pytest
from support.procedures import STEP_S, MemoryServer

from jetspark.core.backoff import Backoff
from jetspark.core.step_runner import ReadClock, Sleep
from jetspark.errors import ConnectionLost, MessageNotFound, RequestTimeout
from jetspark.publish.steps import Procedure
from jetspark.state.patience import PAUSE, Attempts, Persistence


def _times(patience: Attempts, since: float, takes_s: float = 0.0) -> list[float]:
    """When something is tried that fails each time, as long as the patience goes."""
    now, times = since, [since]
    while (wait_s := patience.wait_s(now + takes_s)) is not None:
        now = round(now + takes_s + wait_s, 6)
        times.append(now)
    return times


def test_waits_double_and_the_last_attempt_is_made_when_the_time_is_over() -> None:
    patience = Attempts(4.0, Backoff(first_s=0.5, max_s=1.0))
    patience.progress(100.0)
    assert _times(patience, 100.0) == [100.0, 100.5, 101.5, 102.5, 103.5, 104.0]


def test_progress_begins_the_time_and_the_waits_anew() -> None:
    patience = Attempts(1.0, Backoff(first_s=0.5, max_s=8.0))
    patience.progress(0.0)
    assert _times(patience, 0.0) == [0.0, 0.5, 1.0]
    patience.progress(50.0)
    assert _times(patience, 50.0) == [50.0, 50.5, 51.0]


def test_the_time_begins_with_the_first_failure_where_nobody_said_otherwise() -> None:
    assert _times(Attempts(1.0, Backoff(first_s=0.5, max_s=8.0)), 70.0) == [70.0, 70.5, 71.0]


def test_no_wait_is_shorter_than_the_first_so_that_an_end_is_no_storm_of_attempts() -> None:
    patience = Attempts(1.01, Backoff(first_s=0.5, max_s=8.0))
    patience.progress(0.0)
    assert _times(patience, 0.0) == [0.0, 0.5, 1.01]
    patience = Attempts(0.6, Backoff(first_s=0.5, max_s=8.0))
    patience.progress(0.0)
    assert _times(patience, 0.0) == [0.0, 0.5, 1.0]


@pytest.mark.parametrize("takes_s", [0.2, 3.0])
def test_time_that_attempts_take_counts(takes_s: float) -> None:
    patience = Attempts(2.0, Backoff(first_s=0.5, max_s=0.5))
    patience.progress(0.0)
    assert _times(patience, 0.0, takes_s) == ([0.0, 0.7, 1.4, 2.1] if takes_s < 1 else [0.0])


# ---- procedures ------------------------------------------------------------------------------------------------------


class Act:
    """Fails with these errors, one each time; then its answer is how often it was called."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.calls = list(errors), 0

    def __call__(self) -> Procedure[int]:
        yield ReadClock()
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.calls


def test_what_may_pass_is_tried_again_until_it_has_an_answer() -> None:
    act = Act(ConnectionLost("gone"), RequestTimeout("answer", 1.0))
    assert MemoryServer(0.0, None).run(Persistence(60.0).attempt(act)) == 3


def test_what_does_not_pass_is_raised_at_once() -> None:
    error = MessageNotFound(404, 10037, "no message found")
    act = Act(error)
    with pytest.raises(MessageNotFound) as caught:
        MemoryServer(0.0, None).run(Persistence(60.0).attempt(act))
    assert caught.value is error
    assert act.calls == 1


def test_an_error_that_does_not_pass_in_time_is_the_reason_that_is_raised() -> None:
    errors = [ConnectionLost(str(number)) for number in range(100)]
    server, act = MemoryServer(0.0, None), Act(*errors)
    with pytest.raises(ConnectionLost) as caught:
        server.run(Persistence(3.0).attempt(act))
    assert 1 < act.calls < len(errors)
    assert caught.value is errors[act.calls - 1]
    assert server.now > 3.0


def test_a_pause_is_as_long_as_the_rule_says_and_progress_begins_the_time_anew() -> None:
    persistence, server = Persistence(1.0), MemoryServer(0.0, None)
    waits: list[float] = []
    server.before_step = lambda step: waits.append(step.seconds) if isinstance(step, Sleep) else None
    server.run(persistence.progress())
    assert server.now == STEP_S
    server.run(persistence.pause(ConnectionLost("gone")))
    server.run(persistence.pause(ConnectionLost("gone")))
    assert waits == [PAUSE.first_s, 2 * PAUSE.first_s]
    server.now += 5.0
    server.run(persistence.progress())
    server.run(persistence.pause(ConnectionLost("gone")))
    assert waits[2:] == [PAUSE.first_s]
    server.now += 5.0
    with pytest.raises(ConnectionLost, match="still gone"):
        server.run(persistence.pause(ConnectionLost("still gone")))
