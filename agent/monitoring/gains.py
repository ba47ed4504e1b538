"""Remember what recalibrations of this model really gained, so that dB are reported in fidelity.

`GainRecord` keeps them in the board's state, and makes a GainMap of them
(calibrate.statistics.fidelity_gain): the one on which alarms and receipts of all cameras go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from agent.common.state_files import count, finite, share
from agent.state.salvage import Row
from agent.state.store import StateStore
from calibrate.statistics.evidence import Interval
from calibrate.statistics.fidelity_gain import GainMap, Recalibrated

_MOST = 64  # the newest
_ENOUGH = 8  # frames with something on them, of which a mean loss says anything


class GainRecord:
    """The gains of recalibrations of one model; those of another one are replaced.

    The supervisor's thread records gains; any thread reads them.
    """

    def __init__(self, state: StateStore | None = None, identity: str = "") -> None:
        """Args:
        state: None keeps nothing over a restart.
        identity: Of the model; what another one gained says nothing of this one.
        """
        self._identity = identity
        self._state = state
        self._known = (state.read("gains", self._parse) if state is not None else None) or []
        self._map = GainMap(self._known)

    def note(self, recalibrated: Recalibrated) -> None:
        """Note what one has gained, on the same frames before and after."""
        self._known = [*self._known, recalibrated][-_MOST:]
        self._map = GainMap(self._known)
        if self._state is not None:
            self._state.write("gains", [(self._identity, *astuple(each)) for each in self._known])

    def expected_gain(self, gain_db: float, fidelities: Sequence[float]) -> Interval | None:
        """Return the fidelity that so many dB would gain where frames have these; None where the frames are too few.

        fidelities: Of the newest frames on which one of the engines found something, each in [0, 1].
        """
        if len(fidelities) < _ENOUGH:
            return None
        gain = self._map.gain(gain_db, 1.0 - sum(fidelities) / len(fidelities), len(fidelities))
        return Interval(gain.estimate, gain.low, gain.high, len(fidelities))

    def _parse(self, rows: Sequence[Row]) -> list[Recalibrated]:
        return [
            Recalibrated(finite(gain_db), share(loss), _signed_share(gained), count(frames))
            for identity, gain_db, loss, gained, frames in rows[-_MOST:]
            if identity == self._identity
        ]


def _signed_share(value: Any) -> float:
    """Return a number in [-1, 1]. Raises ValueError for anything else."""
    share(abs(finite(value)))
    return float(value)
