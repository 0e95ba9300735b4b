"""Dead letters: what is kept of events that could not be handled, and how an operator brings them back."""
