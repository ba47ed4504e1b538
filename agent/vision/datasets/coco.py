"""Read COCO's instances: a JSON of images, annotations and categories beside the image files.

MMOCR's JSON of text is read likewise (`agent.vision.datasets.mmocr`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from agent.camera.images import ImageFiles
from agent.common.errors import DatasetError
from agent.vision.datasets.mmocr import coco_document
from engines.store.files import read_text

_MOST_BYTES = 64 << 20  # COCO's own validation set has 20 MB
_MOST_SIDE_PX = 1 << 16
_MOST_DEGREES = 3600.0
_SLACK_PX = 1.0  # beyond the picture: annotations are rounded

Text = Annotated[str, Field(min_length=1, max_length=1024)]
Side = Annotated[int, Field(gt=0, le=_MOST_SIDE_PX)]


class _Part(BaseModel):
    """Values have JSON's own types and are finite; keys that nobody here reads are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False)


class ListedImage(_Part):
    id: int
    file_name: Text
    width: Side
    height: Side


class _Annotation(_Part):
    id: int | None = None
    image_id: int
    category_id: int
    bbox: Annotated[list[float], Field(min_length=4, max_length=4)]
    area: Annotated[float, Field(ge=0.0)] | None = None
    iscrowd: Literal[0, 1] = 0
    segmentation: Any = None  # these two are checked by whoever reads them
    keypoints: Any = None
    attributes: Any = None

    @property
    def rotation(self) -> float:
        """The angle by which the box is turned clockwise about its middle, in degrees, as CVAT writes it."""
        angle = self.attributes.get("rotation") if isinstance(self.attributes, dict) else None
        return float(angle) if isinstance(angle, int | float) and abs(angle) <= _MOST_DEGREES else 0.0

    @property
    def outline(self) -> Any:
        """The segmentation, or else the four corners of a turned box; None where it has neither."""
        return self.segmentation if self.segmentation or not self.rotation else [self.corners.ravel().tolist()]

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """x1 y1 x2 y2 of the box, or around it where it is turned."""
        left, top, width, height = self.bbox
        if not self.rotation:
            return left, top, left + width, top + height
        (x1, y1), (x2, y2) = self.corners.min(axis=0).tolist(), self.corners.max(axis=0).tolist()
        return x1, y1, x2, y2

    @property
    def corners(self) -> NDArray[np.float64]:
        """The four corners of the box, turned, (4, 2)."""
        left, top, width, height = self.bbox
        angle = np.deg2rad(self.rotation)
        cos, sin = np.cos(angle), np.sin(angle)
        x, y = np.array([-1, 1, 1, -1]) * width / 2.0, np.array([-1, -1, 1, 1]) * height / 2.0
        middle_x, middle_y = left + width / 2.0, top + height / 2.0
        turned = np.stack((middle_x + x * cos - y * sin, middle_y + x * sin + y * cos), axis=1)
        corners: NDArray[np.float64] = turned.round(3)
        return corners


class _Category(_Part):
    id: int
    name: Text


class _Document(_Part):
    """One wrong entry ends the reading of its list, so that a bad file does not make a million errors."""

    images: Annotated[list[ListedImage], FailFast()]
    annotations: Annotated[list[_Annotation], FailFast()]
    categories: Annotated[list[_Category], FailFast()]


@dataclass(frozen=True, eq=False)
class CocoObjects:
    """Hold the n objects of a COCO document.

    Args:
        where: Name of the document, for errors.
        class_names: In the order of the categories' ids.
        images: In the document's order; `file_name` is the image's file among those that are there.
        rows: For each image, the indices of its objects.
        boxes: float64 (n, 4), x1 y1 x2 y2 in pixels; around a turned box, which may lie beyond the picture.
        classes: int64 (n,), indices of class_names.
        areas: float64 (n,), of the object's outline in px, or of its box.
        crowds: bool (n,).
        outlines: `segmentation` of each object as it is in the document, or the corners of a turned box; None where it
            has neither.
        keypoints: `keypoints` of each object, likewise.
    """

    where: str
    class_names: Sequence[str]
    images: Sequence[ListedImage]
    rows: Sequence[NDArray[np.int64]]
    boxes: NDArray[np.float64]
    classes: NDArray[np.int64]
    areas: NDArray[np.float64]
    crowds: NDArray[np.bool_]
    outlines: Sequence[Any]
    keypoints: Sequence[Any]


def image_root(path: Path) -> Path:
    """Return where the images of a data set are: above a JSON's `annotations`, beside another JSON, else `path`."""
    if path.suffix.lower() != ".json" or not path.is_file():
        return path
    return path.absolute().parent.parent if path.absolute().parent.name == "annotations" else path.absolute().parent


def find_instances(files: ImageFiles, path: Path) -> CocoObjects | None:
    """Return the instances among the files of a data set; None if no JSON there holds any.

    A file named `instances*.json` goes before others in the top folder, in `annotations/` or beside images.

    Args:
        path: As the user gives it: a JSON is read whatever its name.

    Raises DatasetError: `dataset.coco` for several files that could be meant, or one that is malformed.
    """
    if files.path != path:
        return _read(files, path.absolute().relative_to(files.path).as_posix(), is_certain=True)
    folders = {PurePosixPath(), *(PurePosixPath(name).parent for name in files.names)}
    folder_of = {name: PurePosixPath(name).parent for name in files.files if name.lower().endswith(".json")}
    found = [name for name, folder in folder_of.items() if folder in folders or folder.name == "annotations"]
    named = [name for name in found if PurePosixPath(name).name.startswith("instances")]
    documents = [each for name in named or found if (each := _read(files, name, is_certain=bool(named))) is not None]
    if len(documents) > 1:
        raise DatasetError(
            "dataset.coco",
            f"{len(documents)} files of COCO instances: {', '.join(each.where for each in documents)}",
            "one",
            "give the path of that one with --dataset; unpack a zip first",
        )
    return documents[0] if documents else None


def read_instances(path: Path) -> CocoObjects:
    """Return the instances of a JSON whose images need not be there: their files are as the JSON names them.

    Raises DatasetError (`dataset.coco`).
    """
    try:
        text = read_text(path, _MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise _malformed(f"{path}: {reason}", "a readable JSON file") from None
    document = _parse(text, str(path), is_certain=True)
    assert document is not None  # else it would have been refused
    return _assembled(document, str(path), lambda file_name: file_name)


def _read(files: ImageFiles, name: str, *, is_certain: bool) -> CocoObjects | None:
    """Return the instances in a JSON; None if it is something else. is_certain: then that is an error."""
    where = f"{name} in {files.path}"
    document = _parse(files.read_text(name, _MOST_BYTES), where, is_certain)
    return _assembled(document, where, _image_finder(files, name)) if document is not None else None


def _parse(text: str, where: str, is_certain: bool) -> _Document | None:
    try:
        return _Document.model_validate_json(text)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        if any(len(detail["loc"]) < 2 for detail in details):  # not JSON, or not with these three lists
            with suppress(ValidationError):
                return _Document.model_validate(coco_document(text))
            if not is_certain:
                return None
        place = ".".join(map(str, details[0]["loc"]))
        raise _malformed(f"{place or 'the JSON'} in {where}: {details[0]['msg']}") from None


def _malformed(found: str, expected: str = "COCO's instances: images, annotations, categories") -> DatasetError:
    return DatasetError("dataset.coco", found, expected, "correct the JSON, or export the labels again")


def _assembled(document: _Document, where: str, find: Callable[[str], str]) -> CocoObjects:
    """Check a document against itself, and turn it into arrays.

    Args:
        where: Name of the document, for errors.
        find: Returns the file of an image by the name that is listed.

    Raises DatasetError (`dataset.coco`) for a document that contradicts itself.
    """
    for kind, values in (
        ("image id", [image.id for image in document.images]),
        ("category id", [category.id for category in document.categories]),
        ("category name", [category.name for category in document.categories]),
    ):
        value, count = max(Counter(values).items(), key=lambda item: item[1], default=(None, 0))
        if count > 1:
            raise _malformed(f"{kind} {value} {count} times in {where}")
    if not document.images:
        raise _malformed(f"no image in {where}")
    annotations, categories = document.annotations, sorted(document.categories, key=lambda category: category.id)
    class_of = {category.id: number for number, category in enumerate(categories)}
    place_of = {image.id: number for number, image in enumerate(document.images)}
    rows: list[list[int]] = [[] for _ in document.images]
    for number, each in enumerate(annotations):
        identity = number if each.id is None else each.id
        if each.image_id not in place_of or each.category_id not in class_of:
            missing = "image" if each.image_id not in place_of else "category"
            wrong = each.image_id if missing == "image" else each.category_id
            raise _malformed(f"annotation {identity} of {missing} {wrong}, which {where} does not list")
        if not each.rotation:  # one that is turned may begin beyond the picture
            _check_box(each.bbox, document.images[place_of[each.image_id]], identity, where)
        rows[place_of[each.image_id]].append(number)
    areas = [each.bbox[2] * each.bbox[3] if each.area is None else each.area for each in annotations]
    return CocoObjects(
        where=where,
        class_names=[category.name for category in categories],
        images=[image.model_copy(update={"file_name": find(image.file_name)}) for image in document.images],
        rows=[np.array(each, np.int64) for each in rows],
        boxes=np.array([each.bounds for each in annotations], np.float64).reshape(-1, 4),
        classes=np.array([class_of[each.category_id] for each in annotations], np.int64),
        areas=np.array(areas, np.float64),
        crowds=np.array([each.iscrowd for each in annotations], np.bool_),
        outlines=[each.outline for each in annotations],
        keypoints=[each.keypoints for each in annotations],
    )


def _check_box(box: Sequence[float], image: ListedImage, identity: int, where: str) -> None:
    """Refuse a box of the annotation `identity` in the document `where` that is not inside its image."""
    left, top, width, height = box
    starts_inside = left >= -_SLACK_PX and top >= -_SLACK_PX
    ends_inside = left + width <= image.width + _SLACK_PX and top + height <= image.height + _SLACK_PX
    if not (starts_inside and ends_inside and width >= 0.0 and height >= 0.0):
        raise _malformed(
            f"box [{', '.join(f'{value:g}' for value in box)}] of annotation {identity} in {where}",
            f"x, y, width, height inside {image.file_name}, {image.width} x {image.height} pixels",
        )


def _image_finder(files: ImageFiles, name: str) -> Callable[[str], str]:
    """Return what finds the image files of a data set by the names in its JSON, which has this name among its files."""
    by_name = defaultdict[str, list[str]](list)
    for image in files.names:
        by_name[PurePosixPath(image).name].append(image)

    def find(file_name: str) -> str:
        """Return the image file that the JSON means: beside it, in the top folder, or the only one of that name."""
        listed = PurePosixPath(file_name.replace("\\", "/"))
        candidates = by_name.get(listed.name, [])
        for exact in ((PurePosixPath(name).parent / listed).as_posix(), listed.as_posix()):
            if exact in candidates:
                return exact
        matches = [image for image in candidates if f"/{image}".endswith(f"/{listed.as_posix()}")]
        if len(matches) != 1:
            found = f"{len(matches) or 'no'} image files for {file_name} of {name} in {files.path}"
            remedy = "add the image, or take it out of the JSON" if not matches else "give the folder of one of them"
            raise DatasetError("dataset.coco", found, "one file for each image", remedy)
        return matches[0]

    return find
