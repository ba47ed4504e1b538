"""A process that keeps its evidence in a file, and one after it."""

from __future__ import annotations

from pathlib import Path

from agent.common.errors import AgentError
from agent.monitoring.estimates import FidelityRecord
from agent.monitoring.evidence_file import EvidenceFile

SOURCE = "rtsp://camera"


def told(_error: AgentError) -> None:
    raise AssertionError("nothing was to be told")


class Process:
    """A daemon, as far as a memory sees one: it begins with an engine, and takes frames and blocks."""

    def __init__(self, path: Path, engine: str = "day", recall: bool = True, source: str = SOURCE) -> None:
        self.memory = EvidenceFile(path, source, told)
        self.record = FidelityRecord()
        self.recalled = self.memory.start(engine, 0.0, recall, self.record)

    def frame(self, ts: float, value: float | None) -> None:
        self.record.add(ts, value)
        self.memory.note_frame(ts, value)

    def starts(self, since: float) -> None:
        self.record.start(since)
        self.memory.note_start(since)

    def swap(self, engine: str, since: float) -> None:
        assert self.memory.start(engine, since, recall=False, mean=self.record) is None
