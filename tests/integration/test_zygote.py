"""Programs that run in forks end as they would in processes that were started for them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.zygote import Zygote


@pytest.fixture(scope="module", params=[True, False], ids=["forked", "in one process"])
def zygote(request: pytest.FixtureRequest) -> Iterator[Zygote]:
    with Zygote("json", forks=request.param) as running:
        yield running


def test_what_a_program_prints_and_where_it_runs(zygote: Zygote, tmp_path: Path) -> None:
    code = "import os, sys\nprint(__name__, os.getcwd())\nprint('aside', file=sys.stderr)"
    result = zygote.run(code, folder=tmp_path, timeout=250)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"__main__ {tmp_path}\n", "aside\n")


@pytest.mark.parametrize(
    ("code", "last_words"),
    [
        ("assert 1 == 2, 'wrong'", "AssertionError: wrong"),
        ("import warnings\nwarnings.warn('old')", "UserWarning: old"),
        ("import support", "ModuleNotFoundError: No module named 'support'"),
        ("print(json)", "NameError: name 'json' is not defined"),
        ("def broken(:", "SyntaxError: invalid syntax"),
    ],
)
def test_a_program_that_fails_says_why(zygote: Zygote, code: str, last_words: str) -> None:
    result = zygote.run(code, timeout=250)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(last_words)
    assert zygote.run("print(1)", timeout=250).stdout == "1\n"


def test_nothing_of_a_program_is_left_for_the_next() -> None:
    with Zygote("json") as zygote:
        assert zygote.run("import json, sys\njson.loads = None\nsys.exit(3)", timeout=250).returncode == 3
        assert zygote.run("import json\nprint(json.loads('[1]'))", timeout=250).stdout == "[1]\n"
        killed = zygote.run("import os\nos.kill(os.getpid(), 9)", timeout=250)
        assert killed.returncode == -9


def test_a_program_that_hangs_is_ended() -> None:
    with Zygote() as zygote, pytest.raises(subprocess.TimeoutExpired):
        zygote.run("import time\ntime.sleep(60)", timeout=0.5)
