"""Does `tared check` find what is wrong with a spec, and leave alone what is right? Real models, planted mistakes.

    python -m benchmarks.spec_check [--models yolox_nano ...] [--later] [--json | --markdown]

Needs ../shared/data (or $TARED_SHARED/data); the sample's video is rendered into a temporary folder. Each model is
checked with its right spec and with one mistake after the other, on frames as its users have them. A line says what
became of it:

    left alone  the spec is right, and no other one was called surer
    same        the mistake is none in these frames, whose proportions are the input's
    corrected   the verdict is the right spec
    part        the verdict corrects one mistake of two, or is another spec that these frames do not tell from the right
                one, or names the right values beside its own as no worse
    tie         these frames find no difference between the mistake and the right spec: nothing was claimed
    missed      nothing was claimed, though the right spec finds more or less than the mistake
    WRONG       anything else

Behind it: the rank of the right spec among all that were tried, by sureness, and its figure against the mistake's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import yaml
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from agent.common.schema import read_yaml
from agent.inspection.alternatives import same_values
from agent.inspection.check import Check, Row, run_check
from agent.inspection.spec_guess import IMAGENET
from agent.inspection.sureness import compare
from agent.vision.spec import ModelSpec, load_model_spec
from benchmarks.models import DATA, MODELS, UNIT
from examples.street.render import render_video

_SAMPLE = Path(__file__).resolve().parents[1] / "examples/street/model.yaml"
_SAMPLE_FRAMES = 2800
_WIDTH = 200  # width of the table
_COCO, _CIFAR = "img_coco_train2017_first128_labelled.zip", "img_cifar10_test_A_3000.zip"
_CARS, _PEOPLE = "vid_vehicle_surveillance_640x352.mp4", "vid_one_by_one_person_768x432.mp4"
_FACE, _FACES = "vid_face_asl_walk_640x480.mkv", "img_faces_dlib_9_labelled.zip"
_SHAPES = "lbl_coco_train2017_first128_seg_kpt.zip"
_PERSON, _LEAST_SHARE, _LEAST_POINTS, _LEAST_PX = 1, 0.05, 8, 100.0
_SEED = 3  # seed of the sample's video
SOURCES: Mapping[str, tuple[str, ...]] = {
    "yolox_nano": (_COCO, _CARS, _PEOPLE),
    "fastestdet": (_COCO, _CARS, _PEOPLE),
    "ultraface": (_FACES, _FACE),
    "resnet20": (_CIFAR,),
    "street": (f"street-{_SEED}.mp4",),
    "espnet": ("camvid",),
    "selfie": ("persons",),
    "cpm": ("crops",),
    "blazepose": ("crops",),
    "ppocr": ("img_icdar15_mmocr_10_labelled.zip",),
}
_UNUSUAL = {"mean": [110.594, 108.61, 105.368], "std": [18392.4, 18565.0, 17846.2]}  # ESPNet's, in levels of a byte
_CROP = {"resize": "letterbox", "anchor": "center", "pad": 0}
# Models of other tasks than those of `benchmarks.models`, as their projects feed them.
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "espnet": {
        "path": "seg_espnet_camvid_360x480_fp32.onnx",
        "task": "segment",
        "input": {"color": "bgr", "resize": "stretch", **_UNUSUAL},
    },
    "selfie": {
        "path": "seg_selfie_mediapipe_256_fp32.onnx",
        "task": "segment",
        "score_threshold": 0.5,
        "input": {"color": "rgb", "resize": "stretch", "scale": UNIT},
    },
    "cpm": {
        "path": "pose_cpm_192_aic14_fp32.onnx",
        "task": "pose",
        "decoder": "heatmaps",
        "keypoints": 14,
        "score_threshold": 0.1,
        "input": {"color": "bgr", **_CROP},
    },
    "blazepose": {
        "path": "pose_blazepose_lite_256_fp32.onnx",
        "task": "pose",
        "decoder": "landmarks",
        "keypoints": 39,
        "input": {"color": "rgb", "scale": UNIT, **_CROP},
    },
    "ppocr": {
        "path": "text_ppocrv3_det_dynamic_fp32.onnx",
        "task": "obb",
        "decoder": "dbnet",
        "score_threshold": 0.5,
        "input": {"color": "bgr", "resize": "nearest", "multiple": 32, "scale": UNIT, **IMAGENET},
        "profiles": [{"x": {"min": [1, 3, 32, 32], "opt": [1, 3, 544, 960], "max": [1, 3, 960, 960]}}],
    },
}
# Looked at only once the measure and its margins were chosen, on the others.
LATER: Mapping[str, tuple[str, ...]] = {
    "ultraface": ("vid_face_asl_again_640x480.mkv", "vid_face_asl_no_640x480.mkv", "vid_face_asl_book_640x480.mkv"),
    "resnet20": ("img_cifar10_train_calib_500.zip",),
    "street": ("street-11.mp4", "street-12.mp4"),
    "espnet": ("camvid-train",),
    "selfie": (_FACE, "vid_face_asl_again_640x480.mkv"),
    "cpm": ("vid_face_asl_again_640x480.mkv",),
    "blazepose": ("vid_face_asl_again_640x480.mkv",),
}


@dataclass(frozen=True)
class Outcome:
    """One check. rank, right: None where the right spec was not among those that were tried."""

    model: str
    frames: str
    mistake: str
    outcome: str
    rank: int | None
    tried: int
    planted: float
    right: float | None
    seconds: float
    verdict: str


def mistakes(keys: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each mistake, and the keys of a spec that has it."""
    image = dict(keys.get("input", {}))

    def with_input(**changes: Any) -> dict[str, Any]:
        return {**keys, "input": {**image, **changes}}

    swapped = "rgb" if image.get("color", "bgr") == "bgr" else "bgr"
    resized = "stretch" if image.get("resize", "letterbox") == "letterbox" else "letterbox"
    is_bare = image.get("scale", 1.0) == 1.0 and "mean" not in image
    values = {"scale": UNIT} if is_bare else {"scale": 1.0, "mean": [0.0], "std": [1.0]}
    yield "none", dict(keys)
    yield "colour", with_input(color=swapped)
    if image.get("resize") != "nearest" and keys.get("decoder") not in ("heatmaps", "landmarks"):  # it is not judged
        yield "resize", with_input(resize=resized)
    yield "values", with_input(**values)
    yield "colour, values", with_input(color=swapped, **values)
    if keys.get("decoder") == "yolox":
        yield "decoder", {**keys, "decoder": "yolov5"}


def check_all(model: str, keys: Mapping[str, Any], sources: Mapping[str, Path], folder: Path) -> Iterator[Outcome]:
    """Check a model with each mistake, on each source."""
    right = _written(keys, folder / "right.yaml")
    for name, source in sources.items():
        for mistake, planted in mistakes(keys):
            path = folder / "planted.yaml"
            _written(planted, path)
            started = time.monotonic()
            check = run_check(path, str(source), None, 2)
            seconds = round(time.monotonic() - started, 1)
            truth = next((row for row in check.rows if _is(row, right)), None)
            yield Outcome(
                model, name, mistake, _outcome(check, truth, right, mistake), _rank(check, truth), len(check.rows),
                _mean(check.rows[0]), _mean(truth) if truth else None, seconds, check.verdict,
            )  # fmt: skip


def _written(keys: Mapping[str, Any], path: Path) -> ModelSpec:
    path.write_text(yaml.safe_dump(json.loads(json.dumps(keys, default=str))))
    return load_model_spec(path)


def _is(row: Row, right: ModelSpec) -> bool:
    spec = row.alternative.spec
    return spec.decoder == right.decoder and _place(spec) == _place(right) and same_values(spec.input, right.input)


def _place(spec: ModelSpec) -> tuple[str, ...]:
    """What says where a frame lies in the input: stretched, it has no anchor."""
    image = spec.input
    return (image.color, image.resize) if image.resize == "stretch" else (image.color, image.resize, image.anchor)


def _outcome(check: Check, truth: Row | None, right: ModelSpec, mistake: str) -> str:
    if check.surest is check.rows[0]:
        if mistake == "none":
            return "left alone"
        if truth is None:
            # Frames with the proportions of the input: then no other resize is another spec.
            return "same" if mistake == "resize" else "missed"
        return "tie" if truth.finding == "no difference" else "missed"
    if check.surest is truth:
        return "corrected"
    if truth is not None and compare(check.surest.sureness, truth.sureness, resizes=False) == "no difference":
        return "part"
    return "part" if any(_agrees(row, right) for row in (check.surest, *check.equals)) else "WRONG"


def _agrees(row: Row, right: ModelSpec) -> bool:
    """Return True if all that the row changes becomes right."""
    spec = row.alternative.spec
    agreement = {
        "color": spec.input.color == right.input.color,
        "resize": _place(spec) == _place(right),
        "values": same_values(spec.input, right.input),
        "decoder": spec.decoder == right.decoder,
    }
    return all(agreement[kind] for kind in row.alternative.kinds)


def _rank(check: Check, truth: Row | None) -> int | None:
    return None if truth is None else 1 + sum(_mean(row) > _mean(truth) for row in check.rows)


def _mean(row: Row) -> float:
    return round(row.sureness.mean, 3)


def _render(path: Path) -> Path:
    """Render the sample's video with the seed in its name."""
    return render_video(path, _SAMPLE_FRAMES, seed=int(path.stem.partition("-")[2]))


def _write_street(folder: Path, of_training: bool = False) -> Path:
    """Write CamVid's pictures without their masks."""
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(DATA / "img_camvid_dev_59_labelled.zip") as archive:
        for name in archive.namelist():
            if name.startswith("calib/" if of_training else "images/") and name.endswith(".jpg"):
                (folder / Path(name).name).write_bytes(archive.read(name))
    return folder


def _labelled_photos(kind: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield the labels of COCO's photos in one folder of them, each with its photo."""
    with zipfile.ZipFile(DATA / _COCO) as photos, zipfile.ZipFile(DATA / _SHAPES) as labels:
        of_key = {Path(name).stem: name for name in photos.namelist() if name.endswith(".jpg")}
        for name in sorted(labels.namelist()):
            if name.startswith(f"{kind}/") and Path(name).stem in of_key:
                yield labels.read(name), photos.read(of_key[Path(name).stem])


def _write_persons(folder: Path) -> Path:
    """Write the photos of which persons cover a twentieth."""
    folder.mkdir(exist_ok=True)
    for number, (label, photo) in enumerate(_labelled_photos("semantic")):
        if (_decoded(label, cv2.IMREAD_UNCHANGED) == _PERSON).mean() >= _LEAST_SHARE:
            (folder / f"{number:03}.jpg").write_bytes(photo)
    return folder


def _write_crops(folder: Path) -> Path:
    """Write square crops of persons with eight key points and 100 px of height, a quarter larger than they are."""
    folder.mkdir(exist_ok=True)
    for number, (label, photo) in enumerate(_labelled_photos("keypoints")):
        image = _decoded(photo, cv2.IMREAD_COLOR)
        size = np.array([image.shape[1], image.shape[0]] * 2)
        for person, line in enumerate(label.decode().splitlines()):
            x, y, width, height = np.array(line.split()[1:5], float) * size
            visible = np.array(line.split()[5:], float)[2::3] > 0
            if visible.sum() >= _LEAST_POINTS and height >= _LEAST_PX:
                side = round(1.25 * max(width, height))
                left, top = round(x - side / 2), round(y - side / 2)
                padded = cv2.copyMakeBorder(image, side, side, side, side, cv2.BORDER_CONSTANT)
                crop = padded[top + side : top + 2 * side, left + side : left + 2 * side]
                cv2.imwrite(str(folder / f"{number:03}-{person}.png"), crop)
    return folder


def _decoded(content: bytes, kind: int) -> NDArray[np.uint8]:
    return np.asarray(cv2.imdecode(np.frombuffer(content, np.uint8), kind), np.uint8)


_WRITERS: Mapping[str, Callable[[Path], Path]] = {
    "camvid": _write_street,
    "camvid-train": partial(_write_street, of_training=True),
    "persons": _write_persons,
    "crops": _write_crops,
}


def _print(outcomes: list[Outcome], as_markdown: bool) -> None:
    """Print a row for each model and its frames, a column for each mistake."""
    kinds = list(dict.fromkeys(one.mistake for one in outcomes))
    cells = {(one.model, one.frames, one.mistake): _cell(one) for one in outcomes}
    columns = ("model, frames", *kinds)
    rows = [
        (f"{model}, {frames}", *(cells.get((model, frames, kind), "") for kind in kinds))
        for model, frames in dict.fromkeys((one.model, one.frames) for one in outcomes)
    ]
    if as_markdown:
        for row in (columns, ("---",) * len(columns), *rows):
            print(f"| {' | '.join(row)} |")
        return
    table = Table(*columns)
    for row in rows:
        table.add_row(*row)
    Console(width=_WIDTH).print(table)


def _cell(one: Outcome) -> str:
    if one.mistake == "none" or one.right is None:
        return f"{one.outcome}, {one.planted:.2f}"
    return f"{one.outcome}, {one.rank} of {one.tried}, {one.right:.2f} against {one.planted:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SOURCES), default=list(SOURCES))
    parser.add_argument("--later", action="store_true", help="on frames that the measure was not chosen on")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true")
    output.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for model in options.models:
            names = (LATER if options.later else SOURCES).get(model, ())
            if model == "street":
                keys: dict[str, Any] = dict(read_yaml(_SAMPLE))
                keys["path"] = str(_SAMPLE.parent / keys["path"])
                sources = {name: _render(folder / name) for name in names}
            else:
                keys = dict(OTHERS[model] if model in OTHERS else MODELS[model][0])
                keys["path"] = str(DATA / str(keys["path"]))
                sources = {name: _WRITERS[name](folder / name) if name in _WRITERS else DATA / name for name in names}
            outcomes += check_all(model, keys, sources, folder)
    if options.json:
        print(json.dumps([asdict(one) for one in outcomes]))
    else:
        _print(outcomes, options.markdown)


if __name__ == "__main__":
    main()
