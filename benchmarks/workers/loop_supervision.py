"""The plainest loop of supervision's documentation: its frame generator over OpenCV, ONNX Runtime, sv.Detections."""

from __future__ import annotations

import time

import supervision as sv

from benchmarks.workers.peer_detectors import DETECTORS
from benchmarks.workers.tally import Tally


def run(name: str, path: str, source: str, warm_s: float, seconds: float) -> dict[str, float]:
    """Serve the source for so long; what was measured after the warm-up."""
    detector, tally = DETECTORS[name](path), Tally(warm_s, seconds)
    for frame in sv.get_video_frames_generator(source):
        read_s = time.monotonic()
        found = detector(frame)
        if not tally.add(time.monotonic() - read_s, len(found)):
            break
    return tally.result()
