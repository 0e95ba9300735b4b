"""Imported first: without the extra, its error says how to install it."""

from jetspark.errors import MissingExtra

__all__ = ["INSTALLED"]

try:
    import msgspec
except ImportError as error:
    raise MissingExtra("jetspark.app", "app") from error

INSTALLED = {"msgspec": msgspec.__version__}
