"""Imported before everything else here: without the extra the error says how to install it."""

from jetspark.errors import MissingExtra

__all__ = ["INSTALLED"]

try:
    import pyarrow
    import pyspark
except ImportError as error:
    raise MissingExtra("jetspark.spark", "spark") from error

INSTALLED = {"pyarrow": pyarrow.__version__, "pyspark": pyspark.__version__}
