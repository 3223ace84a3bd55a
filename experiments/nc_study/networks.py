"""Networks: a CIFAR ResNet-18, the same with its last residual block turned into a fixed point, and two in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from runs.options import SettingsError
from runs.provenance import multiplies_bf16
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import convert_conv2d_weight_memory_format
from torch.utils.flop_counter import FlopCounterMode

import deqfast
from deqfast import ops

from .config import CELLS, NOT_RUNNABLE, ONCE, Settings
from .record import Cost

GROUPS = 8
SOLVERS = {"broyden": deqfast.Broyden, "anderson": deqfast.Anderson, "picard": deqfast.Picard}


class Output(NamedTuple):
    """Output of a network: logits (B, K), pooled features (B, D), and the Solution if its last block solves."""

    logits: Tensor
    features: Tensor
    solution: deqfast.Solution | None


class Conv2d(nn.Conv2d):
    """Convolution 3x3 or 1x1 without bias.

    Under bfloat16 autocast on a CPU without instructions for it, float32 kernels compute the same, and a whole step is
    ten times faster: operands, sums and gradients are rounded to bfloat16, and products are summed in float32.
    """

    def __init__(self, channels_in: int, channels: int, size: int = 3, stride: int = 1) -> None:
        super().__init__(channels_in, channels, size, stride, padding=size // 2, bias=False)
        self.native = multiplies_bf16()

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) to (B, channels, H / stride, W / stride)."""
        stride = self.stride[0]
        if self.kernel_size == (1, 1):
            # The same pixels. On a CPU with AVX2 and no AVX512, the gradient of oneDNN 3.12's strided 1x1 convolution
            # writes past its buffers unless the channels are a multiple of 8.
            x, stride = x[:, :, ::stride, ::stride], 1
        if self.native or not torch.is_autocast_enabled("cpu"):
            return F.conv2d(x, self.weight, None, stride, self.padding)
        with torch.autocast("cpu", enabled=False):
            # The rounding also rounds their gradients.
            x, weight = (factor.bfloat16().float() for factor in (x, self.weight))
            return F.conv2d(x, weight, None, stride, self.padding).bfloat16()


class BasicBlock(nn.Module):
    """ReLU(BN(conv(ReLU(BN(conv x)))) + shortcut(x)) with two 3x3 convolutions, followed by a GroupNorm if `ending`."""

    def __init__(self, channels_in: int, channels: int, stride: int = 1, ending: bool = False) -> None:
        super().__init__()
        self.conv1 = Conv2d(channels_in, channels, 3, stride)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = Conv2d(channels, channels)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(Conv2d(channels_in, channels, 1, stride), nn.BatchNorm2d(channels))
        self.ending: nn.Module = nn.GroupNorm(GROUPS, channels) if ending else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) to (B, channels, H / stride, W / stride)."""
        hidden = F.relu(self.norm1(self.conv1(x)))
        return self.ending(F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(x)))


class Unrolled(nn.Module):
    """Cells evaluated one after the other, z = f(z, x), `times` in all, differentiated through; one cell is tied.

    It starts from z = x. From z = 0 the first convolution sees zeros and ReLU's slope at 0 is 0, so that a cell
    evaluated once would train neither convolution.
    """

    def __init__(self, cells: Sequence[deqfast.ResidualCell], times: int) -> None:
        super().__init__()
        self.cells, self.times = nn.ModuleList(cells), times

    def forward(self, x: Tensor) -> Tensor:
        """x (B, C, H, W) to the last z, of the same shape."""
        z = x
        for number in range(self.times):
            z = self.cells[number % len(self.cells)](z, x)
        return z


class ResNet18(nn.Module):
    """ResNet-18 for 32x32 images: 3x3 stem, four stages of w, 2w, 4w, 8w channels, mean pool, classifier without bias.

    `last` makes the last block from its number of channels. It is made after all other modules, so that two networks of
    one seed have the same initial values everywhere else.
    """

    def __init__(self, classes: int, width: int, last: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Sequential(Conv2d(3, width), nn.BatchNorm2d(width), nn.ReLU())
        widths = [width, width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width]
        strides = [1, 1, 2, 1, 2, 1, 2]
        self.trunk = nn.Sequential(*map(BasicBlock, widths[:-1], widths[1:], strides))
        self.classifier = nn.Linear(widths[-1], classes, bias=False)
        self.last = last(widths[-1])

    def forward(self, images: Tensor) -> Output:
        """Normalised images (B, 3, 32, 32) to logits, features and solution."""
        x = self.trunk(self.stem(images))
        # Under bfloat16 autocast f resolves too little for a tolerance of 1e-3. At width 8, steps 241 to 360 took 14.0
        # evaluations per sample and 95.8 % converged, against 11.7 and 99.8 % with the solve in float32. The part by
        # which networks are compared is computed alike in all of them.
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            if isinstance(self.last, deqfast.DEQBlock):
                z, solution = self.last(x, return_solution=True)
            else:
                z, solution = self.last(x), None
            features = z.mean((2, 3))
            return Output(self.classifier(features), features, solution)


def build(settings: Settings) -> ResNet18:
    """Make the network that the settings name, with the initial values of their seed."""
    model = settings.model
    if model == ONCE:
        raise SettingsError(NOT_RUNNABLE)

    def last(channels: int) -> nn.Module:
        if model.startswith("explicit"):
            block = BasicBlock(channels, channels, ending=model == "explicit-norm")
            nn.init.constant_(block.norm2.weight, settings.scale)
            return block
        count = settings.cells if model == "untied" else 1
        cells = [deqfast.ResidualCell(channels, GROUPS, kernel=settings.kernel) for _ in range(count)]
        for cell in cells:
            nn.init.constant_(cell.norm1.weight, settings.scale)  # x is added before norm2, to the output of this norm
        if model in CELLS:
            return Unrolled(cells, settings.cells)
        (cell,) = cells
        solver = SOLVERS[settings.solver](rtol=settings.tol, max_iter=settings.max_iter)
        adjoint = deqfast.Implicit(solver) if settings.adjoint == "implicit" else settings.adjoint
        # On a GPU, finding the samples that still run would wait for the device. The statuses of solves are counted and
        # recorded, so warnings are off.
        compact = settings.device == "cpu" and settings.adjoint != "unrolled"
        return deqfast.DEQBlock(cell, solver, adjoint, kernel=settings.kernel, drop_converged=compact, warn=False)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        network = ResNet18(settings.classes, settings.width, last)
    convert_conv2d_weight_memory_format(network, torch.channels_last)
    network = network.to(settings.device)
    if settings.compile:
        for part in (network.stem, network.trunk, *([] if model == "deq" else [network.last])):
            part.compile()
    return network


def count_parameters(network: nn.Module) -> int:
    """Number of parameters of a network."""
    return sum(parameter.numel() for parameter in network.parameters())


@torch.no_grad()
def cost(network: ResNet18, evaluations: float | None) -> Cost:
    """Count parameters and forward FLOPs per image; `evaluations`: mean of a DEQ's solves, None for other blocks."""
    last, training = network.last, network.training
    network.eval()
    # Compiled code would not be counted.
    with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as before:
        x = network.trunk(network.stem(torch.zeros(1, 3, 32, 32).to(network.classifier.weight)))
        network.classifier(x.mean((2, 3)))
    network.train(training)
    evaluated, times = (last.cells[0], last.times) if isinstance(last, Unrolled) else (last, 1)
    weights = sum(module.weight.numel() for module in evaluated.modules() if isinstance(module, nn.Conv2d))
    evaluation = 2 * weights * x[0, 0].numel()  # each convolution has x's number of pixels
    flops = before.get_total_flops(), evaluation
    return Cost(count_parameters(last), *flops, times if evaluations is None else evaluations)


def choose_kernel(requested: str, device: str) -> tuple[str, str]:
    """Name of the kernel to use on a device, and why it differs from the requested one ("" if it does not)."""
    try:
        return ops.choose_kernel(requested, torch.device(device)).name, ""
    except RuntimeError as error:
        return ops.choose_kernel("auto", torch.device(device)).name, str(error)


@torch.no_grad()
def project(network: ResNet18, e_w: float | None, e_h: float | None) -> None:
    """Scale the weights back into (1/K) sum |w_k|^2 <= e_w and |convolutions of the last block| <= e_h, if given."""
    if e_w is not None:
        rows = network.classifier.weight
        _shrink([rows], (e_w * rows.shape[0]) ** 0.5)
    if e_h is not None:
        _shrink([module.weight for module in network.last.modules() if isinstance(module, nn.Conv2d)], e_h)


def _shrink(weights: list[Tensor], bound: float) -> None:
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(weight) for weight in weights]))
    for weight in weights:
        weight.mul_((bound / norm).clamp(max=1))
