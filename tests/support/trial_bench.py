"""A certifier over a video of digits, with engines in NumPy that take a given time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from turned_clock import TurnedClock

from agent.camera.source import Source, parse_source
from agent.common.state_files import Journal
from agent.planning.certificate import Certifier, Terms, TrialResult
from agent.planning.frames import RandomFrames
from agent.vision.spec import InputSpec, ModelSpec
from engines.interface import Array, TensorSpec

CLASSES = 10
INPUT = InputSpec(color="bgr", resize="stretch", scale=1 / 255)
DIGITS = ModelSpec(path=Path("digits.onnx"), task="classify", input=INPUT, labels=tuple("0123456789"))
WARM_UP, TIMED = 5, 50
USUAL = Terms(max_loss=0.05, max_confusion=0.3)

Compute = Callable[[NDArray[np.float32]], Array]


@pytest.fixture
def engine_clock() -> TurnedClock:
    """The time as the engines below let it pass."""
    return TurnedClock()


class NumpyEngine:
    """Computes its output (1, ...) from the network input; `takes_ms` by the number of the inference."""

    def __init__(self, clock: TurnedClock, compute: Compute, takes_ms: Callable[[int], float] = lambda _: 1.0) -> None:
        self.inputs = [TensorSpec("image", np.dtype(np.float32), (1, 3, 8, 8))]
        example = compute(np.zeros((1, 3, 8, 8), np.float32))
        self.outputs = [TensorSpec("output", example.dtype, example.shape)]
        self.runs = 0
        self._clock = clock
        self._compute = compute
        self._takes_ms = takes_ms

    def infer(self, batch: Array) -> dict[str, Array]:
        self._clock.turn(self._takes_ms(self.runs) / 1000.0)
        self.runs += 1
        return {"output": self._compute(batch.astype(np.float32))}

    def close(self) -> None: ...


def digit(batch: NDArray[np.float32]) -> int:
    return int(batch[0, 0].mean() * 255.0) // 25


def read_digits(batch: NDArray[np.float32]) -> Array:
    """Logits of the digit that the blue of an image stands for."""
    return np.eye(CLASSES, dtype=np.float32)[[digit(batch)]] * 9.0


def misread(which: Callable[[int, bool], bool], as_digit: int) -> Compute:
    """Read as `read_digits`, but for digits for which, with the image's mark, `which` holds."""

    def compute(batch: NDArray[np.float32]) -> Array:
        marked = bool(batch[0, 2].mean() > 0.5)
        if which(digit(batch), marked):
            return np.eye(CLASSES, dtype=np.float32)[[as_digit]] * 9.0
        return read_digits(batch)

    return compute


def write_video(path: Path, digits: Sequence[int], marks: Sequence[bool]) -> Source:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10.0, (16, 16))
    for number, mark in zip(digits, marks, strict=True):
        writer.write(np.full((16, 16, 3), (number * 25 + 12, 128, 255 * mark), np.uint8))
    writer.release()
    return parse_source(str(path))


@pytest.fixture(scope="session")
def digits_video(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """800 digits; one in 32 is a 6, and 2 % of all are marked, of every digit."""
    digits = [6 if number % 32 == 0 else (0, 1, 2, 3, 4, 5, 7, 8, 9)[number % 9] for number in range(800)]
    marks = [number % 50 == 7 for number in range(800)]
    return write_video(tmp_path_factory.mktemp("digits") / "digits.avi", digits, marks)


class TrialBench:
    """A certifier of digits with all it needs, over a video."""

    def __init__(
        self,
        clock: TurnedClock,
        source: Source,
        journal: Path,
        terms: Terms,
        *,
        start: int = 0,
        spec: ModelSpec = DIGITS,
        compute: Compute = read_digits,
        **more: Any,
    ) -> None:
        self.clock = clock
        self.reference = NumpyEngine(clock, compute)
        self.float_engine = NumpyEngine(clock, compute, lambda _: 2.0)
        self.journal = Journal(journal, "digits")
        frames = RandomFrames(source, 5)
        engines = (self.reference, self.float_engine)
        self.certifier = Certifier(spec, terms, [(frames, start)], *engines, self.journal, clock=clock, **more)

    def trial(self, compute: Compute, name: str = "int8") -> tuple[TrialResult, int]:
        """A candidate's trial, and how often it ran."""
        engine = NumpyEngine(self.clock, compute)
        (trial,) = self.certifier.try_candidate(name, engine).values()
        return trial, engine.runs


MakeTrialBench = Callable[..., TrialBench]


@pytest.fixture
def trial_bench(engine_clock: TurnedClock, digits_video: Source, tmp_path: Path) -> MakeTrialBench:
    def make(terms: Terms = USUAL, source: Source = digits_video, **more: Any) -> TrialBench:
        return TrialBench(engine_clock, source, tmp_path / "plan.journal", terms, **more)

    return make
