"""Keep calibrations that have proved themselves in some light, so that known light needs no recalibration.

A *regime* is an artefact with its calibration. Where another regime fits the scene and the engine in service does not,
its artefact is switched to, which takes seconds; only a scene that fits none is worth a recalibration. `RegimeStore`
keeps the regimes; `Regimes` hands them to the drift monitors and decides when the artefact in service has become one.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agent.collection.collection import SharedCollection
from agent.common.state_files import finite, parse_state
from agent.config import Config
from agent.models.model import Model, tap_weights
from agent.monitoring.camera_monitor import CameraMonitor, CameraStates
from agent.monitoring.drift import Regime
from agent.state.salvage import Row
from agent.state.store import StateStore
from engines.calibration import Calibration

_FAITHFUL = 0.8  # fidelity that makes a regime, unless the owner accepts less
_STEP_S = 30.0  # most capture time that counts between two calls, which come ten times a second


class RegimeStore:
    """The known regimes; the one that served last is the last.

    At most `most` are kept: the one that has not served for longest goes first.
    """

    def __init__(self, state: StateStore, identity: str, most: int) -> None:
        """identity: a fingerprint of model, plan, spec and runtime. Regimes stored under another one are ignored."""
        self._state = state
        self._identity = identity
        self._most = most
        self.known: tuple[Regime, ...] = state.read("regimes", self._parse) or ()

    def learn(self, regime: Regime) -> None:
        """Keep a regime; one that is known becomes the last. Raises AgentError (`state.write`)."""
        others = [known for known in self.known if known.artefact != regime.artefact]
        self._keep(tuple([*others, regime][-self._most :]))

    def forget(self, artefact: str) -> None:
        """Remove the regime of an artefact that cannot be loaded any more. Raises AgentError (`state.write`)."""
        self._keep(tuple(known for known in self.known if known.artefact != artefact))

    def _keep(self, known: tuple[Regime, ...]) -> None:
        if known != self.known:
            self.known = known
            rows = [(regime.artefact, self._identity, json.dumps(asdict(regime))) for regime in known]
            self._state.replace({"regimes": rows})

    def _parse(self, rows: Sequence[Row]) -> tuple[Regime, ...]:
        regimes = [parse_regime(parse_state(regime)) for _, identity, regime in rows if identity == self._identity]
        return tuple(regimes[-self._most :])


def regime_artefacts(state: StateStore) -> list[str]:
    """List the artefacts of all regimes that a board keeps, of any identity."""
    return state.read("regimes", lambda rows: [artefact for artefact, _, _ in rows]) or []


def parse_regime(row: Any) -> Regime:
    """Parse one regime, as asdict wrote it. Raises ValueError and the like for figures that no `learn` has written."""
    artefact = row["artefact"]
    if not re.fullmatch(r"[\w-]{1,64}", artefact, re.ASCII):  # it names a folder in the store
        raise ValueError("a name that no artefact has")
    scales, weights = ({tensor: finite(figure) for tensor, figure in row[key].items()} for key in ("scales", "weights"))
    if not all(figure > 0.0 for figure in (*scales.values(), *weights.values())):
        raise ValueError("a figure that no tensor has")
    own = {tensor: (finite(present), finite(least)) for tensor, (present, least) in row["own"].items()}
    if any(present < 0.0 or least < 0.0 or least > 0.0 >= present for present, least in own.values()):
        raise ValueError("noise that no tensor has")
    if not math.isfinite(sum(weights.get(tensor, 1.0) * present for tensor, (present, _) in own.items())):
        raise ValueError("noise that no network has")
    return Regime(artefact, scales, weights, own)


@dataclass
class Regimes:
    """Tell each camera's drift monitor what serves and what else is known; learn what serves once it has proved sound.

    Runs in the supervisor's thread.
    """

    config: Config
    store: RegimeStore
    monitors: Collection[CameraMonitor]
    collection: SharedCollection

    def __post_init__(self) -> None:
        self._serving: Regime | None = None
        self._unwanted: set[str] = set()
        self._restart_dwelling()

    @property
    def artefacts(self) -> tuple[str, ...]:
        """The artefacts of the regimes that are kept, by id."""
        return tuple(regime.artefact for regime in self.store.known)

    def watch(
        self,
        artefact: str,
        model: Model,
        calibration: Calibration,
        since: Mapping[str, float],
        recall: bool = False,
    ) -> None:
        """Watch an artefact that serves from now on.

        Args:
            model: The model under the plan of the artefact.
            since: By camera, the capture time from which on it serves; 0 for a camera that is not named.
            recall: Go on with the evidence that an earlier process kept of it.

        Raises AgentError: `state.write`.
        """
        weights = tap_weights(model, calibration)
        self._serving = Regime.from_calibration(artefact, calibration, model.scales(calibration), weights)
        self._restart_dwelling()
        self.collection.restart()
        for monitor in self.monitors:
            monitor.watch(self._serving, self._others(), since.get(monitor.camera, 0.0), recall)
        if artefact in self.artefacts:
            self.store.learn(self._serving)

    def unwatch(self) -> None:
        """Stop watching: the reference serves, which has no scales that could be wrong."""
        self._serving = None
        self._restart_dwelling()
        for monitor in self.monitors:
            monitor.unwatch()

    def learn_if_proved(self, states: CameraStates, now_ts: float) -> str:
        """Make the artefact that serves a regime once it has proved itself; return its id at that moment, else "".

        1. It has served its own light for `regimes.dwell_s` without drift and without trouble with a view.
        2. Its fidelity is proved on one camera at least and refuted on none: some cameras see something once a week.
           Frames on which nothing is found prove nothing: a covered lens is no regime, however long it lasts.

        Raises AgentError: `state.write`.
        """
        self._dwell(states, now_ts)
        serving = self._serving
        if serving is None or serving in self.store.known or serving.artefact in self._unwanted:
            return ""
        least = min(_FAITHFUL, 1.0 - self.config.max_loss)  # what the owner accepts may be learned
        fidelities = [state.fidelity for state in states.values()]
        is_faithful = any(each.low >= least for each in fidelities) and all(each.high >= least for each in fidelities)
        if self._dwelt_s < self.config.regimes.dwell_s or not is_faithful:
            return ""
        self.store.learn(serving)
        return serving.artefact

    def forget(self, artefact: str) -> None:
        """Remove an artefact that cannot serve any more, or is not to. Raises AgentError (`state.write`)."""
        self._unwanted.add(artefact)
        self.store.forget(artefact)
        if self._serving is not None:
            for monitor in self.monitors:
                monitor.compare(self._others())

    def _others(self) -> list[Regime]:
        serving = self._serving.artefact if self._serving is not None else None
        return [regime for regime in self.store.known if regime.artefact != serving]

    def _restart_dwelling(self) -> None:
        self._dwelt_s, self._seen_ts = 0.0, math.inf

    def _dwell(self, states: CameraStates, now_ts: float) -> None:
        """Count capture time as long as all is well. A gap, or a step of the clock, counts for `_STEP_S` at most."""
        tolerance_db = self.config.drift.tolerance_db
        judged = [
            (state.drift, state.view) for state in states.values() if state.drift is not None and state.drift.judged
        ]
        is_well = judged and all(
            drift.state == "calm" and drift.serving_db <= tolerance_db and not view.trouble for drift, view in judged
        )
        passed_s = min(max(0.0, now_ts - self._seen_ts), _STEP_S)
        self._dwelt_s = self._dwelt_s + passed_s if is_well else 0.0
        self._seen_ts = now_ts
