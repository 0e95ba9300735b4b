"""Buckets as Spark tables: the format ``jetstream_kv``."""
