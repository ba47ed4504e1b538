"""Keep the measured costs from job to job: they are of a model, a runtime and a board, and not of a scene.

`KeptCosts.find` returns the costs that a job's search goes by. A file of the cache folder holds them once they were
measured beyond doubt. It is treated as a timing cache is: old files go with the upkeep of the store, a damaged one
counts as none, and where the disk refuses, the next job measures again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agent.common.state_files import parse_or_none, parse_state
from agent.planning.costs import GroupCosts, PlanBuilder, find_costs, parse_costs
from calibrate.plan import Repairs
from engines.board import board, processor
from engines.errors import EngineError
from engines.interface import Array, BackendOptions, Progress
from engines.quantise.costs import HasTime, macs_costs
from engines.quantise.fusion import Grouping
from engines.store.artefact import fingerprint
from engines.store.kept_file import read_kept, write_kept

_FORMAT = 1  # version of the file's content


@dataclass(eq=False, repr=False)
class KeptCosts:
    """The costs of a model's groups on the runtime that serves.

    Args:
        frames: Network inputs (1, C, H, W); the first is inferred.
        options: Those of the runtime. Without `cache` nothing is kept.
        warn: Called with one line for the log.
    """

    builder: PlanBuilder
    frames: Sequence[Array]
    options: BackendOptions
    warn: Callable[[str], None]

    def __post_init__(self) -> None:
        self._floats = self.builder.model.rules.floats

    def find(self, grouping: Grouping, repairs: Repairs, progress: Progress, has_time: HasTime) -> GroupCosts:
        """Return the kept costs of these groups; else measure them as `find_costs` does, and keep them.

        Where the runtime fails while it is measured, multiply-accumulates count: a search goes on without times.

        repairs: those under which the graph has these groups.

        Raises DeviceError where the GPU is lost, and what `progress` raises.
        """
        builder, batch, kept = self.builder, self.frames[0], True
        builder.repairs = repairs
        file = self._file(grouping, batch)

        def remember(_: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
            nonlocal kept
            known = self._read(file, grouping) if file is not None else None
            if known is None:
                kept, known = False, measure()
                if file is not None and known["source"] == "measured" and not known["doubt"]:
                    write_kept(file, self.options.key, _purpose(file), json.dumps(known).encode())
            return known

        try:
            found = find_costs(grouping, self._floats, builder, batch, remember, progress, has_time=has_time)
        except EngineError as error:
            on, missing = " ".join(builder.runtime.values()), dict(builder.without_int8)
            found, kept = (
                GroupCosts(macs_costs(grouping), f"measuring failed: {error.found}", on, False, missing),
                False,
            )
            self.warn(f"the costs of layers are not known: {error}")
        return replace(found, kept=kept)

    def _file(self, grouping: Grouping, batch: Array) -> Path | None:
        identity = {
            "format": _FORMAT,
            "model": self.builder.model.sha256,
            "runtime": dict(self.builder.runtime),
            "board": {**board(), "processor": processor()},
            "threads": self.options.threads,
            "batch": batch.shape,
            "floats": sorted(self._floats),
            "groups": [group.layers for group in grouping.groups],
            "edges": grouping.edges,
        }
        return self.options.cache and self.options.cache / f"{fingerprint(identity)}.costs"

    def _read(self, file: Path, grouping: Grouping) -> dict[str, Any] | None:
        content = read_kept(file, self.options.key, _purpose(file))

        def parse() -> dict[str, Any]:
            known: dict[str, Any] = parse_state(content or b"")
            parse_costs(known, grouping)
            return known

        known = parse_or_none(parse)
        if known is None and file.exists():
            self.warn(f"{file} is damaged or of another key: the costs of layers are measured again")
        return known


def _purpose(file: Path) -> str:
    """Return that of the signature: the name says of which model, runtime and board the costs are."""
    return f"layer costs {file.stem}"
