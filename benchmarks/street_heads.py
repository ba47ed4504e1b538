"""The sample's heads, a small network for each task: what INT8 costs them on labels, and the engine of a first job.

    python -m benchmarks.street_heads [--tasks segment ...] [--parts plan first drift] [--json | --markdown]

    plan   calibrate, plan at --max-loss 0.05 by multiply-accumulates, and build, on pictures of all hours; then score
           float, plain INT8 and the plan on 200 labelled pictures of other traffic
    first  a daemon on the sample's night, until its first job has ended; its engine is scored beside float on 200
           labelled pictures of the night and of other traffic
    drift  the sample from night to morning, as `make run` plays it but slower: alarm, job, swap, fidelity before and
           after; both engines scored beside float on 200 labelled pictures of the morning

The runtime is what tared takes by itself. The sample's camera hangs straight, that of the pictures for obb askew.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.daemon_first import FirstJob, first_job
from benchmarks.daemon_process import FollowedDaemon
from benchmarks.peers import ROOT
from benchmarks.report import Bar, Section, add_output_option, at_least, at_most, bars_section, publish
from examples.street.labelled import SEED, TASKS, write_labelled
from examples.street.render import VIDEO_NAME, hour_at, render_video

STREET = ROOT / "examples/street"
VIDEO = ROOT / "var/sample" / VIDEO_NAME  # that of `make run`
MAX_LOSS, LEAST_MACS, MOST_POINTS = 0.05, 0.85, 2.0
SCORES = {"segment": "miou", "depth": "delta1"}  # in the answer of `tared evaluate`; of the others it is map
DRIFTING = ("segment", "pose")
_CALIBRATION, _PLANNING = 70_000, 80_000  # seeds of the traffic
_CALIBRATED, _PLANNED, _SCORED = 96, 600, 200  # pictures; a loss near the bound takes hundreds to certify
_NIGHT, _MORNING = (((hour_at(begin), hour_at(end), 1.0),) for begin, end in ((0.0, 99.0), (150.0, 280.0)))
# On a machine with other work, jobs have to end before the night and the video do.
_SPEED, _RECALIBRATION = 1, {"nice": 0}
_RUN_LIMIT_S = 900.0

Row = list[Any]
Part = Callable[[str, Path], tuple[Row, list[Bar]]]


def planned(task: str, folder: Path) -> tuple[Row, list[Bar]]:
    """Return the row of one head, and its bars."""
    seeds = {"calibrate": _CALIBRATION, "plan": _PLANNING, "evaluate": SEED}
    counts = {"calibrate": _CALIBRATED, "plan": _PLANNED, "evaluate": _SCORED}
    sets = {name: write_labelled(folder / name, task, counts[name], seed) for name, seed in seeds.items()}
    model, calibration, plan = _model(task), folder / "calibration.json", folder / "plan.json"
    frames, others = (str(sets[name] / "images") for name in ("calibrate", "plan"))
    _tared("calibrate", model, "--frames", frames, "--count", str(_CALIBRATED), "-o", str(calibration))
    made = _tared(
        *("plan", model, "--calibration", str(calibration), "--frames", others),
        *("--max-loss", str(MAX_LOSS), "--costs", "macs", "-o", str(plan)),
    )
    _tared("build", model, "--calibration", str(calibration), "--precision", "int8", "-o", str(folder / "int8"))
    built = _tared(
        "build", model, "--calibration", str(calibration), "--plan", str(plan), "-o", str(folder / "planned")
    )
    in_float, plain, of_plan = (
        _score(task, sets["evaluate"], target) for target in (model, folder / "int8", folder / "planned")
    )
    share, name = built["int8_macs_share"], SCORES.get(task, "map")
    scores = (f"{score:.4f}" for score in (in_float, plain, of_plan))
    row = [task, name, *scores, f"{made['measured_loss']:.3f}", f"{share:.3f}", made["builds"]]
    return row, _bars(f"{task}, plan", name, (in_float, of_plan), share)


def first(task: str, folder: Path) -> tuple[Row, list[Bar]]:
    """Return the row of one head's first job, and its bars."""
    labelled = write_labelled(folder / "night", task, _SCORED, SEED, _NIGHT)
    job: FirstJob = first_job(_config(task, folder), folder)
    name, engine = SCORES.get(task, "map"), folder / "state" / "current"
    if not engine.exists():
        return [task, job.outcome, *[""] * 5], [at_least(f"{task}, first job: engines", 1, 0, "")]
    in_float, of_job = (_score(task, labelled, target) for target in (_model(task), engine))
    row = [task, job.outcome, name, f"{in_float:.4f}", f"{of_job:.4f}", f"{job.loss:.3f}", f"{job.int8_macs_share:.3f}"]
    return row, _bars(f"{task}, first job", name, (in_float, of_job), job.int8_macs_share)


def drift(task: str, folder: Path) -> tuple[Row, list[Bar]]:
    """Return the row of one head's night and morning, and its bars."""
    with FollowedDaemon(_config(task, folder), folder) as daemon:
        daemon.process.wait(_RUN_LIMIT_S)
    summary = daemon.summary
    alarms, swaps = summary.get("alarms", []), summary.get("swaps", [])
    after = [swap for swap in swaps if swap["trigger"] == "alarm"]
    bars = [
        at_least(f"{task}, drift: alarms", 1, len(alarms), ""),
        at_least(f"{task}, drift: swaps", 1, len(after), ""),
    ]
    if not (alarms and after):
        return [task, *[""] * 8], bars
    alarm, swap = alarms[0], after[0]
    labelled = write_labelled(folder / "morning", task, _SCORED, SEED, _MORNING)
    artefacts = (folder / "state" / "artefacts" / each["artefact"] for each in (swaps[0], swap))
    in_float, of_night, of_morning = (_score(task, labelled, target) for target in (_model(task), *artefacts))
    figures = [alarm["onset_ts"], alarm["ts"], swap["ts"]]
    shares = [swap["fidelity_before"], swap["fidelity"], in_float, of_night, of_morning]
    bars.append(at_least(f"{task}, drift: fidelity after the swap", 1.0 - MAX_LOSS, swap["fidelity"], ""))
    lost = 100.0 * (in_float - of_morning)
    bars.append(at_most(f"{task}, drift: points of {SCORES.get(task, 'map')} lost after it", MOST_POINTS, lost, ""))
    return [task, *(f"{each:.1f}" for each in figures), *(f"{each:.3f}" for each in shares)], bars


PARTS: Mapping[str, tuple[Part, str, tuple[str, ...]]] = {
    "plan": (
        planned,
        f"Heads of the sample: plans at --max-loss {MAX_LOSS}",
        ("task", "score", "float", "plain INT8", "plan", "loss of the plan", "MACs in INT8", "builds"),
    ),
    "first": (
        first,
        "Heads of the sample: the first job of a daemon, at night",
        ("task", "outcome", "score", "float", "INT8", "loss", "MACs in INT8"),
    ),
    "drift": (
        drift,
        "Heads of the sample from night to morning: s of the video, fidelity, score in the morning",
        ("task", "onset", "alarm", "swap", "before the swap", "after", "score in float", "before", "after"),
    ),
}


def _bars(what: str, name: str, scores: tuple[float, float], share: float) -> list[Bar]:
    lost = 100.0 * (scores[0] - scores[1])
    return [
        at_most(f"{what}: points of {name} lost", MOST_POINTS, lost, ""),
        at_least(f"{what}: MACs in INT8", LEAST_MACS, share, ""),
    ]


def _score(task: str, labelled: Path, target: str | Path) -> float:
    """Return the task's own score of a spec's float model, or of an engine."""
    return float(_tared("evaluate", str(target), "--dataset", str(labelled))[SCORES.get(task, "map")])


def _config(task: str, folder: Path) -> dict[str, Any]:
    """Return the sample's configuration with this head. Its labels are boxes, so it goes without."""
    config: dict[str, Any] = yaml.safe_load((STREET / "config.yaml").read_text())
    camera = {**config["camera"], "source": str(VIDEO), "speed": _SPEED}
    del camera["labels"]
    own = {"model": _model(task), "state_dir": str(folder / "state"), "camera": camera}
    return {**config, **own, "recalibration": _RECALIBRATION}


def _model(task: str) -> str:
    return str(STREET / f"street-{task}.yaml")


def _tared(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "fleet.cli", *words, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(words)}: {done.stderr.strip()}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What INT8 costs the sample's heads.")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add_output_option(parser)
    options = parser.parse_args()
    sections, bars = list[Section](), list[Bar]()
    with tempfile.TemporaryDirectory() as kept:
        if set(options.parts) - {"plan"} and not VIDEO.exists():
            render_video(VIDEO)
        for part in options.parts:
            measure, title, columns = PARTS[part]
            section = Section(title, columns)
            for task in options.tasks if part != "drift" else [each for each in options.tasks if each in DRIFTING]:
                print(f"{part}: {task}", file=sys.stderr)
                folder = Path(kept) / f"{part}-{task}"
                folder.mkdir()
                row, found = measure(task, folder)
                section.rows.append([str(each) for each in row])
                bars += found
            sections.append(section)
    publish([*sections, bars_section(bars)], options)


if __name__ == "__main__":
    main()
