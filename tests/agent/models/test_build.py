"""Building under a plan, from the command line: what is named stays float, and the artefact says so."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
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
    assert build(folder, {"schema": 1, "floats": {CONVS[0]: "its input channels differ too much"}}) == 0
    artefact = read_artefact(folder / "artefact")
    assert artefact.manifest["inputs"]["plan"] == {"floats": [CONVS[0]]}
    assert 0.0 < artefact.manifest["int8_macs_share"] < 1.0
    nodes = {node.name: node for node in onnx.load(artefact.engine_path).graph.node}
    makers = {output: node.op_type for node in nodes.values() for output in node.output}
    assert makers.get(nodes[CONVS[0]].input[0]) != "DequantizeLinear"
    assert makers[nodes[CONVS[1]].input[0]] == "DequantizeLinear"
