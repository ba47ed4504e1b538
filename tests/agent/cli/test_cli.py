"""The command line's contract: one JSON object on stdout with the documented keys, everything else on stderr."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
from bench import CLIP_FRAMES, Bench, picture, strict
from brokers import free_port
from warm_start import tared
from worlds import SPEC
from zoo import Net

from engines.calibration import load_calibration
from engines.store.artefact import read_artefact


def test_calibrate_prints_its_counts(bench: Bench) -> None:
    output = bench / "night" / "calibration.json"
    printed = bench.json("calibrate", bench / "model.yaml", "--frames", bench / "clip.avi", "-o", output)
    assert printed.keys() >= {"tensors", "frames", "seconds", "peak_rss_bytes", "output"}
    assert (printed["tensors"], printed["frames"], printed["output"]) == (4, CLIP_FRAMES, str(output))
    assert printed["seconds"] > 0
    assert 10e6 < printed["peak_rss_bytes"] < 10e9
    calibration = load_calibration(output)
    assert (len(calibration.amax), calibration.frames, calibration.source) == (4, CLIP_FRAMES, "clip.avi")


@pytest.mark.parametrize("runtime", ["openvino", "onnxruntime"])
def test_commands_take_the_runtime_of_an_artefact_unless_another_is_named(bench: Bench, runtime: str) -> None:
    build = ["build", bench / "model.yaml", "--calibration", bench / "calibration.json", "-o", bench / "new"]
    bench.json(*build, "--backend", runtime)
    infer = ["infer", bench / "new", "--frames", bench / "clip.avi"]
    assert bench.json(*infer)["frames"] == CLIP_FRAMES
    other = "onnxruntime" if runtime == "openvino" else "openvino"
    assert bench.refuses(*infer, "--backend", other).startswith("artefact.runtime: ")


def test_build_prints_its_artefact_and_finds_it_again(bench: Bench) -> None:
    build = ["build", bench / "model.yaml", "--calibration", bench / "calibration.json", "-o", bench / "new"]
    printed = bench.json(*build)
    assert printed.keys() >= {"artefact", "id", "int8_macs_share", "engine_bytes", "seconds"}
    assert printed["int8_macs_share"] == 1.0
    assert printed["engine_bytes"] == (bench / "new" / "engine.onnx").stat().st_size
    assert printed["id"] == read_artefact(bench / "new").id
    again = bench.json(*build)
    assert {**again, "seconds": 0} == {**printed, "seconds": 0}
    assert bench.json(*build[:-1], bench / "elsewhere")["id"] == printed["id"]


def test_infer_prints_its_pace_and_writes_a_line_per_frame(bench: Bench) -> None:
    results = bench / "new" / "results.jsonl"
    printed = bench.json("infer", bench / "artefact", "--frames", bench / "clip.avi", "-o", results)
    assert printed.keys() >= {"frames", "fps", "latency_ms"}
    assert printed["frames"] == CLIP_FRAMES
    assert printed["fps"] > 0
    assert 0 < printed["latency_ms"]["p50"] <= printed["latency_ms"]["p99"]
    lines = [strict(line + "\n") for line in results.read_text().splitlines()]
    assert [line["frame"] for line in lines] == list(range(CLIP_FRAMES))
    assert [round(line["ts"], 3) for line in lines] == [number / 10 for number in range(CLIP_FRAMES)]
    for line in lines:
        assert line.keys() == {"frame", "ts", "class", "label", "score"}
        assert SPEC["labels"][line["class"]] == line["label"]


def test_evaluate_scores_detectors_by_average_precision(bench: Bench) -> None:
    net = Net((1, 3, 8, 8))
    rows = net.node("Reshape", net.conv("image", 3, 6), net.constant(np.array([1, 64, 6])))
    spec = bench.spec("boxes", net.model(rows), task="detect", decoder="end2end", labels=["car"])
    folder = bench.images("set", picture(0), picture(99))
    (folder / "0.txt").write_text("0 .5 .5 .5 .5\n")
    printed = bench.json("evaluate", spec, "--dataset", folder)
    assert printed.keys() >= {"task", "images", "map", "map50"}
    assert (printed["task"], printed["images"]) == ("detect", 2)
    assert printed["by_class"] == [{"class": 0, "label": "car", "objects": 1, "map": printed["map"]}]
    assert printed["by_size"].keys() == {"small", "medium", "large"}
    (folder / "classes.txt").write_text("car\ntree\n")
    assert bench.refuses("evaluate", spec, "--dataset", folder).startswith("dataset.label: class 'tree'")
    assert {**bench.json("evaluate", spec, "--dataset", folder, "--classes", "car")} == printed


def test_evaluate_names_the_worst_class_of_a_segmentation(bench: Bench) -> None:
    """The model says where a picture is brighter than half, and the masks agree but for one row."""
    net = Net((1, 1, 8, 8))
    scores = net.node("Conv", "image", net.constant(np.array([[-1.0], [1.0]], np.float32).reshape(2, 1, 1, 1)))
    bright = net.node("Add", scores, net.constant(np.array([1.0, 0.0], np.float32).reshape(1, 2, 1, 1)))
    keys = {"labels": ["dark", "bright"], "input": {"color": "gray", "scale": 1 / 255, "resize": "stretch"}}
    spec = bench.spec("map", net.model(bright), task="segment", **keys)
    image = np.zeros((8, 8, 3), np.uint8)
    image[6:] = 255
    folder = bench.images("set/images", image).parent
    mask = np.zeros((8, 8), np.uint8)
    mask[5:] = 1
    bench.images("set/masks", mask)
    printed = bench.json("evaluate", spec, "--dataset", folder)
    assert printed["worst_class"] == "bright"
    assert printed["by_class"] == [
        {"class": 0, "label": "dark", "pixels": 40, "iou": 0.8333},
        {"class": 1, "label": "bright", "pixels": 24, "iou": 0.6667},
    ]
    shown = [line.split() for line in bench.text("evaluate", spec, "--dataset", folder).splitlines()]
    assert ["worst_class", "bright"] in shown
    assert ["bright", "24", "0.6667"] in shown


def test_doctor_names_what_is_there_and_what_is_missing(bench: Bench) -> None:
    printed = bench.json("doctor")
    assert printed["ok"] is True
    found = {finding["name"]: finding for finding in printed["findings"]}
    assert found["onnxruntime"]["found"] == importlib.metadata.version("onnxruntime")
    assert all(finding["ok"] or finding["remedy"] for finding in printed["findings"])
    lines = bench.text("doctor").splitlines()
    assert len(lines) == len(found)
    assert any(re.match(r"ok +onnxruntime +\d", line) for line in lines)


def test_run_prints_a_summary(bench: Bench) -> None:
    bench.world.config["mqtt"] = {"host": "127.0.0.1", "port": free_port()}
    done = subprocess.run(bench.world.command(), capture_output=True, text=True, timeout=60, check=True)
    printed = strict(done.stdout)
    assert printed.keys() >= {
        "frames", "dropped", "fps", "latency_ms", "alarms", "swaps", "fidelity", "accuracy", "artefact",
    }  # fmt: skip
    assert (printed["frames"], printed["dropped"], printed["alarms"], printed["accuracy"]) == (CLIP_FRAMES, {}, [], {})
    assert printed["latency_ms"].keys() >= {"p50", "p99"}
    assert read_artefact(Path(printed["artefact"]))
    table = tared(*(word for word in bench.world.arguments("--frames", "5") if word != "--json")).stdout
    assert re.search(r"frames +\S* *5\b", table)
    assert "{" not in table
