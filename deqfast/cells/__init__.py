"""Cells: the maps z -> f(z, x) whose fixed point a DEQBlock finds, and the protocol that a cell follows."""

from __future__ import annotations

from .dropout import SolveDropout
from .fully_connected import FCCell
from .linear import LinearCell
from .monotone import MonotoneCell
from .protocol import Cell, CellHooks
from .residual import ResidualCell
from .subhomogeneous import SubhomogeneousCell

__all__ = [
    "Cell",
    "CellHooks",
    "FCCell",
    "LinearCell",
    "MonotoneCell",
    "ResidualCell",
    "SolveDropout",
    "SubhomogeneousCell",
]
