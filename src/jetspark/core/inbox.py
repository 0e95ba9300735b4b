"""Reply subjects nobody else uses. Randomness comes from the driver."""

from __future__ import annotations

from jetspark.core.subjects import validate_subject

__all__ = ["new_inbox"]

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


def new_inbox(prefix: str, random_bits: int) -> str:
    """``prefix`` and a token made of ``random_bits``; 128 of them are as good as a UUID, in 22 characters."""
    digits = []
    while random_bits:
        random_bits, digit = divmod(random_bits, len(_ALPHABET))
        digits.append(_ALPHABET[digit])
    return validate_subject(f"{prefix}.{''.join(digits) or '0'}")
