"""The Python of Spark's workers: this one, without Spark's zip file in front of its path."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from jetspark.spark import startup_files
from jetspark.spark.startup_files import started_by_launcher

pytest.importorskip("pyspark")


@pytest.fixture(autouse=True)
def _tidy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYSPARK_PYTHON", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)


def test_workers_run_this_python_with_everything_on_its_path_but_the_zip_file_of_spark() -> None:
    with started_by_launcher():
        launcher = os.environ["PYSPARK_PYTHON"]
        assert launcher == str(startup_files.logging_file().with_name("python"))
        given = [
            "/a b/pyspark/python/lib/pyspark.zip",
            "/a b/pyspark/python/lib/py4j-src.zip",
            "/jobs/orders files.zip",
        ]
        program = "import json, os, sys; print(json.dumps([sys.executable, os.environ['PYTHONPATH'], sys.argv[1:]]))"
        shown = subprocess.run(
            [launcher, "-c", program, "one two", "$three"],
            env=os.environ | {"PYTHONPATH": ":".join(given)},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
    assert json.loads(shown) == [sys.executable, ":".join(given[1:]), ["one two", "$three"]]
    assert os.environ["PYSPARK_PYTHON"] == sys.executable


def test_what_the_user_says_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/opt/python")
    with started_by_launcher():
        assert os.environ["PYSPARK_PYTHON"] == "/opt/python"
    assert os.environ["PYSPARK_PYTHON"] == "/opt/python"


def test_another_spark_than_that_of_the_package_keeps_its_own_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    with started_by_launcher():
        assert os.environ["PYSPARK_PYTHON"] == sys.executable
