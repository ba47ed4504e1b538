"""Serve the page on which people label frames, to browsers on this machine alone.

The address has a token in its path: other users of the machine do not know it. A request under a name that leads here
from elsewhere is refused (DNS rebinding). The page's policy allows the script and the styles of this server alone.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import time
from contextlib import closing
from functools import partial
from http import HTTPStatus
from importlib.resources import files
from typing import Any, NoReturn

from agent.common.clock import Waker
from agent.common.console import say_error
from agent.common.errors import AgentError
from agent.common.html.pages import resource
from agent.common.http.addresses import http_url, is_loopback, split_address
from agent.common.http.connection import HttpConnection
from agent.common.http.reception import Reception, listen
from agent.common.http.request import RefusedRequest, Request, parse_head, response
from agent.common.timing import Backoff, RetryState
from agent.labelling.store import DrawnFrame, LabelStore
from agent.vision.spec import ModelSpec
from calibrate.errors import TaredError

_POLICY = (
    "Content-Security-Policy: default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy: no-referrer",
)
_JSON = "application/json"
_FILES = {"label.js": "text/javascript; charset=utf-8", "label.css": "text/css; charset=utf-8"}
_MOST_BODY = 1 << 17  # bytes of a label: 1000 boxes
_RETRY_S = 0.1, 5.0


def open_listener(address: str) -> socket.socket:
    """Listen on HOST:PORT of the loopback interface; port 0: any. Raises AgentError (`labelling.listen`)."""
    place = split_address(address)
    expected, remedy = "a loopback address, such as 127.0.0.1:8480", "for another machine, forward a port with ssh -L"
    if place is None or not place[0] or not is_loopback(place[0]):
        raise AgentError("labelling.listen", f"--listen {address!a}", expected, remedy)
    try:
        return listen(*place)
    except OSError as error:
        found = f"--listen {address}: {error.strerror or error}"
        raise AgentError(
            "labelling.listen", found, "an address that no other program uses", "choose another port"
        ) from error


class LabelPage:
    """The page on a listening socket, for one thread.

    Attributes:
        address: With the token.
        forwarding: What ssh -L takes, so that another machine reaches the page at the same port.
    """

    def __init__(self, store: LabelStore, spec: ModelSpec, listener: socket.socket) -> None:
        """Raises OSError where sockets cannot be had."""
        self._store, self._labels, self._kind = store, spec.labels, store.kind.fitted(spec)
        self._token = secrets.token_urlsafe(24)
        server = http_url(*listener.getsockname()[:2])
        self.address = f"{server}/{self._token}/"
        self.forwarding = f"{listener.getsockname()[1]}:{server.removeprefix('http://')}"
        self._waker = Waker()  # nobody calls it: the process ends with the thread
        accepting = RetryState(_report, Backoff(*_RETRY_S), 1)
        connect = partial(HttpConnection, most_body=_MOST_BODY)
        self._reception = Reception(listener, self._waker, connect, self._answer, accepting, "labelling")

    def serve(self) -> NoReturn:
        """Serve until an exception, such as KeyboardInterrupt."""
        with closing(self._waker), closing(self._reception):
            while True:
                self._reception.turn(None)

    def _answer(self, connection: HttpConnection, request: bytes, now_s: float) -> None:
        head, end, body = request.partition(b"\r\n\r\n")
        try:
            answer = self._respond(parse_head(head + end), body)
        except RefusedRequest as refusal:
            answer = refusal.response
        except TaredError as error:
            answer = _respond_json({"error": error.as_dict()}, HTTPStatus.BAD_REQUEST)
        connection.finish(answer, now_s)

    def _respond(self, request: Request, body: bytes) -> bytes:
        """Raises RefusedRequest; TaredError for a label that is wrong, and where the store fails."""
        if request.host is None or not is_loopback(request.host):
            text = "the Host of the request does not name this machine: use 127.0.0.1 or localhost, with the port"
            raise RefusedRequest(HTTPStatus.FORBIDDEN, text)
        token, slash, path = request.path.removeprefix("/").partition("/")
        if not slash or not hmac.compare_digest(token.encode(), self._token.encode()):
            raise RefusedRequest(
                HTTPStatus.FORBIDDEN, "the address lacks its token: open it as `tared label` prints it"
            )
        if request.method == "POST":
            return self._set(request, path, body)
        if request.method != "GET":
            raise RefusedRequest(HTTPStatus.METHOD_NOT_ALLOWED, "expected GET or POST", "Allow: GET, POST")
        return self._get(path)

    def _get(self, path: str) -> bytes:
        folder, _, name = path.rpartition("/")
        if path == "":
            return response(HTTPStatus.OK, _template("label.html").encode(), "text/html; charset=utf-8", *_POLICY)
        if path == "style.css":
            return response(HTTPStatus.OK, resource(path).encode(), _FILES["label.css"], *_POLICY)
        if path in _FILES:
            return response(HTTPStatus.OK, _template(path).encode(), _FILES[path], *_POLICY)
        if path == "model":
            return _respond_json({"task": self._store.task, "form": self._kind.form, "labels": [*self._labels]})
        if path == "waiting":
            return _respond_json(self._state(None))
        if folder == "frames":
            return _respond_json(self._state(_number(name)))
        if folder == "pictures":
            return response(HTTPStatus.OK, self._store.picture(_number(name)), "image/jpeg", *_POLICY)
        if folder == "reference":
            reference = self._frame(_number(name)).reference
            if self._kind.form != "boxes":
                raise RefusedRequest(HTTPStatus.NOT_FOUND, "these frames have no boxes; expected frames with boxes")
            return _respond_json(self._kind.document(reference))
        raise RefusedRequest(HTTPStatus.NOT_FOUND, "no such page")

    def _set(self, request: Request, path: str, body: bytes) -> bytes:
        """Store a label, or that a frame is skipped; return the state with the next frame."""
        folder, _, name = path.rpartition("/")
        if folder != "frames":
            raise RefusedRequest(HTTPStatus.NOT_FOUND, "no such page")
        if request.headers.get_content_type() != _JSON:
            raise RefusedRequest(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"expected {_JSON}")
        try:
            document = json.loads(body)
        except (ValueError, RecursionError):
            raise RefusedRequest(HTTPStatus.BAD_REQUEST, "expected JSON") from None
        frame = self._frame(_number(name))
        if not isinstance(document, dict) or ("label" in document) == (document.get("skip") is True):
            raise RefusedRequest(HTTPStatus.BAD_REQUEST, 'expected {"label": ...} or {"skip": true}')
        if "label" in document:
            truth = self._kind.read(document["label"], self._labels, (frame.height, frame.width))
            self._store.label(frame.id, truth, document.get("suggested") is True)
        else:
            self._store.skip(frame.id)
        return _respond_json(self._state(None))

    def _frame(self, number: int) -> DrawnFrame:
        frame = next((each for each in self._store.frames() if each.id == number), None)
        if frame is None:
            raise RefusedRequest(HTTPStatus.NOT_FOUND, "no such frame")
        return frame

    def _state(self, number: int | None) -> dict[str, Any]:
        """Return how far the labels are, and one frame: the oldest that waits, or that of this number."""
        frames = self._store.frames()
        shown = next((each for each in frames if (each.is_waiting if number is None else each.id == number)), None)
        if number is not None and shown is None:
            raise RefusedRequest(HTTPStatus.NOT_FOUND, "no such frame")
        before = [each.id for each in frames if not each.is_waiting and (shown is None or each.id < shown.id)]
        return {
            "drawn": len(frames),
            "done": sum(not each.is_waiting for each in frames),
            "previous": before[-1] if before else None,
            "frame": self._frame_document(shown) if shown is not None else None,
        }

    def _frame_document(self, frame: DrawnFrame) -> dict[str, Any]:
        """Return what the page shows of a frame; no engine's answer, which a label must not follow."""
        return {
            "id": frame.id,
            "camera": frame.camera,
            "drawn": time.strftime("%Y-%m-%d %H:%M", time.localtime(frame.drawn_s)),
            "width": frame.width,
            "height": frame.height,
            "label": self._kind.document(frame.label) if frame.label is not None else None,
            "suggested": frame.suggested,
            "skipped": frame.skipped,
        }


def _number(text: str) -> int:
    name = text.removesuffix(".jpg")
    if not (name.isascii() and name.isdecimal() and len(name) < 19):
        raise RefusedRequest(HTTPStatus.NOT_FOUND, "no such frame")
    return int(name)


def _template(name: str) -> str:
    return (files("agent.labelling") / "templates" / name).read_text(encoding="utf-8")


def _respond_json(document: Any, status: HTTPStatus = HTTPStatus.OK) -> bytes:
    return response(status, json.dumps(document).encode(), _JSON, *_POLICY)


def _report(error: TaredError | None) -> None:
    if error is not None:
        say_error(f"error: {error}")
