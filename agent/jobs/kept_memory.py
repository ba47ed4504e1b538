"""Keep what decisions remember in the board's state: the tables `limits`, `attempts` and `refusal`.

They hold wall-clock times, since a restart knows no others. A time from the future counts as now: whatever a clock was
set to, a restart makes nothing wait longer than its own pause, or a day. A time that lies ahead by more than a day is
dropped: on a board that starts without the time it would count as now at every boot.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.common.state_files import parse_state
from agent.core import actions as act
from agent.core.state import NEVER_S, Attempt, Memory, Refusal, Restraint
from agent.monitoring.regimes import parse_regime
from agent.state.salvage import Row
from agent.state.store import StateStore

_DAY_S = 86_400.0


class KeptMemory:
    """The memory of earlier processes. A table that no tared has written counts as empty."""

    def __init__(self, state: StateStore, clock: Clock = SYSTEM_CLOCK) -> None:
        self._state = state
        self._clock = clock
        self._kept = Memory()

    def read(self, raised_under: str) -> Memory:
        """Return what earlier processes remembered.

        raised_under: As in Memory, as of today. Raises of precision under other rules say nothing.
        """
        restraint = self._state.read("limits", self._parse_restraint)
        raised = self._state.read("attempts", lambda rows: _parse_raised(rows, raised_under))
        refusal = self._state.read("refusal", _parse_refusal)
        self._kept = Memory(restraint or Restraint(), raised or {}, raised_under, refusal)
        if restraint is not None:
            self._write_restraint(restraint)  # times from the future would hold again at every start
        return self._kept

    def remember(self, action: act.Remember) -> None:
        """Keep a memory. The times are written again each time, since the wall clock may have been set."""
        memory, kept, self._kept = action.memory, self._kept, action.memory
        self._write_restraint(memory.restraint)
        if memory.raised != kept.raised:
            rows = [(artefact, memory.raised_under, refused) for artefact, refused in memory.raised.items()]
            self._state.write("attempts", rows)
        refusal = memory.refusal
        if refusal is not None and refusal is not kept.refusal:
            scene, error = json.dumps(asdict(refusal.attempt.scene)), json.dumps(refusal.error.as_dict())
            self._state.write("refusal", [(refusal.attempt.settings, scene, error)])

    def _write_restraint(self, restraint: Restraint) -> None:
        ahead_s = self._clock.wall_s() - self._clock.monotonic_s()
        times_s = {
            "job": restraint.starts_s,
            "rollback": restraint.rollbacks_s,
            "failed": (restraint.failed_s,),
            "switched": (restraint.switched_s,),
        }
        rows = [(kind, each + ahead_s) for kind, all_s in times_s.items() for each in all_s if math.isfinite(each)]
        self._state.write("limits", rows)

    def _parse_restraint(self, rows: Sequence[Row]) -> Restraint:
        """Raises KeyError, ValueError for what was never written."""
        times_s: dict[str, list[float]] = {kind: [] for kind in ("job", "rollback", "failed", "switched")}
        for kind, wall_s in rows:
            times_s[kind].append(self._as_monotonic(wall_s))
        jobs_s, rollbacks_s, failed_s, switched_s = (sorted(filter(math.isfinite, each)) for each in times_s.values())
        return Restraint(
            tuple(jobs_s), tuple(rollbacks_s), max(failed_s, default=NEVER_S), max(switched_s, default=NEVER_S)
        )

    def _as_monotonic(self, wall_s: float) -> float:
        """Return NEVER_S for a time that is dropped. Raises ValueError for what is no time."""
        if not math.isfinite(wall_s):
            raise ValueError("a time that no clock shows")
        now_s = self._clock.monotonic_s()
        time_s = float(wall_s) - (self._clock.wall_s() - now_s)
        return min(time_s, now_s) if time_s <= now_s + _DAY_S else NEVER_S


def _parse_raised(rows: Sequence[Row], raised_under: str) -> dict[str, int | None]:
    """Raises ValueError for what was never written; raises of precision under other rules are left out."""
    if not all(refused is None or refused > 0 for _, _, refused in rows):
        raise ValueError("attempts that never took place")
    return {
        artefact: None if refused is None else int(refused)
        for artefact, origin, refused in rows
        if origin == raised_under
    }


def _parse_refusal(rows: Sequence[Row]) -> Refusal:
    """Raises KeyError, TypeError, ValueError for what was never written."""
    ((settings, scene, error),) = rows
    kept = parse_state(error)
    words = {key: str(kept[key]) for key in ("code", "found", "expected", "remedy")}
    return Refusal(Attempt(settings, parse_regime(parse_state(scene))), AgentError(**words))
