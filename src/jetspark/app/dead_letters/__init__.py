"""Dead letters: events that could not be handled, and the operations that list, redrive and discard them."""
