"""Once it is under way the frame path keeps nothing of a frame, and makes no room for one anew."""

from __future__ import annotations

import gc
import threading
import time
import tracemalloc
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
from worlds import SPEC
from zoo import residual_net

from agent.build import build_artefact
from agent.capture import Frame
from agent.loop import FrameLoop
from agent.model import open_model
from agent.model_spec import ModelSpec
from agent.turns import Turns
from agent.vision import VisionTask
from engines.backend import open_backend, silent

SIDE = 256  # of the network input, 768 KiB as float32
WARM, FRAMES = 100, 300


def test_a_frame_leaves_nothing_and_takes_no_buffer_of_its_own(tmp_path: Path) -> None:
    """But for the small objects that carry it: neither its pixels nor its network input are allocated again."""
    onnx.save(residual_net((1, 3, SIDE, SIDE)), tmp_path / "model.onnx")
    model = open_model(ModelSpec.model_validate({**SPEC, "path": tmp_path / "model.onnx"}))
    backend = open_backend("onnxruntime")
    artefact = build_artefact(model, backend, lambda _id: tmp_path / "a", silent, calibration=None, precision="fp32")
    turns, answered = Turns([True]), threading.Semaphore(0)
    with closing(backend.load(artefact.read_engine())) as engine:
        tasks = [VisionTask(model.spec, engine.inputs, engine.outputs) for _ in range(2)]
        loop = FrameLoop(turns, "a", engine, tasks, [lambda _: answered.release()])
        loop.start()
        image = np.random.default_rng(0).integers(0, 255, (432, 768, 3), dtype=np.uint8)

        def serve(first: int, count: int) -> None:
            for number in range(first, first + count):
                turns.slots[0].put(Frame(number, number / 10, time.monotonic_ns(), image))
            for _ in range(count):
                assert answered.acquire(timeout=30.0)

        serve(0, WARM)
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            serve(WARM, FRAMES)
            gc.collect()
            after, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            turns.close()
            loop.join(30.0)
    assert loop.error is None
    assert after - before < 128 * FRAMES  # what ONNX Runtime has not given back yet
    assert peak - before < 128 * 1024
