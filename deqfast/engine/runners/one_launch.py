"""Fully connected fixed points z = act(W z + c), solved in one launch without the host in the loop.

The solve stops by the same rule and returns the same Solution as ``deqfast.solve`` with ``Picard(relaxation=1)``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import _extension
from ..._checks import check_choice, check_dense
from ...ops import ACTIVATIONS, Kernel, choose_kernel, kernel_name
from ...ops.fc import STATE, reference
from ...ops.fc.autograd import JacobianFree
from ...ops.registry import library
from ...solution import Solution
from ...solvers import Picard, Solver, as_solver
from ...state.floors import stall_floor
from ...torch_internals.dynamo import is_exporting, is_tracing
from ...torch_internals.transforms import check_plain, check_values, has_values
from ...transforms.export import solve_in_export
from ..solve import Options, Solve, not_finite

_STATE_DTYPES = tuple(STATE.allowed)
_DEFAULT_SOLVER = Picard()
# Most products per evaluation for which "auto" takes the one launch on a GPU. Above it, the ordinary loop should be
# faster, since it uses matrix units. The number comes from a cost model and is not measured.
MAX_AUTO_PRODUCTS = 1 << 28
# Most products of one launch on a CPU: a few tenths of a second on one core. Python handles Ctrl-C between launches.
MAX_LAUNCH_PRODUCTS = 1 << 31


def has_kernel(kernel: Kernel, weight: Tensor, dtype: torch.dtype) -> bool:
    """Return whether `kernel` solves with this weight and state dtype in one launch of its own."""
    features, short = len(weight), weight.dtype == torch.bfloat16
    if kernel.name == "cuda":
        module = _extension.cuda_module
        return module is not None and module.fc_fits(weight.get_device(), features, short, dtype == torch.float64)
    if kernel.name == "triton":
        from ...kernels.config import fc_features, shared_memory

        return dtype == torch.float32 and features <= fc_features(weight.dtype, shared_memory(weight.device))
    return kernel.name == "cpp"


def serves(requested: str, kernel: Kernel, weight: Tensor, z0: Tensor) -> bool:
    """Return whether `kernel` solves in one launch and, for kernel "auto", whether that should be faster."""
    if requested == "auto" and z0.is_cuda and z0.numel() * len(weight) > MAX_AUTO_PRODUCTS:
        return False
    return has_kernel(kernel, weight, z0.dtype)


def _in_launches(
    weight: Tensor, c: Tensor, z0: Tensor, activation: int, max_iter: int, *rule: float
) -> Sequence[Tensor]:
    """Results of the op ``fc_fixed_point`` from one launch, or, for a long solve, from several, with the same bits."""
    # Fewer samples than 8 take as long, since W is read once for a block of them. An iteration of a sample costs about
    # 1,000 products more, and each of its elements 64, for the activation and the judgement.
    of_sample = (len(weight) + 32) ** 2
    most = max(MAX_LAUNCH_PRODUCTS // of_sample, 8)
    if len(c) > most:
        samples = zip(c.split(most), z0.split(most), strict=True)
        parts = [_in_launches(weight, *part, activation, max_iter, *rule) for part in samples]
        return [torch.cat(found, dim=int(k == 3)) for k, found in enumerate(zip(*parts, strict=True))]
    each = max(MAX_LAUNCH_PRODUCTS // (max(len(c), 8) * of_sample), 1)
    if max_iter <= each:
        return torch.ops.deqfast.fc_fixed_point(weight, c, z0, activation, max_iter, *rule)
    state = reference.start(z0)
    _, _, *results, _ = state
    for k in range(0, max_iter, each):
        torch.ops.deqfast.fc_steps(weight, c, *state, activation, k, min(k + each, max_iter), max_iter, *rule)
        if bool(results[1].all()):  # no status is 0: none is running
            break
    return results


def _launch(
    weight: Tensor, c: Tensor, z0: Tensor, activation: str, solver: Picard, kernel: Kernel, stall_floor: float
) -> Solution:
    """Solve by the op, and wait for the device once; raises ValueError for rows of z0 that are not finite."""
    absolute = solver.is_absolute
    with torch.no_grad():
        weight, c, z0 = (tensor.detach().contiguous() for tensor in (weight, c, z0))
        run = _in_launches if kernel.name == "cpp" else kernel.op("fc_fixed_point")
        value, status, iterations, residual = run(
            *(weight, c, z0, ACTIVATIONS.index(activation), solver.max_iter, *solver.rule(stall_floor)),
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
    weight: Tensor,
    injection: Callable[[], Tensor],
    activation: str,
    z0: Any,
    solver: Solver,
    kernel: str,
) -> Solution | None:
    """Solve a cell act(W z + injection()) in one launch, or return None if only the ordinary loop serves.

    One launch needs the solver ``Picard(relaxation=1)``, and a state of one float32 or float64 tensor
    (B, D), in the dtype of W. It also needs a kernel for this size; without it, a kernel chosen by name runs the
    ordinary loop. Under bfloat16 autocast W is rounded to bfloat16, the state stays float32, and samples can stall as
    in the loop.
    """
    if type(solver) is not Picard or solver.relaxation != 1:
        return None
    if not isinstance(z0, Tensor) or z0.dim() != 2:
        return None
    if not has_values(z0):  # the loop refuses it
        return None
    if z0.shape[1] != len(weight) or z0.device != weight.device or z0.dtype != weight.dtype:
        return None
    floor, device = 0.0, z0.device.type
    if torch.is_autocast_enabled(device):
        if torch.get_autocast_dtype(device) != torch.bfloat16 or z0.dtype != torch.float32:
            return None
        weight, floor = weight.to(torch.bfloat16), stall_floor([z0.dtype], [], z0.device, 0.0)
    chosen = choose_kernel(kernel, z0.device)
    if z0.dtype not in _STATE_DTYPES or not serves(kernel, chosen, weight, z0):
        return None
    c = injection()
    c = c.to(z0.dtype) if weight.dtype == torch.bfloat16 else c
    if c.shape != z0.shape or c.dtype != z0.dtype or c.device != z0.device:
        return None
    return _launch(weight, c, z0, activation, solver, chosen, floor)


def _check(weight: Tensor, c: Tensor, z0: Tensor | None) -> None:
    for name, tensor in (("weight", weight), ("c", c), ("z0", z0)):
        if not isinstance(tensor, Tensor) and not (name == "z0" and tensor is None):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor is not None:
            check_dense(name, tensor)
    if c.dim() != 2 or not c.shape[1] or c.dtype not in _STATE_DTYPES:
        raise ValueError(f"c must be (B, D) float32 or float64 with D > 0, got {tuple(c.shape)} {c.dtype}")
    features = c.shape[1]
    short = weight.dtype == torch.bfloat16 and c.dtype == torch.float32
    if tuple(weight.shape) != (features, features) or not (weight.dtype == c.dtype or short):
        raise ValueError(
            f"weight must be ({features}, {features}) {c.dtype}, or bfloat16 for a float32 c, "
            f"got {tuple(weight.shape)} {weight.dtype}"
        )
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
    given dtypes, under autocast too. On a CPU a long solve is several launches, so that Ctrl-C can end it.

    Args:
        weight: W, (D, D) in the dtype of c, or bfloat16 for a float32 c; its values are multiplied in the dtype of c.
        c: (B, D), float32 or float64.
        z0: the start, shaped like c; None: zeros.
        activation: "identity", "relu", "tanh" or "gelu" (with erf).
        solver: ``Picard`` with relaxation 1; None: ``Picard()``.
        kernel: "auto", "triton", "cuda", "cpp" or "torch". "auto" takes the ordinary loop (``deqfast.solve``) if W fits
            no kernel or, on a GPU, if B D^2 exceeds 2^28. By name, "triton" supports float32 with D <= 128, or bfloat16
            weights with D <= 256 (128 if a block has less than 144 KiB of shared memory). "cuda" supports D <= 2048, if
            it fits into the GPU's shared memory. "torch" makes all of max_iter iterations.

    Raises:
        TypeError, ValueError: an argument is not as above, or z0 is not finite. The text names it, and what is allowed.
        RuntimeError: `kernel` was chosen by name and cannot run (triton: ValueError); a tensor belongs to torch.func or
            forward-mode AD.

    Examples:
        >>> weight = (0.1 * torch.randn(16, 16)).requires_grad_()
        >>> z, solution = deqfast.fc_fixed_point(weight, torch.randn(4, 16))
        >>> bool(solution.converged.all())
        True
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
    """Solve in one launch, or in the ordinary loop if "auto" prefers it, or if an export needs it."""
    if not is_exporting() and (requested != "auto" or serves(requested, kernel, weight, c)):
        return _launch(weight, c, z0, activation, solver, kernel, 0.0)
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
    found = _solve(weight, c, z0, activation, solver, kernel, choose_kernel(kernel, c.device))
    calls = torch.tensor([found.evaluations, found.sample_evaluations], device="cpu")
    # The residuals are rows of one tensor, and results of an op may not share memory.
    residuals = [found.residual_rel.clone(), found.residual_abs.clone()]
    return [found.value.contiguous(), found.status, found.iterations, *residuals, calls]


def _fake_solve_op(weight: Tensor, c: Tensor, *settings: Any) -> list[Tensor]:
    rows = [c.new_empty(c.shape[0], dtype=dtype) for dtype in (torch.int8, torch.int32, c.dtype, c.dtype)]
    return [c.new_empty(c.shape), *rows, torch.empty(2, dtype=torch.int64, device="cpu")]


library.define(
    f"solve_fc{torch.library.infer_schema(_solve_op, mutates_args=())}",
    tags=(torch.Tag.cudagraph_unsafe,),  # it reads from the device
)
library.impl("solve_fc", _solve_op, "CompositeExplicitAutograd")
torch.library.register_fake("deqfast::solve_fc", _fake_solve_op, lib=library)
