"""What the daemon holds: memory and CPU time on a camera, with a null engine and real ones, and memory over an hour."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from rich.progress import Progress

from agent.mqtt.client import Endpoint
from benchmarks.loop_cameras import camera
from benchmarks.loop_daemon import UNOBSERVED, Daemon, endless, spec
from benchmarks.report import Bar, Section, at_most

MIB = 2**20
MOST_MIB = 150.0
_RUNTIMES = ("onnxruntime", "openvino")
_CAMERA = (640, 480, 10.0)
_HELD_S = 10.0
_START_S = 5.0
_COUNTED_S = 20.0
_HOUR_S = 3600.0
_CLIP_FPS = 10.0
# Of capture time, before the hour: the first calibration is in service, and what is bounded by a number of frames is
# full, 8,700 answers for labels that may come.
_WARM_S = 1200.0
_FLAT = 0.02
_LOOK_S = 1.0
# A first calibration and no other: an hour of the same scene.
_CALIBRATED = {
    "calibration": {"frames": 64, "within_s": 60.0},
    "probation": {"frames": 100, "seconds": 5.0},
    "recalibration": {"max_loss": 1.0, "automatic": False},
}


def null_model(path: Path) -> dict[str, object]:
    """Write a network of one node, the mean of each channel of a small picture; its spec."""
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, (1, 3, 32, 32))
    mean = helper.make_tensor_value_info("mean", TensorProto.FLOAT, (1, 3, 1, 1))
    graph = helper.make_graph([helper.make_node("GlobalAveragePool", ["image"], ["mean"])], "null", [image], [mean])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), path)
    return {"path": str(path), "task": "raw"}


@contextmanager
def null_daemon(folder: Path, endpoint: Endpoint, url: str) -> Iterator[Daemon]:
    """The daemon on the null model, with all that it can give away switched on, after it has served a while."""
    config = {
        "model": null_model(folder / "null.onnx"),
        "camera": {"source": url},
        "results": {"file": str(folder / "results"), "socket": str(folder / "socket"), "mqtt_per_s": 1.0},
    }
    with Daemon(folder / "null", endpoint, config) as daemon:
        time.sleep(_HELD_S)
        yield daemon


def memory(
    folder: Path, endpoint: Endpoint, models: list[str], _rounds: int, progress: Progress
) -> tuple[list[Section], list[Bar]]:
    """Resident memory and CPU time on a camera, with the null model and with real ones on either runtime for CPUs."""
    width, height, fps = _CAMERA
    title = f"Resident memory and CPU time on an MJPEG camera, {width}x{height} at {fps:g} fps"
    columns = ("model", "runtime", "of the daemon", "of it the libraries' files", "CPU time a frame")
    table = Section(title, columns, note="CPU time: of all threads, unobserved. An engine that spins would have more.")
    with camera(width, height, fps) as url, null_daemon(folder, endpoint, url) as daemon:
        null_mib = daemon.rss_bytes() / MIB
        table.rows.append(("one node", "onnxruntime", f"{null_mib:.0f} MiB", f"{_file_mib(daemon):.0f} MiB", ""))
    with camera(width, height, fps) as url:
        served = list(product(models, _RUNTIMES))
        for name, runtime in progress.track(served, description="resident memory"):
            config = {"model": spec(name), "backend": runtime, "camera": {"source": url}}
            with Daemon(folder / f"{name}-{runtime}", endpoint, config) as daemon:
                time.sleep(_HELD_S)
                mib = daemon.rss_bytes() / MIB
                table.rows.append((name, runtime, f"{mib:.0f} MiB", f"{_file_mib(daemon):.0f} MiB", ""))
        for name, runtime in progress.track(served, description="CPU time"):
            config = {"model": spec(name), "backend": runtime, "camera": {"source": url}, **UNOBSERVED}
            with Daemon(folder / f"{name}-{runtime}-alone", endpoint, config) as daemon:
                table.rows.append((name, runtime, "", "", f"{_cpu_ms(daemon):.1f} ms"))
    return [table], [at_most("resident memory with a null engine", MOST_MIB, null_mib, " MiB")]


def _cpu_ms(daemon: Daemon) -> float:
    """CPU time per frame, once its start is over."""
    time.sleep(_START_S)
    frames, cpu_s = sum(daemon.frames().values()), daemon.cpu_s()
    time.sleep(_COUNTED_S)
    served = sum(daemon.frames().values()) - frames
    return 1000.0 * (daemon.cpu_s() - cpu_s) / served


def _file_mib(daemon: Daemon) -> float:
    """What of it is pages of files, which processes share."""
    lines = Path(f"/proc/{daemon.process.pid}/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("RssFile"))) / 1024


def flat(
    folder: Path, endpoint: Endpoint, _models: list[str], _rounds: int, progress: Progress
) -> tuple[list[Section], list[Bar]]:
    """Resident memory over an hour of capture time, as fast as ResNet-20 serves it, which is some minutes."""
    config: dict[str, Any] = {
        "model": spec("resnet20"),
        "camera": {"source": str(endless(folder)), "speed": 0},
        **_CALIBRATED,
    }
    began_s = time.monotonic()
    with Daemon(folder / "hour", endpoint, config) as daemon:
        samples = np.array(list(_hour(daemon, progress)))
        calibrated = daemon.told("event=commit")
    ts, mib = samples[samples[:, 0] >= _WARM_S].T
    slope, _ = np.polyfit(ts, mib, 1)
    middle = statistics.median(mib)
    growth = float(slope) * _HOUR_S / middle
    spread = float(mib.max() - mib.min()) / middle
    table = Section(f"Resident memory over an hour of video, after {_WARM_S:g} s of it", ("what", "found"))
    table.rows += [
        ("frames, in wall time", f"{ts[-1] * _CLIP_FPS:.0f}, {time.monotonic() - began_s:.0f} s"),
        ("serving INT8 after its first calibration", "yes" if calibrated else "no: the float reference"),
        ("MiB at the beginning, in the middle, at the end", f"{mib[0]:.1f}, {middle:.1f}, {mib[-1]:.1f}"),
        ("least, most", f"{mib.min():.1f}, {mib.max():.1f}"),
    ]
    return [table], [
        at_most("growth within the hour, by a straight line", 100.0 * _FLAT, 100.0 * growth, " %"),
        at_most("the most above the least, within the hour", 100.0 * _FLAT, 100.0 * spread, " %"),
    ]


def _hour(daemon: Daemon, progress: Progress) -> Iterator[tuple[float, float]]:
    """(capture time in s, MiB), once a second of wall time."""
    task = progress.add_task("an hour of video", total=_WARM_S + _HOUR_S)
    ts = 0.0
    while ts < _WARM_S + _HOUR_S:
        time.sleep(_LOOK_S)
        ts = sum(daemon.frames().values()) / _CLIP_FPS
        progress.update(task, completed=ts)
        yield ts, daemon.rss_bytes() / MIB
