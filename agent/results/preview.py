"""Show annotated frames to people on this machine: MJPEG over HTTP, on a loopback port or a Unix socket.

`Preview` is one thread of low priority, which accepts viewers, draws, encodes and sends. While nobody looks, it sleeps,
and the frame path asks an empty set. While somebody does, it draws an answer of each camera that is looked at, at most
`preview.per_s` times a second, once for all viewers. It begins as soon as the frame path has handed it over: until the
next frame comes, nobody else wants the processor. Drawn at any other time, some frames would wait for it.

A viewer gets the next picture once it has taken the one before: a slow one gets fewer, and nobody waits for it. The
number of viewers, the number of incomplete requests and the time for each are bounded (agent/common/http).

Addresses: `/stream.mjpeg?camera=NAME` and `/frame.jpg?camera=NAME`. Every answer says in a header which board this is,
so that `tared web` shows no other program's pictures as this board's.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http import HTTPStatus
from pathlib import Path

from pydantic import JsonValue

from agent.common.clock import SYSTEM_CLOCK, Clock, Waker
from agent.common.errors import AgentError, FaultLog, fault_remedy
from agent.common.http.addresses import http_url
from agent.common.http.reception import BACKLOG, Reception, listen
from agent.common.http.request import RefusedRequest, response
from agent.common.timing import Backoff, RetryState
from agent.config import Config
from agent.contract.topics import Topics
from agent.results.snapshot import encode_jpeg
from agent.results.unix_listener import UnixListener
from agent.results.viewer import Picture, Viewer, parse_request
from agent.vision.task import ServedFrame, Show, as_served
from calibrate.errors import TaredError

log = logging.getLogger(__package__)

_NICE = 10  # niceness of the thread: the frame path goes first
_MODE = 0o600  # permissions of a Unix socket: the daemon's user alone
_REPEAT_S = 1.0  # Chrome shows a part once the next one has begun
_MOST_JPEG_BYTES = 2**21
_PATIENCE_S = 0.5  # how long the next answer of a camera is awaited; then the latest one has to do
_RETRY_S = (1.0, 60.0)  # between two attempts, at random up to so much
_END_S = 5.0

Newest = Callable[[str], ServedFrame | None]


class Preview(threading.Thread):
    """A context manager; inside it the thread runs. It listens once `permit(True)` was called.

    Whatever fails is reported through `on_change`, called in this thread: with the error once per outage, and with None
    when viewers can connect, at first and after each outage. The attempt is repeated.

    Attributes:
        address: Where viewers connect: `http://HOST:PORT`, or `unix:PATH`. Empty while nobody can.
    """

    def __init__(self, config: Config, clock: Clock = SYSTEM_CLOCK) -> None:
        """config: its sections preview, model and cameras count."""
        super().__init__(name="preview", daemon=True)
        self._config = config.preview
        self._clock = clock
        self._spec = config.model
        self._header = Topics(config.mqtt.fleet, config.mqtt.device).board_header
        self._cameras = [camera.name for camera in config.every_camera]
        self._newest: Newest = lambda _camera: None
        self._show: Show = as_served
        self._on_change: Callable[[TaredError | None], None] = lambda _error: None
        backoff = [Backoff(*_RETRY_S) for _ in range(3)]
        self._opening, self._accepting, self._drawing = (
            RetryState(lambda error: self._on_change(error), each, 1)  # looked up late: `show` sets it
            for each in backoff
        )
        self._permitted: bool | None = None  # None: nobody has decided yet
        self._faults = FaultLog(log)
        self._ending = False
        self._waker = Waker()
        self.address = ""
        self._reception: Reception[Viewer] | None = None  # while viewers are served
        self._awaited: set[str] = set()  # cameras whose next answer is wanted; the frame path takes them out
        self._offered: dict[str, ServedFrame] = {}
        self._awaited_since_s: dict[str, float] = {}
        self._pictures: dict[str, Picture] = {}
        self._drawn: dict[str, tuple[int, int]] = {}  # the frame of each picture: its number, and when it was answered
        self._due_s = dict.fromkeys(self._cameras, 0.0)  # when the next frame of each camera may be drawn

    def __enter__(self) -> Preview:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = True
        self._waker.wake()
        self.join(_END_S)
        if not self.is_alive():
            self._waker.close()

    def show(self, newest: Newest, on_change: Callable[[TaredError | None], None], allowed: Show = as_served) -> None:
        """Take frames from here on.

        newest: returns the latest answer of a camera. allowed: returns what the owner lets be shown of an answer. Both
        are called in the preview's thread.
        """
        self._newest, self._on_change, self._show = newest, on_change, allowed

    def offer(self, served: ServedFrame) -> None:
        """Accept an answer that somebody waits to see; a sink of the frame path, which never waits."""
        camera = served.frame.camera
        if camera in self._awaited:
            self._awaited.discard(camera)
            self._offered[camera] = served
            self._waker.wake()

    def permit(self, permitted: bool) -> None:
        """Listen; or end all viewers at once, and stop listening. permitted: `privacy.preview`."""
        if permitted != self._permitted:
            self._permitted = permitted
            self._waker.wake()

    def as_dict(self) -> dict[str, JsonValue]:
        """The state for `status` and telemetry. error: the code of what fails."""
        error = self._opening.code or self._accepting.code or self._drawing.code
        reception = self._reception
        viewers = len(reception.kept) if reception is not None else 0
        return {"address": self.address or None, "viewers": viewers, "error": error or None}

    def run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        while not self._ending:
            if self._permitted is None:
                self._waker.sleep(self._clock, None)
                continue
            try:
                with self._listening() as reception:
                    self._serve(reception)
            except AgentError as error:
                pause_s = self._opening.note_failure(error)
                self._waker.sleep(self._clock, pause_s if self._permitted else None)
            except Exception as error:  # a fault of the preview must not end the video
                self._faults.note("preview", error)
                found = f"{type(error).__name__}: {error}"
                failure = AgentError("preview.failed", found, "no exception", fault_remedy(error))
                self._waker.sleep(self._clock, self._opening.note_failure(failure))

    @contextmanager
    def _listening(self) -> Iterator[Reception[Viewer]]:
        """Listen while the block runs, then end all viewers. Raises AgentError (`preview.privacy`, `.address`)."""
        if not self._permitted:
            found = f"preview.address is {self._config.address}, and privacy.preview is false"
            remedy = "let the board's owner set privacy.preview in config.yaml, or leave preview.address out"
            raise AgentError("preview.privacy", found, "privacy.preview true", remedy)
        place = self._config.place
        assert place is not None  # else there is no preview
        with ExitStack() as stack:
            stack.callback(self._close_all)  # after the listener: a viewer that notices its end finds nobody listening
            try:
                if isinstance(place, Path):
                    unix = UnixListener(place, _MODE, BACKLOG)
                    stack.callback(unix.close)
                    listener, address = unix.socket, f"unix:{place}"
                else:
                    listener = stack.enter_context(listen(*place))
                    address = http_url(*listener.getsockname()[:2])
                connect = partial(Viewer, header=self._header)
                reception = Reception(
                    listener, self._waker, connect, self._answer, self._accepting, "preview", clock=self._clock
                )
            except OSError as error:
                found = f"{self._config.address}: {error.strerror or error}"
                remedy = "choose another preview.address, or end the process that has it"
                raise AgentError("preview.address", found, "an address that no other program uses", remedy) from error
            self._reception, self.address = reception, address
            if self._opening.code:
                self._opening.note_success()
            else:
                self._on_change(None)
            yield reception

    def _close_all(self) -> None:
        reception, self._reception, self.address = self._reception, None, ""
        if reception is not None:
            reception.close()
        for camera in self._cameras:
            self._await_no_more(camera)
        self._pictures.clear()
        self._drawn.clear()

    def _serve(self, reception: Reception[Viewer]) -> None:
        """Serve viewers until the end, or until they are no longer permitted. Nothing blocks but a turn."""
        while self._permitted and not self._ending:
            reception.turn(min(map(self._next_s, _cameras_looked_at(reception)), default=None))
            self._show_newest(reception, self._clock.monotonic_s())

    def _answer(self, viewer: Viewer, head: bytes, now_s: float) -> None:
        reception = self._reception
        assert reception is not None  # it calls this
        try:
            request = parse_request(head, self._cameras, not isinstance(self._config.place, Path))
            if len(reception.kept) >= self._config.viewers:
                text = f"{len(reception.kept)} viewers look already, as many as preview.viewers in config.yaml permits"
                raise RefusedRequest(HTTPStatus.SERVICE_UNAVAILABLE, text, "Retry-After: 5")
            viewer.begin(request, now_s)
            reception.keep(viewer)
        except RefusedRequest as refusal:
            viewer.finish(refusal.response, now_s)

    def _show_newest(self, reception: Reception[Viewer], now_s: float) -> None:
        """Give each viewer that is ready the newest picture of its camera, and the same one again after a while."""
        looked_at = _cameras_looked_at(reception)
        for camera in self._awaited_since_s.keys() - looked_at:
            self._await_no_more(camera)
        for camera in looked_at:
            self._update_picture(camera, now_s)
        for viewer in [*reception.kept]:
            request = viewer.request
            if request is None or not viewer.is_ready:
                continue
            picture = self._pictures.get(request.camera)
            if not request.streams:
                if now_s < self._due_s[request.camera]:  # else an answer is still awaited
                    reception.finish(viewer, _one_picture(picture), now_s)
            elif picture is not None and (picture is not viewer.sent or now_s >= viewer.moved_s + _REPEAT_S):
                viewer.show(picture, now_s)
                reception.send(viewer, now_s)

    def _next_s(self, camera: str) -> float:
        """Return when a camera's picture is to be seen to, unless an answer comes before."""
        since_s = self._awaited_since_s.get(camera)
        return since_s + _PATIENCE_S if since_s is not None else self._due_s[camera]

    def _update_picture(self, camera: str, now_s: float) -> None:
        """If a camera's next picture is due, wait for its next answer, and draw that, or the latest one."""
        if now_s < self._due_s[camera]:
            return
        if camera not in self._awaited_since_s:
            self._awaited_since_s[camera] = now_s
            self._offered.pop(camera, None)  # from an earlier wait
            self._awaited.add(camera)
            return
        served = self._offered.get(camera)
        if served is None and now_s < self._awaited_since_s[camera] + _PATIENCE_S:
            return
        self._await_no_more(camera)
        period_s = 1.0 / self._config.per_s
        self._due_s[camera] = max(self._due_s[camera] + period_s, now_s + 0.5 * period_s)
        served = served or self._newest(camera)
        if served is not None and (served.frame.id, served.done_ns) != self._drawn.get(camera):
            self._drawn[camera] = served.frame.id, served.done_ns
            self._draw(camera, served)

    def _await_no_more(self, camera: str) -> None:
        self._awaited.discard(camera)
        self._awaited_since_s.pop(camera, None)
        self._offered.pop(camera, None)

    def _draw(self, camera: str, served: ServedFrame) -> None:
        try:
            frame, shown = served.frame.image, self._show(served)
            scale = min(1.0, self._config.width / frame.shape[1])
            image = shown.result.drawn_into(frame, shown.geometry, self._spec, scale)
            jpeg, _ = encode_jpeg(image, _MOST_JPEG_BYTES)
        except Exception as error:  # an answer that cannot be drawn
            self._faults.note("drawing", error)
            found = f"{type(error).__name__}: {error}"
            failure = AgentError("preview.draw", found, "an answer as the task's decoder gives it", fault_remedy(error))
            self._drawing.note_failure(failure)
            return
        self._drawing.note_success()
        self._pictures[camera] = Picture(jpeg, served.frame.id, served.frame.ts)


def _cameras_looked_at(reception: Reception[Viewer]) -> set[str]:
    """Return the cameras of the viewers that may get another picture."""
    return {viewer.request.camera for viewer in reception.kept if viewer.request is not None and viewer.is_ready}


def _one_picture(picture: Picture | None) -> bytes:
    """Return the response with one picture, or with the reason why there is none."""
    if picture is None:
        text = "no frame yet, or none that could be drawn"
        return RefusedRequest(HTTPStatus.SERVICE_UNAVAILABLE, text, "Retry-After: 1").response
    stamps = (f"X-Frame: {picture.frame_id}", f"X-Timestamp: {picture.ts:.6f}")
    return response(HTTPStatus.OK, picture.jpeg, "image/jpeg", *stamps)
