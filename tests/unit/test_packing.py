"""The order of the suite names files that there are, and keeps together what shares a session of Spark."""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import bytecode, packing

TESTS = Path(__file__).parents[1]


def test_every_named_file_exists() -> None:
    assert [name for name in packing.named_files() if not (TESTS / name).exists()] == []


def test_files_that_share_a_session_of_spark_go_to_two_processes() -> None:
    sharing = [file for files in packing.SESSIONS for file in files]
    assert {"integration/test_spark_kv.py", "integration/test_spark_source.py"} <= set(sharing)
    assert len(sharing) == len(set(sharing))
    assert len({packing.part_of(f"tests/{file}::test_a") for file in sharing}) == 2


def test_a_case_a_function_or_a_file_is_a_part() -> None:
    assert packing.part_of("tests/unit/test_pull.py::test_a[1]") == "unit/test_pull.py"
    assert packing.part_of("tests/conformance/test_pull.py::test_a[1]") == "conformance/test_pull.py::test_a"
    assert packing.part_of("tests/integration/test_spark_setup.py::test_a[1]").endswith("test_a[1]")
    interrupted = "conformance/test_interrupts.py"
    assert packing.part_of(f"tests/{interrupted}::test_a[fetch-uvloop]") == f"{interrupted} uvloop"
    assert packing.part_of("tests/integration/test_spark_kv.py::test_a[1]").startswith(packing.SESSION)


def test_long_parts_begin_first() -> None:
    parts = [
        f"tests/{packing.SESSIONS[0][0]}::test_a",
        "tests/conformance/test_batch_server.py::test_a",
        f"tests/{packing.SESSIONS[1][0]}::test_a",
        "tests/integration/test_spark_deaths.py::test_deaths_of",
        "tests/integration/test_spark_deaths.py::test_a",
        "tests/conformance/test_login.py::test_a",
        "tests/unit/test_pull.py::test_a",
    ]
    assert sorted(parts, key=packing.rank) == parts
    for files in packing.SESSIONS:
        assert len({packing.rank(f"tests/{file}::test_a") for file in files}) == 1


class Process:
    """What the scheduler sees of one: its name, whether it ends, and what it is sent."""

    shutting_down = False

    def __init__(self, name: str) -> None:
        self.gateway = SimpleNamespace(id=name)
        self.sent: list[int] = []

    def send_runtest_some(self, numbers: list[int]) -> None:
        self.sent += numbers


def scheduling(*nodeids: str) -> packing.Packing:
    """With one process that has collected nothing yet."""
    made = packing.Packing.__new__(packing.Packing)
    made.log = lambda *words: None
    made.workqueue = OrderedDict((packing.part_of(nodeid), {nodeid: False}) for nodeid in nodeids)
    made.assigned_work = {}
    made.registered_collections = {}
    return made


def test_one_process_of_a_core_takes_busy_parts_first_and_the_others_the_rest() -> None:
    files = (
        "unit/test_a.py",
        "integration/test_demo.py",
        "unit/test_b.py",
        "integration/test_bench.py",
        "unit/test_c.py",
    )
    tests = [f"tests/{name}::test_a" for name in files]
    packed = scheduling(*tests)
    for name, expected in (("gw0", 1), ("gw1", 0), ("gw2", 2), ("gw3", 3), ("gw4", 4)):
        process = Process(name)
        packed.registered_collections[process] = tests
        packed._assign_work_unit(process)
        assert process.sent == [expected]


def test_a_process_that_has_not_collected_yet_is_given_nothing() -> None:
    packed, replacing = scheduling("tests/unit/test_a.py::test_a"), Process("gw2")
    packed.add_node(replacing)
    packed._reschedule(replacing)
    assert replacing.sent == []
    packed.registered_collections[replacing] = ["tests/unit/test_a.py::test_a"]
    packed._reschedule(replacing)
    assert replacing.sent == [0]


def test_parts_that_are_done_are_not_handed_out_again_when_their_process_dies() -> None:
    tests = [f"tests/unit/test_{name}.py::test_a" for name in "abc"]
    packed, process, replacing = scheduling(*tests), Process("gw1"), Process("gw2")
    packed.registered_collections[process] = tests
    for _ in tests:
        packed._assign_work_unit(process)
    packed.assigned_work[process]["unit/test_a.py"][tests[0]] = True
    assert packed.unfinished() == tests[1:]
    assert packed.remove_node(process) == tests[1]
    assert packed.unfinished() == tests[1:]
    packed.add_node(replacing)
    packed.registered_collections[replacing] = tests
    packed._reschedule(replacing)
    assert replacing.sent == [1]


def test_bytecode_is_missing_where_there_is_none_or_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This file has some, since it runs: where pytest puts it and what it calls it is pytest's affair."""
    [here] = (TESTS / "unit" / "__pycache__").glob(f"test_packing.*-pytest-{pytest.__version__}.pyc")
    monkeypatch.setattr(bytecode, "TESTS", tmp_path)
    file = tmp_path / "test_packing.py"
    file.write_text("")
    assert bytecode.missing() == [file]
    written = tmp_path / "__pycache__" / here.name
    written.parent.mkdir()
    written.touch()
    assert bytecode.missing() == []
    os.utime(written, (0, 0))
    assert bytecode.missing() == [file]
