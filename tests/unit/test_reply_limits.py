from __future__ import annotations

from typing import Any

import pytest

from jetspark.core.message import CoreMessage
from jetspark.core.reply_limits import Collector
from jetspark.errors import ConfigError, NoResponders

ANSWER = CoreMessage("r", b"x", None, None, None)


def collector(**options: Any) -> Collector:
    return Collector("svc", **{"now": 100.0, "timeout_s": 5.0, "stall_s": None, "max_messages": 0} | options)


def test_without_other_limits_it_waits_until_the_timeout() -> None:
    answers = collector()
    assert answers.wait_s(100.0) == 5.0
    assert answers.accept(ANSWER, now=104.0, stop=None)
    assert answers.wait_s(104.0) == 1.0
    assert answers.wait_s(105.0) == 0.0
    assert answers.wait_s(106.0) < 0


def test_so_many_answers_are_enough() -> None:
    answers = collector(max_messages=2)
    assert answers.accept(ANSWER, now=100.0, stop=None)
    assert answers.wait_s(100.0) == 5.0
    assert answers.accept(ANSWER, now=100.0, stop=None)
    assert answers.wait_s(100.0) == 0.0


def test_a_stall_is_counted_from_each_answer_and_only_after_the_first() -> None:
    answers = collector(stall_s=1.0)
    assert answers.wait_s(100.0) == 5.0
    answers.accept(ANSWER, now=102.0, stop=None)
    assert answers.wait_s(102.0) == 1.0
    answers.accept(ANSWER, now=102.5, stop=None)
    assert answers.wait_s(103.0) == 0.5
    answers.accept(ANSWER, now=104.5, stop=None)
    assert answers.wait_s(104.5) == 0.5


def test_the_message_that_stops_is_not_an_answer() -> None:
    answers = collector(max_messages=2)
    assert answers.accept(ANSWER, now=100.0, stop=lambda message: not message.data)
    assert not answers.accept(CoreMessage("r", b"", None, None, None), now=100.0, stop=lambda message: not message.data)


def test_nobody_listening_is_an_error_and_is_not_shown_to_stop() -> None:
    nobody = CoreMessage("r", b"", None, b"NATS/1.0 503\r\n\r\n", None)
    with pytest.raises(NoResponders) as failure:
        collector().accept(nobody, now=100.0, stop=lambda message: True)
    assert failure.value.subject == "svc"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_messages": -1}, "max_messages=-1"),
        ({"timeout_s": 0}, "timeout=0"),
        ({"timeout_s": -1.0}, "timeout=-1.0"),
        ({"stall_s": 0}, "stall=0"),
    ],
)
def test_limits_that_make_no_sense_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        collector(**options)
