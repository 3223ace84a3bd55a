"""Fully connected fixed points z = act(W z + c), solved in one launch without the host in the loop.

The solve stops by the same rule and returns the same Solution as ``deqfast.solve`` with ``Picard(relaxation=1)``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import _extension
from ...ops import ACTIVATIONS, Kernel, choose_kernel
from ...ops.fc import STATE
from ...solution import Solution
from ...solvers import Picard, Solver
from ...state.floors import stall_floor
from ..solve import not_finite

STATE_DTYPES = tuple(STATE.allowed)
# Most products per evaluation for which "auto" takes the one launch on a GPU. Above it, the ordinary loop should be
# faster, since it uses matrix units. The number comes from a cost model and is not measured.
MAX_AUTO_PRODUCTS = 1 << 28
# Most products of a block of samples on a CPU: a few tenths of a second of one core. Python handles Ctrl-C between
# launches. Above it, at 20 evaluations D > 3,600, the ordinary loop was at least as fast on an AMD EPYC.
MAX_BLOCK_PRODUCTS = 1 << 32
BLOCK = 16  # samples that a core solves at a time


def has_kernel(kernel: Kernel, weight: Tensor, dtype: torch.dtype, max_iter: int) -> bool:
    """Return whether `kernel` solves with this weight and state dtype in one launch of its own.

    On a CPU, it leaves solves to the loop that could be so long that Ctrl-C would wait for a launch.
    """
    features, short = len(weight), weight.dtype == torch.bfloat16
    if kernel.name == "cuda":
        module = _extension.cuda_module
        return module is not None and module.fc_fits(weight.get_device(), features, short, dtype == torch.float64)
    if kernel.name == "triton":
        from ...kernels.config import fc_features, shared_memory

        return dtype == torch.float32 and features <= fc_features(weight.dtype, shared_memory(weight.device))
    return kernel.name == "cpp" and _block_products(features, max_iter) <= MAX_BLOCK_PRODUCTS


def serves(requested: str, kernel: Kernel, weight: Tensor, z0: Tensor, max_iter: int) -> bool:
    """Return whether `kernel` solves in one launch and, for kernel "auto", whether that should be faster."""
    if requested == "auto" and z0.is_cuda and z0.numel() * len(weight) > MAX_AUTO_PRODUCTS:
        return False
    return has_kernel(kernel, weight, z0.dtype, max_iter)


def _block_products(features: int, max_iter: int) -> int:
    """Products of a block that makes all iterations, with its activations and judgements as products."""
    # An iteration of a sample costs about 1,000 products more, and each of its elements 64.
    return BLOCK * max_iter * (features + 32) ** 2


def _in_launches(
    weight: Tensor, c: Tensor, z0: Tensor, activation: int, max_iter: int, *rule: float
) -> Sequence[Tensor]:
    """Results of the op ``fc_fixed_point`` from one launch, or, for a long solve, from several, with the same bits."""
    blocks = max(MAX_BLOCK_PRODUCTS // _block_products(len(weight), max_iter), 1) * torch.get_num_threads()
    samples = zip(c.split(blocks * BLOCK), z0.split(blocks * BLOCK), strict=True)
    solve: Callable[..., Sequence[Tensor]] = torch.ops.deqfast.fc_fixed_point
    parts = [solve(weight, *part, activation, max_iter, *rule) for part in samples]
    if len(parts) == 1:
        return parts[0]
    return [torch.cat(results, dim=int(k == 3)) for k, results in enumerate(zip(*parts, strict=True))]


def launch(
    weight: Tensor, c: Tensor, z0: Tensor, activation: str, solver: Picard, kernel: Kernel, stall_floor: float
) -> Solution:
    """Solve by the op, and wait for the device once; raises ValueError for rows of z0 that are not finite."""
    absolute = solver.is_absolute
    with torch.no_grad():
        weight, c, z0 = (tensor.detach().contiguous() for tensor in (weight, c, z0))
        run = _in_launches if kernel.name == "cpp" else kernel.op("fc_fixed_point")
        value, status, iterations, residual = run(
            *(weight, c, z0, ACTIVATIONS.index(activation), solver.max_iter, *solver.rule(stall_floor))
        )
        calls = samples = 0
        if len(c):
            finite = torch.isfinite(z0).all(dim=1)
            calls, samples, healthy = torch.stack([iterations.amax(), iterations.sum(), finite.all()]).tolist()
            if not healthy:
                raise not_finite(finite)
            if kernel.name == "torch":  # it does not stop early
                calls, samples = solver.max_iter, solver.max_iter * len(c)
    return Solution(value, status, iterations, residual[int(absolute)], residual[0], residual[1], calls, samples)


def solve_cell(
    weight: Tensor, injection: Callable[[], Tensor], activation: str, z0: Any, solver: Solver, kernel: str
) -> Solution | None:
    """Solve a cell act(W z + injection()) in one launch, or return None if only the ordinary loop serves.

    One launch needs the solver ``Picard(relaxation=1)``, and a state of one float32 or float64 tensor
    (B, D), in the dtype of W. It also needs a kernel for this size; without it, a kernel chosen by name runs the
    ordinary loop. Under bfloat16 autocast W is rounded to bfloat16, the state stays float32, and samples can stall as
    in the loop.
    """
    if type(solver) is not Picard or solver.relaxation != 1 or not isinstance(z0, Tensor) or z0.dim() != 2:
        return None
    if (z0.shape[1], z0.device, z0.dtype) != (len(weight), weight.device, weight.dtype):
        return None
    floor, device = 0.0, z0.device.type
    if torch.is_autocast_enabled(device):
        if torch.get_autocast_dtype(device) != torch.bfloat16 or z0.dtype != torch.float32:
            return None
        weight, floor = weight.to(torch.bfloat16), stall_floor([z0], [], z0.device, 0.0)
    chosen = choose_kernel(kernel, z0.device)
    if z0.dtype not in STATE_DTYPES or not serves(kernel, chosen, weight, z0, solver.max_iter):
        return None
    c = injection()
    c = c.to(z0.dtype) if weight.dtype == torch.bfloat16 else c
    if (c.shape, c.dtype, c.device) != (z0.shape, z0.dtype, z0.device):
        return None
    return launch(weight, c, z0, activation, solver, chosen, floor)
