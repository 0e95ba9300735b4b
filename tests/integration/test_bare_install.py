"""The wheel with nothing beside it: what must work does, and what needs an extra says which."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_bare(wheel: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` with the standard library and the wheel, and no site-packages at all."""
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": str(wheel), "PATH": "", "PYTHONWARNINGS": "error", **environment},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def test_the_wheel_is_typed_and_licensed(wheel: Path) -> None:
    assert (wheel / "jetspark" / "py.typed").is_file()
    assert list(wheel.glob("jetspark-*.dist-info/licenses/LICENSE"))


def test_import_needs_nothing_but_the_standard_library(wheel: Path) -> None:
    result = run_bare(
        wheel,
        "import sys, jetspark, jetspark.blocking, jetspark.server\n"
        "import jetspark.aio.steps, jetspark.blocking.steps, jetspark.state.store, jetspark.state.tables\n"
        "assert 'site-packages' not in ' '.join(m.__file__ or '' for m in list(sys.modules.values())"
        " if getattr(m, '__file__', None))\n"
        "print(jetspark.__version__)",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("0.")


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        (
            "from jetspark.core.auth import NKey, connect_fields, create_seed\n"
            "connect_fields(NKey(create_seed('user', bytes(32))), 'nonce')",
            "security",
        ),
        ("from jetspark.server import NatsServer\nNatsServer().start()", "server"),
        ("from jetspark.cli.main import run\nrun()", "cli"),
        ("from jetspark.app import Event", "app"),
    ],
    ids=["nkeys", "embedded server", "command line", "applications"],
)
def test_what_needs_an_extra_names_it(wheel: Path, code: str, extra: str) -> None:
    result = run_bare(wheel, code)
    assert result.returncode == 1
    assert f"pip install 'jetspark[{extra}]'" in result.stderr


def test_the_command_without_its_extra_is_one_line_and_no_traceback(wheel: Path) -> None:
    result = run_bare(wheel, "from jetspark.cli.main import run\nrun()")
    assert result.stderr.splitlines() == [
        "jetspark: the jetspark command needs the extra 'cli': pip install 'jetspark[cli]'"
    ]


# As where everything is installed but what the extra brings: an import of it fails.
WITHOUT_SPARK = """
import sys
sys.modules.update(pyspark=None, pyarrow=None)
from jetspark.cli.main import run
run()
"""


@pytest.mark.parametrize(
    "command",
    [
        ["run", "orders.app:app"],
        ["replay", "orders.app:app", "order_status", "--from-seq", "1"],
        ["replay", "orders.app:app", "order_status", "--from-seq", "1", "--dry-run"],
        ["rebuild", "orders.app:app", "order_status"],
        ["verify", "orders.app:app", "order_status"],
        ["what-if", "fulfilment.shop:app", "fulfilment", "--code", "fulfilment/shop.py"],
    ],
    ids=" ".join,
)
def test_the_engine_spark_without_its_extra_is_one_line_that_names_it(command: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_SPARK, *command, "--engine", "spark", "--servers", "nats://127.0.0.1:1"],
        cwd=EXAMPLES,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.splitlines() == [
        "jetspark: jetspark.spark needs the extra 'spark': pip install 'jetspark[spark]'"
    ]


def test_the_bare_install_talks_to_a_server(wheel: Path) -> None:
    from jetspark.server import NatsServer

    code = """
import os, asyncio, jetspark, jetspark.blocking
async def main():
    async with jetspark.connect(os.environ["URL"]) as nc:
        subscription = await nc.subscribe("bare")
        await nc.publish("bare", b"bones")
        print((await subscription.next(30)).data.decode())
asyncio.run(main())
with jetspark.blocking.connect(os.environ["URL"]) as nc:
    subscription = nc.subscribe("bare")
    nc.publish("bare", b"bones")
    print(subscription.next(30).data.decode())
"""
    with NatsServer(jetstream=False) as server:
        result = run_bare(wheel, code, URL=server.url, HOME=os.environ.get("HOME", ""))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["bones", "bones"]
