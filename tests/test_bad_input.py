"""Bad input through the real command line: one clear error with its remedy, exit code 2, and nothing lost."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import psutil
import pytest
import yaml
from brokers import RealBroker, Watcher, eventually, free_port
from onnx import ModelProto, TensorProto, helper
from worlds import SPEC, World, make_world
from zoo import Net, residual_net

from agent.camera import parse_source, source_length
from agent.cli import main
from agent.messages import CommandResult
from agent.mqtt import MqttClient
from agent.topics import Topics
from engines.onnxruntime_backend import OnnxRuntimeBackend
from engines.store import Store
from fleet.operator import new_command, send

ERROR = re.compile(r"error: (?P<code>[a-z_-]+\.[a-z_-]+): .+; expected .+; .+", re.DOTALL)
TOPICS = Topics("default", "board")
CONFIG: dict[str, Any] = {"model": "model.yaml", "camera": {"source": "clip.avi"}, "state_dir": "state"}


def tared(*arguments: object, file_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    """The command line as a process of its own; no file may grow past `file_bytes`, as on a disk that is full."""

    def full_disk() -> None:
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

    command = [sys.executable, "-m", "agent.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, preexec_fn=full_disk)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Bench:
    """A folder with everything good: a model, its spec, a clip, a calibration, an artefact, results."""

    def __init__(self, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capfd = capfd

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def refuses(self, *arguments: object, lines: int = 1) -> str:
        """Run a command that must fail as all must: the error's text. Every file is as it was, and none is new."""
        before = contents(self.folder)
        code = main([str(argument) for argument in arguments])
        output, errors = self.heard()
        assert contents(self.folder) == before
        return self.error(code, output, errors, lines)

    def heard(self) -> tuple[str, str]:
        """What was said on stdout and stderr since the last look."""
        heard = self._capfd.readouterr()
        return heard.out, heard.err

    @staticmethod
    def error(code: int, output: str, errors: str, lines: int = 1) -> str:
        assert (code, output) == (2, ""), errors
        assert ERROR.fullmatch(errors.rstrip("\n")), errors
        assert len(errors.splitlines()) == lines, errors
        return errors.removeprefix("error: ").rstrip("\n")

    def spec(self, name: str, model: ModelProto | bytes, **changes: Any) -> Path:
        """NAME.yaml for a model saved as NAME.onnx."""
        content = model if isinstance(model, bytes) else model.SerializeToString()
        (self / f"{name}.onnx").write_bytes(content)
        return self.write(f"{name}.yaml", {**SPEC, "path": f"{name}.onnx", **changes})

    def write(self, name: str, content: dict[str, Any]) -> Path:
        (self / name).write_text(yaml.safe_dump(content))
        return self / name

    def images(self, name: str, *images: np.ndarray) -> Path:
        (self / name).mkdir(parents=True)
        for number, image in enumerate(images):
            cv2.imwrite(str(self / name / f"{number}.png"), image)
        return self / name


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_world(tmp_path_factory.mktemp("stock") / "world", lambda _: 0.5, 1.2).folder
    model, clip, calibration = folder / "model.yaml", folder / "clip.avi", folder / "calibration.json"
    assert source_length(parse_source(str(clip))) == 12
    steps: list[list[object]] = [
        ["calibrate", model, "--frames", clip, "-o", calibration],
        ["build", model, "--calibration", calibration, "-o", folder / "artefact"],
        ["infer", folder / "artefact", "--frames", clip, "-o", folder / "results.jsonl"],
    ]
    for step in steps:
        assert main([str(part) for part in step]) == 0
    return folder


@pytest.fixture
def bench(stock: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Bench:
    shutil.copytree(stock, tmp_path / "bench")
    return Bench(tmp_path / "bench", capfd)


def calibrate(bench: Bench, model: object = "model.yaml", frames: object = "clip.avi") -> list[object]:
    return ["calibrate", bench / str(model), "--frames", bench / str(frames), "-o", bench / "calibration.json"]


def build(bench: Bench, model: object = "model.yaml", *more: object) -> list[object]:
    calibration = bench / "calibration.json"
    return ["build", bench / str(model), "--calibration", calibration, "-o", bench / "new", *more]


def picture(value: int = 128, size: int = 8) -> np.ndarray:
    return np.full((size, size, 3), value, np.uint8)


# ---- models


def test_a_missing_model_is_named(bench: Bench) -> None:
    (bench / "model.onnx").unlink()
    for command in (calibrate(bench), build(bench), ["evaluate", bench / "model.yaml", "--dataset", bench.folder]):
        assert re.match(r"model\.missing: .*/model\.onnx: No such file", bench.refuses(*command))
    assert re.match(r"config\.missing: no file .*gone\.yaml", bench.refuses(*calibrate(bench, "gone.yaml")))


def test_an_empty_model_is_named(bench: Bench) -> None:
    spec = bench.spec("empty", b"")
    for command in (calibrate(bench, spec), build(bench, spec)):
        assert re.match(r"model\.empty: .*/empty\.onnx: 0 bytes", bench.refuses(*command))


def test_a_model_cut_short_anywhere_is_refused(bench: Bench) -> None:
    whole = residual_net().SerializeToString()
    for length in [*range(1, len(whole), 97), *range(len(whole) - 24, len(whole))]:
        spec = bench.spec("cut", whole[:length])
        assert re.match(r"model\.(unreadable|invalid): .*/cut\.onnx", bench.refuses(*calibrate(bench, spec)))


@pytest.mark.parametrize("content", [b"# a model, honestly\n" * 40, b"\x89PNG\r\n\x1a\n" * 30, b"\x00" * 500])
def test_a_file_that_is_no_model_is_named(bench: Bench, content: bytes) -> None:
    spec = bench.spec("text", content)
    assert re.match(r"model\.unreadable: .*/text\.onnx", bench.refuses(*build(bench, spec)))


def test_what_the_onnx_checker_refuses_is_one_line(bench: Bench) -> None:
    model = residual_net()
    model.graph.node[1].input[0] = "nowhere"
    said = bench.refuses(*calibrate(bench, bench.spec("loose", model)))
    assert said.startswith("model.invalid")
    assert "'nowhere'" in said


def other_input(shape: list[int | str], elem_type: int = TensorProto.FLOAT, count: int = 1) -> ModelProto:
    inputs = [helper.make_tensor_value_info(f"input{i}", elem_type, shape) for i in range(count)]
    output = helper.make_tensor_value_info("output", elem_type, shape)
    graph = helper.make_graph([helper.make_node("Neg", ["input0"], ["output"])], "net", inputs, [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


@pytest.mark.parametrize(
    ("model", "found"),
    [
        (other_input([1, 10]), "'input0': float [1, 10]"),
        (other_input([1, 3, 8, 8], TensorProto.INT64), "int64 [1, 3, 8, 8]"),
        (other_input([1, 8, 8, 3]), "[1, 8, 8, 3]"),
        (other_input([1, 3, 8, 8], count=2), "2 inputs"),
    ],
    ids=["no picture", "integers", "channels last", "two inputs"],
)
def test_a_model_whose_input_is_no_image_is_refused(bench: Bench, model: ModelProto, found: str) -> None:
    said = bench.refuses(*calibrate(bench, bench.spec("other", model)))
    assert said.startswith("model.input: ")
    assert found in said


def test_an_unsupported_operator_is_named(bench: Bench) -> None:
    model = residual_net()
    model.graph.node[3].op_type, model.graph.node[3].domain = "Frobnicate", "acme"
    model.opset_import.append(helper.make_opsetid("acme", 1))
    for command in (calibrate(bench, spec := bench.spec("odd", model)), build(bench, spec)):
        said = bench.refuses(*command)
        assert said.startswith("model.operator: operator acme.Frobnicate in node 'Relu_t3'")


def test_an_operator_that_the_runtime_lacks_is_named(bench: Bench) -> None:
    net = Net((1, 3, 8, 8))
    wide = net.node("Cast", "image", to=TensorProto.BFLOAT16)
    model = net.model(net.node("Cast", net.node("Softsign", wide), to=TensorProto.FLOAT), opset=22, ir_version=10)
    said = bench.refuses(*calibrate(bench, bench.spec("odd", model)))
    assert said.startswith("engine.unsupported: ")
    assert "Softsign" in said


def external(model: ModelProto, location: str) -> ModelProto:
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=location)
    return model


@pytest.mark.parametrize("location", ["../weights.bin", "/etc/hostname", "a/../../weights.bin", "link.bin", "gone.bin"])
def test_external_data_outside_the_models_folder_is_not_read(bench: Bench, location: str) -> None:
    (bench.folder.parent / "weights.bin").write_bytes(bytes(10_000))
    (bench / "link.bin").symlink_to(bench.folder.parent / "weights.bin")
    spec = bench.spec("far", external(residual_net(), location))
    said = bench.refuses(*calibrate(bench, spec))
    assert said.startswith("model.external-data: ")
    assert f"'{location}'" in said
    assert "tensor 'c0'" in said


def test_external_data_cut_short_is_refused(bench: Bench) -> None:
    (bench / "short.bin").write_bytes(bytes(7))
    assert bench.refuses(*calibrate(bench, bench.spec("far", external(residual_net(), "short.bin")))).startswith(
        "model."
    )


# ---- activations and calibrations


def classifier(stem: Callable[[Net], str]) -> ModelProto:
    """A stem, then a convolution and the pooled scores of five classes."""
    net = Net((1, 3, 8, 8))
    return net.model(net.node("Flatten", net.node("GlobalAveragePool", net.conv(stem(net), 3, 5))))


@pytest.mark.parametrize(
    "stem",
    [lambda net: net.node("Log", "image"), lambda net: net.node("Div", "image", "image")],
    ids=["infinite", "no numbers"],
)
def test_non_finite_activations_are_counted_and_their_tensor_is_named(bench: Bench, stem: Callable[[Net], str]) -> None:
    dotted = picture()
    dotted[2, 3] = dotted[7, 7] = 0
    bench.images("dotted", picture(), dotted, dotted)
    said = bench.refuses(*calibrate(bench, bench.spec("log", classifier(stem)), "dotted"))
    assert said.startswith("calibration.nonfinite: NaN or infinite values in 1 of 1 tensors")
    assert "'t0' with 12; " in said


def test_a_weight_that_is_no_number_is_named(bench: Bench) -> None:
    model = residual_net()
    gemm = next(tensor for tensor in model.graph.initializer if list(tensor.dims) == [5, 4])
    gemm.CopyFrom(onnx.numpy_helper.from_array(np.full((5, 4), np.nan, np.float32), gemm.name))
    spec = bench.spec("nan", model)
    assert main([str(part) for part in [*calibrate(bench, spec)[:-1], bench / "nan.json"]]) == 0
    bench.heard()
    said = bench.refuses("build", spec, "--calibration", bench / "nan.json", "-o", bench / "new")
    assert said.startswith(f"scale.amax: amax nan for tensor '{gemm.name}'")


def test_a_model_with_nothing_to_quantise_says_so(bench: Bench) -> None:
    net = Net((1, 3, 8, 8))
    spec = bench.spec("bare", net.model(net.node("Relu", "image")), task="raw")
    assert bench.refuses(*calibrate(bench, spec)).startswith("calibration.nothing: ")


def test_a_calibration_of_another_model_is_refused(bench: Bench) -> None:
    spec = bench.spec("twin", classifier(lambda _: "image"))
    said = bench.refuses(*build(bench, spec))
    mine = json.loads((bench / "calibration.json").read_text())["model_sha256"]
    assert said.startswith(f"calibration.model: a calibration of model {mine[:12]}; expected one of twin.onnx, ")


@pytest.mark.parametrize("name", ["calibration.json", "calibration.npz"])
@pytest.mark.parametrize(
    "damage",
    [lambda whole: whole[: len(whole) // 2], lambda _: b"", lambda _: b"text\n" * 99, None],
    ids=["cut", "empty", "text", "missing"],
)
def test_a_damaged_calibration_is_refused(bench: Bench, name: str, damage: Callable[[bytes], bytes] | None) -> None:
    whole = (bench / name).read_bytes()
    (bench / name).unlink()
    if damage is not None:
        (bench / name).write_bytes(damage(whole))
    assert bench.refuses(*build(bench)).startswith(f"calibration.unreadable: {bench.folder}/calibration.")


def test_an_unknown_method_is_refused_with_the_known_ones(bench: Bench) -> None:
    for method in ("guess", "percentile:101", "percentile:ninety", "global:-1", "max:3"):
        said = bench.refuses(*calibrate(bench), "--method", method)
        assert said.startswith(f"threshold.method: method '{method}'; expected entropy, percentile:P")


# ---- frames


def empty_video(path: Path) -> None:
    cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (64, 48)).release()


def climbing_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../climbs.png", cv2.imencode(".png", picture())[1].tobytes())


FRAMES: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone.mp4": (lambda _: None, r"camera\.missing: no .*/gone\.mp4"),
    "nothing.mp4": (lambda path: path.touch(), r"camera\.open: .*/nothing\.mp4 is not readable as video"),
    "text.mp4": (lambda path: path.write_text("no video\n" * 99), r"camera\.open: .*/text\.mp4 is not readable"),
    "header.avi": (empty_video, r"camera\.(open|empty): .*header\.avi"),
    "bare": (lambda path: path.mkdir(), r"images\.none: no image among 0 files in .*/bare"),
    "climbs.zip": (climbing_zip, r"images\.zip: .*/climbs\.zip whose member '\.\./climbs\.png' climbs out"),
    "text.zip": (lambda path: path.write_text("no zip"), r"images\.zip: .*/text\.zip that does not open"),
}


@pytest.mark.parametrize("name", FRAMES)
def test_frames_that_cannot_be_read_are_named(bench: Bench, name: str) -> None:
    make, pattern = FRAMES[name]
    make(bench / name)
    assert re.match(pattern, bench.refuses(*calibrate(bench, frames=name)))
    infer = ["infer", bench / "artefact", "--frames", bench / name, "-o", bench / "results.jsonl"]
    assert re.match(pattern, bench.refuses(*infer))
    if pattern.startswith("images"):
        assert re.match(pattern, bench.refuses("evaluate", bench / "artefact", "--dataset", bench / name))
    assert not (bench.folder.parent / "climbs.png").exists()


def test_an_image_that_is_none_is_named_among_good_ones(bench: Bench) -> None:
    (bench.images("mixed", picture(), picture()) / "1.png").write_bytes(b"no image")
    assert bench.refuses(*calibrate(bench, frames="mixed")).startswith("images.unreadable: 1.png in ")


@pytest.mark.parametrize("source", ["csi:front", "v4l2:/dev/video99", "rtsp://127.0.0.1:1/nothing"])
def test_cameras_that_are_not_there_are_named(bench: Bench, source: str) -> None:
    command = ["calibrate", bench / "model.yaml", "--frames", source, "-o", bench / "calibration.json"]
    said = bench.refuses(*command)
    assert said.startswith("camera.")
    assert source.partition(":")[2] in said


# ---- MODEL.yaml and config.yaml


def test_all_errors_of_a_model_spec_are_listed_at_once(bench: Bench) -> None:
    wrong = {**SPEC, "task": "guess", "colour": "bgr", "score_threshold": 7, "input": {"std": [0], "pad": "grey"}}
    said = bench.refuses(*calibrate(bench, bench.write("wrong.yaml", wrong)), lines=7)
    assert said.startswith(f"config.invalid: 5 errors in {bench.folder}/wrong.yaml:\n")
    assert [line.split(":")[0] for line in said.splitlines()[1:-1]] == [
        "  task", "  input.pad", "  input.std", "  score_threshold", "  colour",
    ]  # fmt: skip
    assert "  input.pad: expected integer, got 'grey'" in said


def test_all_errors_of_a_configuration_are_listed_at_once(bench: Bench) -> None:
    config = {
        "model": "model.yaml",
        "camera": {"source": "clip.avi", "fps": 30, "speed": "fast"},
        "observe": {"held_out": 1, "period_s": 0},
        "drift": {"tolerance_db": 12.0, "block_s": float("inf"), "false_alarms_per_30d": float("nan")},
        "calibration": {"method": "guess"},
        "mqtt": {"device": "a/b", "port": 99999, "host": ""},
        "threads": None,
        "log_level": "loud",
        "modle": {},
    }
    said = bench.refuses("run", "-c", bench.write("bad.yaml", config), lines=16)
    assert said.startswith(f"config.invalid: 14 errors in {bench.folder}/bad.yaml:\n")
    lines = {line.strip().partition(": ")[0]: line.strip().partition(": ")[2] for line in said.splitlines()[1:-1]}
    assert lines.keys() == {
        "camera.fps", "camera.speed", "observe.held_out", "observe.period_s", "drift.tolerance_db", "drift.block_s",
        "drift.false_alarms_per_30d", "calibration.method", "mqtt.device", "mqtt.port", "mqtt.host", "threads",
        "log_level", "modle",
    }  # fmt: skip
    assert lines["camera.fps"] == lines["modle"] == "unknown key"
    assert lines["camera.speed"] == "expected number, got 'fast'"
    assert lines["threads"] == "expected integer, got None"
    assert lines["observe.held_out"] == "expected greater than or equal to 4, got 1"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "config.unreadable"),
        ("- a\n- list\n", "config.unreadable"),
        ("model: [unclosed\n", "config.unreadable"),
        ("\x00\x01", "config.unreadable"),
        ("model: nowhere.yaml\ncamera: {source: clip.avi}\n", "config.missing"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(bench: Bench, text: str, code: str) -> None:
    (bench / "config.yaml").write_text(text)
    assert bench.refuses("run", "-c", bench / "config.yaml").startswith(f"{code}: ")


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"camera": {"source": "gone.mp4"}}, "camera.missing"),
        ({"camera": {"source": "model.yaml"}}, "camera.open"),
        ({"camera": {"source": "clip.avi", "labels": "gone.jsonl"}}, "labels.unreadable"),
        ({"camera": {"source": "clip.avi", "labels": "model.yaml"}}, "labels.unreadable"),
        ({"mqtt": {"host": "127.0.0.1", "password_file": "gone.txt"}}, "mqtt.password"),
        ({"state_dir": "model.yaml"}, "state.unwritable"),
        ({"backend": "magic"}, "backend.missing"),
    ],
)
def test_a_daemon_that_cannot_serve_says_why_and_ends(bench: Bench, changes: dict[str, Any], code: str) -> None:
    config = {**CONFIG, "log_level": "error", **changes}
    done = tared("run", "-c", bench.write("config.yaml", config))
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "Traceback" not in done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert said.startswith(f"error: {code}: ")


# ---- arguments


@pytest.mark.parametrize("name", ["tensorrt", "magic"])
def test_a_missing_runtime_is_refused_by_every_command(bench: Bench, name: str) -> None:
    commands: list[list[object]] = [
        calibrate(bench),
        build(bench),
        ["infer", bench / "artefact", "--frames", bench / "clip.avi"],
        ["evaluate", bench / "artefact", "--dataset", bench.folder],
    ]
    for command in commands:
        assert bench.refuses(*command, "--backend", name).startswith(f"backend.missing: backend '{name}'; expected ")
    done = tared("run", "-c", bench.write("config.yaml", CONFIG), "--backend", name)
    assert Bench.error(done.returncode, done.stdout, done.stderr).startswith("backend.missing: ")


def test_a_precision_that_the_runtime_lacks_is_refused(bench: Bench) -> None:
    said = bench.refuses(*build(bench, "model.yaml", "--precision", "fp16"))
    assert said.startswith("backend.precision: precision fp16 on onnxruntime; expected int8 or fp32; ")


def test_int8_without_a_calibration_is_refused(bench: Bench) -> None:
    said = bench.refuses("build", bench / "model.yaml", "-o", bench / "new")
    assert said.startswith("calibration.missing: ")
    assert "tared calibrate" in said


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["fly"],
        ["calibrate"],
        ["calibrate", "m.yaml", "--frames", "x", "-o", "c.json", "--count", "0"],
        ["calibrate", "m.yaml", "--frames", "x", "-o", "c.json", "--count", "many"],
        ["build", "m.yaml", "-o", "a", "--precision", "int4"],
        ["run", "--wings", "2"],
        ["send", "board", "status", "--port", "70000"],
        ["send", "board", "status", "--timeout", "0"],
    ],
    ids=" ".join,
)
def test_arguments_that_cannot_be_are_refused_in_one_line(bench: Bench, arguments: list[str]) -> None:
    said = bench.refuses(*arguments)
    assert said.startswith("cli.arguments: ")
    assert "--help'" in said


# ---- outputs


def test_an_output_that_holds_something_else_is_left_alone(bench: Bench) -> None:
    bench.images("holiday", picture())
    for name in ("results.jsonl", "holiday", "artefact"):
        command = ["build", bench / "model.yaml", "--precision", "fp32", "-o", bench / name]
        assert bench.refuses(*command).startswith(f"artefact.exists: {bench.folder}/{name} is there already")


@pytest.mark.parametrize("place", ["clip.avi/below", "/proc/nowhere/out"])
def test_an_output_that_cannot_be_written_is_named(bench: Bench, place: str) -> None:
    output = bench.folder / place
    said = bench.refuses("infer", bench / "artefact", "--frames", bench / "clip.avi", "-o", output)
    assert said.startswith(f"results.write: {output}: ")
    said = bench.refuses(*calibrate(bench)[:-1], f"{output}.json")
    assert said.startswith(f"calibration.write: {output}.json: ")
    assert bench.refuses(*build(bench)[:-1], output).startswith(f"artefact.write: {output}: ")


def test_an_output_that_is_a_folder_is_named(bench: Bench) -> None:
    folder = bench.images("holiday.json", picture())
    said = bench.refuses("infer", bench / "artefact", "--frames", bench / "clip.avi", "-o", folder)
    assert said.startswith(f"results.write: {folder}: ")
    assert bench.refuses(*calibrate(bench)[:-1], folder).startswith(f"calibration.write: {folder}: ")


def test_a_calibration_is_named_json_since_its_histograms_take_the_name_beside_it(bench: Bench) -> None:
    for name in ("calibration.npz", "calibration", "night.v2"):
        command = [*calibrate(bench)[:-1], bench / name]
        assert bench.refuses(*command).startswith(f"calibration.write: {bench.folder}/{name}: ")


OUTPUTS: dict[str, tuple[Callable[[Bench, Path], list[object]], list[str]]] = {
    "calibration.json": (lambda bench, output: [*calibrate(bench)[:-1], output], ["calibration.write"]),
    "artefact": (
        lambda bench, output: [*build(bench)[:-1], output],
        ["engine.write", "calibration.write", "artefact.write"],
    ),
    "results.jsonl": (
        lambda bench, output: ["infer", bench / "artefact", "--frames", bench / "clip.avi", "-o", output],
        ["results.write"],
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_file_that_grows_too_large_is_an_error_and_leaves_no_part(bench: Bench, name: str) -> None:
    command, codes = OUTPUTS[name]
    before = contents(bench.folder)
    done = tared(*command(bench, bench / ("new" if name == "artefact" else name)), file_bytes=500)
    said = Bench.error(done.returncode, done.stdout, done.stderr)
    assert said.partition(": ")[0] in codes
    assert "File too large" in said
    assert contents(bench.folder) == before


@pytest.mark.parametrize("name", OUTPUTS)
def test_wherever_the_disk_fills_up_what_was_there_stays_and_nothing_is_added(bench: Bench, name: str) -> None:
    command, codes = OUTPUTS[name]
    refusals = 0
    with small_file_system(bench / "disk") as disk:
        if name != "artefact":
            shutil.copy(bench / name, disk)
            shutil.copy(bench / "calibration.npz", disk)
        fill(disk / "ballast")
        while True:
            before = contents(disk)
            code = main([str(argument) for argument in command(bench, disk / name)])
            output, errors = bench.heard()
            if code == 0:
                break
            said = bench.error(code, output, errors)
            assert re.match(rf"({'|'.join(codes)}): .*: No space left on device; ", said)
            assert contents(disk) == before
            refusals += 1
            with (disk / "ballast").open("r+b") as ballast:
                ballast.truncate((disk / "ballast").stat().st_size - 4096)
    assert refusals > 0


# ---- artefacts and data sets


@pytest.mark.parametrize("name", ["manifest.json", "engine.onnx", "calibration.json", "calibration.npz", "plan.json"])
def test_a_damaged_artefact_is_refused_by_name_before_a_runtime_sees_it(
    bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OnnxRuntimeBackend, "load", lambda *_: pytest.fail("the runtime saw it"))
    file = bench / "artefact" / name
    whole = file.read_bytes()
    commands: list[list[object]] = [
        ["infer", bench / "artefact", "--frames", bench / "clip.avi", "-o", bench / "results.jsonl"],
        ["evaluate", bench / "artefact", "--dataset", bench.folder],
    ]
    middle = len(whole) // 2
    for damaged in (whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :], whole[:-1], b""):
        file.write_bytes(damaged)
        for command in commands:
            assert bench.refuses(*command).startswith(f"artefact.damaged: {file} is not what was written")


@pytest.mark.parametrize(
    ("name", "code"), [("nowhere", "config.missing"), (".", "artefact.missing"), ("clip.avi", "config.unreadable")]
)
def test_what_is_no_artefact_is_refused(bench: Bench, name: str, code: str) -> None:
    for command in (
        ["infer", bench / name, "--frames", bench / "clip.avi"],
        ["evaluate", bench / name, "--dataset", "x"],
    ):
        assert bench.refuses(*command).startswith(f"{code}: ")


def test_a_data_set_whose_folders_are_not_the_models_classes_is_refused(bench: Bench) -> None:
    bench.images("set/a", picture())
    bench.images("set/zebra", picture())
    evaluate = ["evaluate", bench / "artefact", "--dataset", bench / "set"]
    assert bench.refuses(*evaluate).startswith(f"dataset.label: images in folder 'zebra' of {bench.folder}/set")
    unlabelled = bench.write("unlabelled.yaml", {**SPEC, "labels": []})
    said = bench.refuses("evaluate", unlabelled, "--dataset", bench / "set")
    assert said.startswith("dataset.label: 2 folders for 5 classes of the model")
    said = bench.refuses("evaluate", bench / "artefact", "--dataset", bench / "gone")
    assert said.startswith("images.missing: ")


@pytest.mark.parametrize(
    ("labels", "code"),
    [
        (None, "dataset.label"),
        ("7 .5 .5 .1 .1\n", "dataset.label"),
        ("0 .5 .5 .1\n", "dataset.label"),
        ("0 .5 .5 9 .1\n", "dataset.label"),
        ("", "dataset.empty"),
    ],
    ids=["none", "unknown class", "no box", "outside", "no object"],
)
def test_boxes_that_are_none_are_refused(bench: Bench, labels: str | None, code: str) -> None:
    net = Net((1, 3, 8, 8))
    rows = net.node("Reshape", net.conv("image", 3, 6), net.constant(np.array([1, 64, 6])))
    spec = bench.spec("boxes", net.model(rows), task="detect", decoder="end2end", labels=["car"])
    folder = bench.images("set", picture())
    if labels is not None:
        (folder / "0.txt").write_text(labels)
    assert bench.refuses("evaluate", spec, "--dataset", folder).startswith(f"{code}: ")


# ---- interruption


def slow_job(bench: Bench, command: str) -> list[object]:
    """A job of many seconds: a larger network over three thousand frames."""
    net = Net((1, 3, 128, 128))
    pooled = net.node("GlobalAveragePool", net.conv(net.node("Relu", net.conv("image", 3, 48)), 48, 5))
    spec = bench.spec("slow", net.model(net.node("Flatten", pooled)))
    writer = cv2.VideoWriter(str(bench / "long.avi"), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (32, 32))
    for _ in range(3000):
        writer.write(picture(128, 32))
    writer.release()
    if command == "calibrate":
        return [*calibrate(bench, spec, "long.avi"), "--count", "3000"]
    return ["infer", spec, "--frames", bench / "long.avi", "-o", bench / "results.jsonl"]


@pytest.mark.parametrize("command", ["calibrate", "infer"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_job_ends_with_one_line_and_leaves_no_trace(
    bench: Bench, command: str, number: signal.Signals
) -> None:
    job = slow_job(bench, command)
    before = contents(bench.folder)
    process = subprocess.Popen(
        [sys.executable, "-m", "agent.cli", *map(str, job)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    eventually(lambda: any(file.path.endswith("long.avi") for file in psutil.Process(process.pid).open_files()))
    process.send_signal(number)
    output, errors = process.communicate(timeout=10.0)
    assert (process.returncode, output, errors) == (130, "", "interrupted\n")
    assert contents(bench.folder) == before


# ---- the operator and the daemon


def test_a_broker_that_is_not_there_is_an_error_for_the_operator() -> None:
    port = free_port()
    done = tared("send", "board", "status", "--port", port, "--timeout", "0.5")
    said = Bench.error(done.returncode, done.stdout, done.stderr)
    assert said.startswith(f"broker.unreachable: no connection to 127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["board", "fly"], "command.unknown_op"),
        (["board", "recalibrate", "frames=many"], "command.args"),
        (["board", "recalibrate", "wings=2"], "command.args"),
        (["bo/ard", "status"], "mqtt.name"),
    ],
)
def test_a_command_that_no_device_would_take_is_not_sent(arguments: list[str], code: str) -> None:
    done = tared("send", *arguments)
    assert Bench.error(done.returncode, done.stdout, done.stderr).startswith(f"{code}: ")


@pytest.mark.broker
def test_a_device_that_does_not_answer_is_named(any_broker: RealBroker) -> None:
    done = tared("send", "nobody", "status", "--port", any_broker.port, "--timeout", "1")
    said = Bench.error(done.returncode, done.stdout, done.stderr)
    assert said.startswith("command.no_answer: no answer from default/nobody")


def night(folder: Path, broker: RealBroker | None, **changes: Any) -> World:
    mqtt = {"host": broker.host, "port": broker.port} if broker else {"host": "127.0.0.1", "port": free_port()}
    changes = {"camera": {"source": "clip.avi", "speed": 10}, **changes}
    return make_world(folder, lambda _: 0.5, 600.0, mqtt=mqtt, **changes)


def results(broker: RealBroker, op: str, **arguments: str) -> list[CommandResult]:
    return list(send(broker.endpoint, TOPICS, new_command(op, arguments, time.time()), silence_s=20.0))


def frames_served(broker: RealBroker) -> int:
    last = results(broker, "status")[-1].result
    assert last is not None
    frames = last["frames"]
    assert isinstance(frames, int)
    return frames


def command(**changes: object) -> bytes:
    fields = {"id": "c", "op": "status", "args": {}, "issued": time.time(), "expires": time.time() + 60, "version": 1}
    return json.dumps({**fields, **changes}).encode()


@pytest.mark.broker
def test_commands_that_cannot_be_carried_out_are_rejected_and_the_video_goes_on(
    tmp_path: Path, any_broker: RealBroker
) -> None:
    bad = {
        "cut": (b'{"id": "cut", "op": "sta', "message.malformed"),
        "list": (b'[{"id": "list"}]', "message.not_object"),
        "op": (command(id="op", op="self-destruct"), "command.unknown_op"),
        "no-op": (command(id="no-op", op=None), "command.unknown_op"),
        "args": (command(id="args", op="recalibrate", args={"frames": "many"}), "command.args"),
        "key": (command(id="key", op="recalibrate", args={"wings": 2}), "command.args"),
        "time": (command(id="time", expires="tomorrow"), "command.invalid"),
        "huge": (command(id="huge", padding="x" * 70_000), "message.too_large"),
    }
    world = night(tmp_path, any_broker)
    with Watcher(any_broker.endpoint) as watcher, world.running() as process:
        before = frames_served(any_broker)
        with MqttClient(any_broker.endpoint, "vandal") as vandal:
            assert vandal.wait_connected(10.0)
            vandal.publish(TOPICS.command, b"\xff\x00 nonsense without an id")
            for payload, _ in bad.values():
                vandal.publish(TOPICS.command, payload)
            for name, (_, code) in bad.items():
                answer = watcher.expect(TOPICS.result(name))
                assert (answer["status"], answer["error"]["code"]) == ("REJECTED", code)
        assert frames_served(any_broker) > before
        assert process.poll() is None


def test_activations_that_are_no_numbers_cost_the_job_and_not_the_video(tmp_path: Path) -> None:
    world = make_world(
        tmp_path, lambda ts: 0.0 if ts > 2.0 else 0.5, 20.0, mqtt={"host": "127.0.0.1", "port": free_port()}
    )
    onnx.save(classifier(lambda net: net.node("Log", "image")), tmp_path / "model.onnx")
    summary, errors = world.run()
    assert summary["frames"] == 200
    assert summary["swaps"] == []
    assert "code='observer.nonfinite' message=\"NaN or infinite values in ['t0']\"" in errors
    assert "code='calibration.nonfinite'" in errors


def current_id(world: World) -> str | None:
    artefact = Store(world.state_dir).read("current")
    return artefact.id if artefact else None


def recalibrate_while_full(
    world: World, broker: RealBroker, full: Callable[[], object], room: Callable[[], object]
) -> None:
    """A recalibration that finds the disk full fails; the video goes on, and with room again the next one succeeds."""
    eventually(lambda: current_id(world) is not None, 30.0)
    serving = current_id(world)
    full()
    before = contents(world.state_dir / "artefacts")
    last = results(broker, "recalibrate", frames="16", method="max")[-1]
    assert last.status == "FAILED"
    assert last.error is not None
    assert last.error.code in ("engine.write", "artefact.write", "calibration.write")
    assert contents(world.state_dir / "artefacts") == before
    assert current_id(world) == serving
    served = frames_served(broker)
    eventually(lambda: frames_served(broker) > served)
    room()
    last = results(broker, "recalibrate", frames="16", method="max")[-1]
    assert last.status == "SUCCEEDED", last
    assert current_id(world) != serving


@pytest.mark.broker
def test_a_child_that_finds_the_disk_full_costs_the_job_and_the_engine_serves_on(
    tmp_path: Path, any_broker: RealBroker
) -> None:
    world = night(tmp_path, any_broker)
    with world.running() as process, ThreadPoolExecutor(1) as pool:

        def limit_child() -> None:
            eventually(lambda: bool(psutil.Process(process.pid).children()), 30.0)
            (child,) = psutil.Process(process.pid).children()
            resource.prlimit(child.pid, resource.RLIMIT_FSIZE, (700, 700))

        limits: list[Future[None]] = []
        recalibrate_while_full(
            world, any_broker, full=lambda: limits.append(pool.submit(limit_child)), room=lambda: limits[0].result(5.0)
        )


@pytest.mark.broker
def test_a_full_file_system_costs_the_job_and_the_engine_serves_on(tmp_path: Path, any_broker: RealBroker) -> None:
    world = night(tmp_path, any_broker)
    with small_file_system(world.state_dir / "artefacts") as disk, world.running():
        recalibrate_while_full(world, any_broker, full=lambda: fill(disk / "ballast"), room=(disk / "ballast").unlink)


def test_a_daemon_that_starts_on_a_full_disk_serves_the_engine_that_was_current(tmp_path: Path) -> None:
    world = make_world(tmp_path, lambda _: 0.5, 20.0, mqtt={"host": "127.0.0.1", "port": free_port()})
    with small_file_system(world.state_dir) as disk:
        (swap,) = world.run()[0]["swaps"]
        fill(disk / "ballast")
        summary, errors = world.run("--frames", "20")
        assert (summary["frames"], summary["swaps"]) == (20, [])
        assert summary["artefact"].endswith(swap["artefact"])
        assert "No space left on device" in errors


@contextlib.contextmanager
def small_file_system(place: Path) -> Iterator[Path]:
    """A file system of half a megabyte in memory. Skips where it may not be mounted."""
    place.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tared-test", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can be mounted by root alone, and not in every container")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
