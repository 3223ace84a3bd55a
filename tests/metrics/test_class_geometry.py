"""Geometry of classes under imbalance: closed forms, optima found numerically, and refused arguments."""

import math

import pytest
import torch
from collapse_samples import assert_alike
from correctness import assert_close, rounding
from torch.nn import functional as F

import deqfast
from deqfast.metrics import ETFClassifier, class_geometry
from deqfast.metrics.geometry import gram_distance, orthogonal_frame, seli, simplex

SIZES = torch.tensor([8.0, 8.0, 2.0, 1.0], dtype=torch.float64)
PENALTY = 3e3


def rotation(width):
    return torch.linalg.qr(torch.randn(width, width, dtype=torch.float64)).Q


def factor(gram):
    """Vectors with this Gram matrix."""
    values, vectors = torch.linalg.eigh(gram)
    return vectors * values.clamp_min(0).sqrt()


TARGETS = {
    "simplex": lambda is_means: simplex(SIZES),
    "orthogonal": lambda is_means: orthogonal_frame(SIZES, is_means),
    "seli": lambda is_means: seli(SIZES, is_means),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_is_at_no_distance_of_itself_in_any_rotation_and_scale(name):
    means, weight = (factor(TARGETS[name](is_means)) @ rotation(4) for is_means in (True, False))
    result = class_geometry(means * 1e-90, SIZES.long(), weight * 1e90)
    for part in (result.means, result.classifier):
        distances = {kind: getattr(part, kind) for kind in TARGETS}
        assert distances.pop(name) < 1e-14 and min(distances.values()) > 0.03


@pytest.mark.parametrize("name", TARGETS)
def test_the_logits_of_a_target_are_simplex_labels(name):
    """Whatever the class sizes, once what the logits of a sample have in common is gone."""
    means = factor(TARGETS[name](True)) @ rotation(4)
    # W of the least norm with logits C for these means: its Gram matrix is the target's.
    weight = torch.linalg.lstsq(means, simplex(SIZES)).solution.T
    assert gram_distance(weight, TARGETS[name](False)) < 1e-12
    for bias in (None, torch.full((4,), 3.0, dtype=torch.float64)):
        assert class_geometry(means, SIZES.long(), weight, classifier_bias=bias).logits < 1e-12


def test_the_logits_in_closed_form():
    def logits(means, weight, bias=None):
        means, bias = torch.tensor(means), None if bias is None else torch.tensor(bias)
        return class_geometry(means, torch.ones(len(means)), torch.tensor(weight), classifier_bias=bias).logits

    # Without means only the bias is left: centred, it is (1, -1) / 2 for both classes, at 90 degrees to the labels.
    assert logits([[1.0], [1.0]], [[0.0], [0.0]], [1.0, 0.0]) == pytest.approx(math.sqrt(2))
    assert logits([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]], [0.0, 0.0]) == pytest.approx(0, abs=1e-7)
    # Logits (2, 0) and (0, 1): centred (1, -1) and (-1/2, 1/2), of norm sqrt(5/2); the labels' product is 3/2.
    apart = math.sqrt(2 - 2 * 1.5 / math.sqrt(2.5))
    assert logits([[2.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]]) == pytest.approx(apart)
    assert class_geometry(torch.ones(2, 1), torch.ones(2)).logits is None
    assert math.isnan(logits([[1.0] * 3], [[1.0] * 3]))


def test_the_simplex_in_closed_form():
    """Off-centre, it is equinorm and equiangular, and only the centred Gram matrix is at no distance."""
    corners = factor(simplex(SIZES)) @ rotation(4)
    means = class_geometry(corners + 3 * torch.randn(4, dtype=torch.float64), torch.full((4,), 5)).means
    assert max(means.simplex_centered, means.equinorm, means.equiangular) < 1e-13 < 0.5 < means.simplex
    assert means.majority_cosine > 0 and math.isnan(means.minority_cosine) and math.isnan(means.between_cosine)


def test_cdnv_in_closed_form():
    """Means at 0, 3 and 4 on a line, variances 1, 2 and 3."""
    means, traces = torch.tensor([[0.0], [3.0], [4.0]]), torch.tensor([1.0, 2.0, 3.0])
    assert class_geometry(means, torch.ones(3), traces=traces).cdnv == pytest.approx(
        ((1 + 2) / 18 + (1 + 3) / 32 + (2 + 3) / 2) / 3
    )


def optimum(not_negative):
    """Classifier and class means (K, K) of least penalty with margins of about 1, by descent from random ones."""
    weight, free = (torch.randn(4, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
    limits = {"max_iter": 3000, "max_eval": 6000, "tolerance_grad": 1e-10, "tolerance_change": 1e-16}
    descent = torch.optim.LBFGS([weight, free], history_size=40, line_search_fn="strong_wolfe", **limits)

    def loss():
        descent.zero_grad()
        means = free.square() if not_negative else free
        logits = means @ weight.T
        missed = F.relu(1 - (logits.diagonal()[:, None] - logits)).square().sum(1) - 1  # of itself each misses 1
        value = weight.square().sum() + (SIZES * means.square().sum(1)).sum() + PENALTY * (SIZES * missed).sum()
        value.backward()
        return value

    for _ in range(2):
        descent.step(loss)
    return weight.detach(), (free.square() if not_negative else free).detach()


@pytest.mark.tier("full")
@pytest.mark.parametrize(("not_negative", "name"), [(True, "orthogonal"), (False, "seli")])
def test_the_targets_are_the_optima_of_free_features(not_negative, name):
    """A penalty lets margins be short by a share of 1 / PENALTY, times norms of order 1 over sizes of 1 to 8."""
    weight, means = optimum(not_negative)
    result = class_geometry(means, SIZES, weight)
    for part in (result.means, result.classifier):
        others = TARGETS.keys() - {name}
        assert getattr(part, name) < 3 / PENALTY and min(getattr(part, kind) for kind in others) > 0.03


def test_classes_without_samples_are_dropped():
    means, counts, weight = torch.randn(6, 3), torch.tensor([4, 0, 2, 7, 0, 7]), torch.randn(6, 3)
    seen, traces = counts > 0, torch.rand(6)
    kept = class_geometry(means[seen], counts[seen], weight[seen], traces[seen])
    assert_alike(class_geometry(means, counts, weight, traces), kept)
    assert kept.num_classes == 4
    single = class_geometry(means, torch.tensor([0, 0, 5, 0, 0, 0]))
    assert single.num_classes == 1 and all(map(math.isnan, single.means))
    assert single.classifier is single.cdnv is None


def test_it_is_measured_with_nc1_to_nc4():
    """Rows that are not finite, and a class without samples, are left out."""
    labels = torch.cat([torch.zeros(90), torch.ones(90), torch.full((9,), 3)]).long()[torch.randperm(189)]
    features = torch.randn(4, 6, dtype=torch.float64)[labels] + 0.3 * torch.randn(189, 6, dtype=torch.float64)
    weight = torch.randn(4, 6, dtype=torch.float64)
    features[5, 2] = torch.nan
    kept = torch.arange(189) != 5
    samples = [features[kept & (labels == label)] for label in (0, 1, 3)]
    means, counts = torch.stack([rows.mean(0) for rows in samples]), torch.tensor(list(map(len, samples)))
    traces = torch.stack([(rows - rows.mean(0)).square().sum(1).mean() for rows in samples])
    expected = class_geometry(means, counts, weight[[0, 1, 3]], traces)
    result = deqfast.neural_collapse(features, labels, weight, geometry=True)
    assert_alike(result.geometry, expected)
    assert result._replace(geometry=None) == deqfast.neural_collapse(features, labels, weight)
    lost = deqfast.neural_collapse(torch.full((3, 2), torch.nan), torch.arange(3), geometry=True)
    assert lost.num_classes == 0 and lost.geometry is None


BAD = [
    (TypeError, "counts has dtype torch.int8", {"counts": torch.ones(3, dtype=torch.int8)}),
    (TypeError, "means|features", {"means": [[1.0]]}),
    (ValueError, r"counts has shape \(2,\); it must be \(3,\)", {"counts": torch.ones(2)}),
    (ValueError, "counts is .*; it must be finite and at least 0, and one", {"counts": torch.zeros(3)}),
    (ValueError, "counts is .*; it must be finite", {"counts": torch.tensor([1.0, math.inf, 2.0])}),
    (ValueError, "counts is .*at least 0", {"counts": torch.tensor([1, -1, 2])}),
    (ValueError, r"classifier_weight has shape \(3, 4\)", {"classifier_weight": torch.ones(3, 4)}),
    (ValueError, "classifier_bias is given, and classifier_weight is None", {"classifier_bias": torch.ones(3)}),
    (ValueError, r"traces has shape \(4,\)", {"traces": torch.ones(4)}),
    (ValueError, "majority must be at least 1, got 0", {"majority": 0}),
]
BAD_CLASSIFIERS = [
    (ValueError, "in_features is 8; a simplex of 10 classes needs 9", {"in_features": 8}),
    (ValueError, "num_classes must be at least 2", {"num_classes": 1}),
    (ValueError, "scale must be finite and greater than 0", {"scale": 0}),
    (TypeError, "in_features must be an integer", {"in_features": 8.0}),
]


@pytest.mark.parametrize(
    ("call", "error", "words", "arguments"),
    [(class_geometry, *words, {"means": torch.randn(3, 5), "counts": torch.ones(3), **given}) for *words, given in BAD]
    + [(ETFClassifier, *words, {"in_features": 20, "num_classes": 10, **given}) for *words, given in BAD_CLASSIFIERS],
)
def test_bad_arguments_are_refused(call, error, words, arguments):
    with pytest.raises(error, match=words):
        call(**arguments)


@pytest.mark.parametrize(("width", "classes"), [(64, 10), (9, 10), (1, 2)])
def test_the_fixed_classifier_is_a_simplex(width, classes):
    classifier = ETFClassifier(width, classes, scale=3.0).double()
    gram = classifier.weight @ classifier.weight.T
    cosines = torch.full((classes, classes), -1 / (classes - 1)).fill_diagonal_(1).double()
    assert torch.allclose(gram, 9 * cosines, atol=1e-5)  # its weight was rounded to float32
    features = torch.randn(2, 5, width, dtype=torch.float64, requires_grad=True)
    assert_close(classifier(features), features @ classifier.weight.T, rounding(torch.float64))
    classifier(features).sum().backward()
    assert features.grad is not None and not list(classifier.parameters())
    again = ETFClassifier(width, classes, seed=1)
    again.load_state_dict(classifier.state_dict())
    assert torch.equal(again.weight.double(), classifier.weight)
