"""The sample detector: 22 convolutions, two strides, YOLOX-style output without the grid decoding.

Most of its work are convolutions over all channels, and its activations are ReLU: integer kernels gain most on these.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

STRIDES = (8, 16)


class ConvUnit(nn.Sequential):
    """Convolution, batch normalisation, ReLU; `depthwise` keeps the channels apart."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1, depthwise: bool = False) -> None:
        groups = inputs if depthwise else 1
        super().__init__(
            nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs, eps=1e-3, momentum=0.03),
            nn.ReLU(),
        )


class PlainUnit(nn.Sequential):
    """Convolution and ReLU, with neither normalisation nor bias: twice the light gives twice the activation."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int) -> None:
        super().__init__(nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.ReLU())


class Residual(nn.Module):
    """Two convolutions around which the input passes unchanged."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = ConvUnit(channels, channels, 3)
        self.second = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels, eps=1e-3, momentum=0.03)
        )

    def forward(self, features: Tensor) -> Tensor:
        out: Tensor = torch.relu(features + self.second(self.first(features)))
        return out


class Head(nn.Module):
    """Box, objectness and class scores of one stride: (batch, 5 + classes, rows, columns)."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.box_tower = ConvUnit(channels, channels, 3, depthwise=True)
        self.box_mix = ConvUnit(channels, channels, 1)
        self.score_tower = ConvUnit(channels, channels, 3, depthwise=True)
        self.score_mix = ConvUnit(channels, channels, 1)
        self.box = nn.Conv2d(channels, 4, 1)
        self.score = nn.Conv2d(channels, 1 + classes, 1)
        nn.init.constant_(self.score.bias, -4.0)  # type: ignore[arg-type]  # typed optional; this layer has a bias

    def forward(self, features: Tensor) -> Tensor:
        box = self.box(self.box_mix(self.box_tower(features)))
        score = self.score(self.score_mix(self.score_tower(features)))
        return torch.cat((box, score), 1)


class StreetNet(nn.Module):
    """Images (batch, 3, 160, 288), blue green red in [0, 1], to logits (batch, 900, 5 + classes).

    Rows run over stride 8 first, then 16, row by row. Columns: offset x and y from the cell's corner and log
    width and height, all in units of the stride; then objectness and class logits.
    """

    def __init__(self, classes: int = 2, widths: tuple[int, int, int, int] = (16, 32, 48, 64)) -> None:
        super().__init__()
        stem, finest, fine, coarse = widths
        self.stem = PlainUnit(3, stem, 3, 2)
        self.stride4 = PlainUnit(stem, finest, 3, 2)
        self.stride8 = nn.Sequential(ConvUnit(finest, fine, 3, 2), Residual(fine))
        self.stride16 = nn.Sequential(ConvUnit(fine, coarse, 3, 2), Residual(coarse))
        self.lateral = ConvUnit(coarse, fine, 1)
        self.merge = ConvUnit(fine, fine, 3)
        self.heads = nn.ModuleList((Head(fine, classes), Head(coarse, classes)))

    def features(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features of strides 4, 8 and 16."""
        finest = self.stride4(self.stem(images))
        fine = self.stride8(finest)
        coarse = self.stride16(fine)
        fine = self.merge(fine + nn.functional.interpolate(self.lateral(coarse), scale_factor=2.0, mode="nearest"))
        return finest, fine, coarse

    def forward(self, images: Tensor) -> Tensor:
        _, *levels = self.features(images)
        return of_cells(self.heads, levels)


def of_cells(heads: nn.ModuleList, levels: list[Tensor]) -> Tensor:
    """What each head says of its level: (batch, 900, values)."""
    outputs = [head(features).flatten(2) for head, features in zip(heads, levels, strict=True)]
    return torch.cat(outputs, 2).transpose(1, 2)


class Deployed(nn.Module):
    """StreetNet as it is exported: objectness and class scores already probabilities."""

    def __init__(self, net: StreetNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, images: Tensor) -> Tensor:
        logits = self.net(images)
        return torch.cat((logits[..., :4], torch.sigmoid(logits[..., 4:])), -1)
