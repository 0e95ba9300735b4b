"""What a redrive knows of its dead letters, and how they are described. Pure."""

from __future__ import annotations

from typing import Literal

from jetspark.app.dead_letters.outcomes import RedriveOutcomes, RedriveResults, SeenDeadLetter
from jetspark.app.stored_events import FailureCause, Origin, StoredEvent
from jetspark.core.headers import Headers, encode


def _seen(
    key: str | None, sequence: int, status: Literal["open", "behind"] = "open", redrives: int = 0
) -> SeenDeadLetter:
    return SeenDeadLetter(sequence, f"dlq.a.h.{key}.S.{sequence}.1", "h", key, status, redrives, 0, is_chosen=True)


def test_a_redrive_has_ended_when_nothing_is_left_but_what_is_behind_one_that_failed_again() -> None:
    outcomes = RedriveOutcomes()
    first, second, third = _seen("a", 1), _seen("a", 2, "behind"), _seen("a", 3, "behind")
    other, alone = _seen("b", 4), _seen(None, 5)
    for each in (first, other, alone):
        outcomes.request(each)
    outcomes.follow_all([first, second, third, other, alone, _seen("c", 6, "behind"), _seen("a", 99, "behind")], 50)
    assert outcomes.results == RedriveResults(waiting=5)
    assert not outcomes.have_ended()
    outcomes.set_status(first.subject, "open", 0)  # as it was
    outcomes.set_status("dlq.a.h.x.S.9.1", "closed", 0)  # of another redrive
    assert outcomes.results == RedriveResults(waiting=5)
    outcomes.set_status(first.subject, "closed", 0)
    outcomes.set_status(second.subject, "open", 1)
    assert not outcomes.have_ended()
    outcomes.set_status(other.subject, "closed", 0)
    assert not outcomes.have_ended()
    outcomes.set_status(alone.subject, "open", 1)
    assert outcomes.have_ended()  # the third waits for the second
    assert outcomes.results == RedriveResults(handled=2, failed=2, waiting=1)
    outcomes.set_status(third.subject, "closed", 0)  # it was discarded in the meantime
    assert outcomes.have_ended()
    assert outcomes.results == RedriveResults(handled=3, failed=2, waiting=0)


def test_a_dead_letter_is_described_as_it_is_read_but_for_its_event() -> None:
    whole = StoredEvent(
        handler="h",
        key=" a\n",
        origin=Origin("S", 7, 8),
        subject="s.ü",
        data=b"",
        headers=Headers([("Jetspark-Dlq-Status", "closed"), ("Nats-Msg-Id", "x"), ("Plain", "y")]),
        attempts=3,
        status="open",
        cause=FailureCause.of(ValueError("no\r\nJetspark-Dlq-Key: b"), is_transient=True),
        redrives=2,
        failed="2026-01-01T00:00:00Z",
        partition=4,
        is_cancelled=True,
    )
    described = StoredEvent.described(encode(whole.to_headers()))
    assert described.headers == Headers()
    read = StoredEvent.of(whole.to_headers(), b"")
    assert read == whole
    for name in StoredEvent.__slots__:
        if name != "headers":
            assert getattr(described, name) == getattr(read, name), name
