"""Cameras for the benchmarks: processes that play a clip as MJPEG over HTTP on loopback."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.loop_daemon import CLIP
from benchmarks.models import DATA
from benchmarks.peers import ROOT


@contextmanager
def camera(width: int, height: int, fps: float) -> Iterator[str]:
    """The URL of one that plays CLIP."""
    command = [sys.executable, "-m", "benchmarks.workers.mjpeg_camera", str(DATA / CLIP)]
    command += [str(width), str(height), str(fps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
