"""The public names of this layer; ``jetspark`` and ``jetspark.blocking`` both export them all."""

from jetspark.publish.fast_options import FastBatchOptions, FastPublisherOptions, FastReceipt, Refusal, Refused

__all__ = ["FastBatchOptions", "FastPublisherOptions", "FastReceipt", "Refusal", "Refused"]
