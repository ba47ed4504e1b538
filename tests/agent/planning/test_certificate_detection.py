"""The certificate of a detector: empty frames are counted apart and prove nothing, and classes are not confused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from trial_bench import INPUT, USUAL, WARM_UP, Compute, MakeTrialBench

from agent.camera.source import Source, parse_source
from agent.vision.spec import ModelSpec
from engines.interface import Array

QUARTERS = ModelSpec(path=Path("quarters.onnx"), task="detect", decoder="end2end", input=INPUT, labels=("car", "truck"))
DARK, CAR, TRUCK = 0, 128, 255


def detect(served: Callable[[int], int | None] = lambda number: number) -> Compute:
    """A box in the left half for a bright left, and in the right half for a bright right; both of one class.

    served: the class by the brightness, 0 or 1; None serves nothing.
    """

    def compute(batch: NDArray[np.float32]) -> Array:
        rows = np.zeros((1, 2, 6), np.float32)
        for half in (0, 1):
            brightness = float(batch[0, :, :, 4 * half : 4 * half + 4].mean())
            number = served(int(brightness > 0.7))
            if brightness > 0.3 and number is not None:
                rows[0, half] = (4 * half, 0, 4 * half + 4, 8, 0.9, number)
        return rows

    return compute


def write_halves(path: Path, halves: Sequence[tuple[int, int]]) -> Source:
    """Images by the grey values of their halves."""
    path.mkdir()
    for number, (left, right) in enumerate(halves):
        image = np.full((8, 8, 3), left, np.uint8)
        image[:, 4:] = right
        cv2.imwrite(str(path / f"{number:03}.bmp"), image)
    return parse_source(str(path))


def test_empty_frames_are_counted_apart(trial_bench: MakeTrialBench, tmp_path: Path) -> None:
    halves = [((CAR, TRUCK), (DARK, DARK), (DARK, CAR))[number % 3] for number in range(240)]
    made = trial_bench(source=write_halves(tmp_path / "street", halves), spec=QUARTERS, compute=detect())
    trial, runs = made.trial(detect())
    assert trial.accepted
    assert trial.frames == USUAL.fewest_frames
    assert 20 < trial.empty_frames == runs - WARM_UP - trial.frames
    blind, _ = made.trial(detect(lambda number: None if number else 0), "blind to trucks")
    assert blind.lower >= 0.05


def test_a_detection_on_an_empty_frame_is_a_loss(trial_bench: MakeTrialBench, tmp_path: Path) -> None:
    source = write_halves(tmp_path / "night", [(DARK, DARK)] * 120)

    def ghost(batch: NDArray[np.float32]) -> Array:
        rows = detect()(batch)
        rows[0, 0] = (0, 0, 4, 8, 0.9, 0)
        return rows

    trial, _ = trial_bench(source=source, spec=QUARTERS, compute=detect()).trial(ghost)
    assert (trial.accepted, trial.loss, trial.empty_frames) == (False, 1.0, 0)
