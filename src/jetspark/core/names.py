"""Names that no other connection uses: of inboxes, requests, batches, and of objects at the server. Pure.

The prefix of a connection's inbox is random (``new_inbox``); the driver supplies the random bits. All other names are
made of that inbox and a number that the connection uses once (``Names``).
"""

from __future__ import annotations

from jetspark.core.subjects import validate_subject

__all__ = ["Names", "new_inbox"]

_MASK = (1 << 64) - 1
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def new_inbox(prefix: str, random_bits: int) -> str:
    """``prefix`` and a token made of 64 of ``random_bits``.

    The token has 11 characters, enough that no two connections draw the same. A longer one would cost bytes in every
    message to be answered, and in every message of an ordered consumer, whose name contains it.
    """
    digits, random_bits = [], random_bits & _MASK
    while random_bits:
        random_bits, digit = divmod(random_bits, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return validate_subject(f"{prefix}.{''.join(digits) or '0'}")


class Names:
    """Names of one connection, each made of its inbox and a number that is used once."""

    def __init__(self, inbox: str) -> None:
        """``inbox`` is a subject prefix no other connection has."""
        self.inbox = inbox
        self._last_token = 0

    def next_token(self) -> int:
        """A number that this connection has not used."""
        self._last_token += 1
        return self._last_token

    def new_inbox(self) -> str:
        """A reply subject that no other subscription uses."""
        return f"{self.inbox}.many.{self.next_token()}"

    def new_name(self) -> str:
        """A name for an object at the server, such as a consumer."""
        return f"{self.inbox.rpartition('.')[2]}-{self.next_token()}"

    def new_batch(self) -> tuple[str, str]:
        """A prefix of reply subjects and a batch id below it."""
        return self.inbox.rpartition(".")[0], self.new_name()
