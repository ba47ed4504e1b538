"""The benchmark of a daemon's own engines: what its bars count, how its night looks, and how it follows a daemon."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.daemon_beside import Beside, beside_bars
from benchmarks.daemon_night import Dawn, darken, dawn_bars
from benchmarks.daemon_process import JOB_ENDED, FollowedDaemon
from benchmarks.daemon_scenes import Made, Matrix, Pair, Points, scene_bars

MADE = Made(b"", b"", 0.0, 1.0, 1)
DAWN = Dawn("COMMITTED", 0.05, 30.0, "COMMITTED", 0.99, stale=0.6, found=0.08, fresh=0.04)
BESIDE = Beside(15.0, 40.0, 50.0, 12.0, 300 * 2**20, 400 * 2**20)


def matrix(pairs: dict[tuple[str, str], Pair], points: dict[str, float]) -> Matrix:
    found = {scene: Points(difference, 0.5) for scene, difference in points.items()}
    return Matrix({maker: MADE for maker, _ in pairs}, {}, pairs, found)


def test_the_worst_pair_of_two_scenes_is_held_against_plain_int8() -> None:
    own, excused = Pair(48, planned=0.9, plain=0.0), Pair(48, planned=0.31, plain=0.3)
    kept = matrix({("a", "a"): own, ("a", "b"): excused, ("b", "a"): Pair(48, 0.11, 0.0)}, {})
    assert [bar.passed for bar in scene_bars("resnet20", kept)] == [True]
    missed = matrix({("a", "b"): excused, ("b", "a"): Pair(48, 0.13, 0.0)}, {})
    (bar,) = scene_bars("resnet20", missed)
    assert (bar.passed, bar.what.endswith("b on a")) == (False, True)


def test_photos_that_made_an_engine_do_not_score_it() -> None:
    pairs = {("coco", "street"): Pair(48, 0.0, 0.0), ("street", "coco"): Pair(48, 0.0, 0.0)}
    (_, kept) = scene_bars("yolox_nano", matrix(pairs, {"coco": -23.0, "street": -0.9}))
    assert kept.passed
    (_, missed) = scene_bars("yolox_nano", matrix(pairs, {"coco": 0.0, "street": -1.1}))
    assert not missed.passed


@pytest.mark.parametrize(
    ("dawn", "passed"),
    [
        (DAWN, [True, True, True, True]),
        (replace(DAWN, night_loss=0.2, alarm_s=None, found=0.1), [False, False, True, False]),
        (replace(DAWN, night="a reason; a remedy", night_loss=None), [True, True, True]),
        (replace(DAWN, night="", night_loss=None, int8_macs_share=0.0, found=None), [False, False, None]),
    ],
)
def test_a_night_has_an_engine_or_a_reason_and_a_day_has_a_new_engine(dawn: Dawn, passed: list[bool | None]) -> None:
    assert [bar.passed for bar in dawn_bars({"yolox_nano": dawn})] == passed


def test_the_night_is_dark_and_its_noise_is_the_sensors() -> None:
    seen = darken(np.full((64, 64, 3), 255, np.uint8), np.random.default_rng(0))
    assert seen.mean() == pytest.approx(0.25 * 255.0, abs=0.5)
    assert seen.std() == pytest.approx(0.02 * 255.0, abs=0.3)
    assert darken(np.full((64, 64, 3), 128, np.uint8), np.random.default_rng(0)).mean() < 0.06 * 255.0


def test_planning_has_less_time_where_plain_int8_suits() -> None:
    assert [bar.passed for bar in beside_bars({"yolox_nano": replace(BESIDE, planning_s=100.0)})] == [True] * 3
    slow = replace(BESIDE, planning_ms=61.0, planning_s=16.0, child_bytes=2**31)
    assert [bar.passed for bar in beside_bars({"resnet20": slow})] == [False] * 3


def test_a_daemon_is_followed_by_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program"
    failed = 'event=error code=a.b message="no end" step=FAILED'
    log = rf'event=error code=c.d message="no matter"\nevent=job step=PLANNING\n{failed}\n'
    script = ("#!/bin/sh", f"printf '{log}' >&2", """echo '{"frames": 3}'""", "exec sleep 60\n")
    program.write_text("\n".join(script))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with FollowedDaemon({}, tmp_path) as daemon:
        ended = daemon.wait(JOB_ENDED, 10.0)
        assert ended is not None
        assert daemon.wait(JOB_ENDED, 0.1, ended.number) is None
    assert daemon.steps().keys() == {"PLANNING", "FAILED"}
    assert daemon.error() == "a.b: no end"
    assert daemon.summary == {"frames": 3}
