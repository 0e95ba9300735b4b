"""What every conformance test starts from: a driver. Its server is one of `support.fixtures`."""

from __future__ import annotations

import pytest
from support.drivers import Driver
from support.loops import drivers_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with a ``driver`` runs on each driver that can differ in it, unless it names its drivers itself."""
    marks = metafunc.definition.iter_markers("parametrize")
    # A mark has "driver, size" as well as ("driver", "size").
    names_its_own = any("driver" in mark.args[0] for mark in marks)
    if "driver" in metafunc.fixturenames and not names_its_own:
        drivers = drivers_of(metafunc.definition.path.stem, metafunc.definition.originalname)
        metafunc.parametrize("driver", drivers, indirect=True)


@pytest.fixture
def driver(request: pytest.FixtureRequest) -> Driver:
    return Driver(request.param)
