"""The functions of ``pyarrow.compute``, imported at their first use.

Most of Spark's Python processes only plan or commit and call none of them, and the module takes 50 ms to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    globals()[name] = found = getattr(import_module("pyarrow.compute"), name)
    return found
