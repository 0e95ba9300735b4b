"""Projections: states folded from events. Every engine (live, a Spark stream, a Spark backfill) stores the same bytes.

The engines share three pure modules: ``projection_spec`` (the declaration), ``router`` (messages to events and keys)
and ``key_state`` (the fold of one key). ``state_header`` describes what is stored with a state.
"""
