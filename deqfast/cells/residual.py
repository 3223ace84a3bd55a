"""The residual cell: ResNet's basic block, with kernels for everything but its convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_count
from ..ops import Kernel, check_kernel_name, kernel_name
from ..ops.norm_act import DTYPES
from ..ops.norm_act import autograd as fused
from ..torch_internals.dynamo import is_exporting
from ..torch_internals.plain import fusible, is_plain
from ..torch_internals.transforms import in_forward_mode, in_torch_func
from .linear import Device, check_dtype

fusible(nn.GroupNorm.forward)


class ResidualCell(nn.Module):
    """ResNet's basic block as a cell: f(z, x) = N3(relu(z + N2(conv2(relu(N1(conv1 z))) + x))).

    z, x: (B, channels, H, W); x is the injection. The convolutions are 3x3 without bias. The last normalisation N3
    makes a fixed point possible: without it the norm of z would grow for ever.

    On a GPU the kernels convert inputs to channels_last: pass z and x in that format to save the copies.

    Args:
        channels: C of z and x.
        groups: groups of the GroupNorm, a divisor of `channels`.
        kernel: computes everything but the convolutions; names as in ``DEQBlock``. "torch" calls the plain modules; the
            others compute relu(N1(.)) and N3(relu(z + N2(. + x))) in one pass each. They support float32, bfloat16 and
            float64. They need normalisations that are still GroupNorm, without hooks and with their own forward.
            Otherwise, and under torch.func and forward-mode AD, "auto" is "torch".
        device, dtype: of the parameters, as for torch's modules, a floating-point type; None: torch's defaults.

    Raises:
        TypeError, ValueError: an argument is not as above, in a call the shape of x or `kernel` for these modules.
        RuntimeError: `kernel` is not available in a call. Under torch.func and forward AD only "auto" and "torch" are.

    Examples:
        >>> block = deqfast.DEQBlock(deqfast.ResidualCell(channels=8, groups=4))
        >>> x = torch.randn(2, 8, 6, 6)  # the injection, such as a convolution's output
        >>> block(x).shape
        torch.Size([2, 8, 6, 6])
    """

    def __init__(
        self,
        channels: int,
        groups: int = 8,
        kernel: str = "auto",
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_count("channels", channels)
        check_count("groups", groups)
        check_dtype(dtype)
        if channels % groups:
            raise ValueError(f"groups must divide channels ({channels}), got {groups}")
        self.kernel = check_kernel_name(kernel)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False, **where)
        self.norm1 = nn.GroupNorm(groups, channels, **where)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False, **where)
        self.norm2 = nn.GroupNorm(groups, channels, **where)
        self.norm3 = nn.GroupNorm(groups, channels, **where)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        """f(z, x), (B, channels, H, W) as z and x."""
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
        fit = all(type(norm) is nn.GroupNorm and norm.affine and is_plain(norm) for norm in norms)
        fit = fit and self.norm2.num_groups == self.norm3.num_groups and self.norm2.eps == self.norm3.eps
        if not fit and self.kernel not in ("auto", "torch"):
            raise ValueError(
                f"kernel={self.kernel!r} needs norm1, norm2 and norm3 to be nn.GroupNorm with weights and without "
                f"hooks, the last two with equal groups and eps, got {norms}; use 'auto' or 'torch'"
            )
        if in_torch_func() or in_forward_mode():  # no kernel supports these
            if self.kernel not in ("auto", "torch"):
                where = "under torch.func or forward-mode AD"
                raise RuntimeError(f"kernel={self.kernel!r} does not run {where}: use 'auto' or 'torch'")
            return Kernel("torch")
        served = fit and (y.dtype in DTYPES or self.kernel != "auto")
        if not served or (self.kernel == "auto" and is_exporting()):  # so that an export runs without deqfast
            return Kernel("torch")
        return Kernel(kernel_name(self.kernel, y.device.type))

    def extra_repr(self) -> str:
        return f"kernel={self.kernel!r}"
