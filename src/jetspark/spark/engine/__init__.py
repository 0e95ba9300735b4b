"""Projections of applications, folded, replayed and compared by Spark."""
