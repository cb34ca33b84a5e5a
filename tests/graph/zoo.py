"""Small but structurally real networks on which the graph analysis is tested.

Widths differ from layer to layer where the architecture allows it and differ from the spatial
sizes, sequence lengths and the batch size, so that confusing two axes shows up as an error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nafi.graph import ModelSpec, SpecWarning, groups, rules
from nafi.graph.atoms import Pin
from nafi.graph.rules import calls

BATCH = 2


@dataclass(frozen=True)
class Entry:
    """A network with example inputs.

    `build` draws from the global generator, which the caller seeds. The inputs are float32 or int64
    and always the same. A network is `resizable` if its code takes sizes from tensors or from
    attributes of its modules; else some of its groups can keep their width only.
    """

    name: str
    build: Callable[[], nn.Module]
    example_inputs: Callable[[], tuple[Tensor, ...]]
    resizable: bool = True


# ------------------------------------------------------------------------------ fully connected


class MLP(nn.Module):
    """A multi-layer perceptron with one linear layer between consecutive widths."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(m, n) for m, n in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class ChunkGLU(nn.Module):
    """A gated linear unit whose value and gate are the two halves of one layer."""

    def __init__(self, inputs: int = 5, width: int = 7, hidden: int = 11, classes: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, width)
        self.value_and_gate = nn.Linear(width, 2 * hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.value_and_gate(F.relu(self.embed(x))).chunk(2, dim=-1)
        return self.head(value * torch.sigmoid(gate))


class ProductGate(nn.Module):
    """A gated residual block (SwiGLU) that multiplies two branches element by element."""

    def __init__(self, inputs: int = 5, width: int = 7, hidden: int = 11, classes: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head(x + self.down(F.silu(self.gate(x)) * self.up(x)))


class SharedLayer(nn.Module):
    """A network that calls the same hidden layer twice in a row."""

    def __init__(self, inputs: int = 5, width: int = 9, classes: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, width)
        self.shared = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.embed(x))
        return self.head(F.relu(self.shared(F.relu(self.shared(x)))))


class TiedAutoencoder(nn.Module):
    """An autoencoder that decodes with the transposed weights of its encoder."""

    def __init__(self, inputs: int = 12, hidden: int = 7, code: int = 5) -> None:
        super().__init__()
        self.outer = nn.Linear(inputs, hidden)
        self.inner = nn.Linear(hidden, code)
        self.bias = nn.Parameter(torch.zeros(hidden))

    def forward(self, x: Tensor) -> Tensor:
        code = torch.tanh(self.inner(torch.tanh(self.outer(x))))
        hidden = torch.tanh(F.linear(code, self.inner.weight.t(), self.bias))
        return hidden @ self.outer.weight


class TwoInputs(nn.Module):
    """An image and a feature vector, encoded apart, joined by concatenation and by a product."""

    def __init__(self, filters: int = 6, hidden: int = 9, fused: int = 7, classes: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, filters, 3)
        self.features = nn.Linear(5, hidden)
        self.gate = nn.Linear(hidden, filters)
        self.fuse = nn.Linear(filters + hidden, fused)
        self.head = nn.Linear(fused, classes)

    def forward(self, image: Tensor, features: Tensor) -> Tensor:
        x = F.relu(self.conv(image)).mean(dim=(2, 3))
        y = F.relu(self.features(features))
        return self.head(F.relu(self.fuse(torch.cat([x * self.gate(y), y], dim=1))))


# ------------------------------------------------------------------------------- convolutional


def conv_norm_relu(
    inputs: int,
    outputs: int,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    bias: bool = False,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """A size-preserving convolution, batch normalisation and an activation."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=bias)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), activation())


def pooled_head(inputs: int, classes: int) -> nn.Sequential:
    """Global average pooling and a linear classifier."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class LeNet(nn.Module):
    """Two convolutions with pooling and three linear layers, joined by `torch.flatten`."""

    def __init__(self, widths: Sequence[int] = (6, 16, 120, 84), classes: int = 10) -> None:
        super().__init__()
        a, b, c, d = widths
        self.conv1 = nn.Conv2d(3, a, 5)
        self.conv2 = nn.Conv2d(a, b, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(b * 5 * 5, c)
        self.fc2 = nn.Linear(c, d)
        self.fc3 = nn.Linear(d, classes)

    def flatten(self, x: Tensor) -> Tensor:
        return torch.flatten(x, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = F.relu(self.fc1(self.flatten(x)))
        return self.fc3(F.relu(self.fc2(x)))


class LeNetView(LeNet):
    """LeNet flattened by a view that keeps the batch size."""

    def flatten(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), -1)


class LeNetHardCoded(LeNet):
    """LeNet flattened by a view that spells out the number of features."""

    def flatten(self, x: Tensor) -> Tensor:
        return x.view(-1, 400)


def lenet_sequential() -> nn.Sequential:
    """LeNet as one `nn.Sequential`, flattened by `nn.Flatten`."""
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


class VGG(nn.Module):
    """Plain convolutions with batch normalisation, adaptive pooling to a grid, a classifier."""

    def __init__(
        self,
        stages: Sequence[Sequence[int]] = ((6, 7), (10, 11), (14, 15)),
        hidden: int = 20,
        classes: int = 9,
        grid: tuple[int, int] = (2, 3),
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        width = 3
        for stage in stages:
            for outputs in stage:
                layers.append(conv_norm_relu(width, outputs, bias=True))
                width = outputs
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(grid)
        self.classifier = nn.Sequential(
            nn.Linear(width * grid[0] * grid[1], hidden),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.pool(self.features(x)), 1))


class UNetUp(nn.Module):
    """One decoder step of a U-Net: upsample, pad to the skip, concatenate, convolve twice."""

    def __init__(self, inputs: int, outputs: int, bilinear: bool, bias: bool) -> None:
        super().__init__()
        half = inputs // 2
        self.up: nn.Module
        if bilinear:
            self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            self.conv = double_conv(inputs, half, outputs, bias)
        else:
            self.up = nn.ConvTranspose2d(inputs, half, 2, stride=2)
            self.conv = double_conv(inputs, outputs, outputs, bias)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = self.up(x)
        dy, dx = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
        x = F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.conv(torch.cat([skip, x], dim=1))


def double_conv(inputs: int, middle: int, outputs: int, bias: bool) -> nn.Sequential:
    """The double convolution of which a U-Net is made."""
    return nn.Sequential(
        *conv_norm_relu(inputs, middle, bias=bias),
        *conv_norm_relu(middle, outputs, bias=bias),
    )


class UNet(nn.Module):
    """A U-Net of nine double convolutions, upsampled bilinearly or by transposed convolution."""

    def __init__(
        self, base: int = 5, classes: int = 7, bilinear: bool = True, bias: bool = False
    ) -> None:
        super().__init__()
        a, b, c, d, e = (base * 2**level for level in range(5))
        factor = 2 if bilinear else 1
        self.inc = double_conv(3, a, a, bias)
        self.down1 = self.down(a, b, bias)
        self.down2 = self.down(b, c, bias)
        self.down3 = self.down(c, d, bias)
        self.down4 = self.down(d, e // factor, bias)
        self.up1 = UNetUp(e, d // factor, bilinear, bias)
        self.up2 = UNetUp(d, c // factor, bilinear, bias)
        self.up3 = UNetUp(c, b // factor, bilinear, bias)
        self.up4 = UNetUp(b, a, bilinear, bias)
        self.outc = nn.Conv2d(a, classes, 1)

    @staticmethod
    def down(inputs: int, outputs: int, bias: bool) -> nn.Sequential:
        return nn.Sequential(nn.MaxPool2d(2), double_conv(inputs, outputs, outputs, bias))

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        x4 = self.down3(x3)
        x = self.down4(x4)
        x = self.up1(x, x4)
        x = self.up2(x, x3)
        x = self.up3(x, x2)
        x = self.up4(x, x1)
        return self.outc(x)


class Residual(nn.Module):
    """A residual block whose shortcut is projected where the size or the width changes."""

    def __init__(self, inputs: int, outputs: int, stride: int, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(self.body(x) + shortcut)


def basic_block(inputs: int, outputs: int, stride: int) -> Residual:
    """Two 3x3 convolutions with a width of their own in between."""
    body = nn.Sequential(
        *conv_norm_relu(inputs, outputs + 1, 3, stride),
        *conv_norm_relu(outputs + 1, outputs)[:-1],
    )
    return Residual(inputs, outputs, stride, body)


def bottleneck_block(inputs: int, outputs: int, stride: int) -> Residual:
    """A 3x3 convolution between two 1x1 convolutions, with two narrow widths in between."""
    narrow = outputs // 3
    body = nn.Sequential(
        *conv_norm_relu(inputs, narrow, 1),
        *conv_norm_relu(narrow, narrow + 1, 3, stride),
        *conv_norm_relu(narrow + 1, outputs, 1)[:-1],
    )
    return Residual(inputs, outputs, stride, body)


class ResNet(nn.Module):
    """A residual network with two blocks per stage; every stage but the first halves the size."""

    def __init__(
        self,
        block: Callable[[int, int, int], nn.Module] = basic_block,
        stem: int = 9,
        widths: Sequence[int] = (9, 12, 16),
        classes: int = 7,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(*conv_norm_relu(3, stem, 7, 2), nn.MaxPool2d(3, 2, 1))
        blocks: list[nn.Module] = []
        for i, (inputs, outputs) in enumerate(pairwise((stem, *widths))):
            blocks += [block(inputs, outputs, 2 if i else 1), block(outputs, outputs, 1)]
        self.blocks = nn.Sequential(*blocks)
        self.head = pooled_head(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)))


class InvertedResidual(nn.Module):
    """Expansion, depthwise convolution and linear projection, with a shortcut where it fits."""

    def __init__(self, inputs: int, outputs: int, hidden: int, stride: int) -> None:
        super().__init__()
        self.shortcut = stride == 1 and inputs == outputs
        self.body = nn.Sequential(
            *conv_norm_relu(inputs, hidden, 1, activation=nn.ReLU6),
            *conv_norm_relu(hidden, hidden, 3, stride, groups=hidden, activation=nn.ReLU6),
            *conv_norm_relu(hidden, outputs, 1)[:-1],
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.shortcut else self.body(x)


class MobileNet(nn.Module):
    """A stack of inverted residuals."""

    def __init__(
        self,
        stem: int = 5,
        blocks: Sequence[tuple[int, int, int]] = (
            *((6, 11, 1), (9, 13, 2), (9, 15, 1)),
            *((10, 17, 2), (10, 19, 1)),
        ),
        last: int = 22,
        classes: int = 12,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv_norm_relu(3, stem, 3, 2, activation=nn.ReLU6)]
        width = stem
        for outputs, hidden, stride in blocks:
            layers.append(InvertedResidual(width, outputs, hidden, stride))
            width = outputs
        layers.append(conv_norm_relu(width, last, 1, activation=nn.ReLU6))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean([2, 3]))


class GroupedConv(nn.Module):
    """Convolutions in groups, none of them depthwise.

    Four groups after three cut the channels differently: little of that can be permuted.
    """

    def __init__(
        self,
        groups: Sequence[int] = (4, 3, 2),
        widths: Sequence[int] = (20, 24, 18, 10),
        classes: int = 5,
    ) -> None:
        super().__init__()
        a, b, c, d = widths
        self.features = nn.Sequential(
            conv_norm_relu(3, a),
            conv_norm_relu(a, b, groups=groups[0]),
            conv_norm_relu(b, c, groups=groups[1], bias=True),
            conv_norm_relu(c, d, groups=groups[2]),
        )
        self.head = pooled_head(d, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class SqueezeExcite(nn.Module):
    """Channel attention: pool, two linear layers, a sigmoid that scales the channels."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(
            nn.Linear(channels, squeezed),
            nn.ReLU(),
            nn.Linear(squeezed, channels),
            nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.size()
        y = self.fc(self.pool(x).view(b, c)).view(b, c, 1, 1)
        return x * y.expand_as(x)


class SENet(nn.Module):
    """Convolutions, each followed by squeeze and excitation."""

    def __init__(
        self, widths: Sequence[int] = (8, 12), squeezed: Sequence[int] = (4, 5), classes: int = 6
    ) -> None:
        super().__init__()
        a, b = widths
        self.features = nn.Sequential(
            *(conv_norm_relu(3, a), SqueezeExcite(a, squeezed[0])),
            *(conv_norm_relu(a, b, stride=2), SqueezeExcite(b, squeezed[1])),
        )
        self.head = pooled_head(b, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def normed_convs(
    *norms: Callable[[int], nn.Module],
    widths: Sequence[int] = (8, 12),
    activation: Callable[[int], nn.Module] = lambda width: nn.ReLU(),
    classes: int = 5,
) -> nn.Sequential:
    """A convolutional network with the given normalisation and activation after each layer."""
    layers: list[nn.Module] = []
    for (inputs, outputs), norm in zip(pairwise((3, *widths)), norms, strict=True):
        layers += [nn.Conv2d(inputs, outputs, 3), norm(outputs), activation(outputs)]
    return nn.Sequential(*layers, pooled_head(widths[-1], classes))


def conv1d_net(widths: Sequence[int] = (6, 9, 14), classes: int = 7) -> nn.Sequential:
    """A one-dimensional convolutional classifier of signals, with dilation and average pooling."""
    a, b, c = widths
    return nn.Sequential(
        *(nn.Conv1d(4, a, 5, padding=2), nn.BatchNorm1d(a), nn.ReLU(), nn.MaxPool1d(2)),
        *(nn.Conv1d(a, b, 3, dilation=2), nn.LeakyReLU(0.1), nn.AvgPool1d(2)),
        *(nn.Flatten(), nn.Linear(b * 10, c), nn.ELU(), nn.Linear(c, classes)),
    )


def conv3d_net(widths: Sequence[int] = (4, 6), classes: int = 10) -> nn.Sequential:
    """A three-dimensional encoder-decoder for the segmentation of volumes."""
    a, b = widths
    return nn.Sequential(
        *(nn.Conv3d(3, a, 3, padding=1), nn.BatchNorm3d(a), nn.ReLU(), nn.MaxPool3d(2)),
        *(nn.Conv3d(a, b, 3, padding=1), nn.BatchNorm3d(b), nn.ReLU()),
        *(nn.ConvTranspose3d(b, a + 1, 2, stride=2), nn.ReLU(), nn.Conv3d(a + 1, classes, 1)),
    )


class SuperResolution(nn.Module):
    """Two sub-pixel upsamplings, the first of hidden channels, the second into the image."""

    def __init__(self, widths: Sequence[int] = (10, 7), factor: int = 2) -> None:
        super().__init__()
        a, b = widths
        self.conv1 = nn.Conv2d(3, a, 5, padding=2)
        self.conv2 = nn.Conv2d(a, b * factor**2, 3, padding=1)
        self.conv3 = nn.Conv2d(b, 3 * factor**2, 3, padding=1)
        self.shuffle = nn.PixelShuffle(factor)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shuffle(self.conv2(torch.tanh(self.conv1(x))))
        return self.shuffle(self.conv3(F.relu(x)))


class DenseLayer(nn.Module):
    """Adds new channels to the given ones."""

    def __init__(self, inputs: int, middle: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, middle, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.norm2(self.conv1(F.relu(self.norm1(x))))))
        return torch.cat([x, y], dim=1)


class DenseNet(nn.Module):
    """Two dense blocks with a transition in between."""

    def __init__(
        self,
        stem: int = 6,
        growths: Sequence[Sequence[int]] = ((4, 5, 7), (8, 9)),
        transition: int = 13,
        classes: int = 5,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, stem, 3, padding=1, bias=False)]
        width = stem
        for block, growing in enumerate(growths):
            if block:
                layers += [*(nn.BatchNorm2d(width), nn.ReLU()), nn.Conv2d(width, transition, 1)]
                layers.append(nn.AvgPool2d(2))
                width = transition
            for growth in growing:
                layers.append(DenseLayer(width, 2 * growth, growth))
                width += growth
        self.features = nn.Sequential(*layers, nn.BatchNorm2d(width), nn.ReLU())
        self.head = pooled_head(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class ConvNeXtBlock(nn.Module):
    """Depthwise convolution, channels-last normalisation and MLP, layer scale, shortcut."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.expand = nn.Linear(width, hidden)
        self.project = nn.Linear(hidden, width)
        self.gamma = nn.Parameter(0.1 * torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.gamma * self.project(F.gelu(self.expand(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation over the channels of an image."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Two stages of ConvNeXt blocks."""

    def __init__(
        self, widths: Sequence[int] = (10, 14), hidden: Sequence[int] = (21, 29), classes: int = 5
    ) -> None:
        super().__init__()
        a, b = widths
        self.features = nn.Sequential(
            *(nn.Conv2d(3, a, 4, stride=4), ChannelNorm(a)),
            *(ConvNeXtBlock(a, hidden[0]), ConvNeXtBlock(a, hidden[0] + 1)),
            *(ChannelNorm(a), nn.Conv2d(a, b, 2, stride=2)),
            ConvNeXtBlock(b, hidden[1]),
        )
        self.norm = nn.LayerNorm(b)
        self.head = nn.Linear(b, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.features(x).mean([-2, -1])))


class Scaled(nn.Module):
    """Channels scaled by a parameter and, in the next layer, by a buffer."""

    scale: Tensor

    def __init__(self, widths: Sequence[int] = (6, 8), classes: int = 4) -> None:
        super().__init__()
        a, b = widths
        self.conv1 = nn.Conv2d(3, a, 3)
        self.gain = nn.Parameter(torch.ones(a, 1, 1))
        self.conv2 = nn.Conv2d(a, b, 3)
        self.register_buffer("scale", torch.ones(b, 1, 1))
        self.head = pooled_head(b, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.gain * self.conv1(x))
        return self.head(F.softplus(self.conv2(x) * self.scale))


class DetachedSkip(nn.Module):
    """A shortcut through which no gradient flows."""

    def __init__(self, width: int = 7, hidden: int = 10, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(
            nn.Conv2d(width, hidden, 3, padding=1), nn.ReLU(), nn.Conv2d(hidden, width, 1)
        )
        self.head = pooled_head(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        return self.head(self.body(x) + x.detach())


class TupleOutputs(nn.Module):
    """A backbone with a class and a box for every position."""

    def __init__(
        self, widths: Sequence[int] = (6, 9), hidden: Sequence[int] = (7, 8), classes: int = 5
    ) -> None:
        super().__init__()
        a, b = widths
        self.backbone = nn.Sequential(conv_norm_relu(3, a, stride=2), conv_norm_relu(a, b))
        self.label = nn.Sequential(
            nn.Conv2d(b, hidden[0], 1), nn.ReLU(), nn.Conv2d(hidden[0], classes, 1)
        )
        self.box = nn.Sequential(nn.Conv2d(b, hidden[1], 1), nn.ReLU(), nn.Conv2d(hidden[1], 4, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.backbone(x)
        return self.label(x), self.box(x)


class DictOutputs(nn.Module):
    """A classifier that also returns its features."""

    def __init__(self, hidden: int = 9, features: int = 7, classes: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, features))
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(features, classes))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.encoder(x)
        return {"logits": self.head(features), "features": features}


# ------------------------------------------------------------------- look-ups, places, one by one


class GraphNet(nn.Module):
    """Messages along edges: summed by scattering, averaged by adding, and the largest."""

    def __init__(self, hidden: int = 7, width: int = 6, classes: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(5, hidden)
        self.neighbour, self.own = nn.Linear(hidden, width), nn.Linear(hidden, width)
        self.largest = nn.Linear(width, 9)
        self.head = nn.Linear(9 + width, classes)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        x = F.relu(self.embed(nodes))
        sent = self.neighbour(x).index_select(0, source)
        sums = torch.zeros_like(self.own(x)).index_add(0, target, sent)
        x = F.relu(self.own(x) + sums)
        index = target.unsqueeze(-1).expand_as(x[source])
        y = x.scatter_add(0, index, x[source])
        sent = self.largest(x)[source]
        index = target.unsqueeze(-1).expand_as(sent)
        z = self.largest(x).scatter_reduce(0, index, sent, "amax")
        return self.head(torch.cat([y, z], dim=1))


class BagOfWords(nn.Module):
    """Means over words, those of one kind left out."""

    def __init__(self, width: int = 8, hidden: int = 7, classes: int = 4) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(23, width)
        self.words = nn.Embedding(23, hidden)
        self.mix = nn.Linear(width, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        kept = (tokens > 3) & (tokens != 7)
        words = torch.where(kept[..., None], self.words(tokens), 0.0)
        return self.head(F.logsigmoid(self.mix(self.bag(tokens))) + words.sum(dim=1))


class BlockAttention(nn.Module):
    """Attention over channels and places, from means and maxima (CBAM)."""

    def __init__(self, width: int = 8, hidden: int = 5, classes: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3)
        self.squeeze, self.excite = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.place = nn.Conv2d(3, 1, 3, padding=1)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        pooled = [x.flatten(2).mean(dim=2), x.flatten(2).max(dim=2)[0]]
        scale = sum(self.excite(F.relu(self.squeeze(p))) for p in pooled)
        x = x * torch.sigmoid(scale)[:, :, None, None]
        spread, mean = torch.std_mean(x, dim=1, keepdim=True)
        summary = torch.cat([spread, mean, x.max(dim=1, keepdim=True).values], dim=1)
        return self.head((x * torch.sigmoid(self.place(summary))).mean(dim=(2, 3)))


class FourierNet(nn.Module):
    """Filters in the frequency domain, one for each channel, kept as pairs of numbers (GFNet)."""

    def __init__(self, width: int = 7, hidden: int = 9, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 1)
        self.filter = nn.Parameter(torch.randn(8, 6, width, 2) / 3)
        self.hidden = nn.Linear(width, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).permute(0, 2, 3, 1)
        waves = torch.fft.rfft2(x, dim=(1, 2), norm="ortho")
        waves = waves * torch.view_as_complex(self.filter)
        x = torch.fft.irfft2(waves, s=x.shape[1:3], dim=(1, 2), norm="ortho")
        return self.head(F.relu(self.hidden(x)).mean(dim=(1, 2)))


class Prototypes(nn.Module):
    """Distances and angles to learnt points, and lengths."""

    def __init__(self, hidden: int = 8, width: int = 6, points: int = 5) -> None:
        super().__init__()
        self.hidden = nn.Linear(5, hidden)
        self.embed = nn.Linear(hidden, width)
        self.points = nn.Parameter(torch.randn(points, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(F.relu(self.hidden(x)))
        angles = F.cosine_similarity(x[:, None], self.points[None], dim=-1)
        return angles - torch.cdist(x, self.points) + torch.linalg.norm(x, dim=1, keepdim=True)


class TwoTowers(nn.Module):
    """Two inputs that are compared by a product of what is made of them; weights with scales."""

    def __init__(self, hidden: int = 8, width: int = 6) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, hidden), nn.Linear(7, hidden + 1)
        self.weight = nn.Parameter(torch.randn(width, hidden) / 3)
        self.scale = nn.Parameter(torch.rand(width) + 0.5)
        self.project = nn.Linear(hidden + 1, width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        one = F.linear(F.relu(self.left(x)), self.weight * self.scale[:, None])
        return one @ self.project(F.relu(self.right(y))).mT


class SpatialTransformer(nn.Module):
    """Looks at a part of its features that it chooses itself; patches instead of filters."""

    def __init__(self, width: int = 6, hidden: int = 7, patches: int = 5, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3)
        self.where, self.theta = nn.Linear(width, hidden), nn.Linear(hidden, 6)
        self.patch = nn.Conv1d(9 * width, 4 * patches, 1)
        self.head = nn.Linear(patches, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        theta = self.theta(torch.tanh(self.where(x.mean(dim=(2, 3))))).unflatten(1, (2, 3))
        grid = F.affine_grid(theta, [len(x), 1, 6, 8], align_corners=False)
        x = F.grid_sample(x, grid, align_corners=False)
        x = F.fold(F.relu(self.patch(F.unfold(x, 3))), (5, 7), 2)
        return self.head(x.mean(dim=(2, 3)))


class ShuffleNet(nn.Module):
    """Half of the channels pass, the other half is convolved, and both are interleaved."""

    def __init__(self, half: int = 8, hidden: Sequence[int] = (7, 9), classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 2 * half, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(half, n, 1), nn.ReLU(), nn.Conv2d(n, half, 1)) for n in hidden
        )
        self.head = nn.Linear(2 * half, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for block in self.blocks:
            kept, convolved = x.chunk(2, dim=1)
            x = torch.cat([kept, block(convolved)], dim=1)
            x = x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        return self.head(x.mean(dim=(2, 3)))


class TemporalShift(nn.Module):
    """Some channels are taken from the step before or after, written part by part (TSM)."""

    def __init__(self, parts: Sequence[int] = (2, 3, 4), classes: int = 4) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Linear(5, sum(parts)), nn.Linear(sum(parts), 7)
        self.head = nn.Linear(7, classes)
        self.parts = tuple(parts)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.embed(x))
        before, after, kept = x.split(self.parts, dim=-1)
        moved = torch.zeros_like(x)
        one, two = self.parts[0], sum(self.parts[:2])
        moved[:, :-1, :one] = before[:, 1:]
        moved[:, 1:, one:two] = after[:, :-1]
        moved[:, :, two:] = kept
        return self.head(F.relu(self.hidden(moved)).amax(dim=1))


# ---------------------------------------------------------------------- attention and recurrence


class FusedAttention(nn.Module):
    """Multi-head self-attention, written out, with one layer for queries, keys and values."""

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = head_width**-0.5
        self.qkv = nn.Linear(width, 3 * heads * head_width)
        self.project = nn.Linear(heads * head_width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attention = (q @ k.transpose(-2, -1) * self.scale).softmax(dim=-1)
        return self.project((attention @ v).transpose(1, 2).reshape(b, n, -1))


class SeparateAttention(nn.Module):
    """Multi-head self-attention by PyTorch's function, with a layer each for q, k and v."""

    def __init__(self, width: int, heads: int, head_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, heads * head_width)
        self.k = nn.Linear(width, heads * head_width, bias=False)
        self.v = nn.Linear(width, heads * head_width)
        self.project = nn.Linear(heads * head_width, width)

    def split(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        return x.view(b, n, self.heads, -1).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.project(y.transpose(1, 2).flatten(2))


class ViTBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int, attention: nn.Module, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = attention
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """A vision transformer with a class token and learned position embeddings."""

    def __init__(
        self,
        attention: Callable[[int, int, int], nn.Module] = FusedAttention,
        width: int = 26,
        heads: int = 4,
        head_width: int = 6,
        hidden: Sequence[int] = (33, 34),
        classes: int = 10,
        grid: tuple[int, int] = (5, 7),
        patch: int = 4,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.1 * torch.randn(1, grid[0] * grid[1] + 1, width))
        self.blocks = nn.Sequential(
            *(ViTBlock(width, attention(width, heads, head_width), h) for h in hidden)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class SelfAttentionNet(nn.Module):
    """A sequence classifier around `nn.MultiheadAttention`."""

    def __init__(self, width: int = 12, heads: int = 4, classes: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        y, _ = self.attention(x, x, x)
        return self.head(self.norm(x + y).mean(dim=1))


class CrossAttentionNet(nn.Module):
    """Attention between two sequences by `nn.MultiheadAttention`, sequence first, no weights."""

    def __init__(self, width: int = 12, memory: int = 14, heads: int = 4, classes: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.keys = nn.Linear(7, memory)
        self.values = nn.Linear(7, memory + 1)
        self.attention = nn.MultiheadAttention(width, heads, kdim=memory, vdim=memory + 1)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x, k, v = self.embed(x), self.keys(memory), self.values(memory)
        x, k, v = x.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        y, _ = self.attention(x, k, v, need_weights=False)
        return self.head(y.transpose(0, 1).mean(dim=1))


class Encoder(nn.Module):
    """A sequence classifier around `nn.TransformerEncoder`."""

    def __init__(
        self,
        norm_first: bool,
        width: int = 12,
        heads: int = 4,
        hidden: int = 17,
        layers: int = 2,
        classes: int = 6,
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, hidden, batch_first=True, norm_first=norm_first
        )
        norm = nn.LayerNorm(width) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(dim=1))


class EinsumAttention(nn.Module):
    """A sequence classifier whose attention has a tensor per head and is written as einsums."""

    def __init__(
        self, width: int = 12, heads: int = 4, keys: int = 5, values: int = 6, classes: int = 8
    ) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(width, 7) / 3)
        self.q = nn.Parameter(torch.randn(heads, width, keys) / 3)
        self.k = nn.Parameter(torch.randn(heads, width, keys) / 3)
        self.v = nn.Parameter(torch.randn(heads, width, values) / 3)
        self.o = nn.Parameter(torch.randn(heads, values, width) / 3)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("bti,ci->btc", x, self.embed)
        q = torch.einsum("btc,hcd->bhtd", x, self.q)
        k = torch.einsum("btc,hcd->bhtd", x, self.k)
        v = torch.einsum("btc,hcd->bhtd", x, self.v)
        attention = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(dim=-1)
        x = x + torch.einsum("bhqk,bhkd,hdc->bqc", attention, v, self.o)
        return self.head(x.mean(dim=1))


class LSTMClassifier(nn.Module):
    """Classifies a sequence by the last output of an LSTM."""

    def __init__(self, width: int = 8, hidden: int = 7, classes: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.lstm = nn.LSTM(width, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(F.relu(self.embed(x)))
        return self.head(y[:, -1])


class BidirectionalLSTMClassifier(nn.Module):
    """Classifies a sequence by the mean output and both final states of a bidirectional LSTM."""

    def __init__(self, width: int = 8, hidden: int = 6, classes: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.lstm = nn.LSTM(width, hidden, num_layers=2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(4 * hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        y, (hidden, _) = self.lstm(F.relu(self.embed(x)))
        return self.head(torch.cat([y.mean(dim=1), hidden[-2], hidden[-1]], dim=1))


class GRUClassifier(nn.Module):
    """Classifies a text by the last hidden state of a GRU."""

    def __init__(self, width: int = 8, hidden: int = 7, classes: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(23, width)
        self.gru = nn.GRU(width, hidden, num_layers=2, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        _, hidden = self.gru(self.embedding(tokens))
        return self.head(hidden[-1])


class TiedLanguageModel(nn.Module):
    """A language model whose output layer is its embedding, so that the vocabulary is an output."""

    def __init__(self, vocabulary: int = 23, width: int = 10, hidden: int = 14) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.gru = nn.GRU(width, hidden, batch_first=True)
        self.project = nn.Linear(hidden, width)
        self.decoder = nn.Linear(width, vocabulary)
        self.decoder.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        y, _ = self.gru(self.embedding(tokens))
        return self.decoder(torch.tanh(self.project(y)))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Pairs of numbers, one in each half of a head, turned by an angle for each place."""
    one, two = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-two, one], dim=-1) * angles.sin()


class RotaryAttention(nn.Module):
    """Heads that are fused one by one into a projection, their first halves rotated (GPT-NeoX)."""

    def __init__(self, width: int = 10, heads: int = 3, inner: int = 8, classes: int = 6) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.qkv = nn.Linear(width, 3 * heads * inner)
        self.out = nn.Linear(heads * inner, width)
        self.head = nn.Linear(width, classes)
        self.heads = heads
        self.register_buffer("speeds", torch.tensor([1.0, 0.1]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        heads = self.qkv(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q, k, v = heads.chunk(3, dim=-1)
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * self.speeds
        angles = torch.cat([angles, angles], dim=-1)
        q, k = (torch.cat([rotated(t[..., :4], angles), t[..., 4:]], dim=-1) for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.head(x + self.out(mixed.transpose(1, 2).flatten(2))).mean(dim=1)


class Experts(nn.Module):
    """Every token goes through its best expert; scores and products are computed in regions."""

    def __init__(
        self, width: int = 8, hidden: int = 16, experts: int = 3, classes: int = 4
    ) -> None:
        super().__init__()
        self.embed, self.router = nn.Linear(5, width), nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / 3)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / 3)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.embed(x))
        with torch.autocast("cpu", enabled=False):
            score, expert = self.router(x).softmax(dim=-1).topk(1)
        hidden = torch.einsum("btc,ech->bteh", x, self.up).relu()
        made = torch.einsum("bteh,ehc->btec", hidden, self.down)
        chosen = made.gather(2, expert[..., None].expand(-1, -1, -1, x.shape[-1])).squeeze(2)
        return self.head((x + score * chosen).mean(dim=1))


class ProjectedLSTM(nn.Module):
    """An LSTM that passes on a projection of its cells."""

    def __init__(self, width: int = 8, hidden: int = 7, passed: int = 5, classes: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(5, width)
        self.lstm = nn.LSTM(width, hidden, num_layers=2, batch_first=True, proj_size=passed)
        self.mix, self.head = nn.Linear(passed + hidden, 6), nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        y, (_, cells) = self.lstm(F.relu(self.embed(x)))
        return self.head(F.relu(self.mix(torch.cat([y[:, -1], cells[-1]], dim=1))))


# ------------------------------------------------------------------------------------- entries


def floats(*shapes: tuple[int, ...]) -> Callable[[], tuple[Tensor, ...]]:
    """A function returning normally distributed tensors of the shapes, behind the batch axis."""

    def inputs() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        return tuple(torch.randn(BATCH, *shape, generator=generator) for shape in shapes)

    return inputs


def tokens(vocabulary: int, length: int) -> Callable[[], tuple[Tensor, ...]]:
    """A function returning a batch of random tokens."""

    def inputs() -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        return (torch.randint(vocabulary, (BATCH, length), generator=generator),)

    return inputs


def nodes_and_edges() -> tuple[Tensor, ...]:
    """A graph of six nodes; one has several neighbours, one none."""
    generator = torch.Generator().manual_seed(0)
    edges = torch.tensor([[0, 1, 2, 3, 4, 0, 1], [1, 2, 0, 4, 3, 2, 4]])
    return torch.randn(6, 5, generator=generator), edges


def in_general_position(module: nn.Module) -> nn.Module:
    """Make neurons distinguishable: no tensor is constant, and raised biases keep ReLUs alive."""
    with torch.no_grad():
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if tensor.is_floating_point() and tensor.numel() > 1 and tensor.min() == tensor.max():
                tensor += torch.empty_like(tensor).uniform_(-0.3, 0.3)
            if name.endswith("bias") and tensor.is_floating_point():
                tensor += 0.5
    return module


def entry(
    name: str,
    build: Callable[[], nn.Module],
    example_inputs: Callable[[], tuple[Tensor, ...]],
    resizable: bool = True,
) -> Entry:
    """An entry whose network is in general position."""
    return Entry(name, lambda: in_general_position(build()), example_inputs, resizable)


OURS: tuple[Entry, ...] = (
    entry("mlp_1", lambda: MLP(5, 8, 4), floats((5,))),
    entry("mlp_2", lambda: MLP(5, 8, 7, 4), floats((5,))),
    entry("mlp_3", lambda: MLP(5, 8, 7, 6, 4), floats((5,))),
    entry("glu_chunk", ChunkGLU, floats((5,))),
    entry("glu_product", ProductGate, floats((5,))),
    entry("shared_layer", SharedLayer, floats((5,))),
    entry("tied_autoencoder", TiedAutoencoder, floats((12,))),
    entry("two_inputs", TwoInputs, floats((3, 10, 13), (5,))),
    entry("lenet_flatten", LeNet, floats((3, 32, 32))),
    entry("lenet_sequential", lenet_sequential, floats((3, 32, 32))),
    entry("lenet_view", LeNetView, floats((3, 32, 32))),
    entry("lenet_hard_coded", LeNetHardCoded, floats((3, 32, 32)), resizable=False),
    entry("vgg", VGG, floats((3, 32, 48))),
    entry("unet_bilinear", UNet, floats((3, 36, 96))),
    entry("unet_transposed", lambda: UNet(bilinear=False, bias=True), floats((3, 32, 96))),
    entry("resnet_basic", ResNet, floats((3, 60, 84))),
    entry(
        "resnet_bottleneck",
        lambda: ResNet(bottleneck_block, 7, (27, 36, 48)),
        floats((3, 60, 84)),
    ),
    entry("mobilenet", MobileNet, floats((3, 32, 56))),
    entry("grouped_conv", GroupedConv, floats((3, 13, 15))),
    entry("grouped_conv_nested", lambda: GroupedConv((4, 2, 2)), floats((3, 13, 15))),
    entry("squeeze_excite", SENet, floats((3, 14, 18))),
    entry(
        "group_norm",
        lambda: normed_convs(lambda c: nn.GroupNorm(4, c), lambda c: nn.GroupNorm(1, c)),
        floats((3, 11, 13)),
    ),
    entry(
        "instance_norm",
        lambda: normed_convs(
            lambda c: nn.InstanceNorm2d(c, affine=True),
            lambda c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True),
        ),
        floats((3, 11, 13)),
    ),
    entry(
        "prelu",
        lambda: normed_convs(nn.BatchNorm2d, nn.BatchNorm2d, activation=nn.PReLU),
        floats((3, 11, 13)),
    ),
    entry("conv1d", conv1d_net, floats((4, 48))),
    entry("conv3d", conv3d_net, floats((3, 18, 14, 16))),
    entry("pixel_shuffle", SuperResolution, floats((3, 9, 11))),
    entry("densenet", DenseNet, floats((3, 24, 34))),
    entry("convnext", ConvNeXt, floats((3, 32, 48))),
    entry("scaled", Scaled, floats((3, 11, 14))),
    entry("detached_skip", DetachedSkip, floats((3, 9, 11))),
    entry("frozen", lambda: SENet((10, 11)).requires_grad_(False), floats((3, 14, 18))),
    entry("tuple_outputs", TupleOutputs, floats((3, 20, 24))),
    entry("dict_outputs", DictOutputs, floats((5,))),
    entry("vit_fused", ViT, floats((3, 20, 28))),
    entry("vit_sdpa", lambda: ViT(SeparateAttention), floats((3, 20, 28))),
    entry("self_attention", SelfAttentionNet, floats((9, 5))),
    entry("cross_attention", CrossAttentionNet, floats((9, 5), (11, 7))),
    entry("encoder_post_norm", lambda: Encoder(norm_first=False), floats((9, 5))),
    entry("encoder_pre_norm", lambda: Encoder(norm_first=True), floats((9, 5))),
    entry("einsum", EinsumAttention, floats((9, 7))),
    entry("lstm", LSTMClassifier, floats((9, 5))),
    entry("lstm_bidirectional", BidirectionalLSTMClassifier, floats((9, 5))),
    entry("gru", GRUClassifier, tokens(23, 9)),
    entry("tied_language_model", TiedLanguageModel, tokens(23, 9)),
    entry("graph_net", GraphNet, nodes_and_edges),
    entry("bag_of_words", BagOfWords, tokens(23, 9)),
    entry("block_attention", BlockAttention, floats((3, 9, 11))),
    entry("fourier", FourierNet, floats((3, 8, 10))),
    entry("prototypes", Prototypes, floats((5,))),
    entry("two_towers", TwoTowers, floats((5,), (7,))),
    entry("spatial_transformer", SpatialTransformer, floats((3, 9, 11))),
    entry("shuffle", ShuffleNet, floats((3, 9, 11)), resizable=False),
    entry("temporal_shift", TemporalShift, floats((9, 5)), resizable=False),
    entry("rotary", RotaryAttention, floats((9, 5)), resizable=False),
    entry("experts", Experts, floats((9, 5))),
    entry("lstm_projected", ProjectedLSTM, floats((9, 5)), resizable=False),
)


def monai_unet() -> nn.Module:
    """The residual U-Net of MONAI, upsampling by transposed convolution."""
    from monai.networks.nets import UNet as MonaiUNet

    return MonaiUNet(2, 3, 4, channels=(5, 9, 14), strides=(2, 2), num_res_units=2, norm="batch")


def monai_basic_unet() -> nn.Module:
    """The plain U-Net of MONAI, with affine instance normalisation."""
    from monai.networks.nets import BasicUNet

    return BasicUNet(2, 3, 5, features=(9, 11, 14, 19, 30, 13))


def monai_densenet() -> nn.Module:
    """The DenseNet-121 of MONAI, with fewer layers per block."""
    from monai.networks.nets import DenseNet121

    return DenseNet121(
        2, 3, 6, init_features=15, growth_rate=7, block_config=(2, 3, 2, 2), bn_size=3
    )


def monai_segresnet() -> nn.Module:
    """The residual encoder-decoder of MONAI, with group normalisation before the convolutions."""
    from monai.networks.nets import SegResNet

    return SegResNet(
        2,
        init_filters=6,
        in_channels=3,
        out_channels=4,
        norm=("GROUP", {"num_groups": 3}),
        blocks_down=(1, 2, 1),
        blocks_up=(1, 1),
    )


def monai_vit() -> nn.Module:
    """The vision transformer of MONAI, which splits heads with einops and attends by einsum."""
    from monai.networks.nets import ViT as MonaiViT

    return MonaiViT(
        in_channels=3,
        img_size=(20, 28),
        patch_size=4,
        hidden_size=24,
        mlp_dim=33,
        num_layers=2,
        num_heads=4,
        classification=True,
        num_classes=10,
        spatial_dims=2,
        qkv_bias=True,
    )


def transformers_bert(attention: str) -> nn.Module:
    """A small BERT with the given implementation of attention."""
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=31,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=33,
        max_position_embeddings=13,
        type_vocab_size=3,
        initializer_range=0.3,
        attn_implementation=attention,
    )
    return BertModel(config)


def transformers_gpt2(language_model: bool) -> nn.Module:
    """A small GPT-2, with the tied output layer if it is a language model."""
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

    config = GPT2Config(
        vocab_size=31,
        n_positions=13,
        n_embd=24,
        n_layer=2,
        n_head=4,
        n_inner=33,
        initializer_range=0.3,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config) if language_model else GPT2Model(config)


def transformers_vit() -> nn.Module:
    """A small vision transformer with a classifier."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=33,
        image_size=(20, 28),
        patch_size=4,
        num_labels=10,
        initializer_range=0.3,
    )
    return ViTForImageClassification(config)


# The transformers spell out the width of a head (and GPT-2 every width) in their Python code.
FOREIGN: tuple[Entry, ...] = (
    entry("monai_unet", monai_unet, floats((3, 32, 48))),
    entry("monai_basic_unet", monai_basic_unet, floats((3, 32, 96))),
    entry("monai_densenet", monai_densenet, floats((3, 64, 80))),
    entry("monai_segresnet", monai_segresnet, floats((3, 32, 40))),
    # Its einops layers fix the number of heads.
    entry("monai_vit", monai_vit, floats((3, 20, 28)), resizable=False),
    entry("bert_eager", lambda: transformers_bert("eager"), tokens(31, 9), resizable=False),
    entry("bert_sdpa", lambda: transformers_bert("sdpa"), tokens(31, 9), resizable=False),
    entry("gpt2", lambda: transformers_gpt2(False), tokens(31, 9), resizable=False),
    entry("gpt2_language_model", lambda: transformers_gpt2(True), tokens(31, 9), resizable=False),
    entry("transformers_vit", transformers_vit, floats((3, 20, 28)), resizable=False),
)


@contextmanager
def rules_that_work() -> Iterator[None]:
    """Within the block, a rule that fails is an error and not only a gap."""

    def unknown(call: rules.Call, why: Pin | None = None) -> list[rules.Value]:
        assert why is None, why
        return calls.unknown(call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rules, "unknown", unknown)
        yield


def named(name: str) -> Entry:
    """The entry of this name."""
    return next(entry for entry in OURS + FOREIGN if entry.name == name)


def seeded(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The network of this name, always the same, and its inputs."""
    torch.manual_seed(0)
    return named(name).build(), named(name).example_inputs()


@cache
def traced(name: str) -> ModelSpec:
    """Its spec, found once in a process and not checked by permuting."""
    model, inputs = seeded(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecWarning)
        return groups(model.eval(), inputs, check=False)


def tested() -> list[Any]:
    """The names of all networks; the deep ones and those of other packages are slow."""
    slow = {"unet_transposed", "unet_bilinear", "resnet_bottleneck", "densenet", "vit_fused"}
    slow |= {entry.name for entry in FOREIGN}
    return [
        pytest.param(entry.name, marks=pytest.mark.slow) if entry.name in slow else entry.name
        for entry in OURS + FOREIGN
    ]
