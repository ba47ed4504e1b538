"""Labelled images for `tared evaluate`: a folder or zip, classes as folders or YOLO label files."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from agent.detections import LabelledBoxes
from agent.errors import DatasetError
from agent.images import ImageFiles

Image = NDArray[np.uint8]


class ClassifiedImages:
    """Images whose class is the name of their folder.

    With the model's `labels` a class is numbered by its place there; without, `classes` are the folder
    names in alphabetical order. Iteration reads lazily and yields (image BGR uint8 (h, w, 3), class id).
    Raises DatasetError: see ImageFiles, and `dataset.label` for an image outside a class's folder.
    """

    def __init__(self, path: Path, labels: Sequence[str] = ()) -> None:
        self._files = ImageFiles(path)
        folders = {PurePosixPath(name).parent.name for name in self._files.names}
        self.classes = tuple(labels) or tuple(sorted(folders))
        unknown = sorted(folder for folder in folders if self.classes.count(folder) != 1 or not folder)
        if unknown:
            raise DatasetError(
                "dataset.label",
                f"images in folder '{unknown[0]}' of {path}",
                "folders named as one label of the model spec each" if labels else "one folder per class",
                "rename the folders, or correct labels in the model spec",
            )

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[tuple[Image, int]]:
        ids = {name: index for index, name in enumerate(self.classes)}
        for name in self._files.names:
            yield self._files.read(name), ids[PurePosixPath(name).parent.name]


class DetectionImages:
    """Images with YOLO label files: lines `class cx cy w h`, centre and size as fractions of the image.

    The labels of `images/train/a.jpg` are `labels/train/a.txt`; those of `a.jpg` may also be `a.txt` or
    `labels/a.txt` beside it. An image without a label file shows no object, as Ultralytics reads it. A
    `classes.txt` names the classes, which are then matched by name to the model's `labels`.

    Iteration reads lazily and yields (image BGR uint8 (h, w, 3), LabelledBoxes in its pixels). Raises
    DatasetError: see ImageFiles, and `dataset.label` for a label that is malformed or out of range.
    """

    def __init__(self, path: Path, labels: Sequence[str] = ()) -> None:
        self._files = ImageFiles(path)
        present = frozenset(self._files.files)
        self._label_files = {
            name: next((file for file in _label_candidates(name) if file in present), None)
            for name in self._files.names
        }
        if not any(self._label_files.values()):
            raise DatasetError(
                "dataset.label",
                f"no label file for any of {len(self._files)} images in {path}",
                "YOLO label files, e.g. images/a.jpg and labels/a.txt",
                "add the labels, or evaluate a classifier on folders named as classes",
            )
        self._class_ids = self._match_classes(labels)

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[tuple[Image, LabelledBoxes]]:
        for name in self._files.names:
            image = self._files.read(name)
            yield image, self._truth(self._label_files[name], image.shape[1], image.shape[0])

    def _match_classes(self, labels: Sequence[str]) -> Sequence[int] | None:
        """The model's class id by the data set's; None where any id may stand for itself."""
        if "classes.txt" not in self._files.files:
            return range(len(labels)) if labels else None
        names = self._files.read_text("classes.txt").splitlines()
        names = [name.strip() for name in names if name.strip()]
        if not labels:
            return range(len(names))
        unknown = [name for name in names if name not in labels]
        if unknown:
            raise DatasetError(
                "dataset.label",
                f"class '{unknown[0]}' in classes.txt of {self._files.path}",
                "the labels of the model spec",
                "correct classes.txt, or labels in the model spec",
            )
        return [labels.index(name) for name in names]

    def _truth(self, label_file: str | None, width: int, height: int) -> LabelledBoxes:
        lines = self._files.read_text(label_file).splitlines() if label_file else []
        rows = [self._parse(f"{label_file}:{i}", line) for i, line in enumerate(lines, 1) if line.strip()]
        table = np.array(rows, np.float64).reshape(-1, 5)
        centres, sides = table[:, 1:3], table[:, 3:5]
        corners = np.hstack((centres - sides / 2, centres + sides / 2)) * ((width, height) * 2)
        return LabelledBoxes(boxes=corners.astype(np.float32), classes=table[:, 0].astype(np.int64))

    def _parse(self, where: str, line: str) -> tuple[float, ...]:
        """One label line as (the model's class id, cx, cy, w, h)."""
        try:
            dataset_id, *box = (float(field) for field in line.split())
        except ValueError:
            dataset_id, box = math.nan, []
        count = math.inf if self._class_ids is None else len(self._class_ids)
        is_class = dataset_id >= 0 and dataset_id.is_integer() and dataset_id < count
        if not is_class or len(box) != 4 or not all(0.0 <= value <= 1.0 for value in box):
            raise DatasetError(
                "dataset.label",
                f"'{line.strip()}' at {where} in {self._files.path}",
                f"class cx cy w h: a class below {count:g} and four fractions of the image",
                "correct the label, or labels in the model spec",
            )
        class_id = int(dataset_id) if self._class_ids is None else self._class_ids[int(dataset_id)]
        return (class_id, *box)


def _label_candidates(name: str) -> Iterator[str]:
    """Where the label file of an image may lie."""
    image = PurePosixPath(name)
    for depth in range(len(image.parent.parts)):
        if image.parts[depth] == "images":
            swapped = (*image.parts[:depth], "labels", *image.parts[depth + 1 :])
            yield PurePosixPath(*swapped).with_suffix(".txt").as_posix()
    yield image.with_suffix(".txt").as_posix()
    yield (image.parent / "labels" / image.name).with_suffix(".txt").as_posix()
