"""Builds before a command are shown, for on a board they take minutes."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_tensorrt import FakeTensorRt
from worlds import make_world

from agent.common import console
from fleet.cli.main import main


@pytest.mark.parametrize(
    ("command", "title"),
    [
        (["calibrate", "model.yaml", "--frames", "clip.avi", "-o", "calibration.json"], "preparing"),
        (["infer", "model.yaml", "--frames", "clip.avi"], "preparing"),
        (["build", "model.yaml", "-o", "engine"], "building"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value,
)
def test_builds_are_shown_in_percent(
    fake: FakeTensorRt,
    command: list[str],
    title: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(console, "_PLAIN_PERIOD_S", 0.0)
    make_world(tmp_path, lambda _: 0.5, 1.0)
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--backend", "tensorrt"]) == 0
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith(f"{title}: ")]
    percents = [int(line.split()[1].removesuffix("/100")) for line in shown]
    assert percents == sorted(percents)
    assert len(set(percents)) > 2
    assert fake.made
