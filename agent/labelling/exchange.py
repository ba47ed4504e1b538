"""Give drawn frames to labelling tools, and take labels back: COCO's JSON of boxes, or a folder for each class.

Detectors use COCO's instances, which CVAT, Label Studio and FiftyOne read and write. COCO has no label for a whole
image, so classifiers use class folders: CVAT's `ImageNet`, FiftyOne's `ImageClassificationDirectoryTree`, or any file
manager. An image is matched by its file name, `00000012.jpg`; a tool may put it into folders and prefix the name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from agent.camera.images import ImageFiles
from agent.common.errors import AgentError
from agent.labelling.store import DrawnFrame, LabelStore
from agent.vision.boxes import LabelledBoxes
from agent.vision.datasets.coco import CocoObjects, read_instances
from agent.vision.labels import LabelKind, Truth, class_name, parse_class
from engines.store.files import staging

INSTANCES = "instances.json"
UNLABELLED = "unlabelled"  # the folder of frames that wait
_FILE_NAME = re.compile(r"(?:.*[-_ ])?(\d{8,18})\.jpe?g", re.I)


def export_frames(store: LabelStore, labels: Sequence[str], folder: Path, with_labelled: bool) -> dict[str, Any]:
    """Write frames that wait into a new folder, with_labelled: the labelled ones, too. Return what was written.

    A frame whose picture is gone is left out. Raises AgentError: `labelling.exists` for a folder that is there,
    `labelling.name` for a class that cannot name a folder; EngineError (`artefact.write`) where the disk refuses.
    """
    folder = Path(os.path.abspath(folder))
    if os.path.lexists(folder):
        raise AgentError("labelling.exists", f"{folder} is there already", "a new folder", "name another with --export")
    wanted = [each for each in store.frames() if each.is_waiting or (with_labelled and each.label is not None)]
    if store.kind.form == "class":
        _check_names(labels)
    written: list[DrawnFrame] = []
    with staging(folder) as staged:
        staged.chmod(0o700)  # pictures: for their owner
        for name in (UNLABELLED, *labels) if store.kind.form == "class" else ():
            (staged / name).mkdir(exist_ok=True)
        for frame in wanted:
            with suppress(AgentError):  # its picture is gone
                place = staged / _place(frame, store.kind.form, labels)
                picture = store.picture(frame.id)
                place.parent.mkdir(exist_ok=True)
                place.write_bytes(picture)
                written.append(frame)
        if store.kind.form == "boxes":
            (staged / INSTANCES).write_text(json.dumps(_coco_document(written, labels), indent=1) + "\n", "utf-8")
    return {"folder": str(folder), "images": len(written), "without_picture": len(wanted) - len(written)}


def import_labels(store: LabelStore, labels: Sequence[str], path: Path) -> dict[str, int]:
    """Store the labels that a tool has written; all of them or none. Return the outcome, in frames.

    labelled: got their first label. replaced: got another one. unchanged: had the same. nothing: of all these, say
    that nothing is there. unknown: listed, and not drawn here.

    Args:
        path: Of a detector COCO's JSON: each image that it lists counts as labelled, one without a box as "nothing
            there". Of a classifier a folder or a zip of class folders; those in `unlabelled` go on waiting.

    Raises AgentError: `labelling.import`, and as the store; LabelError as `LabelKind.read`; DatasetError for malformed
    files.
    """
    drawn = {frame.id: frame for frame in store.frames()}
    truths, listed = (
        _read_folders(path, labels) if store.kind.form == "class" else _read_coco(path, labels, drawn, store.kind)
    )
    known = {number: truth for number, truth in truths.items() if number in drawn}
    if not known:
        raise _refusal(
            f"{path}, with labels of {listed} images, none of them drawn here",
            "image names as in the export, such as 00000012.jpg",
            "import labels of an export of this board, for this model",
        )
    changed = {
        number: truth
        for number, truth in known.items()
        if drawn[number].label is None or not store.kind.is_same(drawn[number].label, truth)
    }
    store.label_all(changed)
    replaced = sum(drawn[number].label is not None for number in changed)
    return {
        "labelled": len(changed) - replaced,
        "replaced": replaced,
        "unchanged": len(known) - len(changed),
        "nothing": sum(store.kind.is_nothing(truth) for truth in known.values()),
        "unknown": listed - len(known),
    }


def _read_coco(
    path: Path, labels: Sequence[str], drawn: Mapping[int, DrawnFrame], kind: LabelKind[Any, Any]
) -> tuple[Mapping[int, Truth], int]:
    """Return labels by the number in the file's name, and how many images are listed, also those of other names."""
    if path.is_dir() or path.suffix.lower() != ".json":
        raise _refusal(str(path), "the JSON of COCO's instances, for a detector", "give the path of that file")
    instances = read_instances(path)
    if not len(instances.boxes):
        raise _refusal(
            f"no box in any of {len(instances.images)} images of {path}",
            "labels; frames leave the board without any",
            "draw the boxes, and export from the tool; for frames where nothing is, `tared label` works too",
        )
    crowds = instances.crowds.nonzero()[0]
    if len(crowds):
        raise _refusal(f"a crowd (iscrowd) in {path}", "a box for each object", "draw boxes, or skip such frames")
    class_of = {
        number: parse_class(instances.class_names[number], labels) for number in set(instances.classes.tolist())
    }
    truths: dict[int, Truth] = {}
    for number, at in _places((image.file_name for image in instances.images), path).items():
        if number in drawn:
            truths[number] = _boxes(instances, at, class_of, drawn[number], kind)
    return truths, len(instances.images)


def _boxes(
    instances: CocoObjects, at: int, class_of: Mapping[int, int], frame: DrawnFrame, kind: LabelKind[Any, Any]
) -> Truth:
    image, rows = instances.images[at], instances.rows[at]
    if (image.width, image.height) != (frame.width, frame.height):
        raise _refusal(
            f"{image.file_name} of {image.width} x {image.height} pixels in {instances.where}",
            f"{frame.width} x {frame.height}, as the board drew the frame",
            "label pictures of this board, in their own size",
        )
    boxes = zip(instances.classes[rows].tolist(), instances.boxes[rows].tolist(), strict=True)
    return kind.read(
        [{"class": class_of[number], "box": box} for number, box in boxes], (), (frame.height, frame.width)
    )


def _read_folders(path: Path, labels: Sequence[str]) -> tuple[Mapping[int, Truth], int]:
    """Return the same as `_read_coco`, of class folders."""
    if path.suffix.lower() == ".json":
        raise _refusal(str(path), "a folder or a zip of class folders, for a classifier", "give the path of the folder")
    names = [name for name in ImageFiles(path).names if PurePosixPath(name).parent.name != UNLABELLED]
    folders = {number: PurePosixPath(names[at]).parent.name for number, at in _places(names, path).items()}
    return {number: parse_class(folder, labels) for number, folder in folders.items()}, len(names)


def _places(names: Iterable[str], path: Path) -> dict[int, int]:
    """Return the place in the list, by the frame's number, of each image that is named as an export names it."""
    places: dict[int, int] = {}
    for at, name in enumerate(names):
        matched = _FILE_NAME.fullmatch(PurePosixPath(name.replace("\\", "/")).name)
        if matched is None:
            continue
        number = int(matched[1])
        if number in places:
            raise _refusal(f"{name}, twice in {path}", "each image once", "remove one of the two")
        places[number] = at
    return places


def _place(frame: DrawnFrame, form: str, labels: Sequence[str]) -> str:
    """Return where the picture of a frame lies in an export."""
    name = f"{frame.id:08d}.jpg"
    if form == "boxes":
        return name
    return f"{class_name(frame.label, labels) if isinstance(frame.label, int) else UNLABELLED}/{name}"


def _check_names(labels: Sequence[str]) -> None:
    for label in labels:
        is_unfit = label in ("", UNLABELLED) or label.startswith(".") or "/" in label or "\0" in label
        if is_unfit or labels.count(label) > 1:
            expected = f"distinct names of folders, none of them {UNLABELLED}"
            remedy = "rename the class in the model spec, or label in the browser"
            raise AgentError("labelling.name", f"class '{label}'", expected, remedy)


def _coco_document(frames: Sequence[DrawnFrame], labels: Sequence[str]) -> dict[str, Any]:
    truths = [(frame.id, frame.label) for frame in frames if isinstance(frame.label, LabelledBoxes)]
    annotations: list[dict[str, Any]] = []
    for identity, truth in truths:
        for number, (left, top, right, bottom) in zip(
            truth.classes.tolist(), truth.boxes.astype(float).round(2).tolist(), strict=True
        ):
            width, height = round(right - left, 2), round(bottom - top, 2)
            annotations.append({
                "id": len(annotations) + 1, "image_id": identity, "category_id": number + 1,
                "bbox": [left, top, width, height], "area": round(width * height, 2), "iscrowd": 0,
            })  # fmt: skip
    return {
        "info": {"description": "Frames that tared has drawn for labelling"},
        "licenses": [],
        "images": [
            {"id": each.id, "file_name": _place(each, "boxes", labels), "width": each.width, "height": each.height}
            for each in frames
        ],
        "annotations": annotations,
        "categories": [
            {"id": number + 1, "name": name} for number, name in enumerate(labels or _numbers_as_names(frames))
        ],
    }


def _numbers_as_names(frames: Sequence[DrawnFrame]) -> list[str]:
    """Return names of all classes up to the highest that an engine or a label has, where the spec has no names."""
    answers = [answer for frame in frames for answer in (frame.served, frame.reference, frame.label)]
    numbers = [each.classes.max() for each in answers if isinstance(each, LabelledBoxes) and len(each)]
    return [str(number) for number in range(int(max(numbers, default=0)) + 1)]


def _refusal(found: str, expected: str, remedy: str) -> AgentError:
    return AgentError("labelling.import", found, expected, remedy)
