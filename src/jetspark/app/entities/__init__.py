"""Entities: state in a bucket that is the truth, changed together with the events and timers that go with it."""
