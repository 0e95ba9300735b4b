"""What an import loads: Spark starts a dozen Python processes for a query, and each of them pays for it."""

from __future__ import annotations

import subprocess
import sys

import pytest

import jetspark
import jetspark.batcher


def loaded_by(program: str) -> set[str]:
    """The modules a fresh Python has after the program."""
    code = f"{program}\nimport sys\nprint('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def of_asyncio(modules: set[str]) -> list[str]:
    ours = ("jetspark.aio", "jetspark.batcher.aio")
    return sorted(name for name in modules if name == "asyncio" or name.startswith(ours))


@pytest.mark.parametrize(
    "module", ["jetspark", "jetspark.blocking", "jetspark.errors", "jetspark.batcher", "jetspark.batcher.blocking"]
)
def test_who_blocks_does_not_load_the_asyncio_driver(module: str) -> None:
    assert of_asyncio(loaded_by(f"import {module}")) == []


def test_who_awaits_does_not_load_the_blocking_driver() -> None:
    modules = loaded_by(
        "import jetspark.aio, jetspark.aio.steps; import jetspark; jetspark.connect\n"
        "import jetspark.batcher; [getattr(jetspark.batcher, name) for name in jetspark.batcher.__all__]"
    )
    of_threads = ("jetspark.blocking", "jetspark.batcher.blocking")
    assert [name for name in sorted(modules) if name.startswith(of_threads)] == []


# A worker unpickles a reader or writer by its module; the processes that plan unpickle the format.
@pytest.mark.parametrize(
    "program",
    [
        "import pyspark_jetstream, pyspark_jetstream_events, pyspark_jetstream_kv, pyspark_jetstream_projection",
        "import jetspark.spark.stream.source",
        "import jetspark.spark.kv.reading, jetspark.spark.kv.writing",
        "import jetspark.spark.stream.sink",
        "from jetspark.spark import register, session",
    ],
)
def test_no_process_of_spark_loads_the_asyncio_driver(program: str) -> None:
    pytest.importorskip("pyspark")
    assert of_asyncio(loaded_by(program)) == []


def test_a_worker_that_reads_loads_nothing_that_writes() -> None:
    pytest.importorskip("pyspark")
    ours = {name for name in loaded_by("import jetspark.spark.stream.source") if name.startswith("jetspark.spark.")}
    writing = ("stream.sink", "stream.ledger", "kv", "engine")
    assert [name for name in sorted(ours) if name.removeprefix("jetspark.spark.").startswith(writing)] == []


def test_names_of_the_asyncio_driver_are_there_when_they_are_used() -> None:
    assert of_asyncio(loaded_by("import jetspark; jetspark.connect")) != []
    assert of_asyncio(loaded_by("from jetspark import Client")) != []
    assert of_asyncio(loaded_by("import jetspark; jetspark.aio.publisher")) != []
    assert set(jetspark.__all__) <= set(dir(jetspark))
    with pytest.raises(AttributeError, match="module 'jetspark' has no attribute 'conect'"):
        jetspark.conect  # type: ignore[attr-defined]  # noqa: B018


def test_names_of_the_asyncio_batcher_are_there_when_they_are_used() -> None:
    for name in ("Batcher", "FastIngestSink", "RetrySink"):
        assert "asyncio" in loaded_by(f"from jetspark.batcher import {name}")
    assert set(jetspark.batcher.__all__) <= set(dir(jetspark.batcher))
    with pytest.raises(AttributeError, match=r"module 'jetspark\.batcher' has no attribute 'Bather'"):
        jetspark.batcher.Bather  # type: ignore[attr-defined]  # noqa: B018
