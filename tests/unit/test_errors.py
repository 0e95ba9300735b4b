from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Callable

import pytest
from support.error_examples import EXAMPLES

from jetspark import errors
from jetspark.errors import JetSparkError

CLASSES = [
    value
    for value in vars(errors).values()
    if inspect.isclass(value) and issubclass(value, BaseException) and value.__module__ == errors.__name__
]


def _pickled(error: JetSparkError) -> JetSparkError:
    rebuilt = pickle.loads(pickle.dumps(error))
    assert isinstance(rebuilt, JetSparkError)
    return rebuilt


def _tree() -> dict[str, tuple[str | None, str | None]]:
    """Class -> (parent in the drawing, builtin in brackets) from the module docstring."""
    found: dict[str, tuple[str | None, str | None]] = {}
    path: list[str] = []
    for line in inspect.getdoc(errors).splitlines():  # type: ignore[union-attr]
        drawn = re.fullmatch(r"    ((?:│   |    )*)(?:[├└]── )?([A-Z]\w+)(?: \((\w+)\))?(?:\s{2,}.*)?", line)
        if drawn is None:
            continue
        depth = 0 if drawn[2] == "JetSparkError" else len(drawn[1]) // 4 + 1
        path[depth:] = [drawn[2]]
        found[drawn[2]] = (path[depth - 1] if depth else None, drawn[3])
    return found


def test_every_class_is_exported_and_has_an_example() -> None:
    names = sorted(cls.__name__ for cls in CLASSES)
    assert sorted(errors.__all__) == names
    assert sorted(type(example).__name__ for example in EXAMPLES) == names


def test_the_drawing_in_the_docstring_is_the_class_tree() -> None:
    actual = {
        cls.__name__: (
            next((base.__name__ for base in cls.__bases__ if issubclass(base, JetSparkError)), None),
            next(
                (base.__name__ for base in cls.__bases__ if base.__module__ == "builtins"),
                None,
            )
            if cls is not JetSparkError
            else None,
        )
        for cls in CLASSES
    }
    assert _tree() == actual


def wrong_examples(check: Callable[[JetSparkError], None]) -> list[str]:
    """The examples that fail a check, each with what is wrong."""
    wrong = []
    for error in EXAMPLES:
        try:
            check(error)
        except Exception as problem:
            wrong.append(f"{error!r}: {type(problem).__name__}: {problem}")
    return wrong


def test_every_class_has_the_one_root_and_a_docstring() -> None:
    assert [cls.__name__ for cls in CLASSES if not (issubclass(cls, JetSparkError) and cls.__doc__)] == []


@pytest.mark.parametrize("duplicate", [_pickled, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_an_error_survives_the_way_between_processes(duplicate: Callable[[JetSparkError], JetSparkError]) -> None:
    def check(error: JetSparkError) -> None:
        rebuilt = duplicate(error)
        assert type(rebuilt) is type(error)
        assert vars(rebuilt) == vars(error)
        assert rebuilt.args == error.args
        assert str(rebuilt) == str(error) != ""

    assert wrong_examples(check) == []


@pytest.mark.parametrize("duplicate", [_pickled, copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"])
def test_an_error_keeps_its_cause_and_may_pass_or_not_as_before(
    duplicate: Callable[[JetSparkError], JetSparkError],
) -> None:
    def check(error: JetSparkError) -> None:
        for cause in (errors.PermissionDenied("publish", "a"), errors.TooManyBatches(429, 10211, "too many inflight")):
            caused = duplicate(error)
            caused.__cause__ = cause
            rebuilt = duplicate(caused)
            assert rebuilt.may_pass is caused.may_pass
            assert type(rebuilt.__cause__) is type(cause)
            assert str(rebuilt.__cause__) == str(cause)
            assert (rebuilt.args, vars(rebuilt)) == (error.args, vars(error))

    assert wrong_examples(check) == []


def test_a_cause_that_other_processes_may_not_know_stays_behind() -> None:
    class Unpicklable(Exception):
        pass

    error = errors.BatchInDoubt("b1", "the callback raised", 7)
    error.__cause__ = Unpicklable(lambda: None)
    rebuilt = _pickled(error)
    assert (rebuilt.__cause__, rebuilt.may_pass) == (None, error.may_pass)


def test_the_message_shows_every_fact() -> None:
    def check(error: JetSparkError) -> None:
        for fact in vars(error).values():
            parts = [*fact, *fact.values()] if isinstance(fact, dict) else fact if isinstance(fact, tuple) else [fact]
            if isinstance(error, errors.NoServersAvailable):
                parts = [part for part in parts if part != 0]
            if isinstance(fact, bool):
                continue  # told in words
            assert all(str(part) in str(error) for part in parts)

    assert wrong_examples(check) == []


def test_the_message_is_one_sentence_without_gaps() -> None:
    assert [str(error) for error in EXAMPLES if re.search(r"  |^\s|\s$| [;,.:]", str(error))] == []


def test_lost_data_tells_the_remedy_of_the_one_who_reads() -> None:
    lost = "stream 'S': sequence 5 is needed and the first stored one is 9, so 4 sequences are gone"
    assert str(errors.DataLoss("S", 5, 9)) == f"{lost} (limits, a purge, or deletes)"
    assert str(errors.DataLoss("S", 5, 9, "be quicker")) == f"{lost} (limits, a purge, or deletes); be quicker"


@pytest.mark.parametrize(
    "cls", [cls for cls in CLASSES if issubclass(cls, errors.ServerError)], ids=lambda cls: cls.__name__
)
def test_every_answer_of_the_server_names_the_bucket_behind_its_stream(cls: type[errors.ServerError]) -> None:
    found = {name: cls(400, 10001, "no", name).bucket for name in ("KV_state", "OBJ_files", "ORDERS", "")}
    assert found == {"KV_state": "state", "OBJ_files": "files", "ORDERS": "", "": ""}


def test_a_timeout_before_anything_was_sent_says_so() -> None:
    error = errors.RequestTimeout("request to 'a'", 2.5, was_sent=False)
    assert str(error) == "request to 'a': no room in the send buffer within 2.5 s; nothing was sent"
    again = _pickled(error)
    assert isinstance(again, errors.RequestTimeout)
    assert not again.was_sent
    assert errors.RequestTimeout("request to 'a'", 2.5).was_sent


# ---- may it pass? ----------------------------------------------------------------------------------------------------

# Every retry in the library asks `may_pass`. So this is the table of what is tried again; all others are final.
MAY_PASS = {
    "NetworkError": "the other side may come back",
    "ConnectionLost": "the client reconnects",
    "NoServersAvailable": "a server may be started again",
    "RequestTimeout": "a leader is elected, a server restarted",
    "BufferFull": "the network may take more",
    "WindowFull": "acknowledgements come",
    "NoResponders": "somebody may subscribe; between two leaders nobody has",
    "NoWorkers": "a worker may be started",
    "WorkersBusy": "commands are decided",
    "WorkflowNotOver": "the run may end later",
    "HandlerStalled": "another worker gets the events",
    "CommandInDoubt": "a worker may be back, and the stream have a leader",
    "BoundaryConflict": "others may write less",
    "JetStreamUnavailable": "between two leaders nobody answers",
    "StoreUnavailable": "an overloaded store recovers",
    "BatchInDoubt": "without a cause it was the network",
    "BatcherTimeout": "the sink may catch up",
    "FlushTimeout": "the sink may catch up",
    "CircuitOpen": "it closes",
    "ServerRefused": "such as too many connections",
    "BatchCutShort": "another batch may go further",
    "BatchIncomplete": "nothing of the batch is stored, and another may be whole",
    "BatchUnknown": "the server was restarted, and knows the next",
    "TooManyBatches": "others end theirs",
    "InsufficientResources": "with code 503: what expires or is read makes room",
}


def test_what_may_pass_is_decided_by_the_class() -> None:
    wrong = [type(error).__name__ for error in EXAMPLES if error.may_pass is not (type(error).__name__ in MAY_PASS)]
    assert wrong == []


@pytest.mark.parametrize(
    ("code", "err_code", "description", "may_pass"),
    [
        (503, 10008, "JetStream system temporarily unavailable", True),
        (503, 10077, "maximum messages exceeded", True),  # a reader of a work queue makes room
        (503, 10023, "insufficient resources", True),
        (429, 10167, "too many requests", True),
        (409, 10158, "duplicate message id is in process", True),
        (408, 0, "Request Timeout", True),
        (500, 10052, "async persist mode is not supported with atomic batch publish", False),
        (500, 10111, "rollup not permitted", False),
        (400, 10054, "message size exceeds maximum allowed", False),
        (404, 10059, "stream not found", False),
    ],
)
def test_an_answer_of_the_server_may_pass_by_its_code(
    code: int, err_code: int, description: str, may_pass: bool
) -> None:
    assert errors.ServerError(code, err_code, description).may_pass is may_pass


@pytest.mark.parametrize(
    "error", [errors.BatchInDoubt("b", "no answer", 3), errors.BatchCutShort("b", 3, "lost")], ids=["doubt", "cut"]
)
def test_a_batch_that_ended_early_may_pass_if_its_cause_may(error: JetSparkError) -> None:
    may_pass = {}
    for cause in (
        error.__cause__,
        errors.StreamNotFound(404, 10059, "stream not found"),
        errors.BatchUnknown(400, 10208, "batch publish ID unknown"),
        OSError("no route to host"),
    ):
        error.__cause__ = cause
        may_pass[type(cause).__name__] = error.may_pass
    assert [name for name, may in may_pass.items() if not may] == ["StreamNotFound"]
