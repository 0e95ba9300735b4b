"""The order of the suite names files that there are, and keeps together what shares a session of Spark."""

from __future__ import annotations

from pathlib import Path

from support import packing

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
    assert packing.part_of("tests/integration/test_bench.py::test_a[1]") == "integration/test_bench.py::test_a[1]"
    interrupted = "conformance/test_interrupts.py"
    assert packing.part_of(f"tests/{interrupted}::test_a[fetch-uvloop]") == f"{interrupted} uvloop"
    assert packing.part_of("tests/integration/test_spark_kv.py::test_a[1]").endswith("of Spark")


def test_long_parts_begin_first() -> None:
    parts = [
        f"tests/{packing.SESSIONS[0][0]}::test_a",
        "tests/conformance/test_batch_server.py::test_a",
        f"tests/{packing.SESSIONS[1][0]}::test_a",
        "tests/integration/test_spark_deaths.py::test_ten_deaths_of",
        "tests/integration/test_spark_deaths.py::test_a",
        "tests/conformance/test_login.py::test_a",
        "tests/unit/test_pull.py::test_a",
    ]
    assert sorted(parts, key=packing.rank) == parts
    for files in packing.SESSIONS:
        assert len({packing.rank(f"tests/{file}::test_a") for file in files}) == 1


def test_a_process_that_has_not_collected_yet_is_given_nothing() -> None:
    class Process:
        shutting_down = False

    replacing, given = Process(), []
    scheduling = packing.Packing.__new__(packing.Packing)
    scheduling.log = lambda *words: None
    scheduling.workqueue = {"unit/test_a.py": {"tests/unit/test_a.py::test_a": False}}
    scheduling.assigned_work = {replacing: {}}
    scheduling.registered_collections = {}
    scheduling._assign_work_unit = given.append
    scheduling._reschedule(replacing)
    assert given == []
    scheduling.registered_collections = {replacing: ["tests/unit/test_a.py::test_a"]}
    scheduling._reschedule(replacing)
    assert given == [replacing]
