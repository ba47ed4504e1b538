"""Does the predicted gain of a recalibration tell what a recalibration gains? Real video, real INT8 engines.

    python -m benchmarks.drift_ladder [--models fastestdet ...] [--frames 24] [--rungs FILE] [--json | --markdown]

Needs ../shared/data (or $TARED_SHARED/data), and hours for all four models; --rungs keeps what was measured, and uses
it again. Every clip gives three interleaved sets of frames: one calibrates; the second, under a condition of the
corruption ladder (benchmarks/corruption.py), is what the observer sees and what a recalibration has; the third, under
the same condition, is what both engines are compared on with FP32. *Stale* is the engine of the first calibration,
*fresh* that of the recalibration. A second run calibrates in the dark (severity 4) and then lets the light come back.
Where the drift monitor would switch to the engine of the other of the two calibrations, that one is compared too.
Engines are Q/DQ graphs on ONNX Runtime, one thread, thresholds by tared's default.

The real gain in fidelity is that of fresh over stale, on the frames on which one of them or FP32 found anything. What a
board expects of it (`expected gain`) comes of the predicted dB and of the stale engine's fidelity on the observed
frames, by a prior (benchmarks/drift_worth.py) that has not seen the scene; a second row has not seen the model either.
Beside them stands the gain that half of the compared frames show, for the other half: what more than chance can tell.

The real gain in noise is that of the stale engine's raw outputs over that of the fresh one's, in dB. Detections would
be no measure where nothing is found, and in the dark nothing is. All outputs alike would be none either: nearly all are
boxes and classes of background, which nobody reads, and boxes would drown scores. So objectness counts everywhere,
boxes and classes in proportion to FP32's objectness, and each of the three relative to its own variation in FP32. Of a
classifier the logits count. What a user would notice stands beside it: F1 against FP32 at the score threshold, over all
frames of a condition, or the share of equal top-1.

The predicted gain is calibrate.noise's, less what the calibration leaves on the table on its own frames, as in
agent/monitoring/drift.py; here it may be negative. Half of the weight of its tensors goes by *sensitivity*: the noise
that a tensor makes in the outputs when it alone is quantised, over its own noise to signal, on a few calibrating
frames. Beside it stand two weightings that need no inference, and PSI and the Jensen-Shannon distance
(benchmarks/drift_signals.py).
"""

from __future__ import annotations

import argparse
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import methodcaller
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from agent.config import DriftConfig
from agent.vision.answer import MatchCounts
from benchmarks.drift_rungs import CLIPS, GAIN_DB, LAYOUT, RUNS, Answers, Floats, Rung, climb, loses_fidelity
from benchmarks.drift_signals import OURS, SIGNALS, Score, auc, bootstrapped, spearman
from benchmarks.drift_worth import expected_gains, prior_of
from benchmarks.report import Bar, Section, add_output_option, at_least, at_most, bars_section, publish

EXPECTED, STRICT, HALF = "expected gain", "expected gain, model left out", "half of the compared frames"
OTHERS = ("PSI", "JS distance")
GAIN = 0.05  # gain in fidelity that is worth a recalibration; a clip of 72 frames can hardly show less than this


@dataclass(frozen=True)
class Target:
    """The event that a signal has to recognise. worth: From when on a condition is worth a recalibration."""

    title: str
    unit: str
    worth: float
    real: Callable[[Rung], float]
    signals: tuple[str, ...]


NOISE = Target("noise", " dB", GAIN_DB, lambda rung: rung.real_db, SIGNALS)
FIDELITY = Target("fidelity", " of fidelity", GAIN, lambda rung: rung.gained, (EXPECTED, STRICT, OURS, *OTHERS))


@dataclass(frozen=True)
class Judged:
    """One signal: its AUC for a real gain worth having, and its rank correlation with the real gain."""

    area: Score
    rank: Score


def judged(rungs: Sequence[Sequence[Rung]], target: Target) -> dict[str, Judged]:
    """By signal. Each element is a condition, on one clip or on several: it counts by its means."""
    real = _means(rungs, target.real)
    signals = {name: _means(rungs, _signal(name)) for name in target.signals}
    pairs = {name: (signal, real) for name, signal in signals.items()}
    if target is FIDELITY:
        first, second = (_means(rungs, methodcaller("gained_on_half", half)) for half in (0, 1))
        pairs[HALF] = (first, second)
    scores = {}
    for name, pair in pairs.items():
        area = bootstrapped(lambda s, g: auc(s, g >= target.worth), *pair)
        scores[name] = Judged(area, bootstrapped(spearman, *pair))
    return scores


def _signal(name: str) -> Callable[[Rung], float]:
    return lambda rung: rung.signals[name]


def _means(rungs: Sequence[Sequence[Rung]], figure: Callable[[Rung], float]) -> Floats:
    return np.array([np.mean([figure(rung) for rung in each]) for each in rungs])


def by_condition(rungs: Sequence[Rung]) -> list[list[Rung]]:
    """The same condition on all clips, in the order of the ladder."""
    found: dict[tuple[str, str, int], list[Rung]] = {}
    for rung in rungs:
        found.setdefault((rung.calibrated, rung.condition, rung.severity), []).append(rung)
    return list(found.values())


def compare(models: Mapping[str, Sequence[Rung]], target: Target) -> tuple[Section, list[Bar]]:
    """The signals beside each other, per model and over all; per condition, and per condition and clip."""
    conditions = {name: by_condition(rungs) for name, rungs in models.items()}
    conditions["all"] = [condition for each in conditions.values() for condition in each]
    conditions[_BY_CLIP] = [[rung] for rungs in models.values() for rung in rungs]
    table = Section(
        f"Does it tell what a recalibration gains in {target.title}?",
        ("conditions", "signal", f"AUC, gain of {target.worth:g}{target.unit}", "Spearman", "worth it"),
        note="A condition is the mean over its clips. 95 % bootstrap intervals over conditions.",
    )
    bars = []
    ours = target.signals[0]
    for title, each in conditions.items():
        worth = f"{(_means(each, target.real) >= target.worth).sum()} of {len(each)}"
        scores = judged(each, target)
        table.rows += [(title, name, str(its.area), str(its.rank), worth) for name, its in scores.items()]
        asked, who = 0.92 if title == _BY_CLIP else 0.9, f"{target.title}, {title}"
        bars.append(at_least(f"{who}: AUC of the {ours}", asked, scores[ours].area.value, ""))
        ahead = scores[ours].area.value - max(scores[name].area.value for name in OTHERS)
        bars.append(at_least(f"{who}: AUC ahead of the better of PSI and JS", 0.0, ahead, ""))
        if title == "all":
            bars.append(at_least(f"{who}: Spearman", 0.75, scores[ours].rank.value, ""))
            ahead = scores[ours].rank.value - max(scores[name].rank.value for name in OTHERS)
            bars.append(at_least(f"{who}: Spearman ahead of the better of PSI and JS", 0.0, ahead, ""))
    return table, bars


_BY_CLIP = "all, each clip by itself"


def alarms_section(models: Mapping[str, Sequence[Rung]], least: float) -> Section:
    """Compare an alarm that asks for an expected gain with one for dB alone."""
    title = f"Conditions with more than {GAIN_DB:g} dB predicted and eight frames with something on them"
    rows = ("model", "alarms by dB", "in vain", f"asking for {least:g}", "in vain", f"lost, of those worth {GAIN:g}")
    table = Section(title, rows, note="In vain: less than 0.02 of fidelity is gained.")
    for name, rungs in models.items():
        risen = [rung for rung in rungs if rung.signals[OURS] > GAIN_DB and (~rung.live.empty).sum() >= _ENOUGH]
        kept = [rung for rung in risen if rung.signals[EXPECTED] >= least]
        vain, still = (sum(rung.gained < _VAIN for rung in each) for each in (risen, kept))
        worth, found = (sum(rung.gained >= GAIN for rung in each) for each in (risen, kept))
        counts = (len(risen), vain, len(kept), still)
        table.rows.append((name, *map(str, counts), f"{worth - found} of {worth}"))
    return table


_ENOUGH, _VAIN = 8, 0.02


def ladder_section(name: str, rungs: Sequence[Rung]) -> Section:
    """Per condition the mean over clips."""
    table = Section(name, ("calibrated", "condition", "predicted, dB", "real, dB", "PSI", "JS", "F1 stale", "F1 fresh"))
    for each in by_condition(rungs):
        signals = [np.mean([rung.signals[signal] for rung in each]) for signal in (OURS, "PSI", "JS distance")]
        real_db = np.mean([rung.real_db for rung in each])
        stale, fresh = (_faithful([getattr(rung, side) for rung in each]) for side in ("stale", "fresh"))
        figures = (f"{signals[0]:.1f}", f"{real_db:.1f}", f"{signals[1]:.2f}", f"{signals[2]:.2f}", stale, fresh)
        condition = f"{each[0].condition} {each[0].severity}" if each[0].severity else "clean"
        table.rows.append((each[0].calibrated, condition, *figures))
    return table


def _faithful(answers: Sequence[Answers]) -> str:
    """F1 of a detector over all frames, or the share of equal top-1 of a classifier."""
    matches = sum((each.matches for each in answers), MatchCounts())
    return f"{matches.f1 if matches != MatchCounts() else np.mean([each.fidelity for each in answers]):.2f}"


def promised(name: str, rungs: Sequence[Rung]) -> list[Bar]:
    """What a recalibration has to keep on one model."""
    lit = [rung.fresh for rung in rungs if rung.calibrated != "clean" and not rung.severity]
    chance = 0.05 / len(rungs)  # Bonferroni's: 5 % for one of them to be found to lose where none does
    worse = sum(loses_fidelity(rung.stale, rung.fresh, 1.0 - chance) for rung in rungs)
    switched = [(rung.stale, rung.switched) for rung in rungs if rung.switched is not None]
    astray = sum(loses_fidelity(*pair, 1.0 - chance) for pair in switched)
    blurred = float(np.median([rung.signals[OURS] for rung in rungs if rung.condition == "blur"]))
    return [
        at_least(f"{name}: calibrated dark, then daylight: F1 of the recalibrated", 0.85, float(_faithful(lit)), ""),
        at_most(f"{name}: conditions of {len(rungs)} where a recalibration lost fidelity", 0, worse, ""),
        at_most(f"{name}: switches of {len(switched)}, between clean and dark 4, that lost fidelity", 0, astray, ""),
        at_most(f"{name}: median predicted gain under blur", GAIN_DB, blurred, " dB"),
    ]


def measure(models: Sequence[str], frames: int) -> dict[str, list[Rung]]:
    """The rungs of each model."""
    total = sum(len(CLIPS[name]) for name in models) * sum(len(conditions) for _, conditions in RUNS)
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("conditions", total=total)
        return {name: climb(name, frames, lambda: progress.advance(task)) for name in models}


def with_expected(models: Mapping[str, Sequence[Rung]]) -> dict[str, list[Rung]]:
    """The rungs with what a board would expect of a recalibration among their signals."""
    loose, strict = (expected_gains(models, leave_model_out) for leave_model_out in (False, True))
    return {
        name: [
            replace(rung, signals={**rung.signals, EXPECTED: one, STRICT: other})
            for rung, one, other in zip(rungs, loose[name].tolist(), strict[name].tolist(), strict=True)
        ]
        for name, rungs in models.items()
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="The predicted gain beside the real one, on real video.")
    parser.add_argument("--models", nargs="+", choices=LAYOUT, default=list(LAYOUT))
    parser.add_argument("--frames", type=int, default=24, help="that calibrate, of each clip")
    parser.add_argument("--rungs", type=Path, help="file of what was measured: read where it is there, or else written")
    add_output_option(parser)
    options = parser.parse_args()
    if options.rungs is not None and options.rungs.exists():
        known = pickle.loads(options.rungs.read_bytes())  # the reader's own file
        rungs = {name: known[name] for name in options.models}
    else:
        rungs = measure(options.models, options.frames)
        if options.rungs is not None:
            options.rungs.write_bytes(pickle.dumps(rungs))
    if len(rungs) < 2:
        sys.exit(
            "the expected gain needs a second model: its prior comes from the others; --rungs keeps what was measured"
        )
    print(f"prior of all of it: {prior_of([rung for each in rungs.values() for rung in each])}", file=sys.stderr)
    rungs = with_expected(rungs)
    tables, bars = zip(*(compare(rungs, target) for target in (FIDELITY, NOISE)), strict=True)
    promises = [bar for name, each in rungs.items() for bar in promised(name, each)]
    sections = [
        *(ladder_section(*each) for each in rungs.items()),
        *tables,
        alarms_section(rungs, DriftConfig().min_gain),
    ]
    publish([*sections, bars_section([*bars[0], *bars[1], *promises])], options)


if __name__ == "__main__":
    main()
