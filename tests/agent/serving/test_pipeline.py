"""The frame path keeps nothing of a frame, and goes on when a sink fails."""

from __future__ import annotations

import gc
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from camera_pictures import write_video
from runtime_under_test import RUNTIME
from unexpected import unexpected
from worlds import SPEC
from zoo import residual_net

from agent.camera.capture import Frame
from agent.common.schema import validate
from agent.config import Config
from agent.models.model import open_model
from agent.monitoring.drift import Regime
from agent.results.file_output import ResultsFile
from agent.results.socket_output import ResultsSocket
from agent.results.writer import Output, ResultsWriter
from agent.serving.inference import Sink
from agent.serving.pipeline import Feed, Pipeline
from agent.state.store import StateStore
from agent.vision.task import ServedFrame
from agent.vision.tasks.classify import Classification
from calibrate.errors import TaredError
from engines.interface import silent
from engines.registry import open_backend

WARM, FRAMES = 100, 300
PICTURE = np.random.default_rng(0).integers(0, 256, (120, 160, 3), dtype=np.uint8)


class Heap:
    """A sink of the frame path that measures the growth of Python's heap between two frames, and its peak."""

    def __init__(self) -> None:
        self._count = 0
        self.gained_bytes = self.peak_bytes = 0

    def add(self, _served: ServedFrame) -> None:
        self._count += 1
        if self._count == WARM:
            gc.collect()
            tracemalloc.start()
        elif self._count == WARM + FRAMES:
            gc.collect()
            self.gained_bytes, self.peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()


def configure(folder: Path, **cameras: object) -> Config:
    """cameras: the sections of the configuration that name them."""
    onnx.save(residual_net((1, 3, 32, 32)), folder / "model.onnx")
    content = {
        "model": {**SPEC, "path": str(folder / "model.onnx")},
        "state_dir": str(folder / "state"),
        "backend": RUNTIME,
        "observe": {"budget": None, "period_s": 1e9, "alert_period_s": 1e9},
        **cameras,
    }
    return validate(Config, content, "test")


def open_pipeline(config: Config, sinks: Sequence[Sink] = ()) -> tuple[Pipeline, list[str]]:
    """Return a pipeline that is not started, and the errors and returns that it will report."""
    model, backend, errors = open_model(config.model), open_backend(RUNTIME), list[str]()
    engine = backend.load(backend.build(model.reference).engine)
    sources = [camera.to_source() for camera in config.every_camera]

    def note(error: TaredError | None) -> None:
        errors.append(str(error or "back"))

    pipeline = Pipeline(
        config,
        StateStore(None),
        sources,
        model,
        "a",
        engine,
        0,
        lambda *_: None,
        note,
        note,
        silent,
        lambda _: None,
        sinks,
    )
    return pipeline, errors


def play(folder: Path, sinks: Sequence[Sink], outputs: Sequence[Output] = ()) -> tuple[Pipeline, list[str]]:
    """Serve `clip.avi` to its end, as the daemon does; return the pipeline, and the codes of errors and returns."""
    config = configure(folder, camera={"source": str(folder / "clip.avi"), "speed": 0})
    with ResultsWriter(config, outputs) as writer:
        pipeline, errors = open_pipeline(config, [writer.offer, *sinks])
        pipeline.start(lambda: False)
        pipeline.join()
        writer.flush()
    return pipeline, errors


def test_a_camera_and_the_outputs_keep_nothing_of_a_frame(tmp_path: Path) -> None:
    """OpenCV makes each picture anew: at most a tenth of them is on its way, and the others are gone."""
    heap = Heap()
    write_video(tmp_path / "clip.avi", [PICTURE] * (WARM + FRAMES))
    outputs = [ResultsFile(tmp_path / "results.jsonl"), ResultsSocket(tmp_path / "results.socket")]
    pipeline, errors = play(tmp_path, [heap.add], outputs)
    assert not errors
    assert pipeline.served == WARM + FRAMES
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == WARM + FRAMES
    assert heap.gained_bytes <= heap.peak_bytes < FRAMES // 10 * PICTURE.nbytes


def test_a_sink_that_fails_is_named_with_one_traceback_for_each_kind_of_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_video(tmp_path / "clip.avi", [PICTURE] * 60)
    served: list[int] = []

    def picky(answer: ServedFrame) -> None:
        if answer.frame.id < 10:
            raise (KeyError if answer.frame.id % 2 else ZeroDivisionError)(answer.frame.id)

    pipeline, errors = play(tmp_path, [picky, lambda answer: served.append(answer.frame.id)])
    assert served == list(range(60)), "other sinks get every answer"
    assert pipeline.served == 60
    assert [error.partition(";")[0] for error in errors] == [
        f"serving.sinks: {picky.__qualname__} raised ZeroDivisionError: 0",
        "back",
    ]
    logged = [
        record for record in caplog.records if record.exc_info and f"place={picky.__qualname__}" in record.message
    ]
    assert [record.exc_info[0] for record in logged if record.exc_info] == [ZeroDivisionError, KeyError]


GATE, YARD = ({"name": name, "source": f"rtsp://{name}"} for name in ("gate", "yard"))
TAPE = {"name": "tape", "source": "clip.avi"}


@pytest.mark.parametrize(
    ("cameras", "files", "labelled"),
    [
        ([GATE, YARD], 2, {"gate": 1, "yard": 0}),
        ([TAPE, YARD, GATE], 2, {"tape": 0, "yard": 0, "gate": 1}),
        ([GATE, TAPE], 1, {"gate": 1, "tape": 0}),
    ],
)
def test_after_a_restart_each_live_camera_goes_on_with_its_own_evidence_and_a_recording_with_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cameras: list[dict[str, str]], files: int, labelled: dict[str, int]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_video(Path("clip.avi"), [PICTURE])
    state_dir = tmp_path / "state"
    state_dir.mkdir()

    def start(cameras: list[dict[str, str]]) -> dict[str, Feed]:
        """Start a process, which answers a frame of each camera."""
        pipeline, _ = open_pipeline(configure(tmp_path, cameras=cameras))
        pipeline.keep_evidence(state_dir, unexpected)
        for name, feed in pipeline.feeds.items():
            pipeline.observer.monitors[name].watch(Regime("day", {}, {}, {}), [], 0.0, recall=True)
            feed.add_answer(ServedFrame(Frame(0, 0.0, 0, PICTURE, name), "day", Classification(3, 1.0), 1, 0.001))
        return pipeline.feeds

    before = start([GATE, YARD, TAPE])
    for name in ("gate", "tape"):
        before[name].accuracy.label_frame(0, 3)
    after = start(cameras)
    assert {name: feed.accuracy.estimate.interval.n for name, feed in after.items()} == labelled
    kept = Counter(path.name.partition("-")[0] for path in state_dir.glob("*.jsonl"))
    assert kept == {"evidence": files, "accuracy": files}
