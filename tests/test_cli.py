"""The command line's contract: one JSON object on stdout with the documented keys, everything else on stderr."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import yaml
from brokers import RealBroker, eventually, free_port
from worlds import SPEC, World, make_world
from zoo import Net

from agent.cli import main
from engines.calibration import load_calibration
from engines.store import read_artefact

COMMANDS = ("run", "calibrate", "build", "infer", "evaluate", "send", "doctor")
COUNT = 12
MODULE = [sys.executable, "-m", "agent.cli"]


def strict(text: str) -> dict[str, Any]:
    """The one JSON object of a text; NaN is none."""

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    document = json.loads(text, parse_constant=no_constant)
    assert isinstance(document, dict)
    assert text.count("\n") == 1
    return document


class Shell:
    """Runs commands in the folder of a small world."""

    def __init__(self, world: World, capfd: pytest.CaptureFixture[str]) -> None:
        self.world = world
        self.folder = world.folder
        self._capfd = capfd

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def json(self, *arguments: object) -> dict[str, Any]:
        """The object a command prints with --json; on stderr it says nothing, since these jobs are short."""
        assert main([*map(str, arguments), "--json"]) == 0
        output, errors = self._capfd.readouterr()
        assert errors == ""
        return strict(output)

    def text(self, *arguments: object) -> str:
        """What a command prints for people."""
        assert main([str(argument) for argument in arguments]) == 0
        return self._capfd.readouterr().out

    def spec(self, name: str, **changes: Any) -> Path:
        (self / name).write_text(yaml.safe_dump({**SPEC, **changes}))
        return self / name


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> World:
    world = make_world(tmp_path_factory.mktemp("stock") / "world", lambda _: 0.5, COUNT / 10)
    folder = world.folder
    calibrate = ["calibrate", folder / "model.yaml", "--frames", folder / "clip.avi", "-o", folder / "calibration.json"]
    build = ["build", folder / "model.yaml", "--calibration", folder / "calibration.json", "-o", folder / "artefact"]
    for command in (calibrate, build):
        assert main([str(part) for part in command]) == 0
    return world


@pytest.fixture
def shell(stock: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Shell:
    shutil.copytree(stock.folder, tmp_path / "world")
    return Shell(World(tmp_path / "world", stock.config), capfd)


def images(folder: Path, *values: int) -> Path:
    folder.mkdir(parents=True)
    for number, value in enumerate(values):
        cv2.imwrite(str(folder / f"{number:03}.png"), np.full((8, 8, 3), value, np.uint8))
    return folder


# ---- one object each


def test_calibrate_tells_what_it_observed(shell: Shell) -> None:
    output = shell / "night" / "calibration.json"
    told = shell.json("calibrate", shell / "model.yaml", "--frames", shell / "clip.avi", "-o", output)
    assert told.keys() >= {"tensors", "frames", "seconds", "peak_rss_bytes", "output"}
    assert (told["tensors"], told["frames"], told["output"]) == (4, COUNT, str(output))
    assert 0 < told["seconds"] < 60
    assert 10e6 < told["peak_rss_bytes"] < 10e9
    calibration = load_calibration(output)
    assert (len(calibration.amax), calibration.frames, calibration.source) == (4, COUNT, "clip.avi")


def test_calibrate_keeps_the_methods_name_and_the_same_histograms(shell: Shell) -> None:
    amax = {}
    for method in ("max", "percentile:99.9", "mse", "global:6.0"):
        output = shell / f"{method}.json"
        shell.json("calibrate", shell / "model.yaml", "--frames", shell / "clip.avi", "--method", method, "-o", output)
        calibration = load_calibration(output)
        assert calibration.method == method
        amax[method] = calibration.amax["image"]
        assert all(
            histogram.amax == amax["max"] for name, histogram in calibration.histograms.items() if name == "image"
        )
    assert amax["global:6.0"] == 6.0
    assert amax["percentile:99.9"] < amax["max"]


def test_build_tells_what_it_built_and_finds_it_again(shell: Shell) -> None:
    build = ["build", shell / "model.yaml", "--calibration", shell / "calibration.json", "-o", shell / "new"]
    told = shell.json(*build)
    assert told.keys() >= {"artefact", "id", "int8_macs_share", "engine_bytes", "seconds"}
    assert told["int8_macs_share"] == 1.0
    assert told["engine_bytes"] == (shell / "new" / "engine.onnx").stat().st_size
    assert told["id"] == read_artefact(shell / "new").id
    again = shell.json(*build)
    assert {**again, "seconds": 0} == {**told, "seconds": 0}
    assert shell.json(*build[:-1], shell / "elsewhere")["id"] == told["id"]


def test_build_in_float_needs_no_calibration(shell: Shell) -> None:
    told = shell.json("build", shell / "model.yaml", "--precision", "fp32", "-o", shell / "float")
    assert told["int8_macs_share"] == 0.0
    assert sorted(path.name for path in (shell / "float").iterdir()) == ["engine.onnx", "manifest.json"]


def test_infer_tells_its_pace_and_writes_a_line_per_frame(shell: Shell) -> None:
    results = shell / "new" / "results.jsonl"
    told = shell.json("infer", shell / "artefact", "--frames", shell / "clip.avi", "-o", results)
    assert told.keys() >= {"frames", "fps", "latency_ms"}
    assert told["frames"] == COUNT
    assert told["fps"] > 0
    assert 0 < told["latency_ms"]["p50"] <= told["latency_ms"]["p99"]
    lines = [strict(line + "\n") for line in results.read_text().splitlines()]
    assert [line["frame"] for line in lines] == list(range(COUNT))
    assert [round(line["ts"], 3) for line in lines] == [number / 10 for number in range(COUNT)]
    for line in lines:
        assert line.keys() == {"frame", "ts", "class", "label", "score"}
        assert SPEC["labels"][line["class"]] == line["label"]  # type: ignore[index]


def test_infer_writes_boxes_in_frame_pixels_and_raw_outputs_as_they_are(shell: Shell) -> None:
    net = Net((1, 3, 8, 8))
    box = net.constant(np.array([[[2, 1, 6, 7, 0.9, 1]]], np.float32))
    zero = net.node("Mul", net.node("ReduceMean", "image", keepdims=0), net.constant(np.zeros(1, np.float32)))
    (shell / "box.onnx").write_bytes(net.model(net.node("Add", box, zero)).SerializeToString())
    spec = shell.spec("box.yaml", path="box.onnx", task="detect", decoder="end2end", labels=["a", "b"])
    shell.json("infer", spec, "--frames", shell / "clip.avi", "-o", shell / "boxes.jsonl")  # 32 pixels wide, 8 inside
    first = json.loads((shell / "boxes.jsonl").read_text().splitlines()[0])
    assert first["detections"] == [{"class": 1, "label": "b", "score": 0.9, "box": [8.0, 4.0, 24.0, 28.0]}]

    raw = shell.spec("raw.yaml", task="raw", labels=[])
    shell.json("infer", raw, "--frames", shell / "clip.avi", "-o", shell / "raw.jsonl")
    (outputs,) = json.loads((shell / "raw.jsonl").read_text().splitlines()[0])["outputs"].values()
    assert np.shape(outputs) == (1, 5)


def test_evaluate_scores_artefacts_and_specs_alike(shell: Shell) -> None:
    for number, label in enumerate("abc"):
        images(shell / "set" / label, 40 * number, 50 * number)
    for target in ("artefact", "model.yaml"):
        told = shell.json("evaluate", shell / target, "--dataset", shell / "set")
        assert told.keys() >= {"task", "images", "top1"}
        assert (told["task"], told["images"]) == ("classify", 6)
        assert 0.0 <= told["top1"] <= 1.0


def test_evaluate_scores_detectors_by_average_precision(shell: Shell) -> None:
    net = Net((1, 3, 8, 8))
    rows = net.node("Reshape", net.conv("image", 3, 6), net.constant(np.array([1, 64, 6])))
    (shell / "boxes.onnx").write_bytes(net.model(rows).SerializeToString())
    spec = shell.spec("boxes.yaml", path="boxes.onnx", task="detect", decoder="end2end", labels=["car"])
    folder = images(shell / "set", 0, 99)
    (folder / "000.txt").write_text("0 .5 .5 .5 .5\n")
    told = shell.json("evaluate", spec, "--dataset", folder)
    assert told.keys() >= {"task", "images", "map", "map50"}
    assert (told["task"], told["images"]) == ("detect", 2)


def test_doctor_names_what_is_there_and_what_is_missing(shell: Shell) -> None:
    told = shell.json("doctor")
    assert told["ok"] is True
    found = {finding["name"]: finding for finding in told["findings"]}
    assert found["onnxruntime"]["found"] == importlib.metadata.version("onnxruntime")
    assert all(finding["ok"] or finding["remedy"] for finding in told["findings"])
    lines = shell.text("doctor").splitlines()
    assert len(lines) == len(found)
    assert any(re.match(r"ok +onnxruntime +\d", line) for line in lines)


def test_run_tells_what_the_run_was(shell: Shell) -> None:
    shell.world.config["mqtt"] = {"host": "127.0.0.1", "port": free_port()}
    done = subprocess.run(shell.world.command(), capture_output=True, text=True, timeout=60, check=True)
    told = strict(done.stdout)
    assert told.keys() >= {
        "frames", "dropped", "fps", "latency_ms", "alarms", "swaps", "fidelity", "accuracy", "artefact",
    }  # fmt: skip
    assert (told["frames"], told["dropped"], told["alarms"], told["accuracy"]) == (COUNT, {}, [], {})
    assert told["latency_ms"].keys() >= {"p50", "p99"}
    assert read_artefact(Path(told["artefact"]))
    table = subprocess.run(
        [part for part in shell.world.command("--frames", "5") if part != "--json"],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert re.search(r"frames +\S* *5\b", table)
    assert "{" not in table


@pytest.mark.broker
def test_send_follows_a_command_to_its_end(tmp_path: Path, any_broker: RealBroker) -> None:
    world = make_world(tmp_path, lambda _: 0.5, 400.0, camera={"source": "clip.avi", "speed": 10})
    world.config["mqtt"] = {"host": any_broker.host, "port": any_broker.port, "device": "board"}

    def send(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [*MODULE, "send", "board", *arguments, "--port", str(any_broker.port), "--timeout", "10"]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    with world.running():
        eventually(lambda: (world.state_dir / "current").is_symlink(), 30.0)
        done = send("status", "--json")
        assert (done.returncode, done.stderr) == (0, "")
        told = strict(done.stdout)
        assert told["status"] == "SUCCEEDED"
        assert told["result"]["engine"] == (world.state_dir / "current").resolve().name

        done = send("recalibrate", "frames=16", "method=max")
        assert done.returncode == 0, done.stdout
        statuses = [strict(line + "\n")["status"] for line in done.stdout.splitlines()]
        assert (statuses[0], statuses[-1]) == ("ACCEPTED", "SUCCEEDED")
        assert set(statuses[1:-1]) == {"IN_PROGRESS"}

        done = send("recalibrate", "method=guess", "--json")
        assert done.returncode == 1
        assert strict(done.stdout)["error"]["code"] == "threshold.method"


# ---- for people


def test_without_json_a_person_reads_names_and_values(shell: Shell) -> None:
    told = shell.text("infer", shell / "artefact", "--frames", shell / "clip.avi")
    assert re.fullmatch(r"frames +12\nfps +[\d.]+\nlatency_ms +.*\n", told)
    told = shell.text("build", shell / "model.yaml", "--precision", "fp32", "-o", shell / "float")
    assert re.search(rf"^artefact +{shell / 'float'}$", told, re.MULTILINE)


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_is_there_for_every_command(command: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert ended.value.code == 0
    told = capfd.readouterr().out
    assert told.startswith(" ".join(("usage: tared", *command)))
    for name in COMMANDS if not command else ("--json",):
        assert name in told


def test_the_version_is_the_packages(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capfd.readouterr().out == f"tared {importlib.metadata.version('tared')}\n"


def test_the_installed_script_is_this_command_line() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="tared")
    assert script.load() is main


def test_progress_is_plain_lines_on_stderr_where_that_is_no_terminal(tmp_path: Path) -> None:
    world = make_world(tmp_path, lambda _: 0.5, 60.0, mqtt={"host": "127.0.0.1", "port": free_port()})
    world.config["log_level"] = "error"
    summary, errors = world.run()
    assert summary["frames"] == 600
    assert errors
    for line in errors.splitlines():
        assert re.fullmatch(r"serving: \d+/600 [ -~]+", line)


def test_progress_is_a_bar_on_stderr_where_that_is_a_terminal(shell: Shell) -> None:
    leader, follower = os.openpty()
    infer = ["infer", str(shell / "artefact"), "--frames", str(shell / "clip.avi"), "--json"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen([*MODULE, *infer], stdout=subprocess.PIPE, stderr=follower, env=environment) as job:
        os.close(follower)
        shown = b""
        with contextlib.suppress(OSError):  # raised once the other end is closed
            while chunk := os.read(leader, 4096):
                shown += chunk
        os.close(leader)
        assert job.stdout is not None
        assert strict(job.stdout.read().decode())["frames"] == COUNT
    assert b"inferring" in shown
    assert b"12/12" in shown
    assert b"\x1b[" in shown


# ---- SRC


@pytest.fixture
def pictures(shell: Shell) -> Path:
    return images(shell / "pictures", *range(10, 110, 10))


def test_frames_may_be_a_video_a_folder_or_a_zip(shell: Shell, pictures: Path) -> None:
    packed = shell / "pictures.ZIP"
    with zipfile.ZipFile(packed, "w") as archive:
        for path in pictures.iterdir():
            archive.write(path, f"nested/{path.name}")
    amax = {}
    for source, count in ((shell / "clip.avi", COUNT), (pictures, 10), (packed, 10)):
        output = shell / "of.json"
        told = shell.json("calibrate", shell / "model.yaml", "--frames", source, "-o", output)
        assert told["frames"] == count
        amax[source] = load_calibration(output).amax
    assert amax[pictures] == amax[packed] != amax[shell / "clip.avi"]


def test_frames_may_be_a_relative_path(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shell.folder)
    assert shell.json("infer", "artefact", "--frames", "clip.avi")["frames"] == COUNT


@pytest.mark.parametrize(
    ("count", "taken"), [(5, range(10, 110, 20)), (3, (10, 50, 80)), (1, (10,)), (99, range(10, 110, 10))]
)
def test_fewer_frames_than_there_are_come_from_all_of_the_source(
    shell: Shell, pictures: Path, count: int, taken: range
) -> None:
    output = shell / "of.json"
    told = shell.json("calibrate", shell / "model.yaml", "--frames", pictures, "--count", count, "-o", output)
    assert told["frames"] == len(taken)
    histogram = load_calibration(output).histograms["image"]
    seen = {round((bin_ + 0.5) * histogram.bin_width * 255) for bin_ in np.flatnonzero(histogram.counts)}
    assert seen == set(taken)


def test_an_open_sized_model_takes_its_size_from_the_profile(shell: Shell) -> None:
    net = Net(("batch", 3, "height", "width"))
    pooled = net.node("GlobalAveragePool", net.conv("image", 3, 5))
    (shell / "open.onnx").write_bytes(net.model(net.node("Flatten", pooled)).SerializeToString())
    shapes = {"min": [1, 3, 8, 8], "opt": [1, 3, 24, 16], "max": [4, 3, 32, 32]}
    spec = shell.spec("open.yaml", path="open.onnx", profiles=[{"image": shapes}])
    output = shell / "of.json"
    shell.json("calibrate", spec, "--frames", shell / "clip.avi", "-o", output)
    assert load_calibration(output).histograms["image"].total == COUNT * 3 * 24 * 16
