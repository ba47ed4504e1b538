"""The daemon in a folder where somebody has left modules by the names of ours: none of its processes imports them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from worlds import make_world

# Of the packages, of a library that each process imports, and of the standard library.
NAMES = ("agent", "calibrate", "engines", "fleet", "numpy", "runpy", "secrets")
TARED = Path(sys.executable).with_name("tared")


@pytest.mark.slow
def test_none_of_its_processes_imports_from_the_working_directory(tmp_path: Path) -> None:
    world = make_world(tmp_path / "world", lambda _: 0.5, 20.0)
    world.config["backend"] = "auto"
    hostile, taken = tmp_path / "hostile", tmp_path / "taken"
    hostile.mkdir()
    for name in NAMES:
        (hostile / f"{name}.py").write_text(f"open({str(taken)!r}, 'a').write(__name__)\nraise SystemExit(9)\n")
    done = subprocess.run(
        [TARED, *world.arguments("--web", "127.0.0.1:0")], cwd=hostile, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "event=commit" in done.stderr, done.stderr
    assert "watch it in a browser: " in done.stderr
    doctor: list[str | Path] = [TARED, "doctor", "-c", world.folder / "config.yaml"]
    subprocess.run(doctor, cwd=hostile, capture_output=True, text=True, timeout=120)
    assert not taken.exists(), taken.read_text()
