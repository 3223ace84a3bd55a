"""Saved moments give the metrics of a measurement again, and the within-class covariance in the span of the means."""

from __future__ import annotations

import math

import numpy as np
import torch
from nc_study.moments import moments

UNIT = 2.0**-24  # rounding to float32


def test_the_scatter_is_the_within_class_covariance_in_the_span_of_the_centred_means():
    """A sample that is not finite is left out. Tolerances: float32, times the condition of the means."""
    draw = np.random.default_rng(0)
    labels = draw.permutation(np.repeat(np.arange(4), (50, 20, 5, 6)))
    features = draw.normal(size=(4, 7))[labels] + 0.3 * draw.normal(size=(81, 7)) @ draw.normal(size=(7, 7))
    features[np.flatnonzero(labels == 3)[0], 2] = math.inf
    saved = moments(torch.from_numpy(features), torch.from_numpy(labels), torch.ones(4, 7, dtype=torch.float64))
    kept = np.isfinite(features).all(1)
    features, labels = features[kept], labels[kept]
    assert saved["counts"].tolist() == [50, 20, 5, 5] and saved["weight"].dtype == np.float32
    means = np.stack([features[labels == label].mean(0) for label in range(4)])
    deviations = features - means[labels]
    np.testing.assert_allclose(saved["means"], means, rtol=UNIT, atol=1e-15)
    traces = [(deviations[labels == label] ** 2).sum(1).mean() for label in range(4)]
    np.testing.assert_allclose(saved["traces"], traces, rtol=UNIT + 1e-13)
    centred = means - means.mean(0)
    directions, singular, _ = np.linalg.svd(centred.T, full_matrices=False)
    span = directions[:, :3]
    condition = (singular[0] / singular[2]) ** 2
    inside = span @ span.T @ (deviations.T @ deviations / 80) @ span @ span.T
    ours = centred.T @ saved["scatter"].astype(np.float64) @ centred
    assert np.linalg.norm(ours - inside) <= condition * 10 * UNIT * np.linalg.norm(inside)
