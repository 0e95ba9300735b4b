"""JetSpark: event streams in, Spark through, state out.

This is the asyncio API. ``import jetspark.blocking as jetspark`` has the same names without ``await``. The asyncio
driver is loaded on first use of one of its names, so blocking programs and Spark's workers do not load it.
"""

from typing import TYPE_CHECKING

from jetspark import errors as _errors
from jetspark.core import exports as _core
from jetspark.core.exports import *
from jetspark.core.version import VERSION
from jetspark.errors import *
from jetspark.jetstream import exports as _jetstream
from jetspark.jetstream.exports import *
from jetspark.publish import exports as _publish
from jetspark.publish.exports import *

if TYPE_CHECKING:
    from jetspark.aio import (
        AtomicBatch,
        Client,
        Consumer,
        FastBatch,
        FastPublisher,
        JetStream,
        JetStreamMessage,
        KeyValue,
        Message,
        ObjectStore,
        OrderedConsumer,
        Stream,
        Subscription,
        connect,
    )
else:

    def __getattr__(name):
        if name != "aio" and name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        import jetspark.aio

        globals()[name] = found = jetspark.aio if name == "aio" else getattr(jetspark.aio, name)
        return found

    def __dir__():
        return sorted({*globals(), *__all__})


__all__ = [
    "AtomicBatch",
    "Client",
    "Consumer",
    "FastBatch",
    "FastPublisher",
    "JetStream",
    "JetStreamMessage",
    "KeyValue",
    "Message",
    "ObjectStore",
    "OrderedConsumer",
    "Stream",
    "Subscription",
    "connect",
]
__all__ += _core.__all__
__all__ += _errors.__all__
__all__ += _jetstream.__all__
__all__ += _publish.__all__

__version__ = VERSION
