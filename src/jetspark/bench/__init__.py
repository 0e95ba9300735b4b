"""Our numbers next to our peers', measured in one interleaved run: ``jetspark bench``."""
