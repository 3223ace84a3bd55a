"""deqfast: fast deep equilibrium models for PyTorch."""

from typing import TYPE_CHECKING, Any

from . import _checkout as _checkout  # first: it lets a run from the checkout find deqfast.kernels
from . import metrics
from .adjoints import JFB, SHINE, Implicit, Phantom, Unrolled
from .block import DEQBlock
from .cells import Cell, CellHooks, FCCell, LinearCell, MonotoneCell, ResidualCell, SolveDropout
from .fc import fc_fixed_point
from .grouping import Groups
from .metrics import NCResult, neural_collapse
from .ops import Availability, backends, release_memory
from .solution import Solution, Status
from .solve import solve
from .solvers import Anderson, Broyden, Picard

if TYPE_CHECKING:
    from .metrics import NeuralCollapse

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
    "MonotoneCell",
    "NCResult",
    "NeuralCollapse",
    "Phantom",
    "Picard",
    "ResidualCell",
    "SHINE",
    "Solution",
    "SolveDropout",
    "Status",
    "Unrolled",
    "backends",
    "fc_fixed_point",
    "neural_collapse",
    "release_memory",
    "solve",
]


def __getattr__(name: str) -> Any:
    """Import the metric where it is asked for, as `deqfast.metrics` does."""
    if name == "NeuralCollapse":
        return metrics.NeuralCollapse
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
