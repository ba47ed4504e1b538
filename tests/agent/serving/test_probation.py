"""A candidate is judged by its latency and its fidelity beside those of the previous engine."""

from __future__ import annotations

import numpy as np
import pytest

from agent.camera.capture import Frame
from agent.common.errors import AgentError
from agent.config import ProbationConfig
from agent.monitoring.camera_monitor import PairedFidelityGain
from agent.serving.trial import AnswerRecord, Probation, deadline_s, quantile_bounds
from agent.vision.fidelity import Fidelity
from agent.vision.task import ServedFrame
from agent.vision.tasks.raw import RawOutputs
from calibrate.statistics.evidence import Interval

IMAGE = np.zeros((2, 2, 3), np.uint8)
UNKNOWN = Interval(0.0, -1.0, 1.0, 0)


def answer(record: AnswerRecord, engine: str, *, frame: int, inferred_s: float = 0.01, ts: float | None = None) -> None:
    captured_ns = frame * 100_000_000
    taken = Frame(frame, frame / 10.0 if ts is None else ts, captured_ns, IMAGE)
    record.add(ServedFrame(taken, engine, RawOutputs({}), captured_ns, inferred_s))


def probation(
    max_loss: float = 0.1, frames: int = 100, seconds: float = 10.0, first: bool = False
) -> tuple[Probation, AnswerRecord]:
    """On a stretch of 200 frames by the engine before, whose times vary by a tenth."""
    record = AnswerRecord(live=False)
    for frame in range(200):
        answer(record, "before", frame=frame, inferred_s=0.01 * (1.0 + 0.1 * (frame % 10) / 10))
    config = ProbationConfig(frames=frames, seconds=seconds)
    return Probation(config, record, "new", "before", max_loss, first=first), record


def code(error: AgentError | None) -> str:
    return error.code if error is not None else ""


def test_a_probation_lasts_for_frames_and_for_seconds() -> None:
    watch, record = probation(frames=20, seconds=3.0)
    over = []
    for frame in range(200, 240):
        answer(record, "new", frame=frame)
        over.append(watch.is_finished)
    assert over.index(True) == 30  # 3 s after the first at ten a second
    watch, record = probation(frames=20, seconds=0.5)
    for frame in range(200, 219):
        answer(record, "new", frame=frame)
    assert not watch.is_finished
    answer(record, "new", frame=219)
    assert watch.is_finished


def test_on_a_camera_of_few_frames_it_is_over_after_ten_times_the_seconds() -> None:
    for every_s, seconds, frames in ((1.0, 5.0, 51), (1.0, 2.0, 32), (0.1, 20.0, 300), (1.0, 0.0, 300)):
        record, number = AnswerRecord(live=False), 0
        watch = Probation(ProbationConfig(frames=300, seconds=seconds), record, "new", "before", 0.1)
        while not watch.is_finished:
            answer(record, "new", frame=number, ts=1000.0 + number * every_s)
            number += 1
        assert number == frames


def test_a_gap_in_the_video_is_no_time_that_it_stood() -> None:
    watch, record = probation(frames=20, seconds=60.0)
    for frame in range(20):
        answer(record, "new", frame=200 + frame, ts=(20.0 if frame < 10 else 3600.0) + frame / 10.0)
    assert watch.seconds == pytest.approx(1.8 + 0.5)
    assert not watch.is_finished


def test_earlier_answers_of_an_engine_do_not_count_again() -> None:
    record = AnswerRecord(live=False)
    for frame in range(50):
        answer(record, "new", frame=frame)
    watch = Probation(ProbationConfig(frames=10, seconds=0.0), record, "new", "before", 0.1)
    assert (watch.frames, watch.seconds) == (0, 0.0)


@pytest.mark.parametrize(("live", "seconds"), [(True, 1.0), (False, 3600.0)])
def test_on_a_camera_a_clock_that_is_set_is_no_time_that_passed(live: bool, seconds: float) -> None:
    record = AnswerRecord(live)
    answer(record, "new", frame=0, ts=0.0)
    answer(record, "new", frame=10, ts=3600.0)
    assert record.seconds("new") == seconds


@pytest.mark.parametrize(
    ("slowdown", "complaint"), [(0.5, ""), (1.0, ""), (1.8, ""), (2.5, "probation.latency"), (5.0, "probation.latency")]
)
def test_latency_beyond_what_is_allowed_ends_it_early(slowdown: float, complaint: str) -> None:
    watch, record = probation()
    found = []
    for number in range(100):
        spread = 1.0 + 0.1 * (number % 10) / 10
        answer(record, "new", frame=200 + number, inferred_s=0.01 * slowdown * spread)
        found.append(code(watch.objection([UNKNOWN])))
    assert found[-1] == complaint
    assert set(found[:31]) == {""}
    if complaint:
        assert found[31] == complaint
        error = watch.objection([UNKNOWN])
        assert error is not None
        assert watch.affected_frames(error, frame_was_waiting=False) == watch.late_frames == 100


def test_a_time_that_the_previous_engine_needs_itself_is_no_hang() -> None:
    config = ProbationConfig(deadline_s=2.0, max_slowdown=1.5)
    for slowest_s, limit_s in ((0.5, 2.0), (2.2, 3.3), (1000.0, 30.0)):
        record = AnswerRecord(live=False)
        assert deadline_s(config, record) == 2.0
        for frame, inferred_s in enumerate((0.1, slowest_s, 0.1)):
            answer(record, "before", frame=frame, inferred_s=inferred_s)
        record.start("new", "before")
        assert deadline_s(config, record) == pytest.approx(limit_s)


def test_slow_frames_now_and_then_are_counted_and_forgiven() -> None:
    watch, record = probation()
    for number in range(200):
        answer(record, "new", frame=200 + number, inferred_s=1.0 if number % 20 == 0 else 0.01)
    assert watch.late_frames == 10
    assert watch.objection([UNKNOWN]) is None


def test_a_tail_that_a_long_record_shows_is_slow() -> None:
    record = AnswerRecord(live=False)
    for frame in range(2000):
        answer(record, "before", frame=frame)
    watch = Probation(ProbationConfig(), record, "new", "before", 0.1)
    for number in range(600):
        answer(record, "new", frame=2000 + number, inferred_s=1.0 if number % 20 == 0 else 0.01)
    error = watch.objection([UNKNOWN])
    assert code(error) == "probation.latency"
    assert "p99" in str(error)


def test_a_candidate_as_fast_as_the_previous_engine_is_almost_never_refused() -> None:
    """Times have heavy tails, and each tenth frame is judged: a limit of 1.0 errs seldom, one of 2.0 never."""
    rng = np.random.default_rng(0)
    wrong = {1.0: 0, 2.0: 0}
    for slowdown in wrong:
        for _ in range(100):
            record = AnswerRecord(live=False)
            times_s = 0.01 * rng.lognormal(0.0, 0.5, 500)
            for frame, time_s in enumerate(times_s[:300]):
                answer(record, "before", frame=frame, inferred_s=float(time_s))
            watch = Probation(ProbationConfig(max_slowdown=slowdown), record, "new", "before", 0.1)
            for frame, time_s in enumerate(times_s[300:]):
                answer(record, "new", frame=300 + frame, inferred_s=float(time_s))
                if frame % 10 == 0 and watch.objection([UNKNOWN]) is not None:
                    wrong[slowdown] += 1
                    break
    assert wrong[2.0] == 0
    assert wrong[1.0] <= 3


def test_the_bounds_of_a_quantile_hold_it() -> None:
    rng, held = np.random.default_rng(1), 0
    for _ in range(300):
        low, high = quantile_bounds(np.sort(rng.exponential(size=400)), 0.5)
        held += low <= np.log(2.0) <= high
    assert held >= 296
    assert quantile_bounds(np.sort(rng.exponential(size=100)), 0.99)[1] == np.inf
    assert quantile_bounds(np.array([1.0, 2.0]), 0.5) == (0.0, np.inf)


@pytest.mark.parametrize(("first", "may_lose"), [(False, 0.01), (True, 0.2)])
def test_fidelity_surely_below_the_engine_before_ends_it_and_all_its_frames_suffered(
    first: bool, may_lose: float
) -> None:
    watch, record = probation(max_loss=0.2, first=first)
    for frame in range(200, 240):
        answer(record, "new", frame=frame)
    assert watch.objection([UNKNOWN]) is None
    assert watch.objection([Interval(-0.4, -0.8, -may_lose, 9)]) is None
    error = watch.objection([Interval(-0.5, -0.8, -may_lose - 0.001, 10)])
    assert error is not None
    assert error.code == "probation.fidelity"
    assert watch.affected_frames(error, frame_was_waiting=False) == 40


def test_at_its_end_any_loss_counts_that_is_more_than_chance() -> None:
    rng = np.random.default_rng(5)
    watch, _ = probation()
    worse, alike = PairedFidelityGain(), PairedFidelityGain()
    for second in range(60):
        before, lost, flips = rng.uniform(0.6, 0.9), max(rng.normal(0.06, 0.1), -0.1), rng.normal(0.0, 0.03)
        worse.add(second, Fidelity(before - lost), Fidelity(before))
        alike.add(second, Fidelity(before - flips), Fidelity(before))
    assert watch.objection([worse.gain, alike.gain]) is None  # while it lasts, chance is given more room
    assert (worse.is_loss, alike.is_loss) == (True, False)
    error = watch.objection([worse.gain], [worse.gain])
    assert code(error) == "probation.fidelity"


@pytest.mark.trial
def test_a_candidate_as_good_as_the_engine_before_is_condemned_in_one_probation_of_forty_at_most() -> None:
    rng, condemned = np.random.default_rng(2), 0
    watch, _ = probation()
    for _ in range(100):
        beside = PairedFidelityGain()
        for second, (candidate, before) in enumerate(rng.random((200, 2)) < 0.8):
            for _neighbour in range(5):  # right and wrong together
                beside.add(second + 0.2 * _neighbour, Fidelity(float(candidate)), Fidelity(float(before)))
            if watch.objection([beside.gain]) is not None:
                condemned += 1
                break
    assert condemned <= 5  # of neighbours that count for themselves 54 are


def test_a_scene_that_is_hard_for_both_speaks_against_neither_and_one_that_only_one_reads_does() -> None:
    watch, _ = probation()
    hard, empty, worse = PairedFidelityGain(), PairedFidelityGain(), PairedFidelityGain()
    for second in range(60):
        hard.add(second, Fidelity(0.1), Fidelity(0.1))
        empty.add(second, Fidelity(1.0, is_empty=True), Fidelity(1.0, is_empty=True))
        worse.add(second, Fidelity(0.2), Fidelity(0.9))
    assert hard.gain.estimate == pytest.approx(0.0)
    assert empty.gain == UNKNOWN
    assert [code(watch.objection([beside.gain])) for beside in (hard, empty, worse)] == ["", "", "probation.fidelity"]
    assert -0.9 < worse.gain.low < -0.7 < worse.gain.high < -0.3


@pytest.mark.parametrize("reason", ["error", "output", "hang"])
def test_the_frame_it_failed_on_has_suffered_unless_that_was_its_rehearsal(reason: str) -> None:
    watch, record = probation()
    answer(record, "new", frame=200)
    answer(record, "new", frame=201, inferred_s=1.0)
    error = AgentError(f"probation.{reason}", "a", "b", "c")
    affected = [watch.affected_frames(error, frame_was_waiting=waited) for waited in (True, False)]
    assert affected == [2, 1]


@pytest.mark.parametrize("order", [1, -1])
def test_time_passes_where_cameras_deliver_in_step(order: int) -> None:
    """Their frames come in bursts, answered in whatever order."""
    record = AnswerRecord(live=True)
    for tenth in range(600):
        for number in range(4)[::order]:
            captured_ns = tenth * 100_000_000 + number * 1000
            record.add(ServedFrame(Frame(tenth, 0.0, captured_ns, IMAGE, str(number)), "new", RawOutputs({}), 0, 0.01))
    assert record.seconds("new") == pytest.approx(60.0, rel=0.05)
    assert record.frames("new") == 2400


def test_a_share_of_a_batch_is_no_measure_for_a_frame_alone() -> None:
    record = AnswerRecord(live=True)
    for number in range(40):
        record.add(ServedFrame(Frame(number, 0.0, number, IMAGE), "old", RawOutputs({}), 0, 0.002, batch_size=4))
    assert record.times_s("old").size == 0
    assert record.frames("old") == 40
