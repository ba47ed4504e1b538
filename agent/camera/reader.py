"""Read the pictures of a source one by one: files, folders and zips, OpenCV's captures, pipelines, and MJPEG over HTTP.

`read_images` is the entry. It opens the source, chooses one of five readers below it, and applies the source's masks
and region to every picture before anybody sees it. MJPEG over HTTP is not read by OpenCV, which reads it badly (see
`agent.camera.mjpeg`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.camera.gstreamer import GstPipeline
from agent.camera.images import ImageFiles, decode_image
from agent.camera.mjpeg import open_mjpeg, read_mjpeg
from agent.camera.opencv import open_capture
from agent.camera.source import Framing, Source
from agent.camera.stream_health import SILENCE_S, PictureTimeout, StreamState, silent_error
from agent.common.errors import CameraError

log = logging.getLogger(__package__)

Image = NDArray[np.uint8]  # BGR (H, W, 3)

_MASKED = (114, 114, 114)  # BGR, as letterboxes are padded: to a network it is as good as nothing
_ASSUMED_FPS = 10.0  # of a file that does not say
_IMAGE_PERIOD_S = 0.1  # capture time between the images of a folder or zip, which carry none
_FAILED_AT_END = 300  # reads in a row; one costs about 10 us at the end, and ten seconds of a video may be damaged
_CUT_SHORT = 0.02  # of the length that a file claims to have; less is how some count it
_PULL_S = 0.1  # of a wait for a pipeline's next picture: the end of the reading is seen as soon
_AT_ONCE_S = 0.001  # no camera makes a frame in it
_LIVE_FAILED_AT_END = 8  # reads in a row that fail at once; a driver may have some buffers full


def read_images(
    source: Source, silence_s: float = SILENCE_S, reading: StreamState | None = None
) -> Iterator[tuple[float, Image]]:
    """Yield (capture time in s, image) until the source ends: Unix time for cameras, media time for recordings.

    A source with `loop` never ends: its recording begins again, and the capture times go on rising.

    A file that ends before its time is logged with `truncated_s`.

    Args:
        silence_s: seconds without a picture after which a camera is silent, whatever else it sends. The first picture
            may take five seconds longer.
        reading: kept up to date as the frames come. With one, a picture of a folder or zip that cannot be read is
            counted there and skipped, unless all are so.

    Raises CameraError:
        camera.open    nothing can be read
        camera.mode    the camera does not have the requested mode
        camera.empty   a file has no frame
        camera.silent  a camera gives no picture any more
        camera.lost    a camera has ended its stream
        camera.pixels  its pictures are too large
        images.*       a folder or zip is bad, see ImageFiles
    """
    read_once = partial(_read_once, source, silence_s, reading)
    for ts, image in _repeat(read_once) if source.loop else read_once():
        source.check_pixels(image.shape[1], image.shape[0])
        yield ts, apply_mask_and_crop(image, source.framing)


def read_spread(source: Source, count: int) -> Iterator[Image]:
    """Yield at most `count` images: evenly spaced where the source knows its length, else the first ones."""
    length = source_length(source) or count
    yielded = 0
    for index, (_, image) in enumerate(read_images(source)):
        if index * count >= yielded * length:
            yield image
            yielded += 1
        if yielded == count:
            return


def _read_once(source: Source, silence_s: float, reading: StreamState | None) -> Iterator[tuple[float, Image]]:
    if source.kind == "images":
        return _read_folder(source, reading)
    if source.needs_gstreamer:
        return _read_pipeline(source, silence_s, reading or StreamState())
    read = _read_http if source.kind == "http" else _read_capture if source.live else _read_file
    return read(source, silence_s, reading or StreamState())


def _repeat(read_once: Callable[[], Iterator[tuple[float, Image]]]) -> Iterator[tuple[float, Image]]:
    """Yield a recording's pictures again and again. Between two plays lies the mean time between two of its frames."""
    ahead_s = 0.0
    while True:
        first_ts = ts = 0.0
        frames = 0
        for ts, image in read_once():
            first_ts = first_ts if frames else ts
            frames += 1
            yield ahead_s + ts, image
        period_s = (ts - first_ts) / (frames - 1) if frames > 1 else _IMAGE_PERIOD_S
        ahead_s += ts - first_ts + period_s


def apply_mask_and_crop(image: Image, framing: Framing) -> Image:
    """Return the region of a picture, with the masks painted into the picture itself: no copy without them remains."""
    height, width = image.shape[:2]
    for mask in framing.masks:  # one by one: where two overlap, fillPoly would leave a hole
        cv2.fillPoly(image, [np.round(np.array(mask) * (width, height)).astype(np.int32)], _MASKED)
    if framing.region is None:
        return image
    left, top, right, bottom = np.round(np.array(framing.region) * (width, height, width, height)).astype(int).tolist()
    left, top = min(left, width - 1), min(top, height - 1)  # of a sliver that rounds to nothing a pixel is left
    region = image[top : max(bottom, top + 1), left : max(right, left + 1)]
    return np.ascontiguousarray(region)  # as runtimes want it


def _read_http(source: Source, silence_s: float, reading: StreamState) -> Iterator[tuple[float, Image]]:
    """Read MJPEG; leave any other stream to FFmpeg.

    Everything that is no picture uses up the timeout: bytes, parts that are empty, damaged pictures.
    """
    timeout = PictureTimeout(source, silence_s)
    answer = open_mjpeg(source, reading.connection)
    if answer is None:
        yield from _read_capture(source, silence_s, reading)
        return
    try:
        source.check_accepts_mjpeg()
        reading.losses.start_stream()
        for parts in read_mjpeg(source, answer):
            for content in parts:
                image = decode_image(content, source.max_pixels) if content is not None else None
                if image is None:
                    reading.losses.frame_damaged()
                    continue
                yield time.time(), image
                timeout.restart()
                reading.connection.wait_at_most(silence_s)
            timeout.check()
    finally:
        reading.connection.detach()
        answer.close()


def _read_capture(source: Source, silence_s: float, reading: StreamState) -> Iterator[tuple[float, Image]]:
    """Read a camera through OpenCV until `reading.connection` has ended.

    A read that fails after some time is a damaged picture. At the end of a stream reads fail at once, each time. A
    read that took as long as silence does not give a current frame: at a timeout FFmpeg gives what its decoder still
    held, one frame for each of its threads. The first picture may take its time: cameras start.
    """
    capture = open_capture(source, silence_s)
    reading.losses.start_stream(silence_s)
    timeout = PictureTimeout(source, silence_s)
    started = False
    failed = failed_at_once = 0
    kept_s = 0.0  # the camera waited for whoever takes the pictures
    try:
        while not reading.connection.ended:
            started_s = time.monotonic()
            ok, image = capture.read()
            took_s = time.monotonic() - started_s
            if took_s >= silence_s and (started or not ok):
                raise silent_error(source, took_s)
            if not ok:
                failed += 1
                failed_at_once = failed_at_once + 1 if took_s < _AT_ONCE_S else 0
                if failed_at_once >= _LIVE_FAILED_AT_END:
                    found, remedy = f"{source.shown} stopped", "check the camera and its cable"
                    raise CameraError("camera.lost", found, "frames", remedy)
                timeout.check()
                continue
            is_key = not source.reports_key_frames or capture.get(cv2.CAP_PROP_LRF_HAS_KEY_FRAME) != 0.0
            reading.is_intra_coded = is_key
            reading.losses.frame_arrived(capture.get(cv2.CAP_PROP_POS_MSEC) / 1000.0, kept_s, failed)
            started, failed, failed_at_once = True, 0, 0
            handed_s = time.monotonic()
            yield time.time(), image
            kept_s = time.monotonic() - handed_s
            timeout.restart()
    finally:
        capture.release()


def _read_pipeline(source: Source, silence_s: float, reading: StreamState) -> Iterator[tuple[float, Image]]:
    """Read a camera through GStreamer until `reading.connection` has ended, in waits that are short: none hangs."""
    timeout = PictureTimeout(source, silence_s)
    kept_s = 0.0  # the camera waited for whoever takes the pictures
    with GstPipeline(source) as pipeline:
        reading.losses.start_stream(silence_s)
        while not reading.connection.ended:
            picture = pipeline.pull(_PULL_S)
            if picture is None:
                timeout.check()
                continue
            image, stamp_s = picture
            reading.losses.frame_arrived(stamp_s, kept_s)
            handed_s = time.monotonic()
            yield time.time(), image
            kept_s = time.monotonic() - handed_s
            timeout.restart()


def _read_folder(source: Source, reading: StreamState | None) -> Iterator[tuple[float, Image]]:
    files = ImageFiles(Path(source.location), CameraError, source.max_pixels)
    unreadable: CameraError | None = None
    frames = 0
    for index, name in enumerate(files.names):
        try:
            image = files.read(name)
        except CameraError as error:
            if reading is None:
                raise
            if unreadable is None:  # the others are counted
                log.warning("source='%s' unreadable='%s'", source.shown, name)
            unreadable = error
            reading.losses.frame_damaged()
            reading.skipped += 1
            continue
        frames += 1
        yield index * _IMAGE_PERIOD_S, image
    if not frames and unreadable is not None:
        raise unreadable


def _read_file(source: Source, silence_s: float, reading: StreamState) -> Iterator[tuple[float, Image]]:
    """Count reads that fail as damaged pictures, once a good one follows: to OpenCV damage and the end look alike."""
    capture = open_capture(source, silence_s)
    try:
        fps = capture.get(cv2.CAP_PROP_FPS)
        claimed_s = capture.get(cv2.CAP_PROP_FRAME_COUNT) / fps if fps > 0.0 else 0.0
        period_s = 1.0 / (fps or _ASSUMED_FPS)
        ts = -period_s
        frames = failed = 0
        reading.losses.start_stream()
        while failed < _FAILED_AT_END:
            ok, image = capture.read()
            if not ok:
                failed += 1
                continue
            stamp = capture.get(cv2.CAP_PROP_POS_MSEC) / 1000.0
            ts = stamp if stamp > ts else ts + period_s  # some containers carry no or broken times
            reading.losses.frame_arrived(ts, damaged=failed)
            reading.skipped += failed
            failed = 0
            frames += 1
            yield ts, image
    finally:
        capture.release()
    if not frames:
        raise CameraError("camera.empty", f"no frame in {source.shown}", "at least one frame", "check the file")
    if ts + 2.0 * period_s < (1.0 - _CUT_SHORT) * claimed_s:
        log.warning("source='%s' truncated_s=%.2f claimed_s=%.2f frames=%d", source.shown, ts, claimed_s, frames)


def source_length(source: Source) -> int | None:
    """Return how many frames a file claims to have; None for what has no end, and where it is unknown."""
    if source.live or source.loop:
        return None
    if source.kind == "images":
        return len(ImageFiles(Path(source.location), CameraError))
    return max(0, int(_claimed(source, cv2.CAP_PROP_FRAME_COUNT))) or None


def source_seconds(source: Source) -> float | None:
    """Return how long a file claims to play, in s of media time; None for what has no end, and where it is unknown."""
    frames = source_length(source)
    if frames is None:
        return None
    return frames / (source_fps(source) or _ASSUMED_FPS)


def source_fps(source: Source) -> float | None:
    """Return the frames per second of a recording, an assumed rate where a file does not say; None for a camera."""
    if source.live:
        return None
    return 1.0 / _IMAGE_PERIOD_S if source.kind == "images" else _claimed(source, cv2.CAP_PROP_FPS) or _ASSUMED_FPS


def _claimed(source: Source, capture_property: int) -> float:
    capture = cv2.VideoCapture(source.location, cv2.CAP_FFMPEG)
    try:
        return float(capture.get(capture_property))
    finally:
        capture.release()
