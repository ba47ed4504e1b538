"""Draw the frames of a source in random order: a measurement on them holds for all its frames, not for one scene."""

from __future__ import annotations

import itertools
from collections.abc import Generator
from functools import cached_property
from pathlib import Path

import numpy as np

from agent.camera.images import ImageFiles
from agent.camera.reader import Image, read_images
from agent.camera.source import Source
from agent.common.errors import CameraError
from agent.common.timing import RandomInterval

_LIVE_PERIOD_S = 1.0  # mean gap between the frames of a camera, as observe.period_s: neighbours in time are alike

Draws = Generator[tuple[int, Image], None, None]  # (index in the source, BGR uint8 image)


class RandomFrames:
    """The frames of a file, folder or zip in one random order; the same for equal frames and seeds.

    Folders and zips are read at random. A video is decoded from its start once per `round_size` frames, up to the last
    of them; only these are held, as images: 64 of 1080p are 380 MiB. A live camera has no order to draw from. Its
    frames are drawn as they come, at random gaps of about a second: a sample of that stretch of time only.
    """

    def __init__(self, source: Source, seed: int, round_size: int = 64) -> None:
        self.source = source
        self._seed = seed
        self._round_size = round_size
        self._live_index = itertools.count()  # one for all draws: no frame of a camera is seen twice

    @cached_property
    def count(self) -> int | None:
        """The number of frames; None for a live camera.

        A video is decoded once to count them, since containers overstate it. Raises CameraError as `read_images` does,
        also if there is no frame.
        """
        if self.source.live:
            return None
        if self.source.kind == "images":
            return len(self._files)
        return sum(1 for _ in read_images(self.source))

    def draw(self, start: int = 0) -> Draws:
        """Yield frames from place `start` of the order on, none twice, with their index in the source.

        A live camera has no places: it gives its next frames, with indices that go on from those of other draws.
        Raises CameraError as `read_images` does.
        """
        if self.count is None:
            clock = RandomInterval(_LIVE_PERIOD_S)
            for ts, image in read_images(self.source):
                if clock.due(ts):
                    yield next(self._live_index), image
            return
        order = np.random.default_rng(self._seed).permutation(self.count)[start:].tolist()
        if self.source.kind == "images":
            for index in order:
                yield index, self._files.read(self._files.names[index])
            return
        for first in range(0, len(order), self._round_size):
            indices = order[first : first + self._round_size]
            images = enumerate(itertools.islice(read_images(self.source), max(indices) + 1))
            picked = {index: image for index, (_, image) in images if index in indices}
            for index in indices:
                yield index, picked.pop(index)

    @cached_property
    def _files(self) -> ImageFiles:
        return ImageFiles(Path(self.source.location), CameraError)
