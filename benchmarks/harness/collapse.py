"""Cases of the neural-collapse metrics: NC1 to NC4 of features, beside the D x D pseudo-inverse."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

import deqfast

from . import traffic
from .counters import count, memory
from .entry import KERNELS, Case, Contender, check, kernel_of, short
from .peers import pinv_collapse
from .record import Row

# Relative error of NC1. The kernels of a GPU compute in float32 for features in float32.
ALLOWED = {"fp32": {"triton": 1e-5, "cuda": 1e-5}, "fp64": {}}
EXACT = 1e-12


def exact_nc1(features: Tensor, labels: Tensor, classes: int) -> float:
    """tr(Sigma_W Sigma_B^+) / K: squared lengths of what is left of the samples, in the metric of Sigma_B^+."""
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


@dataclass(frozen=True, kw_only=True)
class CollapseCase(Case):
    """``deqfast.neural_collapse`` of N features in D dimensions of K classes: NC1 to NC4, or NC1 with what it needs."""

    section = "nc"
    providers = (*KERNELS, "pinv")
    peers = ("pinv",)
    samples: int
    dim: int
    classes: int
    dtype: torch.dtype = torch.float32
    classifier: bool = True  # without one there is no NC3 and no NC4, and NC2 costs nothing beside NC1

    @property
    def name(self) -> str:
        return f"{'nc' if self.classifier else 'nc1'}-{self.samples}x{self.dim}-K{self.classes}-{short(self.dtype)}"

    def size(self) -> Row:
        return {"batch": self.samples, "dim": self.dim, "classes": self.classes, "dtype": short(self.dtype)}

    def contender(self, provider: str, device: str) -> Contender:
        features, labels, weight = clusters(self.samples, self.dim, self.classes)
        features, labels = features.to(device, self.dtype), labels.to(device)
        given = weight.to(device, self.dtype) if self.classifier else None
        if provider == "pinv":  # of a matrix of rank K - 1, in float64
            exact_features, wide = features.double(), None if given is None else given.double()
        else:
            kernel = kernel_of(provider, device).name

        def measure() -> float:
            """NC1, measured with the others."""
            if provider == "pinv":
                return pinv_collapse(exact_features, labels, wide)["nc1"]
            return deqfast.neural_collapse(features, labels, given, kernel=kernel).nc1

        values: list[float] = []
        peak = memory(lambda: values.append(measure()))[1]
        exact = exact_of(self)
        error, allowed = abs(values[0] - exact) / exact, ALLOWED[short(self.dtype)].get(provider, EXACT)
        check("relative error of NC1", error, allowed)
        moved = traffic.collapse_bytes(self.samples, self.dim, self.classes, self.dtype.itemsize, self.classifier)
        facts = {"error": error, "allowed": allowed, "bytes": moved, "peak_bytes": peak}
        if provider in KERNELS:  # counting calls it again, which takes minutes for a large pseudo-inverse
            counters = count(lambda f: measure(), lambda: None)
            facts |= {"launches": counters.operations, "host_waits": counters.host_waits}
        return Contender(measure, facts)


@functools.lru_cache(maxsize=2)
def exact_of(case: CollapseCase) -> float:
    features, labels, _ = clusters(case.samples, case.dim, case.classes)
    return exact_nc1(features.to(case.dtype).double(), labels, case.classes)
