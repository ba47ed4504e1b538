"""One picture of the frames that a calibration is made of, for whoever stands at the board."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from agent.collection.selection import BRIGHTNESS, CLASS, DUPLICATE, EARLY, NOTHING, OTHERS, SelectionCounts
from agent.common.errors import AgentError
from engines.store.files import replace_files

MAX_THUMBNAILS = 48  # thumbnails
_WIDTH, _HEIGHT, _LABEL = 96, 72, 12  # pixels of a thumbnail at most, and of the line below it
_COLUMNS = 8
_WHITE = (255, 255, 255)


@dataclass(frozen=True, eq=False)
class Thumbnail:
    """A taken frame, BGR uint8 (H, W, 3) of at most 72 by 96 pixels. ts: capture time; brightness in [0, 255]."""

    ts: float
    brightness: float
    image: NDArray[np.uint8]

    @classmethod
    def from_image(cls, ts: float, brightness: float, image: NDArray[np.uint8]) -> Thumbnail:
        """Of a frame of any size: pixels are left out, for it is made of every taken frame and few are looked at."""
        step = max(1, -(-image.shape[0] // _HEIGHT), -(-image.shape[1] // _WIDTH))
        return cls(ts, brightness, image[::step, ::step].copy())


def draw_sheet(thumbnails: Sequence[Thumbnail]) -> bytes:
    """A PNG of thumbnails in order of capture time, each with its time of day (UTC; in a file, media time)
    and its brightness below it."""
    rows = -(-max(len(thumbnails), 1) // _COLUMNS)
    sheet = np.zeros((rows * (_HEIGHT + _LABEL), _COLUMNS * _WIDTH, 3), np.uint8)
    for place, thumbnail in enumerate(sorted(thumbnails, key=lambda each: each.ts)):
        row, column = divmod(place, _COLUMNS)
        top, left = row * (_HEIGHT + _LABEL), column * _WIDTH
        height, width = thumbnail.image.shape[:2]
        sheet[top : top + height, left : left + width] = thumbnail.image
        label = f"{time.strftime('%H:%M:%S', time.gmtime(thumbnail.ts))} {thumbnail.brightness:.0f}"
        foot = (left + 2, top + _HEIGHT + _LABEL - 3)
        cv2.putText(sheet, label, foot, cv2.FONT_HERSHEY_PLAIN, 0.7, _WHITE, 1, cv2.LINE_AA)
    _, encoded = cv2.imencode(".png", sheet)
    return encoded.tobytes()


_SHEET = "selection.png"
_OWNER_ONLY = 0o600  # of frames: who runs the daemon may see them, and nobody else on the board
_MOST_CLASSES = 16  # that are told by name; a message has to stay small


def remove_sheet(state_dir: Path) -> None:
    """Leave no frames of an earlier calibration behind. Raises OSError."""
    (state_dir / _SHEET).unlink(missing_ok=True)


@dataclass(frozen=True)
class SelectionReport:
    """How the frames of a calibration were chosen.

    held_out: frames among the taken ones that judge the candidate. name_of: from a class id to its label.
    thumbnails: of some of the taken frames, spread evenly over them; None where the owner wants no sheet.
    """

    counts: SelectionCounts
    held_out: int
    name_of: Callable[[int], str]
    thumbnails: Sequence[Thumbnail] | None

    def detail(self) -> dict[str, Any]:
        """The counts as JSON values: what an event says."""
        counts = self.counts
        return {
            "considered": counts.considered,
            "taken": counts.taken,
            **{reason: counts.outcomes.get(reason, 0) for reason in (DUPLICATE, EARLY, BRIGHTNESS, CLASS)},
            "held_out": self.held_out,
            "span_s": round(counts.span_s, 3),
            "brightness_bins": list(counts.brightness),
            "classes": self._classes(),
        }

    def write(self, state_dir: Path, on_error: Callable[[AgentError], None]) -> None:
        """Replace selection.json and selection.png in the state directory; without thumbnails no sheet stays there.

        A disk that refuses costs a job nothing: it goes to on_error.
        """
        try:
            replace_files({state_dir / "selection.json": (json.dumps(self.detail()) + "\n").encode()})
            if self.thumbnails is None:
                remove_sheet(state_dir)
            else:
                replace_files({state_dir / _SHEET: draw_sheet(self.thumbnails)}, _OWNER_ONLY)
        except OSError as error:
            found = f"{state_dir}: the report on the selected frames could not be written: {error.strerror}"
            on_error(AgentError("selection.write", found, "a writable state directory", "make room there"))

    def _classes(self) -> dict[str, int]:
        """Taken frames on which the reference sees a class, by name, of the most frequent ones."""
        told: Counter[str] = Counter()
        for place, (known, count) in enumerate(sorted(self.counts.classes.items(), key=lambda item: -item[1])):
            named = "nothing" if known == NOTHING else self.name_of(known)
            told["others" if known == OTHERS or place >= _MOST_CLASSES else named] += count
        return dict(told)
