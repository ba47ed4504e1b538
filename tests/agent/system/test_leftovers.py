"""Leftovers of a killed process are removed, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil

from agent.system.state_dir import remove_leftovers, remove_unfinished_builds

WHOLE = [
    "artefacts/0123/manifest.json",
    "artefacts/0123/.engine.new",
    "cache/x.timings",
    "outbox.sqlite",
    "outbox.sqlite-wal",
    "state.sqlite",
    ".new",
]
HALF = [
    "jobs/0a1b/held_out.npy",
    "jobs/0a1b/job.json",
    "artefacts/.0123.1.new/engine.onnx",  # process 1 lives as long as the machine
    "artefacts/.4567.4194304.new/engine.onnx",
    "cache/references/artefacts/.89ab.77.new/engine.onnx",
    "cache/.x.timings.77.new",
    ".state.sqlite.77.new",
    ".selection.json.1.new",
]


def test_half_written_files_are_removed_and_whole_ones_stay(tmp_path: Path) -> None:
    for name in [*WHOLE, *HALF]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    for link in ("current", ".current.new", ".previous.new"):
        (tmp_path / link).symlink_to("artefacts/0123")
    remove_leftovers(tmp_path)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()}
    assert left == set(WHOLE)
    assert [path.name for path in tmp_path.iterdir() if path.is_symlink()] == ["current"]
    assert list((tmp_path / "artefacts").iterdir()) == [tmp_path / "artefacts" / "0123"]
    assert list((tmp_path / "jobs").iterdir()) == []


def test_files_that_a_killed_child_left_half_written_are_removed_and_the_daemons_own_stay(tmp_path: Path) -> None:
    own = [f"cache/.x.timings.{os.getpid()}.new", ".state.sqlite.77.new"]
    of_the_child = [name for name in HALF if name.startswith(("artefacts/", "cache/"))]
    for name in [*WHOLE, *own, *of_the_child]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    remove_unfinished_builds(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == {*WHOLE, *own}


def test_a_child_that_outlived_its_daemon_is_ended_with_its_own_children(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    jobs = {name: tmp_path / name / "jobs" / "0a1b" for name in ("state", "other")}
    running = {
        name: subprocess.Popen(
            [sys.executable, "-m", "waits", str(job)], cwd=tmp_path, stdout=subprocess.PIPE, text=True
        )
        for name, job in jobs.items()
    }
    grandchildren = {}
    try:
        for name, process in running.items():
            assert process.stdout is not None
            grandchildren[name] = psutil.Process(int(process.stdout.readline()))
        remove_leftovers(tmp_path / "state")
        grandchildren["state"].wait(60.0)
        assert not psutil.pid_exists(running["state"].pid)
        assert running["other"].poll() is None, "another daemon's"
        assert grandchildren["other"].is_running()
    finally:
        for name, process in running.items():
            for each in (process, grandchildren.get(name)):
                if each is not None:
                    _kill(each)
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _kill(process: subprocess.Popen[str] | psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
