"""A base class for objects that work only inside a ``with`` block: leaving it stores, confirms or discards. Pure."""

from __future__ import annotations

from typing import Literal, Self

from jetspark.errors import UsageError

__all__ = ["Block"]


class Block:
    """Refuses messages outside of the block, where they would be lost or never confirmed."""

    _line: str
    """An example of the block's first line, for error messages."""
    _phase: Literal["before", "inside", "after"] = "before"

    def _enter(self) -> Self:
        """Begin the block; also called by modules that leave it without ``with``."""
        if self._phase != "before":
            raise UsageError(f"{self._name} was entered before; make another one: {self._line}")
        self._phase = "inside"
        return self

    def _leave_block(self) -> None:
        self._phase = "after"

    def _check_inside(self) -> None:
        """Refuse calls outside of the block.

        Raises:
            UsageError: The block has not begun, or is over.
        """
        if self._phase == "before":
            raise UsageError(f"{self._name} is used outside of its block, which stores or confirms: {self._line}")
        if self._phase == "after":
            raise UsageError(f"the block of {self._name} is over; make another one: {self._line}")

    def _check_begun(self) -> None:
        """:meth:`_check_inside` for subclasses that report their end themselves.

        Raises:
            UsageError: The block has not begun.
        """
        if self._phase == "before":
            self._check_inside()

    @property
    def _name(self) -> str:
        return type(self).__name__
