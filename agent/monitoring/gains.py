"""Remember what recalibrations of this model really gained, so that dB are reported in fidelity.

`GainRecord` keeps them in a small file that outlives the daemon, and makes a GainMap of them
(calibrate.statistics.fidelity_gain): the one on which alarms and receipts of all cameras go.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from agent.common.errors import AgentError
from agent.common.state_files import StateFile, count, finite, share
from calibrate.statistics.evidence import Interval
from calibrate.statistics.fidelity_gain import GainMap, Recalibrated

_SCHEMA = 1
_MOST = 64  # the newest
_ENOUGH = 8  # frames with something on them, of which a mean loss says anything


class GainRecord:
    """The gains of recalibrations; a file of another model, or a damaged one, is replaced by an empty one.

    The supervisor's thread records gains; any thread reads them.
    """

    def __init__(
        self, path: Path | None = None, identity: str = "", on_error: Callable[[AgentError], None] = lambda _: None
    ) -> None:
        """Args:
        path: None keeps nothing over a restart.
        identity: Of the model; what another one gained says nothing of this one.
        on_error: Called once for a disk that refuses.

        Raises AgentError (`gains.schema`) for the file of a newer tared.
        """
        self._identity = identity
        self._file = StateFile(path, _SCHEMA, "gains.write", on_error)
        self._known = self._file.read(self._parse) or []
        self._map = GainMap(self._known)

    def note(self, recalibrated: Recalibrated) -> None:
        """Note what one has gained, on the same frames before and after."""
        self._known = [*self._known, recalibrated][-_MOST:]
        self._map = GainMap(self._known)
        self._file.write({"identity": self._identity, "recalibrations": [list(astuple(each)) for each in self._known]})

    def expected_gain(self, gain_db: float, fidelities: Sequence[float]) -> Interval | None:
        """Return the fidelity that so many dB would gain where frames have these; None where the frames are too few.

        fidelities: Of the newest frames on which one of the engines found something, each in [0, 1].
        """
        if len(fidelities) < _ENOUGH:
            return None
        gain = self._map.gain(gain_db, 1.0 - sum(fidelities) / len(fidelities), len(fidelities))
        return Interval(gain.estimate, gain.low, gain.high, len(fidelities))

    def _parse(self, document: Mapping[str, Any]) -> list[Recalibrated]:
        if document["identity"] != self._identity:
            return []
        return [
            Recalibrated(finite(gain_db), share(loss), _signed_share(gained), count(frames))
            for gain_db, loss, gained, frames in document["recalibrations"][-_MOST:]
        ]


def _signed_share(value: Any) -> float:
    """Return a number in [-1, 1]. Raises ValueError for anything else."""
    share(abs(finite(value)))
    return float(value)
