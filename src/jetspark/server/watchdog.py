"""The small process between a Python program and its nats-server, so that the server never outlives the program.

Run as a script, with nothing but the standard library: ``python -I -S watchdog.py '<JSON>'``.

::

    program ── stdin: a byte per signal to pass on; its end says "the program is gone" ──▶ watchdog ──▶ server
            ◀─ stdout: the server's pid, a dot per signal; its end says "the server is gone" ──

Why a process and not ``PR_SET_PDEATHSIG`` set by the program: that signal fires when the *thread* that forked
ends, so a server started from a thread pool would die with its worker, and setting it takes a ``preexec_fn``,
which can deadlock in a program that has threads. The watchdog has one thread, so for its own child it may use
both: if the watchdog is killed, the kernel ends the server.

Why the parent's pid is polled besides the pipe: a forked copy of the program (multiprocessing, a Spark
worker) also holds the pipe's write end and would keep it from ending for as long as the copy lives.

Because the watchdog is the server's parent, it alone reaps it. A signal passed on through it can therefore
never reach another process that was given the same pid.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from typing import Any

PARENT_POLL_S = 0.25

# Seconds between SIGTERM and SIGKILL, after the program has died without stopping the server.
TERMINATE_WAIT_S = 5.0

# sysexits.h EX_TEMPFAIL: the store is in use. The program tells it from an exit code of nats-server, which
# are 0 and 1.
STORE_LOCKED = 75

PR_SET_PDEATHSIG = 1


def main(argument: str) -> int:
    task: dict[str, Any] = json.loads(argument)
    store_lock = _locked_store(task["store_dir"])  # Held until this process ends, however it ends.
    if store_lock is None:
        return STORE_LOCKED
    # A terminal's Ctrl-C or a scheduler's SIGTERM to the whole group is the program's to handle, not ours.
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)  # set_wakeup_fd insists.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    server = _start(task)
    _report(f"{server.pid}\n".encode())
    is_orphaned = _watch(server, task["parent_pid"], wake_read)
    if is_orphaned:
        _end(server)
        if task["remove_dir"]:
            shutil.rmtree(task["remove_dir"], ignore_errors=True)
    assert server.returncode is not None
    # The shell's way of saying "ended by a signal" in an exit code.
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


def _locked_store(store_dir: str | None) -> int | None:
    """Lock the store: nats-server 2.15.1 itself starts on a store in use, unaware of what the other one writes."""
    if store_dir is None:
        return -1
    os.makedirs(store_dir, exist_ok=True)
    lock = os.open(os.path.join(store_dir, ".jetspark.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    return lock


def _start(task: dict[str, Any]) -> subprocess.Popen[bytes]:
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

    def before_exec() -> None:
        # Ignored signals stay ignored across exec, and nats-server must get these.
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_DFL)
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    # Standard error is the log file: the text of a Go panic goes nowhere else.
    return subprocess.Popen(task["command"], stdin=subprocess.DEVNULL, stdout=2, stderr=2, preexec_fn=before_exec)


def _watch(server: subprocess.Popen[bytes], parent_pid: int, wake: int) -> bool:
    """Pass signals on until the server ends (False) or the program does (True)."""
    while server.poll() is None:
        readable, _, _ = select.select([0, wake], [], [], PARENT_POLL_S)
        if wake in readable:
            os.read(wake, 4096)
        if 0 in readable:
            signals = os.read(0, 4096)
            if not signals:
                return True
            for number in signals:
                server.send_signal(number)
                if number == signal.SIGSTOP:
                    _await_stop(server)
            _report(b"." * len(signals))
        if os.getppid() != parent_pid:
            return True
    return False


def _await_stop(server: subprocess.Popen[bytes]) -> None:
    """Wait until the server has stopped: its threads run until one of them notices the signal, which may take a
    while."""
    if server.poll() is None and hasattr(os, "waitid"):  # macOS has it since Python 3.13
        os.waitid(os.P_PID, server.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # leaves the state for later waits


def _report(message: bytes) -> None:
    try:
        os.write(1, message)
    except BrokenPipeError:
        pass  # The program is gone; _watch notices it and acts.


def _end(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGCONT)  # A paused server would not notice SIGTERM.
    server.terminate()
    try:
        server.wait(TERMINATE_WAIT_S)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
