"""An order pipeline: events into JetStream, through Spark, state into buckets. Run it: ``python -m orders``."""
