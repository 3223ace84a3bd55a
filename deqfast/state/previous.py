"""The previous value of f, which a step compares with the new one."""

from __future__ import annotations

from torch import Tensor


class PreviousValue:
    """Previous value of f, kept without a copy unless f writes all its values to one buffer.

    The second call shows whether f does, unless an earlier solve has. Until then the first value is copied, and its own
    memory stays in use, so that torch does not reuse it.

    Attributes:
        is_overwritten: whether f does; None: not known yet.
    """

    def __init__(self, is_overwritten: bool | None = None) -> None:
        self.is_overwritten = is_overwritten
        self._first: Tensor | None = None  # as f returned it

    def check(self, fz: Tensor, previous: Tensor, k: int) -> None:
        """Raise RuntimeError if f(z) = `fz`, its value number `k` from 0, has overwritten the `previous` value.

        In a loop on the device k is negative.
        """
        if self._first is not None:
            self.is_overwritten, self._first = fz.data_ptr() == self._first.data_ptr(), None
        elif self.is_overwritten is False and fz.data_ptr() == previous.data_ptr():
            call = f"call {k + 1}" if k >= 0 else "a later call"
            raise RuntimeError(f"f returned, at {call}, the memory of its previous value; return a fresh tensor")

    def keep(self, fz: Tensor) -> Tensor:
        """Return the value as it is to be kept: a copy if f may overwrite it."""
        if self.is_overwritten is None:
            self._first = fz
        return fz if self.is_overwritten is False else fz.clone()
