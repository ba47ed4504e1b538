"""`python3 rtsp_server.py PORT CODEC`: an RTSP camera on loopback, by GStreamer's own server, until killed.

For the system's Python, which has GStreamer's bindings; nothing of the project is imported. CODEC: h264 or h265. With
SIGUSR1 it goes on with one picture, with the next one it is free again; with SIGUSR2 its pictures have twice the size.
"""

from __future__ import annotations

import signal
import sys

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtspServer  # noqa: E402  # their versions have to be named before

_SIZE = "video/x-raw,width=%d,height=%d,framerate=20/1"
PICTURES = f"videotestsrc name=pictures is-live=true pattern=snow ! capsfilter name=size caps={_SIZE % (320, 240)}"
_LIVE = "tune=zerolatency speed-preset=ultrafast key-int-max=10"
ENCODERS = {  # pass=quant: of one quality, so that equal pictures become equal key frames
    "h264": f"x264enc {_LIVE} pass=quant quantizer=35 ! h264parse ! rtph264pay",
    "h265": f"x265enc {_LIVE} ! h265parse ! rtph265pay",
}
SNOW, CHECKERS = 1, 10  # of videotestsrc's patterns: never the same, always the same


def main() -> None:
    """Serve rtsp://127.0.0.1:PORT/camera."""
    port, codec = sys.argv[1:]
    Gst.init(None)
    server = GstRtspServer.RTSPServer()
    server.set_address("127.0.0.1")
    server.set_service(port)
    factory = GstRtspServer.RTSPMediaFactory()
    factory.set_launch(f"( {PICTURES} ! videoconvert ! {ENCODERS[codec]} name=pay0 pt=96 config-interval=1 )")
    factory.connect("media-configure", lambda _, media: configure(media.get_element()))
    server.get_mount_points().add_factory("/camera", factory)
    server.attach(None)
    state = {"frozen": False, "large": False}
    elements: list[Gst.Element] = []

    def apply(element: Gst.Element) -> None:
        element.get_by_name("pictures").set_property("pattern", CHECKERS if state["frozen"] else SNOW)
        size = (640, 480) if state["large"] else (320, 240)
        element.get_by_name("size").set_property("caps", Gst.Caps.from_string(_SIZE % size))

    def configure(element: Gst.Element) -> None:
        elements.append(element)
        apply(element)

    def toggle(what: str) -> bool:
        state[what] = not state[what]
        for element in elements:
            apply(element)
        return GLib.SOURCE_CONTINUE

    GLib.unix_signal_add(GLib.PRIORITY_HIGH, signal.SIGUSR1, toggle, "frozen")
    GLib.unix_signal_add(GLib.PRIORITY_HIGH, signal.SIGUSR2, toggle, "large")
    GLib.MainLoop().run()


if __name__ == "__main__":
    main()
