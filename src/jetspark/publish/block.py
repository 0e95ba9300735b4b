"""What is used inside one ``with`` block, because leaving it is what stores, confirms or takes back. Pure."""

from __future__ import annotations

from typing import Literal, Self

from jetspark.errors import UsageError

__all__ = ["Block"]


class Block:
    """Before its block a batch, publisher or transaction accepts nothing: it would be lost, or never confirmed."""

    _line: str
    """How the block begins, for those who forgot it."""
    _place: Literal["before", "inside", "after"] = "before"

    def _enter(self) -> Self:
        """Begin the block; our own modules that leave it by themselves call this, too."""
        if self._place != "before":
            raise UsageError(f"{self._name} was entered before; make another one: {self._line}")
        self._place = "inside"
        return self

    def _leave_block(self) -> None:
        self._place = "after"

    def _check_inside(self) -> None:
        """Refuse what is sent outside of the block.

        Raises:
            UsageError: It has not begun, or is over.
        """
        if self._place == "before":
            raise UsageError(f"{self._name} is used outside of its block, which stores or confirms: {self._line}")
        if self._place == "after":
            raise UsageError(f"the block of {self._name} is over; make another one: {self._line}")

    def _check_begun(self) -> None:
        """:meth:`_check_inside` for those that say by themselves how they ended.

        Raises:
            UsageError: The block has not begun.
        """
        if self._place == "before":
            self._check_inside()

    @property
    def _name(self) -> str:
        return type(self).__name__
