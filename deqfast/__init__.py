"""deqfast: fast deep equilibrium models for PyTorch."""

from . import _checkout as _checkout  # first: it lets a run from the checkout find deqfast.kernels
from .adjoints import JFB, SHINE, Implicit, Phantom, Unrolled
from .block import DEQBlock
from .cells import Cell, CellHooks, FCCell, LinearCell, ResidualCell
from .fc import fc_fixed_point
from .grouping import Groups
from .metrics import NCResult, NeuralCollapse, neural_collapse
from .ops import Availability, backends, release_memory
from .solution import Solution, Status
from .solve import solve
from .solvers import Anderson, Broyden, Picard

__version__ = "0.1.0"

__all__ = [
    "Anderson",
    "Availability",
    "Broyden",
    "Cell",
    "CellHooks",
    "DEQBlock",
    "FCCell",
    "Groups",
    "Implicit",
    "JFB",
    "LinearCell",
    "NCResult",
    "NeuralCollapse",
    "Phantom",
    "Picard",
    "ResidualCell",
    "SHINE",
    "Solution",
    "Status",
    "Unrolled",
    "backends",
    "fc_fixed_point",
    "neural_collapse",
    "release_memory",
    "solve",
]
