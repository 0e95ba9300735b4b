"""When a fast batch asks, and when it gives up. Time is stated."""

from __future__ import annotations

from jetspark.publish.fast_options import FastBatchOptions
from jetspark.publish.fast_silence import HOLE_PING_S, FastSilence

OPTIONS = FastBatchOptions(timeout=30.0, ping_after_s=1.0, keep_alive_s=4.0)


def _silence(now: float = 100.0) -> FastSilence:
    silence = FastSilence(OPTIONS)
    silence.on_progress(now)
    return silence


def _next(silence: FastSilence, sent_at: float, *, is_waiting: bool = True, is_connected: bool = True) -> float | None:
    return silence.next_deadline(sent_at, is_waiting=is_waiting, is_connected=is_connected)


def test_a_server_that_owes_an_answer_is_asked_again_and_again_until_the_time_is_over() -> None:
    silence = _silence()
    assert _next(silence, 110.0) == 111.0
    silence.on_ping(111.0)
    assert _next(silence, 110.0) == 112.0
    silence.on_ping(139.5)
    assert _next(silence, 110.0) == silence.gives_up_at(110.0) == 140.0


def test_progress_and_messages_of_ours_begin_the_time_anew() -> None:
    silence = _silence()
    assert silence.gives_up_at(90.0) == 130.0
    assert silence.gives_up_at(105.0) == 135.0
    silence.on_progress(120.0)
    assert silence.gives_up_at(105.0) == 150.0


def test_pings_do_not_begin_the_time_anew() -> None:
    silence = _silence()
    silence.on_ping(129.0)
    assert silence.gives_up_at(100.0) == 130.0


def test_a_batch_that_waits_for_its_caller_is_kept_alive_and_not_given_up() -> None:
    silence = _silence()
    assert _next(silence, 110.0, is_waiting=False) == 114.0
    silence.on_ping(114.0)
    assert _next(silence, 110.0, is_waiting=False) == 118.0


def test_without_a_session_nobody_is_asked_but_time_goes_by() -> None:
    silence = _silence()
    silence.on_hole(100.0)
    assert _next(silence, 110.0, is_connected=False) == 140.0
    assert _next(silence, 110.0, is_waiting=False, is_connected=False) is None


def test_a_message_that_was_not_taken_is_looked_into_soon_and_once() -> None:
    silence = _silence()
    silence.on_hole(110.0)
    silence.on_hole(110.05)  # the first one counts
    assert _next(silence, 110.0) == _next(silence, 110.0, is_waiting=False) == 110.0 + HOLE_PING_S
    silence.on_ping(110.1)
    assert _next(silence, 110.0) == 111.1


def test_a_batch_that_begins_again_has_no_message_to_look_into() -> None:
    silence = _silence()
    silence.on_hole(110.0)
    silence.begin_again()
    assert _next(silence, 110.0) == 111.0
