"""What the networks are trained to do: which cells answer for an object, and the loss of their answers and of maps."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from examples.street.dataset import INPUT_HEIGHT_PX, INPUT_WIDTH_PX
from examples.street.net import STRIDES
from examples.street.truth import NOT_COUNTED

# Longest side in input pixels of the objects each stride answers for; between the limits both do.
_SIDES_PX = {8: (0.0, 46.0), 16: (30.0, 1e9)}
_CENTRE_RADIUS = (
    0.85  # share of the stride: a cell answers if its centre is this close to the object's in both directions
)
_BOX_WEIGHT = 5.0
_MASKS = 256  # at most so many answers of a batch are compared by their masks
# Of what the loss of a batch adds up; the boxes have weight 1.
_WEIGHTS = {"segment": 3.0, "depth": 6.0, "instance": 3.0, "pose": 6.0, "obb": 12.0}
# Vehicles and pedestrians cover few pixels.
_CLASS_WEIGHTS = torch.tensor((1.0, 1.0, 1.0, 1.0, 1.5, 3.0))


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
    classes = functional.one_hot(targets[:, 0].long(), logits.shape[-1] - 5).float()
    cross_entropy = functional.binary_cross_entropy_with_logits
    of_boxes = (1.0 - giou).sum()
    of_objects = cross_entropy(logits[..., 4], answering.float(), reduction="sum")
    of_classes = cross_entropy(logits[answering][:, 5:], classes * iou.detach()[:, None], reduction="sum")
    return (_BOX_WEIGHT * of_boxes + of_objects + of_classes) / count


def heads_loss(said: Mapping[str, Tensor], batch: Mapping[str, Tensor], corners: Tensor, strides: Tensor) -> Tensor:
    """The loss of a batch, summed over the heads: `said` as `StreetHeads` says it, `batch` as `dataset` renders it."""
    losses = dict[str, Tensor]()
    if "map-segment" in said:
        wanted = batch["classes"].long()
        losses["segment"] = functional.cross_entropy(
            said["map-segment"], wanted, _CLASS_WEIGHTS, ignore_index=NOT_COUNTED
        )
    if "map-depth" in said:
        depths = batch["depths"].float()
        is_there = torch.isfinite(depths)
        losses["depth"] = (said["map-depth"][:, 0][is_there] - depths[is_there].log()).abs().mean()
    if "cells" not in said:
        return _weighted(losses)
    rows = assign(batch["objects"], corners, strides)
    images, cells = torch.nonzero(rows >= 0, as_tuple=True)
    chosen = rows[images, cells]
    boxes = batch["objects"][images, chosen, 1:]
    if "cells-instance" in said:
        some = torch.randperm(len(images))[:_MASKS]
        factors = said["cells-instance"][images[some], cells[some]]
        masks = torch.einsum("nf,nfrc->nrc", factors, said["map-instance"][images[some]])
        wanted = batch["owners"][images[some]] == (chosen[some] + 1)[:, None, None]
        losses["instance"] = _mask_loss(masks, wanted.float(), boxes[some] / 4)
    if "cells-pose" in said:
        found = said["cells-pose"][images, cells].unflatten(-1, (-1, 3))
        points = batch["points"][images, chosen]
        is_in_view = points[..., 2]
        middles = (corners[cells] + 0.5) * strides[cells, None]
        places = found[..., :2] * strides[cells, None, None] + middles[:, None]
        sides = (boxes[:, 2:] - boxes[:, :2]).prod(-1).sqrt()[:, None]
        far = (places - points[..., :2]).abs().sum(-1) / sides
        of_places = (far * is_in_view).sum() / is_in_view.sum().clamp(min=1)
        is_vehicle = batch["objects"][images, chosen, 0] == 0
        of_views = functional.binary_cross_entropy_with_logits(found[is_vehicle][..., 2], is_in_view[is_vehicle])
        losses["pose"] = of_places + 0.2 * of_views
    if "cells-obb" in said:
        wrong = said["cells-obb"][images, cells, 0] - batch["angles"][images, chosen]
        losses["obb"] = wrong.abs().mean()
    return detection_loss(said["cells"], batch["objects"], corners, strides) + _weighted(losses)


def _weighted(losses: Mapping[str, Tensor]) -> Tensor:
    total: Tensor = sum((_WEIGHTS[task] * loss for task, loss in losses.items()), torch.zeros(()))
    return total


def _mask_loss(masks: Tensor, wanted: Tensor, boxes: Tensor) -> Tensor:
    """Cross-entropy of masks (n, rows, columns) inside their boxes (n, 4), which are in cells (Bolya et al. 2019)."""
    y = torch.arange(masks.shape[1])[None, :, None] + 0.5
    x = torch.arange(masks.shape[2])[None, None, :] + 0.5
    x1, y1, x2, y2 = boxes[:, :, None, None].unbind(1)
    is_inside = ((x > x1) & (x < x2) & (y > y1) & (y < y2)).float()
    by_cell = functional.binary_cross_entropy_with_logits(masks, wanted, reduction="none") * is_inside
    return (by_cell.sum((1, 2)) / is_inside.sum((1, 2)).clamp(min=1)).mean()
