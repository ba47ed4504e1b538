"""`tared check`: the sample's detector on its own street, with the right spec and with mistakes in it; real models."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import yaml
from bench import Bench
from lab import SPECS
from model_families import depth, family
from places import ROOT
from zoo import Net

from agent.inspection.alternatives import alternatives, unchanged
from agent.inspection.check import Check, Row, run_check
from agent.inspection.sureness import Finding, Sureness, compare
from agent.vision.spec import load_model_spec
from agent.vision.tasks.task import disordered
from benchmarks.spec_check import OTHERS
from examples.street.scene import Street
from fleet.cli.main import main

pytestmark = pytest.mark.slow

STREET = ROOT / "examples/street"
HOURS = tuple(np.linspace(8.0, 9.0, 16))
RIGHT = {"color": "bgr", "resize": "stretch", "scale": 1 / 255}


@pytest.fixture(scope="session")
def street(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of sixteen frames of a morning."""
    folder = tmp_path_factory.mktemp("street")
    scene = Street(5, 96.0)
    for number, hour in enumerate(HOURS):
        cv2.imwrite(str(folder / f"{number:02}.png"), scene.frame(6.0 * number + 3.0, float(hour)).image)
    return folder


def written(folder: Path, **image: Any) -> Path:
    """The sample's spec, with these keys of `input` in the place of the right ones."""
    content = yaml.safe_load((STREET / "model.yaml").read_text())
    content |= {"path": str(STREET / "street.onnx"), "input": {**RIGHT, **image}}
    (folder / "model.yaml").write_text(yaml.safe_dump(content))
    return folder / "model.yaml"


def check_street(folder: Path, street: Path, **image: Any) -> Check:
    return run_check(written(folder, **image), str(street), None, 2)


def test_with_the_right_spec_nothing_is_surer(tmp_path: Path, street: Path) -> None:
    check = check_street(tmp_path, street)
    assert check.lines == []
    assert check.verdict.startswith(("the spec as written is the surest", "nothing is surer than the spec as written"))
    written, *others = check.rows
    assert written.sureness.mean > 0.5
    findings = {row.alternative.name: row.finding for row in others}
    assert findings["values -1 to 1"] == "less sure"
    assert {"color: rgb", "resize: letterbox, top-left", "values 0 to 255"} <= findings.keys()


def test_two_mistakes_are_found_and_the_line_that_corrects_them(tmp_path: Path, street: Path) -> None:
    check = check_street(tmp_path, street, color="rgb", scale=1.0)
    verdict = r"with values 0 to 1, color: bgr the model is surer \(\d\.\d\d against \d\.\d\d\): try it"
    assert re.match(verdict, check.verdict)
    (line,) = check.lines
    assert yaml.safe_load(line) == {"input": RIGHT}  # with which nothing is surer: see above


def test_the_command_prints_a_table_of_80_columns_and_draws_a_picture(
    tmp_path: Path, street: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "check.png"
    model = written(tmp_path, scale=1.0)
    assert main(["check", str(model), "--frames", str(street), "--count", "99", "-o", str(picture)]) == 0
    lines = capfd.readouterr().out.splitlines()
    header, first = lines[:2]
    assert header.split() == ["frames:", "16", "sureness", "surest", "object", "than", "the", "surest", "above"]
    assert first.startswith("the spec as written")
    verdict = next(index for index, line in enumerate(lines) if line.startswith("with values 0 to 1 the model"))
    assert max(len(line) for line in lines[:verdict]) <= 80
    assert lines[verdict + 1].startswith("  input: {color: bgr, resize: stretch, scale: 0.0039")
    assert lines[verdict + 2] == f"{picture} shows it"
    image = cv2.imread(str(picture))
    assert image is not None
    tiles = 2 + sum(1 for line in lines[1:verdict] if not line.startswith(" "))
    assert image.shape[1] > 1500
    assert image.shape[0] > (tiles + 2) // 3 * 300
    assert (image == (0, 94, 213)).all(axis=2).sum() > 1000  # the frame around the surest


def test_a_bare_onnx_is_checked_as_guessed_and_json_says_the_same(
    street: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", str(STREET / "street.onnx"), "--frames", str(street), "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert result["frames"] == len(HOURS)
    guessed, *others = result["specs"]
    assert (guessed["name"], guessed["finding"], guessed["yaml"]) == ("the guessed spec", None, [])
    assert all(other["yaml"] and 0.0 <= other["top"] <= 1.0 for other in others)
    assert "values 0 to 1" in result["surest"], "the guess is YOLOX's own 0 to 255"
    assert "scale: 0.00392156862745098" in result["yaml"][0]
    assert result["output"] is None
    assert result["answer"].keys() == {"detections"}


def test_a_single_photo_is_enough_for_a_plain_mistake(tmp_path: Path, street: Path) -> None:
    photo = str(street / "04.png")
    wrong = run_check(written(tmp_path, scale=1.0), photo, None, 2)
    assert wrong.frames == 1
    assert wrong.surest.alternative.kinds == ("values",)
    right = run_check(written(tmp_path), photo, None, 2)
    assert right.lines == []


def test_frames_that_show_nothing_decide_nothing(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "grey.png"), np.full((272, 480, 3), 114, np.uint8))
    check = run_check(written(tmp_path), str(tmp_path / "grey.png"), None, 2)
    assert check.verdict.startswith("nothing is found in these frames, whatever the spec")


@pytest.mark.parametrize(
    ("head", "remedy"), [("pose", "the task is pose, with keypoints: 6"), ("obb", "the task is obb")]
)
def test_channels_that_are_no_class_scores_are_named_with_their_task(head: str, remedy: str, street: Path) -> None:
    """The graphs say nothing of the task, so that both are taken for detectors, by the number of their channels."""
    model, photo = STREET / f"street-{head}.onnx", str(street / "04.png")
    (fault,) = run_check(model, photo, None, 2).faults
    assert "no class scores" in fault
    assert fault.endswith(remedy)
    assert run_check(model.with_suffix(".yaml"), photo, None, 2).faults == ()


def test_a_raw_model_is_shown_and_not_compared(bench: Bench) -> None:
    raw = bench.write("raw.yaml", {"path": "model.onnx", "task": "raw", "input": {"scale": 1 / 255}})
    text = bench.text("check", raw, "--frames", bench / "clip.avi", "-o", bench / "raw.png")
    assert re.match(r"output +shape +least +mean +largest", text)
    assert "a raw model does not say how sure it is" in text
    assert (bench / "raw.png").stat().st_size > 1000


def test_a_depth_model_is_drawn_and_not_judged(bench: Bench) -> None:
    model = bench.spec("depth", family(depth), task="depth", labels=[], depth="relative")
    found = bench.json("check", model, "--frames", bench / "clip.avi", "-o", bench / "depth.png")
    assert "a depth model does not say how sure it is" in found["verdict"]
    assert found["answer"].keys() == {"depth"}
    assert found["specs"][0]["sureness"] is None


def test_a_long_or_hostile_name_is_printed_whole(bench: Bench) -> None:
    name = "/head/[bold]very" + "/long" * 20
    net = Net((1, 3, 8, 8))
    model = net.model(net.node("Relu", net.conv("image", 3, 5)))
    model.graph.node[-1].output[0] = model.graph.output[0].name = name
    text = bench.text("check", bench.spec("long", model, task="raw", labels=[]), "--frames", bench / "clip.avi")
    assert name in "".join(line.split()[0] for line in text.splitlines()[1:-1])


def test_a_classifier_shows_its_top_classes(bench: Bench) -> None:
    printed = bench.json("check", bench / "model.yaml", "--frames", bench / "clip.avi", "-o", bench / "check.jpg")
    assert printed["answer"]["label"] in "abcde"
    assert cv2.imread(str(bench / "check.jpg")) is not None


@pytest.mark.parametrize("output", ["check.gif", "nowhere/check.png", "."])
def test_a_picture_that_cannot_be_written_is_refused_first(bench: Bench, output: str) -> None:
    said = bench.refuses("check", bench / "none.yaml", "--frames", bench / "clip.avi", "-o", bench / output)
    assert said.startswith("check.output: ")


def test_margins() -> None:
    """Surer is what differs by more than a tenth, and by more than the frames do among themselves."""

    def figures(*sums: float, tops: tuple[float, ...] | None = None) -> Sureness:
        return Sureness(np.array(sums), np.array(tops or sums))

    steady = figures(*[0.5] * 10)
    assert compare(figures(*[0.6] * 10), steady, resizes=False) == "surer"
    assert compare(figures(*[0.54] * 10), steady, resizes=False) == "no difference"
    assert compare(figures(*[0.4] * 10), steady, resizes=False) == "less sure"
    assert compare(figures(*[0.1, 1.4] * 5), steady, resizes=False) == "no difference"
    assert compare(figures(*[0.6] * 7, *[0.5] * 3), steady, resizes=False) == "no difference"
    assert compare(figures(0.9), figures(0.5), resizes=False) == "no difference"
    assert compare(figures(0.9), figures(0.4), resizes=False) == "surer"
    assert compare(figures(*[0.01] * 10), figures(*[0.0] * 10), resizes=False) == "no difference"
    more = figures(*[2.0] * 10, tops=(0.5,) * 10)
    assert compare(more, steady, resizes=True) == "finds more"
    assert compare(steady, more, resizes=True) == "finds less"


def test_a_caption_claims_no_more_than_the_verdict(tmp_path: Path) -> None:
    """Two specs are surer than the one as written, and these frames leave open which of them is surer."""
    written = unchanged(load_model_spec(STREET / "model.yaml"), is_guessed=False)
    by_name = {each.name: each for each in alternatives(written, (), is_bytes=False)}

    def row(name: str, finding: Finding | None, *sums: float) -> Row:
        return Row(by_name.get(name, written), Sureness(np.array(sums), np.array(sums)), finding)

    rows = (
        row("", None, *[0.1] * 10),
        row("values 0 to 255", "surer", *[0.5, 0.7] * 5),
        row("values -1 to 1", "surer", *[0.8, 0.45] * 5),
        row("values as for ImageNet", "surer", *[0.2] * 10),
        row("color: rgb", "no difference", *[0.0, 0.3] * 5),
    )
    check = Check(tmp_path, 10, rows, rows[2], np.zeros((2, 2, 3), np.uint8), (), ())
    assert "values 0 to 255 does as well" in check.verdict
    assert [check.caption(each) for each in rows] == [
        "sureness 0.10",
        "sureness 0.60: as sure as the surest",
        "sureness 0.62: the surest",
        "sureness 0.20: surer, but not the surest",
        "sureness 0.15: no difference beyond chance",
    ]


def test_a_frame_in_disorder_has_the_same_pixels_elsewhere() -> None:
    image = np.random.default_rng(1).integers(0, 255, (70, 100, 3), dtype=np.uint8)
    scattered = disordered(image)
    assert (np.sort(scattered.reshape(-1, 3), axis=0) == np.sort(image.reshape(-1, 3), axis=0)).all()
    assert (scattered != image).any(axis=2).mean() > 0.8
    assert disordered(image[:1, :1]).shape == (1, 1, 3)


REAL: dict[str, tuple[str, dict[str, Any]]] = {
    "yolox_nano": ("vid_vehicle_surveillance_640x352.mp4", {"color": "rgb", "scale": 1 / 255}),
    "ultraface": ("vid_face_asl_walk_640x480.mkv", {"mean": [0], "std": [1]}),
    "resnet20": ("img_cifar10_test_A_3000.zip", {"mean": [0], "std": [1], "scale": 1.0}),
    "selfie": ("vid_face_asl_walk_640x480.mkv", {"scale": 1.0}),
    "ppocr": ("img_icdar15_mmocr_10_labelled.zip", {"mean": [0], "std": [1], "scale": 1.0}),
}


@pytest.mark.trial
@pytest.mark.parametrize("name", list(REAL))
def test_real_models(name: str, tmp_path: Path, shared_data: Path) -> None:
    """The right spec is left alone, a wrong one is not: the verdict is as sure as the right spec."""
    frames, wrong = REAL[name]
    spec: dict[str, Any] = json.loads(json.dumps(SPECS.get(name) or OTHERS[name]))
    spec["path"] = str(shared_data / spec["path"])
    with zipfile.ZipFile(shared_data / "img_coco_train2017_first128_labelled.zip") as archive:
        (tmp_path / "coco.txt").write_bytes(archive.read("classes.txt"))
    path = tmp_path / "model.yaml"
    path.write_text(yaml.safe_dump(spec))
    right = run_check(path, str(shared_data / frames), None, 2)
    assert right.lines == []
    path.write_text(yaml.safe_dump({**spec, "input": {**spec["input"], **wrong}}))
    planted = run_check(path, str(shared_data / frames), None, 2)
    assert planted.lines
    assert compare(right.rows[0].sureness, planted.surest.sureness, resizes=False) == "no difference"
