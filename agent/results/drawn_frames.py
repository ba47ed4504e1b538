"""Save frames with their results drawn into them, for people: as a video, or as pictures in a folder."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.common.errors import AgentError
from agent.vision.drawing import jpeg
from agent.vision.spec import ModelSpec
from agent.vision.tasks.opening import open_task

_CODECS = {".mp4": "mp4v", ".mkv": "mp4v", ".avi": "MJPG"}
_JPEG_QUALITY = 92

Image = NDArray[np.uint8]  # BGR (height, width, 3)
SaveFrame = Callable[[Image], None]


@contextmanager
def open_drawn_frames(path: Path, fps: float | None, spec: ModelSpec) -> Iterator[SaveFrame]:
    """Yield a function that saves one frame after the other, a video in the size of the first.

    A video gets its name only when the block has ended without an error.

    Args:
        path: of a video (.mp4, .mkv, .avi); any other name without a suffix is a folder, new or empty, for numbered
            JPEGs.
        fps: of the video; None: unknown, as of a camera.

    Raises AgentError:
        save.nothing  a model whose answers cannot be drawn
        save.format   the name is neither a video's nor a folder's
        save.rate     a video of a source without a known rate
        save.writer   this OpenCV cannot write such a video
        save.size     a frame of another size than the video's
        save.exists   the folder has files in it
        save.write    the disk refuses
    """
    if not open_task(spec).can_be_drawn:
        remedy = "leave --save out, and write the outputs with -o"
        raise AgentError("save.nothing", f"a model of task {spec.task}", "answers that can be drawn", remedy)
    is_folder = path.is_dir() or not path.suffix
    if not is_folder and path.suffix.lower() not in _CODECS:
        expected = f"a video ({', '.join(_CODECS)}), or a folder"
        raise AgentError("save.format", f"--save {path}", expected, "choose another name")
    try:
        with _folder(path) if is_folder else _video(path, fps) as save:
            yield save
    except OSError as error:
        found = f"{path}: {error.strerror or error}"
        raise AgentError("save.write", found, "a writable place with room", "choose another --save") from error


@contextmanager
def _folder(path: Path) -> Iterator[SaveFrame]:
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise AgentError("save.exists", f"files in {path}", "a new or an empty folder", "name another with --save")
    count = 0

    def save(image: Image) -> None:
        nonlocal count
        (path / f"{count:06}.jpg").write_bytes(jpeg(image, _JPEG_QUALITY))
        count += 1

    yield save


@contextmanager
def _video(path: Path, fps: float | None) -> Iterator[SaveFrame]:
    if fps is None:
        found, expected = f"--save {path} of a camera", "a recording, whose frame rate is known"
        raise AgentError("save.rate", found, expected, "name a folder with --save")
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.{os.getpid()}.new{path.suffix}")
    partial.touch()  # OpenCV does not say why it cannot write a file
    video = _VideoFile(partial, fps)
    try:
        yield video.save
        video.close()
        os.replace(partial, path)
    finally:
        video.release()
        with suppress(OSError):
            partial.unlink()


class _VideoFile:
    """A video that is opened with its first frame, whose size it has."""

    def __init__(self, path: Path, fps: float) -> None:
        self._path, self._fps = path, fps
        self._size: tuple[int, int] = 0, 0  # width, height
        self._writer: cv2.VideoWriter | None = None
        self._frames = 0

    def save(self, image: Image) -> None:
        size = image.shape[1], image.shape[0]
        if self._writer is None:
            self._writer, self._size = self._open(size), size
        if size != self._size:
            found = f"a frame of {size[0]} x {size[1]} after others of {self._size[0]} x {self._size[1]}"
            raise AgentError("save.size", found, "frames of one size in a video", "name a folder with --save")
        self._writer.write(image)
        self._frames += 1

    def close(self) -> None:
        """End the video, and count its frames: OpenCV does not report a full disk. Raises OSError."""
        self.release()
        capture = cv2.VideoCapture(str(self._path), cv2.CAP_FFMPEG)
        written = int(capture.get(cv2.CAP_PROP_FRAME_COUNT)) if capture.isOpened() else 0
        capture.release()
        if written < self._frames:
            raise OSError(errno.EIO, f"{written} of {self._frames} frames were written")

    def release(self) -> None:
        if self._writer is not None:
            self._writer.release()
            self._writer = None

    def _open(self, size: tuple[int, int]) -> cv2.VideoWriter:
        codec = _CODECS[self._path.suffix.lower()]
        writer = cv2.VideoWriter(str(self._path), cv2.VideoWriter.fourcc(*codec), self._fps, size)
        if not writer.isOpened():
            found = f"an OpenCV that cannot write {self._path.suffix} with {codec}, {size[0]} x {size[1]}"
            raise AgentError("save.writer", found, "an encoder for it", "try .avi, or name a folder with --save")
        return writer
