"""Histograms of many boards merged into one for each tensor: exactly, in any order, in memory that does not grow.

What comes out is, bit for bit, what a single machine would have counted that had seen all the frames. The results of
several mergers, each of some of the boards, merge to the same.
"""

from __future__ import annotations

from collections.abc import Iterable

from calibrate.histogram import AbsHistogram
from calibrate.histogram_sum import HistogramSum


class Merger:
    """One sum for each tensor; no histogram that is added is kept."""

    def __init__(self) -> None:
        self._sums: dict[str, HistogramSum] = {}

    @property
    def histograms(self) -> dict[str, AbsHistogram]:
        """A copy of the sums so far, by tensor."""
        return {tensor: each.result() for tensor, each in self._sums.items()}

    def add(self, histograms: Iterable[tuple[str, AbsHistogram]]) -> None:
        """Of a board, as `agent.histogram_upload.read_upload` gives them, or of another merger.

        Raises CalibrationError as `merge`; those before the one that does not fit have been added then.
        """
        for tensor, histogram in histograms:
            if tensor not in self._sums:
                self._sums[tensor] = HistogramSum(histogram.bits)
            self._sums[tensor].add(histogram)
