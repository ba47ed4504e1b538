"""OpenVINO computes what the graph says, also where its own rewriting, or the processor's products, would not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from engine_bench import built, code_of
from onnx import ModelProto, TensorProto, helper
from places import ROOT, TEST_PATH
from quantised_zoo import QuantisedNet, quantised
from zoo import Net, image, residual_net, run

from calibrate.noise import sqnr_db
from engines import openvino_backend
from engines.graph.profiles import profiles_for
from engines.interface import Array, Backend, BackendOptions, BuildRequest, ProfiledEngine, ShapeRange
from engines.openvino_backend import SETTINGS, OpenVinoBackend, kernel_times_ms, undisturbed, write_ir
from engines.quantise.apply_plan import insert_qdq
from engines.quantise.integer_kernels import narrow_weights
from engines.quantise.placement import place
from engines.registry import choose_backend, open_backend
from engines.store.kept_file import read_kept, write_kept

OPEN = ("batch", 3, 8, 8)


@pytest.fixture
def backend() -> Backend:
    return OpenVinoBackend()


# ---- what it computes


def concatenated_net(channels: int = 16, offset: bool = False) -> ModelProto:
    """Two convolutions in INT8, joined, quantised as one tensor, and read by a third; with the offset of a repair."""
    net = QuantisedNet((1, channels, 12, 12))
    x = net.int8("image", 0.02)
    parts = [net.node("Relu", net.int8_conv(x, channels, channels)) for _ in range(2)]
    joined = net.node("Concat", *parts, axis=1)
    moved = net.node("MaxPool", joined, kernel_shape=[2, 2])
    if offset:
        moved = net.node("Add", moved, net.constant(np.full((1, 2 * channels, 1, 1), -0.7, np.float32)))
    return net.model(net.int8_conv(net.int8(moved, 0.05), 2 * channels, 8))


def weighed_net(transposed: bool = False, zero_bias: bool = False) -> ModelProto:
    """A convolution in INT8, whose output is multiplied by its own means; sizes are open."""
    net = QuantisedNet(("batch", 4, "height", "width"))
    bias = [net.constant(np.zeros(8, np.float32))] if zero_bias else []
    operator, weight = (
        ("ConvTranspose", net.stored((4, 8, 3, 3), 1)) if transposed else ("Conv", net.stored((8, 4, 3, 3)))
    )
    x = net.node(operator, net.int8("image", 0.02), weight, *bias)
    model = net.model(net.node("Mul", x, net.node("GlobalAveragePool", x)))
    narrow_weights(model)  # no product saturates
    return model


def random_image(model: ModelProto) -> Array:
    shape = [size.dim_value for size in model.graph.input[0].type.tensor_type.shape.dim]
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    "model",
    [concatenated_net(), concatenated_net(offset=True), quantised(residual_net())],
    ids=["concat", "offset", "residual"],
)
def test_int8_is_computed_as_the_engine_has_it_written(backend: Backend, model: ModelProto) -> None:
    engine = backend.build(BuildRequest(model)).engine
    batch = random_image(model)
    (found,) = backend.load(engine).infer(batch).values()
    (written,) = run(ModelProto.FromString(engine), batch).values()
    assert sqnr_db(written, found) > 30.0  # a value on the edge of a level may go to the next one


@pytest.mark.parametrize("difference", [{}, {"transposed": True}, {"zero_bias": True}], ids=str)
def test_an_output_that_two_nodes_read_is_scaled_once_in_open_shapes(
    backend: Backend, tmp_path: Path, difference: dict[str, bool]
) -> None:
    model, sizes = weighed_net(**difference), ShapeRange((1, 4, 8, 8), (1, 4, 12, 12), (2, 4, 12, 16))
    engine = backend.build(BuildRequest(model, profiles=({"image": sizes},))).engine
    for name, content in write_ir(model).items():
        (tmp_path / name).write_bytes(content)
    exported = ov.Core().compile_model(tmp_path / "model.xml", "CPU", SETTINGS)
    batch = np.random.default_rng(0).normal(size=sizes.max).astype(np.float32)
    (found,) = backend.load(engine).infer(batch).values()
    (written,) = run(ModelProto.FromString(engine), batch).values()
    assert sqnr_db(written, found) > 30.0
    (read,) = exported(batch).values()
    (given,) = run(model, batch).values()
    assert sqnr_db(given, read) > 30.0


def test_tensors_that_are_never_negative_are_unsigned_and_computed_as_written(backend: Backend) -> None:
    net = Net((1, 3, 24, 24))
    parts = [net.node("Relu", net.conv("image", 3, 8)) for _ in range(2)]
    model = net.model(net.conv(net.node("Relu", net.conv(net.node("Concat", *parts, axis=1), 16, 8)), 8, 4))
    graph = insert_qdq(model, place(model), dict.fromkeys(place(model).taps, 12.0), unsigned=backend.takes_unsigned)
    engine = backend.build(BuildRequest(graph)).engine
    kept = ModelProto.FromString(engine)
    zeros = {tensor.name: tensor.data_type for tensor in kept.graph.initializer}
    formats = [zeros[node.input[2]] for node in kept.graph.node if node.op_type == "QuantizeLinear"]
    assert formats.count(TensorProto.UINT8) == len(formats) - 1  # all but the image
    (found,) = backend.load(engine).infer(random_image(model)).values()
    (written,) = run(kept, random_image(model)).values()
    assert sqnr_db(written, found) > 30.0


def test_a_rewritten_graph_has_the_numbers_of_the_given_one(backend: Backend) -> None:
    """Without VNNI weights have a bit less; see the next test."""
    model = concatenated_net()
    written = ModelProto.FromString(backend.build(BuildRequest(model)).engine)
    (given,), (rewritten,) = (run(each, random_image(model)).values() for each in (model, written))
    if backend.describe()["products"] == "exact":
        np.testing.assert_array_equal(given, rewritten)
    else:
        assert sqnr_db(given, rewritten) > 20.0


_OLD_CPU = """
import json, sys, numpy as np
from onnx import ModelProto
from engines.interface import BuildRequest
from engines.openvino_backend import OpenVinoBackend, _compiled, OpenVinoEngine
from engines.quantise.integer_kernels import shift_concatenated
from calibrate.noise import sqnr_db
from test_openvino_backend import concatenated_net, random_image
from zoo import run
backend, model = OpenVinoBackend(), concatenated_net()
built = backend.build(BuildRequest(model))
batch = random_image(model)
(ours,) = backend.load(built.engine).infer(batch).values()
(written,) = run(ModelProto.FromString(built.engine), batch).values()
shift_concatenated(model)
given = model.SerializeToString()
(careless,) = OpenVinoEngine(given, _compiled(given, 1), 1).infer(batch).values()
(exact,) = run(model, batch).values()
ratios = [sqnr_db(written, ours), sqnr_db(exact, written), sqnr_db(exact, careless)]
print(json.dumps([backend.describe()["products"], built.facts, *ratios]))
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the limit is one of oneDNN's x86 kernels")
@pytest.mark.parametrize("instructions", ["AVX2", "SSE41"])
def test_products_that_saturate_get_weights_of_seven_bits(instructions: str) -> None:
    environment = {
        **os.environ,
        "ONEDNN_MAX_CPU_ISA": instructions,
        "PYTHONPATH": os.pathsep.join((TEST_PATH, str(Path(__file__).parent))),
    }
    done = subprocess.run(
        [sys.executable, "-c", _OLD_CPU], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    products, facts, as_written_db, to_given_db, careless_db = json.loads(done.stdout)
    assert products == "saturate"
    assert facts["weight_bits"] == 7
    assert as_written_db > 30.0
    assert to_given_db > 15.0
    assert careless_db < to_given_db - 3.0  # with eight bits


# ---- shapes and types


def test_an_open_batch_is_compiled_for_the_shape_of_one_frame(backend: Backend) -> None:
    engine = built(backend, residual_net(OPEN), input_shape=(1, 3, 8, 8))
    assert engine.inputs[0].shape == (1, 3, 8, 8)
    assert code_of(lambda: engine.infer(np.zeros((2, 3, 8, 8), np.float32))) == "engine.batch"


def test_a_profile_of_another_input_is_refused(backend: Backend) -> None:
    request = BuildRequest(residual_net(OPEN), profiles=({"video": ShapeRange((1,), (1,), (1,))},))
    assert (
        code_of(lambda: backend.build(request))
        == "engine.profile"
        == code_of(lambda: profiles_for(request.graph, request))
    )


# ---- times


def test_times_belong_to_nodes(backend: Backend) -> None:
    model = concatenated_net(channels=128)  # of a kernel that takes less than a microsecond, OpenVINO has no time
    engine = built(backend, model)
    assert isinstance(engine, ProfiledEngine)
    times, nodes = engine.layer_times_ms(random_image(model), runs=2), engine.layer_nodes()
    assert min(times.values()) >= 0.0
    assert all(nodes[kernel] for kernel in times)
    covered = {name for kernel in times for name in nodes[kernel]}
    assert {node.name for node in model.graph.node if node.op_type in {"Conv", "Concat", "MaxPool"}} <= covered


def test_a_preemption_is_in_no_kernels_time() -> None:
    """OpenVINO's profiler has averages of all runs since the start, in whole microseconds."""
    usual_us = {"small": 3.0, "large": 320.0}
    runs_us = [dict(usual_us) for _ in range(13)]
    runs_us[0] = {"small": 30.0, "large": 900.0}  # memory is allocated
    runs_us[5]["large"] += 7000.0
    totals_us, averages_ms = Counter[str](), []
    for number, each in enumerate(runs_us, start=1):
        totals_us.update({name: int(us) for name, us in each.items()})
        averages_ms.append({name: total // number / 1000.0 for name, total in totals_us.items()})
    assert averages_ms[-1]["large"] > 0.8
    counted = undisturbed([sum(each.values()) / 1000.0 for each in runs_us])
    assert counted == [3, 4, *range(6, 13)]
    found = kernel_times_ms(averages_ms, counted)
    assert found["large"] == pytest.approx(0.320, abs=0.003)
    assert found["small"] == pytest.approx(0.003, abs=0.002)


def test_no_telemetry_leaves_the_machine(tmp_path: Path) -> None:
    """Its package for telemetry would write an identity into the user's home first."""
    own = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    code = "import engines.openvino_backend as o, sys; o._saturates(); print(sys.modules['openvino_telemetry'])"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**own, "HOME": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert list(tmp_path.rglob("*")) == []
    assert done.stdout.strip() == "None"


# ---- the cache


def test_a_compiled_network_is_kept_and_only_its_own_is_taken(tmp_path: Path) -> None:
    model = concatenated_net()
    engine = OpenVinoBackend().build(BuildRequest(model)).engine
    backend = OpenVinoBackend(BackendOptions(cache=tmp_path, key=b"k" * 32))
    expected = backend.load(engine).infer(random_image(model))
    (kept,) = tmp_path.glob("*.openvino")
    whole = kept.read_bytes()

    def loads_the_same() -> bool:
        found = backend.load(engine).infer(random_image(model))
        return all(np.array_equal(found[name], expected[name]) for name in expected)

    before = kept.stat().st_mtime_ns
    assert loads_the_same()
    assert kept.stat().st_mtime_ns == before  # read, not written anew
    for damaged in (whole[:-100], whole[:70] + b"\0" + whole[71:], b""):
        kept.write_bytes(damaged)
        assert loads_the_same()
        assert kept.stat().st_size > len(whole) // 2  # compiled, and kept again
    other = OpenVinoBackend(BackendOptions(cache=tmp_path, key=b"x" * 32))
    before = kept.stat().st_mtime_ns
    other.load(engine)
    assert kept.stat().st_mtime_ns != before  # another key's is none


def test_a_network_compiled_under_other_conditions_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another processor may have the same name, as those of virtual machines do."""
    engine = OpenVinoBackend().build(BuildRequest(residual_net())).engine
    kept = set[str]()
    conditions: list[Callable[[pytest.MonkeyPatch], object]] = [
        lambda _: None,
        lambda patch: patch.setattr(openvino_backend, "instructions", lambda: "sse4_1"),
        lambda patch: patch.setattr(openvino_backend, "processor", lambda: "another"),
        lambda patch: patch.setattr("openvino.get_version", lambda: "2027.1"),
        lambda patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
        lambda patch: patch.setitem(openvino_backend.SETTINGS, "NUM_STREAMS", 2),
    ]
    for change in conditions:
        with monkeypatch.context() as patch:
            change(patch)
            OpenVinoBackend(BackendOptions(cache=tmp_path, key=b"k" * 32)).load(engine)
        found = {path.name for path in tmp_path.glob("*.openvino")}
        assert len(found - kept) == 1
        kept |= found
    OpenVinoBackend(BackendOptions(threads=2, cache=tmp_path, key=b"k" * 32)).load(engine)
    assert len(list(tmp_path.glob("*.openvino"))) == len(conditions) + 1


def test_a_signed_file_that_openvino_refuses_is_compiled_anew(tmp_path: Path) -> None:
    engine = OpenVinoBackend().build(BuildRequest(residual_net())).engine
    backend = OpenVinoBackend(BackendOptions(cache=tmp_path, key=b"k" * 32))
    backend.load(engine)
    (kept,) = tmp_path.glob("*.openvino")
    whole = read_kept(kept, b"k" * 32, kept.stem)
    assert whole is not None
    for content in (b"", b"junk" * 100, whole[: len(whole) // 2]):
        write_kept(kept, b"k" * 32, kept.stem, content)
        assert backend.load(engine).infer(image(residual_net()))
        again = read_kept(kept, b"k" * 32, kept.stem)
        assert again is not None
        assert len(again) == len(whole)


@pytest.mark.parametrize("place", ["/dev/full/cache", "/proc/cache"])
def test_a_cache_that_cannot_be_written_stops_nothing(place: str) -> None:
    engine = OpenVinoBackend().build(BuildRequest(residual_net())).engine
    assert OpenVinoBackend(BackendOptions(cache=Path(place))).load(engine).infer(image(residual_net()))


def test_a_network_just_built_is_not_compiled_twice(tmp_path: Path) -> None:
    backend = OpenVinoBackend(BackendOptions(cache=tmp_path))
    backend.load(backend.build(BuildRequest(residual_net())).engine)
    assert not list(tmp_path.iterdir())  # a search builds dozens


# ---- auto


def test_auto_takes_the_fastest_that_works_and_says_why_not_the_others() -> None:
    chosen = choose_backend("auto")
    assert chosen.backend.name == "openvino"  # no GPU here
    assert chosen.not_taken.keys() == {"tensorrt"}
    assert "not tensorrt" in chosen.text


def test_auto_without_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "engines.openvino_backend", raising=False)
    monkeypatch.setitem(sys.modules, "openvino", None)
    chosen = choose_backend("auto")
    assert chosen.backend.name == "onnxruntime"
    assert "openvino" in chosen.not_taken["openvino"]
    assert code_of(lambda: open_backend("openvino")) == "backend.missing"  # a named one never falls back


_CHOOSE = """
import sys
from engines.registry import choose_backend, open_backend
from calibrate.errors import TaredError
print(choose_backend("auto").text)
try:
    open_backend("openvino" if sys.argv[1] else "onnxruntime")
except TaredError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("package", "reason", "named"),
    [
        ("raise OSError('file too short')", "no usable openvino package: OSError: file too short", "backend.missing"),
        ("import os; os.kill(os.getpid(), 4)", "a process that tried it ended with SIGILL", ""),
    ],
    ids=["broken", "crashes"],
)
def test_auto_survives_an_openvino_that_does_not_work_here(
    tmp_path: Path, package: str, reason: str, named: str
) -> None:
    (tmp_path / "openvino.py").write_text(package)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _CHOOSE, named], env=environment, capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.startswith("onnxruntime; not tensorrt: ")
    assert f"; not openvino: {reason}" in done.stdout
    assert named in done.stdout
    assert done.stderr.count("Traceback") == (1 if named else 0)


def test_auto_takes_no_runtime_that_cannot_build_the_model() -> None:
    model = residual_net(OPEN)
    profile = {"image": ShapeRange((1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8))}
    assert choose_backend("auto", None, BuildRequest(model, profiles=(profile,))).backend.name == "openvino"
    model.graph.node[1].op_type, model.graph.node[1].domain = "BiasGelu", "com.microsoft"  # ONNX Runtime has it
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    chosen = choose_backend("auto", None, BuildRequest(model, input_shape=(1, 3, 8, 8)))
    assert chosen.backend.name == "onnxruntime"
    assert "BiasGelu" in chosen.not_taken["openvino"]
