"""The batcher and its sinks with asyncio; :mod:`jetspark.batcher` has the public names."""
