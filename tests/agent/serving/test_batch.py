"""Frames of several cameras at once: each gets its own answer, whatever else is in its batch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import onnx
import pytest
from overlapping_engine import OverlappingDeviceEngine
from runtime_under_test import RUNTIME
from turned_clock import TurnedClock
from worlds import SPEC
from zoo import residual_net

from agent.camera.capture import Frame
from agent.common.errors import ConfigError
from agent.config import BatchConfig
from agent.models.build import build_artefact
from agent.models.model import Model, open_model
from agent.serving.inference import FrameLoop, RoundRobinScheduler
from agent.vision.output_checks import check_batch
from agent.vision.spec import ModelSpec
from agent.vision.task import ServedFrame, VisionTask
from agent.vision.tasks.classify import Classification
from engines.interface import Array, Engine, silent
from engines.registry import open_backend

CAMERAS, FRAMES, MOST = 4, 12, 3
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 255, (CAMERAS, FRAMES, 16, 16, 3), dtype=np.uint8)


class Counting:
    """An engine, and the sizes of the batches that it was given. It outlives its loops, which close what they used."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.inputs, self.outputs = engine.inputs, engine.outputs
        self.sizes: list[int] = []

    def infer(self, batch: Array) -> dict[str, Array]:
        self.sizes.append(len(batch))
        return self._engine.infer(batch)

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Open a model of open batch, up to MOST."""
    path = tmp_path_factory.mktemp("batch") / "model.onnx"
    net = residual_net((1, 3, 8, 8))
    for each in (*net.graph.input, *net.graph.output):
        each.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(net, path)
    name = net.graph.input[0].name
    shapes = {"min": [1, 3, 8, 8], "opt": [1, 3, 8, 8], "max": [MOST, 3, 8, 8]}
    return open_model(ModelSpec.model_validate({**SPEC, "path": path, "profiles": [{name: shapes}]}))


@pytest.fixture
def engine(model: Model, tmp_path: Path) -> Iterator[Counting]:
    backend = open_backend(RUNTIME)
    artefact = build_artefact(model, backend, lambda _id: tmp_path / "a", silent, calibration=None, precision="fp32")
    with closing(backend.load(artefact.read_engine())) as loaded:
        yield Counting(loaded)


def answers(model: Model, engine: Engine, batch: BatchConfig) -> dict[tuple[str, int], Classification]:
    """Return the answers to all frames; all cameras wait for their turn."""
    turns, served = RoundRobinScheduler([True] * CAMERAS), list[ServedFrame]()
    tasks = [VisionTask(model.spec, engine.inputs, engine.outputs) for _ in range(2)]
    loop = FrameLoop(turns, "a", engine, tasks, [served.append], batch)

    def feed(camera: int) -> None:
        for number in range(FRAMES):
            turns.slots[camera].put(Frame(number, number / 10, 0, IMAGES[camera, number], str(camera)))
        turns.slots[camera].close()

    feeding = [threading.Thread(target=feed, args=(camera,)) for camera in range(CAMERAS)]
    for thread in (*feeding, loop):
        thread.start()
    loop.join(30.0)
    assert loop.error is None
    for camera in range(CAMERAS):
        assert [each.frame.id for each in served if each.frame.camera == str(camera)] == list(range(FRAMES))
    found = {(each.frame.camera, each.frame.id): each.result for each in served}
    assert len(found) == len(served) == CAMERAS * FRAMES
    assert all(each.inferred_s > 0.0 for each in served)
    return {key: result for key, result in found.items() if isinstance(result, Classification)}


def assert_same(together: dict[tuple[str, int], Classification], alone: dict[tuple[str, int], Classification]) -> None:
    """No two frames have the same score, so that no answer can be another frame's."""
    scores = sorted(result.score for result in alone.values())
    assert min(np.diff(scores)) > 1e-6
    for key, result in together.items():
        assert result.class_id == alone[key].class_id
        assert result.score == pytest.approx(alone[key].score, abs=2e-7)


def test_each_frame_of_a_batch_gets_its_own_answer(model: Model, engine: Counting) -> None:
    alone = answers(model, engine, BatchConfig())
    assert set(engine.sizes) == {1}
    engine.sizes.clear()
    together = answers(model, engine, BatchConfig(frames=MOST, wait_s=1.0))
    assert max(engine.sizes) == MOST
    assert sum(engine.sizes) == CAMERAS * FRAMES
    assert_same(together, alone)


def test_an_engine_that_overlaps_takes_batches_too(model: Model, engine: Counting) -> None:
    overlapping = OverlappingDeviceEngine(engine)
    together = answers(model, overlapping, BatchConfig(frames=MOST, wait_s=1.0))
    assert max(engine.sizes) == MOST
    assert_same(together, answers(model, engine, BatchConfig()))


def put(turns: RoundRobinScheduler, camera: int, number: int = 0) -> None:
    turns.slots[camera].put(Frame(number, 0.0, 0, IMAGES[0, 0], str(camera)))


def test_a_frame_waits_for_others_no_longer_than_it_may() -> None:
    clock = TurnedClock()
    turns = RoundRobinScheduler([False, False, False], clock)
    put(turns, 2)
    assert turns.next_frame() is not None
    put(turns, 1)
    assert turns.next_frame() is not None
    assert turns.more_for_batch(2, 0.0) == []

    def more(act: Callable[[], None]) -> list[str]:
        """Return the cameras that are added to a batch, where this is done while the first frame waits."""
        found: list[Frame] = []
        waiting = threading.Thread(target=lambda: found.extend(turns.more_for_batch(1, 1.0)))
        waiting.start()
        clock.until_waiting()
        act()
        waiting.join(60.0)
        return [frame.camera for frame in found]

    put(turns, 1, 1)  # of the same camera: not in this batch
    assert more(lambda: put(turns, 2)) == ["2"]
    following = turns.next_frame()
    assert following is not None
    assert following.camera == "1"
    assert more(lambda: clock.turn(1.0)) == []


def test_a_frame_does_not_wait_for_cameras_that_have_ended_or_deliver_nothing() -> None:
    clock = TurnedClock()
    turns = RoundRobinScheduler([True, False, False], clock)
    put(turns, 1)
    assert turns.next_frame() is not None
    clock.turn(2.0)  # camera 1 counts as silent from now on
    turns.slots[2].close()
    put(turns, 0)
    assert turns.next_frame() is not None
    assert turns.more_for_batch(1, 3600.0) == []


def test_a_model_that_takes_fewer_is_refused(model: Model, engine: Counting) -> None:
    check_batch(MOST, engine, model.spec)
    with pytest.raises(ConfigError, match=r"batch\.frames: batch\.frames: 4, and a model that takes 3 at once"):
        check_batch(MOST + 1, engine, model.spec)
    spec = ModelSpec.model_validate({**model.spec.model_dump(), "input": {**SPEC["input"], "resize": "native"}})
    with pytest.raises(ConfigError, match=r"inputs of one size"):
        check_batch(MOST, engine, spec)
