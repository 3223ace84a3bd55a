"""Low precision that no dtype shows: products of float32 in TF32 or bfloat16."""

from types import SimpleNamespace

import pytest
import torch

import deqfast
from deqfast import Status
from deqfast.state import floors
from deqfast.state.floors import float32_products_eps
from deqfast.state.packing import Packing

BF16, TF32 = torch.finfo(torch.bfloat16).eps, 2.0**-10


@pytest.fixture
def products(monkeypatch):
    """Sets torch's precision of float32 products on the CPU for a test."""
    before = torch.backends.mkldnn.matmul.fp32_precision
    yield lambda precision: setattr(torch.backends.mkldnn.matmul, "fp32_precision", precision)
    torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.parametrize(("precision", "eps"), [("ieee", 0.0), ("tf32", 0.0), ("bf16", BF16)])
def test_products_of_float32_count_as_what_torch_may_round_them_to(products, precision, eps):
    products(precision)
    full, half = torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.float16)
    packing = Packing(full)
    assert packing.stall_floor(half) == packing.stall_floor((full, half)) == 8 * torch.finfo(torch.float16).eps
    assert packing.stall_floor(full) == eps / 4
    assert packing.stall_floor(full.double()) == 0
    assert Packing(full.bfloat16()).stall_floor(full) == 8 * BF16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert packing.stall_floor(full) == 8 * BF16


@pytest.mark.parametrize(
    ("matmul", "conv", "capability", "eps"),
    [
        ("none", "tf32", (8, 0), TF32),  # torch's defaults
        ("tf32", "ieee", (9, 0), TF32),
        ("ieee", "none", (9, 0), 0.0),
        ("tf32", "tf32", (7, 5), 0.0),
    ],
)
def test_on_a_gpu_both_settings_and_the_architecture_count(monkeypatch, matmul, conv, capability, eps):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(floors, "_has_tf32", floors._has_tf32.__wrapped__)
    parts = [SimpleNamespace(fp32_precision=setting) for setting in (matmul, conv)]
    monkeypatch.setitem(floors.PRECISIONS, "cuda", parts)
    assert float32_products_eps(torch.device("cuda")) == eps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_state_of_low_precision_under_a_value_of_float32_stalls_and_is_consistent(dtype):
    weight, x = torch.randn(64, 64) / 16, torch.randn(8, 64, requires_grad=True)
    block = deqfast.DEQBlock(lambda z, x: torch.tanh(z.float() @ weight + x), deqfast.Anderson(1e-4, 40), warn=False)
    _, solution = block(x, z0=torch.zeros(8, 64, dtype=dtype), return_solution=True)
    assert set(solution.status.tolist()) <= {Status.CONVERGED, Status.STALLED}


@pytest.mark.parametrize("compile", [False, True])
def test_samples_stall_at_the_floor_of_rounded_products(products, compile, request):
    """A residual that stays at 1e-4 is stalled by products in bfloat16 or by autocast, also where code exists."""
    if compile:
        request.getfixturevalue("cpp_kernels")
    solver = deqfast.Picard(1e-6, 40)
    block = deqfast.DEQBlock(lambda z, x: z + 1e-4 * x, solver, compile=compile, warn=False)
    x = torch.ones(2, 3)
    for precision, autocast in (("ieee", False), ("bf16", False), ("ieee", True), ("ieee", False)):
        products(precision)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            status = block(x, z0=torch.ones_like(x), return_solution=True)[1].status
        expected = Status.STALLED if autocast or precision == "bf16" else Status.MAX_ITER
        assert (status == expected).all()
