"""Cases of the neural-collapse metrics: NC1 to NC4 of features, compared with the D x D pseudo-inverse."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

import deqfast

from . import traffic
from .counters import count_call, memory
from .entry import KERNELS, Case, Contender, check, kernel_of, short
from .peers import pinv_collapse

# Relative error of NC1. The kernels of a GPU compute in float32 for features in float32.
ALLOWED = {"fp32": {"triton": 1e-5, "cuda": 1e-5}, "fp64": {}}
EXACT = 1e-12


def exact_nc1(features: Tensor, labels: Tensor, classes: int) -> float:
    """tr(Sigma_W Sigma_B^+) / K: squared lengths of the samples minus their class means, in the metric of Sigma_B^+."""
    means = torch.zeros(classes, features.shape[1], dtype=features.dtype).index_add_(0, labels, features)
    means /= torch.bincount(labels, minlength=classes)[:, None]
    _, s, right = torch.linalg.svd((means - means.mean(0)) / classes**0.5, full_matrices=False)
    kept = s > 1e-10 * s[0]
    projected = (features - means[labels]) @ (right[kept] / s[kept, None]).T
    return float((projected**2).sum() / len(features) / classes)


def clusters(samples: int, dim: int, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features (N, D) around class centres, their labels, and a classifier (K, D)."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(samples) % classes
    features = torch.randn(samples, dim, generator=generator)
    features += 2 * torch.randn(classes, dim, generator=generator)[labels]
    return features, labels, torch.randn(classes, dim, generator=generator)


@functools.lru_cache(maxsize=2)
def exact_of(samples: int, dim: int, classes: int, dtype: torch.dtype = torch.float32) -> float:
    """NC1 of ``clusters``, rounded to `dtype`."""
    features, labels, _ = clusters(samples, dim, classes)
    return exact_nc1(features.to(dtype).double(), labels, classes)


def collapse_case(
    samples: int, dim: int, classes: int, dtype: torch.dtype = torch.float32, classifier: bool = True, **more: Any
) -> Case:
    """``deqfast.neural_collapse`` of N features in D dimensions of K classes: NC1 to NC4, or NC1 by itself.

    classifier: whether there is one. Without it NC3 and NC4 do not exist, and NC2 costs nothing compared with NC1.
    """
    kind = short(dtype)

    def contender(provider: str, device: str) -> Contender:
        features, labels, weight = (tensor.to(device) for tensor in clusters(samples, dim, classes))
        features, given = features.to(dtype), weight.to(dtype) if classifier else None
        if provider == "pinv":  # of a matrix of rank K - 1, in float64
            wide = features.double(), labels, None if given is None else given.double()
        else:
            kernel = kernel_of(provider, device).name

        def measure() -> float:
            """NC1, measured with the others."""
            if provider == "pinv":
                return pinv_collapse(*wide)["nc1"]
            return deqfast.neural_collapse(features, labels, given, kernel=kernel).nc1

        values: list[float] = []
        peak = memory(lambda: values.append(measure()), device)[1]
        exact = exact_of(samples, dim, classes, dtype)
        error = abs(values[0] - exact) / exact
        check("relative error of NC1", error, ALLOWED[kind].get(provider, EXACT))
        moved = traffic.collapse_bytes(samples, dim, classes, dtype.itemsize, classifier)
        facts = {"error": error, "bytes": moved, "peak_bytes": peak}
        if provider in KERNELS:  # counting calls it again, which takes minutes for a large pseudo-inverse
            facts = count_call(measure, device).columns | facts
        return Contender(measure, facts)

    name = f"{'nc' if classifier else 'nc1'}-{samples}x{dim}-K{classes}-{kind}"
    return Case("nc", name, (*KERNELS, "pinv"), ("pinv",), contender, **more)
