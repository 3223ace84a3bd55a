"""deqfast: fast deep equilibrium models for PyTorch."""

from pathlib import Path

# The Triton kernels live in ../kernels and are installed as deqfast.kernels. A run from the checkout, without an
# install, finds them through this path.
_root = Path(__file__).resolve().parent.parent
if (_root / "csrc").is_dir() and (_root / "kernels").is_dir():
    __path__.append(str(_root))

from .adjoint import JFB, SHINE, Implicit, Phantom, Unrolled  # noqa: E402  (after __path__)
from .block import DEQBlock  # noqa: E402  (after __path__)
from .cells import FCCell, LinearCell, ResidualCell  # noqa: E402  (after __path__)
from .fc import fc_fixed_point  # noqa: E402  (after __path__)
from .neural_collapse import NCResult, NeuralCollapse, neural_collapse  # noqa: E402  (after __path__)
from .ops import Availability, backends, release_memory  # noqa: E402  (after __path__)
from .solution import Solution, Status  # noqa: E402  (after __path__)
from .solve import solve  # noqa: E402  (after __path__)
from .solvers import Anderson, Broyden, Picard  # noqa: E402  (after __path__)

__version__ = "0.1.0"

__all__ = [
    "Anderson",
    "Availability",
    "Broyden",
    "DEQBlock",
    "FCCell",
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
