"""Count drawn frames: how many have a label, were skipped, or wait; by camera and regime."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass

from agent.labelling.store import Cell, DrawnFrame


@dataclass
class LabelProgress:
    """Progress of the labels of some frames; suggested: labels that began as the model's answer."""

    drawn: int = 0
    labelled: int = 0
    suggested: int = 0
    skipped: int = 0
    waiting: int = 0

    @classmethod
    def count(cls, frames: Iterable[DrawnFrame]) -> LabelProgress:
        """Count these frames."""
        progress = cls()
        for frame in frames:
            progress.drawn += 1
            progress.labelled += frame.label is not None
            progress.suggested += frame.suggested
            progress.skipped += frame.skipped
            progress.waiting += frame.is_waiting
        return progress

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


def progress_by_cell(frames: Iterable[DrawnFrame]) -> dict[Cell, LabelProgress]:
    """Return the progress of each camera and regime, in the order of their names."""
    cells: dict[Cell, list[DrawnFrame]] = {}
    for frame in frames:
        cells.setdefault((frame.camera, frame.regime), []).append(frame)
    return {cell: LabelProgress.count(cells[cell]) for cell in sorted(cells)}
