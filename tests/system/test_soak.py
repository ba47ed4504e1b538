"""Longer trials, `make soak`: the daemon killed again and again, and served by what is left on disk."""

from __future__ import annotations

import random
import signal
import subprocess
from pathlib import Path

import pytest
from worlds import make_world

from engines.store.artefact import Store

KILLS = 40


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_daemon_killed_at_random_always_starts_again_on_something_whole(tmp_path: Path) -> None:
    rng = random.Random(0)
    world = make_world(tmp_path, lambda ts: 0.06 if ts % 80.0 < 40.0 else 1.0, 400.0, drift={"block_s": 0.5})
    for _ in range(KILLS):
        process = subprocess.Popen(world.command(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            process.wait(timeout=rng.uniform(0.5, 8.0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), errors
        assert "artefact.damaged" not in errors
        for link in ("current", "previous"):
            Store(world.state_dir).read(link)  # raises where a link leads to anything but a whole artefact
    world.config["camera"]["speed"] = 0
    summary, errors = world.run("--frames", "100")
    assert summary["frames"] == 100, errors
    assert not list((world.state_dir / "jobs").glob("*"))
    assert not list((world.state_dir / "artefacts").glob(".*"))
