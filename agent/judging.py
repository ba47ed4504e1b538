"""The candidate before its judge: compared, decided on, and where it is refused, the evidence kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent.comparison import HeldOut, compare
from agent.deadline import Deadline
from agent.errors import AgentError
from agent.model import Model
from agent.verdict import MIN_TELLING, MORE_FLOAT_SLOWDOWN, Limits, Verdict, decide
from engines.artefact import fingerprint, read_artefact
from engines.backend import Backend, Engine, Progress
from engines.refusals import record_refusal
from engines.seal import find_key

_LOG = logging.getLogger(__name__)

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
    limits: Limits
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

    def _limits(self) -> Limits:
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
