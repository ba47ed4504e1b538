"""The daemon as users start it, on a clip that plays for ever as a camera would, with every frame's latency on record.

    python -m benchmarks.workers.recorded_daemon FRAMES CLIP FPS run -c config.yaml

The source in the config is `rtsp://clip`: in this process the clip stands where OpenCV would open the stream, at FPS
frames per second, or with 0 as fast as they are read. With `-` in the place of CLIP the config's own source is read.
FRAMES gets, per frame answered, two little-endian int64: the wall clock and the latency, both in ns.
"""

from __future__ import annotations

import struct
import sys
import time
from typing import BinaryIO

from agent.serving import pipeline
from agent.vision.task import ServedFrame
from benchmarks.workers.clip_camera import Clip
from fleet.cli.main import main


class RecordedFeed(pipeline.Feed):
    """Keeps the latency of every answered frame as well."""

    file: BinaryIO

    def add_answer(self, served: ServedFrame) -> None:
        super().add_answer(served)
        self.file.write(struct.pack("<qq", time.time_ns(), served.done_ns - served.frame.captured_ns))


if __name__ == "__main__":
    _, frames, clip, fps, *arguments = sys.argv
    if clip != "-":
        Clip.install(clip, float(fps))
    with open(frames, "wb", buffering=1 << 16) as RecordedFeed.file:
        pipeline.Feed = RecordedFeed  # type: ignore[misc]  # a class in the place of a class
        status = main(arguments)
    sys.exit(status)
