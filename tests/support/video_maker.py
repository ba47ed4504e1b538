"""`python3 video_maker.py KIND FILE`: a video of a moving ball, 320 x 240, 30 pictures at 10 fps, by GStreamer.

For the system's Python, which has GStreamer's bindings; nothing of the project is imported. KIND: h264, h265 or mjpeg,
in Matroska, MP4, QuickTime or an MPEG stream by the name of FILE; `large-` before it: 640 x 480; `uneven-`: of times
that grow by 0.1, 0.2, 0.1, 0.4 s and so on.
"""

from __future__ import annotations

import sys

import gi

gi.require_version("Gst", "1.0")
from gi.repository import Gst  # noqa: E402  # its version has to be named before

ENCODERS = {
    "h264": "x264enc key-int-max=5 bframes=0 ! h264parse",  # their muxer loses frames at the end of uneven times
    "h265": "x265enc key-int-max=5 ! h265parse",
    "mjpeg": "jpegenc",
}
MUXERS = {"mkv": "matroskamux", "mp4": "mp4mux faststart=true", "mov": "qtmux", "ts": "mpegtsmux"}
STEPS_S = (0.1, 0.2, 0.1, 0.4)


def main() -> None:
    """Write FILE."""
    kind, path = sys.argv[1:]
    *marks, codec = kind.split("-")
    size = "width=640,height=480" if "large" in marks else "width=320,height=240"
    Gst.init(None)
    pipeline = Gst.parse_launch(
        f"videotestsrc num-buffers=30 pattern=ball ! video/x-raw,{size},framerate=10/1 ! identity name=clock ! "
        f"videoconvert ! video/x-raw,format=I420 ! {ENCODERS[codec]} ! {MUXERS[path.rpartition('.')[2]]} ! "
        f"filesink location={path}"
    )
    if "uneven" in marks:
        pipeline.get_by_name("clock").get_static_pad("src").add_probe(Gst.PadProbeType.BUFFER, _uneven)
    pipeline.set_state(Gst.State.PLAYING)
    message = pipeline.get_bus().timed_pop_filtered(60 * Gst.SECOND, Gst.MessageType.EOS | Gst.MessageType.ERROR)
    pipeline.set_state(Gst.State.NULL)
    if message is None or message.type == Gst.MessageType.ERROR:
        raise SystemExit(str(message and message.parse_error()))


def _uneven(_pad: Gst.Pad, info: Gst.PadProbeInfo) -> Gst.PadProbeReturn:
    buffer = info.get_buffer()
    whole, rest = divmod(round(10 * buffer.pts / Gst.SECOND), len(STEPS_S))
    buffer.pts = round(Gst.SECOND * (whole * sum(STEPS_S) + sum(STEPS_S[:rest])))
    buffer.duration = round(Gst.SECOND * STEPS_S[rest])
    return Gst.PadProbeReturn.OK


if __name__ == "__main__":
    main()
