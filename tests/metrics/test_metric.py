"""The metric: batches, processes, copies and streams of samples give what the function gives."""

import math
import pickle
from itertools import product
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

from deqfast import NeuralCollapse, neural_collapse

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


def reset(metric, features, labels):
    metric.update(torch.full((5, 63), math.nan), torch.arange(5))
    metric.update(100 * features, labels)
    metric.reset()
    metric.update(features, labels)
    return metric


def forward(metric, features, labels):
    """Every call gives the result of its batch. An error leaves what was collected."""
    for part in (slice(0, 300), slice(300, 777)):
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


def copied(metric, features, labels, duplicate=lambda metric: metric.clone()):
    metric.update(features[:500], labels[:500])
    before, twin = metric.compute(), duplicate(metric)
    twin.update(features[500:], labels[500:])
    assert_alike(metric.compute(), before)
    return twin


def pickled(metric, features, labels):
    return copied(metric, features, labels, lambda metric: pickle.loads(pickle.dumps(metric)))


def in_one_buffer(metric, features, labels):
    buffer, label_buffer = torch.empty(259, 63), torch.empty(259, dtype=torch.int64)
    for part in (slice(0, 259), slice(259, 518), slice(518, 777)):
        buffer.copy_(features[part])
        label_buffer.copy_(labels[part])
        metric.update(buffer, label_buffer)
    return metric


def in_a_collection(metric, features, labels):
    MetricCollection({"it": metric, "other": metric.clone()}).update(features, labels)
    return metric


WAYS = [reset, forward, merged, copied, pickled, in_one_buffer, in_a_collection]


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


X, Y = torch.eye(4, 6), torch.arange(4)
# Calls that raise: {name: (call, function of torchmetrics that is interrupted at its end, or None)}.
FAILURES = {
    "update": (lambda m: m.update(X, Y[:3]), None),
    "forward": (lambda m: m(X[:0], Y[:0]), None),
    "compute": (lambda m: m.compute(), None),
    "classifier": (lambda m: setattr(m, "classifier_weight", torch.ones(3, 6)), None),
    "merge of another class count": (lambda m: m.merge_state(NeuralCollapse(5, num_features=6)), None),
    "merge": (lambda m: m.merge_state(m.clone()), "_reduce_states"),
    # of a metric that syncs with itself only
    "sync": (lambda m: m.sync(lambda tensor, group: [tensor], distributed_available=lambda: True), "_sync_dist"),
}


@list_and_streaming
@pytest.mark.parametrize("name", FAILURES)
def test_a_call_that_raises_leaves_the_metric_as_it_was(name, streaming, monkeypatch):
    call, interrupted = FAILURES[name]
    metric = NeuralCollapse(4, streaming=streaming, num_features=6, compute_with_cache=True)
    if name == "compute":
        metric.update(X[:0], Y[:0])
    else:
        metric.update(X, Y)
        metric.compute()
    if interrupted:
        own = getattr(Metric, interrupted)

        def failing(self, *args):
            own(self, *args)
            raise KeyboardInterrupt

        monkeypatch.setattr(Metric, interrupted, failing)
    before = {key: list(value) if isinstance(value, list) else value for key, value in vars(metric).items()}
    with pytest.raises(KeyboardInterrupt if interrupted else ValueError):
        call(metric)
    after = vars(metric)
    assert after.keys() == before.keys()
    for key, value in before.items():
        same = isinstance(value, list) and all(a is b for a, b in zip(after[key], value, strict=True))
        assert same or after[key] is value or after[key] == value, key


DISTRIBUTED = {"convention": "zhu", "classifier_bias": torch.linspace(-1, 1, 10)}  # whose NC4 streams have, too
SHARES = {"uneven": (slice(0, 600), slice(600, 777)), "second without samples": (slice(0, 777), slice(0, 0))}


def distributed_samples():
    features, labels, weight = make_samples(777, 63, 10, offset=1.0)
    features[[5, 700]] = math.nan
    return features, labels, weight


def synced(rank, share, streaming):
    """A result of two processes, and the result after more samples and a second sync."""
    features, labels, weight = distributed_samples()
    metric = NeuralCollapse(10, weight, streaming=streaming, **DISTRIBUTED)
    with pytest.raises(ValueError, match="the metric is empty"):
        metric.compute()
    if len(labels[share]):
        in_pieces(metric, features[share], labels[share], sizes=(40, 41))
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
    return first, metric.compute()


def worker(rank, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    cases = product(SHARES, (False, True))
    results = {(name, streaming): synced(rank, SHARES[name][rank], streaming) for name, streaming in cases}
    torch.distributed.destroy_process_group()
    Path(folder, str(rank)).write_bytes(pickle.dumps(results))


@pytest.mark.tier("full")
def test_two_processes_equal_one(tmp_path):
    torch.multiprocessing.spawn(worker, args=(str(tmp_path),), nprocs=2)
    results, other = (pickle.loads((tmp_path / rank).read_bytes()) for rank in "01")
    assert results == other
    features, labels, weight = distributed_samples()
    more = torch.cat([features, features[:50], features[:50] + 1])
    batches = ((features, labels), (more, torch.cat([labels, labels[:50], labels[:50]])))
    expected = [neural_collapse(*batch, weight, **DISTRIBUTED) for batch in batches]
    for pair in results.values():
        for result, whole in zip(pair, expected, strict=True):
            assert_metrics_close(result, whole, fields=(*KEPT_FIELDS, "excluded", "nc4"))
