"""Cells: the maps z -> f(z, x) whose fixed point a DEQBlock finds."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fc import solve_cell
from .ops import ACTIVATIONS, Kernel, check_kernel_name, choose_kernel
from .ops.fc import reference
from .ops.norm_act import DTYPES
from .ops.norm_act import autograd as fused
from .solution import Solution
from .solvers import Solver
from .solvers.base import check_choice, check_count

_ACTIVATIONS = dict(zip(ACTIVATIONS, reference.ACTIVATIONS, strict=True))
# Spectral radius at initialisation: clearly contractive, far from trivial.
_INITIAL_RADIUS = 0.5


def _check_features(name: str, tensor: Tensor, width: int) -> None:
    if tensor.dim() != 2 or tensor.shape[1] != width:
        raise ValueError(f"{name} must have shape (B, {width}), got {tuple(tensor.shape)}")


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a call of `module` is the forward of `kind` and nothing else."""
    return type(module).forward is kind.forward and not (module._forward_hooks or module._forward_pre_hooks)


def _recurrent_weight(features: int) -> nn.Parameter:
    # The eigenvalues of a Gaussian matrix of variance 1/n fill the unit disc (circular law).
    return nn.Parameter(torch.randn(features, features) * _INITIAL_RADIUS / math.sqrt(features))


class LinearCell(nn.Module):
    """f(z, x) = W z + x; z, x: (B, features). The linear DEQ of Sun and Shi (NeurIPS 2024), section 3."""

    def __init__(self, features: int):
        super().__init__()
        check_count("features", features)
        self.weight = _recurrent_weight(features)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        _check_features("x", x, self.weight.shape[0])
        return F.linear(z, self.weight) + x

    def fixed_point(self, x: Tensor, z0: Tensor, solver: Solver, kernel: str) -> Solution | None:
        """The solve in one launch, see ``deqfast.fc_fixed_point``; None: only the ordinary loop serves."""
        _check_features("x", x, self.weight.shape[0])
        if not _is_plain(self, LinearCell):
            return None
        return solve_cell(self.weight, lambda: x, "identity", z0, solver, kernel)


class FCCell(nn.Module):
    """f(z, x) = act(W z + U x + b); z: (B, features), x: (B, in_features).

    activation: "identity", "relu", "tanh" or "gelu".
    """

    def __init__(self, in_features: int, features: int, activation: str = "tanh", bias: bool = True):
        super().__init__()
        check_count("in_features", in_features)
        check_count("features", features)
        check_choice("activation", activation, tuple(_ACTIVATIONS))
        self.weight = _recurrent_weight(features)
        self.injection = nn.Linear(in_features, features, bias=bias)
        self.activation = activation

    def initial_state(self, x: Tensor) -> Tensor:
        """Zeros (B, features)."""
        return x.new_zeros(x.shape[0], self.weight.shape[0])

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        _check_features("x", x, self.injection.in_features)
        return _ACTIVATIONS[self.activation](F.linear(z, self.weight) + self.injection(x))

    def fixed_point(self, x: Tensor, z0: Tensor, solver: Solver, kernel: str) -> Solution | None:
        """The solve in one launch, see ``deqfast.fc_fixed_point``; None: only the ordinary loop serves."""
        _check_features("x", x, self.injection.in_features)
        if not _is_plain(self, FCCell):
            return None
        return solve_cell(self.weight, lambda: self.injection(x), self.activation, z0, solver, kernel)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class FrozenStatisticsBatchNorm2d(nn.Module):
    """Batch norm that normalises with its running statistics always, so that it is one function during a solve.

    In training mode, evaluations that are differentiated (the adjoint's, after the solve) measure the batch; when the
    solve is over the running statistics take up the mean of these measurements. Only during the first solve of all do
    they follow every evaluation: with the initial variance of 1, a cell that grows has no fixed point. State as
    nn.BatchNorm2d's, whose `num_batches_tracked` counts solves here.
    """

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0))
        self._started = False  # a solve is known to be over: asking the buffer waits for a GPU
        self._measured: tuple[Tensor, int] | None = None  # sum of (mean, variance), and number of measurements

    def _has_started(self) -> bool:
        self._started = self._started or bool(self.num_batches_tracked)
        return self._started

    def has_settled(self) -> bool:
        """Whether solves to come leave the statistics alone: a captured solve could not follow them."""
        return not self.training or self._has_started()

    def _follow(self, statistics: Tensor, momentum: float) -> None:
        with torch.no_grad():
            self.running_mean.lerp_(statistics[0], momentum)
            self.running_var.lerp_(statistics[1], momentum)

    def _measure(self, x: Tensor) -> Tensor:
        if x.numel() == x.shape[1]:
            raise ValueError(f"batch norm in training needs more than one value per channel, got {tuple(x.shape)}")
        var, mean = torch.var_mean(x.detach().to(self.running_mean.dtype), dim=(0, 2, 3))
        return torch.stack([mean, var])

    def end_solve(self) -> None:
        """Take up what the differentiated evaluations of this solve have measured; called by DEQBlock."""
        if not self.training:
            return
        if self._has_started() and self._measured is not None:
            self._follow(self._measured[0] / self._measured[1], self.momentum)
        self._measured = None
        self.num_batches_tracked.add_(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not self._has_started():
            self._follow(self._measure(x), 1.0)
        elif self.training and torch.is_grad_enabled():
            total, count = self._measured or (0, 0)
            self._measured = total + self._measure(x), count + 1
        # Copies, because the statistics change before the backward pass reads them.
        mean, var = self.running_mean.clone(), self.running_var.clone()
        return F.batch_norm(x, mean, var, self.weight, self.bias, False, 0.0, self.eps)


class ResidualCell(nn.Module):
    """ResNet's basic block as a cell: f(z, x) = N3(relu(z + N2(conv2(relu(N1(conv1 z))) + x))).

    z, x: (B, channels, H, W); x is the injection. The convolutions are 3x3 without bias. Without the last
    normalisation N3 there is no fixed point: the norm of z would grow for ever.

    norm: "group" (GroupNorm with `groups` groups) or "batch" (``FrozenStatisticsBatchNorm2d``).

    kernel: of what surrounds the convolutions, as in ``DEQBlock``; "torch" calls the plain modules, the others compute
    relu(N1(.)) and N3(relu(z + N2(. + x))) in one pass each. They exist for norm="group" and float32, bfloat16 and
    float64; for anything else "auto" is "torch". The kernels of a GPU convert to channels_last what is not, so give
    them z and x in it. Hooks of the normalisations are called by "torch" alone.
    """

    def __init__(self, channels: int, groups: int = 8, norm: str = "group", kernel: str = "auto"):
        super().__init__()
        check_count("channels", channels)
        check_choice("norm", norm, ("group", "batch"))
        check_count("groups", groups)
        if norm == "group" and channels % groups:
            raise ValueError(f"groups must divide channels ({channels}), got {groups}")
        if norm == "batch" and check_kernel_name(kernel) not in ("auto", "torch"):
            raise ValueError(f"kernel must be 'auto' or 'torch' with norm='batch', got {kernel!r}")
        self.kernel = check_kernel_name(kernel)

        def normalisation() -> Any:
            return nn.GroupNorm(groups, channels) if norm == "group" else FrozenStatisticsBatchNorm2d(channels)

        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = normalisation()
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = normalisation()
        self.norm3 = normalisation()

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != self.conv1.in_channels:
            raise ValueError(f"x must have shape (B, {self.conv1.in_channels}, H, W), got {tuple(x.shape)}")
        y = self.conv1(z)
        kernel = self._choose_kernel(y)
        if kernel.name == "torch":
            return self.norm3(torch.relu(z + self.norm2(self.conv2(torch.relu(self.norm1(y))) + x)))
        y = self.conv2(fused.norm_act(kernel, y, self.norm1))
        return fused.norm_act_residual(kernel, y, x, z, self.norm2, self.norm3)

    def _choose_kernel(self, y: Tensor) -> Kernel:
        norms = (self.norm1, self.norm2, self.norm3)
        fit = all(type(norm) is nn.GroupNorm and norm.affine for norm in norms)
        fit = fit and self.norm2.num_groups == self.norm3.num_groups and self.norm2.eps == self.norm3.eps
        if not fit and self.kernel not in ("auto", "torch"):
            raise ValueError(
                f"kernel={self.kernel!r} needs norm1, norm2 and norm3 to be nn.GroupNorm with weights, the last two "
                f"with equal groups and eps, got {norms}"
            )
        served = fit and (y.dtype in DTYPES or self.kernel != "auto")
        return choose_kernel(self.kernel if served else "torch", y.device)

    def extra_repr(self) -> str:
        return f"kernel={self.kernel!r}"
