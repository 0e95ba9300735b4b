"""Streams as Spark sources and sinks: the format ``jetstream``."""
