"""A small world with everything good in it, the command line run over it, and what it says."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import yaml
from onnx import ModelProto
from worlds import SPEC, World, make_world
from zoo import Net

from agent.camera.reader import source_length
from agent.camera.source import parse_source
from fleet.cli.main import main

CLIP_FRAMES = 12  # of clip.avi
ERROR = re.compile(r"error: (?P<code>[a-z_-]+\.[a-z_-]+): .+; expected .+; .+", re.DOTALL)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def strict(text: str) -> dict[str, Any]:
    """The one JSON object of a text; NaN is none."""

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    document = json.loads(text, parse_constant=no_constant)
    assert isinstance(document, dict)
    assert text.count("\n") == 1
    return document


def without_progress(errors: str) -> str:
    """The stderr of a command without lines of progress, which only a slow machine prints."""
    return re.sub(r"^\w+: \d+/\d+.*\n", "", errors, flags=re.MULTILINE)


class Bench:
    """A folder with everything good: a model, its spec, a clip, a calibration, an artefact, results."""

    def __init__(self, world: World, capfd: pytest.CaptureFixture[str]) -> None:
        self.world = world
        self.folder = world.folder
        self._capfd = capfd

    def __truediv__(self, name: str) -> Path:
        return self.folder / name

    def json(self, *arguments: object) -> dict[str, Any]:
        """The object a command prints with --json; on stderr it says its check, and its progress if it takes long."""
        return self.json_and_check(*arguments)[0]

    def json_and_check(self, *arguments: object) -> tuple[dict[str, Any], str]:
        """The object that a command prints with --json, and its check; empty for commands without one."""
        assert main([*map(str, arguments), "--json"]) == 0
        output, errors = self.captured()
        check = without_progress(errors)
        assert re.fullmatch(r"(check: .+\n)?", check)
        return strict(output), check.rstrip("\n")

    def text(self, *arguments: object) -> str:
        """The text that a command prints for people."""
        assert main([str(argument) for argument in arguments]) == 0
        return self.captured()[0]

    def refuses(self, *arguments: object, lines: int = 1) -> str:
        """Run a command that must fail as all must: the error's text. Every file is as it was, and none is new."""
        before = contents(self.folder)
        code = main([str(argument) for argument in arguments])
        output, errors = self.captured()
        assert contents(self.folder) == before
        return self.error(code, output, errors, lines)

    def captured(self) -> tuple[str, str]:
        """The stdout and stderr since the last call."""
        captured = self._capfd.readouterr()
        return captured.out, captured.err

    @staticmethod
    def error(code: int, output: str, errors: str, lines: int = 1) -> str:
        assert code == 2, errors
        assert not output or errors.startswith(f"error: {json.loads(output)['error']['code']}: "), errors  # with --json
        assert ERROR.fullmatch(errors.rstrip("\n")), errors
        assert len(errors.splitlines()) == lines, errors
        return errors.removeprefix("error: ").rstrip("\n")

    def built(self, name: str, *more: object, model: object = "model.yaml", runtime: str = "onnxruntime") -> Path:
        """An artefact in a folder of this name. more: its calibration and plan, or its precision."""
        self.json_and_check("build", "--backend", runtime, self / str(model), *more, "-o", self / name)
        return self / name

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


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> World:
    """The world that every bench is a copy of."""
    world = make_world(tmp_path_factory.mktemp("stock") / "world", lambda _: 0.5, CLIP_FRAMES / 10)
    folder = world.folder
    model, clip, calibration = folder / "model.yaml", folder / "clip.avi", folder / "calibration.json"
    assert source_length(parse_source(str(clip))) == CLIP_FRAMES
    steps: list[list[object]] = [
        ["calibrate", model, "--frames", clip, "-o", calibration],
        ["build", model, "--calibration", calibration, "-o", folder / "artefact"],
        ["infer", folder / "artefact", "--frames", clip, "-o", folder / "results.jsonl"],
    ]
    for step in steps:
        assert main([str(part) for part in step]) == 0
    return world


@pytest.fixture(name="bench")
def bench_fixture(stock: World, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Bench:
    shutil.copytree(stock.folder, tmp_path / "bench")
    return Bench(World(tmp_path / "bench", stock.config), capfd)


def calibrate(bench: Bench, model: object = "model.yaml", frames: object = "clip.avi") -> list[object]:
    return ["calibrate", bench / str(model), "--frames", bench / str(frames), "-o", bench / "calibration.json"]


def build(bench: Bench, model: object = "model.yaml", *more: object) -> list[object]:
    calibration = bench / "calibration.json"
    return ["build", bench / str(model), "--calibration", calibration, "-o", bench / "new", *more]


def picture(value: int = 128, size: int = 8) -> np.ndarray:
    return np.full((size, size, 3), value, np.uint8)


def classifier(stem: Callable[[Net], str]) -> ModelProto:
    """A stem, then a convolution and the pooled scores of five classes."""
    net = Net((1, 3, 8, 8))
    return net.model(net.node("Flatten", net.node("GlobalAveragePool", net.conv(stem(net), 3, 5))))


@contextlib.contextmanager
def small_file_system(place: Path, size: str = "512k", files: int = 0) -> Iterator[Path]:
    """A file system in memory; files: how many may be there, 0 for plenty. Skips where it may not be mounted."""
    place.mkdir(parents=True)
    options = f"size={size}" + (f",nr_inodes={files}" if files else "")
    mount = ["mount", "-t", "tmpfs", "-o", options, "tared-test", str(place)]
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
