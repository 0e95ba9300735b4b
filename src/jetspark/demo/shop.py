"""The application that is shown: it is an example beside the package, and found by its folder."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jetspark.core.version
from jetspark.errors import ConfigError

if TYPE_CHECKING:
    from jetspark.app import App

__all__ = ["RELEASE_1", "RELEASE_2", "Shop", "find_examples", "load_shop"]

RELEASE_1, RELEASE_2 = "orders.app:app", "orders.release2:app"


@dataclass(frozen=True, slots=True)
class Shop:
    """The example ``orders``."""

    folder: Path
    """The folder on Python's path from which this process, the workers and Spark import it."""
    release1: App
    release2: App
    """The next release, with another fold of the revenue and a handler that refuses nothing."""
    traffic: Any
    """The module that makes events."""
    max_refund_cents: int
    """The largest refund that the handler of the first release makes."""


def find_examples() -> Path:
    """Find the examples: beside the installed package, or in the repository.

    Raises:
        ConfigError: Neither an installed nor a source tree has the example application.
    """
    package = Path(jetspark.core.version.__file__).parents[1]
    for folder in (package / "_examples", package.parents[1] / "examples"):
        if (folder / "orders" / "app.py").exists():
            return folder
    raise ConfigError("the example 'orders' is not part of this installation; clone the repository")


def load_shop() -> Shop:
    folder = find_examples()
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    first = importlib.import_module("orders.app")
    second = importlib.import_module("orders.release2")
    traffic = importlib.import_module("orders.traffic")
    return Shop(folder, first.app, second.app, traffic, first.MAX_REFUND_CENTS)
