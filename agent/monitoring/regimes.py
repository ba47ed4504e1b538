"""Regimes: calibrations that have proved themselves in some light, kept so that known light is no news.

Where another regime fits the scene and the engine in service does not, its artefact is switched to, which takes
seconds; only a scene that fits none is worth a recalibration.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from agent.collection.collection import SharedCollection
from agent.common.errors import AgentError
from agent.common.state_files import parse_state, understood
from agent.config import Config
from agent.models.model import Model, tap_weights
from agent.monitoring.camera_monitor import CameraMonitor, CameraStates
from agent.monitoring.drift import Regime
from engines.calibration import Calibration
from engines.store.files import replace_files

_SCHEMA = 2  # 1 had no weights; the regimes of such a book are learnt anew
_STEP_S = 30.0  # between two looks, of which there are ten a second


class RegimeStore:
    """The known regimes, in the file at `path`; the one that served last is the last.

    identity: of what an artefact has to be of to serve at all: those of another model, plan, spec or runtime are not
    taken over. At most `most` are kept: the one that has not served for longest goes first.
    """

    def __init__(self, path: Path, identity: str, most: int) -> None:
        """Raises AgentError (`regimes.schema`) for a file of a newer tared; one that cannot be read is begun anew."""
        self._path = path
        self._identity = identity
        self._most = most
        self.known: tuple[Regime, ...] = self._read()

    def learn(self, regime: Regime) -> None:
        """Keep a regime; one that is known becomes the last. Raises AgentError (`regimes.write`)."""
        others = [known for known in self.known if known.artefact != regime.artefact]
        self._keep(tuple([*others, regime][-self._most :]))

    def forget(self, artefact: str) -> None:
        """Do without an artefact, which cannot be loaded any more. Raises AgentError (`regimes.write`)."""
        self._keep(tuple(known for known in self.known if known.artefact != artefact))

    def _keep(self, known: tuple[Regime, ...]) -> None:
        if known == self.known:
            return
        self.known = known
        document = {"schema": _SCHEMA, "identity": self._identity, "regimes": [asdict(regime) for regime in known]}
        try:
            replace_files({self._path: (json.dumps(document, indent=1) + "\n").encode()})
        except OSError as error:
            found = f"{self._path}: {error.strerror}"
            raise AgentError(
                "regimes.write", found, "a writable state directory", "make room, or its rights"
            ) from error

    def _read(self) -> tuple[Regime, ...]:
        document = _document(self._path)
        regimes = _regimes(document) if document.get("identity") == self._identity else ()
        return regimes[-self._most :]


def regime_artefacts(path: Path) -> list[str]:
    """The artefacts of all regimes in a book, whatever they are of. Raises AgentError (`regimes.schema`)."""
    return [regime.artefact for regime in _regimes(_document(path))]


def _document(path: Path) -> dict[str, Any]:
    """What is in a book of today's schema, nothing for one that is older or cannot be read.

    Raises AgentError (`regimes.schema`).
    """
    document: Any = understood(lambda: parse_state(path.read_bytes()))
    schema = document.get("schema") if isinstance(document, dict) else None
    if isinstance(schema, int) and schema > _SCHEMA:
        raise AgentError(
            "regimes.schema",
            f"{path} of schema {schema}",
            f"schema {_SCHEMA} or an older one",
            "run the tared that wrote it, or remove the file: regimes are learnt anew",
        )
    return document if schema == _SCHEMA else {}


def _regimes(document: dict[str, Any]) -> tuple[Regime, ...]:
    return understood(lambda: tuple(_regime(row) for row in document["regimes"])) or ()


def _regime(row: Any) -> Regime:
    """Raises what `understood` takes for what no `learn` has written."""
    artefact = row["artefact"]
    if not re.fullmatch(r"[\w-]{1,64}", artefact, re.ASCII):  # it names a folder in the store
        raise ValueError("a name that no artefact has")
    scales, weights = (_positive(row[key]) for key in ("scales", "weights"))
    own = {tensor: (float(today), float(least)) for tensor, (today, least) in row["own"].items()}
    if not all(0.0 <= ratio < math.inf for pair in own.values() for ratio in pair):
        raise ValueError("noise that no tensor has")
    if any(least > 0.0 >= today for today, least in own.values()):
        raise ValueError("noise below the least")
    if not math.isfinite(sum(weights.get(tensor, 1.0) * today for tensor, (today, _) in own.items())):
        raise ValueError("noise that no network has")
    return Regime(artefact, scales, weights, own)


def _positive(row: Any) -> dict[str, float]:
    """Figures by tensor. Raises ValueError for one that is not positive and finite."""
    found = {tensor: float(figure) for tensor, figure in row.items()}
    if not all(0.0 < figure < math.inf for figure in found.values()):
        raise ValueError("a figure that no tensor has")
    return found


class Regimes:
    """What serves, and what else is known, for the drift monitor; learns what serves once that has proved sound."""

    def __init__(
        self, config: Config, book: RegimeStore, findings: Collection[CameraMonitor], gathering: SharedCollection
    ) -> None:
        """findings: of each camera."""
        self._config = config
        self._book = book
        self._findings = findings
        self._gathering = gathering
        self._serving: Regime | None = None
        self._unwanted: set[str] = set()
        self._dwelt_s, self._seen_ts = 0.0, float("inf")

    @property
    def artefacts(self) -> tuple[str, ...]:
        """Those of the regimes that are kept, by id."""
        return tuple(regime.artefact for regime in self._book.known)

    def watch(
        self,
        artefact: str,
        model: Model,
        calibration: Calibration,
        since: Mapping[str, float],
        recall: bool = False,
    ) -> None:
        """An artefact serves from capture time `since` on, by camera, else from 0 on; recall: as it did before.

        model: under the plan of the artefact. Raises AgentError (`regimes.write`).
        """
        weights = tap_weights(model, calibration)
        self._serving = Regime.of(artefact, calibration, model.scales(calibration), weights)
        self._dwelt_s, self._seen_ts = 0.0, float("inf")
        self._gathering.collect_afresh()
        for findings in self._findings:
            findings.watch(self._serving, self._others(), since.get(findings.camera, 0.0), recall)
        if artefact in (regime.artefact for regime in self._book.known):
            self._book.learn(self._serving)

    def unwatch(self) -> None:
        """The reference serves, which has no scales that could be wrong."""
        self._serving = None
        self._dwelt_s, self._seen_ts = 0.0, float("inf")
        for findings in self._findings:
            findings.unwatch()

    def learns(self, states: CameraStates, now_ts: float) -> str:
        """The artefact that serves, at the moment when it has become a regime; else nothing.

        It has served its own light for long, without drift, with views that show something, and with good fidelity.
        Frames on which nothing is found tell nothing: a covered lens proves nothing, however long it lasts. Raises
        AgentError (`regimes.write`).
        """
        serving = self._serving
        self._dwell(states, now_ts)
        if serving is None or serving in self._book.known or serving.artefact in self._unwanted:
            return ""
        if self._dwelt_s < self._config.regimes.dwell_s or not self._is_faithful(states):
            return ""
        self._book.learn(serving)
        return serving.artefact

    def forget(self, artefact: str) -> None:
        """Do without an artefact: it cannot serve any more, or is not to. Raises AgentError (`regimes.write`)."""
        self._unwanted.add(artefact)
        self._book.forget(artefact)
        if self._serving is not None:
            for findings in self._findings:
                findings.compare(self._others())

    def _others(self) -> list[Regime]:
        return [
            regime for regime in self._book.known if self._serving is None or regime.artefact != self._serving.artefact
        ]

    def _is_faithful(self, states: CameraStates) -> bool:
        """Proved on one camera at least, and refuted on none: some cameras see something once a week."""
        least, fidelities = self._config.regimes.fidelity, [state.fidelity for state in states.values()]
        return any(known.low >= least for known in fidelities) and all(known.high >= least for known in fidelities)

    def _dwell(self, states: CameraStates, now_ts: float) -> None:
        """Count capture time as long as all is well; a gap, or what a clock was set by, is not time that was seen."""
        tolerance_db = self._config.drift.tolerance_db
        judged = [
            (state.drift, state.view) for state in states.values() if state.drift is not None and state.drift.judged
        ]
        well = judged and all(
            drift.state == "calm" and drift.serving_db <= tolerance_db and not view.trouble for drift, view in judged
        )
        passed_s = min(max(0.0, now_ts - self._seen_ts), _STEP_S)
        self._dwelt_s = self._dwelt_s + passed_s if well else 0.0
        self._seen_ts = now_ts
