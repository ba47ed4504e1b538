"""Building under a plan, from the command line: what is named stays float, and the artefact says so."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import yaml
from worlds import make_world

from engines.store.artefact import read_artefact
from fleet.cli.main import main

CONVS = ("Conv_t0", "Conv_t2", "Conv_t4")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with its calibration."""
    make_world(tmp_path, lambda _: 0.5, 1.0)
    assert main(["calibrate", str(tmp_path / "model.yaml"), "--frames", str(tmp_path / "clip.avi"),
                 "-o", str(tmp_path / "calibration.json")]) == 0  # fmt: skip
    return tmp_path


def build(folder: Path, plan: object) -> int:
    (folder / "plan.json").write_text(json.dumps(plan))
    return main(["build", str(folder / "model.yaml"), "--calibration", str(folder / "calibration.json"),
                 "--plan", str(folder / "plan.json"), "-o", str(folder / "artefact")])  # fmt: skip


def test_a_plan_keeps_its_nodes_float(folder: Path) -> None:
    assert build(folder, {"schema": 3, "floats": {CONVS[0]: "its input channels differ too much"}}) == 0
    artefact = read_artefact(folder / "artefact")
    assert artefact.manifest["inputs"]["plan"] == {"floats": [CONVS[0]]}
    assert 0.0 < artefact.manifest["int8_macs_share"] < 1.0
    nodes = {node.name: node for node in onnx.load(artefact.engine_path).graph.node}
    makers = {output: node.op_type for node in nodes.values() for output in node.output}
    assert makers.get(nodes[CONVS[0]].input[0]) != "DequantizeLinear"
    assert makers[nodes[CONVS[1]].input[0]] == "DequantizeLinear"


@pytest.mark.parametrize(
    ("plan", "code"),
    [
        ({"schema": 3, "floats": {"no such node": "x"}}, "plan.node"),
        ({"schema": 4, "floats": {}}, "plan.schema"),
        ([], "plan.format"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    folder: Path, plan: object, code: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert build(folder, plan) == 2
    assert f"error: {code}: " in capsys.readouterr().err
    assert not (folder / "artefact").exists()


def test_a_missing_plan_and_a_precision_beside_one_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["build", str(folder / "model.yaml"), "-o", str(folder / "a"), "--plan", str(folder / "gone.json")]
    assert main(command) == 2
    assert "error: plan.format: " in capsys.readouterr().err
    assert main([*command, "--precision", "fp32"]) == 2
    assert "not allowed with" in capsys.readouterr().err


def test_a_model_with_open_dimensions_is_tried_at_the_shape_of_its_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_world(tmp_path, lambda _: 0.5, 1.0)
    model = onnx.load(tmp_path / "model.onnx")
    for axis, name in ((2, "height"), (3, "width")):
        model.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = name
    model.graph.ClearField("value_info")
    onnx.save(model, tmp_path / "model.onnx")
    spec = yaml.safe_load((tmp_path / "model.yaml").read_text())
    shape = {key: [1, 3, size, size] for key, size in (("min", 8), ("opt", 12), ("max", 16))}
    (tmp_path / "model.yaml").write_text(yaml.safe_dump({**spec, "profiles": [{"image": shape}]}))
    assert main(["build", str(tmp_path / "model.yaml"), "--precision", "fp32", "-o", str(tmp_path / "a")]) == 0
    assert main(["infer", str(tmp_path / "a"), "--frames", str(tmp_path / "clip.avi"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["frames"] == 10
