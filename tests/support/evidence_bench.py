"""A process that keeps its evidence in a file, and one after it."""

from __future__ import annotations

from pathlib import Path

from unexpected import unexpected

from agent.monitoring.estimates import FidelityRecord
from agent.monitoring.evidence_file import EvidenceFile

SOURCE = "rtsp://camera"


class Process:
    """A daemon, as far as an evidence file sees one: it starts with an engine, and adds frames and blocks."""

    def __init__(self, path: Path, engine: str = "day", recall: bool = True, source: str = SOURCE) -> None:
        self.evidence = EvidenceFile(path, source, unexpected)
        self.record = FidelityRecord()
        self.recalled = self.evidence.start(engine, 0.0, recall, self.record)

    def frame(self, ts: float, value: float | None) -> None:
        self.record.add(ts, value)
        self.evidence.note_frame(ts, value)

    def starts(self, since: float) -> None:
        self.record.start(since)
        self.evidence.note_start(since)

    def swap(self, engine: str, since: float) -> None:
        assert self.evidence.start(engine, since, recall=False, mean=self.record) is None
