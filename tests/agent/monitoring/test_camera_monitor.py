"""Evidence of observed frames is kept over a restart; a frozen camera gives none; regimes are proved sound."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drift_bench import calibration, regime, scene
from kept import kept_in
from worlds import SPEC
from zoo import Net

from agent.camera.capture import Frame
from agent.collection.collection import SharedCollection
from agent.common.schema import validate
from agent.config import Config
from agent.models.model import Model
from agent.monitoring.accuracy import MAX_BYTES
from agent.monitoring.camera_monitor import CameraMonitor, Spending
from agent.monitoring.drift import Regime
from agent.monitoring.evidence_file import EvidenceFile
from agent.monitoring.regimes import Regimes, RegimeStore
from agent.vision.answer import Answer, ServedClass
from agent.vision.detections import Detections
from agent.vision.spec import ModelSpec
from agent.vision.task import ServedFrame
from agent.vision.tasks.classify import Classification
from agent.vision.tasks.raw import RawOutputs
from calibrate.histogram import AbsHistogram, abs_histogram, merge_all
from calibrate.plan import ALL_INT8
from engines.calibration import calibrate_histograms
from engines.interface import Observation
from engines.quantise.placement import place

RIGHT, WRONG = Classification(0, 0.9), Classification(1, 0.9)
NOTHING = Detections(boxes=np.zeros((0, 4), np.float32), classes=np.zeros(0, np.int64), scores=np.zeros(0, np.float32))
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(8, 248, (16, 16, 3), dtype=np.uint8) + RNG.integers(0, 8, (64, 16, 16, 3), dtype=np.uint8)


@pytest.fixture
def config() -> Config:
    content = {"model": SPEC, "camera": {"source": "rtsp://camera"}, "regimes": {"dwell_s": 60.0}}
    return validate(Config, content, "test")


def monitor_for(config: Config, memory: Path | None = None) -> CameraMonitor:
    spec = ModelSpec.model_validate(SPEC)
    made = CameraMonitor(spec, config, SharedCollection(spec, config))
    if memory is not None:
        made.remember(EvidenceFile(memory, "rtsp://camera", lambda error: pytest.fail(str(error))))
    return made


def feed(
    monitor: CameraMonitor,
    seconds: range,
    light: float = 1.0,
    wrong: int = 0,
    frozen: bool = False,
    dark: bool = False,
    truth: Answer = RIGHT,
) -> None:
    """A frame a second; of every ten so many are answered wrongly."""
    for second in seconds:
        image = IMAGES[0 if frozen else second % len(IMAGES)] // (64 if dark else 1)
        frame = Frame(second, float(second), 0, image)
        served = ServedFrame(frame, "lit 1", WRONG if second % 10 < wrong else truth, 0, 0.0)
        monitor.add(served, np.zeros((1, 3, 8, 8), np.float32), Observation({}, scene(light, second)), truth)


def known_of(monitor: CameraMonitor) -> tuple[Any, ...]:
    state = monitor.state("", Spending(0.0, 0.0))
    return state.drift, state.fidelity, state.fidelity_since


def test_evidence_survives_the_process(config: Config, tmp_path: Path) -> None:
    memory = tmp_path / "evidence.jsonl"
    first = monitor_for(config, memory)
    first.watch(regime(), [], 0.0, recall=True)
    feed(first, range(40), wrong=1)
    feed(first, range(40, 69), light=1 / 16)  # a warning
    second = monitor_for(config, memory)
    second.watch(regime(), [], 100.0, recall=True)
    assert known_of(second) == known_of(first)
    anew = monitor_for(config, memory)
    anew.watch(regime(), [], 100.0)
    state = anew.state("", Spending(0.0, 0.0))
    assert state.drift is not None
    assert (state.drift.e_value, state.fidelity.n) == (0.0, 0)


def test_noise_that_costs_no_fidelity_warns_and_noise_that_does_raises_an_alarm(config: Config, tmp_path: Path) -> None:
    memory = tmp_path / "evidence.jsonl"
    monitor = monitor_for(config, memory)
    monitor.watch(regime(), [], 0.0)
    feed(monitor, range(60))
    feed(monitor, range(60, 180), light=1 / 16)
    faithful = monitor.state("", Spending(0.0, 0.0)).drift
    assert faithful is not None
    assert faithful.gain is not None
    assert (faithful.state, faithful.gain.estimate < 0.01) == ("warning", True)
    restarted = monitor_for(config, memory)
    restarted.watch(regime(), [], 180.0, recall=True)
    feed(restarted, range(181, 240), light=1 / 16)  # that a new process knows of no frames is no alarm
    assert known_of(restarted)[0].state == "warning"
    feed(restarted, range(240, 280), light=1 / 16, wrong=4)
    lossy = known_of(restarted)[0]
    assert (lossy.state, lossy.gain.estimate > 0.1) == ("alarm", True)
    feed(restarted, range(280, 330), light=1 / 16)
    assert known_of(restarted)[0].state == "alarm"  # it has not ended


def test_where_nothing_is_found_noise_alone_raises_an_alarm(config: Config) -> None:
    monitor = monitor_for(config)
    monitor.watch(regime(), [], 0.0)
    feed(monitor, range(60), truth=NOTHING)
    feed(monitor, range(60, 180), light=1 / 16, truth=NOTHING)
    drift = monitor.state("", Spending(0.0, 0.0)).drift
    assert drift is not None
    assert (drift.state, drift.gain) == ("alarm", None)


class ReadsMeanwhile(Classification):
    """An answer whose comparison reads in another thread what is known of the camera."""

    read: Callable[[], object]

    def fidelity(self, reference: Classification) -> float:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.read).result(timeout=30.0)
        return super().fidelity(reference)

    def pairs(self, served: Classification | None) -> list[ServedClass]:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.read).result(timeout=30.0)
        return super().pairs(served)


def test_a_reader_does_not_wait_for_the_comparison_of_a_crowd(config: Config) -> None:
    monitor = monitor_for(config)
    monitor.watch(regime(), [], 0.0)
    answer = ReadsMeanwhile(0, 0.9)
    object.__setattr__(answer, "read", lambda: known_of(monitor))
    feed(monitor, range(3), truth=answer)
    assert known_of(monitor)[1].n == 3


def test_a_frozen_camera_shows_nothing_new(config: Config) -> None:
    monitor = monitor_for(config)
    monitor.watch(regime(), [], 0.0)
    feed(monitor, range(30))
    feed(monitor, range(30, 60), frozen=True)
    before = monitor.state("", Spending(0.0, 0.0))
    feed(monitor, range(60, 120), light=1 / 16, frozen=True)
    after = monitor.state("", Spending(0.0, 0.0))
    assert after.view.trouble == "frozen"
    assert (after.collected, after.fidelity.n, after.drift) == (before.collected, before.fidelity.n, before.drift)
    feed(monitor, range(120, 130))
    assert monitor.state("", Spending(0.0, 0.0)).view.trouble == ""


def two_tensors() -> Model:
    """A model that quantises the tensors of `scene`."""
    net = Net((1, 3, 8, 8))
    master = net.model(net.conv(net.node("Relu", net.conv("image", 3, 4)), 4, 5))
    return Model(ModelSpec.model_validate(SPEC), master, "m", (1, 3, 8, 8), ALL_INT8, master, place(master))


def regimes_of(config: Config, folder: Path) -> tuple[CameraMonitor, Regimes, RegimeStore]:
    """A calibration for light 1 in service since capture time 0."""
    monitor, store = monitor_for(config), RegimeStore(kept_in(folder), "", 5)
    regimes = Regimes(config, store, [monitor], monitor.collection)
    regimes.watch("lit 1", two_tensors(), calibration(), {})
    return monitor, regimes, store


def dwell(monitor: CameraMonitor, regimes: Regimes, seconds: range, **how: Any) -> list[str]:
    """Return the regime learnt in each second, or an empty string."""
    learnt = []
    for second in seconds:
        feed(monitor, range(second, second + 1), **how)
        learnt.append(regimes.learn_if_proved({"camera": monitor.state("", Spending(0.0, 0.0))}, float(second)))
    return learnt


@pytest.mark.parametrize(
    ("seconds", "how", "learnt"),
    [
        pytest.param(120, {}, True, id="sound"),
        pytest.param(50, {}, False, id="too short"),
        pytest.param(120, {"wrong": 4}, False, id="unfaithful"),
        pytest.param(120, {"light": 1 / 16}, False, id="drifting"),
        pytest.param(140, {"truth": NOTHING}, False, id="a covered lens: both engines agree on nothing"),
        pytest.param(140, {"dark": True}, False, id="a covered lens: both classifiers are sure"),
    ],
)
def test_only_what_has_proved_sound_becomes_a_regime(
    config: Config, tmp_path: Path, seconds: int, how: dict[str, Any], learnt: bool
) -> None:
    monitor, regimes, store = regimes_of(config, tmp_path)
    found = dwell(monitor, regimes, range(seconds), **how)
    assert [each for each in found if each] == (["lit 1"] if learnt else [])
    assert len(store.known) == learnt


def test_a_clock_that_is_set_ahead_is_no_time_that_was_seen(config: Config, tmp_path: Path) -> None:
    monitor, regimes, _ = regimes_of(config, tmp_path)
    dwell(monitor, regimes, range(20))
    assert not any(dwell(monitor, regimes, range(100_000, 100_005)))


def test_a_regime_that_the_operator_took_back_is_not_learnt(config: Config, tmp_path: Path) -> None:
    monitor, regimes, store = regimes_of(config, tmp_path)
    dwell(monitor, regimes, range(90))
    assert [known.artefact for known in store.known] == ["lit 1"]
    regimes.forget("lit 1")
    assert not any(dwell(monitor, regimes, range(90, 200)))
    assert not store.known


def test_forgetting_a_regime_leaves_the_evidence_for_what_serves(config: Config, tmp_path: Path) -> None:
    monitor, regimes, store = regimes_of(config, tmp_path)
    store.learn(regime(1 / 16))
    feed(monitor, range(30), light=1 / 16)
    before = monitor.state("", Spending(0.0, 0.0))
    regimes.forget("lit 0.0625")
    after = monitor.state("", Spending(0.0, 0.0))
    assert before.drift is not None
    assert after.drift is not None
    assert after.drift.e_value == before.drift.e_value > 0.0
    assert (after.fidelity, after.collected) == (before.fidelity, before.collected)


def crowd(light: float, seed: int) -> dict[str, AbsHistogram]:
    """One frame of a network with as many taps as yolox_nano has."""
    rng = np.random.default_rng(seed)
    return {f"tap {n}": abs_histogram((rng.normal(size=64) * light).astype(np.float32)) for n in range(105)}


@pytest.fixture
def traced() -> Iterator[Callable[[], int]]:
    """How many bytes are allocated now."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()


@pytest.mark.trial
def test_all_that_is_known_of_a_large_network_takes_less_than_16_mb(config: Config, traced: Callable[[], int]) -> None:
    """Beside the held-out frames."""
    frames = [crowd(1.0, seed) for seed in range(2)]
    together = {name: merge_all(frame[name] for frame in frames) for name in frames[0]}
    made = calibrate_histograms(together, (), model_sha256="m", method="max", frames=2, source="test")
    serving = Regime.from_calibration("lit 1", made, made.scales, dict.fromkeys(made.scales, 1.0))
    before, monitor = traced(), monitor_for(config)
    monitor.watch(serving, [], 0.0)
    for second in range(48):
        image = np.repeat(np.repeat(IMAGES[second], 30, axis=0), 40, axis=1)  # whose thumbnails are of full size
        frame = Frame(second, float(second), 0, image)
        seen = Observation({}, crowd(1.0, second))
        monitor.add(ServedFrame(frame, "lit 1", RIGHT, 0, 0.0), np.zeros((1, 3, 8, 8), np.float32), seen, RIGHT)
    del seen, image, frame
    state = monitor.state("", Spending(0.0, 0.0))
    assert 0.9 * state.nbytes < traced() - before < 1.1 * state.nbytes + 2**20
    assert state.nbytes + MAX_BYTES < 16 * 2**20


@pytest.mark.parametrize("in_use", [False, True])
def test_a_warning_begins_a_collection_unless_a_job_waits_for_the_one_there_is(config: Config, in_use: bool) -> None:
    monitor = monitor_for(config)
    monitor.watch(regime(), [], 0.0)
    feed(monitor, range(40))
    monitor.collection.set_in_use(in_use)
    feed(monitor, range(40, 69), light=1 / 16)
    state = monitor.state("", Spending(0.0, 0.0))
    assert state.drift is not None
    assert state.drift.state != "calm"
    assert (state.collected > 30) is in_use


def test_the_gain_over_the_previous_engine_counts_frames_that_both_have_answered(config: Config) -> None:
    monitor = monitor_for(config)
    for begins, before in ((0, WRONG), (40, RIGHT)):
        monitor.watch(regime(), [], float(begins))
        assert monitor.state("", Spending(0.0, 0.0)).gain.n == 0
        for second in range(begins, begins + 40):
            frame = Frame(second, float(second), 0, IMAGES[second % len(IMAGES)])
            seen = np.zeros((1, 3, 8, 8), np.float32), Observation({}, scene(1.0, second)), RIGHT
            monitor.add(ServedFrame(frame, "another", WRONG, 0, 0.0), *seen, before)
            monitor.add(ServedFrame(frame, "lit 1", RIGHT, 0, 0.0), *seen, before if second % 2 else None)
        gain = monitor.state("", Spending(0.0, 0.0)).gain
        assert (gain.estimate, gain.n) == (1.0 if before is WRONG else 0.0, 20)
        assert gain.low < gain.estimate <= gain.high


def quickly(monitor: CameraMonitor, seconds: range, light: float = 1.0) -> None:
    """Ten frames a second, of a camera that stands still."""
    for tenth in range(10 * seconds.start, 10 * seconds.stop):
        frame = Frame(tenth, tenth / 10, 0, IMAGES[tenth % len(IMAGES)])
        served = ServedFrame(frame, "lit 1", RIGHT, 0, 0.0)
        monitor.add(served, np.zeros((1, 3, 8, 8), np.float32), Observation({}, scene(light, tenth)), RIGHT)


def test_frames_of_a_still_scene_are_chosen_sparingly_unless_a_job_waits(config: Config) -> None:
    monitor = monitor_for(config)
    quickly(monitor, range(20))
    chosen = monitor.collection.selection_report().detail()
    assert chosen["considered"] == 200
    assert chosen["taken"] == pytest.approx(20.0 * 512 * 4 / 3 / 300, abs=3)
    assert chosen["taken"] + chosen["duplicate"] == 200
    assert chosen["classes"] == {"a": chosen["taken"]}
    state = monitor.state("", Spending(0.0, 0.0))
    assert (state.collected, state.informative) == (chosen["taken"] - chosen["held_out"], chosen["held_out"])
    monitor.collection.restart(hurried=True)
    quickly(monitor, range(20, 26))
    assert monitor.collection.selection_report().detail()["taken"] == 60
    monitor.collection.restart()
    quickly(monitor, range(26, 32))
    assert monitor.collection.selection_report().detail()["taken"] < 30


def test_from_a_warning_on_frames_are_taken_as_they_come(config: Config) -> None:
    monitor = monitor_for(config)
    monitor.watch(regime(), [], 0.0)
    quickly(monitor, range(40))
    assert monitor.collection.selection_report().detail()["duplicate"] > 200
    quickly(monitor, range(40, 63), light=1 / 16)
    drift = monitor.state("", Spending(0.0, 0.0)).drift
    assert drift is not None
    assert drift.state != "calm"
    detail = monitor.collection.selection_report().detail()
    assert detail["taken"] == detail["considered"] > 50


def test_the_classes_of_a_frame_are_those_that_the_reference_sees() -> None:
    boxes = np.zeros((3, 4), np.float32)
    seen = Detections(boxes=boxes, classes=np.array([2, 0, 2]), scores=np.ones(3, np.float32))
    assert seen.classes_seen == {0, 2}
    assert RIGHT.classes_seen == {0}
    assert NOTHING.classes_seen == RawOutputs({"output": boxes}).classes_seen == frozenset()


def test_thumbnails_are_kept_only_for_a_sheet(config: Config) -> None:
    without = config.calibration.model_copy(update={"contact_sheet": False})
    monitor = monitor_for(config.model_copy(update={"calibration": without}))
    quickly(monitor, range(3))
    assert monitor.collection.selection_report().thumbnails is None
    plain = monitor_for(config)
    quickly(plain, range(26))
    assert len(plain.collection.selection_report().thumbnails or ()) == 48


@pytest.mark.parametrize(("light", "state"), [(1.0, "calm"), (1 / 16, "alarm")])
@pytest.mark.parametrize("calibrated", [False, True])
def test_a_scene_is_compared_with_that_of_a_refused_job_whatever_serves(
    config: Config, light: float, state: str, calibrated: bool
) -> None:
    """The float reference serves without any calibration that could drift."""
    monitor = monitor_for(config)
    if calibrated:
        monitor.watch(regime(1 / 16), [], 0.0)
    frames = [scene(1.0, 12345 + number) for number in range(8)]
    monitor.compare_with_refused(
        Regime.from_scene({name: merge_all(each[name] for each in frames) for name in frames[0]})
    )
    feed(monitor, range(300), light=light)
    since = monitor.state("", Spending(0.0, 0.0)).since_refusal
    assert since is not None
    assert since.state == state
    monitor.compare_with_refused(None)
    assert monitor.state("", Spending(0.0, 0.0)).since_refusal is None


class Notes(EvidenceFile):
    """Counts how often the losses of the classes are kept."""

    def __init__(self) -> None:
        super().__init__(None)
        self.classes = 0

    def note(self, part: str, state: Any) -> None:
        super().note(part, state)
        self.classes += part == "classes"


def many(classes: int) -> Detections:
    corners = 20.0 * np.arange(classes, dtype=np.float32)[:, None]
    boxes = np.concatenate([corners, corners, corners + 10.0, corners + 10.0], axis=1)
    return Detections(boxes=boxes, classes=np.arange(classes), scores=np.full(classes, 0.9, np.float32))


@pytest.mark.parametrize(("truths", "times"), [((NOTHING,), 0), ((many(2), many(4), many(4)), 200 * 10 // 3 // 64)])
def test_losses_of_classes_are_kept_every_so_many_values(
    config: Config, truths: tuple[Answer, ...], times: int
) -> None:
    monitor, notes = monitor_for(config), Notes()
    monitor.remember(notes)
    monitor.watch(regime(), (), 0.0)
    for second in range(200):
        feed(monitor, range(second, second + 1), truth=truths[second % len(truths)])
    assert notes.classes == times


def test_an_alarm_that_outlives_the_process_is_explained_in_the_next_one(config: Config, tmp_path: Path) -> None:
    first, second = (monitor_for(config, tmp_path / "evidence.jsonl") for _ in range(2))
    first.watch(regime(), (), 0.0)
    feed(first, range(60))
    seconds = 60
    while first.state("", Spending(0.0, 0.0)).explanation is None:
        feed(first, range(seconds, seconds + 3), light=8.0, wrong=4)
        seconds += 3
        assert seconds < 600
    second.watch(regime(), (), 0.0, recall=True)
    feed(second, range(seconds, seconds + 30), light=8.0, wrong=4)
    known = second.state("", Spending(0.0, 0.0))
    assert known.drift is not None
    assert (known.drift.state, known.explanation is not None) == ("alarm", True)
