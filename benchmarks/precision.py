"""Our precision plan beside the peers' INT8: task score, share of INT8, speed, and what it took to make it.

    python -m benchmarks.precision [--models yolox_nano ...] [--alone] [--rounds 60] [--json | --markdown]

Needs ../shared/data (or $TARED_SHARED/data). Every contender is given the same network and the same frames. Whatever
is scored was seen by nobody before, and two splits take turns:

    yolox_nano, fastestdet   half of the COCO images calibrates and plans, mAP on the other half
    resnet20                 the training images calibrate and plan, top-1 on 3000 test images; one split
    ultraface                one clip calibrates, a second plans, agreement with FP32 on a third

Contenders (benchmarks/workers/quantise.py has the peers' settings): FP32; tared with every layer INT8; tared with
`tared plan`; onnxruntime's quantize_static by its defaults, and as TensorRT takes it with MinMax and with Entropy;
modelopt.onnx. Each is made in processes of its own. All run on ONNX Runtime, Q/DQ as written, and so are scored by the
numbers that their graphs say.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from benchmarks.peers import PeerError
from benchmarks.precision_contest import SCORES, Contest, Result, splits
from benchmarks.precision_peers import CONTENDERS, FP32, PLANNED, Made
from benchmarks.report import Bar, Section, add_output_option, at_least, at_most, bars_section, publish

# The loss that `tared plan` may cost: its default where the frames can certify that, and more where they are few.
MAX_LOSS = {"yolox_nano": 0.2, "fastestdet": 0.2, "resnet20": 0.02, "ultraface": 0.1}
NAMES = {"map": "mAP", "top1": "top-1"}
NOTE = "Seconds of all processes that made it: wall (CPU). Times are multiples of FP32's, one thread, in turn."


@dataclass
class Comparison:
    """All results of a model by contender, one per split; or why somebody takes no part."""

    name: str
    results: dict[str, list[Result]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def mean(self, contender: str, value: Callable[[Result], float]) -> float:
        return mean(map(value, self.results[contender]))

    def differences(self, contender: str) -> list[float]:
        """Points of the task's score above FP32's, one per split; of the agreement where there are no labels."""
        pairs = zip(self.results[contender], self.results[FP32], strict=True)
        return [100.0 * (_score(found) - _score(reference)) for found, reference in pairs]


def _score(result: Result) -> float:
    return result.agreement if result.score is None else result.score


def compare(name: str, max_loss: float, rounds: int, contenders: Sequence[str] = tuple(CONTENDERS)) -> Comparison:
    """Every contender on every split, and FP32."""
    comparison = Comparison(name)
    with tempfile.TemporaryDirectory() as folder:
        for number, split in enumerate(splits(name, Path(folder))):
            (place := Path(folder, f"split-{number}")).mkdir()
            with closing(Contest(name, split, max_loss, place)) as contest:
                _hold(contest, contenders, comparison, rounds, f"{name}, split {number}")
    for contender in comparison.missing:
        comparison.results.pop(contender, None)
    return comparison


def _hold(contest: Contest, contenders: Sequence[str], comparison: Comparison, rounds: int, title: str) -> None:
    made: dict[str, Made] = {}
    for contender in (FP32, *contenders):
        if contender not in comparison.missing:
            print(f"{title}: {contender}", file=sys.stderr)
            try:
                made[contender] = contest.make(contender)
            except PeerError as error:
                comparison.missing[contender] = str(error)
    print(f"{title}: scores and times", file=sys.stderr)
    for contender, result in contest.judge(made, rounds).items():
        comparison.results.setdefault(contender, []).append(result)


def section(comparison: Comparison) -> Section:
    key = SCORES.get(comparison.name)
    labelled = (NAMES[key], "points above FP32", "each split") if key else ()
    figures = ("agreement with FP32", "MACs in INT8", "Q in the decoding", "time", "ORT's own treatment", "made in")
    columns = ("contender", *labelled, *figures)
    table = Section(comparison.name, columns, note=NOTE + _promised(comparison))
    for name, results in comparison.results.items():
        differences = comparison.differences(name)
        scores = (
            f"{100.0 * comparison.mean(name, _score):.2f}",
            f"{mean(differences):+.2f}",
            ", ".join(f"{each:+.2f}" for each in differences),
        )
        table.rows.append(
            (
                name,
                *(scores if key else ()),
                f"{comparison.mean(name, lambda result: result.agreement):.3f}",
                f"{comparison.mean(name, lambda result: result.int8.macs_share):.1%}",
                ", ".join(str(result.int8.decode_quantisers) for result in results),
                f"{comparison.mean(name, lambda result: result.times[0]):.2f}x",
                f"{comparison.mean(name, lambda result: result.times[1]):.2f}x",
                _seconds(comparison, name),
            )
        )
    table.rows += [(name, reason, *[""] * (len(columns) - 2)) for name, reason in comparison.missing.items()]
    return table


def _seconds(comparison: Comparison, name: str) -> str:
    if name == FP32:
        return ""
    wall_s = comparison.mean(name, lambda result: result.made.wall_s)
    return f"{wall_s:.1f} s ({comparison.mean(name, lambda result: result.made.cpu_s):.1f} s)"


def _promised(comparison: Comparison) -> str:
    """What the plans' certificates say."""
    told = [
        f"loss at most {plan['measured_loss_upper']:.3g}, {result.made.floats} layers float"
        if plan["certified"]
        else "nothing certified, all float"
        for result in comparison.results.get(PLANNED, ())
        if (plan := result.made.plan) is not None
    ]
    return f" The plans: {'; '.join(told)}." if told else ""


def bars(comparison: Comparison) -> list[Bar]:
    """What was asked of our plan."""
    name = comparison.name
    if PLANNED not in comparison.results:
        return []
    lost = -mean(comparison.differences(PLANNED))
    share = 100.0 * comparison.mean(PLANNED, lambda result: result.int8.macs_share)
    if name == "yolox_nano":
        return [
            at_most(f"{name}: mAP lost", 1.0, lost, " points"),
            at_least(f"{name}: MACs in INT8", 85.0, share, " %"),
        ]
    if name == "fastestdet":
        return [at_most(f"{name}: mAP lost", 0.5, lost, " points")]
    if name == "resnet20":
        floats = max(result.made.floats for result in comparison.results[PLANNED])
        return [
            at_most(f"{name}: top-1 lost", 0.4, lost, " points"),
            at_most(f"{name}: layers left float", 0.0, float(floats), ""),
        ]
    quantisers = max(result.int8.decode_quantisers for result in comparison.results[PLANNED])
    agreement = comparison.mean(PLANNED, lambda result: result.agreement)
    return [
        at_least(f"{name}: F1 against FP32", 0.98, agreement, ""),
        at_most(f"{name}: QuantizeLinear in the decoding", 0.0, float(quantisers), ""),
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Our precision plan beside the peers' INT8.")
    parser.add_argument("--models", nargs="+", choices=MAX_LOSS, default=list(MAX_LOSS))
    parser.add_argument("--max-loss", type=float, help="for all models; by default each has its own")
    parser.add_argument("--rounds", type=int, default=60, help="inferences of each contender that are timed")
    add_output_option(parser)
    parser.add_argument("--alone", action="store_true", help="our plan and FP32 only")
    options = parser.parse_args()
    contenders = [PLANNED] if options.alone else list(CONTENDERS)
    found = [compare(name, options.max_loss or MAX_LOSS[name], options.rounds, contenders) for name in options.models]
    publish([*map(section, found), bars_section([bar for each in found for bar in bars(each)])], options)


if __name__ == "__main__":
    main()
