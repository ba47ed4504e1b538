"""Detectors of the DETR family from the file to the answer, with a second input and without."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import yaml
from lab import tared
from model_families import IMAGE, family, rtdetr_deployed
from runtime_under_test import RUNTIME

from agent.common.errors import ConfigError
from agent.models.model import open_model
from agent.vision.detections import Detections
from agent.vision.spec import ModelSpec
from agent.vision.task import VisionTask
from agent.vision.tasks.opening import open_task
from engines.errors import EngineError
from engines.interface import TensorSpec
from engines.registry import open_backend
from fleet.cli.main import main

SHAPES, MICRO = "img_shapes_dev_100_labelled.zip", "det_rtdetr_micro_shapes_96_fp32.onnx"
FRAME = np.random.default_rng(0).integers(0, 256, (120, 320, 3), np.uint8)


def spec(decoder: str, **more: Any) -> ModelSpec:
    return ModelSpec.model_validate({"path": "m.onnx", "task": "detect", "decoder": decoder, **more})


def answer(model: ModelSpec, outputs: dict[str, np.ndarray], size: tuple[int, int] = (64, 96)) -> Detections:
    batch = {name: each[np.newaxis] for name, each in outputs.items()}
    tensors = [TensorSpec(name, each.dtype, each.shape) for name, each in batch.items()]
    found = open_task(model).open_decoder(size, tensors)(batch)
    assert isinstance(found, Detections)
    return found


def queries(count: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(count)
    logits = random.normal(0, 3, (count, 5)).astype(np.float32)
    return {"logits": logits, "pred_boxes": random.uniform(0.2, 0.8, (count, 4)).astype(np.float32)}


@pytest.mark.parametrize("decoder", ["detr", "rtdetr"])
def test_the_order_of_queries_costs_nothing(decoder: str) -> None:
    outputs, order = queries(100), np.random.default_rng(1).permutation(100)
    first = answer(spec(decoder), outputs)
    second = answer(spec(decoder), {name: each[order] for name, each in outputs.items()})
    assert len(first) > 20
    assert first.fidelity(second) == 1.0


@pytest.mark.parametrize("decoder", ["detr", "rtdetr"])
def test_queries_keep_their_overlaps_unless_the_spec_says_otherwise(decoder: str) -> None:
    same = {name: np.repeat(each[:1], 2, axis=0) for name, each in queries(1).items()}
    same["logits"][:] = [9, -9, -9, -9, -9]
    assert len(answer(spec(decoder), same)) == 2
    assert len(answer(spec(decoder, nms="per-class"), same)) == 1


@pytest.mark.parametrize("decoder", ["detr", "rtdetr"])
def test_a_query_of_nan_is_no_object_and_spoils_no_other(decoder: str) -> None:
    outputs = queries(3)
    outputs["logits"][:] = [9, -9, -9, -9, -9]
    outputs["logits"][1, 3] = np.nan
    outputs["pred_boxes"][2, 0] = np.nan
    assert len(answer(spec(decoder), outputs)) == 1


@pytest.mark.parametrize("count", [0, 1000])
@pytest.mark.parametrize("decoder", ["detr", "rtdetr"])
def test_no_query_and_a_thousand_sure_ones_are_answered(decoder: str, count: int) -> None:
    outputs = queries(count)
    outputs["logits"][:] = [-9, 9, -9, -9, -9]
    assert answer(spec(decoder), outputs).classes.tolist() == [1] * count


@pytest.fixture(name="deployed")
def deployed_fixture(tmp_path: Path) -> Path:
    (tmp_path / "m.onnx").write_bytes(family(rtdetr_deployed).SerializeToString())
    return tmp_path / "m.onnx"


def in_frame(model: Path, size: Any, resize: str) -> np.ndarray:
    """Boxes in pixels of a frame of 320 x 120, best first."""
    prepared = {"color": "rgb", "resize": resize, "anchor": "center", "scale": 1 / 255}
    opened = open_model(
        spec("end2end", path=model, inputs={"orig_target_sizes": size}, input=prepared, score_threshold=0.0)
    )
    engine = open_backend(RUNTIME).load(opened.master.SerializeToString())
    found, geometry = VisionTask(opened.spec, engine.inputs, engine.outputs).infer(engine, FRAME)
    engine.close()
    assert isinstance(found, Detections)
    assert len(found) == 20
    return geometry.to_frame(found.boxes)


@pytest.mark.parametrize("resize", ["stretch", "letterbox"])
def test_boxes_lie_in_the_frame_whatever_picture_the_constant_names(deployed: Path, resize: str) -> None:
    """The network's own size is what `tared inspect` proposes."""
    own = in_frame(deployed, [IMAGE[3], IMAGE[2]], resize)
    assert np.ptp(own[:, 0]) > 1
    for size in ([1920, 1080], [[7, 1000]], 640):
        np.testing.assert_allclose(in_frame(deployed, size, resize), own, rtol=1e-3, atol=1e-2)


def test_a_picture_without_an_area_is_refused_before_the_first_frame() -> None:
    outputs = {"boxes": np.zeros((9, 4), np.float32), "scores": np.zeros(9, np.float32)}
    outputs["labels"] = np.zeros(9, np.float32)
    with pytest.raises(EngineError, match="positive width and height"):
        answer(spec("end2end", inputs={"orig_target_sizes": [0, 0]}), outputs)


@pytest.mark.parametrize("value", ["640", None, {"w": 1}, [640, "480"], float("nan"), float("inf"), 10**400])
def test_a_constant_is_numbers(value: Any) -> None:
    with pytest.raises(ValueError, match="a number, or lists of numbers, for input 'size'"):
        spec("end2end", inputs={"size": value})


def test_engines_of_specs_without_constants_keep_their_ids() -> None:
    assert "inputs" not in spec("end2end").model_dump(mode="json")
    assert spec("end2end", inputs={"a": [[1, 2.5]]}).model_dump(mode="json")["inputs"] == {"a": [[1, 2.5]]}


def test_a_model_of_two_inputs_goes_through_the_command_line(deployed: Path, tmp_path: Path) -> None:
    frames, model = tmp_path / "frames", tmp_path / "m.yaml"
    frames.mkdir()
    for number in range(32):
        cv2.imwrite(str(frames / f"{number}.png"), np.roll(FRAME, 5 * number, axis=1))
    tared("inspect", deployed, "-o", model)
    assert yaml.safe_load(model.read_text())["inputs"] == {"orig_target_sizes": [96, 64]}
    tared("calibrate", model, "--frames", frames, "-o", tmp_path / "c.json")
    built = tared("build", model, "--calibration", tmp_path / "c.json", "-o", tmp_path / "engine")
    assert built["int8_macs_share"] > 0.0
    assert tared("infer", tmp_path / "engine", "--frames", frames, "-o", tmp_path / "r.jsonl")["frames"] == 32
    assert main(["check", str(model), "--frames", str(frames), "-o", str(tmp_path / "check.png")]) == 0
    assert main(["export", str(tmp_path / "engine"), "--to", "triton", "-o", str(tmp_path / "triton")]) == 0
    (config,) = (tmp_path / "triton").rglob("config.pbtxt")
    assert "orig_target_sizes" not in config.read_text().partition("parameters")[0]


def test_a_spec_without_the_constant_says_what_to_write(deployed: Path) -> None:
    with pytest.raises(EngineError, match=r"inputs: \{orig_target_sizes: \[96, 64\]\}"):
        open_model(spec("end2end", path=deployed))


def test_the_other_reading_of_scores_fails_before_the_first_frame() -> None:
    with pytest.raises(ConfigError, match="DETR outputs"):
        answer(spec("detr"), {"logits": np.zeros((9, 1), np.float32), "pred_boxes": np.zeros((9, 4), np.float32)})


def test_a_real_rtdetr_is_as_accurate_as_its_project_measures(shared_data: Path, tmp_path: Path) -> None:
    """Average precision .958 at IoU .5, .875 over all, as its trainer measured; the spec is guessed, but for labels."""
    model = tmp_path / "m.yaml"
    tared("inspect", shared_data / MICRO, "-o", model)
    with zipfile.ZipFile(shared_data / SHAPES) as archive:
        labels = archive.read("classes.txt").decode().split()
    model.write_text(yaml.safe_dump({**yaml.safe_load(model.read_text()), "labels": labels}))
    found = tared("evaluate", model, "--dataset", shared_data / SHAPES)
    assert (found["map50"], found["map"]) == (pytest.approx(0.958, abs=0.003), pytest.approx(0.875, abs=0.003))
