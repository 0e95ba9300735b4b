"""Measurements of a server that users run: ``jetspark bench``."""
