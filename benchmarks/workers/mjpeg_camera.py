"""A camera on loopback that plays a clip as MJPEG over HTTP, to whoever asks, at a fixed rate.

    python -m benchmarks.workers.mjpeg_camera CLIP WIDTH HEIGHT FPS

prints its URL and serves until it is ended. Pictures are encoded beforehand: what they cost is not the camera's.
"""

from __future__ import annotations

import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import cv2

_PICTURES = 100
_APART = 10  # frames of the clip
_HEADER = b"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: %d\r\n\r\n"


def pictures(clip: str, width: int, height: int) -> list[bytes]:
    """Of a clip, spread over it, as JPEGs."""
    video = cv2.VideoCapture(clip)
    found = list[bytes]()
    while len(found) < _PICTURES:
        good, image = video.read()
        if not good:
            break
        found.append(cv2.imencode(".jpg", cv2.resize(image, (width, height)))[1].tobytes())
        for _ in range(_APART - 1):
            video.grab()
    return found


class Camera(BaseHTTPRequestHandler):
    """Sends one picture each period to the client of this connection; one who cannot keep up misses none, but waits."""

    shown: list[bytes]
    period_s: float

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
        self.end_headers()
        due_s, number = time.monotonic(), 0
        try:
            while True:
                due_s = max(due_s + self.period_s, time.monotonic() - self.period_s)
                time.sleep(max(0.0, due_s - time.monotonic()))
                content = self.shown[number % len(self.shown)]
                self.wfile.write(_HEADER % len(content) + content + b"\r\n")
                number += 1
        except OSError:  # whoever watched has gone
            pass

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


if __name__ == "__main__":
    _, clip, width, height, fps = sys.argv
    Camera.shown, Camera.period_s = pictures(clip, int(width), int(height)), 1.0 / float(fps)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Camera)
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_port}/video.mjpg", flush=True)
    server.serve_forever()
