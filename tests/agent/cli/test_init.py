"""`tared init`: what it asks, what it looks at, and that it writes over nothing."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import pytest
import yaml
from model_families import ULTRALYTICS, Family, family, segmentation
from places import ROOT
from worlds import World, make_world

from agent.config import FIRST_KEYS, load_config
from fleet.cli.main import main

MODEL = ROOT / "examples/street/street.onnx"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return make_world(tmp_path / "world", lambda _: 0.5, 1.0)


def leaves(content: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Every value by its key with dots, in the order of the file."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        found |= leaves(value, f"{above}{name}.") if isinstance(value, dict) else {above + name: value}
    return found


def init(folder: Path, camera: str | Path, *words: str) -> int:
    return main(["init", "--camera", str(camera), "-o", str(folder), "--json", *words])


def test_init_writes_the_keys_that_people_set_and_no_other(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new"
    assert init(folder, world.folder / "clip.avi", "--model", str(MODEL), "--broker", "broker.lan:8883") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["task"] == "detect"
    text = (folder / "config.yaml").read_text()
    content = yaml.safe_load(text)
    assert tuple(leaves(content)) == FIRST_KEYS
    reference = leaves(yaml.safe_load((ROOT / "config.yaml").read_text()))
    answered = {"model", "camera.source", "mqtt.host", "mqtt.port"}
    assert {key: value for key, value in leaves(content).items() if key not in answered} == {
        key: reference[key] for key in FIRST_KEYS if key not in answered
    }
    assert max(map(len, text.splitlines())) <= 120
    schema = Path(text.splitlines()[0].partition("$schema=")[2])
    assert json.loads(schema.read_text())["title"] == "tared's config.yaml"
    config = load_config(folder / "config.yaml")
    assert (config.mqtt.host, config.mqtt.port) == ("broker.lan", 8883)
    assert config.model.path.resolve() == MODEL
    assert config.every_camera[0].source == str(world.folder / "clip.avi")


def test_nothing_is_written_over_and_nothing_is_written_for_what_cannot_be_used(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, clip = tmp_path / "new", world.folder / "clip.avi"
    for camera, words, code in (
        (tmp_path / "none.mp4", ["--model", str(MODEL), "--yes"], "init.camera"),
        (clip, ["--model", str(tmp_path / "none.onnx"), "--yes"], "model."),
        (clip, ["--yes"], "init.answer"),
    ):
        assert init(folder, camera, *words) == 2
        assert f"error: {code}" in capsys.readouterr().err
        assert not (folder / "config.yaml").exists()
        assert not (folder / "model.yaml").exists()
    assert init(folder, clip, "--model", str(MODEL), "--yes") == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert init(folder, clip, "--model", str(MODEL), "--yes") == 2
    assert "init.exists" in capsys.readouterr().err
    (folder / "config.yaml").unlink()
    assert init(folder, clip, "--model", str(MODEL), "--yes") == 2
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"model.yaml": before["model.yaml"]}


@pytest.mark.parametrize(
    ("make", "task"), [*((make, task) for make, (_, task, _) in ULTRALYTICS.items()), (segmentation, "segment")]
)
def test_a_model_of_each_task_is_configured_without_a_question(
    world: World, tmp_path: Path, make: Family, task: str
) -> None:
    model = family(make)
    if make in ULTRALYTICS:
        metadata = {"task": ULTRALYTICS[make][0], "names": "{0: 'a', 1: 'b', 2: 'c'}", "author": "Ultralytics"}
        onnx.helper.set_model_props(model, {**metadata, **({"kpt_shape": "[5, 3]"} if task == "pose" else {})})
    onnx.save(model, tmp_path / "model.onnx")
    folder = tmp_path / "new"
    assert init(folder, world.folder / "clip.avi", "--model", str(tmp_path / "model.onnx"), "--yes") == 0
    assert load_config(folder / "config.yaml").model.task == task


def test_on_a_terminal_it_asks(world: World, tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-m", "fleet.cli", "init", "-o", str(tmp_path / "new")]
    with subprocess.Popen(command, stdin=follower, stdout=subprocess.PIPE, stderr=follower, cwd=ROOT) as job:
        os.close(follower)
        os.write(leader, f"{world.folder / 'clip.avi'}\n{MODEL}\n\n".encode())
        assert job.stdout is not None
        printed = job.stdout.read().decode()
        assert job.wait(60) == 0, printed
    os.close(leader)
    config = load_config(tmp_path / "new/config.yaml")
    assert config.mqtt.host is None
    assert config.backend == "auto"
