"""Errors for bad arguments of the metrics name the argument, its value and what is allowed."""

import math
import warnings

import pytest
import torch
from torch import nn

from deqfast import NeuralCollapse, neural_collapse

GOOD = {"features": torch.ones(6, 4), "labels": torch.arange(6) % 3}
WEIGHT, BIAS, LABELS = "classifier_weight", "classifier_bias", "labels"
WEIGHTS = {WEIGHT: torch.ones(3, 4)}
ON_META = {"device": "meta"}
BAD = [
    ({"features": [[1.0]]}, TypeError, r"features is a list; .*float16, bfloat16, float32, float64"),
    ({"features": torch.ones(6, 4, dtype=torch.int64)}, TypeError, r"features has dtype torch\.int64"),
    ({"features": torch.ones(6, 4, 2, 2)}, ValueError, r"features has shape \(6, 4, 2, 2\).*flatten or pool"),
    ({"features": torch.ones(6, 0)}, ValueError, r"features has shape \(6, 0\)"),
    ({"features": torch.ones(0, 4), LABELS: torch.arange(0)}, ValueError, r"features is empty .*\(0, 4\)"),
    ({LABELS: torch.ones(6, dtype=torch.bool)}, TypeError, r"labels has dtype torch\.bool"),
    ({LABELS: torch.arange(5)}, ValueError, r"labels has shape \(5,\); it must be \(6,\)"),
    ({LABELS: torch.zeros(6, 1, dtype=torch.int64)}, ValueError, r"labels has shape \(6, 1\)"),
    ({LABELS: torch.tensor([0, 1, 2, 0, 1, -1])}, ValueError, r"labels holds -1; .*\[0, 3\)"),
    ({LABELS: torch.tensor([0, 1, 2, 0, 1, 2**33])}, ValueError, r"labels holds 8589934592, .*give num_classes"),
    ({LABELS: torch.zeros(6, dtype=torch.int64, **ON_META)}, ValueError, r"labels is on meta; it must be on cpu"),
    ({"num_classes": 2}, ValueError, r"labels holds 2; .*\[0, 2\)"),
    ({"num_classes": 0}, ValueError, "num_classes must be at least 1, got 0"),
    ({"num_classes": True}, TypeError, "num_classes must be an integer, got True"),
    ({"rtol": 1.0}, ValueError, r"rtol must be finite and at least 0 and at most 0\.99, got 1\.0"),
    ({"rtol": math.nan}, ValueError, "rtol must be .*, got nan"),
    ({"center": "mean"}, ValueError, "center must be one of 'class-means', 'samples', got 'mean'"),
    ({"convention": "papian"}, ValueError, "convention must be one of 'sun', .*got 'papian'"),
    ({WEIGHT: torch.ones(2, 4)}, ValueError, r"labels holds 2; .*\[0, 2\)"),
    ({WEIGHT: nn.Linear(4, 3)}, TypeError, r"classifier_weight is a Linear"),
    ({WEIGHT: torch.ones(3, 5)}, ValueError, r"classifier_weight has shape \(3, 5\).*\(num_classes, 4\)"),
    ({WEIGHT: torch.ones(4)}, ValueError, r"classifier_weight has shape \(4,\)"),
    ({WEIGHT: torch.ones(0, 4)}, ValueError, r"classifier_weight has shape \(0, 4\)"),
    ({WEIGHT: torch.ones(3, 4), "num_classes": 5}, ValueError, r"shape \(3, 4\); it must be \(5, 4\)"),
    ({WEIGHT: torch.ones(3, 4, **ON_META)}, ValueError, r"classifier_weight is on meta; .*cpu"),
    ({BIAS: torch.ones(3)}, ValueError, "classifier_bias is given, and classifier_weight is None"),
    (WEIGHTS | {BIAS: torch.ones(3, 1)}, ValueError, r"classifier_bias has shape \(3, 1\).*\(3,\)"),
    (WEIGHTS | {BIAS: torch.ones(3).int()}, TypeError, r"classifier_bias has dtype torch\.int32"),
    (WEIGHTS | {BIAS: torch.ones(3, **ON_META)}, ValueError, "classifier_bias is on meta; .*cpu"),
]
BAD_METRICS = [
    ({"num_classes": 0}, ValueError, "num_classes must be at least 1, got 0"),
    ({"num_features": -1}, ValueError, "num_features must be at least 1, got -1"),
    ({"rtol": 2.0}, ValueError, r"rtol must be .*, got 2\.0"),
    ({"streaming": True, "num_features": 1025}, ValueError, r"at most 1024: use streaming=False"),
    ({"streaming": True}, ValueError, "num_features is None; streaming=True needs it"),
    ({"convention": "Zhu"}, ValueError, "convention must be one of 'sun', 'papyan', 'zhu', 'kothapalli', got 'Zhu'"),
    ({"per_class": True, "streaming": True, "num_features": 4}, ValueError, "per_class=True needs the samples"),
    ({BIAS: torch.ones(4)}, ValueError, r"classifier_bias has shape \(4,\); it must be \(3,\), one per"),
    ({BIAS: nn.Linear(7, 3, bias=False)}, TypeError, "classifier_bias is a Linear; give .* with a bias"),
    ({WEIGHT: nn.ReLU()}, TypeError, r"classifier_weight is a ReLU; give a tensor, a module"),
    ({WEIGHT: torch.ones(2, 7)}, ValueError, r"shape \(2, 7\); it must be \(3, D\)"),
    ({WEIGHT: nn.Linear(7, 3), "num_features": 8}, ValueError, r"shape \(3, 7\); it must be \(3, 8\)"),
]


@pytest.mark.parametrize(
    ("call", "arguments", "error", "message"),
    [(neural_collapse, {**GOOD, **given}, *words) for given, *words in BAD]
    + [(NeuralCollapse, {"num_classes": 3, **given}, *words) for given, *words in BAD_METRICS],
)
def test_bad_arguments(call, arguments, error, message):
    with pytest.raises(error, match=message):
        call(**arguments)


@pytest.mark.parametrize(("streaming", "columns"), [(False, None), (False, 7), (True, 7)])
def test_bad_updates(streaming, columns):
    metric = NeuralCollapse(3, streaming=streaming, num_features=columns)
    rows, labels = torch.ones(4, 7), torch.arange(4)
    with pytest.raises(ValueError, match="the metric is empty; call update"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchmetrics warns of compute before update as well
        metric.compute()
    metric.update(rows, labels % 3)
    for batch, error, message in (
        ((torch.ones(4, 8), labels % 3), ValueError, r"features has shape \(4, 8\); it must be \(N, 7\)"),
        ((rows, labels[:3]), ValueError, r"labels has shape \(3,\); it must be \(4,\)"),
        ((rows.long(), labels % 3), TypeError, r"features has dtype torch\.int64"),
        ((rows, labels), ValueError, r"labels holds 3; every label must be in \[0, 3\)"),
    ):
        with pytest.raises(error, match=message):
            metric.update(*batch)
            metric.compute()
    metric = NeuralCollapse(3, streaming=streaming, num_features=7, classifier_bias=torch.ones(3))
    metric.update(rows, labels % 3)
    with pytest.raises(ValueError, match="classifier_bias is given, and classifier_weight is None"):
        metric.compute()
    if streaming:
        with pytest.raises(ValueError, match="features is on cpu; it must be on meta"):
            metric.to("meta").update(rows, labels % 3)
