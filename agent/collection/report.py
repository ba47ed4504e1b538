"""Report how the frames of a calibration were chosen: counts for an event and selection.json, and a contact sheet.

The contact sheet is one picture of some of the frames, for people at the board. It never leaves the state directory.
"""

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
_SHEET = "selection.png"
_OWNER_ONLY = 0o600  # it shows frames: the user of the daemon may read it, and nobody else on the board
_MOST_CLASSES = 16  # that are listed by name; a message has to stay small


@dataclass(frozen=True, eq=False)
class Thumbnail:
    """A taken frame, BGR uint8 (H, W, 3) of at most 72 by 96 pixels. ts: capture time; brightness in [0, 255]."""

    ts: float
    brightness: float
    image: NDArray[np.uint8]

    @classmethod
    def from_image(cls, ts: float, brightness: float, image: NDArray[np.uint8]) -> Thumbnail:
        """Shrink a frame of any size by leaving pixels out: every taken frame has a thumbnail, and few are shown."""
        step = max(1, -(-image.shape[0] // _HEIGHT), -(-image.shape[1] // _WIDTH))
        return cls(ts, brightness, image[::step, ::step].copy())


def draw_sheet(thumbnails: Sequence[Thumbnail]) -> bytes:
    """Draw a PNG of thumbnails in order of capture time.

    Below each are its time of day (UTC; of a file, media time) and its brightness.
    """
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


def remove_sheet(state_dir: Path) -> None:
    """Remove the contact sheet of an earlier calibration. Raises OSError."""
    (state_dir / _SHEET).unlink(missing_ok=True)


@dataclass(frozen=True)
class SelectionReport:
    """Report on the selection of a calibration's frames.

    counts: Frames by what became of them.
    held_out: Taken frames that judge the candidate.
    name_of: Returns the label of a class id.
    thumbnails: Of some of the taken frames, spread evenly over them; None with `calibration.contact_sheet: false`.
    """

    counts: SelectionCounts
    held_out: int
    name_of: Callable[[int], str]
    thumbnails: Sequence[Thumbnail] | None

    def detail(self) -> dict[str, Any]:
        """Return the counts as JSON values, as an event has them."""
        counts = self.counts
        return {
            "considered": counts.outcomes.total(),
            "taken": counts.taken,
            **{reason: counts.outcomes[reason] for reason in (DUPLICATE, EARLY, BRIGHTNESS, CLASS)},
            "held_out": self.held_out,
            "span_s": round(counts.span_s, 3),
            "brightness_bins": list(counts.brightness),
            "classes": self._classes(),
        }

    def write(self, state_dir: Path, on_error: Callable[[AgentError], None]) -> None:
        """Replace selection.json and selection.png in the state directory; without thumbnails remove the latter.

        on_error: called with `state.write` for a disk that refuses, which must not fail a job.
        """
        try:
            replace_files({state_dir / "selection.json": (json.dumps(self.detail()) + "\n").encode()})
            if self.thumbnails is None:
                remove_sheet(state_dir)
            else:
                replace_files({state_dir / _SHEET: draw_sheet(self.thumbnails)}, _OWNER_ONLY)
        except (OSError, cv2.error) as error:  # OpenCV has an error of its own for want of memory
            why = (isinstance(error, OSError) and error.strerror) or str(error)
            found = f"{state_dir}: the report on the selected frames could not be written: {why}"
            on_error(AgentError("state.write", found, "a writable state directory", "free some space there"))

    def _classes(self) -> dict[str, int]:
        """Return the number of taken frames on which the reference sees a class, by name, the most frequent first."""
        frames: Counter[str] = Counter()
        for place, (class_id, count) in enumerate(sorted(self.counts.classes.items(), key=lambda item: -item[1])):
            name = "nothing" if class_id == NOTHING else self.name_of(class_id)
            frames["others" if class_id == OTHERS or place >= _MOST_CLASSES else name] += count
        return dict(frames)
