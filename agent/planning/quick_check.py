"""Check INT8 on a few frames at the end of `tared calibrate` and `tared build`: a glance, no certificate.

The graph is simulated on ONNX Runtime, as for a what-if, so that a check needs neither the target runtime nor its
builder. A built engine is run beside it: one that does not answer as its graph says is refused. The worst tensor is
found through the weights that read it, since a tensor's own noise misses the ones that ruin a network: a few small
channels under one scale that large weights amplify again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from agent.models.model import Model
from agent.planning.what_if import WhatIf, WhatIfResult
from calibrate.errors import TaredError
from engines.calibration import Calibration
from engines.errors import EngineError
from engines.graph.topology import Topology
from engines.interface import Array, Backend, Engine, Progress
from engines.quantise.repairs import observe_channels, propose_repairs

CHECKED_FRAMES = 12  # network inputs of (3, 640, 640) take 59 MB
_CHANNEL_FRAMES = 4  # frames for the worst tensor: enough to find one that ruins a network
_PASS_BYTES = 32 << 20  # exposed tensors at a time: a check should take little more memory than calibrating
_LOW_DB = 0.0  # noise as large as the signal: one such layer ruins a network
# An engine may diverge from float by so many times what its graph does, and by so much more. Ten sound ones on OpenVINO
# did by 0.86 to 1.22 times; one that lost the scales of a few layers diverged by 1, which is the most.
_TIMES, _MORE = 2.0, 0.25
DIFFERS = "engine.differs"


@dataclass(frozen=True)
class QuickCheck:
    """The result of a glance at a few frames.

    Args:
        frames: Frames that were run.
        informative: Those of them on which either engine found anything.
        fidelity: Mean over the informative frames, in [0, 1]; None without one. Of the built engine, if `simulated` is
            not None.
        worst_tensor: The quantised tensor whose noise is largest behind the layer that reads it; empty without any.
        worst_layer: That layer.
        worst_db: Signal to noise at its output if it alone is INT8, in dB, predicted; None without a worst tensor.
        worst_output: The output that no decoder reads, or its channel, whose signal to noise is least; empty without.
        output_db: That in dB, the median over the frames; None where it is infinite, or without a worst output.
        simulated: Fidelity of the graph on ONNX Runtime, where an engine was run; None without an informative frame.
    """

    frames: int
    informative: int
    fidelity: float | None
    worst_tensor: str
    worst_layer: str
    worst_db: float | None
    worst_output: str = ""
    output_db: float | None = None
    simulated: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the check in JSON's types, without a worst output where a decoder reads them."""
        found = asdict(self)
        if self.simulated is None:
            del found["simulated"]
        if not self.worst_output:
            del found["worst_output"], found["output_db"]
        return found

    def is_low(self, max_loss: float) -> bool:
        """Return whether the engine would hardly be accepted. max_loss: What a daemon accepts."""
        lows = ((self.fidelity, 1.0 - max_loss), (self.worst_db, _LOW_DB))
        return any(value is not None and value < low for value, low in lows)

    @property
    def text(self) -> str:
        """The check in one sentence, for people."""
        if self.fidelity is None:
            shown = f"fidelity to float unknown, none of {self.frames} frames shows anything"
        else:
            some = "" if self.informative == self.frames else f"{self.informative} of "
            how = "simulated" if self.simulated is None else f"the engine's own (simulated: {self.simulated:.3f})"
            shown = f"fidelity to float {self.fidelity:.3f}, {some}{self.frames} frames, {how}"
        if self.output_db is not None:
            shown += f"; worst output {self.worst_output}, {self.output_db:.1f} dB"
        if self.worst_db is None:
            return shown
        return f"{shown}; worst tensor '{self.worst_tensor}', {self.worst_db:.1f} dB behind '{self.worst_layer}'"


def quick_check(
    model: Model,
    calibration: Calibration,
    frames: Sequence[Array],
    simulator: Backend,
    progress: Progress,
    engine: Engine | None = None,
) -> QuickCheck:
    """Compare the INT8 graph of a model under its plan, and the engine built of it, with the float reference.

    Args:
        frames: Network inputs (1, C, H, W), at least one.
        simulator: As `open_simulator` opens it for the runtime.
        engine: The built engine; None: the graph is only simulated.

    Raises EngineError as ONNX Runtime and `quantised_graph` do, and:
        engine.differs  the engine fails, or its answers are far from those of its graph
    """
    progress(0.0, "answering in float and in INT8")
    what_if = WhatIf(model, calibration, [frames], simulator)
    simulated = answers = what_if.evaluate(model.plan)
    if engine is not None:
        answers = _engine_answers(what_if, engine, simulated)
    nodes = Topology(model.observed).nodes
    layers = [node for node in nodes if node.name in model.placement.layers and node.name not in model.plan.floats]
    noise: Mapping[str, float] = {}
    loudest: Mapping[str, str] = {}
    if layers:
        statistics = observe_channels(
            model.observed,
            layers,
            frames[:_CHANNEL_FRAMES],
            simulator,
            lambda done, doing: progress(0.5 + 0.5 * done, doing),
            pass_bytes=_PASS_BYTES,
        )
        proposal = propose_repairs(model.observed, model.placement, calibration, statistics, families=())
        noise, loudest = proposal.before, proposal.loudest
    worst = max(noise, key=noise.__getitem__, default="")
    has_worst = noise.get(worst, 0.0) > 0.0
    worst_output = min(answers.sqnr_db, key=answers.sqnr_db.__getitem__, default="")
    output_db = answers.sqnr_db.get(worst_output, np.inf)
    return QuickCheck(
        len(frames),
        answers.telling,
        _fidelity(answers),
        loudest[worst] if has_worst else "",
        worst if has_worst else "",
        round(-10.0 * float(np.log10(noise[worst])), 1) if has_worst else None,
        worst_output,
        round(output_db, 1) if np.isfinite(output_db) else None,
        _fidelity(simulated) if engine is not None else None,
    )


def _fidelity(answers: WhatIfResult) -> float | None:
    return round(1.0 - answers.loss, 4) if answers.telling else None


def _engine_answers(what_if: WhatIf, engine: Engine, simulated: WhatIfResult) -> WhatIfResult:
    """Return the answers of an engine. Raises EngineError (`engine.differs`) where they are not those of its graph."""
    try:
        answers = what_if.compare(engine)
        found = f"an engine that diverges from float by {answers.divergence:.3f} on {simulated.telling} frames"
        if not simulated.telling or answers.divergence <= _TIMES * simulated.divergence + _MORE:
            return answers
    except TaredError as error:
        found = f"an engine that fails on a frame, {error.code}: {error.found}"
    raise EngineError(
        DIFFERS,
        found,
        f"the answers of its INT8 graph, which diverges by {simulated.divergence:.3f} on ONNX Runtime",
        "choose another --backend, and report the model with what `tared doctor` prints",
    )
