"""Verdicts on a candidate, by its comparison."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from agent.validation.comparison import Comparison
from agent.validation.confusion import Disagreement
from agent.validation.verdict import MIN_INFORMATIVE, RAISED_GAIN, Verdict, VerdictLimits, decide
from agent.vision.fidelity import PooledIou

NOISE = np.tile([0.0, 0.02, -0.02, 0.01, -0.01, 0.0, 0.02, -0.02], 4)
CLASSES = 10


def around(mean: float) -> list[float]:
    return list(mean + NOISE)


def seen(
    candidate: Sequence[float],
    serving: Sequence[float] | None = None,
    latencies_ms: np.ndarray | None = None,
    misread: Sequence[Disagreement] | None = None,
    float_ms: float | None = None,
    **changes: object,
) -> Comparison:
    columns = [candidate] if serving is None else [candidate, serving]
    return Comparison(
        32,
        np.array(columns, np.float64).T.reshape(-1, len(columns)),
        np.ones((200, len(columns))) if latencies_ms is None else latencies_ms,
        np.full(32, 3.0),
        np.array([]) if float_ms is None else np.full(32, float_ms),
        [Disagreement() for _ in columns] if misread is None else misread,
        **changes,  # type: ignore[arg-type]  # outputs or rows
    )


def verdict(comparison: Comparison, max_loss: float = 0.1, max_slowdown: float = 1.25) -> Verdict:
    return decide(comparison, VerdictLimits(max_loss, max_slowdown))


def raised(candidate: Sequence[float], serving: Sequence[float]) -> bool:
    return decide(seen(candidate, serving), VerdictLimits(0.1, 1.25, RAISED_GAIN)).accepted


def accepted(candidate: Sequence[float], serving: Sequence[float] | None) -> bool:
    return verdict(seen(candidate, serving)).accepted


def test_a_first_engine_must_keep_the_loss() -> None:
    assert accepted(around(0.95), None)
    assert not accepted(around(0.85), None)


def test_the_pixels_of_all_frames_are_kept_by_class() -> None:
    pooled = PooledIou()
    for frame in ([(0, 90, 100), (1, 0, 1)], [(1, 5, 9)]):
        pooled.add(frame)
    found = verdict(seen(around(0.95), pooled=[pooled]))
    assert found.ious == pytest.approx({"0": 0.9, "1": 0.5})
    assert Verdict.from_dict(found.as_dict()) == found
    without = verdict(seen(around(0.95))).as_dict()
    assert "ious" not in without, "of other tasks it is as it was"
    assert Verdict.from_dict(without).ious == {}


def pooled_of(iou: float, pixels: int = 400, frames: int = 16) -> PooledIou:
    """Class 1 of so many pixels a frame has this IoU, and class 0 of 2000 has all."""
    pooled = PooledIou()
    for _ in range(frames):
        pooled.add([(0, 2000, 2000), (1, round(iou * pixels), pixels)])
    return pooled


def test_a_class_of_pixels_that_is_newly_lost_refuses_a_candidate_of_high_fidelity() -> None:
    kept, lost = pooled_of(0.9), pooled_of(0.1)
    found = verdict(seen(around(0.95), around(0.95), pooled=[lost, kept]))
    assert found.failed == ("confusion",)
    assert found.reason == "it newly loses 1: its IoU with the reference is 0.10, and 0.5 is asked"
    assert not verdict(seen(around(0.95), pooled=[lost])).accepted
    assert verdict(seen(around(0.95), around(0.95), pooled=[lost, lost])).accepted, "the engine in service has lost it"
    assert verdict(seen(around(0.95), pooled=[pooled_of(0.1, frames=4)])).accepted, "four frames may be chance"
    assert verdict(seen(around(0.95), pooled=[pooled_of(0.0, pixels=2)])).accepted, "hardly a pixel"


def test_a_later_engine_must_not_be_worse_than_the_one_in_service() -> None:
    assert accepted(around(0.95), around(0.60))
    assert accepted(around(0.95), around(0.95))
    assert not accepted(around(0.91), around(0.98))
    assert not accepted([0.6, 1.0, 1.0, 1.0], [1.0] * 4)


def test_a_loss_that_is_small_and_no_chance_is_none_that_is_kept() -> None:
    rng = np.random.default_rng(3)
    serving = rng.uniform(0.92, 1.0, 512)
    chance = rng.normal(0.0, 0.02, 512)
    assert accepted((serving - 0.005 + chance - chance.mean()).clip(0.0, 1.0).tolist(), serving.tolist()) is False
    assert accepted((serving + chance - chance.mean()).clip(0.0, 1.0).tolist(), serving.tolist()) is True


def test_a_candidate_that_loses_too_much_must_be_clearly_better() -> None:
    assert accepted(around(0.70), around(0.40))
    assert not accepted(around(0.70), around(0.70))
    assert not accepted(around(0.70)[:8], around(0.40)[:8]), "eight frames of any distribution show no gain of 0.3"


def test_raised_precision_has_to_gain_something_also_where_the_frames_are_easy() -> None:
    assert not raised([0.0] + [1.0] * 15, [0.0] + [1.0] * 15)
    assert raised([1.0] * 16, [0.0] + [1.0] * 15)
    assert raised(around(0.70), around(0.40))


def test_empty_frames_prove_nothing() -> None:
    few = MIN_INFORMATIVE - 1
    assert not accepted([1.0] * few, None)
    assert not accepted([1.0] * few, [0.0] * few)
    assert accepted([1.0] * MIN_INFORMATIVE, None)
    nothing = verdict(seen([], []))
    assert (nothing.accepted, nothing.empty_frames, nothing.failed) == (False, 32, ("fidelity",))
    assert (nothing.gain_low, nothing.gain_high) == (-1.0, 1.0)


def latencies(candidate_ms: float, serving_ms: float, runs: int = 200) -> np.ndarray:
    spread = np.random.default_rng(0).uniform(0.95, 1.05, (runs, 2))
    return spread * (candidate_ms, serving_ms)


@pytest.mark.parametrize(
    ("candidate_ms", "max_slowdown", "refused"),
    [(12.0, 1.25, False), (14.0, 1.25, True), (14.0, 2.0, False), (50.0, 2.0, True)],
)
def test_the_median_latency_is_judged(candidate_ms: float, max_slowdown: float, refused: bool) -> None:
    times_ms = latencies(candidate_ms, 10.0)
    found = verdict(seen(around(0.95), around(0.95), times_ms), max_slowdown=max_slowdown)
    assert found.failed == (("latency",) if refused else ())
    assert refused == found.reason.startswith("p50 ")
    assert refused == found.reason.endswith(f"ms in service; {max_slowdown:g} times that is allowed")
    assert found.latency_ms == pytest.approx(candidate_ms, rel=0.02)
    assert found.latency_p99_ms == pytest.approx(1.05 * candidate_ms, rel=0.02)


@pytest.mark.parametrize(("slow", "refused"), [(3, False), (20, True)])
def test_the_slowest_inferences_are_judged_where_they_are_no_chance(slow: int, refused: bool) -> None:
    times_ms = latencies(10.0, 10.0)
    times_ms[:slow, 0] = 40.0
    found = verdict(seen(around(0.95), around(0.95), times_ms))
    assert found.failed == (("latency",) if refused else ())
    assert refused == found.reason.startswith("p99 40 ms against 10")


def test_a_busy_machine_refuses_no_candidate() -> None:
    times_ms = latencies(10.0, 10.0)
    times_ms[20:40:2], times_ms[21:40:2] = (80.0, 10.0), (10.0, 60.0)
    assert verdict(seen(around(0.95), around(0.95), times_ms)).accepted


def test_few_inferences_have_no_99th_percentile() -> None:
    times_ms = latencies(10.0, 10.0, 99)
    times_ms[:30, 0] = 40.0
    found = verdict(seen(around(0.95), around(0.95), times_ms))
    assert found.accepted
    assert (found.latency_p99_ms, found.latency_serving_p99_ms) == (None, None)
    assert found.reason.endswith("ms in service, p99 not judged: 99 inferences")
    assert "p99" not in verdict(seen(around(0.95), around(0.95), latencies(10.0, 10.0, 100))).reason


def test_microseconds_refuse_no_candidate() -> None:
    assert verdict(seen(around(0.95), around(0.95), latencies(0.2, 0.05))).accepted


@pytest.mark.parametrize(("float_ms", "refused"), [(3.0, True), (3.95, False), (9.0, False)])
def test_where_int8_has_to_gain_a_first_engine_is_no_slower_than_float(float_ms: float, refused: bool) -> None:
    comparison = seen(around(0.95), None, np.full((32, 1), 4.0), float_ms=float_ms)
    found = decide(comparison, VerdictLimits(0.1, 1.25, must_gain=True))
    assert found.failed == (("gain",) if refused else ())
    assert f"4 ms against {float_ms:.3g} ms in float" in found.reason
    assert found.latency_float_ms == float_ms
    assert verdict(comparison).accepted


def test_where_float_takes_next_to_nothing_microseconds_refuse_no_int8() -> None:
    comparison = seen(around(0.95), None, np.full((32, 1), 0.036), float_ms=0.032)
    assert decide(comparison, VerdictLimits(0.1, 1.25, must_gain=True)).accepted


@pytest.mark.parametrize(("serving", "accepted"), [(0.95, False), (0.5, True)])
def test_a_later_engine_slower_than_float_is_accepted_only_for_clearly_better_answers(
    serving: float, accepted: bool
) -> None:
    comparison = seen(around(0.95), around(serving), np.full((32, 2), 4.0), float_ms=3.0)
    found = decide(comparison, VerdictLimits(0.1, 1.25, must_gain=True))
    assert found.accepted == accepted
    assert found.failed == (() if accepted else ("gain",))


@pytest.mark.parametrize("seed", range(5))
def test_an_engine_as_fast_as_float_is_not_refused_for_the_noise_of_a_busy_machine(seed: int) -> None:
    rng = np.random.default_rng(seed)
    times_ms, float_ms = 4.0 + rng.exponential(2.0, (2, 200))
    comparison = replace(seen(around(0.95), None, times_ms[:, np.newaxis]), float_ms=float_ms)
    assert decide(comparison, VerdictLimits(0.1, 1.25, must_gain=True)).accepted
    slower = replace(comparison, latencies_ms=comparison.latencies_ms + 2.0)
    assert decide(slower, VerdictLimits(0.1, 1.25, must_gain=True)).failed == ("gain",)


def reads(served: dict[int, int | None], every: int = 2) -> Disagreement:
    """Ten classes in turn, each in 40 frames; to one `every` so many of those in `served`, this is the answer."""
    found = Disagreement()
    for number in range(40 * CLASSES):
        reference = number % CLASSES
        wrong = number // CLASSES % every == 0
        found.add([(reference, served.get(reference, reference) if wrong else reference)])
    return found


def test_classes_that_are_newly_confused_refuse_a_candidate_of_high_fidelity() -> None:
    found = verdict(seen(around(0.95), around(0.95), misread=[reads({6: 8}), reads({})]))
    assert found.failed == ("confusion",)
    assert found.confused == ("6 with 8 in 20 of 40 frames",)
    assert found.reason == "it newly confuses 6 with 8 in 20 of 40 frames"
    first = verdict(seen(around(0.95), misread=[reads({6: 8})]))
    assert first.failed == ("confusion",), "beside the reference, which serves"


@pytest.mark.parametrize("serves", [{6: 8}, {6: 0}, {6: None}])
def test_a_confusion_that_the_engine_in_service_has_too_refuses_nothing(serves: dict[int, int | None]) -> None:
    assert verdict(seen(around(0.95), around(0.95), misread=[reads({6: 8}), reads(serves)])).accepted


@pytest.mark.parametrize(("every", "accepted"), [(4, True), (20, False)])
def test_an_engine_in_service_confuses_a_pair_too_if_more_often_than_by_chance(every: int, accepted: bool) -> None:
    comparison = seen(around(0.95), around(0.95), misread=[reads({6: 8}), reads({6: 8}, every)])
    assert verdict(comparison).accepted is accepted


def test_a_larger_accepted_loss_holds_for_a_class_too() -> None:
    comparison = seen(around(0.95), around(0.95), misread=[reads({6: 8}), reads({})])
    assert verdict(comparison, max_loss=0.5).accepted
    assert verdict(comparison, max_loss=1.0).accepted


def test_every_test_that_failed_is_named() -> None:
    found = verdict(
        seen(around(0.5), around(0.9), latencies(50.0, 10.0), outputs={"output 'x' is NaN": 3}, rows=["rows"])
    )
    assert found.failed == ("outputs", "rows", "latency", "fidelity")
    assert found.reason.startswith("output 'x' is NaN (3 times); rows; p50 ")
    assert Verdict.from_dict(found.as_dict()) == found
