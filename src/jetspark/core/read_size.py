"""How many bytes to read at a time. Pure.

Reading much at a time saves calls, up to a point: when more objects are made than CPython's garbage collector lets pass
(700 in 3.11), it looks through them all, finds every one in use, and keeps them for a costlier look later. A chunk with
fewer messages is read, handed out and gone before that. So many small messages are read in smaller chunks. That takes a
quarter off the time of a plain message of 128 bytes.
"""

from __future__ import annotations

__all__ = ["LEAST_BYTES", "MAX_CHUNK_MESSAGES", "MOST_BYTES", "ReadSize"]

MOST_BYTES = 256 << 10
LEAST_BYTES = 16 << 10
# Below the collector's 700: a few other objects come with each chunk.
MAX_CHUNK_MESSAGES = 600


class ReadSize:
    """What the next read may bring, by what the last ones brought."""

    def __init__(self) -> None:
        self.bytes = MOST_BYTES

    def on_chunk(self, size: int, messages: int) -> None:
        """Choose the next size, after a chunk of ``size`` bytes with this number of messages."""
        if messages > MAX_CHUNK_MESSAGES:
            self.bytes = max(size * MAX_CHUNK_MESSAGES // messages, LEAST_BYTES)
        elif size >= self.bytes and 2 * messages < MAX_CHUNK_MESSAGES:  # there was more, of larger ones than before
            self.bytes = min(2 * self.bytes, MOST_BYTES)
