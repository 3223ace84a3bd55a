"""What is measured once, of a trained network: its features of some images, and the Jacobian of its last block."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

import deqfast

from .data import StudyData
from .models import ResNet18
from .record import SpectralRadius

FEATURE_IMAGES = 500
RADIUS_IMAGES = 50
POWER_STEPS = 60
SETTLING_STEPS = 20


def analyse(network: ResNet18, data: StudyData) -> tuple[SpectralRadius | None, dict[str, np.ndarray]]:
    """The spectral radius at some training images (None for an explicit network), and arrays: features (N, D) in half
    precision and labels (N,) of the first training images of every class.

    The network computes in float32 here, whatever it was trained in."""
    network.eval()
    shown = first_images(data, FEATURE_IMAGES)
    with torch.no_grad():
        features = network(data.normalise(data.train_images[shown])).features
    arrays = {"features": features.half().cpu().numpy(), "labels": data.train_labels[shown].cpu().numpy()}
    radius = None
    if isinstance(network.last, deqfast.DEQBlock):
        chosen = first_images(data, RADIUS_IMAGES)
        found = spectral_radius(network, data.normalise(data.train_images[chosen]))
        known = found.isfinite()
        radius = SpectralRadius(tuple(data.train_labels[chosen][known].tolist()), tuple(found[known].tolist()))
    return radius, arrays


def first_images(data: StudyData, total: int) -> Tensor:
    """Indices of the first training images of every class, at most `total`, equally many where the class has them."""
    each = max(1, total // data.classes)
    ranks = [(data.train_labels == label).nonzero()[:each, 0] for label in range(data.classes)]
    return torch.cat(ranks)


def spectral_radius(network: ResNet18, images: Tensor) -> Tensor:
    """(B,) largest modulus of the eigenvalues of df/dz at each image's fixed point, by power iteration on the
    transposed Jacobian: the mean growth over the steps after the first few, which also holds for a complex pair."""
    with torch.no_grad():
        x = network.trunk(network.stem(images))
        z = network.last(x)
    z.requires_grad_()
    value = network.last.cell(z, x)  # type: ignore[operator, union-attr]
    vector = torch.randn(z.shape, generator=torch.Generator().manual_seed(0)).to(z)
    logarithms = []
    for _ in range(POWER_STEPS):
        norm = vector.flatten(1).norm(dim=1)
        logarithms.append(norm.double().log())
        vector = vector / norm.clamp(min=torch.finfo(norm.dtype).tiny)[:, None, None, None]
        (vector,) = torch.autograd.grad(value, z, vector, retain_graph=True)
    return torch.stack(logarithms[SETTLING_STEPS:]).mean(0).exp()
