"""Errors for bad arguments of the metrics name the argument, its value and what is allowed."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from torch import nn

from deqfast import NeuralCollapse, neural_collapse

WEIGHT = {"classifier_weight": torch.ones(3, 4)}
GOOD = {"features": torch.ones(6, 4), "labels": torch.arange(6) % 3}


BAD = [
    ({"features": [[1.0]]}, TypeError, r"features is a list; .*float16, bfloat16, float32, float64"),
    ({"features": torch.ones(6, 4, dtype=torch.int64)}, TypeError, r"features has dtype torch\.int64"),
    ({"features": torch.ones(6, 4, 2, 2)}, ValueError, r"features has shape \(6, 4, 2, 2\).*flatten or pool"),
    ({"features": torch.ones(6)}, ValueError, r"features has shape \(6,\)"),
    ({"features": torch.ones(6, 0)}, ValueError, r"features has shape \(6, 0\)"),
    ({"features": torch.ones(0, 4), "labels": torch.arange(0)}, ValueError, r"features is empty .*\(0, 4\)"),
    ({"labels": [0, 1, 2, 0, 1, 2]}, TypeError, r"labels is a list; .*int64"),
    ({"labels": torch.ones(6)}, TypeError, r"labels has dtype torch\.float32"),
    ({"labels": torch.ones(6, dtype=torch.bool)}, TypeError, r"labels has dtype torch\.bool"),
    ({"labels": torch.arange(5)}, ValueError, r"labels has shape \(5,\); it must be \(6,\)"),
    ({"labels": torch.zeros(6, 1, dtype=torch.int64)}, ValueError, r"labels has shape \(6, 1\)"),
    ({"labels": torch.tensor([0, 1, 2, 0, 1, -1])}, ValueError, r"labels holds -1; .*\[0, 3\)"),
    ({"labels": torch.tensor([0, 1, 2, 0, 1, 2**33])}, ValueError, r"labels holds 8589934592, .*give num_classes"),
    ({"num_classes": 2}, ValueError, r"labels holds 2; .*\[0, 2\)"),
    ({"classifier_weight": torch.ones(2, 4)}, ValueError, r"labels holds 2; .*\[0, 2\)"),
    ({"num_classes": 0}, ValueError, "num_classes must be at least 1, got 0"),
    ({"num_classes": 3.0}, TypeError, r"num_classes must be an integer, got 3\.0"),
    ({"num_classes": True}, TypeError, "num_classes must be an integer, got True"),
    ({"classifier_weight": nn.Linear(4, 3)}, TypeError, r"classifier_weight is a Linear"),
    ({"classifier_weight": torch.ones(3, 4).int()}, TypeError, r"classifier_weight has dtype torch\.int32"),
    ({"classifier_weight": torch.ones(3, 5)}, ValueError, r"classifier_weight has shape \(3, 5\).*\(num_classes, 4\)"),
    ({"classifier_weight": torch.ones(4)}, ValueError, r"classifier_weight has shape \(4,\)"),
    ({"classifier_weight": torch.ones(0, 4)}, ValueError, r"classifier_weight has shape \(0, 4\)"),
    ({"classifier_weight": torch.ones(3, 4), "num_classes": 5}, ValueError, r"shape \(3, 4\); it must be \(5, 4\)"),
    ({"rtol": -1e-3}, ValueError, r"rtol must be finite and at least 0 and at most 0\.99, got -0\.001"),
    ({"rtol": 1.0}, ValueError, r"rtol must be .*, got 1\.0"),
    ({"rtol": math.nan}, ValueError, "rtol must be .*, got nan"),
    ({"rtol": "auto"}, TypeError, "rtol must be a number, got 'auto'"),
    ({"center": "mean"}, ValueError, "center must be one of 'class-means', 'samples', got 'mean'"),
    ({"convention": "papian"}, ValueError, "convention must be one of 'sun', .*got 'papian'"),
    ({"classifier_bias": torch.ones(3)}, ValueError, "classifier_bias is given, and classifier_weight is None"),
    ({**WEIGHT, "classifier_bias": torch.ones(3, 1)}, ValueError, r"classifier_bias has shape \(3, 1\).*\(3,\)"),
    ({**WEIGHT, "classifier_bias": torch.ones(4)}, ValueError, r"classifier_bias has shape \(4,\).*\(3,\)"),
    ({**WEIGHT, "classifier_bias": torch.ones(3).int()}, TypeError, r"classifier_bias has dtype torch\.int32"),
    ({**WEIGHT, "classifier_bias": [0.0, 0.0, 0.0]}, TypeError, "classifier_bias is a list"),
    ({**WEIGHT, "classifier_bias": torch.ones(3, device="meta")}, ValueError, "classifier_bias is on meta; .*cpu"),
    ({"labels": torch.zeros(6, dtype=torch.int64, device="meta")}, ValueError, r"labels is on meta; it must be on cpu"),
    ({"classifier_weight": torch.ones(3, 4, device="meta")}, ValueError, r"classifier_weight is on meta; .*cpu"),
]


BAD_METRICS = [
    ({"num_classes": 0}, ValueError, "num_classes must be at least 1, got 0"),
    ({"num_classes": "ten"}, TypeError, "num_classes must be an integer, got 'ten'"),
    ({"num_features": -1}, ValueError, "num_features must be at least 1, got -1"),
    ({"num_features": 2.0}, TypeError, r"num_features must be an integer, got 2\.0"),
    ({"rtol": 2.0}, ValueError, r"rtol must be .*, got 2\.0"),
    ({"streaming": True, "num_features": 1025}, ValueError, r"at most 1024: use streaming=False"),
    ({"streaming": True}, ValueError, "num_features is None; streaming=True needs it"),
    ({"center": 0}, ValueError, "center must be one of .*, got 0"),
    ({"convention": "Zhu"}, ValueError, "convention must be one of 'sun', 'papyan', 'zhu', 'kothapalli', got 'Zhu'"),
    ({"per_class": True, "streaming": True, "num_features": 4}, ValueError, "per_class=True needs the samples"),
    ({"classifier_bias": torch.ones(4)}, ValueError, r"classifier_bias has shape \(4,\); it must be \(3,\), one per"),
    ({"classifier_bias": nn.Linear(7, 3, bias=False)}, TypeError, "classifier_bias is a Linear; give .* with a bias"),
    ({"classifier_weight": nn.ReLU()}, TypeError, r"classifier_weight is a ReLU; give a tensor, a module"),
    ({"classifier_weight": torch.ones(2, 7)}, ValueError, r"shape \(2, 7\); it must be \(3, D\)"),
    ({"classifier_weight": nn.Linear(7, 3), "num_features": 8}, ValueError, r"shape \(3, 7\); it must be \(3, 8\)"),
]


@pytest.mark.parametrize(
    ("call", "arguments", "error", "message"),
    [(neural_collapse, {**GOOD, **given}, *said) for given, *said in BAD]
    + [(NeuralCollapse, {"num_classes": 3, **given}, *said) for given, *said in BAD_METRICS],
)
def test_bad_arguments(call, arguments, error, message):
    neural_collapse(**GOOD)
    NeuralCollapse(3, streaming=True, num_features=1024)
    with pytest.raises(error, match=message):
        call(**arguments)


def test_a_metric_with_a_bias_needs_a_weight():
    for streaming in (False, True):
        metric = NeuralCollapse(3, streaming=streaming, num_features=4, classifier_bias=torch.ones(3))
        metric.update(**GOOD)
        with pytest.raises(ValueError, match="classifier_bias is given, and classifier_weight is None"):
            metric.compute()


@pytest.mark.parametrize(("streaming", "columns"), [(False, None), (False, 7), (True, 7)])
def test_bad_updates(streaming, columns):
    metric = NeuralCollapse(3, streaming=streaming, num_features=columns)
    rows, labels = torch.ones(4, 7), torch.arange(4)
    with pytest.raises(ValueError, match="the metric is empty; call update"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchmetrics warns of compute before update as well
        metric.compute()
    metric.update(rows, labels % 3)
    for given, error, message in (
        ((torch.ones(4, 8), labels % 3), ValueError, r"features has shape \(4, 8\); it must be \(N, 7\)"),
        ((rows, labels[:3]), ValueError, r"labels has shape \(3,\); it must be \(4,\)"),
        ((rows.long(), labels % 3), TypeError, r"features has dtype torch\.int64"),
        ((rows, labels), ValueError, r"labels holds 3; every label must be in \[0, 3\)"),
    ):
        with pytest.raises(error, match=message):
            metric.update(*given)
            metric.compute()
    if streaming:
        with pytest.raises(ValueError, match="features is on cpu; it must be on meta"):
            metric.to("meta").update(rows, labels % 3)
