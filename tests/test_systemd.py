"""The unit file, by systemd's own verdict where systemd is installed."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

UNIT = Path(__file__).resolve().parents[1] / "systemd" / "tared.service"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = UNIT.read_text().replace("/opt/tared/.venv/bin/tared", sys.executable)
    (tmp_path / "tared.service").write_text(text)
    command = ["systemd-analyze", "verify", "--man=no", str(tmp_path / "tared.service")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "tared.service" not in done.stderr, done.stderr
    assert done.returncode == 0


def test_the_watchdog_is_fed_by_frames_and_may_restart() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # keeps the case of keys
    unit.read(UNIT)
    assert unit["Service"]["Type"] == "notify"
    assert int(unit["Service"]["WatchdogSec"]) > 0
    assert unit["Service"]["Restart"] == "on-failure"
