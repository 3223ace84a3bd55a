"""The norm_act ops of every kernel, and ResidualCell with them: values, gradients, errors."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from correctness import ACCURACY_UNITS, FINITE_DIFFERENCES, OPERATIONS, assert_accurate, assert_close, rounding
from correctness.norm_states import LARGE_SHAPES, NORM_DTYPES, NORM_OPS, NORM_SHAPES, NormCase, check_norm
from interpreter import INTERPRETED
from op_calls import check_bits
from torch import nn

import deqfast
from deqfast import ResidualCell

# Groups of one, several and all packs that a CUDA thread can hold, in channels of one block's width and of less.
HELD_SHAPES = [((2, 64, 12, 12), 8), ((1, 16, 32, 32), 2), ((1, 512, 2, 2), 4), ((1, 1024, 2, 3), 1)]
LOW = [torch.float32, torch.bfloat16]
FORMATS = {"channels_last": torch.channels_last, "contiguous": torch.contiguous_format}
every_op = pytest.mark.parametrize("op", NORM_OPS)
every_dtype = pytest.mark.parametrize("dtypes", NORM_DTYPES)
every_shape = pytest.mark.parametrize(("shape", "groups"), NORM_SHAPES)
every_format = pytest.mark.parametrize("memory_format", FORMATS)
every_layout = pytest.mark.parametrize(  # the kernels of a GPU take one
    ("implementation", "memory_format"),
    [("cpp", "contiguous"), *product(["cpp", "triton", "cuda", "emulated"], ["channels_last"])],
    indirect=["implementation"],
)
fused_kernels = pytest.mark.parametrize("kernel", ["cpp", "triton", "cuda"], indirect=True)


def residual_cell(kernel: str, channels: int = 8, groups: int = 2, **settings) -> ResidualCell:
    torch.manual_seed(0)
    cell = ResidualCell(channels, groups, kernel=kernel, **settings)
    for norm in (cell.norm1, cell.norm2, cell.norm3):
        nn.init.normal_(norm.weight, 1.0, 0.3)
        nn.init.normal_(norm.bias, 0.0, 0.3)
    for convolution in (cell.conv1, cell.conv2):
        convolution.weight.data.mul_(0.3)
    return cell


def with_kernel(cell: ResidualCell, kernel: str) -> ResidualCell:
    twin = copy.deepcopy(cell)
    twin.kernel = kernel
    return twin


def state(shape=(3, 8, 4, 3), dtype=torch.float32, memory_format="channels_last", device="cpu", requires_grad=False):
    torch.manual_seed(1)
    tensors = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
    return [t.contiguous(memory_format=FORMATS[memory_format]).requires_grad_(requires_grad) for t in tensors]


class TestKernels:
    @pytest.mark.covering(2)
    @every_op
    @every_dtype
    @every_shape
    @every_layout
    def test_accuracy(self, implementation, memory_format, shape, groups, dtypes, op):
        case = NormCase(op, shape, groups, dtypes, FORMATS[memory_format])
        check_norm(implementation.op(op), case, implementation.device)

    @pytest.mark.parametrize("implementation", ["cuda", "emulated"], indirect=True)
    @every_op
    @every_dtype
    @pytest.mark.parametrize(("shape", "groups"), HELD_SHAPES)
    def test_groups_that_threads_hold(self, shape, groups, dtypes, op, implementation):
        check_norm(implementation.op(op), NormCase(op, shape, groups, dtypes), implementation.device)

    @every_op
    @pytest.mark.parametrize(
        "case", [*({"shape": shape, "groups": groups} for shape, groups in LARGE_SHAPES), {"offset": 3000.0}], ids=str
    )
    def test_large_groups_and_a_large_mean_cost_no_digits(self, case, op, implementation):
        check_norm(implementation.op(op), NormCase(op, **case), implementation.device)

    @every_op
    @every_layout
    def test_a_long_sum_of_equal_terms_costs_no_digits(self, implementation, memory_format, op):
        case = NormCase(op, (1, 4, 256, 256), 1, memory_format=FORMATS[memory_format], offset=0.0, is_relu=True)
        check_norm(implementation.op(op), case, implementation.device)

    @every_op
    def test_an_empty_batch(self, op, implementation):
        arguments = NormCase(op, shape=(0, 16, 3, 5)).arguments(implementation.device)
        for result in implementation.op(op)(*arguments.values()):
            assert 0 in result.shape

    @fused_kernels
    @pytest.mark.parametrize("formats", [("channels_last", "channels_last"), ("contiguous", "channels_last")])
    def test_an_empty_batch_through_the_cell(self, formats, kernel, device):
        """Of which torch keeps strides that are of neither format."""
        cell = ResidualCell(8, 4, kernel=kernel).to(device)
        z, x = (torch.randn(2, 8, 3, 5, device=device).contiguous(memory_format=FORMATS[name])[:0] for name in formats)
        cell(z, x.requires_grad_()).mean((2, 3)).sum().backward()
        assert x.grad.shape == x.shape and not cell.conv1.weight.grad.any()

    @every_op
    @every_layout
    @pytest.mark.parametrize(("shape", "groups"), [((3, 16, 3, 5), 4), ((3, 24, 40, 41), 8)])
    def test_bits_depend_on_nothing_but_the_sample(self, shape, groups, op, memory_format, implementation, set_threads):
        if implementation.name == "triton" and INTERPRETED and groups == 8:
            pytest.skip("the interpreter is slow")
        arguments = NormCase(op, shape, groups, memory_format=FORMATS[memory_format]).arguments(implementation.device)
        check_bits(implementation.op(op), [*arguments.values()], implementation, set_threads, batch=3)

    @every_op
    def test_nan_stays_in_its_group(self, op, implementation):
        arguments = NormCase(op, shape=(3, 16, 3, 5)).arguments(implementation.device)
        healthy = implementation.op(op)(*arguments.values())
        arguments["y"][1, 5, 0, 0] = torch.nan
        broken = implementation.op(op)(*arguments.values())
        for a, b in zip(broken, healthy, strict=True):
            rest = [0, 2]
            assert torch.equal(a[rest], b[rest]) if len(a) == 3 else torch.equal(a[:, rest], b[:, rest])
        if not op.endswith("backward"):
            assert broken[0][1, 4:8].isnan().all() and torch.equal(broken[0][1, 8:], healthy[0][1, 8:])


class TestCell:
    @pytest.mark.parametrize("kernel", ["cpp", "triton"], indirect=True)
    @every_format
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_it_is_the_plain_cell(self, dtype, memory_format, kernel, device):
        cell = residual_cell(kernel).to(device, dtype).to(memory_format=FORMATS[memory_format])
        assert set(cell.state_dict()) == set(residual_cell("torch").state_dict()) and f"kernel='{kernel}'" in repr(cell)
        z, x = state(dtype=dtype, memory_format=memory_format, device=device, requires_grad=True)
        results = []
        for twin in (cell, with_kernel(cell, "torch")):
            f = twin(z, x)
            grads = torch.autograd.grad(f, [z, x, *twin.parameters()], torch.ones_like(f).cumsum(1))
            with torch.no_grad():
                assert_close(twin(z, x), f, rounding(dtype, OPERATIONS))
            results.append((f, *grads))
            if twin is cell and (kernel == "cpp" or memory_format == "channels_last"):
                assert f.is_contiguous(memory_format=FORMATS[memory_format])
        assert_close(results[0], results[1], rounding(dtype, 4 * OPERATIONS))

    @pytest.mark.parametrize("kernel", ["cpp"], indirect=True)
    def test_gradients_of_first_and_second_order(self, kernel, device):
        cell = residual_cell(kernel, channels=4).to(device, torch.float64)
        z, x = state((1, 4, 2, 2), torch.float64, device=device, requires_grad=True)
        inputs = z, x, *(p for norm in (cell.norm1, cell.norm2, cell.norm3) for p in norm.parameters())
        for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
            assert check(lambda z, x, *_: cell(z, x), inputs, **FINITE_DIFFERENCES)

    @pytest.mark.parametrize(
        ("dtype", "z_dtype", "x_dtype"), [*product([torch.float32], LOW, LOW), (torch.bfloat16,) * 3], ids=str
    )
    def test_low_precision(self, dtype, z_dtype, x_dtype):
        """A cell in float32 under autocast, and one in bfloat16."""

        def with_gradients(cell, z, x):
            f = cell(z.requires_grad_(), x.requires_grad_())
            total = f.to(torch.promote_types(f.dtype, torch.float32)).sin().sum()
            return f, *torch.autograd.grad(total, [z, x, *cell.parameters()])

        cell, (z, x) = residual_cell("auto").to(dtype), state()
        z, x, plain = z.to(z_dtype), x.to(x_dtype), with_kernel(cell, "torch")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.float32):
            low = [with_gradients(each, z, x) for each in (cell, plain)]
        exact = with_gradients(copy.deepcopy(plain).double(), z.detach().double(), x.detach().double())
        for value, like, right in zip(*low, exact, strict=True):
            assert value.dtype == like.dtype
            units = ACCURACY_UNITS * torch.finfo(torch.bfloat16).eps / torch.finfo(value.dtype).eps
            assert_accurate(value, like, right, units=units)

    def test_what_the_kernels_do_not_serve(self):
        z, x = state(dtype=torch.float16)
        cell = residual_cell("auto").half()
        assert torch.equal(cell(z, x), with_kernel(cell, "torch")(z, x))
        if deqfast.backends()["cpp"]:
            with pytest.raises(RuntimeError, match="`y` must be float32, bfloat16 or float64"):
                with_kernel(cell, "cpp")(z, x)
