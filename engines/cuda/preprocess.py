"""Preprocess frames that lie on the device into network inputs there."""

from __future__ import annotations

import numpy as np

from engines.cuda.kernels import Buffer, Executor
from engines.preprocessing import _PIXEL_BYTES, _TABLES, ImageTransform, _table


class DevicePreprocess:
    """Turns frames that lie on the device into network inputs there.

    Holds the tables of a few transforms, each uploaded once: frames of sizes that take turns cost a launch each, and no
    allocation.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._tables: dict[ImageTransform, Buffer] = {}

    def has_room(self, transform: ImageTransform) -> bool:
        """Return whether `run` gives up no table for it."""
        return transform in self._tables or len(self._tables) < _TABLES

    def run(
        self,
        transform: ImageTransform,
        frame_address: int,
        input_address: int,
        stream: object | None = None,
        row_bytes: int | None = None,
    ) -> None:
        """Queue on `stream` the network input of one frame.

        frame_address: of a BGR frame uint8 (frame_height, frame_width, 3) whose rows begin `row_bytes` apart, by
        default 3 * frame_width. input_address: receives what `transform` has as shape and type of the network input.
        Where it does not have room for the transform, all tables are given up: what was queued before must be done.

        Raises ValueError for rows that overlap; DeviceError as Executor.upload and launch do.
        """
        least = transform.frame_width * _PIXEL_BYTES
        row_bytes = least if row_bytes is None else row_bytes
        if row_bytes < least:
            raise ValueError(f"rows {row_bytes} bytes apart, for {transform.frame_width} pixels of {_PIXEL_BYTES}")
        table = self._tables.get(transform)
        if table is None:
            if not self.has_room(transform):
                self._tables.clear()
            table = self._tables[transform] = self._executor.upload(_table(transform), stream)
        blocks = -(-transform.height * transform.width // self._executor.geometry.threads)
        arguments = (table, np.uint64(frame_address), np.int32(row_bytes), np.uint64(input_address))
        self._executor.launch("preprocess", blocks, arguments, stream)
