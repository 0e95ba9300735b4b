"""State in buckets that carries its sequence: bulk load, compare-and-set store and its rounds, reading ranges.

Decisions are pure, and what needs a server is written as procedures (:mod:`jetspark.publish.steps`): an asyncio worker
and a Spark task run the same code. ``rounds`` brings states into a bucket, for every engine; ``store`` and ``changes``
write many keys at once, ``scan`` reads.
"""
