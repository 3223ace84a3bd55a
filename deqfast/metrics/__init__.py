"""Metrics of neural collapse, as a function and as a torchmetrics metric."""

from typing import TYPE_CHECKING, Any

from .conventions import VectorSpread
from .etf import ETFClassifier
from .geometry import ClassGeometry, VectorGeometry, class_geometry
from .neural_collapse import NCResult, neural_collapse

if TYPE_CHECKING:
    from .metric import NeuralCollapse

__all__ = ["NCResult", "NeuralCollapse", "VectorSpread", "neural_collapse"]
__all__ += ["ClassGeometry", "ETFClassifier", "VectorGeometry", "class_geometry"]


def __getattr__(name: str) -> Any:
    """Import the metric when it is asked for: torchmetrics takes as long to import as torch."""
    if name == "NeuralCollapse":
        from .metric import NeuralCollapse

        return NeuralCollapse
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
