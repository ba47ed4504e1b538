"""What of a camera's picture anybody gets to see: one region of it, without what is masked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field

Share = Annotated[float, Field(ge=0.0, le=1.0)]  # of the picture's width or height


def _spans(region: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    left, top, right, bottom = region
    if not (left < right and top < bottom):
        raise ValueError("left, top, right, bottom with left < right and top < bottom")
    return region


Region = Annotated[tuple[Share, Share, Share, Share], AfterValidator(_spans)]
Polygon = Annotated[tuple[tuple[Share, Share], ...], Field(min_length=3)]


@dataclass(frozen=True)
class Framing:
    """region: left, top, right, bottom; masks: corners (x, y) each; all as shares of the whole picture, so that they
    hold at every size of it. None and nothing leave it as it is."""

    region: tuple[float, float, float, float] | None = None
    masks: Sequence[Sequence[tuple[float, float]]] = ()


WHOLE = Framing()
