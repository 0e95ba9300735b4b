"""State in buckets that carries its sequence: folding events, bulk load and compare-and-set store, reading ranges.

Decisions are pure, and what needs a server is written as procedures (:mod:`jetspark.publish.steps`): an asyncio worker
and a Spark task run the same code. ``fold`` is the rule, ``rounds`` brings states into a bucket, for every engine,
and ``apply`` does both; ``store`` and ``changes`` write many keys at once, ``scan`` reads.
"""
