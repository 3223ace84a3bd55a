"""Cells: the maps z -> f(z, x) whose fixed point a DEQBlock finds, and the protocol that a cell follows."""

from .dropout import SolveDropout as SolveDropout
from .fully_connected import FCCell as FCCell
from .linear import LinearCell as LinearCell
from .monotone import MonotoneCell as MonotoneCell
from .protocol import Cell as Cell
from .protocol import CellHooks as CellHooks
from .residual import ResidualCell as ResidualCell
from .subhomogeneous import SubhomogeneousCell as SubhomogeneousCell
