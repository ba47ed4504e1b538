"""Decide whether a candidate engine may serve.

`decide` turns a `Comparison` of candidate, engine in service and reference into a `Verdict`. It applies six tests:
outputs, rows, confusion, latency, gain and fidelity. `Judge` is what a job's child calls for each engine that it
builds: it compares, decides, and records a refusal.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from agent.common.errors import AgentError
from agent.models.model import Model
from agent.validation.comparison import Comparison, Deadline, Difference, HeldOut, compare
from agent.validation.confusion import least_iou
from calibrate.statistics.confusion import confused_pairs
from calibrate.statistics.evidence import gain_bounds, shows_loss
from engines.interface import Backend, Engine, Progress
from engines.store.artefact import fingerprint, read_artefact
from engines.store.retention import record_refusal
from engines.store.signing import find_key

log = logging.getLogger(__package__)

MIN_INFORMATIVE = 4  # held-out frames with something on them, without which nothing speaks for a candidate
NO_WORSE = 0.01  # fidelity by which a candidate may be below the engine in service, by chance
# Gain in fidelity for raised precision: a few frames easy for both do not speak for layers left float.
RAISED_GAIN = 0.01
# Times the latency of the engine in service, for a candidate with more layers float: its fidelity is the point. INT8
# has twice the peak rate of FP16, so that layers left float make no engine slower than this.
MORE_FLOAT_SLOWDOWN = 2.0

_MAX_CONFUSION = 0.1  # share of the frames with a class, as in `tared plan`; a larger configured max_loss raises it
_CONFUSION_ERROR = 0.05  # probability that a pair, or a class, is named by chance
_TAIL_FROM = 100  # inferences: of fewer the 99th percentile is the slowest one, which depends on the machine's load
_TAIL_CHANCE = 0.001  # probability that so many more slow inferences are the candidate's, if neither engine is slower
_MOST_CLASSES = 100  # that a verdict lists
# So much slower than float may INT8 be, and counts as fast: of float's time, and where that is next to nothing.
_LEAST_LOSS, _LEAST_LOSS_MS = 0.02, 0.05
_NOTICED_MS = 0.25  # a difference that no frame at 1000 Hz would notice does not count
_EXPECTED = {
    "outputs": "finite outputs of the reference's names, types and shapes",
    "rows": "the same answer for equal frames of a batch",
    "confusion": "no classes confused or lost that the engine in service keeps",
    "latency": "a latency within recalibration.max_slowdown",
    "gain": "an engine no slower than float",
    "fidelity": f"at least {MIN_INFORMATIVE} frames with something on them, and a loss within recalibration.max_loss "
    "or clearly below that of the engine in service",
}
_SERVES_ON = "the engine in service keeps serving; a model that plain INT8 does not suit needs layers kept float"
_FLOAT_IS_FASTER = "let float serve, which is faster here; backend onnxruntime serves slower INT8, which saves memory"


@dataclass(frozen=True)
class VerdictLimits:
    """The limits within which a candidate must stay.

    Args:
        max_loss: Largest 1 - mean fidelity at which a candidate is good, whatever serves now.
        max_slowdown: Largest latency, as a multiple of that of the engine in service.
        least_gain: Least gain in mean fidelity over the engine in service, on the same frames.
        must_gain: A candidate that is slower than float is of no use, unless its answers are clearly better than those
            of the INT8 engine in service.
    """

    max_loss: float
    max_slowdown: float
    least_gain: float = -NO_WORSE
    must_gain: bool = False


@dataclass(frozen=True)
class Verdict:
    """The result of comparing a candidate with the engine in service and the reference on the held-out frames.

    Args:
        reason: Why it was accepted or refused, in words.
        frames: Held-out frames.
        empty_frames: Those of them on which nobody detected anything. Engines agree there without proving anything.
        fidelity: Mean over the other frames, in [0, 1].
        gain_low, gain_high: Bounds with 95 % confidence of the gain in fidelity over the engine in service.
        latency_ms, latency_serving_ms, latency_reference_ms: Medians, measured in turn in one process.
        latency_p99_ms, latency_serving_p99_ms: 99th percentiles; None where inferences were too few.
        latency_float_ms: Median of the float engine; None where it was not timed.
        classes: By name, on how many of the frames with a class every object of it was answered as the reference does,
            and how many there were.
        ious: The IoU of each class of pixels with the reference, by name, of all frames together.
        failed: The tests that it did not pass, of _EXPECTED.
        confused: The pairs of classes that it newly confuses.
    """

    accepted: bool
    reason: str
    frames: int
    empty_frames: int
    fidelity: float
    fidelity_serving: float | None
    gain_low: float
    gain_high: float
    latency_ms: float
    latency_serving_ms: float | None
    latency_reference_ms: float
    latency_p99_ms: float | None = None
    latency_serving_p99_ms: float | None = None
    failed: tuple[str, ...] = ()
    confused: tuple[str, ...] = ()
    latency_float_ms: float | None = None
    classes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    ious: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict in JSON's types."""
        classes = {name: list(counts) for name, counts in self.classes.items()}
        lists = {"failed": list(self.failed), "confused": list(self.confused), "classes": classes}
        document = {**asdict(self), **lists}
        return document if self.ious else {key: value for key, value in document.items() if key != "ious"}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Verdict:
        """Read the result of `as_dict`."""
        pairs = {name: tuple(document[name]) for name in ("failed", "confused")}
        classes = {name: (kept, total) for name, (kept, total) in document.get("classes", {}).items()}
        return cls(**{**document, **pairs, "classes": classes})


@dataclass
class Judge:
    """Judges the engines that one job builds of `model`; `verdict` is that on the last engine.

    `differing` are the frames on which that engine and the reference differ most.

    Args:
        serving: Directory of the artefact in service; None while the float engine serves.
        load_float: Returns the float engine, than which the candidate may not be slower; None where that is not asked.
        evidence: Goes into the file of a refusal, with the verdict.
        inputs: The fingerprinted inputs of the artefact whose engine is judged next.
        on_hang: Called in another thread when an inference does not come back; it has to end the process.
    """

    model: Model
    backend: Backend
    serving: str | None
    held_out: HeldOut
    limits: VerdictLimits
    state_dir: Path
    evidence: Mapping[str, Any]
    on_hang: Callable[[AgentError], None]
    progress: Progress
    load_float: Callable[[], Engine] | None = None
    verdict: Verdict | None = field(default=None, init=False)
    differing: Sequence[Difference] = field(default=(), init=False)
    inputs: Mapping[str, Any] = field(default_factory=dict, init=False)

    def __call__(self, engine: Engine) -> Mapping[str, Any]:
        """Return what the manifest of an accepted engine says. Raises `recalibration.refused`, and as `compare`."""
        self.progress(0.0, "comparing")
        with closing(Deadline(self._on_missed_deadline)) as deadline:
            comparison = compare(
                self.model,
                self.backend,
                engine,
                self.serving,
                self.held_out,
                deadline,
                self.progress,
                self.load_float,
            )
        self.differing = comparison.differing
        self.verdict = verdict = decide(comparison, self._limits(), self.model.spec.label)
        if not verdict.accepted:
            self._record_refusal({"verdict": verdict.as_dict()})
            raise AgentError(
                "recalibration.refused",
                verdict.reason,
                ", ".join(_EXPECTED[test] for test in verdict.failed),
                _FLOAT_IS_FASTER if self.is_refused_for_gain else _SERVES_ON,
            )
        return {"verdict": verdict.as_dict()}

    @property
    def is_refused_for_precision(self) -> bool:
        """True if one with other layers in INT8 may do: the last one was refused only for its answers or its gain."""
        return self.verdict is not None and {"confusion", "fidelity", "gain"}.issuperset(self.verdict.failed)

    @property
    def is_refused_for_gain(self) -> bool:
        """True if the last engine was refused for being slower than float alone."""
        return self.verdict is not None and self.verdict.failed == ("gain",)

    def noting_inputs(self, place: Callable[[Mapping[str, Any]], Path]) -> Callable[[Mapping[str, Any]], Path]:
        """Return `place`, which notes the inputs of the artefact whose engine is judged next."""

        def noting(inputs: Mapping[str, Any]) -> Path:
            self.inputs = inputs
            return place(inputs)

        return noting

    def _limits(self) -> VerdictLimits:
        """Return the limits; a candidate has more time if it has layers float that are INT8 in service."""
        if self.serving is None:
            return self.limits
        serves = read_artefact(Path(self.serving), find_key()).manifest["inputs"].get("plan", {}).get("floats", ())
        more = self.model.plan.floats.keys() - set(serves)
        slowdown = self.limits.max_slowdown
        return replace(self.limits, max_slowdown=max(slowdown, MORE_FLOAT_SLOWDOWN) if more else slowdown)

    def _on_missed_deadline(self, limit_s: float) -> None:
        error = AgentError(
            "recalibration.deadline",
            f"an inference of the candidate that had not come back after {limit_s:.3g} s",
            "an answer",
            "the engine in service keeps serving; report the model and the versions of `tared doctor`",
        )
        self._record_refusal({"error": {"code": error.code, "found": error.found}})
        self.on_hang(error)

    def _record_refusal(self, reason: Mapping[str, Any]) -> None:
        """Keep the evidence of a refusal. A disk that refuses to is only logged, so that it hides no refusal."""
        try:
            evidence = {**self.evidence, "inputs": self.inputs, **reason}
            record_refusal(self.state_dir, fingerprint(self.inputs), evidence)
        except OSError as error:
            log.warning("refusal=not_kept error=%r", error.strerror)


def decide(comparison: Comparison, limits: VerdictLimits, label: Callable[[int], str] = str) -> Verdict:
    """Accept a candidate that is sound, confuses and loses no classes newly, is not too slow, and is faithful.

    Without an engine in service it must keep max_loss. With one, it must either be better with 95 % confidence, or have
    the least gain and keep max_loss, without a loss that is more than chance. Where that is asked it must be no slower
    than float, unless it is better: an engine whose answers are worse is not good for being fast. Frames on which
    neither an engine nor the reference found anything are counted apart; MIN_INFORMATIVE others are required.

    Args:
        label: Returns the name of a class.
    """
    scores = comparison.fidelities
    informative, engines = scores.shape
    means = scores.mean(axis=0).tolist() if informative else [0.0] * engines
    gains = scores[:, 0] - scores[:, 1] if engines > 1 else np.zeros(0)
    low, high = gain_bounds(gains) if engines > 1 else (0.0, 0.0)
    frames = f"on {informative} held-out frames, {comparison.frames - informative} others empty"
    keeps = informative >= MIN_INFORMATIVE and 1.0 - means[0] <= limits.max_loss
    better = engines > 1 and informative >= MIN_INFORMATIVE and low > 0.0
    if engines == 1:
        faithful = keeps
        fidelity = f"loss {1.0 - means[0]:.3f} {frames}, at most {limits.max_loss} is allowed"
    else:
        faithful = better or (keeps and means[0] - means[1] >= limits.least_gain and not shows_loss(gains))
        fidelity = f"fidelity {means[0]:.3f} against {means[1]:.3f} in service {frames}"
    confused = _newly_confused(comparison, limits.max_loss, label)
    mistaken = [f"newly confuses {', '.join(confused)}"] if confused else []
    mistaken += [f"newly loses {each}" for each in _newly_lost(comparison, limits.max_loss, label)]
    latency = _Latency(comparison)
    failed = {
        "outputs": "; ".join(f"{fault} ({count} times)" for fault, count in comparison.outputs.items()),
        "rows": "; ".join(comparison.rows),
        "confusion": "it " + ", and ".join(mistaken) if mistaken else "",
        "latency": latency.objection(limits.max_slowdown),
        "gain": latency.slower_than_float if limits.must_gain and not better else "",
        "fidelity": "" if faithful else fidelity,
    }
    objections = {test: words for test, words in failed.items() if words}
    return Verdict(
        not objections,
        "; ".join(objections.values()) or f"{fidelity}; {latency.summary}",
        comparison.frames,
        comparison.frames - informative,
        means[0],
        means[1] if engines > 1 else None,
        low,
        high,
        latency.p50_ms[0],
        latency.p50_ms[1] if engines > 1 else None,
        latency.reference_ms,
        latency.p99_ms[0] if latency.p99_ms else None,
        latency.p99_ms[1] if latency.p99_ms and engines > 1 else None,
        tuple(objections),
        confused,
        latency.float_ms,
        _agreement_by_class(comparison, label),
        comparison.pooled[0].by_class(label) if comparison.pooled else {},
    )


def _agreement_by_class(comparison: Comparison, label: Callable[[int], str]) -> dict[str, tuple[int, int]]:
    """Return the commonest classes, by what the candidate keeps of them."""
    counts = comparison.confusion[0]
    commonest = counts.totals.most_common(_MOST_CLASSES)
    return {label(each): (total - counts.wrong[each], total) for each, total in commonest}


def _newly_confused(comparison: Comparison, max_loss: float, label: Callable[[int], str]) -> tuple[str, ...]:
    """Return in words the pairs that the candidate confuses in more frames than tolerated, and that are new.

    A pair is not new if the engine in service confuses it too, or loses that class as often in whatever way: an engine
    that detects nothing in the dark confuses no classes either.
    """
    tolerance = max(_MAX_CONFUSION, max_loss)
    if tolerance >= 1.0:
        return ()
    candidate, *others = comparison.confusion
    return tuple(
        f"{label(pair.reference)} with {label(pair.candidate)} in {pair.count} of {pair.total} frames"
        for pair in confused_pairs(candidate.counts, candidate.totals, tolerance, _CONFUSION_ERROR)
        if all(
            serving.share(pair.reference, pair.candidate) <= tolerance
            and serving.wrong[pair.reference] < candidate.wrong[pair.reference]
            for serving in others
        )
    )


def _newly_lost(comparison: Comparison, max_loss: float, label: Callable[[int], str]) -> tuple[str, ...]:
    """Return in words the classes of pixels that the candidate loses, and the engine in service keeps better.

    A class may vanish within max_loss: a mean over ten classes falls by a tenth.
    """
    if not comparison.pooled:
        return ()
    candidate, *others = comparison.pooled
    least = least_iou(max_loss)
    return tuple(
        f"{label(each)}: its IoU with the reference is {candidate.iou(each):.2f}, and {least:g} is asked"
        for each in candidate.lost(least, _CONFUSION_ERROR)
        if all(serving.iou(each) >= least for serving in others)
    )


class _Latency:
    """Medians and 99th percentiles of a comparison.

    p50_ms, p99_ms: of the candidate and of the engine in service; p99_ms is empty where inferences were too few.
    float_ms: the median of the float engine; None where it was not timed.
    """

    def __init__(self, comparison: Comparison) -> None:
        self._times_ms, self._floats_ms = comparison.latencies_ms, comparison.float_ms
        runs, engines = self._times_ms.shape
        self.p50_ms = np.median(self._times_ms, axis=0).tolist() if runs else [0.0] * engines
        self.p99_ms = np.percentile(self._times_ms, 99.0, axis=0).tolist() if runs >= _TAIL_FROM else []
        self.reference_ms = float(np.median(comparison.reference_ms)) if comparison.reference_ms.size else 0.0
        self.float_ms = float(np.median(self._floats_ms)) if self._floats_ms.size else None

    @property
    def summary(self) -> str:
        first = len(self.p50_ms) == 1
        in_float = self.reference_ms if self.float_ms is None else self.float_ms
        other = f"{in_float:.3g} ms in float" if first else f"{self.p50_ms[1]:.3g} ms in service"
        unjudged = "" if first or self.p99_ms else f", p99 not judged: {len(self._times_ms)} inferences"
        return f"{self.p50_ms[0]:.3g} ms against {other}{unjudged}"

    @property
    def slower_than_float(self) -> str:
        """Say so where the candidate is, beyond chance; empty where it is not, or the float engine was not timed.

        Both have answered each frame one right after the other, so that other work hits both alike.
        """
        if self.float_ms is None:
            return ""
        candidate_ms = self._times_ms[-len(self._floats_ms) :, 0]
        later_ms = candidate_ms - self._floats_ms[-len(candidate_ms) :]
        if np.median(later_ms) <= max(_LEAST_LOSS * self.float_ms, _LEAST_LOSS_MS):
            return ""
        if _chance(int((later_ms > 0.0).sum()), len(later_ms)) >= _TAIL_CHANCE:
            return ""
        return f"p50 {self.p50_ms[0]:.3g} ms against {self.float_ms:.3g} ms in float"

    def objection(self, max_slowdown: float) -> str:
        """Return in words why the candidate is too slow; empty where it is not, or nothing serves.

        The 99th percentile counts only where slow inferences are clearly more often the candidate's. Preemptions hit
        both engines alike, as they take turns, and a few of them would decide a comparison of percentiles.
        """
        if len(self.p50_ms) == 1:
            return ""
        allowed = f"in service; {max_slowdown:g} times that is allowed"
        if _is_slower(self.p50_ms, max_slowdown):
            return f"p50 {self.p50_ms[0]:.3g} ms against {self.p50_ms[1]:.3g} ms {allowed}"
        if not self.p99_ms or not _is_slower(self.p99_ms, max_slowdown):
            return ""
        slow, slow_serving = (self._times_ms > max_slowdown * self.p50_ms[1]).sum(axis=0).tolist()
        if _chance(slow, slow + slow_serving) >= _TAIL_CHANCE:
            return ""
        return f"p99 {self.p99_ms[0]:.3g} ms against {self.p99_ms[1]:.3g} ms {allowed}"


def _chance(heads: int, tosses: int) -> float:
    """Return the probability that a fair coin shows so many heads or more. SciPy, for this alone, would be 12 MiB."""
    return sum(math.comb(tosses, count) for count in range(heads, tosses + 1)) / (1 << tosses)


def _is_slower(times_ms: Sequence[float], max_slowdown: float) -> bool:
    candidate, serving = times_ms
    return candidate > max_slowdown * serving and candidate - serving > _NOTICED_MS
