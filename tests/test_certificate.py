"""The certificate: a candidate passes only where its loss and its confusions are shown to be small."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from agent.camera import Source, parse_source
from agent.errors import AgentError
from agent.model_spec import ModelSpec
from agent.planning import certificate, held_out
from agent.planning.certificate import Certifier, check_frames
from agent.planning.held_out import RandomFrames
from agent.planning.journal import Journal
from agent.planning.trial import Measurement, Tally, Terms, Trial
from calibrate.loss_bound import frames_needed
from engines.backend import Array, TensorSpec

CLASSES = 10
INPUT = {"color": "bgr", "resize": "stretch", "scale": 1 / 255}
DIGITS = ModelSpec(path=Path("digits.onnx"), task="classify", input=INPUT, labels=tuple("0123456789"))
QUARTERS = ModelSpec(path=Path("quarters.onnx"), task="detect", decoder="end2end", input=INPUT, labels=("car", "truck"))
WARM_UP, TIMED = 5, 50
USUAL = Terms(max_loss=0.05, max_confusion=0.3, candidates=2)

Compute = Callable[[NDArray[np.float32]], Array]


class Clock:
    """The time as the engines below let it pass."""

    def __init__(self) -> None:
        self.ns = 0

    def perf_counter_ns(self) -> int:
        return self.ns


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    replaced = Clock()
    monkeypatch.setattr(certificate, "time", replaced)
    return replaced


class NumpyEngine:
    """Computes its output (1, ...) from the network input; `takes_ms` by the number of the inference."""

    def __init__(self, clock: Clock, compute: Compute, takes_ms: Callable[[int], float] = lambda _: 1.0) -> None:
        self.inputs = [TensorSpec("image", np.dtype(np.float32), (1, 3, 8, 8))]
        example = compute(np.zeros((1, 3, 8, 8), np.float32))
        self.outputs = [TensorSpec("output", example.dtype, example.shape)]
        self.runs = 0
        self._clock = clock
        self._compute = compute
        self._takes_ms = takes_ms

    def infer(self, batch: Array) -> dict[str, Array]:
        self._clock.ns += round(self._takes_ms(self.runs) * 1e6)
        self.runs += 1
        return {"output": self._compute(batch.astype(np.float32))}

    def close(self) -> None: ...


def digit(batch: NDArray[np.float32]) -> int:
    return int(batch[0, 0].mean() * 255.0) // 25


def read_digits(batch: NDArray[np.float32]) -> Array:
    """Logits of the digit that the blue of an image stands for."""
    return np.eye(CLASSES, dtype=np.float32)[[digit(batch)]] * 9.0


def misread(which: Callable[[int, bool], bool], as_digit: int) -> Compute:
    """As `read_digits`, but for digits of which, with the image's mark, `which` holds."""

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


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """800 digits; one in 32 is a 6, and 2 % of all are marked, of every digit."""
    digits = [6 if number % 32 == 0 else (0, 1, 2, 3, 4, 5, 7, 8, 9)[number % 9] for number in range(800)]
    marks = [number % 50 == 7 for number in range(800)]
    return write_video(tmp_path_factory.mktemp("digits") / "digits.avi", digits, marks)


class Bench:
    """A certifier of digits with all it needs, over a video."""

    def __init__(
        self,
        clock: Clock,
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
        self.certifier = Certifier(spec, terms, frames, start, *engines, self.journal, **more)

    def trial(self, compute: Compute, name: str = "int8") -> tuple[Trial, int]:
        """A candidate's trial, and how often it ran."""
        engine = NumpyEngine(self.clock, compute)
        return self.certifier.trial(name, name, engine), engine.runs


MakeBench = Callable[..., Bench]


@pytest.fixture
def bench(clock: Clock, video: Source, tmp_path: Path) -> MakeBench:
    def make(terms: Terms = USUAL, source: Source = video, **more: Any) -> Bench:
        return Bench(clock, source, tmp_path / "plan.journal", terms, **more)

    return make


def test_a_perfect_candidate_is_accepted_on_the_fewest_frames(bench: MakeBench) -> None:
    terms = Terms(0.05, 0.3, 5)
    assert terms.needed == frames_needed(0.05, 0.05 / 5)
    made = bench(terms)
    trial, runs = made.trial(read_digits)
    assert (trial.accepted, trial.frames, trial.empty_frames) == (True, terms.needed, 0)
    assert (trial.loss, trial.lower, trial.confused) == (0.0, 0.0, ())
    assert trial.upper <= 0.05
    assert trial.reason == f"loss at most 0.05 on {terms.needed} frames, 0 others empty; at most 0.05 is asked"
    assert runs == terms.needed + WARM_UP
    assert made.reference.runs == terms.needed
    assert made.float_engine.runs == TIMED + WARM_UP


def test_the_next_candidate_has_the_same_frames_and_no_reference(bench: MakeBench) -> None:
    made = bench()
    first, _ = made.trial(read_digits, "first")
    once = made.reference.runs
    second, _ = made.trial(read_digits, "second")
    assert second == first
    assert made.reference.runs == once


def test_a_bad_candidate_is_refused_long_before_a_good_one_passes(bench: MakeBench) -> None:
    made = bench()
    trial, _ = made.trial(misread(lambda number, _: number % 2 == 1, 0))
    assert not trial.accepted
    assert trial.lower >= 0.05
    assert trial.frames < USUAL.needed / 4
    assert trial.reason.startswith("loss at least 0.0")


def test_a_small_loss_passes_on_more_frames(bench: MakeBench) -> None:
    made = bench()
    trial, _ = made.trial(misread(lambda _, marked: marked, 0))
    assert trial.accepted
    assert 0.0 < trial.loss < 0.03
    assert USUAL.needed < trial.frames < 800


def test_sixes_read_as_eights_are_refused_behind_a_small_loss(bench: MakeBench) -> None:
    terms = Terms(0.1, 0.3, 1)
    trial, _ = bench(terms).trial(misread(lambda number, _: number == 6, 8))
    assert trial.upper <= 0.1
    (pair,) = trial.confused
    assert (pair.reference, pair.candidate, pair.count) == ("6", "8", pair.of)
    assert pair.low > 0.3
    assert not trial.accepted
    assert trial.reason == (
        f"'6' served as '8' on {pair.of} of {pair.of} frames, at least {pair.low:.3g} of all; at most 0.3 is asked"
    )


def test_a_confusion_that_is_allowed_is_named_all_the_same(bench: MakeBench) -> None:
    trial, _ = bench(Terms(0.1, 0.99, 1)).trial(misread(lambda number, _: number == 6, 8))
    assert trial.accepted
    assert [(pair.reference, pair.candidate) for pair in trial.confused] == [("6", "8")]


def test_confusions_may_be_asked_to_be_rarer_than_the_loss(bench: MakeBench, tmp_path: Path) -> None:
    """Of the ones, half of all, three quarters are marked and misread."""
    source = write_video(tmp_path / "ones.avi", [0, 1] * 80, [number % 8 != 1 for number in range(160)])
    trial, _ = bench(Terms(0.6, 0.05, 1), source).trial(misread(lambda number, marked: number == 1 and marked, 0))
    assert trial.upper <= 0.6
    assert not trial.accepted
    assert 0.05 < trial.confused[0].low < 0.6


def test_too_few_frames_are_told_before_an_engine_runs(bench: MakeBench, video: Source) -> None:
    terms = Terms(0.02, 0.3, 5)
    with pytest.raises(AgentError) as caught:
        bench(terms, start=600)
    assert str(caught.value) == (
        f"plan.frames: 200 frames to measure on in {video.location}, beside 600 to search with; "
        f"expected at least {terms.needed} for --max-loss 0.02 with 95 % confidence; "
        "give more frames, or accept --max-loss 0.026, for which 200 frames suffice"
    )
    assert Terms(0.026, 0.3, 5).needed <= 200 < Terms(0.025, 0.3, 5).needed
    check_frames(RandomFrames(video, 0), 600, Terms(0.026, 0.3, 5))


def test_the_fewest_frames_are_enough(video: Source) -> None:
    frames = RandomFrames(video, 0)
    check_frames(frames, 800 - USUAL.needed, USUAL)
    with pytest.raises(AgentError, match=f"{USUAL.needed - 1} frames to measure on"):
        check_frames(frames, 801 - USUAL.needed, USUAL)


@pytest.mark.parametrize("start", [800, 900])
def test_without_frames_no_loss_is_suggested(video: Source, start: int) -> None:
    with pytest.raises(AgentError, match=r"plan\.frames: 0 frames .*beside 800 .*; give more frames$"):
        check_frames(RandomFrames(video, 0), start, Terms(0.02, 0.3))


class Interrupted(Exception):
    pass


def failing(compute: Compute, runs: int) -> Compute:
    """Computes so often, and then raises; once more before that, for the example of its output."""
    left = iter(range(runs + 1))

    def attempt(batch: NDArray[np.float32]) -> Array:
        if next(left, None) is None:
            raise Interrupted
        return compute(batch)

    return attempt


def by_digit(clock: Clock, compute: Compute) -> Compute:
    """Larger digits take longer, so that a latency follows from the frame and not from when it is measured."""

    def timed(batch: NDArray[np.float32]) -> Array:
        clock.ns += 100_000 * digit(batch)
        return compute(batch)

    return timed


@pytest.mark.parametrize("frame", [0, 1, *np.random.default_rng(0).integers(2, 200, 3).tolist()])
def test_an_interrupted_trial_goes_on_where_it_was(bench: MakeBench, clock: Clock, frame: int) -> None:
    terms = Terms(0.08, 0.2, 1)
    compute = by_digit(clock, misread(lambda number, marked: marked or number == 6, 8))
    whole = bench(terms)
    expected, runs = whole.trial(compute)
    assert runs - WARM_UP > 200  # a frame each
    whole.journal.finish()

    interrupted = bench(terms)
    with pytest.raises(Interrupted):
        interrupted.trial(failing(compute, WARM_UP + frame))
    resumed = bench(terms)
    trial, rest = resumed.trial(compute)
    assert trial == expected
    assert rest == runs - frame - (WARM_UP if frame >= TIMED else 0)
    assert resumed.reference.runs == whole.reference.runs - frame

    replayed, none = bench(terms).trial(compute)
    assert (replayed, none) == (expected, 0)


def test_the_journal_of_one_candidate_says_nothing_of_another(bench: MakeBench) -> None:
    made = bench()
    made.trial(read_digits, "first")
    trial, runs = made.trial(misread(lambda number, _: number % 2 == 1, 0), "second")
    assert not trial.accepted
    assert runs == trial.frames + WARM_UP


def test_latencies_are_medians_of_the_same_frames_after_the_warm_up(bench: MakeBench, clock: Clock) -> None:
    made = bench()
    slow_in_the_end = NumpyEngine(clock, read_digits, lambda run: 9.0 if run < WARM_UP or run >= WARM_UP + 50 else 1.0)
    trial = made.certifier.trial("int8", "int8", slow_in_the_end)
    assert (trial.latency_ms, trial.latency_float_ms) == (1.0, 2.0)
    uneven = NumpyEngine(clock, read_digits, lambda run: 1.0 + run % 2)
    assert made.certifier.trial("uneven", "uneven", uneven).latency_ms == 1.5


def test_whoever_goes_first_alternates(bench: MakeBench, clock: Clock) -> None:
    order: list[str] = []
    made = bench()

    def noted(name: str) -> Compute:
        def compute(batch: NDArray[np.float32]) -> Array:
            order.append(name)
            return read_digits(batch)

        return compute

    made.float_engine._compute = noted("float")
    candidate = NumpyEngine(clock, noted("int8"))
    order.clear()
    made.certifier.trial("int8", "int8", candidate)
    timed = order[2 * WARM_UP : 2 * WARM_UP + 2 * TIMED]
    assert timed == ["int8", "float", "float", "int8"] * (TIMED // 2)
    assert set(order[2 * WARM_UP + 2 * TIMED :]) == {"int8"}


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_outputs_that_are_not_finite_are_a_loss(bench: MakeBench, broken: float) -> None:
    def compute(batch: NDArray[np.float32]) -> Array:
        logits = read_digits(batch)
        logits[0, (digit(batch) + 1) % CLASSES] = broken  # the reference's class may well be the top one still
        return logits

    made = bench()
    trial, _ = made.trial(compute)
    assert (trial.accepted, trial.loss) == (False, 1.0)
    known: Any = [made.journal.get(f"trial int8 {number}") for number in range(trial.frames)]
    assert {served for measured in known for _, served in measured["answers"]} == {None}  # a loss, and no confusion


def test_a_trial_ends_when_the_time_is_up(bench: MakeBench) -> None:
    made = bench(deadline=lambda: True)
    for frames in (1, 2):  # the next attempt replays, and measures one more
        trial, runs = made.trial(read_digits)
        assert (trial.accepted, trial.frames, runs) == (False, frames, 1 + WARM_UP)
    assert (
        trial.reason == "loss 0, perhaps 0.87, on 2 frames, 0 others empty, and the time was up; at most 0.05 is asked"
    )


def test_what_the_frames_leave_open_is_refused(bench: MakeBench) -> None:
    trial, _ = bench(start=600).trial(misread(lambda number, marked: marked or number == 6, 8))
    assert (trial.accepted, trial.frames) == (False, 200)
    assert trial.lower < 0.05 < trial.upper
    assert "and there were no more frames" in trial.reason


def test_twenty_times_the_fewest_frames_are_enough(bench: MakeBench) -> None:
    terms = Terms(0.5, 0.9, 1)
    trial, _ = bench(terms).trial(misread(lambda number, marked: (number % 2 == 1) != marked, 0))
    assert trial.frames == 20 * terms.needed
    assert not trial.accepted
    assert "and more would take too long" in trial.reason


def test_a_candidate_whose_mean_is_too_high_is_not_measured_to_the_end() -> None:
    tally = Tally(USUAL)
    for number in itertools.count():
        tally.add(Measurement(float(number % 19 == 0), False, [], (1.0, 2.0)))
        if tally.is_decided:
            break
    trial = tally.trial(DIGITS, "the frames ended")
    assert trial.frames == max(100, USUAL.needed) < 20 * USUAL.needed
    assert (trial.accepted, trial.lower < 0.05) == (False, True)
    assert "and more would hardly lower it" in trial.reason


def test_a_candidate_too_many_is_refused(bench: MakeBench) -> None:
    made = bench(Terms(0.1, 0.3, 2))
    for name in ("a", "b", "a"):
        assert made.trial(read_digits, name)[0].accepted
    with pytest.raises(ValueError, match="'c' is one more"):
        made.trial(read_digits, "c")


def test_a_trial_is_json_and_its_progress_is_told(bench: MakeBench) -> None:
    told: list[tuple[float, str]] = []
    made = bench(Terms(0.1, 0.99, 1), progress=lambda done, what: told.append((done, what)))
    trial, _ = made.trial(misread(lambda number, _: number == 6, 8), "the fastest")
    again = json.loads(json.dumps(asdict(trial)))
    assert again["confused"][0]["reference"] == "6"
    assert again["upper"] == trial.upper
    assert len(told) == trial.frames
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1] == (1.0, f"the fastest: loss at most {trial.upper:.3g} on {trial.frames} frames")


def test_raw_outputs_are_measured_and_not_kept(bench: MakeBench) -> None:
    raw = ModelSpec(path=Path("raw.onnx"), task="raw", input=INPUT)
    made = bench(spec=raw)
    assert made.trial(lambda batch: read_digits(batch) * 1.05, "close")[0].accepted  # 26 dB
    once = made.reference.runs
    far, _ = made.trial(lambda batch: read_digits(batch) * 1.2, "far")  # 14 dB
    assert (far.accepted, far.loss) == (False, 1.0)
    assert made.reference.runs == once + far.frames


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


DARK, CAR, TRUCK = 0, 128, 255


def test_empty_frames_are_counted_apart(bench: MakeBench, tmp_path: Path) -> None:
    halves = [((CAR, TRUCK), (DARK, DARK), (DARK, CAR))[number % 3] for number in range(240)]
    made = bench(source=write_halves(tmp_path / "street", halves), spec=QUARTERS, compute=detect())
    trial, runs = made.trial(detect())
    assert trial.accepted
    assert trial.frames == USUAL.needed
    assert 20 < trial.empty_frames == runs - WARM_UP - trial.frames
    blind, _ = made.trial(detect(lambda number: None if number else 0), "blind to trucks")
    assert blind.lower >= 0.05


def test_a_class_that_is_served_as_another_is_named(bench: MakeBench, tmp_path: Path) -> None:
    halves = [(TRUCK, TRUCK) if number % 8 == 0 else (CAR, DARK) for number in range(300)]
    source = write_halves(tmp_path / "street", halves)
    trial, _ = bench(Terms(0.2, 0.5, 1), source=source, spec=QUARTERS, compute=detect()).trial(detect(lambda _: 0))
    assert trial.upper <= 0.2
    assert not trial.accepted
    assert [(pair.reference, pair.candidate) for pair in trial.confused] == [("truck", "car")]
    assert "'truck' served as 'car'" in trial.reason


def test_frames_with_nothing_on_them_prove_nothing(bench: MakeBench, tmp_path: Path) -> None:
    source = write_halves(tmp_path / "night", [(DARK, DARK)] * 120)
    terms = USUAL
    trial, runs = bench(terms, source=source, spec=QUARTERS, compute=detect()).trial(detect())
    assert (trial.accepted, trial.frames, trial.empty_frames) == (False, 0, terms.needed)
    assert runs == terms.needed + WARM_UP
    assert trial.reason == (
        f"nothing found on any of {terms.needed} frames, which tells nothing; more would take too long"
    )


def test_what_is_seen_on_an_empty_frame_is_a_loss(bench: MakeBench, tmp_path: Path) -> None:
    source = write_halves(tmp_path / "night", [(DARK, DARK)] * 120)

    def ghost(batch: NDArray[np.float32]) -> Array:
        rows = detect()(batch)
        rows[0, 0] = (0, 0, 4, 8, 0.9, 0)
        return rows

    trial, _ = bench(source=source, spec=QUARTERS, compute=detect()).trial(ghost)
    assert (trial.accepted, trial.loss, trial.empty_frames) == (False, 1.0, 0)


def test_a_camera_has_frames_enough_and_never_the_same(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    def live(_: Source) -> Iterator[tuple[float, NDArray[np.uint8]]]:
        for second in range(100_000):
            yield float(second), np.full((16, 16, 3), second % 250, np.uint8)

    monkeypatch.setattr(held_out, "read_images", live)
    made = bench(source=parse_source("rtsp://10.0.0.1/stream"))
    for name in ("first", "second"):
        assert made.trial(read_digits, name)[0].accepted
    assert made.reference.runs == 2 * USUAL.needed
