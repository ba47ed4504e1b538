"""Give drawn frames to labelling tools, and take labels back: COCO's JSON of objects, or a folder for each class.

Whatever is in a place uses COCO's JSON, which CVAT, Label Studio and FiftyOne read and write. COCO has no label for a
whole image, so classifiers use class folders: CVAT's `ImageNet`, FiftyOne's `ImageClassificationDirectoryTree`, or any
file manager. An image is matched by its file name, `00000012.jpg`; a tool may put it into folders and prefix the name.
Masks, key points and oriented boxes take minutes to draw: their frames leave with the float model's answer.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from agent.camera.images import ImageFiles
from agent.common.errors import AgentError
from agent.labelling.store import DrawnFrame, LabelStore
from agent.vision.datasets.coco import CocoObjects, read_instances
from agent.vision.labels import LabelError, LabelKind, Truth, class_name, parse_class
from agent.vision.spec import ModelSpec
from engines.store.files import staging

INSTANCES = "instances.json"
UNLABELLED = "unlabelled"  # the folder of frames that wait
_FILE_NAME = re.compile(r"(?:.*[-_ ])?(\d{8,18})\.jpe?g", re.I)


def export_frames(store: LabelStore, spec: ModelSpec, folder: Path, with_labelled: bool) -> dict[str, Any]:
    """Write frames that wait into a new folder, with_labelled: the labelled ones, too. Return what was written.

    `suggested`: how many have the float model's answer as a label to correct; only where labels are shapes.

    A frame whose picture is gone is left out. Raises AgentError: `labelling.exists` for a folder that is there,
    `labelling.name` for a class that cannot name a folder; EngineError (`artefact.write`) where the disk refuses.
    """
    folder, labels, kind = Path(os.path.abspath(folder)), spec.labels, store.kind.fitted(spec)
    if os.path.lexists(folder):
        raise AgentError("labelling.exists", f"{folder} is there already", "a new folder", "name another with --export")
    wanted = [each for each in store.frames() if each.is_waiting or (with_labelled and each.is_labelled)]
    if kind.form == "class":
        _check_names(labels)
    written: list[DrawnFrame] = []
    with staging(folder) as staged:
        staged.chmod(0o700)  # pictures: for their owner
        for name in (UNLABELLED, *labels) if kind.form == "class" else ():
            (staged / name).mkdir(exist_ok=True)
        for frame in wanted:
            with suppress(AgentError):  # its picture is gone
                place = staged / _place(frame, kind.form, labels)
                picture = store.picture(frame.id)
                place.parent.mkdir(exist_ok=True)
                place.write_bytes(picture)
                written.append(frame)
        if kind.form != "class":
            # Masks have thousands of numbers, each of which would have a line of its own.
            indent = 1 if kind.form == "boxes" else None
            text = json.dumps(_coco_document(written, labels, kind), indent=indent) + "\n"
            (staged / INSTANCES).write_text(text, "utf-8")
    suggested = {"suggested": sum(not each.is_labelled for each in written)} if kind.form == "shapes" else {}
    counts = {"images": len(written), "without_picture": len(wanted) - len(written), **suggested}
    return {"folder": str(folder), **counts}


def import_labels(store: LabelStore, spec: ModelSpec, path: Path) -> dict[str, int]:
    """Store the labels that a tool has written; all of them or none. Return the outcome, in frames.

    labelled: got their first label. replaced: got another one. unchanged: had the same. nothing: of all these, say
    that nothing is there. unknown: listed, and not drawn here.

    Args:
        path: COCO's JSON: each image that it lists counts as labelled, one without an object as "nothing there". Of a
            classifier a folder or a zip of class folders; those in `unlabelled` go on waiting.

    Raises AgentError: `labelling.import`, and as the store; LabelError as `LabelKind.read`; DatasetError for malformed
    files.
    """
    kind, drawn = store.kind.fitted(spec), {frame.id: frame for frame in store.frames()}
    truths, listed = (
        _read_folders(path, spec.labels) if kind.form == "class" else _read_coco(path, spec.labels, drawn, kind)
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
        if not drawn[number].is_labelled or not kind.is_same(drawn[number].label, truth)
    }
    store.label_all(changed, suggested=kind.form == "shapes")
    replaced = sum(drawn[number].is_labelled for number in changed)
    return {
        "labelled": len(changed) - replaced,
        "replaced": replaced,
        "unchanged": len(known) - len(changed),
        "nothing": sum(kind.is_nothing(truth) for truth in known.values()),
        "unknown": listed - len(known),
    }


def _read_coco(
    path: Path, labels: Sequence[str], drawn: Mapping[int, DrawnFrame], kind: LabelKind[Any, Any]
) -> tuple[Mapping[int, Truth], int]:
    """Return labels by the number in the file's name, and how many images are listed, also those of other names."""
    if path.is_dir() or path.suffix.lower() != ".json":
        raise _refusal(str(path), "the JSON of COCO's instances, for a model of objects", "give the path of that file")
    instances = read_instances(path)
    if not len(instances.boxes):
        raise _refusal(
            f"no {'box' if kind.form == 'boxes' else 'object'} in any of {len(instances.images)} images of {path}",
            "labels; frames leave the board without any, or the model found nothing in them",
            "draw the objects, and export from the tool; for frames where nothing is, `tared label` works too",
        )
    # CVAT writes every mask as a crowd: to COCO only crowds have runs in place of polygons.
    are_masks = [kind.form == "shapes" and isinstance(each, Mapping) for each in instances.outlines]
    if (instances.crowds & ~np.array(are_masks, np.bool_)).any():
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
    size = frame.height, frame.width
    objects = []
    try:
        for row in rows.tolist():
            box, outline, keypoints = (each[row] for each in (instances.boxes, instances.outlines, instances.keypoints))
            shape = kind.from_coco(box.tolist(), outline, keypoints, size)
            objects.append({"class": class_of[int(instances.classes[row])], **shape})
        return kind.read(objects, (), size)
    except LabelError as error:
        found = f"{image.file_name} in {instances.where}: {error.found}"
        raise LabelError(error.code, found, error.expected, error.remedy) from None


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
    if form != "class":
        return name
    return f"{class_name(frame.label, labels) if isinstance(frame.label, int) else UNLABELLED}/{name}"


def _check_names(labels: Sequence[str]) -> None:
    for label in labels:
        is_unfit = label in ("", UNLABELLED) or label.startswith(".") or "/" in label or "\0" in label
        if is_unfit or labels.count(label) > 1:
            expected = f"distinct names of folders, none of them {UNLABELLED}"
            remedy = "rename the class in the model spec, or label in the browser"
            raise AgentError("labelling.name", f"class '{label}'", expected, remedy)


def _coco_document(frames: Sequence[DrawnFrame], labels: Sequence[str], kind: LabelKind[Any, Any]) -> dict[str, Any]:
    annotations: list[dict[str, Any]] = []
    for frame in frames:
        for each in _objects(frame, kind):
            identity = {"id": len(annotations) + 1, "image_id": frame.id, "category_id": each["class"] + 1}
            annotations.append({**identity, **kind.to_coco(each), "iscrowd": 0})
    names = labels or _numbers_as_names(frames, [each["category_id"] - 1 for each in annotations])
    return {
        "info": {"description": "Frames that tared has drawn for labelling"},
        "licenses": [],
        "images": [
            {"id": each.id, "file_name": _place(each, "boxes", labels), "width": each.width, "height": each.height}
            for each in frames
        ],
        "annotations": annotations,
        "categories": [{"id": number + 1, "name": name, **kind.coco_category()} for number, name in enumerate(names)],
    }


def _objects(frame: DrawnFrame, kind: LabelKind[Any, Any]) -> list[dict[str, Any]]:
    """Return the objects of a frame's label; without one, of shapes, those of the model's answer that can be labels."""
    if frame.is_labelled:
        labelled: list[dict[str, Any]] = kind.document(frame.label)
        return labelled
    if kind.form != "shapes":
        return []
    size = frame.height, frame.width
    objects: list[dict[str, Any]] = []
    for each in kind.document(kind.from_answer(frame.reference, size)):
        with suppress(LabelError):  # a box without an area, or far outside
            objects += kind.document(kind.read([each], (), size))
    return objects


def _numbers_as_names(frames: Sequence[DrawnFrame], labelled: Sequence[int]) -> list[str]:
    """Return names of all classes up to the highest that an engine or a label has, where the spec has no names."""
    seen = frozenset[int]().union(*(each.classes_seen for frame in frames for each in (frame.served, frame.reference)))
    return [str(number) for number in range(max(seen | {*labelled}, default=0) + 1)]


def _refusal(found: str, expected: str, remedy: str) -> AgentError:
    return AgentError("labelling.import", found, expected, remedy)
