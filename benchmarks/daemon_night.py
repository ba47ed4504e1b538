"""A first start in the dark, then daylight, for benchmarks/daemon_engines.py.

The night is made of a real clip: light .25, gamma 2.2, and sensor noise of .02, anew in each frame, without loss in
between. A daemon starts in it, as on a camera of 10 frames per second. Once its first job has ended, or says that it
cannot, day breaks: the clip is shown as it is, until the job after the alarm has ended. The engine of the day is then
scored on frames of the day, beside that of the night and a fresh one, which a job makes of the day alone.

So that this takes minutes: 96 frames calibrate, probation is 30 frames, drift is weighed in blocks of a second, and the
observer looks twice a second without a budget; a job may follow a failed one after 10 s.
"""

from __future__ import annotations

import os
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from rich.progress import Progress

from agent.models.model import open_model
from benchmarks.corruption import Image
from benchmarks.daemon_process import (
    FIRST_SCENES,
    JOB_ENDED,
    JOB_LIMIT_S,
    FollowedDaemon,
    model_config,
    model_spec,
)
from benchmarks.daemon_scenes import evenly, losses, make
from benchmarks.loop_daemon import free_port
from benchmarks.models import DATA
from benchmarks.report import Bar, Section, at_least, at_most
from engines.store.artefact import Artefact, Store

MODELS = ("yolox_nano", "fastestdet")

_LIGHT, _GAMMA, _NOISE = 0.25, 2.2, 0.02
_FPS = 10.0
_FRAMES = 150  # frames of the night's clip, and of the day's
_MAX_LOSS = 0.1  # recalibration.max_loss
_LEAST_MACS = 0.85
_WITHIN = 0.05  # distance to the fidelity of a fresh calibration
_ALARM_LIMIT_S = 600.0
_SETTINGS: Mapping[str, Any] = {
    "observe": {"budget": None, "period_s": 0.5},
    "drift": {"block_s": 1.0},
    "recalibration": {"cooldown_s": 10.0},
}


@dataclass(frozen=True)
class Dawn:
    """One model. Losses are on frames of the day; an engine that there is not has None.

    night: COMMITTED, or the reason that the board gives, empty where it gives none. night_loss: as its verdict says.
    alarm_s: from daybreak to the alarm, None without one. day: COMMITTED, or the error or reason.
    int8_macs_share: of the day's engine.
    """

    night: str
    night_loss: float | None
    alarm_s: float | None
    day: str
    int8_macs_share: float
    stale: float | None
    found: float | None
    fresh: float


def night(models: list[str], folder: Path, progress: Progress) -> tuple[list[Section], list[Bar]]:
    """The detectors among the models."""
    chosen = [name for name in models if name in MODELS]
    task = progress.add_task("nights and days", total=len(chosen))
    dawns: dict[str, Dawn] = {}
    for name in chosen:
        with tempfile.TemporaryDirectory(dir=folder) as kept:
            dawns[name] = dawn(name, Path(kept))
        progress.advance(task)
    return [dawns_section(dawns)], dawn_bars(dawns)


def dawn(name: str, folder: Path) -> Dawn:
    """Run a daemon through a night and a morning."""
    dark, light, shown = (folder / f"{each}.mkv" for each in ("dark", "light", "shown"))
    write_clips(DATA / FIRST_SCENES[name], dark, light)
    shown.symlink_to(dark)
    port, store = free_port(), Store(folder / "state")
    config = {**model_config(name, {"source": "rtsp://clip"}, folder), "metrics": {"port": port}, **_SETTINGS}
    program = ("benchmarks.workers.recorded_daemon", str(folder / "frames"), str(shown), str(_FPS))
    with FollowedDaemon(config, folder, program) as daemon:
        ended = daemon.wait(JOB_ENDED, JOB_LIMIT_S)
        by_night = store.read("current")
        reason = "COMMITTED" if by_night is not None else _reason(port)
        _show(shown, light)
        broke_ns = time.time_ns()
        after = ended.number if ended is not None else -1
        alarm = daemon.wait("event=alarm ", _ALARM_LIMIT_S, after) if by_night is not None else None
        if alarm is not None or by_night is None:
            daemon.wait(JOB_ENDED, JOB_LIMIT_S, alarm.number if alarm is not None else after)
        by_day, error = store.read("current"), daemon.error()
    is_new = by_day is not None and (by_night is None or by_day.id != by_night.id)
    served = {"stale": by_night, "found": by_day if is_new else None}
    model, source = open_model(model_spec(name)), DATA / FIRST_SCENES[name]
    engines = {key: artefact.read_engine() for key, artefact in served.items() if artefact is not None}
    engines["fresh"] = make(model, source, folder).planned
    _, lost = losses(model, source, engines)
    return Dawn(
        reason,
        _loss(by_night),
        (alarm.at_ns - broke_ns) / 1e9 if alarm is not None else None,
        "COMMITTED" if is_new else error,
        by_day.manifest["int8_macs_share"] if is_new and by_day is not None else 0.0,
        lost.get("stale"),
        lost.get("found"),
        lost["fresh"],
    )


def darken(image: Image, random: np.random.Generator) -> Image:
    """Return a frame, BGR uint8 (H, W, 3), as the sensor has it by night."""
    light = _LIGHT * (image.astype(np.float32) / 255.0) ** _GAMMA
    light += _NOISE * random.standard_normal(light.shape, np.float32)
    seen: Image = np.rint(np.clip(light, 0.0, 1.0) * 255.0).astype(np.uint8)
    return seen


def write_clips(source: Path, dark: Path, light: Path) -> None:
    """Write the night's clip and the day's, of the same frames, which lie evenly in the source."""
    clips, random = list[cv2.VideoWriter](), np.random.default_rng(0)
    for image in evenly(source, _FRAMES):
        if not clips:
            size, codec = image.shape[1::-1], cv2.VideoWriter.fourcc(*"FFV1")  # loses nothing
            clips = [cv2.VideoWriter(str(path), codec, _FPS, size) for path in (dark, light)]
        clips[0].write(darken(image, random))
        clips[1].write(image)
    for clip in clips:
        clip.release()


def _show(shown: Path, clip: Path) -> None:
    """Let the camera show another clip as soon as the one that it shows is over."""
    following = shown.with_name("following.mkv")
    following.symlink_to(clip)
    os.replace(following, shown)


def _reason(port: int) -> str:
    """Return why the board is degraded, as its metrics say it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10.0) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        samples = [sample for family in families for sample in family.samples if sample.name == "tared_degraded_info"]
    return next((str(sample.labels["reason"]) for sample in samples), "")


def _loss(artefact: Artefact | None) -> float | None:
    return 1.0 - artefact.manifest["verdict"]["fidelity"] if artefact is not None else None


def dawns_section(dawns: Mapping[str, Dawn]) -> Section:
    """One row a model."""
    engines = ("night's engine", "day's engine", "fresh engine")
    table = Section(
        "A first start in the dark, then daylight",
        ("model", "clip", "night", "its loss", "alarm after, s", "day", "MACs in INT8", *engines),
        note="its loss: 1 - fidelity on held-out frames of the night. Of engines: the same on frames of the day.",
    )
    for name, each in dawns.items():
        by_day = [_shown(loss) for loss in (each.stale, each.found, each.fresh)]
        alarm = "" if each.alarm_s is None else f"{each.alarm_s:.0f}"
        row = (each.night, _shown(each.night_loss), alarm, each.day, f"{each.int8_macs_share:.3f}", *by_day)
        table.rows.append((name, FIRST_SCENES[name], *row))
    return table


def _shown(loss: float | None) -> str:
    return "" if loss is None else f"{loss:.3f}"


def dawn_bars(dawns: Mapping[str, Dawn]) -> list[Bar]:
    """The bars of each night and day."""
    bars = list[Bar]()
    for name, each in dawns.items():
        if each.night_loss is not None:
            bars.append(at_most(f"{name}: loss of the night's engine", _MAX_LOSS, each.night_loss, ""))
            found = "an alarm" if each.alarm_s is not None else "none"
            bars.append(Bar(f"{name}: by day", "an alarm", found, each.alarm_s is not None))
        else:
            bars.append(Bar(f"{name}: no engine by night", "the reason", each.night or "none", bool(each.night)))
        worse = None if each.found is None else each.found - each.fresh
        bars.append(at_least(f"{name}: MACs in INT8 by day", _LEAST_MACS, each.int8_macs_share, ""))
        bars.append(at_most(f"{name}: fidelity below that of a fresh engine by day", _WITHIN, worse, ""))
    return bars
