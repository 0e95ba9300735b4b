"""Our numbers next to our peers', measured in one interleaved run: ``make bench``, or ``python -m benchmarks``."""
