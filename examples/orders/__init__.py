"""A shop: orders are placed, paid and delivered; cancelled ones are refunded. ``jetspark demo`` runs it."""
