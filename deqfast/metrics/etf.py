"""A classifier whose weights are a fixed simplex ETF."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._checks import check_count, check_number
from .geometry import simplex


class ETFClassifier(nn.Module):
    """Linear classifier without bias whose weight is a simplex ETF and is not trained.

    W = scale sqrt(K / (K - 1)) V Q^T with V V^T = I - 11^T / K and orthonormal columns Q (D, K - 1). Each of the K rows
    has the length `scale`, and two rows have the cosine -1 / (K - 1). Features then learn to meet the classifier, also
    under imbalance. The state dict holds the weight. Source: Yang et al., NeurIPS 2022, arXiv 2203.09081.

    Args:
        in_features: D, at least K - 1.
        num_classes: K, at least 2.
        scale: length of a row, more than 0.
        seed: of the random Q. On another machine it may give another weight.

    Raises:
        TypeError, ValueError: an argument is not as above.

    Examples:
        >>> classifier = deqfast.metrics.ETFClassifier(64, 10)
        >>> classifier(torch.randn(5, 64)).shape, len(list(classifier.parameters()))
        (torch.Size([5, 10]), 0)
    """

    weight: Tensor

    def __init__(self, in_features: int, num_classes: int, scale: float = 1.0, seed: int = 0) -> None:
        super().__init__()
        check_count("num_classes", num_classes, 2)
        check_count("in_features", in_features)
        check_number("scale", scale, 0.0, low_open=True)
        if in_features < num_classes - 1:
            needed = f"a simplex of {num_classes} classes needs {num_classes - 1}"
            raise ValueError(f"in_features is {in_features}; {needed}")
        generator = torch.Generator().manual_seed(seed)
        normal = torch.randn(in_features, num_classes - 1, dtype=torch.float64, generator=generator)
        _, vectors = torch.linalg.eigh(simplex(torch.ones(num_classes, dtype=torch.float64)))
        corners = vectors[:, 1:] * (num_classes / (num_classes - 1)) ** 0.5  # of the one eigenvalue that is 0
        weight = scale * corners @ torch.linalg.qr(normal).Q.T
        self.register_buffer("weight", weight.to(torch.get_default_dtype()))

    def forward(self, features: Tensor) -> Tensor:
        """Return the logits (..., K) of features (..., D)."""
        return nn.functional.linear(features, self.weight)

    def extra_repr(self) -> str:
        """Return the sizes, for the module's representation."""
        num_classes, in_features = self.weight.shape
        return f"in_features={in_features}, num_classes={num_classes}"
