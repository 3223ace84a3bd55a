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

__all__ = ["DEQBlock", "Groups", "Solution", "Status", "fc_fixed_point", "fixed_point", "root", "solve"]
__all__ += ["Anderson", "Auto", "Broyden", "MixedAnderson", "Picard", "Solver"]
__all__ += ["Implicit", "JFB", "Neumann", "Phantom", "Reversible", "SHINE", "Unrolled"]
__all__ += ["Cell", "CellHooks", "FCCell", "LinearCell", "MonotoneCell", "ResidualCell", "SubhomogeneousCell"]
__all__ += ["Carry", "Diagnosis", "FixedPoints", "SolveDropout", "diagnose", "find_fixed_points", "make_graphed_step"]
__all__ += ["NCResult", "NeuralCollapse", "neural_collapse", "regularize"]
__all__ += ["Availability", "backends", "package_options", "release_memory"]


def __getattr__(name: str) -> Any:
    """Import the metric when it is first used, as `deqfast.metrics` does."""
    if name == "NeuralCollapse":
        return metrics.NeuralCollapse
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
