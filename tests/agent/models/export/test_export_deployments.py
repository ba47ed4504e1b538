"""Files for servers: nvinfer's configuration as GLib reads it, Triton's repository by runtime."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from bench import Bench
from gstreamer import PYTHON, require_gstreamer
from model_families import KEYPOINTS, ULTRALYTICS, Family, family, one_mask, segmentation, segmentation_argmax
from onnx import ModelProto
from worlds import SPEC
from zoo import Net

from engines.store.artefact import read_artefact, write_artefact

# nvinfer reads its configuration as a GKeyFile, whose reader refuses what is none.
_READ = """
import json, sys
from gi.repository import GLib
file = GLib.KeyFile()
file.load_from_file(sys.argv[1], GLib.KeyFileFlags.NONE)
print(json.dumps({group: {key: file.get_string(group, key) for key in file.get_keys(group)[0]}
                  for group in file.get_groups()[0]}))
"""
# Of DeepStream's documentation of Gst-nvinfer, the keys of [property] that are used here.
_DOCUMENTED = {
    *("gpu-id", "gie-unique-id", "process-mode", "batch-size", "network-mode", "network-type", "model-engine-file"),
    *("onnx-file", "net-scale-factor", "offsets", "model-color-format", "maintain-aspect-ratio", "symmetric-padding"),
    *("classifier-threshold", "output-tensor-meta", "labelfile-path", "num-detected-classes"),
    *("segmentation-threshold", "segmentation-output-order"),
}


def artefact(bench: Bench, name: str, **changes: Any) -> Path:
    """A float artefact of the bench's model under another spec."""
    spec = bench.write(f"{name}.yaml", {**SPEC, **changes})
    return bench.built(name, "--precision", "fp32", model=spec)


def nvinfer(bench: Bench, source: Path) -> dict[str, str]:
    """The configuration of an export, as GLib reads it."""
    require_gstreamer("Gst")
    bench.json("export", source, "--to", "deepstream", "-o", bench / "deepstream", "--overwrite")
    path = bench / "deepstream" / "config_infer.txt"
    done = subprocess.run([PYTHON, "-c", _READ, path], capture_output=True, text=True, check=True)
    groups: dict[str, dict[str, str]] = json.loads(done.stdout)
    assert groups.keys() == {"property"}
    assert groups["property"].keys() <= _DOCUMENTED
    return groups["property"]


def test_nvinfer_is_given_a_classifier(bench: Bench) -> None:
    settings = nvinfer(bench, bench / "artefact")
    assert (settings["network-mode"], settings["network-type"], settings["model-color-format"]) == ("1", "1", "1")
    assert (bench / "deepstream" / settings["onnx-file"]).is_file()
    assert (bench / "deepstream" / "build_10.sh").is_file()  # makes what model-engine-file names
    assert (bench / "deepstream" / settings["labelfile-path"]).read_text() == "a;b;c;d;e\n"
    assert settings["maintain-aspect-ratio"] == "0"  # the spec stretches


def test_nvinfer_prepares_frames_as_the_spec_does(bench: Bench) -> None:
    spec = {"color": "rgb", "resize": "letterbox", "anchor": "center", "scale": 0.5, "mean": [3, 4, 5], "std": [8]}
    settings = nvinfer(bench, artefact(bench, "centred", task="raw", labels=[], input=spec))
    pixels = np.arange(256.0)[:, None]
    offsets = np.array(list(map(float, settings["offsets"].split(";"))))
    given = float(settings["net-scale-factor"]) * (pixels - offsets)
    np.testing.assert_allclose(given, (pixels * 0.5 - np.array([3.0, 4.0, 5.0])) / 8.0, atol=1e-12)
    assert [settings[key] for key in ("model-color-format", "maintain-aspect-ratio", "symmetric-padding")] == list(
        "011"
    )
    assert (settings["network-type"], settings["output-tensor-meta"]) == ("100", "1")
    assert "labelfile-path" not in settings


def probabilities(net: Net) -> ModelProto:
    """Five classes for each pixel, behind a softmax and a resize."""
    scores = net.node("Softmax", net.conv("image", 3, 5, strides=[2, 2]), axis=1)
    scales = net.constant(np.array([1, 1, 2, 2], np.float32))
    return net.model(net.node("Resize", scores, "", scales, mode="nearest"))


@pytest.mark.parametrize(
    ("make", "labels", "network_type", "threshold"),
    [
        (probabilities, "abcde", "2", "0.0"),
        (one_mask, "a", "2", "0.3"),
        (segmentation, "abcde", "100", None),
        (segmentation_argmax, "abcde", "100", None),
        (probabilities, "a", "100", None),
    ],
)
def test_nvinfer_segments_by_itself_where_its_parser_answers_as_the_task_does(
    bench: Bench, make: Family, labels: str, network_type: str, threshold: str | None
) -> None:
    spec = bench.spec("map", family(make), task="segment", labels=[*labels])
    settings = nvinfer(bench, bench.built("map", "--precision", "fp32", model=spec))
    assert (settings["network-type"], settings.get("segmentation-threshold")) == (network_type, threshold)
    assert settings["num-detected-classes"] == str(len(labels))
    assert settings.get("segmentation-output-order") == ("0" if network_type == "2" else None)
    assert settings.get("output-tensor-meta") == ("1" if network_type == "100" else None)


@pytest.mark.parametrize(("make", "names"), ULTRALYTICS.items())
def test_triton_and_nvinfer_are_given_every_output_of_objects_with_more_than_a_box(
    bench: Bench, make: Family, names: tuple[str, str, str]
) -> None:
    _, task, decoder = names
    more = {"keypoints": KEYPOINTS} if task == "pose" else {}
    spec = bench.spec("shapes", family(make), task=task, decoder=decoder, labels=list("abc"), **more)
    built = bench.built("shapes", "--precision", "fp32", model=spec)
    settings = nvinfer(bench, built)
    assert [settings[key] for key in ("network-type", "output-tensor-meta", "num-detected-classes")] == [
        "100",
        "1",
        "3",
    ]
    bench.json("export", built, "--to", "triton", "-o", bench / "triton")
    (repository,) = (bench / "triton").glob("*/config.pbtxt")
    outputs = re.findall(r"^output .*dims: \[ (.*?) \]", repository.read_text(), re.M)
    graph = onnx.load(repository.parent / "1" / "model.onnx").graph
    assert len(outputs) == len(graph.output) == (2 if task == "instance" else 1)
    for dims, value in zip(outputs, graph.output, strict=True):
        assert dims == ", ".join(str(dim.dim_value or -1) for dim in value.type.tensor_type.shape.dim)
    assert (repository.parent / "labels.txt").read_text() == "a\nb\nc\n"


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"std": [0.2, 0.3, 0.2]}, "input.std with 3 values"),
        ({"resize": "pad"}, "input.resize pad"),
    ],
)
def test_a_spec_beyond_nvinfer_is_refused(bench: Bench, changes: dict[str, Any], found: str) -> None:
    source = artefact(bench, "other", input={**SPEC["input"], **changes})
    refusal = bench.refuses("export", source, "--to", "deepstream", "-o", bench / "out")
    assert refusal.startswith(f"export.input: {found}")


def test_triton_is_given_the_backend_of_the_artefact(bench: Bench) -> None:
    pytest.importorskip("openvino")
    bench.built("fast", "--calibration", bench / "calibration.json", runtime="openvino")
    for source, backend, files in (
        ("artefact", "onnxruntime", {"model.onnx"}),
        ("fast", "openvino", {"model.xml", "model.bin"}),
    ):
        bench.json("export", bench / source, "--to", "triton", "-o", bench / backend)
        repository = bench / backend / "model"
        assert f'backend: "{backend}"' in (repository / "config.pbtxt").read_text()
        assert {path.name for path in (repository / "1").iterdir()} == files


def test_a_board_s_engine_is_deployed_as_it_is(bench: Bench) -> None:
    """An artefact of TensorRT, as a board writes it; nothing here runs its engine."""
    own = read_artefact(bench / "artefact")
    inputs = {**own.manifest["inputs"], "backend": {"runtime": "tensorrt", "version": "10.3.0"}}

    def fill(folder: Path) -> dict[str, Any]:
        (folder / "engine.plan").write_bytes(b"an engine")
        for name in ("calibration.json", "calibration.npz", "plan.json"):
            (folder / name).write_bytes(own.read_file(name))
        return {**own.manifest, "engine": "engine.plan"}

    write_artefact(bench / "board", inputs, fill)
    settings = nvinfer(bench, bench / "board")
    assert (bench / "deepstream" / settings["model-engine-file"]).read_bytes() == b"an engine"
    assert "onnx-file" not in settings
    refusal = bench.refuses("export", bench / "board", "--to", "triton", "-o", bench / "triton")
    assert refusal.startswith("export.graph:")  # which has the names and shapes
    bench.json("export", bench / "board", "--to", "triton", "-o", bench / "triton", "--model", bench / "model.onnx")
    assert (bench / "triton" / "model" / "1" / "model.plan").read_bytes() == b"an engine"
    assert 'backend: "tensorrt"' in (bench / "triton" / "model" / "config.pbtxt").read_text()
