"""Saved moments give the metrics of a measurement again, and the within-class covariance in the span of the means."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from nc_study.moments import moments
from runs.files import read_arrays
from study_helpers import folder_of

UNIT = 2.0**-24  # rounding to float32


@pytest.mark.parametrize("model", ["explicit", "tied"])
def test_what_is_saved_is_of_the_measured_epochs(study, tmp_path, model):
    assert study("--model", model)[0] == 0
    folder = tmp_path / folder_of(model=model)
    lines = [json.loads(line) for line in (folder / "epochs.jsonl").read_text().splitlines()]
    saved = read_arrays(folder / "moments.npz")
    measured = [line for line in lines if line["nc"]]
    assert saved["epoch"].tolist() == [line["epoch"] for line in measured] == [1, 2, 3]
    assert saved["counts"].tolist() == [[30] * 3 + [3] * 7] * 3
    last = torch.load(folder / "last.ckpt", weights_only=True)["network"]
    assert (saved["weight"][-1] == last["classifier.weight"].numpy()).all() and "classifier.bias" not in last
    for i, line in enumerate(measured):  # the trace is NC1; means and scatter are checked below
        assert np.trace(saved["scatter"][i].astype(np.float64)) == pytest.approx(line["nc"]["nc1"], rel=UNIT, abs=0)


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


def test_a_class_without_samples_counts_in_no_mean():
    draw = torch.Generator().manual_seed(0)
    features, labels = torch.randn(60, 5, generator=draw), torch.arange(60) % 3
    three, four = (moments(features, labels, torch.zeros(classes, 5)) for classes in (3, 4))
    assert four["counts"].tolist() == [20, 20, 20, 0] and math.isnan(four["traces"][3])
    np.testing.assert_array_equal(four["scatter"][:3, :3], three["scatter"])
    assert not four["scatter"][3].any() and not four["scatter"][:, 3].any()
    none = moments(torch.full((60, 5), math.nan), labels, torch.zeros(3, 5))
    assert not none["counts"].any() and np.isnan(none["scatter"]).all() and np.isnan(none["traces"]).all()
