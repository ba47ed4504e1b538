"""`python3 rtsp_server.py PORT CODEC`: an RTSP camera on loopback, by GStreamer's own server, until killed.

For the system's Python, which has GStreamer's bindings; nothing of the project is imported. CODEC: h264 or h265.
"""

from __future__ import annotations

import sys

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtspServer  # noqa: E402  # their versions have to be named before

PICTURES = "videotestsrc is-live=true pattern=ball ! video/x-raw,width=320,height=240,framerate=20/1 ! videoconvert"
ENCODERS = {
    "h264": "x264enc tune=zerolatency speed-preset=ultrafast key-int-max=10 ! h264parse ! rtph264pay",
    "h265": "x265enc tune=zerolatency speed-preset=ultrafast key-int-max=10 ! h265parse ! rtph265pay",
}


def main() -> None:
    """Serve rtsp://127.0.0.1:PORT/camera."""
    port, codec = sys.argv[1:]
    Gst.init(None)
    server = GstRtspServer.RTSPServer()
    server.set_address("127.0.0.1")
    server.set_service(port)
    factory = GstRtspServer.RTSPMediaFactory()
    factory.set_launch(f"( {PICTURES} ! {ENCODERS[codec]} name=pay0 pt=96 config-interval=1 )")
    server.get_mount_points().add_factory("/camera", factory)
    server.attach(None)
    GLib.MainLoop().run()


if __name__ == "__main__":
    main()
