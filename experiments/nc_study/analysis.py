"""Measurements of a trained network: its features of some images, and the Jacobian of its last block."""

from __future__ import annotations

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


def shown_features(network: ResNet18, data: StudyData) -> dict[str, np.ndarray]:
    """Features (N, D) in half precision and labels (N,) of the first training images of every class, for a figure."""
    shown = _first_images(data, FEATURE_IMAGES)
    network.eval()
    with torch.no_grad():
        features = network(data.normalise(data.train_images[shown])).features
    return {"features": features.half().cpu().numpy(), "labels": data.train_labels[shown].cpu().numpy()}


def last_block_radius(network: ResNet18, data: StudyData) -> SpectralRadius | None:
    """Spectral radius of the last block's cell at the fixed points of the first training images of every class, if it
    is finite; None without a fixed point."""
    if not isinstance(network.last, deqfast.DEQBlock):
        return None
    chosen = _first_images(data, RADIUS_IMAGES)
    network.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        x = network.trunk(network.stem(data.normalise(data.train_images[chosen])))
        radii = deqfast.regularize.spectral_radius(network.last.cell, network.last(x), x, POWER_STEPS)
    known = radii.isfinite()
    return SpectralRadius(tuple(data.train_labels[chosen][known].tolist()), tuple(radii[known].tolist()))


def _first_images(data: StudyData, total: int) -> Tensor:
    """Indices of the first training images of every class, at most `total`, equally many if the class has them."""
    each = max(1, total // data.classes)
    return torch.cat([(data.train_labels == label).nonzero()[:each, 0] for label in range(data.classes)])
