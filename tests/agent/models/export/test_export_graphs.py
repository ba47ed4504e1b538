"""Exports of the graph, read by ONNX's checker, ONNX Runtime, NVIDIA's parser and OpenVINO."""

from __future__ import annotations

import json
import shlex
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from bench import Bench
from onnx import TensorProto
from zoo import Net

from agent.common.errors import AgentError
from agent.models.export.command import FORMATS
from agent.models.export.graphs import export_trtexec
from agent.models.export.source import open_source
from engines.graph.dequantised import activation_amax, without_qdq
from engines.onnxruntime_backend import OnnxRuntimeBackend
from engines.registry import open_backend
from engines.store.artefact import read_artefact

IMAGE = np.random.default_rng(0).uniform(0.0, 0.5, (1, 3, 8, 8)).astype(np.float32)


def exported(bench: Bench, to: str, *more: object, artefact: str = "artefact") -> Path:
    printed = bench.json("export", bench / artefact, "--to", to, "-o", bench / to, *more)
    assert printed["format"] == to
    assert sorted(printed["files"]) == sorted(str(path) for path in (bench / to).rglob("*") if path.is_file())
    return bench / to


def served(artefact: Path) -> np.ndarray:
    """Return tared's answer with an artefact of ONNX Runtime."""
    with closing(OnnxRuntimeBackend().load(read_artefact(artefact).read_engine())) as engine:
        return next(iter(engine.infer(IMAGE).values()))


def as_written(path: Path) -> np.ndarray:
    """Return ONNX Runtime's own answer with a file, whose Q/DQ it computes as written."""
    options = ort.SessionOptions()
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    found: np.ndarray = session.run(None, {"image": IMAGE})[0]
    return found


def test_onnx_has_names_licence_and_calibration_and_answers_the_same(bench: Bench) -> None:
    path = exported(bench, "onnx", "--licence", "Apache-2.0") / "model.onnx"
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    assert json.loads(metadata["names"]) == {"0": "a", "1": "b", "2": "c", "3": "d", "4": "e"}
    assert metadata["license"] == "Apache-2.0"
    calibration = json.loads(metadata["tared.calibration"])
    assert (calibration["method"], calibration["frames"], calibration["source"]) == ("entropy", 12, "clip.avi")
    np.testing.assert_array_equal(as_written(path), served(bench / "artefact"))


def test_a_licence_that_the_model_states_is_kept(bench: Bench) -> None:
    model = onnx.load(bench / "model.onnx")
    onnx.helper.set_model_props(model, {"license": "MIT", "author": "somebody"})
    spec = bench.spec("stated", model)
    bench.built("stated", "--precision", "fp32", model=spec)
    found = onnx.load(exported(bench, "onnx", artefact="stated") / "model.onnx")
    metadata = {entry.key: entry.value for entry in found.metadata_props}
    assert (metadata["license"], metadata["author"]) == ("MIT", "somebody")


def test_trtexec_gets_a_strongly_typed_graph_and_each_release_its_command(bench: Bench) -> None:
    folder = exported(bench, "trtexec")
    commands = {}
    for script in folder.glob("build_*.sh"):
        assert script.stat().st_mode & 0o111
        words = shlex.split(script.read_text().splitlines()[1])
        commands[script.stem] = words[words.index("trtexec") + 1 : -1]
    engine = "--saveEngine=model.engine"
    assert commands == {
        "build_8.5": ["--onnx=model_fp32.onnx", "--int8", "--fp16", engine],
        "build_10": ["--onnx=model_fp16.onnx", "--stronglyTyped", engine],
        "build_11": ["--onnx=model_fp16.onnx", engine],
    }
    trt = pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for x86-64 only")
    for name, float_type in (("model_fp16.onnx", trt.DataType.HALF), ("model_fp32.onnx", trt.DataType.FLOAT)):
        logger = trt.Logger(trt.Logger.ERROR)
        builder = trt.Builder(logger)
        network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
        parser = trt.OnnxParser(network, logger)
        assert parser.parse((folder / name).read_bytes()), parser.get_error(0)
        layers = [network.get_layer(index) for index in range(network.num_layers)]
        convolutions = [layer for layer in layers if layer.type == trt.LayerType.CONVOLUTION]
        assert {layer.get_output(0).dtype for layer in convolutions} == {float_type}
        assert sum(layer.type == trt.LayerType.QUANTIZE for layer in layers) >= len(convolutions) == 3


def test_trtexec_gets_the_shapes_of_every_profile(bench: Bench) -> None:
    net = Net((1, 3, "h", "w"))
    pooled = net.node("Flatten", net.node("GlobalAveragePool", net.conv("image", 3, 5)))
    shapes = [[1, 3, size, size] for size in (8, 16, 32)]
    bounds = dict(zip(("min", "opt", "max"), shapes, strict=True))
    small = {"min": shapes[0], "opt": shapes[0], "max": shapes[0]}
    spec = bench.spec("open", net.model(pooled), profiles=[{"image": small}, {"image": bounds}])
    bench.built("open", "--precision", "fp32", model=spec)
    files = export_trtexec(open_source(bench / "open", None, "", None)).files
    old, new = (shlex.split(files[f"build_{release}.sh"].decode().splitlines()[1]) for release in ("8.5", "10"))
    assert [word for word in new if "Shapes=" in word or "profile=" in word] == [
        *("--profile=0", "--minShapes=image:1x3x8x8", "--optShapes=image:1x3x8x8", "--maxShapes=image:1x3x8x8"),
        *("--profile=1", "--minShapes=image:1x3x8x8", "--optShapes=image:1x3x16x16", "--maxShapes=image:1x3x32x32"),
    ]
    assert [word for word in old if "Shapes=" in word or "profile=" in word] == [
        *("--minShapes=image:1x3x8x8", "--optShapes=image:1x3x8x8", "--maxShapes=image:1x3x32x32"),
    ]
    assert "model_fp16.onnx" not in files  # an FP32 artefact stays FP32
    with pytest.raises(AgentError, match=r"export\.shape"):
        FORMATS["tvm"](open_source(bench / "open", None, "", None))


def test_openvino_reads_its_ir_and_answers_as_our_runtime(bench: Bench) -> None:
    openvino = pytest.importorskip("openvino")
    folder = exported(bench, "openvino")
    core = openvino.Core()
    network = core.compile_model(core.read_model(folder / "model.xml"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    (answer,) = network([IMAGE]).values()
    with closing(open_backend("openvino").load(read_artefact(bench / "artefact").read_engine())) as engine:
        (expected,) = engine.infer(IMAGE).values()
    np.testing.assert_array_equal(answer, expected)
    operators = {node.get_type_name() for node in core.read_model(folder / "model.xml").get_ops()}
    assert "FakeQuantize" in operators


def test_an_artefact_of_openvino_is_exported_as_openvino_serves_it(bench: Bench) -> None:
    pytest.importorskip("openvino")
    bench.built("fast", "--calibration", bench / "calibration.json", runtime="openvino")
    exported(bench, "openvino", artefact="fast")
    refusal = bench.refuses("export", bench / "fast", "--to", "onnx", "-o", bench / "out")
    assert refusal.startswith("export.graph: an engine of openvino")
    assert "--model MODEL.onnx" in refusal
    graph = exported(bench, "onnx", "--model", bench / "model.onnx", artefact="fast") / "model.onnx"
    np.testing.assert_array_equal(as_written(graph), served(bench / "artefact"))


def test_a_tensorrt_engine_is_exported_from_its_calibration_and_plan(bench: Bench) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX has wheels for x86-64 only")
    offline = ["--calibration", bench / "calibration.json", "--offline", "--target", "sm86"]
    bench.built("board", *offline, runtime="tensorrt")
    assert bench.refuses("export", bench / "board", "--to", "trtexec", "-o", bench / "out").startswith("export.graph:")
    net = Net((1, 3, 8, 8))
    other = net.node("Flatten", net.node("GlobalAveragePool", net.conv("image", 3, 5)))
    onnx.save(net.model(other), bench / "other.onnx")
    wrong = ["--model", bench / "other.onnx"]
    assert bench.refuses("export", bench / "board", "--to", "onnx", "-o", bench / "out", *wrong).startswith(
        "export.model:"
    )
    graph = exported(bench, "onnx", "--model", bench / "model.onnx", artefact="board") / "model.onnx"
    np.testing.assert_array_equal(as_written(graph), served(bench / "artefact"))


def test_the_float_network_of_a_graph_computes_what_its_weights_say() -> None:
    net = Net((1, 2, 4, 4))
    scale, zero = net.constant(np.array(0.5, np.float32)), net.constant(np.array(0, np.int8))
    image = net.node("DequantizeLinear", net.node("QuantizeLinear", "image", scale, zero), scale, zero)
    integers = net.constant(np.arange(-8, 8, dtype=np.int8).reshape(2, 2, 2, 2))
    scales, zeros = net.constant(np.array([0.25, 2.0], np.float32)), net.constant(np.array([3, -1], np.int8))
    weight = net.node("DequantizeLinear", integers, scales, zeros, axis=0)
    model = net.model(net.node("Conv", image, weight))
    bare = without_qdq(model)
    assert [node.op_type for node in bare.graph.node] == ["Conv"]
    (stored,) = bare.graph.initializer
    expected = (np.arange(-8, 8).reshape(2, 2, 2, 2) - np.array([3, -1]).reshape(-1, 1, 1, 1)) * np.array(
        [0.25, 2.0]
    ).reshape(-1, 1, 1, 1)
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(stored), expected.astype(np.float32))
    assert bare.graph.node[0].input[0] == "image"
    assert stored.data_type == TensorProto.FLOAT
    assert activation_amax(model) == {"image": 63.5}
