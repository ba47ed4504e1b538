"""A decoder by entry point, of distributions that are really installed: in a folder on sys.path, as pip leaves them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from bench import CLIP_FRAMES, Bench
from zoo import Net

from agent.common.errors import ConfigError
from agent.common.schema import validate
from agent.vision.decoders import BUILTIN_DECODERS
from agent.vision.detections import Detections
from agent.vision.spec import ModelSpec
from agent.vision.tasks.opening import open_task
from engines.interface import TensorSpec

SOURCE = """
import numpy as np
from agent.vision.detections import Detections

def decode(outputs, size, score_threshold):
    (scores,) = outputs.values()
    return Detections(boxes=np.array([[0, 0, size[1], size[0]]], np.float32), classes=np.array([3]), scores=scores)

class Head:
    @staticmethod
    def decode(outputs, size, score_threshold):
        return decode(outputs, size, score_threshold)

NUMBER = 3
"""


def install(site: Path, name: str, entries: dict[str, str]) -> None:
    """Write a module and its .dist-info, as pip does for a wheel with these entry points."""
    (site / f"{name}.py").write_text(SOURCE, encoding="utf-8")
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    lines = "".join(f"{key} = {value}\n" for key, value in entries.items())
    (info / "entry_points.txt").write_text(f"[tared.decoders]\n{lines}", encoding="utf-8")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("my_decoder", "other_decoder"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def spec(decoder: str) -> ModelSpec:
    return validate(ModelSpec, {"path": "a.onnx", "task": "detect", "decoder": decoder}, "model.yaml")


def found(decoder: str) -> Detections:
    decode = open_task(spec(decoder)).open_decoder((64, 96), [TensorSpec("out", np.dtype(np.float32), (1, 1))])
    detections = decode({"out": np.array([[0.9]], np.float32)})
    assert isinstance(detections, Detections)
    return detections


@pytest.mark.parametrize("function", ["my_decoder:decode", "my_decoder:Head.decode"])
def test_an_installed_package_names_a_decoder(site: Path, function: str) -> None:
    install(site, "my_decoder", {"mine-2.0": function})
    assert (found("mine-2.0").boxes.tolist(), found("mine-2.0").classes.tolist()) == ([[0.0, 0.0, 96.0, 64.0]], [3])


def test_an_answer_keeps_no_view_of_the_outputs(site: Path) -> None:
    install(site, "my_decoder", {"views": "my_decoder:decode"})
    decode = open_task(spec("views")).open_decoder((64, 96), [TensorSpec("out", np.dtype(np.float32), (1, 1))])
    for outputs in (np.array([[0.9]], np.float32), np.array([[0.1]], np.float32)):  # one candidate, and none
        detections = decode({"out": outputs})
        assert isinstance(detections, Detections)
        assert not np.shares_memory(detections.scores, outputs)


def test_a_built_in_decoder_is_never_overridden(site: Path) -> None:
    install(site, "my_decoder", dict.fromkeys(BUILTIN_DECODERS, "my_decoder:decode"))
    with pytest.raises(ConfigError) as caught:
        found("yolox")
    assert caught.value.code == "decoder.shape"  # from ours: that of the package would take this output


def test_an_unknown_name_lists_what_there_is(site: Path) -> None:
    install(site, "my_decoder", {"mine": "my_decoder:decode", "yolox": "my_decoder:decode"})
    with pytest.raises(ConfigError, match=r"expected yolox, yolov5, .*, mine, 'package\.module:function'"):
        spec("mien")


def test_two_packages_with_one_name(site: Path) -> None:
    install(site, "my_decoder", {"mine": "my_decoder:decode"})
    install(site, "other_decoder", {"mine": "other_decoder:decode"})
    with pytest.raises(ConfigError, match="2 installed packages, my_decoder:decode, other_decoder:decode") as caught:
        found("mine")
    assert caught.value.code == "decoder.import"


def test_a_package_that_went_after_the_spec_was_read(site: Path) -> None:
    install(site, "my_decoder", {"mine": "my_decoder:decode"})
    read = spec("mine")
    (site / "my_decoder-1.0.dist-info" / "entry_points.txt").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="decoder 'mine' of 0 installed packages"):
        open_task(read).open_decoder((64, 96), [])


def test_an_artefact_needs_the_package_of_its_decoder(site: Path, bench: Bench) -> None:
    install(site, "my_decoder", {"mine": "my_decoder:decode"})
    net = Net((1, 3, 8, 8))
    score = net.node("ReduceMax", "image", axes=[1, 2, 3], keepdims=0)
    one = net.node("Reshape", score, net.constant(np.array([1, 1])))
    spec = bench.spec("whole", net.model(one), task="detect", decoder="mine", labels=[], score_threshold=0.0)
    bench.json("build", spec, "--precision", "fp32", "-o", bench / "own")
    frames = ("--frames", bench / "clip.avi", "-o", bench / "own.jsonl")
    assert bench.json("infer", bench / "own", *frames)["frames"] == CLIP_FRAMES
    shutil.rmtree(site / "my_decoder-1.0.dist-info")
    assert "decoder: expected yolox" in bench.refuses("infer", bench / "own", *frames, lines=3)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("absent_module_of_mine:decode", "ModuleNotFoundError"),
        ("broken_decoder:decode", "nothing_of_that_name"),
        ("my_decoder:absent", "no function 'absent'"),
        ("my_decoder:NUMBER", "no function 'NUMBER'"),
        ("my_decoder", "no function ''"),
    ],
)
def test_an_entry_point_that_leads_nowhere(site: Path, function: str, message: str) -> None:
    install(site, "my_decoder", {"mine": function})
    (site / "broken_decoder.py").write_text("import nothing_of_that_name\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=message) as caught:
        found("mine")
    assert caught.value.code == "decoder.import"
