"""A task of an installed package is served, compared and calibrated as tared's own; only its package knows it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from bench import CLIP_FRAMES, Bench, strict
from zoo import Net

from agent.common.errors import ConfigError
from agent.common.schema import validate
from agent.vision.spec import ModelSpec

TASK = """
from dataclasses import dataclass

from agent.vision.answer import Answer
from agent.vision.tasks.task import ModelTask

@dataclass(frozen=True)
class Level(Answer):
    metres: float

    def fidelity(self, reference):
        return max(0.0, 1.0 - abs(self.metres - reference.metres) / max(reference.metres, 1e-9))

    def as_dict(self, spec):
        return {"metres": round(self.metres, 3)}

    def summary(self, spec):
        return f"{self.metres:.2f} m"

class WaterLevel(ModelTask):
    @classmethod
    def check_params(cls, params):
        if sorted(params) != ["full_m"] or params["full_m"] <= 0:
            raise ValueError("full_m, in metres")

    def open_decoder(self, size, outputs):
        full_m = (self.spec.params or {"full_m": 1.0})["full_m"]
        return lambda batch: Level(full_m * float(next(iter(batch.values())).mean()))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the package, as pip leaves it."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "rivers", raising=False)
    info = tmp_path / "site" / "rivers-1.0.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "site" / "rivers.py").write_text(TASK, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rivers\nVersion: 1.0\n", encoding="utf-8")
    entries = "water-level = rivers:WaterLevel\nbroken-level = rivers:Absent\ntwice = rivers:WaterLevel\n"
    (info / "entry_points.txt").write_text(f"[tared.tasks]\n{entries}", encoding="utf-8")
    other = tmp_path / "site" / "seas-1.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: seas\nVersion: 1.0\n", encoding="utf-8")
    (other / "entry_points.txt").write_text("[tared.tasks]\ntwice = seas:WaterLevel\n", encoding="utf-8")
    return info


@pytest.mark.usefixtures("package")
def test_a_task_of_a_package_is_served_calibrated_built_and_compared(bench: Bench) -> None:
    net = Net((1, 3, 16, 16))
    seen = net.node("Relu", net.conv("image", 3, 16))
    level = net.node("ReduceMean", net.node("Relu", net.conv(seen, 16, 8)), axes=[1, 2, 3], keepdims=0)
    spec = bench.spec("river", net.model(level), task="water-level", labels=[])
    frames = ("--frames", bench / "clip.avi")
    assert bench.json("infer", spec, *frames, "-o", bench / "levels.jsonl")["frames"] == CLIP_FRAMES
    first = strict((bench / "levels.jsonl").read_text().splitlines()[0] + "\n")
    assert first["metres"] > 0.0
    bench.json_and_check("calibrate", spec, *frames, "-o", bench / "river.json")
    built, check = bench.json_and_check(
        "build", spec, "--calibration", bench / "river.json", *frames, "-o", bench / "river-int8"
    )
    assert built["precision"] == "int8"
    assert "fidelity" in check
    twice = bench.spec("deep", net.model(level), task="water-level", labels=[], params={"full_m": 2.0})
    assert bench.json("infer", twice, *frames, "-o", bench / "deep.jsonl")["frames"] == CLIP_FRAMES
    deep = strict((bench / "deep.jsonl").read_text().splitlines()[0] + "\n")
    assert deep["metres"] == pytest.approx(2.0 * first["metres"], abs=2e-3)
    assert bench.refuses("infer", spec, *frames, "--save", bench / "out.mp4").startswith("save.nothing: ")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            "water",
            "one of classify, detect, instance, pose, obb, segment, depth, raw, broken-level, twice, water-level",
        ),
        ("broken-level", "rivers:Absent: AttributeError"),
        ("twice", "one package for it; rivers:WaterLevel, seas:WaterLevel have it"),
    ],
)
def test_a_task_that_is_not_there_is_refused_with_those_that_are(task: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(ModelSpec, {"path": "a.onnx", "task": task}, "model.yaml")


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("task", "params", "message"),
    [
        ("water-level", {"full_m": -1}, "params: expected full_m, in metres"),
        ("water-level", {"full_m": "deep"}, "params: expected what task 'water-level' can check; it raises TypeError"),
        ("raw", {"full_m": 1}, "params: expected null: this task has no params"),
    ],
)
def test_params_that_the_task_does_not_take_are_refused(task: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validate(ModelSpec, {"path": "a.onnx", "task": task, "params": params}, "model.yaml")
    plain = validate(ModelSpec, {"path": "a.onnx", "task": task}, "model.yaml")
    assert "params" not in plain.model_dump(mode="json"), "what was built before the key came keeps its id"
