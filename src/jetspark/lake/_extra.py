"""Imported first: without the extra, its error says how to install it."""

from jetspark.errors import MissingExtra

__all__ = ["INSTALLED"]

try:
    import pyarrow
except ImportError as error:
    raise MissingExtra("jetspark.lake", "lake") from error

INSTALLED = {"pyarrow": pyarrow.__version__}
