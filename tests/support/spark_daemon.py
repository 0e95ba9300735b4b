"""``pyspark.daemon``, which forks Spark's Python workers, with what they import loaded before it forks:
``python spark_daemon.py pyspark.daemon <module of the worker>``.

A worker imports our formats, pyarrow and pandas, which takes it up to a second of processor time, and the suite starts
some hundreds of workers. ``test_spark_setup`` has Sparks whose workers start without this.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys

FORMATS = ["jetspark.spark.formats", "jetspark.spark.engine.folding"]
# Only of the process that runs tasks are there many.
TASKS = [
    "jetspark.spark.kv.reading",
    "jetspark.spark.kv.writing",
    "jetspark.spark.stream.source",
    "pyarrow.pandas_compat",
    "pandas",
]

if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # as `python -m` has it, instead of the folder of this file
    del sys.argv[0]
    for name in [*FORMATS, *(TASKS if sys.argv[1] == "pyspark.worker" else ())]:
        importlib.import_module(name)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
