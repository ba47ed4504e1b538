"""The sample's networks for the tasks beyond detection: the detector's backbone, narrower, with a head for each task.

Heads that are trained together share everything but their last layers; each is exported with what it needs alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from examples.street.loss import decode_boxes, grid
from examples.street.net import ConvUnit, StreetNet, of_cells
from examples.street.truth import SURFACES
from examples.street.vehicles import KEY_POINTS

PROTOTYPES = 8
_WIDTHS = (16, 24, 28, 28)
_MAPS = {"segment": len(SURFACES), "depth": 1, "instance": PROTOTYPES}  # channels at stride 4
_EXTRAS = {"instance": PROTOTYPES, "pose": 3 * len(KEY_POINTS), "obb": 1}  # values beside each cell's box
_TYPICAL_LOG_DEPTH = 2.6  # 13 m


class PixelDecoder(nn.Module):
    """Features of stride 4, from those of stride 4 and the merged ones of stride 8."""

    def __init__(self, finest: int, fine: int) -> None:
        super().__init__()
        self.lateral = ConvUnit(finest, finest, 1)
        self.top = ConvUnit(fine, finest, 1)
        self.merge = ConvUnit(finest, finest, 3)

    def forward(self, finest: Tensor, fine: Tensor) -> Tensor:
        above = nn.functional.interpolate(self.top(fine), scale_factor=2.0, mode="nearest")
        out: Tensor = self.merge(self.lateral(finest) + above)
        return out


class Extras(nn.Sequential):
    """What a cell says of its object beside the box: (batch, values, rows, columns)."""

    def __init__(self, channels: int, values: int) -> None:
        super().__init__(
            ConvUnit(channels, channels, 3, depthwise=True),
            ConvUnit(channels, channels, 1),
            nn.Conv2d(channels, values, 1),
        )


class StreetHeads(nn.Module):
    """Images (batch, 3, 160, 288), blue green red in [0, 1], to what the heads of `tasks` say, by name.

    - cells: (batch, 900, 7), as `StreetNet`.
    - map-segment: logits (batch, classes, 80, 144).
    - map-depth: the logarithm of metres (batch, 1, 40, 72).
    - map-instance: prototypes (batch, 8, 40, 72); cells-instance: factors of these (batch, 900, 8).
    - cells-pose: (batch, 900, 18), of each key point x, y from the cell's middle in strides, and a logit.
    - cells-obb: the box's angle in radians (batch, 900, 1).
    """

    def __init__(self, tasks: Sequence[str]) -> None:
        super().__init__()
        _, finest, fine, coarse = _WIDTHS
        self.tasks = tuple(tasks)
        self.street = StreetNet(widths=_WIDTHS)
        self.pixels = PixelDecoder(finest, fine)
        self.maps = nn.ModuleDict({task: nn.Conv2d(finest, _MAPS[task], 1) for task in tasks if task in _MAPS})
        self.extras = nn.ModuleDict(
            {
                task: nn.ModuleList((Extras(fine, _EXTRAS[task]), Extras(coarse, _EXTRAS[task])))
                for task in tasks
                if task in _EXTRAS
            }
        )
        if "depth" in self.maps:
            nn.init.constant_(self.maps["depth"].bias, _TYPICAL_LOG_DEPTH)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        finest, *levels = self.street.features(images)
        said = {f"cells-{task}": of_cells(heads, levels) for task, heads in self.extras.items()}
        if self.extras:
            said["cells"] = of_cells(self.street.heads, levels)
        if self.maps:
            features = self.pixels(finest, levels[0])
            said |= {f"map-{task}": last(features) for task, last in self.maps.items()}
        if "map-segment" in said:
            scores = said["map-segment"]
            said["map-segment"] = nn.functional.interpolate(scores, scale_factor=2.0, mode="bilinear")
        return said


def key_points(said: Tensor, corners: Tensor, strides: Tensor) -> Tensor:
    """Key points (..., 900, 6, 3) in input pixels from `cells-pose`: x, y, and the logit as it is."""
    points = said.unflatten(-1, (len(KEY_POINTS), 3))
    places = (points[..., :2] + corners[:, None] + 0.5) * strides[:, None, None]
    return torch.cat((places, points[..., 2:]), -1)


class DeployedHead(nn.Module):
    """One head as it is exported: the outputs that YOLOv8's models of its task have, a map of scores, or metres.

    Key points are of vehicles alone.
    """

    def __init__(self, net: StreetHeads, task: str) -> None:
        super().__init__()
        self.net, self.task = net, task
        corners, strides = grid()
        self.register_buffer("corners", corners)
        self.register_buffer("strides", strides)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        said = self.net(images)
        if self.task == "segment":
            return (said["map-segment"],)
        if self.task == "depth":
            return (torch.exp(said["map-depth"]),)
        cells, extras = said["cells"], said[f"cells-{self.task}"]
        x1y1, x2y2 = decode_boxes(cells[..., :4], self.corners, self.strides).split(2, -1)
        scores = torch.sigmoid(cells[..., 4:5]) * torch.sigmoid(cells[..., 5:])
        if self.task == "pose":
            scores = scores[..., :1]
            points = key_points(extras, self.corners, self.strides)
            extras = torch.cat((points[..., :2], torch.sigmoid(points[..., 2:])), -1).flatten(-2)
        rows = torch.cat(((x1y1 + x2y2) / 2, x2y2 - x1y1, scores, extras), -1).transpose(1, 2)
        return (rows, said["map-instance"]) if self.task == "instance" else (rows,)
