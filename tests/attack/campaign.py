"""Run the cases of many seeds in worker processes, which may hang, crash or run out of memory; count the verdicts."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast, get_args

from places import ROOT, TEST_PATH

from attack.case import MOST_S, Verdict

WORKER = ("-m", "attack.worker")
SILENCE_S = MOST_S + 40.0  # of a worker: it imports first, and makes the cases of a seed
_SHOWN = 20  # broken cases of a kind


@dataclass
class Tally:
    """The verdicts on the cases of one kind. broken: each with its seed, its number and its name."""

    counts: Counter[Verdict] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def add(self, verdict: Verdict, words: str) -> None:
        self.counts[verdict] += 1
        if verdict == "BROKEN" and len(self.broken) < _SHOWN:
            self.broken.append(words)


def run(kind: str, seeds: Iterator[int], until_s: float, tally: Tally, folder: Path) -> None:
    """Put the cases of these seeds before the product, until the seeds or the time (monotonic) end."""
    while time.monotonic() < until_s:
        if not _worker(kind, seeds, until_s, tally, folder):
            return


def _worker(kind: str, seeds: Iterator[int], until_s: float, tally: Tally, folder: Path) -> bool:
    """Run one worker; return True if it has ended before the seeds and the time have."""
    folder.mkdir(parents=True, exist_ok=True)
    errors = folder / "stderr"
    command = [sys.executable, *WORKER, kind, str(folder)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}{os.pathsep}{TEST_PATH}"}
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=environment, cwd=ROOT, bufsize=0
        ) as worker,
    ):
        assert worker.stdin is not None
        assert worker.stdout is not None
        reader = _Lines(worker.stdout.fileno())
        try:
            while time.monotonic() < until_s:
                seed = next(seeds, None)
                if seed is None:
                    return False
                worker.stdin.write(f"{seed}\n".encode())
                name, number = "the making of its cases", 0
                while True:
                    line = reader.next(SILENCE_S)
                    if line is None:
                        last = (errors.read_text(errors="replace").strip().splitlines() or ["no word"])[-1]
                        is_silent = not reader.has_ended
                        ended = (
                            f"no answer within {SILENCE_S:.0f} s" if is_silent else f"the process ended: {last[:200]}"
                        )
                        tally.add("BROKEN", f"seed {seed}, {name}: {ended}")
                        return True
                    if "done" in line:
                        break
                    if "begins" in line:
                        name, number = f"case {number}, {line['begins']}", number + 1
                    else:
                        tally.add(cast(Verdict, line["verdict"]), f"seed {seed}, {name}: {line['why']}")
            return False
        finally:
            worker.kill()


class _Lines:
    """The lines of JSON that come from a descriptor."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._kept = b""
        self.has_ended = False

    def next(self, most_s: float) -> dict[str, str] | None:
        """Return the next line; None if none comes in this time, or none ever will."""
        until_s = time.monotonic() + most_s
        while b"\n" not in self._kept:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, until_s - time.monotonic()))
            content = os.read(self._descriptor, 1 << 16) if ready else b""
            if not content:
                self.has_ended = bool(ready)
                return None
            self._kept += content
        line, _, self._kept = self._kept.partition(b"\n")
        document: dict[str, str] = json.loads(line)
        return document


def table(tallies: dict[str, Tally]) -> str:
    """The table for people, in Markdown."""
    verdicts: Sequence[Verdict] = get_args(Verdict)
    rows = [f"| input | tried | {' | '.join(verdicts)} |", "|---|---:|" + "---:|" * len(verdicts)]
    total = Tally()
    for name, tally in tallies.items():
        total.counts.update(tally.counts)
        rows.append(_row(name, tally, verdicts))
    return "\n".join([*rows, _row("all", total, verdicts)])


def _row(name: str, tally: Tally, verdicts: Sequence[Verdict]) -> str:
    return f"| {name} | {tally.counts.total():,} | {' | '.join(f'{tally.counts[each]:,}' for each in verdicts)} |"
