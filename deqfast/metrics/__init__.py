"""Metrics of neural collapse, as a function and as a torchmetrics metric."""

from .metric import NeuralCollapse
from .neural_collapse import NCResult, neural_collapse

__all__ = ["NCResult", "NeuralCollapse", "neural_collapse"]
