"""Reply subjects nobody else uses. Randomness comes from the driver."""

from __future__ import annotations

from jetspark.core.subjects import validate_subject

__all__ = ["new_inbox"]

_MASK = (1 << 64) - 1
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def new_inbox(prefix: str, random_bits: int) -> str:
    """``prefix`` and a token made of 64 of ``random_bits``.

    They are 11 characters, and no two connections ever draw the same. More would be sent for nothing: every message to
    be answered carries them, and every message of an ordered consumer, whose name is made of them.
    """
    digits, random_bits = [], random_bits & _MASK
    while random_bits:
        random_bits, digit = divmod(random_bits, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return validate_subject(f"{prefix}.{''.join(digits) or '0'}")
