"""The benchmark of a daemon's own engines: how its night looks, and how it follows a daemon."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.daemon_night import darken
from benchmarks.daemon_process import JOB_ENDED, FollowedDaemon


def test_the_night_is_dark_and_its_noise_is_the_sensors() -> None:
    seen = darken(np.full((64, 64, 3), 255, np.uint8), np.random.default_rng(0))
    assert seen.mean() == pytest.approx(0.25 * 255.0, abs=0.5)
    assert seen.std() == pytest.approx(0.02 * 255.0, abs=0.3)
    assert darken(np.full((64, 64, 3), 128, np.uint8), np.random.default_rng(0)).mean() < 0.06 * 255.0


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
