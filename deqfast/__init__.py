"""deqfast: fast deep equilibrium models for PyTorch."""

from typing import TYPE_CHECKING, Any

from . import _checkout as _checkout  # first: it lets a run from the checkout find deqfast.kernels
from . import metrics, regularize
from .api.block import DEQBlock
from .api.carry import Carry
from .api.fc_fixed_point import fc_fixed_point
from .api.find_fixed_points import FixedPoints, find_fixed_points
from .api.fixed_point import fixed_point, root
from .api.graphed_step import make_graphed_step
from .api.solve import solve
from .cells import Cell, CellHooks, FCCell, LinearCell, MonotoneCell, ResidualCell, SolveDropout, SubhomogeneousCell
from .diagnosis import Diagnosis, diagnose
from .gradients import JFB, SHINE, Implicit, Neumann, Phantom, Reversible, Unrolled
from .metrics import NCResult, neural_collapse
from .ops import Availability, backends, release_memory
from .solution import Solution, Status
from .solvers import Anderson, Auto, Broyden, MixedAnderson, Picard, Solver
from .state.groups import Groups
from .transforms.export import package_options

if TYPE_CHECKING:
    from .metrics import NeuralCollapse

__version__ = "0.1.0"

__all__ = [
    "Anderson",
    "Auto",
    "Availability",
    "Broyden",
    "Carry",
    "Cell",
    "CellHooks",
    "DEQBlock",
    "Diagnosis",
    "FCCell",
    "FixedPoints",
    "Groups",
    "Implicit",
    "JFB",
    "LinearCell",
    "MixedAnderson",
    "MonotoneCell",
    "NCResult",
    "Neumann",
    "NeuralCollapse",
    "Phantom",
    "Picard",
    "ResidualCell",
    "Reversible",
    "SHINE",
    "Solution",
    "SolveDropout",
    "Solver",
    "Status",
    "SubhomogeneousCell",
    "Unrolled",
    "backends",
    "diagnose",
    "fc_fixed_point",
    "find_fixed_points",
    "fixed_point",
    "make_graphed_step",
    "neural_collapse",
    "package_options",
    "regularize",
    "release_memory",
    "root",
    "solve",
]


def __getattr__(name: str) -> Any:
    """Import the metric when it is first used, as `deqfast.metrics` does."""
    if name == "NeuralCollapse":
        return metrics.NeuralCollapse
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
