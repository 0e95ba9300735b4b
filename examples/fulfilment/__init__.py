"""An order from its placing to its shipping, or to its end: see README.md."""
