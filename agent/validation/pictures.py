"""Draw the frames on which a candidate and the reference differ most, for the report on the candidate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agent.results.snapshot import encode_jpeg
from agent.validation.comparison import Difference
from agent.vision.drawing import input_picture
from agent.vision.spec import ModelSpec
from agent.vision.tasks.opening import open_task

_WIDTH_PX = 280  # width of each half: the view of float, and that of the candidate
_MOST_BYTES = 100_000


def differing_pictures(differences: Sequence[Difference], spec: ModelSpec) -> list[tuple[bytes, str]]:
    """Return a JPEG for each frame, the reference's answer on its left and the candidate's on its right, and a text.

    Answers that cannot be drawn give no pictures.
    """
    if not open_task(spec).can_be_drawn:
        return []
    return [(_pair(each, spec), _text(each, spec)) for each in differences]


def _pair(difference: Difference, spec: ModelSpec) -> bytes:
    picture = input_picture(difference.frame, spec.input)
    scale = _WIDTH_PX / picture.shape[1]
    answers = (difference.reference, difference.served)
    halves = [answer.drawn_into(picture, None, spec, scale) for answer in answers]
    return encode_jpeg(np.concatenate(halves, axis=1), _MOST_BYTES)[0]


def _text(difference: Difference, spec: ModelSpec) -> str:
    seen, served = (answer.summary(spec) for answer in (difference.reference, difference.served))
    return f"float, on the left: {seen}; INT8: {served}"
