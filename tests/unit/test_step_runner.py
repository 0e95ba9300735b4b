"""A generator of steps, and what came of each."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from jetspark.core.step_runner import Course
from jetspark.errors import ConnectionLost


def test_each_step_gets_the_answer_to_it_and_none_is_left_over() -> None:
    answers: list[Any] = []

    def steps() -> Generator[str, Any, None]:
        answers.append((yield "dial"))
        answers.append((yield "ask"))
        answers.append((yield "wait"))

    course = Course(steps())
    assert course.next_step() == "dial"
    course.answer = 1
    assert course.next_step() == "ask"
    assert course.next_step() == "wait"  # it had no answer, and not the one before
    course.answer = 3
    assert course.next_step() is None
    assert answers == [1, None, 3]


def test_a_problem_is_the_generators_to_judge() -> None:
    def steps() -> Generator[str, Any, None]:
        try:
            yield "dial"
        except ConnectionLost:
            yield "dial another one"

    course = Course(steps())
    course.next_step()
    course.problem = ConnectionLost("refused")
    assert course.next_step() == "dial another one"
    course.problem = ConnectionLost("refused again")
    with pytest.raises(ConnectionLost, match="refused again"):
        course.next_step()


def test_what_is_closed_does_what_it_has_to_do_at_last() -> None:
    log: list[str] = []

    def steps() -> Generator[str, Any, None]:
        try:
            yield "dial"
        finally:
            log.append("hung up")

    course = Course(steps())
    course.next_step()
    course.close()
    assert log == ["hung up"]
    assert course.next_step() is None
