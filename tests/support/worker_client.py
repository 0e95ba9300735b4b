"""Have a process forked in place of this one, by `spark_python.py`, and end as it ends.

Spark runs this a thousand times, with ``-I -S``: it imports what is built into Python, and nothing else.
"""

import _socket
import marshal
import os
import sys
from array import array

asking = _socket.socket(_socket.AF_UNIX)
try:
    asking.connect(os.environ["JETSPARK_TESTS_WORKERS"])
except OSError:  # nobody forks, or no more
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
try:
    folder = os.getcwd()
except OSError:  # of a Spark that has outlived the folder it was started in
    folder = "/"
task = {"arguments": sys.argv[1:], "folder": folder, "variables": dict(os.environ)}
text = marshal.dumps(task)
asking.sendmsg([len(text).to_bytes(4, "little")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array("i", [0, 1, 2]))])
asking.sendall(text)
# Spark tells a process to end by closing its input, which must not be open here.
for number in (0, 1, 2):
    os.close(number)
os._exit((asking.recv(1) or b"\1")[0])
