"""The public names of this layer; ``jetspark`` and ``jetspark.blocking`` both export them all."""

from jetspark.publish.endless import FastPublisherOptions, Refused
from jetspark.publish.fast_options import FastBatchOptions, FastReceipt, Refusal

__all__ = ["FastBatchOptions", "FastPublisherOptions", "FastReceipt", "Refusal", "Refused"]
