"""How commands wait for SIGTERM and Ctrl-C."""

from __future__ import annotations

import subprocess
import sys

import pytest

# A signal in every instruction of a wait, sooner or later: one that takes a lock its wait holds would never return.
STORM = """
import os, signal, threading, time
from jetspark.cli.signals import EndSignal

end_signal = EndSignal()
assert not end_signal.wait(0.001)
is_over = False

def storm():
    while not is_over:
        os.kill(os.getpid(), signal.{name})
        time.sleep(0.0002)

threading.Thread(target=storm, daemon=True).start()
for _ in range(20_000):
    end_signal.is_received = False
    end_signal.wait(0.00001)
is_over = True
end_signal.is_received = False
os.kill(os.getpid(), signal.{name})
assert end_signal.wait(60.0)
print("ended")
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_may_interrupt_the_wait_anywhere(name: str) -> None:
    script = [sys.executable, "-c", STORM.format(name=name)]
    assert subprocess.run(script, capture_output=True, text=True, timeout=100, check=True).stdout == "ended\n"
