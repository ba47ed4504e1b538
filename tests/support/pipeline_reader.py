"""Our own capture thread on a source, until so many frames came: SOURCE FRAMES SILENCE_S [TRANSPORT].

It prints a line of JSON for each frame, {"frame", "shape", "bgr"}, and for each loss and return, {"lost"}: the error's
code, or null. TRANSPORT: of RTSP, for GStreamer to decode.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import replace
from typing import cast

from agent.camera.capture import CaptureThread, FrameSlot
from agent.camera.source import CaptureSettings, Transport, parse_source
from agent.common.errors import CameraError

_PRINTING = threading.Lock()


def main() -> None:
    """Entry point."""
    text, frames, silence_s, *transport = sys.argv[1:]
    slot, source = FrameSlot(keep_every=True), parse_source(text)
    if transport:
        source = replace(
            source, requested=CaptureSettings(transport=cast(Transport, transport[0]), decoder="gstreamer")
        )
    thread = CaptureThread(source, slot, 1.0, int(frames), on_change, float(silence_s))
    thread.start()
    while thread.is_alive() or slot.is_full:
        thread.check_silence()
        frame = slot.pop()
        if frame is None:
            time.sleep(0.01)
        else:
            show({"frame": frame.id, "shape": frame.image.shape, "bgr": frame.image.mean(axis=(0, 1)).round().tolist()})
    if thread.error is not None:
        raise thread.error


def on_change(error: CameraError | None) -> None:
    """Print a loss or a return."""
    show({"lost": error.code if error is not None else None})


def show(fields: dict[str, object]) -> None:
    """Print one line, from any thread."""
    with _PRINTING:
        print(json.dumps(fields), flush=True)
