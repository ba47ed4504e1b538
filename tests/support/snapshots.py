"""Snapshots of boards, made by hand."""

from __future__ import annotations

from raising_world import config_of, observer_state

from agent.common.latency import LoopMeter
from agent.control.snapshot import BoardSnapshot, CameraSnapshot
from agent.core.state import State
from agent.monitoring.camera_monitor import CameraState
from agent.monitoring.estimates import Estimate
from agent.uplink.reporter import EventCounts
from calibrate.statistics.evidence import Interval


def a_camera(state: CameraState) -> CameraSnapshot:
    """A camera that has answered three frames, on which labels have found it right."""
    meter = LoopMeter(lambda: {"stale": 2})
    for latency_ns in (10_000_000, 11_000_000, 12_000_000):
        meter.record(latency_ns)
    totals = meter.totals()
    accuracy = Estimate(Interval(0.81, 0.71, 0.91, 12), 1, 0.0)
    return CameraSnapshot(7.25, True, "", state, accuracy, 1000, totals, totals.sample(), totals.sample())


def a_board(**states: CameraState) -> BoardSnapshot:
    """A board on which nothing is due. states: what its observer has found, by camera; one calm camera by default."""
    cameras = {name: a_camera(state) for name, state in (states or {"camera": observer_state(config_of())}).items()}
    return BoardSnapshot(
        engine="3f9a2c71d0e4b586",
        backend="onnxruntime",
        is_degraded=False,
        is_raised=False,
        state=State(),
        stopped_by="",
        unused=(),
        collected=(0, 0),
        is_stuck=False,
        regimes=("3f9a2c71d0e4b586", "8c04be17a95d2f63"),
        policies={"3f9a2c71d0e4b586": {"score_threshold": 0.5}},
        cameras=cameras,
        totals=next(iter(cameras.values())).totals,
        measured=None,
        counts=EventCounts(),
        tolerance_db=3.0,
        reference_accuracy=0.95,
    )
