"""The previous value of f, which a step compares with the new one."""

from __future__ import annotations

from torch import Tensor


class PreviousValue:
    """Previous value of f, kept without a copy unless f writes all its values to one buffer.

    The second call shows whether f does. Until then the first value is copied, and its own memory stays in use, so that
    torch does not reuse it.
    """

    def __init__(self) -> None:
        self._first: Tensor | None = None  # as f returned it
        self._is_overwritten = False

    def check(self, fz: Tensor, previous: Tensor, k: int) -> None:
        """Raise RuntimeError if f(z) = `fz`, its value number `k` from 0, has overwritten the `previous` value."""
        if k == 1 and self._first is not None:
            self._is_overwritten = fz.data_ptr() == self._first.data_ptr()
        elif k > 1 and not self._is_overwritten and fz.data_ptr() == previous.data_ptr():
            raise RuntimeError(f"f returned, at call {k + 1}, the memory of its previous value; return a fresh tensor")

    def keep(self, fz: Tensor, k: int) -> Tensor:
        """Return the value as it is to be kept: a copy if f may overwrite it."""
        self._first = fz if k == 0 else None
        return fz.clone() if k == 0 or self._is_overwritten else fz
