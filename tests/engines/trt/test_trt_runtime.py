"""The runtime half of the TensorRT backend on a fake that keeps TensorRT's and CUDA's rules and computes for real."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path

import cv2
import numpy as np
import pytest
from engine_bench import built
from fake_pycuda import ORIN
from fake_tensorrt import FakeTensorRt, install
from numpy.typing import NDArray
from onnx import ModelProto
from trt_world import PC, net
from zoo import Net, image, run

import engines.trt.backend as tensorrt_backend
from engines.errors import EngineError
from engines.interface import BackendOptions, BuildRequest, OverlappingEngine, ShapeRange
from engines.preprocessing import ImageTransform
from engines.trt.backend import TensorRtBackend
from engines.trt.layers import layers_from_json

pytestmark = [
    pytest.mark.usefixtures("fake"),
    pytest.mark.parametrize("fake", [ORIN, PC], ids=["a board", "a PC"], indirect=True),
]

OPEN = ("n", 3, "h", "w")


def wide_net() -> ModelProto:
    """Open batch, height and width."""
    net = Net(OPEN)
    return net.model(net.conv(net.node("Relu", net.conv("image", 3, 4)), 4, 2))


PROFILES = (
    {"image": ShapeRange((1, 3, 8, 8), (1, 3, 16, 16), (2, 3, 24, 32))},
    {"image": ShapeRange((1, 3, 40, 40), (1, 3, 48, 48), (1, 3, 64, 64))},
)


# ---- engines


def test_outputs_are_the_callers_own() -> None:
    with closing(built(TensorRtBackend(), net())) as engine:
        first = engine.infer(image(net(), 0))["t9"]
        kept = first.copy()
        for seed in range(1, 4):
            engine.infer(image(net(), seed))
        assert np.array_equal(first, kept)


def test_two_batches_may_be_under_way_and_no_third() -> None:
    with closing(built(TensorRtBackend(), net())) as engine:
        assert isinstance(engine, OverlappingEngine)
        tickets = [engine.start(image(net(), seed)) for seed in range(2)]
        with pytest.raises(RuntimeError, match="2 batches under way"):
            engine.start(image(net(), 2))
        for seed, ticket in enumerate(tickets):
            np.testing.assert_allclose(
                engine.finish(ticket)["t9"], run(net(), image(net(), seed))["t9"], rtol=1e-4, atol=1e-5
            )


def test_any_shape_of_any_profile_and_no_other() -> None:
    rng = np.random.default_rng(0)
    with closing(built(TensorRtBackend(), wide_net(), profiles=PROFILES)) as engine:
        assert engine.inputs[0].shape == (None, 3, None, None)
        for shape in ((1, 3, 8, 8), (2, 3, 24, 32), (1, 3, 64, 40), (1, 3, 16, 9), (1, 3, 16, 9), (1, 3, 40, 40)):
            batch = rng.normal(size=shape).astype(np.float32)
            expected = run(wide_net(), batch)
            for name, found in engine.infer(batch).items():
                np.testing.assert_allclose(found, expected[name], rtol=1e-4, atol=1e-4)
        for refused in ((1, 3, 7, 8), (3, 3, 8, 8), (1, 3, 32, 32), (1, 3, 65, 64), (2, 3, 40, 40), (3, 8, 8)):
            with pytest.raises(EngineError, match=r"engine\.batch.*\[1, 3, 8, 8\] to \[2, 3, 24, 32\] or "):
                engine.infer(np.zeros(refused, np.float32))
        with pytest.raises(EngineError, match=r"engine\.batch.*float64"):
            engine.infer(np.zeros((1, 3, 8, 8), np.float64))


def test_nothing_is_allocated_for_a_frame(fake: FakeTensorRt) -> None:
    with closing(built(TensorRtBackend(), wide_net(), profiles=PROFILES)) as engine:
        shapes = ((1, 3, 8, 8), (1, 3, 64, 64), (2, 3, 24, 32)) * 3
        before = fake.pycuda.names()
        for shape in shapes:
            engine.infer(np.zeros(shape, np.float32))
        calls = fake.pycuda.names()[len(before) :]
        assert not {"mem_alloc", "pagelocked_empty", "stream", "event"} & set(calls)
        on_a_board = tensorrt_backend._gpu().integrated
        assert ("memcpy_dtoh_async" not in calls) == on_a_board  # outputs lie where the host reads them


@pytest.mark.parametrize("sizes", [3, 12])
def test_frames_of_sizes_that_take_turns_overlap(sizes: int) -> None:
    """As those of several cameras do; of more sizes than there are tables for, too."""
    backend, rng = TensorRtBackend(), np.random.default_rng(0)
    frames = [rng.integers(0, 256, (4 + number % sizes, 9 + number % sizes, 3), dtype=np.uint8) for number in range(30)]
    with closing(backend.load(backend.build(BuildRequest(net())).engine)) as engine:
        assert isinstance(engine, OverlappingEngine)
        under_way: list[tuple[int, NDArray[np.float32]]] = []

        def check() -> None:
            ticket, tensor = under_way.pop(0)
            np.testing.assert_allclose(engine.finish(ticket)["t9"], run(net(), tensor)["t9"], rtol=1e-4, atol=1e-5)

        for frame in frames:
            height, width = frame.shape[:2]
            transform = ImageTransform(height, width, 4, 8, 0, 0, 8, 8, 114, "rgb", (1 / 255,) * 3, (0.0,) * 3)
            under_way.append((engine.start_image(frame, transform), preprocessed(frame, transform)))
            if len(under_way) == 2:
                check()
        check()


def preprocessed(frame: NDArray[np.uint8], transform: ImageTransform) -> NDArray[np.float32]:
    """OpenCV's letterbox, by hand."""
    canvas = np.full((transform.height, transform.width, 3), transform.pad, np.uint8)
    inner = cv2.resize(frame, (transform.inner_width, transform.inner_height), interpolation=cv2.INTER_LINEAR)
    canvas[: transform.inner_height, : transform.inner_width] = inner
    ordered = canvas[:, :, ::-1] if transform.color == "rgb" else canvas
    return np.expand_dims(ordered.transpose(2, 0, 1) * np.float32(transform.gain[0]), 0).astype(np.float32)


def test_an_engine_made_in_one_thread_serves_and_ends_in_another() -> None:
    backend = TensorRtBackend()
    engine = backend.load(backend.build(BuildRequest(net())).engine)
    other = backend.load(backend.build(BuildRequest(net())).engine)
    problems: list[BaseException] = []

    def serve() -> None:
        try:
            engine.infer(image(net()))
            other.infer(image(net()))  # a swap: both alive, the old one is closed by its user
            engine.close()
            other.infer(image(net()))
            other.close()
            other.close()
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join(30)
    assert problems == []
    with pytest.raises(EngineError, match=r"engine\.closed"):
        engine.infer(image(net()))


# ---- layers


def test_best_times_the_layers_it_has_chosen() -> None:
    layers = layers_from_json(
        TensorRtBackend(BackendOptions(best=True)).build(BuildRequest(net())).files["layers.json"]
    )
    assert any(layer.time_ms is not None and layer.tactic for layer in layers)


@pytest.mark.parametrize(
    ("version", "has_dla"), [("10.3.0", True), ("10.13.3.9", False), ("11.4.0", False), ("11.4.1", True)]
)
def test_accelerators_are_refused_by_name_where_the_release_has_none(
    monkeypatch: pytest.MonkeyPatch, version: str, has_dla: bool
) -> None:
    other = install(monkeypatch, version)
    tensorrt_backend._gpu.cache_clear()
    backend = TensorRtBackend(BackendOptions(dla=1))
    assert backend.flags() == {"dla": "1"}
    if has_dla:
        assert backend.build(BuildRequest(net(), "fp16")).engine
        with pytest.raises(EngineError, match=r"engine\.dla.*DLA core 7 on a board with 2"):
            TensorRtBackend(BackendOptions(dla=7)).build(BuildRequest(net(), "fp16"))
    else:
        with pytest.raises(EngineError, match=rf"engine\.dla.*DLA core 1 with tensorrt {version}"):
            backend.build(BuildRequest(net(), "fp16"))
        assert backend.build(BuildRequest(net())).engine  # FP32 is for the GPU
    other.assert_order()


# ---- what is kept


def test_kernel_timings_are_kept_and_only_read_when_whole(fake: FakeTensorRt, tmp_path: Path) -> None:
    backend = TensorRtBackend(BackendOptions(cache=tmp_path))
    backend.build(BuildRequest(net()))
    timed = list(fake.timed)
    assert timed
    backend.build(BuildRequest(net()))
    assert fake.timed == []  # all in the cache
    (file,) = tmp_path.glob("*.timings")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    backend.build(BuildRequest(net()))
    assert fake.timed == timed  # damaged: not shown to TensorRT
    keyed = TensorRtBackend(BackendOptions(cache=tmp_path, key=b"k" * 32))
    keyed.build(BuildRequest(net()))
    assert fake.timed == timed  # not signed by this key
    keyed.build(BuildRequest(net()))
    assert fake.timed == []


def test_facts_that_bind_an_engine_to_its_machine_are_described() -> None:
    described = TensorRtBackend().describe()
    assert described["runtime"] == "tensorrt"
    assert {"version", "gpu", "sm", "multiprocessors", "cuda", "machine"} <= set(described)
