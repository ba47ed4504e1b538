"""The trained models of every task with labelled images, written as `tared evaluate` and `tared calibrate` read them.

`prepare` writes one model's MODEL.yaml, its labelled images and the images that calibrate it into a folder. They come
from ../shared/data (or $TARED_SHARED/data). No image both calibrates and is scored, but for PP-OCR's ten.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import yaml
from numpy.typing import NDArray

from agent.vision.registry import task_class
from agent.vision.tasks.pose import COCO_SIGMAS
from benchmarks.models import DATA, MODELS, UNIT

Image = NDArray[np.uint8]
Places = NDArray[np.float64]  # x y in the last axis

_COCO, _LABELS = "img_coco_train2017_first128_labelled.zip", "lbl_coco_train2017_first128_seg_kpt.zip"
_CAMVID, _FACES = "img_camvid_dev_59_labelled.zip", "img_faces_dlib_9_labelled.zip"
_SHAPES, _TEXT = "img_shapes_dev_100_labelled.zip", "img_icdar15_mmocr_10_labelled.zip"
_CIFAR_TRAIN, _CIFAR_TEST = "img_cifar10_train_calib_500.zip", "img_cifar10_test_A_3000.zip"
_FACE_CLIP = "vid_face_asl_walk_640x480.mkv"
_EACH = 4  # every fourth image with labels calibrates, the others are scored
_PERSON = 1  # COCO's number in the masks
_PERSON_SHARE, _LEAST_SHARE = 0.05, 0.01  # shares of a photo from which on it is scored, or calibrates
_NOT_COUNTED = 255
_CROP, _LEAST_PX, _LEAST_POINTS = 1.25, 100.0, 8
_CIFAR_EACH = 100  # images of each class that are scored

# Which of COCO's 17 key points a model's point is.
_CPM = {2: 6, 3: 8, 4: 10, 5: 5, 6: 7, 7: 9, 8: 12, 9: 14, 10: 16, 11: 11, 12: 13, 13: 15}
_BLAZEPOSE = dict(zip((0, 2, 5, 7, 8, *range(11, 17), *range(23, 29)), range(17), strict=True))
_CAMVID_CLASSES = (
    "sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist",
)  # fmt: skip
_OTHER_SIGMA = 0.05


@dataclass(frozen=True)
class TaskModel:
    """A model that is ready to be calibrated and scored.

    Args:
        spec: Its MODEL.yaml.
        calibrate: A source of frames.
        dataset: Labelled images.
        score: The name of the score that counts; empty: the task's own.
    """

    name: str
    spec: Path
    calibrate: Path
    dataset: Path
    score: str = ""


@dataclass(frozen=True)
class _Recipe:
    """How one is made. write: fills a folder with `calibrate` and `dataset`, and returns both."""

    spec: Mapping[str, Any]
    write: Callable[[Path], tuple[Path, Path]]
    score: str = ""


def prepare(name: str, folder: Path) -> TaskModel:
    """Write a model's spec and images into a folder.

    Raises LookupError for a model whose decoder this tared has not.
    """
    recipe = RECIPES[name]
    decoder, task = recipe.spec.get("decoder"), recipe.spec["task"]
    if decoder is not None and decoder not in task_class(task).decoders:
        raise LookupError(f"task {task} has no decoder '{decoder}'")
    spec = folder / f"{name}.yaml"
    spec.write_text(yaml.safe_dump({**recipe.spec, "path": str(DATA / recipe.spec["path"])}))
    calibrate, dataset = recipe.write(folder)
    return TaskModel(name, spec, calibrate, dataset, recipe.score)


def _extracted(archive: str, folder: Path, wanted: Callable[[str], bool] = lambda _: True) -> Path:
    with zipfile.ZipFile(DATA / archive) as files:
        files.extractall(folder, [name for name in files.namelist() if wanted(name)])
    return folder


def _cifar(folder: Path) -> tuple[Path, Path]:
    seen: dict[str, int] = {}

    def is_wanted(name: str) -> bool:
        kind = name.split("/")[0]
        seen[kind] = seen.get(kind, 0) + 1
        return seen[kind] <= _CIFAR_EACH

    return DATA / _CIFAR_TRAIN, _extracted(_CIFAR_TEST, folder / "cifar", is_wanted)


def _boxes(archive: str) -> Callable[[Path], tuple[Path, Path]]:
    """Return what splits images with their boxes."""

    def write(folder: Path) -> tuple[Path, Path]:
        scored, calibrate = _extracted(archive, folder / "boxes"), folder / "calibrate"
        calibrate.mkdir()
        for photo in sorted((scored / "images").iterdir())[::_EACH]:
            photo.rename(calibrate / photo.name)
            (scored / "labels" / f"{photo.stem}.txt").unlink()
        return calibrate, scored

    return write


def _faces(folder: Path) -> tuple[Path, Path]:
    """Write dlib's boxes of faces as YOLO's."""
    root = _extracted(_FACES, folder / "faces")
    for document in ("training.xml", "testing.xml"):
        for image in ElementTree.parse(root / document).getroot().iter("image"):
            height, width = _read(root / image.attrib["file"]).shape[:2]
            rows = []
            for box in image.iter("box"):
                left, top, wide, high = (float(box.attrib[key]) for key in ("left", "top", "width", "height"))
                rows.append(
                    _row(0, ((left + wide / 2) / width, (top + high / 2) / height, wide / width, high / height))
                )
            (root / image.attrib["file"]).with_suffix(".txt").write_text("\n".join(rows))
    return DATA / _FACE_CLIP, root


def _camvid(folder: Path) -> tuple[Path, Path]:
    root = _extracted(_CAMVID, folder / "camvid")
    (root / "calib").rename(folder / "calibrate")
    return folder / "calibrate", root


def _persons_masks(folder: Path) -> tuple[Path, Path]:
    """Write masks of the class person, 0, beside the photos that show enough of one; those with less of one calibrate.

    So does every fourth of the others: on photos without a person this model's masks are chance.
    A pixel of another class is 1, and one that nobody labelled does not count.
    """
    photos = _extracted(_COCO, folder / "photos") / "images"
    masks = _extracted(_LABELS, folder / "coco", lambda name: name.startswith("semantic/")) / "semantic"
    dataset, calibrate = folder / "persons", folder / "calibrate"
    for place in (dataset / "images", dataset / "masks", calibrate):
        place.mkdir(parents=True)
    enough = 0
    for photo in sorted(photos.iterdir()):
        mask = masks / f"{photo.stem}.png"
        numbers = cv2.imread(str(mask), cv2.IMREAD_UNCHANGED) if mask.exists() else np.zeros((1, 1), np.uint8)
        share = float(np.mean(numbers == _PERSON))
        enough += share >= _PERSON_SHARE
        if share < _PERSON_SHARE or enough % _EACH == 0:
            if share >= _LEAST_SHARE:
                photo.rename(calibrate / photo.name)
            continue
        photo.rename(dataset / "images" / photo.name)
        levels = np.where(numbers == 0, _NOT_COUNTED, np.where(numbers == _PERSON, 0, 1)).astype(np.uint8)
        cv2.imwrite(str(dataset / "masks" / mask.name), levels)
    return calibrate, dataset


def _persons(points: Mapping[int, int], count: int) -> Callable[[Path], tuple[Path, Path]]:
    """Return what writes crops of one person each, with a model's key points; those of every fourth photo calibrate."""

    def write(folder: Path) -> tuple[Path, Path]:
        root = _extracted(_COCO, folder / "coco")
        labels = _extracted(_LABELS, folder / "coco", lambda name: name.startswith("keypoints/")) / "keypoints"
        dataset, calibrate = folder / "persons", folder / "calibrate"
        for place in (dataset / "images", dataset / "labels", calibrate):
            place.mkdir(parents=True)
        for turn, file in enumerate(sorted(labels.iterdir())):
            image, calibrates = _read(root / "images" / f"{file.stem}.jpg"), turn % _EACH == 0
            for number, row in enumerate(_rows(file)):
                known, name = row[5:].reshape(17, 3), f"{file.stem}-{number}.png"
                is_labelled = (known[:, 2] > 0).sum() >= _LEAST_POINTS
                if row[4] * image.shape[0] < _LEAST_PX or not (calibrates or is_labelled):
                    continue
                cropped, moved = _crop(image, row[1:5])
                cv2.imwrite(str((calibrate if calibrates else dataset / "images") / name), cropped)
                places = np.zeros((count, 3))
                for point, ours in points.items():
                    if known[ours, 2] > 0:
                        places[point] = (*moved(known[ours, :2]), 2)
                corner, end = moved(row[1:3] - row[3:5] / 2), moved(row[1:3] + row[3:5] / 2)
                text = _row(0, (*(corner + end) / 2, *(end - corner), *places.ravel()))
                if not calibrates:
                    (dataset / "labels" / name).with_suffix(".txt").write_text(text)
        return calibrate, dataset

    return write


def _crop(image: Image, box: NDArray[np.float64]) -> tuple[Image, Callable[[Places], Places]]:
    """Return the square around a box, with zeros beyond the photo, and the map of fractions of the photo to its own.

    box: cx cy w h in fractions of the photo.
    """
    size = np.array((image.shape[1], image.shape[0]), np.float64)
    side = max(2, round(_CROP * float((box[2:] * size).max())))
    corner = np.round(box[:2] * size - side / 2).astype(int)
    padded = np.asarray(cv2.copyMakeBorder(image, side, side, side, side, cv2.BORDER_CONSTANT), np.uint8)
    left, top = corner + side
    square = np.ascontiguousarray(padded[top : top + side, left : left + side])

    def moved(place: Places) -> Places:
        inside: Places = (place * size - corner) / side
        return inside

    return square, moved


def _text(folder: Path) -> tuple[Path, Path]:
    """Write ICDAR's polygons as COCO's; those that do not count are crowds."""
    root = _extracted(_TEXT, folder / "text")
    images, annotations = list[dict[str, Any]](), list[dict[str, Any]]()
    source = next(root.rglob("textdet_test.json"))
    for number, image in enumerate(json.loads(source.read_text())["data_list"], start=1):
        file = next(root.rglob(Path(image["img_path"]).name))
        height, width = _read(file).shape[:2]
        images.append({"id": number, "file_name": file.name, "width": width, "height": height})
        for each in image["instances"]:
            x1, y1, x2, y2 = each["bbox"]
            common = {"id": len(annotations) + 1, "image_id": number, "category_id": 1, "iscrowd": int(each["ignore"])}
            shape = {"segmentation": [each["polygon"]], "area": _area(each["polygon"])}
            annotations.append({**common, "bbox": [x1, y1, x2 - x1, y2 - y1], **shape})
    source.unlink()
    document = {"images": images, "categories": [{"id": 1, "name": "text"}], "annotations": annotations}
    (root / "instances.json").write_text(json.dumps(document))
    return root, root


def _area(polygon: Sequence[float]) -> float:
    x, y = np.array(polygon, np.float64).reshape(-1, 2).T
    return abs(float((x * np.roll(y, -1) - np.roll(x, -1) * y).sum())) / 2.0


def _read(path: Path) -> Image:
    image = cv2.imread(str(path))
    assert image is not None, path
    return np.asarray(image, np.uint8)


def _rows(file: Path) -> Iterator[NDArray[np.float64]]:
    for line in file.read_text().splitlines():
        yield np.array(line.split(), np.float64)


def _row(class_id: int, values: Iterable[float]) -> str:
    return " ".join((str(class_id), *(f"{value:.6f}" for value in values)))


def _sigmas(points: Mapping[int, int], count: int) -> list[float]:
    return [COCO_SIGMAS[points[each]] if each in points else _OTHER_SIGMA for each in range(count)]


_RGB = {"color": "rgb", "resize": "stretch", "scale": UNIT}

RECIPES: Mapping[str, _Recipe] = {
    "resnet20": _Recipe(MODELS["resnet20"][0], _cifar),
    "fastestdet": _Recipe(MODELS["fastestdet"][0], _boxes(_COCO)),
    "yolox_nano": _Recipe(MODELS["yolox_nano"][0], _boxes(_COCO)),
    # Tight squares around faces are no boxes of this model's kind: only the looser overlap says something.
    "ultraface": _Recipe(MODELS["ultraface"][0], _faces, "map50"),
    "rtdetr": _Recipe(
        {
            "path": "det_rtdetr_micro_shapes_96_fp32.onnx",
            "task": "detect",
            "decoder": "rtdetr",
            "labels": ["circle", "square", "triangle"],
            "score_threshold": 0.5,
            "input": _RGB,
        },
        _boxes(_SHAPES),
    ),
    "espnet": _Recipe(
        {
            "path": "seg_espnet_camvid_360x480_fp32.onnx",
            "task": "segment",
            "labels": list(_CAMVID_CLASSES),
            "input": {
                "resize": "stretch",
                "mean": [0.433702, 0.425918, 0.413208],
                "std": [72.127, 72.804, 69.985],
                "scale": UNIT,
            },
        },
        _camvid,
    ),
    "selfie": _Recipe(
        {
            "path": "seg_selfie_mediapipe_256_fp32.onnx",
            "task": "segment",
            "labels": ["person"],
            "score_threshold": 0.5,
            "input": _RGB,
        },
        _persons_masks,
    ),
    "cpm": _Recipe(
        {
            "path": "pose_cpm_192_aic14_fp32.onnx",
            "task": "pose",
            "decoder": "heatmaps",
            "keypoints": 14,
            "score_threshold": 0.1,  # its maps peak at some 0.3
            "sigmas": _sigmas(_CPM, 14),
            "input": {"resize": "stretch"},
        },
        _persons(_CPM, 14),
    ),
    "blazepose": _Recipe(
        {
            "path": "pose_blazepose_lite_256_fp32.onnx",
            "task": "pose",
            "decoder": "landmarks",
            "keypoints": 39,
            "score_threshold": 0.1,
            "sigmas": _sigmas(_BLAZEPOSE, 39),
            "input": _RGB,
        },
        _persons(_BLAZEPOSE, 39),
    ),
    "ppocr": _Recipe(
        {
            "path": "text_ppocrv3_det_dynamic_fp32.onnx",
            "task": "obb",
            "decoder": "dbnet",
            "labels": ["text"],
            "score_threshold": 0.5,
            "input": {
                "resize": "stretch",
                "scale": UNIT,
                "mean": [0.485, 0.456, 0.406],
                "std": [0.229, 0.224, 0.225],
            },
            "profiles": [{"x": {key: [1, 3, 544, 960] for key in ("min", "opt", "max")}}],
        },
        _text,
    ),
}
