"""A camera over RTSP, served by GStreamer."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from brokers import free_port
from gstreamer import PYTHON
from places import SUPPORT

SERVER = SUPPORT / "rtsp_server.py"


class RtspCamera:
    """`url`, while it runs. also: more arguments of the server's."""

    def __init__(self, codec: str = "h264", *also: str) -> None:
        self.port = free_port()
        self.url = f"rtsp://127.0.0.1:{self.port}/camera"
        self._arguments = codec, *also

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        with subprocess.Popen([PYTHON, str(SERVER), str(self.port), *self._arguments]) as process:
            try:
                yield process
            finally:
                process.kill()
