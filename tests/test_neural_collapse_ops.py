"""The ops of neural collapse, class means and within-class scatter, of every kernel against the float64 reference."""

import math

import pytest
import torch
from correctness import OPERATIONS, relative_error, rounding
from correctness.states import same_bits
from interpreter import INTERPRETED
from op_calls import check_bits
from torch import Tensor

from deqfast import NeuralCollapse, neural_collapse
from deqfast.ops import Kernel

TORCH = Kernel("torch")
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
NC1_OF_FLOATS = rounding(torch.float32, 2 * OPERATIONS)  # a projection and a sum of squares, in the dtype of a kernel
NC1_OF_DOUBLES = rounding(torch.float64, 5000)  # of a pseudo-inverse too
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def group(labels: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    ordered, rows = torch.sort(labels, stable=True)
    return rows, torch.searchsorted(ordered, torch.arange(classes + 1))


class Data:
    """Features around random class means, grouped by labels in random order, and directions to project them on."""

    def __init__(self, count, dim, classes, dtype=torch.float32, spread=0.3, offset=0.0, labels=None, directions=None):
        generator = torch.Generator().manual_seed(count + dim)
        means = torch.randn(classes, dim, generator=generator, dtype=torch.float64) + offset
        self.labels = torch.randint(classes, (count,), generator=generator) if labels is None else labels
        noise = spread * torch.randn(len(self.labels), dim, generator=generator, dtype=torch.float64)
        self.features = (means[self.labels] + noise).to(dtype)
        self.rows, self.offsets = group(self.labels, classes)
        shape = (dim, min(dim, classes) if directions is None else directions)
        self.directions = torch.randn(shape, generator=generator, dtype=torch.float64)

    @property
    def grouped(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.features, self.rows, self.offsets

    def means(self) -> Tensor:
        local, shift = TORCH.op("class_means")(*self.grouped)
        return local + shift

    def arguments(self, op: str, device: str = "cpu") -> list[Tensor]:
        tensors = [*self.grouped] if op == "class_means" else [*self.grouped, self.means(), self.directions]
        return [tensor.to(device) for tensor in tensors]

    def run(self, op: str, implementation):
        return implementation.op(op)(*self.arguments(op, implementation.device))


def tolerance(kernel: str, dtype: torch.dtype) -> float:
    return rounding(torch.float64 if kernel == "cpp" or dtype == torch.float64 else torch.float32)


def check(implementation, data: Data) -> None:
    """Both ops against the reference. Class means: to the accuracy of what they are sums of."""
    allowed = tolerance(implementation.name, data.features.dtype)
    local, shift = (x.cpu() for x in data.run("class_means", implementation))
    expected, first = TORCH.op("class_means")(*data.grouped)
    assert torch.equal(shift, first) and local.dtype == torch.float64
    assert relative_error(local, expected) <= allowed
    within = data.run("within_class_scatter", implementation)
    assert within.dtype == torch.float64
    assert relative_error(within, TORCH.op("within_class_scatter")(*data.arguments("within_class_scatter"))) <= allowed


SIZES = [(1, 1, 1, 1), (1, 63, 2, 2), (63, 1, 2, 1), (64, 63, 10, 10), (300, 96, 10, 10), (257, 64, 1, 1)]
SIZES += [(600, 16, 2, 2), (40, 40, 30, 30), (50, 777, 10, 10), (50, 1032, 10, 17), (50, 96, 10, 70), (50, 33, 10, 130)]


class TestAccuracy:
    @every_dtype
    @pytest.mark.parametrize(("count", "dim", "classes", "directions"), SIZES)
    def test_sizes(self, count, dim, classes, directions, dtype, implementation):
        if implementation.name == "triton" and INTERPRETED and dim > 100:
            dim = dim % 100  # the interpreter is slow
        check(implementation, Data(count, dim, classes, dtype, directions=directions))

    @pytest.mark.parametrize("counts", [[0, 3, 0, 0, 1, 300, 0], [1, 1, 1, 1], [256, 0, 256], [255, 2, 255], [0, 0, 5]])
    def test_empty_classes_and_singletons(self, counts, implementation):
        labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        data = Data(0, 24, len(counts), labels=labels[torch.randperm(len(labels))])
        check(implementation, data)
        local, shift = data.run("class_means", implementation)
        assert not (local + shift)[[k for k, count in enumerate(counts) if count == 0]].any()

    def test_rows_that_are_not_listed(self, implementation):
        data = Data(100, 20, 3)
        data.features[::3] = math.nan
        kept = data.labels.clone()
        kept[::3] = 3
        rows, offsets = group(kept, 4)
        data.rows, data.offsets = rows[: offsets[3]].contiguous(), offsets[:4].contiguous()
        check(implementation, data)

    @every_dtype
    def test_strided_rows(self, dtype, implementation):
        class_means, device = implementation.op("class_means"), implementation.device
        for dim, width in ((24, 48), (7, 21), (1, 2)):
            data = Data(70, dim, 3, dtype)
            view = torch.full((70, width), math.nan, dtype=dtype, device=device)[:, :dim].copy_(data.features)
            local, _ = class_means(view, *data.arguments("class_means", device)[1:])
            expected, _ = data.run("class_means", implementation)
            if implementation.name == "triton":  # which adds in another order where accesses can be wide
                assert relative_error(local, expected) <= tolerance("triton", dtype)
            else:
                assert same_bits(local, expected)
        repeated = data.features[:1].expand(70, 1).to(device)
        assert not class_means(repeated, *data.arguments("class_means", device)[1:])[0].any()

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    @every_dtype
    def test_a_feature_that_is_not_finite(self, value, dtype, implementation):
        data = Data(300, 20, 3, dtype)
        for row in (int(data.rows[-1]), int(data.rows[data.offsets[1]])):
            kept = data.features[row, 3].clone()
            data.features[row, 3] = value
            local, _ = data.run("class_means", implementation)
            assert not local[data.labels[row], 3].isfinite()
            data.features[row, 3] = kept

    @pytest.mark.parametrize("listed", [0, 5])
    def test_nothing_to_do(self, listed, implementation):
        data = Data(listed, 6, 2, directions=0 if listed else 3)
        within = data.run("within_class_scatter", implementation)
        assert within.shape == (data.directions.shape[1],) and not within.any()
        if listed == 0:
            local, shift = data.run("class_means", implementation)
            assert local.shape == (2, 6) and shift.shape == (6,) and not local.any() and not shift.any()

    @pytest.mark.parametrize(("offset", "spread"), [(0.0, 1e-4), (10.0, 1e-4), (10.0, 1e-6), (1e4, 1e-2)])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_collapsed_features(self, offset, spread, dtype, implementation):
        """NC1 down to 1e-12, where uncentred products have no digit left."""
        data = Data(200, 48, 4, dtype, spread=spread, offset=offset)

        def nc1(class_means, within_class_scatter, device) -> float:
            grouped = data.arguments("class_means", device)
            local, shift = class_means(*grouped)
            centred = local - local.mean(0)
            directions, singular, _ = torch.linalg.svd(centred.T, full_matrices=False)
            whitening = (directions[:, :3] / singular[:3]).contiguous()
            return float(within_class_scatter(*grouped, local + shift, whitening).sum() / 200)

        exact = nc1(TORCH.op("class_means"), TORCH.op("within_class_scatter"), "cpu")
        ops = (implementation.op(op) for op in ("class_means", "within_class_scatter"))
        reached = nc1(*ops, implementation.device)
        doubles = implementation.name == "cpp" or dtype == torch.float64
        assert reached == pytest.approx(exact, rel=NC1_OF_DOUBLES if doubles else NC1_OF_FLOATS)


@pytest.mark.parametrize("op", ["class_means", "within_class_scatter"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_same_bits_every_time(op, dtype, implementation, set_threads):
    size = (1000, 1500, 7) if implementation.name == "cpp" else (300, 40, 30)
    arguments = Data(*size, dtype).arguments(op, implementation.device)
    check_bits(implementation.op(op), arguments, implementation, set_threads)


@pytest.mark.parametrize("implementation", ["emulated", "cuda"], indirect=True)
def test_offsets_that_end_before_the_rows(implementation):
    """A GPU cannot check them without making the host wait: the rows that are left have no class."""
    data = Data(700, 40, 5)
    beyond = torch.cat([data.offsets - 150, torch.tensor([2**40])]).clamp_min(0)  # which lies after the last offset
    arguments = [x.to(implementation.device) for x in (data.features, data.rows, beyond)]
    local, shift = implementation.op("class_means")(*arguments[:2], arguments[2][:-1])
    expected = TORCH.op("class_means")(data.features, data.rows[: beyond[-2]], beyond[:-1])
    assert relative_error(local.cpu(), expected[0]) <= tolerance("cuda", torch.float32)
    assert torch.equal(shift.cpu(), expected[1])


class TestNeuralCollapse:
    """`kernel` "torch" stands for "auto": it is what the others are compared with."""

    @every_dtype
    @pytest.mark.parametrize("offset", [0.0, 10.0])
    def test_kernels_agree(self, kernel, device, dtype, offset):
        kernel = kernel.replace("torch", "auto")
        data = Data(150, 30, 6, dtype, offset=offset)
        data.features[7] = math.nan
        weight = torch.randn(8, 30, dtype=dtype)
        labels = data.labels + (data.labels > 2)  # a class without samples
        inputs = [x.to(device) for x in (data.features, labels, weight)]
        expected = neural_collapse(*inputs, kernel="torch")
        doubles = dtype == torch.float64 or kernel in ("cpp", "auto")
        rel = NC1_OF_DOUBLES if doubles else NC1_OF_FLOATS
        results = [neural_collapse(*inputs, kernel=kernel)]
        for streaming in (False, True):
            metric = NeuralCollapse(8, weight, streaming=streaming, kernel=kernel).to(device)
            for part in range(2):
                metric.update(inputs[0][part::2], inputs[1][part::2])
            results.append(metric.compute())
        for result in results:
            for field in ("nc1", "condition", "nc2", "nc2_centered", "nc3"):
                assert getattr(result, field) == pytest.approx(getattr(expected, field), rel=rel, abs=rel), field
            assert (result.rank, result.num_classes, result.excluded) == (5, 6, 1)
        assert results[0].nc4 == results[1].nc4 == pytest.approx(expected.nc4, rel=rel)

    def test_sums_that_overflow_are_an_error(self, kernel, device):
        features = torch.full((3, 2), 1e308, dtype=torch.float64, device=device)
        features[1:] *= -1
        with pytest.raises(ValueError, match="sums overflow float64"):
            neural_collapse(features, torch.zeros(3, dtype=torch.int64, device=device), kernel=kernel)
