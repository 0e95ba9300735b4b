"""Which tests go first."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# Of several processes, the suite takes as long as the one that ends last: it should not begin a file of Spark tests,
# which takes minutes, when the others have nothing left to do.
LONG_FIRST = ["integration", "conformance", "simulation", "interop", "typing", "unit"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG_FIRST.index(item.path.relative_to(TESTS).parts[0]))
