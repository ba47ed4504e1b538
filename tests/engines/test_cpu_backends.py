"""All that a runtime for CPUs has to do behind the seam, once for each: build, load, infer, time, close, refuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_bench import built, code_of
from model_families import IMAGE, family, rtdetr_deployed
from onnx import helper
from zoo import Net, image, residual_net, run

from engines.errors import EngineError
from engines.graph.load import load_model
from engines.interface import Backend, BackendOptions, BuildRequest, ProfiledEngine, ShapeRange, TensorSpec
from engines.registry import open_backend

OPEN = ("batch", 3, 8, 8)
PROFILE = {"image": ShapeRange((1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8))}


@pytest.fixture(params=["onnxruntime", "openvino"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return open_backend(request.param)


def test_opens_by_name_and_describes_itself(backend: Backend) -> None:
    described = open_backend(backend.name, BackendOptions(threads=2)).describe()
    assert described["runtime"] == backend.name
    assert described["version"]
    assert described["machine"]


# ---- building


def test_builds_and_infers(backend: Backend) -> None:
    progress: list[float] = []
    engine = backend.build(BuildRequest(residual_net()), lambda fraction, _doing: progress.append(fraction))
    assert progress == sorted(progress)
    assert (progress[0], progress[-1]) == (0.0, 1.0)
    loaded = backend.load(engine.engine)
    assert loaded.inputs == [TensorSpec("image", np.dtype(np.float32), (1, 3, 8, 8))]
    assert loaded.outputs == [TensorSpec("t9", np.dtype(np.float32), (1, 5))]
    (found,), (expected,) = (
        each.values() for each in (loaded.infer(image(residual_net())), run(residual_net(), image(residual_net())))
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_an_operator_that_it_does_not_have(backend: Backend) -> None:
    model = residual_net()
    model.graph.node[1].op_type, model.graph.node[1].domain = "Frobnicate", "acme"
    model.opset_import.append(helper.make_opsetid("acme", 1))
    with pytest.raises(EngineError, match="Frobnicate") as refused:
        backend.build(BuildRequest(model))
    assert refused.value.code == ("engine.unsupported" if backend.name == "openvino" else "engine.graph")


def test_a_graph_that_does_not_run(backend: Backend) -> None:
    net = Net(OPEN)
    model = net.model(net.node("Reshape", "image", net.constant(np.array([5, 5]))))
    with pytest.raises(EngineError, match="Reshape") as refused:
        backend.build(BuildRequest(model))
    assert refused.value.code in {"engine.run", "engine.graph"}  # OpenVINO sees it when it compiles


def test_options_of_a_gpu_are_refused(backend: Backend) -> None:
    assert code_of(lambda: open_backend(backend.name, BackendOptions(target="sm86"))) == "backend.option"
    with pytest.raises(EngineError, match="--dla and --best"):
        open_backend(backend.name, BackendOptions(dla=0, best=True))


# ---- loading and inferring


def test_loading_what_is_no_engine(backend: Backend) -> None:
    assert code_of(lambda: backend.load(b"junk" * 100)) == "engine.unreadable"


@pytest.mark.parametrize(
    "batch",
    [
        np.zeros((2, 3, 8, 8), np.float32),
        np.zeros((0, 3, 8, 8), np.float32),
        np.zeros((1, 3, 8, 9), np.float32),
        np.zeros((3, 8, 8), np.float32),
        np.zeros((1, 3, 8, 8), np.float64),
        np.zeros((1, 3, 8, 8), np.uint8),
    ],
)
def test_refuses_another_batch(batch: np.ndarray, backend: Backend) -> None:
    engine = built(backend, residual_net())
    assert code_of(lambda: engine.infer(batch)) == "engine.batch"


def test_open_batches_under_a_profile(backend: Backend) -> None:
    engine = built(backend, residual_net(OPEN), profiles=(PROFILE,))
    assert engine.inputs[0].shape == (None, 3, 8, 8)
    batch = np.concatenate([image(residual_net(), seed) for seed in range(3)])
    singles = [engine.infer(batch[i : i + 1])["t9"].copy() for i in range(3)]
    np.testing.assert_allclose(engine.infer(batch)["t9"], np.concatenate(singles), rtol=1e-4, atol=1e-5)


def test_uint8_inputs(backend: Backend) -> None:
    net = Net((1, 3, 8, 8))
    model = net.model(net.conv(net.node("Cast", "image", to=1), 3, 4))
    model.graph.input[0].type.tensor_type.elem_type = 2
    engine = built(backend, model)
    assert engine.inputs[0].dtype == np.uint8
    batch = np.random.default_rng(0).integers(0, 256, (1, 3, 8, 8), np.uint8)
    (found,), (expected,) = engine.infer(batch).values(), run(model, batch).values()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-2)
    assert code_of(lambda: engine.infer(batch.astype(np.float32))) == "engine.batch"


def test_a_model_whose_second_input_is_a_constant(backend: Backend, tmp_path: Path) -> None:
    """RT-DETR's own export: whole numbers among its outputs, and a constant that is no weight."""
    (tmp_path / "m.onnx").write_bytes(family(rtdetr_deployed).SerializeToString())
    model = load_model(tmp_path / "m.onnx", {"orig_target_sizes": [640, 480]})
    loaded, batch = built(backend, model), np.random.default_rng(1).random(IMAGE, np.float32)
    assert [tensor.name for tensor in loaded.inputs] == ["image"]
    found, expected = loaded.infer(batch), run(model, batch)
    assert found["labels"].dtype.kind == "i"
    np.testing.assert_array_equal(found["labels"], expected["labels"])
    np.testing.assert_allclose(found["boxes"], expected["boxes"], rtol=1e-3, atol=1e-2)
    np.testing.assert_allclose(found["scores"], expected["scores"], rtol=1e-3)


def test_outputs_have_the_names_of_the_graph(backend: Backend) -> None:
    """OpenVINO drops an Identity, and its tensor then has two names."""
    net = Net()
    conv = net.conv("image", 3, 4)
    model = net.model(net.node("Identity", conv), net.node("Relu", conv))
    assert [spec.name for spec in built(backend, model).outputs] == [output.name for output in model.graph.output]


def test_the_batch_may_lie_in_memory_as_it_likes(backend: Backend) -> None:
    """And it is read at once: what becomes of it later changes nothing."""
    model = residual_net()
    engine, batch = built(backend, model), image(model)
    expected = {name: output.copy() for name, output in engine.infer(batch).items()}
    frozen, mirrored = batch.copy(), np.asfortranarray(batch)
    frozen.flags.writeable = False
    for each in (frozen, mirrored, batch.copy()):
        found = engine.infer(each)
        if each.flags.writeable:
            each[:] = 0.0
        for name, output in found.items():
            np.testing.assert_array_equal(output, expected[name])


def test_an_answer_stays_what_it_was_when_the_next_batch_is_inferred(backend: Backend) -> None:
    model = residual_net()
    engine = built(backend, model)
    held = engine.infer(image(model))
    kept = {name: output.copy() for name, output in held.items()}
    (other,) = engine.infer(image(model, 1)).values()
    for name, output in held.items():
        np.testing.assert_array_equal(output, kept[name])
        assert not np.array_equal(output, other)


def test_close_is_idempotent_and_final(backend: Backend) -> None:
    engine = built(backend, residual_net())
    engine.close()
    engine.close()
    assert isinstance(engine, ProfiledEngine)
    assert code_of(lambda: engine.infer(image(residual_net()))) == "engine.closed"
    assert code_of(lambda: engine.layer_times_ms(image(residual_net()))) == "engine.closed"
    assert code_of(engine.layer_nodes) == "engine.closed"
