"""What Spark runs in a fork does what it does in a Python that was started for it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import spark_python

pytest.importorskip("pyspark")

SCRIPT = str(Path(__file__).parents[1] / "support" / "worker_python.sh")

SHOWN = """
import os, sys
print(__name__, sys.argv[1:], os.getcwd(), os.environ["COLOR"], "folder" in os.environ, file=sys.stderr)
print(sys.stdin.read(), sys.path[:2] == [os.getcwd(), os.environ["PYTHONPATH"]], os.environ["PYTHONPATH"])
sys.exit(7)
"""


@pytest.fixture(params=["forked", "started"])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Of a process that Spark starts: its zip file is in front of the path."""
    path = os.pathsep.join(["/opt/pyspark/python/lib/pyspark.zip", str(tmp_path)])
    variables = os.environ | {"PYTHONPATH": path, "COLOR": "red", "JETSPARK_TESTS_PYTHON": sys.executable}
    if request.param == "started":
        variables.pop(spark_python.VARIABLE, None)
        yield variables
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv(spark_python.VARIABLE, raising=False)  # the run has one for all its Sparks
            with spark_python.forks(tmp_path):
                yield variables | {spark_python.VARIABLE: os.environ[spark_python.VARIABLE]}


def test_a_module_runs_with_its_arguments_variables_folder_and_files(
    environment: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "shown.py").write_text(SHOWN)
    for _ in range(2):
        done = subprocess.run(
            [SCRIPT, "-m", "shown", "a", "b c"],
            input="input",
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.stdout == f"input True {tmp_path}\n", done
        assert done.stderr == f"__main__ ['a', 'b c'] {tmp_path} red False\n"
        assert done.returncode == 7


def test_spark_s_own_daemon_forks_workers_and_ends_with_its_input(environment: dict[str, str]) -> None:
    command = [SCRIPT, "-m", "pyspark.daemon", "pyspark.worker"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert 0 < int.from_bytes(process.stdout.read(4), "big") < 1 << 16  # its port
        process.stdin.close()
        assert process.stdout.read() == b""  # nobody has it any more
        process.wait(250)


def test_it_ends_when_the_process_that_spark_knows_is_killed(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(300)")
    command = [SCRIPT, "-m", "hanging"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGKILL)
        assert process.stdout.read() == b""


def test_where_nobody_forks_any_more_a_python_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "said.py").write_text("print('said')")
    monkeypatch.setenv(spark_python.VARIABLE, str(tmp_path / "gone"))
    monkeypatch.setenv("JETSPARK_TESTS_PYTHON", sys.executable)
    assert subprocess.check_output([SCRIPT, "-m", "said"], cwd=tmp_path, timeout=250) == b"said\n"


@pytest.mark.parametrize("sent", [b"", (1000).to_bytes(4, "little"), (1000).to_bytes(4, "little") + b"half"])
def test_one_that_is_killed_while_it_asks_keeps_nobody_waiting(sent: bytes, tmp_path: Path) -> None:
    (tmp_path / "shown.py").write_text("print('shown')")
    with pytest.MonkeyPatch.context() as patch, open(os.devnull) as nothing:
        patch.delenv(spark_python.VARIABLE, raising=False)
        with spark_python.forks(tmp_path):
            with socket.socket(socket.AF_UNIX) as asking:
                asking.connect(os.environ[spark_python.VARIABLE])
                if sent:
                    socket.send_fds(asking, [sent], [nothing.fileno()] * 3)
            done = subprocess.run(
                [SCRIPT, "-m", "shown"],
                cwd=tmp_path,
                env=os.environ | {"PYTHONPATH": str(tmp_path), "JETSPARK_TESTS_PYTHON": sys.executable},
                capture_output=True,
                timeout=250,
                check=False,
            )
    assert (done.stdout, done.stderr) == (b"shown\n", b"")
