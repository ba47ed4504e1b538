"""Exports read by the tools they are for, each in an environment of its own."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest
from bench import Bench
from peer_environment import run_in

from engines.onnxruntime_backend import OnnxRuntimeBackend
from engines.store.artefact import read_artefact

pytestmark = [pytest.mark.trial, pytest.mark.timeout(3600)]

_TVM = """
import json, subprocess, sys
from pathlib import Path
import numpy as np
import tvm
from tvm import relax
folder = Path(sys.argv[1])
subprocess.run([sys.executable, folder / "compile.py"], check=True)
machine = relax.VirtualMachine(tvm.runtime.load_module(str(folder / "model.so")), tvm.cpu())
answers = [machine["main"](tvm.runtime.tensor(image)) for image in np.load(sys.argv[2])]
arrays = [each.numpy() if hasattr(each, "numpy") else each[0].numpy() for each in answers]
print(json.dumps([array.tolist() for array in arrays]))
"""

_TRITON = """
import json, sys
from google.protobuf import json_format, text_format
from tritonclient.grpc import model_config_pb2
config = text_format.Parse(open(sys.argv[1], encoding="utf-8").read(), model_config_pb2.ModelConfig())
print(json.dumps(json_format.MessageToDict(config, preserving_proto_field_name=True)))
"""

_PPQ = """
import json, sys
import torch
from ppq.api import quantize_onnx_model
from ppq.api.setting import QuantizationSettingFactory
from ppq.core import TargetPlatform
folder = sys.argv[1]
setting = QuantizationSettingFactory.from_json(open(f"{folder}/setting.json").read())
shape = [1, 3, 8, 8]
graph = quantize_onnx_model(
    onnx_import_file=f"{folder}/model.onnx", calib_dataloader=[torch.rand(shape)] * 8, calib_steps=8,
    input_shape=shape, setting=setting, platform=TargetPlatform.TRT_INT8, device="cpu")
print(json.dumps({name: [op.type, op.platform.name] for name, op in graph.operations.items()}))
"""


def exported(bench: Bench, to: str, artefact: str = "artefact") -> Path:
    bench.json("export", bench / artefact, "--to", to, "-o", bench / to)
    return bench / to


def test_tvm_compiles_the_graph_and_answers_as_our_runtime_within_rounding(bench: Bench) -> None:
    folder = exported(bench, "tvm")
    images = np.random.default_rng(0).uniform(0.0, 0.5, (8, 1, 3, 8, 8)).astype(np.float32)
    np.save(bench / "images.npy", images)
    answers = np.array(run_in("tvm", _TVM, folder, bench / "images.npy"), np.float32)
    with closing(OnnxRuntimeBackend().load(read_artefact(bench / "artefact").read_engine())) as engine:
        expected = np.stack([next(iter(engine.infer(image).values())) for image in images])
    # The same integers but where a sum lies on the edge of two steps: one step of one activation, through one layer.
    assert np.abs(answers - expected).max() <= 0.02 * np.abs(expected).max()
    assert np.abs(expected).max() > 0.1


def test_triton_s_own_protobuf_reads_the_model_repository(bench: Bench) -> None:
    folder = exported(bench, "triton")
    config = run_in("triton", _TRITON, folder / "model" / "config.pbtxt")
    graph = onnx.load(folder / "model" / "1" / "model.onnx").graph
    assert (config["name"], config["backend"]) == ("model", "onnxruntime")
    assert config["input"] == [{"name": "image", "data_type": "TYPE_FP32", "dims": ["1", "3", "8", "8"]}]
    (output,) = config["output"]
    assert (output["name"], output["dims"]) == (graph.output[0].name, ["1", "5"])
    assert (folder / "model" / output["label_filename"]).read_text().split() == ["a", "b", "c", "d", "e"]
    assert json.loads(config["parameters"]["tared.spec"]["string_value"])["input"]["color"] == "bgr"


@pytest.mark.soak  # its environment has PyTorch, of 5 GB
def test_ppq_loads_the_setting_and_dispatches_by_the_plan(bench: Bench) -> None:
    if sys.version_info >= (3, 12):
        pytest.skip("PPQ's NumPy and onnx have no wheels for this Python")
    layers = [node.name for node in onnx.load(bench / "model.onnx").graph.node if node.op_type == "Conv"]
    (bench / "plan.json").write_text(json.dumps({"schema": 3, "floats": {layers[1]: "by hand"}}))
    bench.built("mixed", "--calibration", bench / "calibration.json", "--plan", bench / "plan.json")
    dispatched = run_in("ppq", _PPQ, exported(bench, "ppq", "mixed"))
    convolutions = {name: platform for name, (kind, platform) in dispatched.items() if kind == "Conv"}
    assert convolutions == {layer: "FP32" if layer == layers[1] else "TRT_INT8" for layer in layers}
