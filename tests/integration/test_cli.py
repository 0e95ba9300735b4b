"""The ``jetspark`` command as a shell sees it, whatever the subcommand: version, help, Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import jetspark

MODULE = [sys.executable, "-m", "jetspark"]
SCRIPT = [str(Path(sys.executable).with_name("jetspark"))]


@pytest.mark.parametrize("command", [MODULE, SCRIPT], ids=["module", "script"])
def test_the_version_is_told(command: list[str]) -> None:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=250, check=True)
    assert done.stdout == f"jetspark {jetspark.__version__}\n"


@pytest.mark.parametrize("arguments", [["-h"], ["--help"], ["server", "-h"]])
def test_help_is_where_people_look_for_it(arguments: list[str]) -> None:
    done = subprocess.run([*MODULE, *arguments], capture_output=True, text=True, timeout=250, check=True)
    assert "Usage: jetspark" in done.stdout


def _interrupted(command: list[str], until: str) -> tuple[int, str]:
    """Press Ctrl-C, as a terminal does it: the signal goes to every process of the group."""
    environment = os.environ | {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1"}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
        env=environment,
    ) as process:
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if re.search(until, line):
                    break
            else:
                pytest.fail(f"it ended before the interrupt: {''.join(lines)}")
            time.sleep(0.2)
            os.killpg(process.pid, signal.SIGINT)
            rest, _ = process.communicate(timeout=250)
        finally:
            process.kill()
    return process.returncode, "".join(lines) + rest


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_interrupted_demo_says_so_without_a_traceback() -> None:
    code, output = _interrupted([*MODULE, "demo", "--events", "100000"], "log level")
    assert code == 128 + signal.SIGINT
    assert output.rstrip().endswith("interrupted")
    assert "Traceback" not in output
