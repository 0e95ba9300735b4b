"""The blocking driver and fork(), as Spark's Python workers do it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jetspark.blocking.transport import ENDING_S
from jetspark.server import NatsServer

PROGRAM = """
import os, sys, warnings
import jetspark.blocking as jetspark
from jetspark import ConnectionClosed

# Forking with threads is what this is about; newer Pythons warn of it in general.
warnings.simplefilter("ignore", DeprecationWarning)
url = sys.argv[1]
nc = jetspark.connect(url)
subscription = nc.subscribe("from.child")
nc.flush()
for number in range(5):
    child = os.fork()
    if child == 0:
        try:
            nc.publish("from.child", b"through the parent's connection")
            os._exit(1)
        except ConnectionClosed as error:
            assert "belongs to the process that forked" in str(error), error
        nc.close()
        with jetspark.connect(url) as own:
            own.publish("from.child", b"%d" % number)
            assert own.request("echo", b"?").data == b"?"
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
assert [int(subscription.next(30).data) for _ in range(5)] == [0, 1, 2, 3, 4]
nc.flush()
nc.close()
print("done")
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="this system has no fork()")
def test_a_forked_process_connects_anew_and_leaves_its_parents_connection_alone() -> None:
    import jetspark.blocking

    with NatsServer(jetstream=False) as server, jetspark.blocking.connect(server.url) as service:
        service.subscribe("echo", callback=lambda message: message.respond(message.data))
        service.flush()
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM, server.url], capture_output=True, text=True, timeout=250, check=False
        )
    assert (result.stdout, result.returncode) == ("done\n", 0), result.stderr


CHILD_CLOSES = """
import os, sys, time, warnings
import jetspark.blocking as jetspark

warnings.simplefilter("ignore", DeprecationWarning)
clients = [jetspark.connect(sys.argv[1]) for _ in range(5)]
for nc in clients:
    nc.publish("a", b"the parent's own")
    nc.jetstream().publish_async("a", b"the parent's own")
child = os.fork()
if child == 0:
    began = time.monotonic()
    for nc in clients[1:]:
        nc.close()
    clients[0].drain()
    print(time.monotonic() - began, flush=True)
    os._exit(0)
os.waitpid(child, 0)
for nc in clients:
    nc.close()
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="this system has no fork()")
def test_a_forked_process_does_not_wait_for_threads_it_does_not_have_or_tell_of_its_parents_messages() -> None:
    with NatsServer(jetstream=False) as server:
        result = subprocess.run(
            [sys.executable, "-c", CHILD_CLOSES, server.url], capture_output=True, text=True, timeout=250, check=False
        )
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < ENDING_S  # five clients: each waited that long
