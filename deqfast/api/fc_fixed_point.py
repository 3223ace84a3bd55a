"""Fully connected fixed points z = act(W z + c) as a function, with the Jacobian-free gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .._checks import check_choice, check_dense
from ..engine.runners import single_launch
from ..engine.runners.single_launch import STATE_DTYPES
from ..engine.solve import Options, Solve
from ..ops import ACTIVATIONS, Kernel, choose_kernel, kernel_name
from ..ops.fc import reference
from ..ops.fc.autograd import JacobianFree
from ..ops.registry import library
from ..solution import Solution
from ..solvers import Picard, Solver, as_solver
from ..torch_internals.dynamo import is_exporting, is_tracing
from ..torch_internals.transforms import check_plain, check_values
from ..transforms.export import solve_in_export

_DEFAULT_SOLVER = Picard()


def _check(weight: Tensor, c: Tensor, z0: Tensor | None) -> None:
    for name, tensor in (("weight", weight), ("c", c), ("z0", z0)):
        if not isinstance(tensor, Tensor) and not (name == "z0" and tensor is None):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor is not None:
            check_dense(name, tensor)
    if c.dim() != 2 or not c.shape[1] or c.dtype not in STATE_DTYPES:
        raise ValueError(f"c must be (B, D) float32 or float64 with D > 0, got {tuple(c.shape)} {c.dtype}")
    features = c.shape[1]
    short = weight.dtype == torch.bfloat16 and c.dtype == torch.float32
    if tuple(weight.shape) != (features, features) or not (weight.dtype == c.dtype or short):
        got = f"got {tuple(weight.shape)} {weight.dtype}"
        raise ValueError(f"weight must be ({features}, {features}) {c.dtype}, or bfloat16 for a float32 c, {got}")
    if z0 is not None and (z0.shape != c.shape or z0.dtype != c.dtype):
        raise ValueError(f"z0 must be {tuple(c.shape)} {c.dtype}, got {tuple(z0.shape)} {z0.dtype}")
    for name, tensor in (("weight", weight), ("z0", z0)):
        if tensor is not None and tensor.device != c.device:
            raise ValueError(f"{name} must be on the device of c ({c.device}), got {tensor.device}")


def fc_fixed_point(
    weight: Tensor,
    c: Tensor,
    z0: Tensor | None = None,
    activation: str = "tanh",
    solver: str | Solver | None = None,
    kernel: str = "auto",
) -> tuple[Tensor, Solution]:
    """Solve z = act(W z + c) for every sample in one launch; return z and the Solution.

    z carries the Jacobian-free gradient (Fung et al., AAAI 2022, as ``JFB``) in `weight` and `c`: the gradient of
    act(W z + c) with z fixed. z0 gets no gradient, nor does a sample whose f was not finite. The computation uses the
    given dtypes, under autocast too.

    Args:
        weight: W, (D, D) in the dtype of c, or bfloat16 for a float32 c; its values are multiplied in the dtype of c.
        c: (B, D), float32 or float64.
        z0: the start, shaped like c; None: zeros.
        activation: "identity", "relu", "tanh" or "gelu" (with erf).
        solver: ``Picard`` with relaxation 1; None: ``Picard()``.
        kernel: "auto", "triton", "cuda", "cpp" or "torch". "auto" takes the ordinary loop (``deqfast.solve``) if W fits
            no kernel or, on a GPU, if B D^2 exceeds 2^28. On a CPU, "auto" and "cpp" take it if 16 max_iter (D + 32)^2
            exceeds 2^32, so that Ctrl-C can end the solve. By name, "triton" supports float32 with D <= 128, or
            bfloat16 weights with D <= 256 (128 if a block has less than 144 KiB of shared memory). "cuda" supports
            D <= 2048, if it fits into the GPU's shared memory. "torch" makes all of max_iter iterations.

    Raises:
        TypeError, ValueError: an argument is not as above, or z0 is not finite. The text names it, and what is allowed.
        RuntimeError: `kernel` cannot run (triton: ValueError), or a call is in torch.func or forward-mode AD.

    Examples:
        >>> weight = (0.1 * torch.randn(16, 16)).requires_grad_()
        >>> z, solution = deqfast.fc_fixed_point(weight, torch.randn(4, 16))
        >>> z.square().mean().backward()
        >>> weight.grad.shape
        torch.Size([16, 16])
    """
    _check(weight, c, z0)
    if not is_tracing():
        check_values("c", c)
        check_plain("fc_fixed_point", (weight, c, z0))
    check_choice("activation", activation, ACTIVATIONS)
    solver = _DEFAULT_SOLVER if solver is None else as_solver(solver)
    if type(solver) is not Picard or solver.relaxation != 1:
        raise ValueError(f"solver must be Picard with relaxation 1, got {solver}")
    z0 = torch.zeros_like(c) if z0 is None else z0
    if is_exporting():
        chosen = choose_kernel("torch" if kernel == "auto" else kernel, c.device)
    else:
        chosen = Kernel(kernel_name(kernel, c.device.type)) if is_tracing() else choose_kernel(kernel, c.device)
    run = _solve_traced if is_tracing() and not is_exporting() else _solve
    solution = run(weight, c, z0, activation, solver, kernel, chosen)
    value = JacobianFree.apply(weight, c, solution.value, solution.status, ACTIVATIONS.index(activation), chosen)
    return value, solution


def _solve(
    weight: Tensor, c: Tensor, z0: Tensor, activation: str, solver: Picard, requested: str, kernel: Kernel
) -> Solution:
    """Solve in one launch, or in the ordinary loop if "auto" prefers it, or if a long solve or an export needs it."""
    is_served = requested not in ("auto", "cpp") or single_launch.serves(requested, kernel, weight, c, solver.max_iter)
    if is_served and not is_exporting():
        return single_launch.launch(weight, c, z0, activation, solver, kernel, 0.0)
    wide, function = weight.detach().to(c.dtype), reference.ACTIVATIONS[ACTIVATIONS.index(activation)]
    options = Options(solver=solver, kernel=kernel.name)
    run = solve_in_export if is_exporting() else lambda f, z0, options: Solve(z0, options)(f, z0)
    with torch.autocast(c.device.type, enabled=False):
        return run(lambda z: function(F.linear(z, wide) + c), z0, options)


def _solve_traced(
    weight: Tensor, c: Tensor, z0: Tensor, activation: str, solver: Picard, requested: str, kernel: Kernel
) -> Solution:
    """``_solve`` as one op of a graph of torch.compile."""
    settings = solver.rtol, solver.max_iter, solver.atol, solver.norm
    value, status, iterations, relative, absolute, calls = torch.ops.deqfast.solve_fc(
        weight.detach(), c.detach(), z0.detach(), activation, *settings, requested
    )
    residual = absolute if solver.is_absolute else relative
    return Solution(value, status, iterations, residual, relative, absolute, calls[0], calls[1])


def _solve_op(
    weight: Tensor,
    c: Tensor,
    z0: Tensor,
    activation: str,
    rtol: float,
    max_iter: int,
    atol: float,
    norm: str,
    kernel: str,
) -> list[Tensor]:
    solver = Picard(rtol, max_iter, atol=atol, norm=norm)
    solution = _solve(weight, c, z0, activation, solver, kernel, choose_kernel(kernel, c.device))
    calls = torch.tensor([solution.evaluations, solution.sample_evaluations], device="cpu")
    # The residuals are rows of one tensor, and results of an op may not share memory.
    residuals = [solution.residual_rel.clone(), solution.residual_abs.clone()]
    return [solution.value.contiguous(), solution.status, solution.iterations, *residuals, calls]


def _fake_solve_op(weight: Tensor, c: Tensor, *settings: Any) -> list[Tensor]:
    rows = [c.new_empty(c.shape[0], dtype=dtype) for dtype in (torch.int8, torch.int32, c.dtype, c.dtype)]
    return [c.new_empty(c.shape), *rows, torch.empty(2, dtype=torch.int64, device="cpu")]


library.define(
    f"solve_fc{torch.library.infer_schema(_solve_op, mutates_args=())}",
    tags=(torch.Tag.cudagraph_unsafe,),  # it reads from the device
)
library.impl("solve_fc", _solve_op, "CompositeExplicitAutograd")
torch.library.register_fake("deqfast::solve_fc", _fake_solve_op, lib=library)
