"""A small billing service: invoices fall due, cards are charged, customers are told, balances are kept."""
