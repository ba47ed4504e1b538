"""An MJPEG camera on loopback: multipart/x-mixed-replace over HTTP, as cheap cameras have it, that can misbehave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

import cv2
import numpy as np

_HEADER = b"--frame\r\nContent-Type: image/jpeg\r\n%s\r\n"


def grey(number: int) -> np.ndarray:
    """The pictures of a camera whose light changes."""
    return np.full((48, 64, 3), number * 10 % 250, np.uint8)


class MjpegServer:
    """A context manager. fps: of each client.

    `silent` keeps the next frames back; `hang_up_after` ends each connection after so many; `picture` makes the frame
    of a number; `damage` may spoil its JPEG; `lengths` are sent or not; `accepts` judges a client's header
    Authorization, for which `challenge` asks. `clients` and `sent` count connections and pictures.
    """

    def __init__(self, fps: float = 50.0) -> None:
        self.silent = False
        self.hang_up_after = 0
        self.clients = self.sent = 0
        self.picture: Callable[[int], np.ndarray] = grey
        self.damage: Callable[[int, bytes], bytes] = lambda _, content: content
        self.accepts: Callable[[str], bool] = lambda _: True
        self.challenge = 'Basic realm="camera"'
        self.lengths = True
        self._period_s = 1.0 / fps
        self._closing = threading.Event()
        camera = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if not camera.accepts(self.headers.get("Authorization", "")):
                    self.send_response(401)
                    self.send_header("WWW-Authenticate", camera.challenge)
                    self.end_headers()
                    return
                camera.clients += 1
                self.send_response(200)
                self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
                self.end_headers()
                camera._stream(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=lambda: self._server.serve_forever(0.05))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/video.mjpg"

    def __enter__(self) -> MjpegServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _stream(self, client: BaseHTTPRequestHandler) -> None:
        number = 0
        try:
            while not self._closing.wait(self._period_s):
                if self.silent:
                    continue
                content = self.damage(number, cv2.imencode(".jpg", self.picture(number))[1].tobytes())
                length = b"Content-Length: %d\r\n" % len(content) if self.lengths else b""
                client.wfile.write(_HEADER % length + content + b"\r\n")
                number += 1
                self.sent += 1
                if number == self.hang_up_after:
                    return
        except OSError:  # the client has gone
            pass


@contextmanager
def answering(content_type: str, content: bytes) -> Iterator[str]:
    """Serve one answer over HTTP at this address, and end each connection after it."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=lambda: server.serve_forever(0.05))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/content"
        finally:
            server.shutdown()
            thread.join()
