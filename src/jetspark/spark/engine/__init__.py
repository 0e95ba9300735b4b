"""Folds run by Spark: the format ``jetstream_fold``."""
