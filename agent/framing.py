"""What of a camera's picture anybody gets to see: one region of it, without what is masked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Framing:
    """region: left, top, right, bottom; masks: corners (x, y) each; all as shares of the whole picture, so that they
    hold at every size of it. None and nothing leave it as it is."""

    region: tuple[float, float, float, float] | None = None
    masks: Sequence[Sequence[tuple[float, float]]] = ()


WHOLE = Framing()
