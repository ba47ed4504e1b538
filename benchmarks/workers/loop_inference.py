"""Roboflow's InferencePipeline with a network of one's own: `init_with_custom_logic`."""

from __future__ import annotations

import os
from datetime import datetime
from typing import Any

os.environ |= {"TELEMETRY_OPT_OUT": "True", "DISABLE_VERSION_CHECK": "True"}  # a benchmark calls nobody

from inference import InferencePipeline

from benchmarks.workers.peer_detectors import DETECTORS
from benchmarks.workers.tally import Tally


def run(name: str, path: str, source: str, warm_s: float, seconds: float) -> dict[str, float]:
    """Serve the source for so long; what was measured after the warm-up."""
    detector, tally = DETECTORS[name](path), Tally(warm_s, seconds)

    def answered(answer: dict[str, int], frame: Any) -> None:
        latency = datetime.now(frame.frame_timestamp.tzinfo) - frame.frame_timestamp
        if not tally.add(latency.total_seconds(), answer["found"]):
            pipeline.terminate()

    pipeline = InferencePipeline.init_with_custom_logic(
        video_reference=source,
        on_video_frame=lambda frames: [{"found": len(detector(frame.image))} for frame in frames],
        on_prediction=answered,
    )
    pipeline.start(use_main_thread=False)
    pipeline.join()
    return tally.result()
