"""Render the sample video, night to morning, and the ground truth beside it.

    python -m examples.street.render -o DIR

writes DIR/street.mp4 and DIR/street.jsonl. Each line of the latter is one frame:
`{"frame": 17, "ts": 1.7, "labels": [{"class": 0, "box": [x1, y1, x2, y2]}, ...]}`, boxes in video pixels, by
the rules of `scene.Street.frame`. Both files appear under their names only when complete, the video last.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import cv2

from examples.street import view
from examples.street.scene import Frame, Street

FRAMES = 2800
# Traffic seeds below 1000 are for videos; training and test images use others.
SEED = 3
# Media time in seconds and the hour of the day it shows, joined by straight lines: night, a quick dawn,
# morning.
_TIMETABLE = ((0.0, 4.0), (100.0, 4.6), (135.0, 7.3), (280.0, 8.6))
# mp4v smooths the dark: it costs 0.026 of the detector's F1 at night and nothing in the morning, at 16 MB for the whole
# video. Motion JPEG costs nothing measurable, at 55 MB.
_CODECS = {".mp4": "mp4v", ".avi": "MJPG"}
VIDEO_NAME = "street.mp4"

Progress = Callable[[int, int], None]


def hour_at(ts: float) -> float:
    """The hour of the day (0 to 24) `ts` seconds into the video; after the last entry the light stays."""
    for (from_ts, from_hour), (to_ts, to_hour) in itertools.pairwise(_TIMETABLE):
        if ts < to_ts:
            return from_hour + (to_hour - from_hour) * (ts - from_ts) / (to_ts - from_ts)
    return _TIMETABLE[-1][1]


def truth_path(video: Path) -> Path:
    """Where the ground truth of a video lies."""
    return video.with_suffix(".jsonl")


def _truth_line(number: int, ts: float, frame: Frame) -> str:
    labels = [{"class": label.class_id, "box": list(label.box)} for label in frame.labels]
    return json.dumps({"frame": number, "ts": ts, "labels": labels})


def _write_frames(writer: cv2.VideoWriter, truth: TextIO, frames: int, seed: int, progress: Progress | None) -> None:
    street = Street(seed, frames / view.FPS)
    for number in range(frames):
        ts = number / view.FPS
        frame = street.frame(ts, hour_at(ts))
        writer.write(frame.image)
        print(_truth_line(number, ts, frame), file=truth)
        if progress is not None:
            progress(number + 1, frames)


def render_video(path: Path, frames: int = FRAMES, *, seed: int = SEED, progress: Progress | None = None) -> Path:
    """Render `frames` frames, 10 a second, to `path` (.mp4 or .avi) and the truth to `truth_path(path)`.

    `progress(done, frames)` is called after every frame. An interrupted rendering leaves neither file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    truth_part = truth_path(part)
    codec = cv2.VideoWriter.fourcc(*_CODECS[path.suffix])
    writer = cv2.VideoWriter(str(part), codec, view.FPS, (view.WIDTH_PX, view.HEIGHT_PX))
    if not writer.isOpened():
        raise OSError(f"cannot write {path}: this OpenCV has no {_CODECS[path.suffix]} encoder; take .mp4 or .avi")
    try:
        with truth_part.open("w") as truth:
            _write_frames(writer, truth, frames, seed, progress)
        writer.release()
        truth_part.replace(truth_path(path))
        part.replace(path)
    finally:
        writer.release()
        part.unlink(missing_ok=True)
        truth_part.unlink(missing_ok=True)
    return path


def _print_progress(done: int, frames: int) -> None:
    if done % 100 == 0 or done == frames:
        print(f"rendered {done}/{frames} frames", file=sys.stderr)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Render the sample street video and its ground truth.")
    parser.add_argument("-o", "--output", type=Path, required=True, help="folder to write to")
    parser.add_argument("--frames", type=int, default=FRAMES)
    args = parser.parse_args()
    print(render_video(args.output / VIDEO_NAME, args.frames, progress=_print_progress))


if __name__ == "__main__":
    main()
