"""Several cameras on one engine: what each gets while the engine has room, and while it has not."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.progress import Progress

from agent.mqtt.client import Endpoint
from benchmarks.loop_daemon import CLIP, UNOBSERVED, Daemon, spec
from benchmarks.models import DATA
from benchmarks.peers import ROOT
from benchmarks.report import Bar, Section, at_least, at_most

LEAST_FPS = 9.5
UNFAIR = 0.1
# (width, height, fps), by the camera's name
_ROOMY = {"a": (320, 240, 10.0), "b": (640, 480, 10.0), "c": (768, 432, 10.0), "d": (1280, 720, 10.0)}
_CROWDED = {"a": (1280, 720, 10.0), "b": (320, 240, 20.0), "c": (640, 480, 30.0), "d": (768, 432, 40.0)}
_WARM_S = 5.0
_SECONDS = 30.0


@contextmanager
def camera(width: int, height: int, fps: float, clip: Path = DATA / CLIP) -> Iterator[str]:
    """The URL of one that plays the clip, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.workers.mjpeg_camera", str(clip)]
    command += [str(width), str(height), str(fps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def fairness(
    folder: Path, endpoint: Endpoint, _models: list[str], _rounds: int, progress: Progress
) -> tuple[list[Section], list[Bar]]:
    """Four cameras on FastestDet, which has room for them, and on YOLOX-Nano, which has not."""
    task = progress.add_task("four cameras", total=2)
    roomy = served(folder / "roomy", endpoint, "fastestdet", _ROOMY)
    progress.advance(task)
    crowded = served(folder / "crowded", endpoint, "yolox_nano", _CROWDED)
    progress.advance(task)
    asked = {name: fps for name, (_, _, fps) in _CROWDED.items()}
    shares = fair_shares(asked, sum(crowded.values()))
    columns = ("camera", "plays", "FastestDet serves", "plays", "YOLOX-Nano serves", "fair share")
    table = Section("Four MJPEG cameras on one engine, frames per second", columns)
    for name in _ROOMY:
        with_room = _shown(_ROOMY[name]), f"{roomy[name]:.2f}"
        without = _shown(_CROWDED[name]), f"{crowded[name]:.2f}", f"{shares[name]:.2f}"
        table.rows.append((name, *with_room, *without))
    unfairness = max(abs(crowded[name] / shares[name] - 1.0) for name in shares)
    return [table], [
        at_least("four cameras of 10 fps: the least served", LEAST_FPS, min(roomy.values()), " fps"),
        at_most("overload: farthest from its fair share", 100.0 * UNFAIR, 100.0 * unfairness, " %"),
    ]


def _shown(kind: tuple[int, int, float]) -> str:
    width, height, fps = kind
    return f"{width}x{height} at {fps:g}"


def served(
    folder: Path, endpoint: Endpoint, model: str, cameras: Mapping[str, tuple[int, int, float]]
) -> dict[str, float]:
    """Frames per second of each camera."""
    with ExitStack() as stack:
        urls = {name: stack.enter_context(camera(*kind)) for name, kind in cameras.items()}
        sources = [{"name": name, "source": url} for name, url in urls.items()]
        daemon = stack.enter_context(Daemon(folder, endpoint, {"model": spec(model), "cameras": sources, **UNOBSERVED}))
        time.sleep(_WARM_S)
        before, began_s = daemon.frames(), time.monotonic()
        time.sleep(_SECONDS)
        after, seconds = daemon.frames(), time.monotonic() - began_s
        return {name: (after[name] - before.get(name, 0)) / seconds for name in cameras}


def fair_shares(asked: Mapping[str, float], total: float) -> dict[str, float]:
    """Max-min fair: who asks for less than an equal share gets that, and the others share the rest alike."""
    shares = {}
    left = total
    for number, (name, wanted) in enumerate(sorted(asked.items(), key=lambda item: item[1])):
        shares[name] = min(wanted, left / (len(asked) - number))
        left -= shares[name]
    return shares
