"""The blocking driver: the names of :mod:`jetspark`, without ``await``.

``import jetspark.blocking as jetspark``. Safe to use from several threads. Each connection has one thread of its own
for reading, pings and reconnects. A connection belongs to the process that made it: make it after a fork.
"""

from jetspark import errors as _errors
from jetspark.blocking import exports as _driver
from jetspark.blocking.exports import *
from jetspark.core import exports as _core
from jetspark.core.exports import *
from jetspark.errors import *
from jetspark.jetstream import exports as _jetstream
from jetspark.jetstream.exports import *
from jetspark.publish import exports as _publish
from jetspark.publish.exports import *

__all__ = [*_driver.__all__]
__all__ += _core.__all__
__all__ += _errors.__all__
__all__ += _jetstream.__all__
__all__ += _publish.__all__
