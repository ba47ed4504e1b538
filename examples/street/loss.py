"""What the detector is trained to do: which cells answer for an object, and the loss of their answers."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.street.dataset import INPUT_HEIGHT_PX, INPUT_WIDTH_PX
from examples.street.net import STRIDES

# Longest side in input pixels of the objects each stride answers for; between the limits both do.
_SIDES_PX = {8: (0.0, 46.0), 16: (30.0, 1e9)}
_CENTRE_RADIUS = (
    0.85  # share of the stride: a cell answers if its centre is this close to the object's in both directions
)
_BOX_WEIGHT = 5.0


def grid() -> tuple[Tensor, Tensor]:
    """Corner (900, 2) of every cell in units of its stride, and its stride (900,), in output order."""
    corners, strides = [], []
    for stride in STRIDES:
        rows, columns = INPUT_HEIGHT_PX // stride, INPUT_WIDTH_PX // stride
        y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        corners.append(torch.stack((x, y), -1).reshape(-1, 2).float())
        strides.append(torch.full((rows * columns,), float(stride)))
    return torch.cat(corners), torch.cat(strides)


def decode_boxes(offsets: Tensor, corners: Tensor, strides: Tensor) -> Tensor:
    """Boxes (..., 900, 4) as x1, y1, x2, y2 in input pixels from the first four output columns."""
    centre = (offsets[..., :2] + corners) * strides[:, None]
    half = torch.exp(offsets[..., 2:4].clamp(max=6.0)) * strides[:, None] / 2
    return torch.cat((centre - half, centre + half), -1)


def assign(objects: Tensor, corners: Tensor, strides: Tensor) -> Tensor:
    """For every cell the row of the object it answers for, or -1: (batch, 900) from objects (batch, n, 5).

    A cell near the centres of several objects takes the smallest, which is the likelier to be in front.
    """
    boxes = objects[:, None, :, 1:]
    size = boxes[..., 2:] - boxes[..., :2]
    centre = (boxes[..., 2:] + boxes[..., :2]) / 2
    cells = ((corners + 0.5) * strides[:, None])[None, :, None]
    near = ((centre - cells).abs() <= _CENTRE_RADIUS * strides[None, :, None, None]).all(-1)
    longest = size.amax(-1)
    limits = torch.tensor([_SIDES_PX[int(stride)] for stride in strides.tolist()])
    fits = (longest >= limits[None, :, :1]) & (longest <= limits[None, :, 1:])
    real = objects[:, None, :, 0] >= 0
    area = torch.where(near & fits & real, size.prod(-1), torch.inf)
    smallest, row = area.min(-1)
    return torch.where(torch.isfinite(smallest), row, -1)


def overlap(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union, and generalised IoU (Rezatofighi et al. 2019), of paired boxes (n, 4)."""
    shared = (torch.minimum(a[:, 2:], b[:, 2:]) - torch.maximum(a[:, :2], b[:, :2])).clamp(min=0).prod(-1)
    union = (a[:, 2:] - a[:, :2]).prod(-1) + (b[:, 2:] - b[:, :2]).prod(-1) - shared
    hull = (torch.maximum(a[:, 2:], b[:, 2:]) - torch.minimum(a[:, :2], b[:, :2])).prod(-1)
    iou = shared / union.clamp(min=1e-6)
    return iou, iou - (hull - union) / hull.clamp(min=1e-6)


def detection_loss(logits: Tensor, objects: Tensor, corners: Tensor, strides: Tensor) -> Tensor:
    """The loss of a batch: GIoU of the answering cells' boxes, cross-entropy of objectness and classes.

    As in YOLOX the class target is the IoU the box reaches, so that the better of two overlapping boxes
    scores higher. `logits` is (batch, 900, 5 + classes), `objects` (batch, n, 5) as in `dataset.render_set`.
    """
    rows = assign(objects, corners, strides)
    answering = rows >= 0
    count = answering.sum().clamp(min=1)
    targets = objects.gather(1, rows.clamp(min=0)[..., None].expand(-1, -1, 5))[answering]
    boxes = decode_boxes(logits[..., :4], corners, strides)[answering]
    iou, giou = overlap(boxes, targets[:, 1:])
    classes = torch.nn.functional.one_hot(targets[:, 0].long(), logits.shape[-1] - 5).float()
    cross_entropy = torch.nn.functional.binary_cross_entropy_with_logits
    of_boxes = (1.0 - giou).sum()
    of_objects = cross_entropy(logits[..., 4], answering.float(), reduction="sum")
    of_classes = cross_entropy(logits[answering][:, 5:], classes * iou.detach()[:, None], reduction="sum")
    return (_BOX_WEIGHT * of_boxes + of_objects + of_classes) / count
