"""Names that no other connection uses: of inboxes, requests, batches, and of things at the server."""

from __future__ import annotations

__all__ = ["Names"]


class Names:
    """What a connection calls its own, made of its inbox and a number that is used once."""

    def __init__(self, inbox: str) -> None:
        """``inbox`` is a subject prefix no other connection has."""
        self.inbox = inbox
        self._last_token = 0

    def next_token(self) -> int:
        """A number that this connection has not used."""
        self._last_token += 1
        return self._last_token

    def new_inbox(self) -> str:
        """A reply subject that is used by nobody else, for a subscription of its own."""
        return f"{self.inbox}.many.{self.next_token()}"

    def new_name(self) -> str:
        """A name for something at the server."""
        return f"{self.inbox.rpartition('.')[2]}-{self.next_token()}"

    def new_batch(self) -> tuple[str, str]:
        """A prefix of reply subjects and a batch id below it."""
        return self.inbox.rpartition(".")[0], self.new_name()
