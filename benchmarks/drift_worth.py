"""The worth of dB in fidelity, on the rungs of the ladder: the prior of the daemon's map, and the map judged.

Whatever judges a rung has not seen its scene: the prior is measured on the other scenes, of all models. A stricter run
leaves out the model, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.drift_rungs import Floats, Rung
from benchmarks.drift_signals import OURS
from calibrate.statistics.fidelity_gain import GainMap, Prior, Recalibrated, spread

_CHANCES = (0.005, 0.01, 0.02, 0.03, 0.05, 0.08)
Labelled = tuple[str, Rung]  # by its model


def recalibrated(rung: Rung) -> Recalibrated:
    """The rung as a board would have noted it."""
    return Recalibrated(rung.signals[OURS], 1.0 - rung.live.fidelity, rung.gained, int((~rung.live.empty).sum()))


def prior_of(rungs: Sequence[Rung]) -> Prior:
    """The map's prior, from what recalibrations gained on these rungs."""
    return fitted_prior([recalibrated(rung) for rung in rungs])


def fitted_prior(measured: Sequence[Recalibrated]) -> Prior:
    """The curve of least squared error."""
    found = np.array([each.recoverable for each in measured])
    gained = np.array([each.gained for each in measured])
    fits = []
    for chance in _CHANCES:
        shape = found**2 / (found + chance)
        slope = float(shape @ gained / (shape @ shape))
        fits.append((float(np.square(gained - slope * shape).sum()), slope, chance))
    _, slope, chance = min(fits)
    misses = np.abs(gained - slope * found**2 / (found + chance)) / spread(found)
    quantiles = np.quantile(misses, np.linspace(0.05, 0.95, 19))
    return Prior(round(slope, 3), chance, tuple(np.round(quantiles, 3).tolist()))


def expected_gains(models: Mapping[str, Sequence[Rung]], leave_model_out: bool) -> Mapping[str, Floats]:
    """The expected gain of each rung, by a prior that has seen neither its scene nor, where asked, its model."""
    labelled = [(name, rung) for name, rungs in models.items() for rung in rungs]
    found: dict[str, list[float]] = {name: [] for name in models}
    maps: dict[tuple[str, str], GainMap] = {}
    for name, rung in labelled:
        key = (name if leave_model_out else "", rung.scene)
        if key not in maps:
            maps[key] = GainMap(prior=prior_of([each for other, each in labelled if _unseen(other, each, *key)]))
        asked = recalibrated(rung)
        found[name].append(maps[key].gain(asked.gain_db, asked.loss, asked.frames).estimate)
    return {name: np.array(gains) for name, gains in found.items()}


def _unseen(model: str, rung: Rung, left_out: str, scene: str) -> bool:
    return model != left_out and rung.scene != scene
