"""What stays of a selection: its counts, for everybody, and a contact sheet that never leaves the board."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.contact_sheet import Thumbnail, draw_sheet
from agent.errors import AgentError
from agent.selection import BRIGHTNESS, CLASS, DUPLICATE, EARLY, NOTHING, OTHERS, SelectionCounts
from engines.files import replace_files

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
