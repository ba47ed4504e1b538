"""Does the predicted gain of a recalibration tell what a recalibration gains? Real video, real INT8 engines.

    python -m benchmarks.drift_ladder [--models fastestdet yolox_nano] [--frames 24] [--json | --markdown]

Needs ../shared/data (or $TARED_SHARED/data). Every clip gives three interleaved sets of frames: one calibrates; the
second, under a condition of the corruption ladder (benchmarks/corruption.py), is what the observer sees and what a
recalibration has; the third, under the same condition, is what both engines are compared on with FP32. *Stale* is the
engine of the first calibration, *fresh* that of the recalibration. A second run calibrates in the dark (severity 4) and
then lets the light come back. Where the drift monitor would switch to the engine of the other of the two calibrations,
that one is compared too. Engines are Q/DQ graphs on ONNX Runtime, one thread, thresholds by tared's default.

The real gain is the noise of the stale engine's raw outputs over that of the fresh one's, in dB. Detections would be no
measure where nothing is found, and in the dark nothing is. All outputs alike would be none either: nearly all are boxes
and classes of background, which nobody reads, and boxes would drown scores. So objectness counts everywhere, boxes and
classes in proportion to FP32's objectness, and each of the three relative to its own variation in FP32. What a user
would notice stands beside it: F1 against FP32 at the score threshold, over all frames of a condition.

The predicted gain is calibrate.noise's, less what the calibration leaves on the table on its own frames, as in
agent/monitoring/drift.py; here it may be negative. Its tensors are weighted by *sensitivity*: the noise that a tensor
makes in the
outputs when it alone is quantised, over its own noise to signal, on a few calibrating frames. Beside it stand two
weightings that need no inference, and PSI and the Jensen-Shannon distance (benchmarks/drift_signals.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.progress import Progress

from agent.vision.fidelity import MatchCounts
from benchmarks.drift_rungs import CLIPS, GAIN_DB, LAYOUT, RUNS, Floats, Rung, climb, loses_fidelity
from benchmarks.drift_signals import OURS, SIGNALS, Score, auc, bootstrapped, spearman
from benchmarks.report import Bar, Section, add_output_option, at_least, at_most, bars_section, publish


@dataclass(frozen=True)
class Judged:
    """One signal: its AUC for a real gain worth having, and its rank correlation with the real gain."""

    area: Score
    rank: Score


def judged(rungs: Sequence[Sequence[Rung]]) -> dict[str, Judged]:
    """By signal. Each element is a condition, on one clip or on several: it counts by its means."""
    real_db = _real_db(rungs)
    scores = {}
    for name in SIGNALS:
        signal = np.array([np.mean([rung.signals[name] for rung in each]) for each in rungs])
        area = bootstrapped(lambda s, g: auc(s, g >= GAIN_DB), signal, real_db)
        scores[name] = Judged(area, bootstrapped(spearman, signal, real_db))
    return scores


def _real_db(rungs: Sequence[Sequence[Rung]]) -> Floats:
    return np.array([np.mean([rung.real_db for rung in each]) for each in rungs])


def by_condition(rungs: Sequence[Rung]) -> list[list[Rung]]:
    """The same condition on all clips, in the order of the ladder."""
    found: dict[tuple[str, str, int], list[Rung]] = {}
    for rung in rungs:
        found.setdefault((rung.calibrated, rung.condition, rung.severity), []).append(rung)
    return list(found.values())


def compare(models: Mapping[str, Sequence[Rung]]) -> tuple[Section, list[Bar]]:
    """The signals beside each other, per model and over all; per condition, and per condition and clip."""
    conditions = {name: by_condition(rungs) for name, rungs in models.items()}
    conditions["all"] = [condition for each in conditions.values() for condition in each]
    conditions["all, each clip by itself"] = [[rung] for rungs in models.values() for rung in rungs]
    table = Section(
        "Does it tell what a recalibration gains?",
        ("conditions", "signal", f"AUC, gain of {GAIN_DB:g} dB", "Spearman", f"of {GAIN_DB:g} dB"),
        note="A condition is the mean over its clips. 95 % bootstrap intervals over conditions.",
    )
    for title, each in conditions.items():
        worth = f"{(_real_db(each) >= GAIN_DB).sum()} of {len(each)}"
        table.rows += [(title, name, str(its.area), str(its.rank), worth) for name, its in judged(each).items()]
    scores = judged(conditions["all"])
    ours, peers = scores[OURS], [scores["PSI"], scores["JS distance"]]
    area, rank = (f"{what} ahead of the better of PSI and JS" for what in ("AUC", "Spearman"))
    return table, [
        at_least("AUC of the predicted gain", 0.9, ours.area.value, ""),
        at_least("Spearman of predicted and real gain", 0.75, ours.rank.value, ""),
        at_least(area, 0.0, ours.area.value - max(peer.area.value for peer in peers), ""),
        at_least(rank, 0.0, ours.rank.value - max(peer.rank.value for peer in peers), ""),
    ]


def ladder_section(name: str, rungs: Sequence[Rung]) -> Section:
    """Per condition the mean over clips."""
    table = Section(name, ("calibrated", "condition", "predicted, dB", "real, dB", "PSI", "JS", "F1 stale", "F1 fresh"))
    for each in by_condition(rungs):
        signals = [np.mean([rung.signals[signal] for rung in each]) for signal in (OURS, "PSI", "JS distance")]
        real_db = np.mean([rung.real_db for rung in each])
        matches = (sum((getattr(rung, side).matches for rung in each), MatchCounts()) for side in ("stale", "fresh"))
        stale, fresh = (f"{each.f1:.2f}" for each in matches)
        figures = (f"{signals[0]:.1f}", f"{real_db:.1f}", f"{signals[1]:.2f}", f"{signals[2]:.2f}", stale, fresh)
        condition = f"{each[0].condition} {each[0].severity}" if each[0].severity else "clean"
        table.rows.append((each[0].calibrated, condition, *figures))
    return table


def promised(name: str, rungs: Sequence[Rung]) -> list[Bar]:
    """What a recalibration has to keep on one model."""
    lit = [rung.fresh.matches for rung in rungs if rung.calibrated != "clean" and not rung.severity]
    chance = 0.05 / len(rungs)  # Bonferroni's: 5 % for one of them to be found to lose where none does
    worse = sum(loses_fidelity(rung.stale, rung.fresh, 1.0 - chance) for rung in rungs)
    switched = [(rung.stale, rung.switched) for rung in rungs if rung.switched is not None]
    astray = sum(loses_fidelity(*pair, 1.0 - chance) for pair in switched)
    blurred = float(np.median([rung.signals[OURS] for rung in rungs if rung.condition == "blur"]))
    return [
        at_least(
            f"{name}: calibrated dark, then daylight: F1 of the recalibrated", 0.85, sum(lit, MatchCounts()).f1, ""
        ),
        at_most(f"{name}: conditions of {len(rungs)} where a recalibration lost fidelity", 0, worse, ""),
        at_most(f"{name}: switches of {len(switched)}, between clean and dark 4, that lost fidelity", 0, astray, ""),
        at_most(f"{name}: median predicted gain under blur", GAIN_DB, blurred, " dB"),
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="The predicted gain beside the real one, on real video.")
    parser.add_argument("--models", nargs="+", choices=LAYOUT, default=list(LAYOUT))
    parser.add_argument("--frames", type=int, default=24, help="of each of the three sets of a clip")
    add_output_option(parser)
    options = parser.parse_args()
    conditions = len(CLIPS) * sum(len(conditions) for _, conditions in RUNS)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("conditions", total=conditions * len(options.models))
        rungs = {name: climb(name, options.frames, lambda: progress.advance(task)) for name in options.models}
    table, bars = compare(rungs)
    bars += [bar for name, each in rungs.items() for bar in promised(name, each)]
    publish([*(ladder_section(*each) for each in rungs.items()), table, bars_section(bars)], options)


if __name__ == "__main__":
    main()
