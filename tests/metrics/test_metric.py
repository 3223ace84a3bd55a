"""The metric: batches, processes, copies and streams of samples give what the function gives."""

from __future__ import annotations

import copy
import json
import math
import pickle
from pathlib import Path

import pytest
import torch
from collapse_samples import (
    EXACT_RTOL,
    KEPT_FIELDS,
    assert_alike,
    assert_metrics_close,
    every_device,
    make_samples,
    rtol_on,
)
from torch import nn
from torchmetrics import Metric, MetricCollection

from deqfast import NCResult, NeuralCollapse, neural_collapse

list_and_streaming = pytest.mark.parametrize("streaming", [False, True], ids=["list", "streaming"])


@list_and_streaming
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_coinciding_means_have_no_nc1(dtype, streaming):
    labels = torch.arange(3000) % 3
    constant = torch.full((3000, 7), 0.1, dtype=dtype)
    mirrored = torch.randn(1000, 7, generator=torch.Generator().manual_seed(0)).to(dtype) + 0.1
    for features in (constant, mirrored.repeat_interleave(3, 0)):
        metric = NeuralCollapse(3, torch.eye(3, 7), streaming=streaming, num_features=7)
        metric.update(features, labels)
        result = metric.compute()
        assert result.rank == 0
        assert all(math.isnan(x) for x in (result.nc1, result.condition, result.nc2_centered, result.nc3_centered))
        assert math.isfinite(result.nc2)


def in_pieces(metric, features, labels, sizes=(1, 63, 200)):
    for size in sizes:
        metric.update(features[:size], labels[:size])
        features, labels = features[size:], labels[size:]
    metric.update(features, labels)
    return metric


@every_device
@pytest.mark.parametrize("center", ["class-means", "samples"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(), (1, 63, 200), (0, 5, 0), (1,) * 50])
@list_and_streaming
def test_a_metric_in_pieces_equals_the_function(streaming, sizes, dtype, center, device):
    features, labels, weight = (x.to(device) for x in make_samples(777, 63, 10, offset=1.0, dtype=dtype))
    features[3, 4] = math.nan
    expected = neural_collapse(features, labels, weight, center=center)
    metric = NeuralCollapse(10, weight, center=center, streaming=streaming).to(device)
    result = in_pieces(metric, features, labels, sizes).compute()
    if not streaming:
        assert_alike(result, expected)
        return
    assert_metrics_close(result, expected, rtol_on(device, dtype))
    assert (result.excluded, result.nc4) == (1, None)


def test_streaming_drops_empty_classes_and_keeps_rtol():
    features, labels, weight = make_samples(400, 63, 5, noise=0.0)
    features[labels == 4] = features[labels == 3] + 1e-4
    metric = NeuralCollapse(9, torch.cat([torch.ones(2, 63), weight, torch.ones(2, 63)]), streaming=True)
    metric.update(features, labels + 2)
    assert_metrics_close(metric.compute(), neural_collapse(features, labels, weight))
    assert (metric.compute().rank, metric.compute().num_classes) == (4, 5)
    metric.rtol = 1e-3
    assert metric.compute().rank == 3


def reset(metric, features, labels):
    metric.update(torch.full((5, 63), math.nan), torch.arange(5))
    metric.update(100 * features, labels)
    metric.reset()
    metric.update(features, labels)
    return metric


def forward(metric, features, labels):
    """Every call gives the result of its batch. An error leaves what was collected."""
    for part in (slice(0, 300), slice(300, 500), slice(500, 777)):
        expected = neural_collapse(features[part], labels[part], metric.classifier_weight)
        assert_metrics_close(metric(features[part], labels[part]), expected)
    with pytest.raises(ValueError, match="is empty"):
        metric(features[:0], labels[:0])
    return metric


def merged(metric, features, labels):
    other = metric.clone()
    metric.update(features[:100], labels[:100])
    other.update(features[100:], labels[100:])
    metric.merge_state(other)
    return metric


def twin_of(duplicate):
    def continued(metric, features, labels):
        metric.update(features[:500], labels[:500])
        before, twin = metric.compute(), duplicate(metric)
        twin.update(features[500:], labels[500:])
        assert_alike(metric.compute(), before)
        return twin

    return continued


def in_one_buffer(metric, features, labels):
    buffer, label_buffer = torch.empty(259, 63), torch.empty(259, dtype=torch.int64)
    for part in (slice(0, 259), slice(259, 518), slice(518, 777)):
        buffer.copy_(features[part])
        label_buffer.copy_(labels[part])
        metric.update(buffer, label_buffer)
    return metric


def in_inference_mode_and_with_gradients(metric, features, labels):
    with torch.inference_mode():
        metric.update(features[:300].clone(), labels[:300])
    metric.update(features[300:].requires_grad_(), labels[300:])
    return metric


def in_a_collection(metric, features, labels):
    MetricCollection({"it": metric, "other": metric.clone()}).update(features, labels)
    return metric


WAYS = [reset, forward, merged, in_one_buffer, in_inference_mode_and_with_gradients, in_a_collection]
WAYS += [
    twin_of(duplicate) for duplicate in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: m.clone())
]


@pytest.mark.covering(2)
@list_and_streaming
@pytest.mark.parametrize("way", WAYS)
def test_however_samples_come_they_give_what_the_function_gives(way, streaming):
    features, labels, weight = make_samples(777, 63, 10, offset=1.0)
    expected = neural_collapse(features, labels, weight)
    result = way(NeuralCollapse(10, weight, streaming=streaming), features, labels).compute()
    assert_metrics_close(result, expected, fields=(*KEPT_FIELDS, "excluded"))


@list_and_streaming
def test_classifier_is_read_when_computing(streaming):
    features, labels, weight = make_samples(777, 63, 10)
    classifier = nn.Linear(63, 10)
    metric = NeuralCollapse(10, classifier, streaming=streaming)
    metric.update(features, labels)
    before = metric.compute().nc3
    with torch.no_grad():
        classifier.weight.copy_(weight)
    expected = neural_collapse(features, labels, weight).nc3
    assert before != metric.compute().nc3 == pytest.approx(expected, rel=EXACT_RTOL)
    metric.classifier_weight = None
    assert metric.compute().nc3 is None
    metric.classifier_weight = nn.Parameter(weight)
    assert metric.compute().nc3 == pytest.approx(expected, rel=EXACT_RTOL)
    assert not list(metric.parameters()) and not list(metric.children()) and not metric.state_dict()


@list_and_streaming
def test_it_moves_and_converts_with_the_model_that_holds_it(streaming):
    """Labels stay integers, moments float64; features become another dtype only by ``set_dtype``."""
    features, labels = torch.randn(60, 4), torch.arange(60) % 3 + 2000
    weight = torch.randn(2003, 4)
    expected, model = NeuralCollapse(2003, weight, streaming=streaming), torch.nn.Module()
    model.metric = NeuralCollapse(2003, weight, streaming=streaming)
    expected.update(features, labels)
    assert_alike(model.metric(features, labels), expected.compute())  # which torchmetrics keeps
    model.to(torch.bfloat16).half()
    assert_alike(model.metric.compute(), expected.compute())
    model.metric.set_dtype(torch.float16)
    if streaming:
        assert model.metric.compute() == expected.compute()
    else:
        assert model.metric.features[0].dtype == torch.float16 and torch.equal(model.metric.labels[0], labels)
    assert model.metric.to("meta").device.type == "meta"


def fails_while(monkeypatch, name, call):
    """Call with a function of torchmetrics that fails at its end."""
    own = getattr(Metric, name)

    def failing(self, *args):
        own(self, *args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(Metric, name, failing)
        call()


def alone(tensor, group):
    """Tensors of all processes, for a metric that syncs with itself only."""
    return [tensor]


X, Y = torch.eye(4, 6), torch.arange(4)
# Calls that raise: {name: (error, call of a metric and of monkeypatch)}.
FAILURES = {
    "update": (ValueError, lambda m, _: m.update(X, Y[:3])),
    "forward": (ValueError, lambda m, _: m(X[:0], Y[:0])),
    "compute": (ValueError, lambda m, _: m.compute()),
    "classifier": (ValueError, lambda m, _: setattr(m, "classifier_weight", torch.ones(3, 6))),
    "sync": (
        KeyboardInterrupt,
        lambda m, p: fails_while(p, "_sync_dist", lambda: m.sync(alone, distributed_available=lambda: True)),
    ),
    "merge of another class count": (ValueError, lambda m, _: m.merge_state(NeuralCollapse(5, num_features=6))),
    "merge, interrupted": (
        KeyboardInterrupt,
        lambda m, p: fails_while(p, "_reduce_states", lambda: m.merge_state(m.clone())),
    ),
}


@list_and_streaming
@pytest.mark.parametrize(("error", "call"), FAILURES.values(), ids=FAILURES)
def test_a_call_that_raises_leaves_the_metric_as_it_was(error, call, streaming, monkeypatch):
    metric = NeuralCollapse(4, streaming=streaming, num_features=6, compute_with_cache=True)
    if error is ValueError and call is FAILURES["compute"][1]:
        metric.update(X[:0], Y[:0])
    else:
        metric.update(X, Y)
        metric.compute()
    before = {name: list(one) if isinstance(one, list) else one for name, one in vars(metric).items()}
    with pytest.raises(error):
        call(metric, monkeypatch)
    after = vars(metric)
    assert after.keys() == before.keys()
    for name, one in before.items():
        same = isinstance(one, list) and all(a is b for a, b in zip(after[name], one, strict=True))
        assert same or after[name] is one or after[name] == one, name


WORLD_SIZE = 2
DISTRIBUTED = {"convention": "zhu", "classifier_bias": torch.linspace(-1, 1, 10)}  # whose NC4 streams have, too
SHARES = {"uneven": (slice(0, 600), slice(600, 777)), "second without samples": (slice(0, 777), slice(0, 0))}


def distributed_samples():
    features, labels, weight = make_samples(777, 63, 10, offset=1.0)
    features[[5, 700]] = math.nan
    return features, labels, weight


def distributed_results(rank):
    """Every scenario on one of the processes: the result, and the result after more samples and a second sync."""
    features, labels, weight = distributed_samples()
    results = {}
    for name, shares in SHARES.items():
        for streaming in (False, True):
            metric = NeuralCollapse(10, weight, streaming=streaming, **DISTRIBUTED)
            mine = features[shares[rank]], labels[shares[rank]]
            with pytest.raises(ValueError, match="the metric is empty"):
                metric.compute()
            if len(mine[0]):
                in_pieces(metric, *mine, sizes=(40, 41))
            with pytest.raises(ValueError, match="classifier_weight"):
                metric.classifier_weight = torch.ones(10, 5)  # this raises if the metric knows the width
                metric.compute()
            metric.classifier_weight = weight
            metric.sync()
            again = pickle.loads(pickle.dumps(metric))
            again.reset()
            assert not (again.moments.any() if streaming else again.features or again.labels)
            metric.unsync()
            first = metric.compute()
            metric.update(features[:50] + rank, labels[:50])
            results[f"{name}, streaming={streaming}"] = [first._asdict(), metric.compute()._asdict()]
    return results


def worker(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD_SIZE
    )
    results = distributed_results(rank)
    torch.distributed.destroy_process_group()
    Path(folder, f"rank{rank}.json").write_text(json.dumps(results))


@pytest.fixture(scope="module")
def from_two_processes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    torch.multiprocessing.spawn(worker, args=(str(folder),), nprocs=WORLD_SIZE)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


@pytest.mark.tier("full")
@list_and_streaming
@pytest.mark.parametrize("name", SHARES)
def test_two_processes_equal_one(from_two_processes, name, streaming):
    features, labels, weight = distributed_samples()
    more = torch.cat([features, features[:50], features[:50] + 1])
    more_labels = torch.cat([labels, labels[:50], labels[:50]])
    first, second = (results[f"{name}, streaming={streaming}"] for results in from_two_processes)
    assert first == second
    batches = ((features, labels), (more, more_labels))
    expected = [neural_collapse(*batch, weight, **DISTRIBUTED) for batch in batches]
    for result, one in zip(first, expected, strict=True):
        result = NCResult(**result)
        assert_metrics_close(result, one, fields=(*KEPT_FIELDS, "excluded"))
        assert result.nc4 == pytest.approx(one.nc4, rel=EXACT_RTOL)
