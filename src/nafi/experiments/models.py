"""The paper's networks, with its initialisation, and one that is deeper.

Promises: a network and its first weights depend on the generator alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MLP(nn.Module):
    """Fully connected layers with ReLU between them; inputs are flattened."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in pairwise(widths)])

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        last: Tensor = self.layers[-1](x)
        return last


class ConvNet(nn.Module):
    """The paper's CIFAR-10 network: two convolutions with pooling, three fully connected layers.

    widths: filters of both convolutions, then units of both hidden layers
    """

    def __init__(self, widths: Sequence[int] = (6, 16, 120, 84), classes: int = 10) -> None:
        super().__init__()
        first, second, third, fourth = widths
        self.conv1 = nn.Conv2d(3, first, 5)
        self.conv2 = nn.Conv2d(first, second, 5)
        self.fc1 = nn.Linear(second * 5 * 5, third)
        self.fc2 = nn.Linear(third, fourth)
        self.fc3 = nn.Linear(fourth, classes)

    def forward(self, x: Tensor) -> Tensor:
        # Pooled first: the same, and less to compare with zero.
        x = F.max_pool2d(self.conv1(x), 2).relu()
        x = F.max_pool2d(self.conv2(x), 2).relu().flatten(1)
        outputs: Tensor = self.fc3(self.fc2(self.fc1(x).relu()).relu())
        return outputs


class VGG(nn.Module):
    """3 x 3 convolutions with normalisation, pooled after each pair, and one linear layer.

    widths: of the convolutions, an even number of them; the last pair is averaged over all places
    """

    def __init__(self, widths: Sequence[int], classes: int = 10) -> None:
        super().__init__()
        read = [3, *widths[1:-1:2]]
        pairs = zip(read, widths[::2], widths[1::2], strict=True)
        self.blocks = nn.ModuleList([DoubleConv(*pair) for pair in pairs])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        *first, last = self.blocks
        for block in first:
            x = F.max_pool2d(block(x), 2)
        outputs: Tensor = self.head(last(x).mean(dim=(2, 3)))
        return outputs


class ResNet(nn.Module):
    """Three stages of two residual blocks each, with normalisation: a short ResNet-20.

    widths: in the order of the data: the first residual stream, within its two blocks; then within
        the first block of a stage, of its stream, and within its second block
    """

    def __init__(self, widths: Sequence[int], classes: int = 10) -> None:
        super().__init__()
        streams = widths[0], widths[4], widths[7]
        inner = widths[1:3], widths[3:6:2], widths[6:9:2]
        self.stem = nn.Conv2d(3, streams[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(streams[0])
        read = [streams[0], *streams[:-1]]
        self.blocks = nn.ModuleList()
        for stage, (before, stream, (first, second)) in enumerate(
            zip(read, streams, inner, strict=True)
        ):
            self.blocks.append(Residual(before, first, stream, stride=2 if stage else 1))
            self.blocks.append(Residual(stream, second, stream))
        self.head = nn.Linear(streams[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        for block in self.blocks:
            x = block(x)
        outputs: Tensor = self.head(x.mean(dim=(2, 3)))
        return outputs


class Residual(nn.Module):
    """Two convolutions with normalisation, added to what they read; a projection at a stride."""

    def __init__(self, read: int, inner: int, written: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(read, inner, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, written, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(written)
        self.skip = nn.Sequential()
        if stride > 1:
            self.skip = nn.Sequential(
                nn.Conv2d(read, written, 1, stride, bias=False), nn.BatchNorm2d(written)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm1(self.conv1(x)).relu()
        outputs: Tensor = (self.norm2(self.conv2(inner)) + self.skip(x)).relu()
        return outputs


def resnet_widths(base: int) -> list[int]:
    """The widths of the short ResNet with so many channels in its first stage."""
    return [base * factor for factor in (1, 2, 4) for _ in range(3)]


class UNet(nn.Module):
    """The paper's U-Net: nine double convolutions with normalisation, and skips between them.

    widths: of all 18 convolutions in the order of the data: four blocks down, the bottom, four up
    transposed: up-sampling by transposed convolutions, which keep their width, instead of bilinear
    """

    def __init__(
        self,
        widths: Sequence[int],
        channels: int = 3,
        outputs: int = 1,
        transposed: bool = False,
    ) -> None:
        super().__init__()
        pairs = list(zip(widths[::2], widths[1::2], strict=True))
        before = [channels, *(last for _, last in pairs[:4])]
        self.down = nn.ModuleList(
            [DoubleConv(read, *pair) for read, pair in zip(before, pairs[:5], strict=True)]
        )
        skips = [last for _, last in reversed(pairs[:4])]
        below = [last for _, last in pairs[4:8]]
        self.up = nn.ModuleList(
            [
                DoubleConv(skip + deep, *pair)
                for skip, deep, pair in zip(skips, below, pairs[5:], strict=True)
            ]
        )
        self.rise = nn.ModuleList(
            [
                nn.ConvTranspose2d(deep, deep, 2, 2)
                if transposed
                else nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
                for deep in below
            ]
        )
        self.out = nn.Conv2d(pairs[-1][1], outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = [self.down[0](x)]
        for block in self.down[1:]:
            seen.append(block(F.max_pool2d(seen[-1], 2)))
        x = seen.pop()
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat([seen.pop(), rise(x)], dim=1))
        outputs: Tensor = self.out(x)
        return outputs


def unet_widths(base: int) -> list[int]:
    """The widths of the paper's U-Net with so many channels in its first block; it has 64."""
    down = [base * factor for factor in (1, 1, 2, 2, 4, 4, 8, 8, 8, 8)]
    up = [base * factor for factor in (8, 4, 4, 2, 2, 1, 1, 1)]
    return down + up


class DoubleConv(nn.Module):
    """Two convolutions, each with normalisation."""

    def __init__(self, read: int, middle: int, written: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(read, middle, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, written, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(written)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x)).relu()
        outputs: Tensor = self.norm2(self.conv2(x)).relu()
        return outputs


def drawn_mlp(inputs: int, outputs: int, widths: Sequence[int]) -> nn.Module:
    """An MLP with the public code's first weights, from torch's random numbers and these alone."""
    with torch.device("meta"):  # draws nothing
        empty = MLP([inputs, *widths, outputs])
    return draw_weights(empty.to_empty(device="cpu"))


def draw_weights(
    model: nn.Module, generator: torch.Generator | None = None, deviation: float = 0.1
) -> nn.Module:
    """Weights from N(0, deviation^2), biases 0.1, as in the public code; in place."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.1)
            else:
                parameter.normal_(0.0, deviation, generator=generator)
    return model
