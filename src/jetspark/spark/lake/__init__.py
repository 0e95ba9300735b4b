"""Archives of streams on Spark."""
