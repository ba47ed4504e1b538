"""The command line for people: names and values, help, and progress on stderr."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import subprocess
import sys

import pytest
from bench import CLIP_FRAMES, Bench, strict

from fleet.cli.main import main


def test_without_json_a_person_reads_names_and_values(bench: Bench) -> None:
    printed = bench.text("infer", bench / "artefact", "--frames", bench / "clip.avi")
    assert re.fullmatch(r"frames +12\nfps +[\d.]+\nlatency_ms +.*\n", printed)
    printed = bench.text("build", bench / "model.yaml", "--precision", "fp32", "-o", bench / "float")
    assert re.search(rf"^artefact +{bench / 'float'}$", printed, re.MULTILINE)


def test_the_version_is_the_packages(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capfd.readouterr().out == f"tared {importlib.metadata.version('tared')}\n"


def test_the_installed_script_is_this_command_line() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="tared")
    assert script.load() is main


def test_progress_is_a_bar_on_stderr_where_that_is_a_terminal(bench: Bench) -> None:
    leader, follower = os.openpty()
    words = ["infer", str(bench / "artefact"), "--frames", str(bench / "clip.avi"), "--json"]
    command = [sys.executable, "-m", "fleet.cli", *words]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=follower, env=environment) as job:
        os.close(follower)
        shown = b""
        with contextlib.suppress(OSError):  # raised once the other end is closed
            while chunk := os.read(leader, 4096):
                shown += chunk
        os.close(leader)
        assert job.stdout is not None
        assert strict(job.stdout.read().decode())["frames"] == CLIP_FRAMES
    assert b"inferring" in shown
    assert b"12/12" in shown
    assert b"\x1b[" in shown
