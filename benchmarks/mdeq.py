"""The multiscale network of Bai, Koltun and Kolter (MDEQ, NeurIPS 2020) for ImageNet, to be counted or run.

Sizes and layers follow https://arxiv.org/abs/2006.08656 and the authors' configurations, github.com/locuslab/deq,
MDEQ-Vision/experiments/imagenet/cls_mdeq_{SMALL,LARGE,XL}.yaml. Left out: weight normalisation (once per solve) and
dropout (0 in these configurations).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

EXPANSION = 5  # of the channels within a residual block: EXPANSION_FACTOR
GROUPS = 8  # NUM_GROUPS; half as many after the fusion
HEAD_EXPANSION = 4  # of a bottleneck
HEAD_FEATURES = 2048  # FINAL_CHANSIZE


@dataclass(frozen=True)
class Size:
    """channels: of the four resolutions; head: of the classifier's bottlenecks; image: pixels of a side.

    The stem halves the image twice (DOWNSAMPLE_TIMES), every further resolution halves it again.
    """

    name: str
    channels: tuple[int, ...]
    head: tuple[int, ...]
    image: int = 224
    classes: int = 1000

    @property
    def sides(self) -> list[int]:
        return [self.image // 4 // 2**level for level in range(len(self.channels))]

    @property
    def dim(self) -> int:
        """Elements of one image's state, all resolutions together."""
        return sum(c * side**2 for c, side in zip(self.channels, self.sides, strict=True))


SIZES = (
    Size("MDEQ-small", (32, 64, 128, 256), (24, 48, 96, 192)),
    Size("MDEQ-large", (80, 160, 320, 640), (32, 64, 128, 256)),
    Size("MDEQ-XL", (88, 176, 352, 704), (32, 64, 128, 256)),
)


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)


class Block(nn.Module):
    """A residual block at one resolution; `injection` is added before the second normalisation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = EXPANSION * channels
        self.conv1, self.norm1 = conv(channels, inner), nn.GroupNorm(GROUPS, inner)
        self.conv2, self.norm2 = conv(inner, channels), nn.GroupNorm(GROUPS, channels)
        self.norm3 = nn.GroupNorm(GROUPS, channels)

    def forward(self, z: Tensor, injection: Tensor | None) -> Tensor:
        y = self.conv2(F.relu(self.norm1(self.conv1(z)), inplace=True))
        y = self.norm2(y if injection is None else y + injection)
        return self.norm3(F.relu(y + z, inplace=True))


def transfer(channels: Sequence[int], source: int, target: int) -> nn.Sequential:
    """From one resolution to another: 3x3 convolutions of stride 2 down, a 1x1 convolution and repetition up."""
    inputs, outputs = channels[source], channels[target]
    if source > target:
        up = nn.Upsample(scale_factor=2 ** (source - target), mode="nearest")
        return nn.Sequential(conv(inputs, outputs, 1), nn.GroupNorm(GROUPS, outputs), up)
    layers: list[nn.Module] = []
    for level in range(source + 1, target + 1):
        wide = outputs if level == target else inputs
        layers += [conv(inputs, wide, 3, 2), nn.GroupNorm(GROUPS, wide)]
        layers += [] if level == target else [nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class Cell(nn.Module):
    """f(z, x): a block at every resolution, then the sum of all of them at each. z: a tuple of (B, C_i, S_i, S_i).

    x (B, C_0, S_0, S_0), the stem's output, goes into the block of the finest resolution.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        channels, levels = size.channels, range(len(size.channels))
        self.blocks = nn.ModuleList(Block(c) for c in channels)
        self.transfers = nn.ModuleDict({f"{i}_{j}": transfer(channels, i, j) for i in levels for j in levels if i != j})
        self.mixes = nn.ModuleList(
            nn.Sequential(nn.ReLU(), conv(c, c, 1), nn.GroupNorm(GROUPS // 2, c)) for c in channels
        )

    def forward(self, z: Sequence[Tensor], x: Tensor) -> tuple[Tensor, ...]:
        levels = range(len(z))
        y = [block(z[i], x if i == 0 else None) for i, block in enumerate(self.blocks)]
        sums = [sum(y[i] if i == j else self.transfers[f"{i}_{j}"](y[i]) for i in levels) for j in levels]
        return tuple(mix(total) for mix, total in zip(self.mixes, sums, strict=True))


def normed(layer: nn.Conv2d) -> nn.Sequential:
    return nn.Sequential(layer, nn.BatchNorm2d(layer.out_channels))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, planes: int) -> None:
        super().__init__()
        outputs = HEAD_EXPANSION * planes
        relu = nn.ReLU(inplace=True)
        self.body = nn.Sequential(
            normed(conv(inputs, planes, 1)), relu, normed(conv(planes, planes)), relu, normed(conv(planes, outputs, 1))
        )
        self.skip = normed(conv(inputs, outputs, 1))

    def forward(self, z: Tensor) -> Tensor:
        return F.relu(self.body(z) + self.skip(z), inplace=True)


class Network(nn.Module):
    """Stem, cell and classifier; the solve between them is the caller's."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        first = size.channels[0]
        relu = nn.ReLU(inplace=True)
        layers = conv(3, first, 3, 2), conv(first, first, 3, 2), conv(first, first, 1)
        self.stem = nn.Sequential(*(part for layer in layers for part in (normed(layer), relu)))
        self.cell = Cell(size)
        wide = [HEAD_EXPANSION * planes for planes in size.head]
        self.raises = nn.ModuleList(Bottleneck(c, planes) for c, planes in zip(size.channels, size.head, strict=True))
        self.downs = nn.ModuleList(
            nn.Sequential(normed(conv(low, high, 3, 2)), relu) for low, high in zip(wide, wide[1:], strict=False)
        )
        self.last = nn.Sequential(normed(conv(wide[-1], HEAD_FEATURES, 1)), relu)
        self.classifier = nn.Linear(HEAD_FEATURES, size.classes)

    def classify(self, z: Sequence[Tensor]) -> Tensor:
        """Logits (B, classes) from the state."""
        y = self.raises[0](z[0])
        for raised, down, part in zip(self.raises[1:], self.downs, z[1:], strict=True):
            y = raised(part) + down(y)
        return self.classifier(self.last(y).mean(dim=(2, 3)))


def zeros(size: Size, batch: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """The state from which a solve starts."""
    return tuple(
        torch.zeros(batch, c, side, side, device=device, dtype=dtype)
        for c, side in zip(size.channels, size.sides, strict=True)
    )
