"""Read labelled images: class folders, YOLO's label files, or COCO's JSON, recognised by the files that are there.

`ClassifiedImages` and `detection_images` open a folder, a zip or a COCO JSON. Classes get the model's numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agent.camera.images import ImageFiles
from agent.common.errors import DatasetError
from agent.vision.boxes import LabelledBoxes, Size
from agent.vision.datasets.coco import CocoObjects, find_instances, image_root
from agent.vision.datasets.object_rows import BOX_ROW, ObjectRow, RowForm

Image = NDArray[np.uint8]

_LISTED = 8  # labels in a message
_SHOWN = 200  # characters of a line


class LabelledImages(Protocol):
    """Images, BGR uint8 (h, w, 3), each with its label; they are read while it is iterated."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[tuple[Image, Any]]: ...


@dataclass(frozen=True, eq=False, kw_only=True)
class LabelledObjects(LabelledBoxes):
    """The objects of one image.

    Args:
        areas: float64 (n,), in px.
        crowds: bool (n,): regions that are not counted.
        size: (height, width) of the image.
        outlines: of each object COCO's `segmentation`, unchecked; None where it has none.
        keypoints: of each object COCO's `keypoints`, likewise: x, y, and 0 where one is not labelled, of each.
    """

    areas: NDArray[np.float64]
    crowds: NDArray[np.bool_]
    size: Size = (0, 0)
    outlines: Sequence[Any] = ()
    keypoints: Sequence[Any] = ()


class ClassifiedImages:
    """Images whose class is the name of their folder.

    With the model's `labels` a class is numbered by its place there; without, `classes` are the folder names in
    alphabetical order. Iteration reads lazily and yields (image BGR uint8 (h, w, 3), class id).

    Args:
        only: The folders that count; empty: all.

    Raises DatasetError as ImageFiles, `dataset.label` for an image outside a class's folder, and `dataset.classes` for
    a class in `only` that the model or the data set lacks.
    """

    def __init__(self, path: Path, labels: Sequence[str] = (), only: Sequence[str] = ()) -> None:
        self._files = ImageFiles(path)
        folders = sorted({_folder(name) for name in self._files.names})
        self.classes = tuple(labels) or tuple(folders)
        _check_chosen(only, folders, self.classes)
        counted = only or folders
        unknown = [folder for folder in counted if self.classes.count(folder) != 1 or not folder]
        if unknown:
            raise DatasetError(
                "dataset.label",
                f"images in folder '{unknown[0]}' of {path}",
                f"folders named as one label of the model spec each ({_listed(labels)})"
                if labels
                else "one folder per class",
                "rename the folders, correct labels in the model spec, or name the classes to score with --classes",
            )
        self._names = [name for name in self._files.names if _folder(name) in counted]

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[tuple[Image, int]]:
        ids = {name: index for index, name in enumerate(self.classes)}
        for name in self._names:
            yield self._files.read(name), ids[_folder(name)]


def _folder(name: str) -> str:
    return PurePosixPath(name).parent.name


class YoloImages:
    """Images with YOLO label files: lines `class cx cy w h`, centre and size as fractions, or another `form`.

    The labels of `images/train/a.jpg` are `labels/train/a.txt`; those of `a.jpg` may also be `a.txt` or `labels/a.txt`
    beside it. An image without a label file shows no object, as Ultralytics reads it. A `classes.txt` names the
    classes, which are then matched by name to the model's `labels`.

    Iteration reads lazily and yields (image BGR uint8 (h, w, 3), LabelledObjects in its pixels).

    Args:
        only: The classes that count; empty: all.
        form: What a line has behind the class.

    Raises DatasetError as ImageFiles, `dataset.label` for a label that is malformed or out of range, and
    `dataset.classes` for a class in `only` that the model or the data set lacks.
    """

    def __init__(
        self, files: ImageFiles, labels: Sequence[str] = (), only: Sequence[str] = (), form: RowForm = BOX_ROW
    ) -> None:
        self._files, self._form = files, form
        present = frozenset(files.files)
        self._label_files = {
            name: next((file for file in _label_candidates(name) if file in present), None) for name in files.names
        }
        if not any(self._label_files.values()):
            raise DatasetError(
                "dataset.label",
                f"no label file for any of {len(files)} images in {files.path}",
                "YOLO label files, e.g. images/a.jpg and labels/a.txt, or COCO's instances as JSON",
                "add the labels, or evaluate a classifier on folders named as classes",
            )
        names = self._class_names() or labels
        if only and not names:
            found = f"--classes {','.join(only)} for classes without names in {files.path}"
            raise DatasetError("dataset.classes", found, "classes.txt, or labels in the model spec", "add one of them")
        _check_chosen(only, names, labels or names)
        self._class_ids = class_ids(names, labels, only, f"classes.txt of {files.path}") if names else None

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[tuple[Image, LabelledObjects]]:
        for name in self._files.names:
            image = self._files.read(name)
            yield image, self._truth(self._label_files[name], image.shape[1], image.shape[0])

    def _class_names(self) -> list[str]:
        if "classes.txt" not in self._files.files:
            return []
        lines = self._files.read_text("classes.txt").splitlines()
        return [line.strip() for line in lines if line.strip()]

    def _truth(self, label_file: str | None, width: int, height: int) -> LabelledObjects:
        lines = self._files.read_text(label_file).splitlines() if label_file else []
        rows = [self._parse(f"{label_file}:{i}", line) for i, line in enumerate(lines, 1) if line.strip()]
        counted = [row for row in rows if row is not None]
        corners = np.array([each.box for _, each in counted]).reshape(-1, 4)
        places = [each.places * (width, height, 1.0) for _, each in counted]
        return LabelledObjects(
            boxes=(corners * ((width, height) * 2)).astype(np.float32),
            classes=np.array([class_id for class_id, _ in counted], np.int64),
            areas=np.array([each.area for _, each in counted], np.float64) * (width * height),
            crowds=np.zeros(len(counted), np.bool_),
            size=(height, width),
            outlines=[[each[:, :2].ravel().tolist()] if len(each) else None for each in places],
            keypoints=[each.ravel().tolist() if len(each) else None for each in places],
        )

    def _parse(self, where: str, line: str) -> tuple[int, ObjectRow] | None:
        """Parse one label line to the model's class id and the object; None for a class that does not count."""
        try:
            dataset_id, *values = (float(field) for field in line.split())
        except ValueError:
            dataset_id, values = math.nan, []
        count = math.inf if self._class_ids is None else len(self._class_ids)
        is_class = dataset_id >= 0 and dataset_id.is_integer() and dataset_id < count
        found = self._form.read(values)
        if not is_class or found is None:
            raise DatasetError(
                "dataset.label",
                f"'{line.strip()[:_SHOWN]}' at {where} in {self._files.path}",
                f"class {self._form.words}: a class below {count:g} and {self._form.meaning}",
                "correct the label, or labels in the model spec",
            )
        class_id = int(dataset_id) if self._class_ids is None else self._class_ids[int(dataset_id)]
        return None if class_id is None else (class_id, found)


def _label_candidates(name: str) -> Iterator[str]:
    """Yield the names that the label file of an image may have."""
    image = PurePosixPath(name)
    for depth in range(len(image.parent.parts)):
        if image.parts[depth] == "images":
            swapped = (*image.parts[:depth], "labels", *image.parts[depth + 1 :])
            yield PurePosixPath(*swapped).with_suffix(".txt").as_posix()
    yield image.with_suffix(".txt").as_posix()
    yield (image.parent / "labels" / image.name).with_suffix(".txt").as_posix()


class CocoImages:
    """Images with COCO's instances: those that the JSON lists, with or without an object; others do not count.

    Classes are the categories, matched by name to the model's `labels`; without labels they are numbered in the order
    of their ids. A category that no object has may be unknown to the model.

    Iteration reads lazily and yields (image BGR uint8 (h, w, 3), LabelledObjects in its pixels).

    Args:
        only: The classes that count; empty: all.

    Raises DatasetError as ImageFiles and Instances, `dataset.label` for an image of another size than listed, and
    `dataset.classes` for a class in `only` that the model or the data set lacks.
    """

    def __init__(
        self, files: ImageFiles, instances: CocoObjects, labels: Sequence[str] = (), only: Sequence[str] = ()
    ) -> None:
        self._files, self._instances = files, instances
        used = set(instances.classes.tolist())
        names = [name if number in used else None for number, name in enumerate(instances.class_names)]
        _check_chosen(only, instances.class_names, labels or instances.class_names)
        ids = class_ids(names, labels, only, instances.where)
        self._class_ids = np.array([-1 if number is None else number for number in ids], np.int64)

    def __len__(self) -> int:
        return len(self._instances.images)

    def __iter__(self) -> Iterator[tuple[Image, LabelledObjects]]:
        instances = self._instances
        for image, rows in zip(instances.images, instances.rows, strict=True):
            pixels = self._files.read(image.file_name)
            height, width = pixels.shape[:2]
            if (width, height) != (image.width, image.height):
                raise DatasetError(
                    "dataset.label",
                    f"{image.file_name} in {self._files.path}, {width} x {height} pixels upright",
                    f"{image.width} x {image.height}, as {instances.where} lists it",
                    "correct the size in the JSON; if the picture is turned by its EXIF data, save it upright",
                )
            classes = self._class_ids[instances.classes[rows]]
            counted = rows[classes >= 0]
            yield (
                pixels,
                LabelledObjects(
                    boxes=instances.boxes[counted].astype(np.float32),
                    classes=classes[classes >= 0],
                    areas=instances.areas[counted],
                    crowds=instances.crowds[counted],
                    size=(height, width),
                    outlines=[instances.outlines[number] for number in counted],
                    keypoints=[instances.keypoints[number] for number in counted],
                ),
            )


def class_ids(names: Sequence[str | None], labels: Sequence[str], only: Sequence[str], where: str) -> list[int | None]:
    """Return the model's number of each class of a data set; None for one that does not count.

    Args:
        names: Of the data set's classes; None for one that does not count.
        labels: The model's; empty: the data set's numbers are the model's.
        only: The names that count; empty: all.
        where: The file of the names, for errors.

    Raises DatasetError: `dataset.label` for a name that counts and that the model lacks.
    """
    ids: list[int | None] = []
    for number, name in enumerate(names):
        if name is None or (only and name not in only):
            ids.append(None)
        elif not labels:
            ids.append(number)
        elif name in labels:
            ids.append(labels.index(name))
        else:
            raise DatasetError(
                "dataset.label",
                f"class '{name}' in {where}",
                f"the labels of the model spec ({_listed(labels)})",
                "rename it there or in the model spec, or name the classes that both know with --classes",
            )
    return ids


def _check_chosen(only: Sequence[str], names: Iterable[str], labels: Iterable[str]) -> None:
    """Raise DatasetError (`dataset.classes`) for a class in `only` that the data set or the model lacks."""
    known, of_model = set(names), set(labels)
    for chosen in only:
        if chosen not in known or chosen not in of_model:
            raise DatasetError(
                "dataset.classes",
                f"class '{chosen}' in --classes, which the {'data set' if chosen not in known else 'model spec'} lacks",
                f"classes that both know: {_listed(sorted(known & of_model)) or 'there are none'}",
                "correct --classes, or labels in the model spec",
            )


def _listed(names: Sequence[str]) -> str:
    return ", ".join([*names[:_LISTED], *(["..."] if len(names) > _LISTED else [])])


def object_images(
    path: Path, labels: Sequence[str] = (), only: Sequence[str] = (), form: RowForm = BOX_ROW
) -> YoloImages | CocoImages:
    """Open images with labelled objects.

    Args:
        path: A folder, a zip, or the JSON of a COCO data set beside its images.
        labels: The model's classes.
        only: The classes that count, by name; empty: all.
        form: What a line of a YOLO label file has behind the class.

    Raises DatasetError as far as that is known by now.
    """
    files = ImageFiles(image_root(path))
    instances = find_instances(files, path)
    return (
        CocoImages(files, instances, labels, only) if instances is not None else YoloImages(files, labels, only, form)
    )
