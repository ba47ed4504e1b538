"""Keep what decisions remember, in the state directory: restraint.json, attempts.json and refusal.json.

The files hold wall-clock times, since a restart knows no others. A time from the future counts as now: whatever a clock
was set to, a restart makes nothing wait longer than its own pause, or a day. A time that lies ahead by more than a day
is dropped: on a board that starts without the time it would count as now at every boot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent.common.clock import SYSTEM_CLOCK, Clock
from agent.common.errors import AgentError
from agent.common.state_files import StateFile
from agent.core import actions as act
from agent.core.state import NEVER_S, Attempt, Memory, Refusal, Restraint
from agent.monitoring.regimes import parse_regime

_DAY_S = 86_400.0
_RESTRAINT_SCHEMA, _RAISED_SCHEMA, _REFUSAL_SCHEMA = 2, 1, 1


class KeptMemory:
    """The memory of earlier processes. A file that cannot be parsed counts as empty."""

    def __init__(
        self, state_dir: Path | None, on_error: Callable[[AgentError], None], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        """Open the files.

        Args:
            state_dir: None keeps nothing over a restart, as for a recording.
            on_error: Called once for each file that the disk refuses.
        """
        self._clock = clock

        def file(name: str, schema: int, code: str) -> StateFile:
            return StateFile(state_dir / name if state_dir is not None else None, schema, code, on_error)

        self._restraint = file("restraint.json", _RESTRAINT_SCHEMA, "restraint.write")
        self._raised = file("attempts.json", _RAISED_SCHEMA, "attempts.write")
        self._refusal = file("refusal.json", _REFUSAL_SCHEMA, "refusal.write")
        self._kept = Memory()

    def read(self, raised_under: str) -> Memory:
        """Return what earlier processes remembered.

        Args:
            raised_under: As in Memory, as of today. Raises of precision under other rules say nothing.

        Raises AgentError (`restraint.schema`, `attempts.schema`, `refusal.schema`) for a file of a newer tared.
        """
        restraint = self._restraint.read(lambda document: _parse_restraint(document, self._clock))
        raised = self._raised.read(lambda document: _parse_raised(document, raised_under))
        memory = Memory(restraint or Restraint(), raised or {}, raised_under, self._refusal.read(_parse_refusal))
        self._kept = memory
        if restraint is not None:
            self._write_restraint(restraint)  # times from the future would hold again at every start
        return memory

    def remember(self, action: act.Remember) -> None:
        """Keep a memory. The times are written again each time, since the wall clock may have been set."""
        memory = action.memory
        kept, self._kept = self._kept, memory
        self._write_restraint(memory.restraint)
        if memory.raised != kept.raised:
            self._raised.write({"origin": memory.raised_under, "refused": dict(memory.raised)})
        if memory.refusal is not None and memory.refusal is not kept.refusal:
            self._refusal.write({**asdict(memory.refusal.attempt), "error": memory.refusal.error.as_dict()})

    def _write_restraint(self, restraint: Restraint) -> None:
        ahead_s = self._clock.wall_s() - self._clock.monotonic_s()
        starts, rollbacks = (
            [each + ahead_s for each in times] for times in (restraint.starts_s, restraint.rollbacks_s)
        )
        failed, switched = (
            each + ahead_s if math.isfinite(each) else None for each in (restraint.failed_s, restraint.switched_s)
        )
        self._restraint.write({"jobs": starts, "rollbacks": rollbacks, "failed": failed, "switched": switched})


def _parse_restraint(document: Mapping[str, Any], clock: Clock) -> Restraint:
    """Raises KeyError, TypeError, ValueError for what was never written."""
    now_s, ahead_s = clock.monotonic_s(), clock.wall_s() - clock.monotonic_s()

    def monotonic_s(wall_s: Any) -> float:
        if not math.isfinite(wall_s):
            raise ValueError("a time that no clock shows")
        time_s = float(wall_s) - ahead_s
        return min(time_s, now_s) if time_s <= now_s + _DAY_S else NEVER_S

    starts_s, rollbacks_s = (
        tuple(sorted(filter(math.isfinite, map(monotonic_s, document[key])))) for key in ("jobs", "rollbacks")
    )
    failed_s, switched_s = (
        NEVER_S if document[key] is None else monotonic_s(document[key]) for key in ("failed", "switched")
    )
    return Restraint(starts_s, rollbacks_s, failed_s, switched_s)


def _parse_raised(document: Mapping[str, Any], raised_under: str) -> dict[str, int | None]:
    """Raises KeyError, TypeError, ValueError for what was never written, and for other rules."""
    rows = document["refused"].items()
    if document["origin"] != raised_under or not all(each is None or each > 0 for _, each in rows):
        raise ValueError("attempts under other rules, or attempts that never took place")
    return {artefact: None if each is None else int(each) for artefact, each in rows}


def _parse_refusal(document: Mapping[str, Any]) -> Refusal:
    """Raises KeyError, TypeError, ValueError for what was never written."""
    words = {key: str(document["error"][key]) for key in ("code", "found", "expected", "remedy")}
    return Refusal(Attempt(str(document["settings"]), parse_regime(document["scene"])), AgentError(**words))
