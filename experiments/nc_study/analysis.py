"""Measurements of a trained network: its features of some images, and the Jacobian of its last block."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import deqfast

from .data import StudyData
from .networks import ResNet18
from .record import SpectralRadius

FEATURE_IMAGES = 500
RADIUS_IMAGES = 50
POWER_STEPS = 60
SETTLING_STEPS = 20


def shown_features(network: ResNet18, data: StudyData) -> dict[str, np.ndarray]:
    """Features (N, D) in half precision and labels (N,) of the first training images of every class, for a figure."""
    shown = _first_images(data, FEATURE_IMAGES)
    network.eval()
    with torch.no_grad():
        features = network(data.normalise(data.train_images[shown])).features
    return {"features": features.half().cpu().numpy(), "labels": data.train_labels[shown].cpu().numpy()}


def last_block_radius(network: ResNet18, data: StudyData) -> SpectralRadius | None:
    """Spectral radius at the first training images of every class, if it is finite; None without a fixed point."""
    if not isinstance(network.last, deqfast.DEQBlock):
        return None
    chosen = _first_images(data, RADIUS_IMAGES)
    network.eval()
    radii = spectral_radius(network, data.normalise(data.train_images[chosen]))
    known = radii.isfinite()
    return SpectralRadius(tuple(data.train_labels[chosen][known].tolist()), tuple(radii[known].tolist()))


def _first_images(data: StudyData, total: int) -> Tensor:
    """Indices of the first training images of every class, at most `total`, equally many if the class has them."""
    each = max(1, total // data.classes)
    return torch.cat([(data.train_labels == label).nonzero()[:each, 0] for label in range(data.classes)])


def spectral_radius(network: ResNet18, images: Tensor) -> Tensor:
    """Spectral radii (B,) of df/dz at each image's fixed point, by power iteration on the transposed Jacobian.

    The estimate is the mean growth after the first few steps, which is also right for a complex pair.
    """
    with torch.no_grad():
        x = network.trunk(network.stem(images))
        z = network.last(x)
    z.requires_grad_()
    cell: Any = network.last.cell
    value = cell(z, x)
    vector = torch.randn(z.shape, generator=torch.Generator().manual_seed(0)).to(z)
    logarithms = []
    for _ in range(POWER_STEPS):
        norm = vector.flatten(1).norm(dim=1)
        logarithms.append(norm.double().log())
        vector = vector / norm.clamp(min=torch.finfo(norm.dtype).tiny)[:, None, None, None]
        (vector,) = torch.autograd.grad(value, z, vector, retain_graph=True)
    return torch.stack(logarithms[SETTLING_STEPS:]).mean(0).exp()
