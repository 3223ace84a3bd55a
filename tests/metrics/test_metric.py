"""The metric: batches, processes, copies and streams of samples give what the function gives."""

import math
import pickle
from functools import partial
from itertools import product

import pytest
import torch
from collapse_samples import (
    EXACT_RTOL,
    KEPT_FIELDS,
    assert_alike,
    assert_metrics_close,
    awkward,
    every_device,
    make_samples,
)
from forked import in_processes
from torch import nn
from torchmetrics import Metric, MetricCollection

from deqfast import NeuralCollapse, neural_collapse

list_and_streaming = pytest.mark.parametrize("streaming", [False, True], ids=["list", "streaming"])


def in_pieces(metric, features, labels, sizes=(1, 63, 40)):
    for size in sizes:
        metric.update(features[:size], labels[:size])
        features, labels = features[size:], labels[size:]
    metric.update(features, labels)
    return metric


def reset(metric, features, labels):
    metric.update(torch.full((5, 20), math.nan, device=features.device), labels[:5])
    metric.update(100 * features, labels)
    metric.reset()
    metric.update(features, labels)
    return metric


def forward(metric, features, labels):
    """Every call gives the result of its batch. An error leaves what was collected."""
    for part in (slice(0, 90), slice(90, None)):
        by_itself = metric.clone()
        by_itself.reset()
        by_itself.update(features[part], labels[part])
        assert_alike(metric(features[part], labels[part]), by_itself.compute())
    with pytest.raises(ValueError, match="is empty"):
        metric(features[:0], labels[:0])
    return metric


def merged(metric, features, labels):
    other = metric.clone()
    metric.update(features[:100], labels[:100])
    other.update(features[100:], labels[100:])
    metric.merge_state(other)
    assert not metric.streaming or torch.equal(metric.precision, other.precision)
    return metric


def copied(metric, features, labels, duplicate=lambda metric: metric.clone()):
    metric.update(features[:100], labels[:100])
    before, twin = metric.compute(), duplicate(metric)
    twin.update(features[100:], labels[100:])
    assert_alike(metric.compute(), before)
    return twin


def pickled(metric, features, labels):
    return copied(metric, features, labels, lambda metric: pickle.loads(pickle.dumps(metric)))


def in_a_buffer(metric, features, labels):
    buffer, label_buffer = torch.empty_like(features), torch.empty_like(labels)
    for part in (slice(0, 50), slice(50, 100), slice(100, None)):
        size = len(labels[part])
        metric.update(buffer[:size].copy_(features[part]), label_buffer[:size].copy_(labels[part]))
    return metric


def in_a_collection(metric, features, labels):
    MetricCollection({"it": metric, "other": metric.clone()}).update(features, labels)
    return metric


WAYS = {
    "whole": partial(in_pieces, sizes=()),
    "pieces": in_pieces,
    "empty pieces": partial(in_pieces, sizes=(0, 5, 0)),
    "rows": partial(in_pieces, sizes=(1,) * 50),
    **{way.__name__: way for way in (reset, forward, merged, copied, pickled, in_a_buffer, in_a_collection)},
}
OPTIONS = [
    ({}, torch.float32),
    ({"center": "samples"}, torch.float64),
    ({"convention": "papyan"}, torch.float64),
    ({"convention": "zhu"}, torch.float32),  # whose NC4 streams have, too
    ({"convention": "kothapalli"}, torch.bfloat16),
]


@every_device
@list_and_streaming
@pytest.mark.parametrize(("options", "dtype"), OPTIONS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_however_samples_come_they_give_what_the_function_gives(way, options, dtype, streaming, device):
    features, labels, weight, bias = (tensor.to(device) for tensor in awkward(dtype))
    options = {**options, "classifier_bias": bias, "geometry": True, "per_class": not streaming}
    expected = neural_collapse(features, labels, weight, **options)
    assert all(math.isfinite(value) for value in expected[:9])
    metric = NeuralCollapse(7, weight, streaming=streaming, **options).to(device)
    result = way(metric, features, labels).compute()
    geometry = expected.geometry
    if streaming:
        expected, geometry = (
            expected._replace(nc4=expected.nc4 if options.get("convention") == "zhu" else None),
            geometry._replace(cdnv=None),
        )
    assert_alike(result, expected._replace(geometry=geometry))


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


def worker(rank, count, path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=count)
    cases = product(SHARES, (False, True))
    results = {(name, streaming): synced(rank, SHARES[name][rank], streaming) for name, streaming in cases}
    torch.distributed.destroy_process_group()
    (path / str(rank)).write_bytes(pickle.dumps(results))


@pytest.mark.tier("full")
def test_two_processes_equal_a_single_process(tmp_path):
    in_processes(worker, 2, tmp_path)
    results, other = (pickle.loads((tmp_path / rank).read_bytes()) for rank in "01")
    assert results == other
    features, labels, weight = distributed_samples()
    more = torch.cat([features, features[:50], features[:50] + 1])
    batches = ((features, labels), (more, torch.cat([labels, labels[:50], labels[:50]])))
    expected = [neural_collapse(*batch, weight, **DISTRIBUTED) for batch in batches]
    for pair in results.values():
        for result, whole in zip(pair, expected, strict=True):
            assert_metrics_close(result, whole, fields=(*KEPT_FIELDS, "excluded", "nc4"))
