"""Whether a candidate may serve, by what `agent.validation.comparison` has seen of it beside the engine in service."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from agent.common.errors import AgentError
from agent.models.model import Model
from agent.validation.comparison import Comparison, Deadline, HeldOut, compare
from agent.validation.confusion import newly_confused
from calibrate.evidence import gain_bounds
from engines.interface import Backend, Engine, Progress
from engines.store.artefact import fingerprint, read_artefact
from engines.store.retention import record_refusal
from engines.store.signing import find_key

MIN_TELLING = 4  # held-out frames with something on them, without which nothing speaks for a candidate
NO_WORSE = 0.01  # of fidelity: a candidate may be this much below the engine in service, by chance
# Of fidelity, for one whose precision was raised for it: a few frames easy for both do not speak for layers left float.
RAISED_GAIN = 0.01
# Times the latency of what serves, for a candidate with more layers float: its fidelity is what is wanted, and INT8 has
# twice the peak rate of FP16, so that layers left float make no engine slower than this.
MORE_FLOAT_SLOWDOWN = 2.0

_MAX_CONFUSION = 0.1  # of the frames with a class, as `tared plan` has it; an owner who accepts more loss, accepts that
_TAIL_FROM = 100  # inferences: of fewer the 99th percentile is the slowest one, which tells of the machine
_TAIL_CHANCE = 0.001  # that so many more slow ones are the candidate's, if neither engine is slower
_NOTICED_MS = 0.25  # a difference that no frame at 1000 Hz would notice is none


@dataclass(frozen=True)
class VerdictLimits:
    """max_loss: largest 1 - mean fidelity at which a candidate is good, whatever serves now. max_slowdown: its latency
    may be so many times that of the engine in service. least_gain: of mean fidelity over it, on the same frames."""

    max_loss: float
    max_slowdown: float
    least_gain: float = -NO_WORSE


@dataclass(frozen=True)
class Verdict:
    """How a candidate did on the held-out frames beside the engine in service and the reference.

    failed: which tests it did not pass, among "outputs", "rows", "confusion", "latency" and "fidelity"; `reason` says
    it in words. frames: held-out frames; on empty_frames of them nobody detected anything, so they agree without
    telling anything. fidelity: mean over the other frames, in [0, 1]. gain_low, gain_high: bounds with 95 % confidence
    of what it gains over the engine in service. Latencies are medians in ms, and 99th percentiles, in turn in one
    process; percentiles are None where inferences were too few. confused: the pairs of classes it newly confuses.
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

    def as_dict(self) -> dict[str, Any]:
        """In JSON's types."""
        return {**asdict(self), "failed": list(self.failed), "confused": list(self.confused)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Verdict:
        """What `as_dict` gave."""
        pairs = {name: tuple(document[name]) for name in ("failed", "confused")}
        return cls(**{**document, **pairs})


def decide(comparison: Comparison, limits: VerdictLimits, label: Callable[[int], str] = str) -> Verdict:
    """Accept a candidate whose outputs are sound, that confuses no classes newly, is not too slow, and faithful.

    With no engine in service it must keep max_loss, and its latency is told and not judged. With one, it must have the
    least gain, and keep max_loss or be better with 95 % confidence. Frames on which neither engine nor reference found
    anything agree without telling anything: they are counted apart, and MIN_TELLING others asked. label: from a class
    to its name.
    """
    scores = comparison.fidelities
    telling, engines = scores.shape
    means = scores.mean(axis=0).tolist() if telling else [0.0] * engines
    low, high = gain_bounds(scores[:, 0] - scores[:, 1]) if engines > 1 else (0.0, 0.0)
    told = f"on {telling} held-out frames, {comparison.frames - telling} others empty"
    confused = _confused(comparison, limits.max_loss, label)
    latency = _Latency.of(comparison)
    failed = {
        "outputs": "; ".join(f"{fault} ({count} times)" for fault, count in comparison.outputs.items()),
        "rows": "; ".join(comparison.rows),
        "confusion": "it newly confuses " + ", ".join(confused) if confused else "",
        "latency": latency.objection(limits.max_slowdown),
    }
    keeps = telling >= MIN_TELLING and 1.0 - means[0] <= limits.max_loss
    if engines == 1:
        faithful = keeps
        fidelity = f"loss {1.0 - means[0]:.3f} {told}, at most {limits.max_loss} is asked"
    else:
        better = telling >= MIN_TELLING and low > 0.0
        faithful = better or (keeps and means[0] - means[1] >= limits.least_gain)
        fidelity = f"fidelity {means[0]:.3f} against {means[1]:.3f} in service {told}"
    failed["fidelity"] = "" if faithful else fidelity
    objections = {test: words for test, words in failed.items() if words}
    return Verdict(
        not objections,
        "; ".join(objections.values()) or f"{fidelity}; {latency.told}",
        comparison.frames,
        comparison.frames - telling,
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
    )


def _confused(comparison: Comparison, max_loss: float, label: Callable[[int], str]) -> tuple[str, ...]:
    tolerance = max(_MAX_CONFUSION, max_loss)
    if tolerance >= 1.0:
        return ()
    candidate, *serving = comparison.misread
    return tuple(
        f"{label(pair.reference)} with {label(pair.candidate)} in {pair.count} of {pair.of} frames"
        for pair in newly_confused(candidate, serving[0] if serving else None, tolerance)
    )


@dataclass(frozen=True)
class _Latency:
    """p50_ms, p99_ms: of the candidate and of the engine in service; no p99_ms where inferences were too few."""

    times_ms: np.ndarray
    p50_ms: tuple[float, ...]
    p99_ms: tuple[float, ...]
    reference_ms: float

    @classmethod
    def of(cls, comparison: Comparison) -> _Latency:
        times_ms, reference_ms = comparison.latencies_ms, comparison.reference_ms
        runs, engines = times_ms.shape
        p50_ms = np.median(times_ms, axis=0).tolist() if runs else [0.0] * engines
        p99_ms = np.percentile(times_ms, 99.0, axis=0).tolist() if runs >= _TAIL_FROM else []
        return cls(times_ms, tuple(p50_ms), tuple(p99_ms), float(np.median(reference_ms)) if reference_ms.size else 0.0)

    @property
    def told(self) -> str:
        first = len(self.p50_ms) == 1
        other = f"{self.reference_ms:.3g} ms in float" if first else f"{self.p50_ms[1]:.3g} ms in service"
        unjudged = "" if first or self.p99_ms else f", p99 not judged: {len(self.times_ms)} inferences"
        return f"{self.p50_ms[0]:.3g} ms against {other}{unjudged}"

    def objection(self, max_slowdown: float) -> str:
        """Why the candidate is too slow, in words; empty where it is not, or nothing serves.

        Its 99th percentile counts where slow inferences are clearly more often its own than not: preemptions hit both
        engines alike, as they take turns, and a few of them would decide a comparison of percentiles.
        """
        if len(self.p50_ms) == 1:
            return ""
        asked = f"in service; {max_slowdown:g} times that is allowed"
        if _slower(self.p50_ms, max_slowdown):
            return f"p50 {self.p50_ms[0]:.3g} ms against {self.p50_ms[1]:.3g} ms {asked}"
        if not self.p99_ms or not _slower(self.p99_ms, max_slowdown):
            return ""
        slow, slow_serving = (self.times_ms > max_slowdown * self.p50_ms[1]).sum(axis=0).tolist()
        if _chance(slow, slow + slow_serving) >= _TAIL_CHANCE:
            return ""
        return f"p99 {self.p99_ms[0]:.3g} ms against {self.p99_ms[1]:.3g} ms {asked}"


def _chance(heads: int, tosses: int) -> float:
    """That so many tosses of a fair coin show so many heads, or more. SciPy, for this alone, would be 12 MiB."""
    return sum(math.comb(tosses, count) for count in range(heads, tosses + 1)) / (1 << tosses)


def _slower(times_ms: tuple[float, ...], max_slowdown: float) -> bool:
    candidate, serving = times_ms
    return candidate > max_slowdown * serving and candidate - serving > _NOTICED_MS


_LOG = logging.getLogger(__package__)

_ASKED = {
    "outputs": "finite outputs of the reference's names, types and shapes",
    "rows": "the same answer for equal frames of a batch",
    "confusion": "no classes confused that were told apart",
    "latency": "a latency within recalibration.max_slowdown",
    "fidelity": f"at least {MIN_TELLING} frames with something on them, and a loss within recalibration.max_loss or "
    "clearly below today's",
}


@dataclass
class Judge:
    """Judges the engines that one job builds of `model`; `verdict` is that on the last one.

    serving: directory of the artefact in service, None while the reference engine serves. evidence: goes into the file
    of a refusal, beside the verdict. on_hang(error) is to end the process: an inference has not come back; it is called
    in another thread.
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
    verdict: Verdict | None = field(default=None, init=False)
    _inputs: Mapping[str, Any] = field(default_factory=dict, init=False)

    def known_as(self, inputs: Mapping[str, Any]) -> None:
        """What the engine that is judged next follows from: its artefact's fingerprinted inputs."""
        self._inputs = inputs

    def __call__(self, engine: Engine) -> Mapping[str, Any]:
        """What the manifest of an accepted engine says. Raises `recalibration.refused`, and as `compare`."""
        self.progress(0.0, "comparing")
        with closing(Deadline(self._hangs)) as deadline:
            seen = compare(self.model, self.backend, engine, self.serving, self.held_out, deadline, self.progress)
        self.verdict = verdict = decide(seen, self._limits(), self.model.spec.label)
        if not verdict.accepted:
            self._keep({"verdict": verdict.as_dict()})
            raise AgentError(
                "recalibration.refused",
                verdict.reason,
                ", ".join(_ASKED[test] for test in verdict.failed),
                "the engine in service serves on; a model that plain INT8 does not suit needs layers kept float",
            )
        return {"verdict": verdict.as_dict()}

    def _limits(self) -> VerdictLimits:
        """Those of the request, with more time for a candidate that has layers float which are INT8 in service."""
        if self.serving is None:
            return self.limits
        serves = read_artefact(Path(self.serving), find_key()).manifest["inputs"].get("plan", {}).get("floats", ())
        more = self.model.plan.floats.keys() - set(serves)
        slowdown = self.limits.max_slowdown
        return replace(self.limits, max_slowdown=max(slowdown, MORE_FLOAT_SLOWDOWN) if more else slowdown)

    def _hangs(self, limit_s: float) -> None:
        error = AgentError(
            "recalibration.deadline",
            f"an inference of the candidate that had not come back after {limit_s:.3g} s",
            "an answer",
            "the engine in service serves on; report the model and the versions of `tared doctor`",
        )
        self._keep({"error": {"code": error.code, "found": error.found}})
        self.on_hang(error)

    def _keep(self, found: Mapping[str, Any]) -> None:
        """What refuses a candidate is not hidden by a disk that refuses too."""
        try:
            evidence = {**self.evidence, "inputs": self._inputs, **found}
            record_refusal(self.state_dir, fingerprint(self._inputs), evidence)
        except OSError as error:
            _LOG.warning("refusal_not_kept error=%r", error.strerror)
