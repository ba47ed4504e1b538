"""Render pictures of the street with their truth as a labelled data set, in a format that `tared evaluate` reads.

    python -m examples.street.labelled --task pose --images 200 -o DIR

writes DIR/images/0000.png and so on, and beside them DIR/masks or DIR/depth, one PNG for each, or COCO's instances in
DIR/annotations/instances.json. Pictures of task obb are of a camera that hangs askew.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from agent.vision.tasks.maps import run_lengths
from examples.street import view
from examples.street.dataset import HOURS, moments, tilt_of
from examples.street.light import Image
from examples.street.scene import CLASSES
from examples.street.sprites import VEHICLE
from examples.street.truth import Object, Truth, hung_askew, truth_at
from examples.street.vehicles import KEY_POINTS

TASKS = ("segment", "instance", "pose", "obb", "depth")
SEED = 90_000  # traffic that nobody has trained on


def write_labelled(
    folder: Path,
    task: str,
    images: int,
    first_seed: int = SEED,
    hours: Sequence[tuple[float, float, float]] = HOURS,
) -> Path:
    """Render `images` pictures, drawn as by `dataset.moments`, and their labels for one of TASKS; return `folder`.

    Key points are labelled of vehicles alone, as the head knows them.
    """
    (folder / "images").mkdir(parents=True)
    annotations = list[dict[str, Any]]()
    for number, (street, ts, hour) in enumerate(moments(images, first_seed, hours)):
        name = f"{number:04}.png"
        image, truth = street.frame(ts, hour).image, truth_at(street, ts)
        if task == "obb":
            image, boxes = hung_askew(image, truth.objects, tilt_of(ts))
            found = [_oriented(class_id, box) for class_id, box in boxes]
        else:
            found = [_annotation(each, task) for each in truth.objects if task != "pose" or len(each.key_points)]
        cv2.imwrite(str(folder / "images" / name), image)
        if task in ("segment", "depth"):
            _write_map(folder, task, name, truth)
        annotations += ({**each, "image_id": number, "id": len(annotations) + at} for at, each in enumerate(found, 1))
    if task in ("segment", "depth"):
        return folder
    (folder / "annotations").mkdir()
    names = CLASSES[: VEHICLE + 1] if task == "pose" else CLASSES
    size = {"width": view.WIDTH_PX, "height": view.HEIGHT_PX}
    document = {
        "images": [{"id": number, "file_name": f"{number:04}.png", **size} for number in range(images)],
        "categories": [{"id": number, "name": name, "keypoints": KEY_POINTS} for number, name in enumerate(names)],
        "annotations": annotations,
    }
    (folder / "annotations" / "instances.json").write_text(json.dumps(document))
    return folder


def _annotation(each: Object, task: str) -> dict[str, Any]:
    x1, y1, x2, y2 = each.label.box
    shape: dict[str, Any] = (
        {"keypoints": [float(value) for value in each.key_points.ravel()], "area": int(each.silhouette.sum())}
        if task == "pose"
        else {
            "segmentation": {"size": list(each.mask.shape), "counts": run_lengths(each.mask)},
            "area": int(each.mask.sum()),
        }
    )
    return {"category_id": each.label.class_id, "bbox": [x1, y1, x2 - x1, y2 - y1], "iscrowd": 0, **shape}


def _oriented(class_id: int, box: Any) -> dict[str, Any]:
    """An annotation whose outline is an oriented box: centre x, y, length, width and angle in radians."""
    x, y, length, width, angle = box.tolist()
    corners = cv2.boxPoints(((x, y), (length, width), np.degrees(angle)))
    size = np.array((view.WIDTH_PX, view.HEIGHT_PX))
    low, high = (np.clip(bound, 0, size) for bound in (corners.min(axis=0), corners.max(axis=0)))
    return {
        "category_id": class_id,
        "bbox": [*low.tolist(), *(high - low).tolist()],
        "segmentation": [corners.astype(float).ravel().tolist()],
        "area": length * width,
        "iscrowd": 0,
    }


def _write_map(folder: Path, task: str, name: str, truth: Truth) -> None:
    """A PNG of numbers of classes, or of millimetres in 16 bits, in which 0 is none."""
    levels: Image | Any = truth.classes
    if task == "depth":
        levels = np.where(np.isfinite(truth.depth), np.rint(1000.0 * truth.depth), 0.0).astype(np.uint16)
    place = folder / ("masks" if task == "segment" else "depth")
    place.mkdir(exist_ok=True)
    cv2.imwrite(str(place / name), levels)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Render labelled pictures of the sample's street.")
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write to")
    args = parser.parse_args()
    print(write_labelled(args.output, args.task, args.images))


if __name__ == "__main__":
    main()
