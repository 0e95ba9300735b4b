"""States in buckets, stored with the sequence of their last event: bulk loads, compare-and-set stores, range reads.

Decisions are pure. Requests to the server are procedures (:mod:`jetspark.publish.steps`), so asyncio workers and Spark
tasks run the same code. ``rounds`` stores folded states for every engine; ``store`` and ``changes`` write many keys at
once; ``scan`` reads ranges of streams.
"""
