"""Projections: state that events are folded into, the same bytes whichever engine does it.

``declaring`` says what a projection is, ``folding`` what an event does to a key; both are pure, and all that the
engines (live, a Spark stream, a Spark backfill) have in common. What they store is described in ``marks``.
"""
