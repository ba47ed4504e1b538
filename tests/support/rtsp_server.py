"""`python3 rtsp_server.py PORT CODEC [FPS MS]`: an RTSP camera on loopback, by GStreamer's own server, until killed.

For the system's Python, which has GStreamer's bindings; nothing of the project is imported. CODEC: h264 or h265. FPS:
pictures a second, 20 by default. MS: it hangs up on a client so long after that has begun to play. With SIGUSR1 it
goes on with one picture, with the next one it is free again.
"""

from __future__ import annotations

import signal
import sys

import gi

gi.require_version("Gst", "1.0")
gi.require_version("GstRtspServer", "1.0")
from gi.repository import GLib, Gst, GstRtspServer  # noqa: E402  # their versions have to be named before

PICTURES = "videotestsrc name=pictures is-live=true pattern=snow ! video/x-raw,width=320,height=240"
_LIVE = "tune=zerolatency speed-preset=ultrafast key-int-max=10"
ENCODERS = {  # pass=quant: of one quality, so that equal pictures become equal key frames
    "h264": f"x264enc {_LIVE} pass=quant quantizer=35 ! h264parse ! rtph264pay",
    "h265": f"x265enc {_LIVE} ! h265parse ! rtph265pay",
}
SNOW, CHECKERS = 1, 10  # of videotestsrc's patterns: never the same, always the same


def main() -> None:
    """Serve rtsp://127.0.0.1:PORT/camera."""
    port, codec, *also = sys.argv[1:]
    fps, hang_up_ms = also or ("20", "")
    Gst.init(None)
    server = GstRtspServer.RTSPServer()
    server.set_address("127.0.0.1")
    server.set_service(port)
    factory = GstRtspServer.RTSPMediaFactory()
    factory.set_launch(
        f"( {PICTURES},framerate={fps}/1 ! videoconvert ! {ENCODERS[codec]} name=pay0 pt=96 config-interval=1 )"
    )
    factory.connect("media-configure", lambda _, media: configure(media.get_element()))
    server.get_mount_points().add_factory("/camera", factory)
    if hang_up_ms:
        server.connect("client-connected", lambda _, client: client.connect("play-request", hang_up_soon))
    server.attach(None)
    elements: list[Gst.Element] = []
    pattern = SNOW

    def configure(element: Gst.Element) -> None:
        elements.append(element)
        element.get_by_name("pictures").set_property("pattern", pattern)

    def hang_up_soon(client: GstRtspServer.RTSPClient, _: object) -> None:
        GLib.timeout_add(int(hang_up_ms), lambda: client.close() or GLib.SOURCE_REMOVE)

    def toggle() -> bool:
        nonlocal pattern
        pattern = SNOW if pattern == CHECKERS else CHECKERS
        for element in elements:
            element.get_by_name("pictures").set_property("pattern", pattern)
        return True  # GLib.SOURCE_CONTINUE

    GLib.unix_signal_add(GLib.PRIORITY_HIGH, signal.SIGUSR1, toggle)
    GLib.MainLoop().run()


if __name__ == "__main__":
    main()
