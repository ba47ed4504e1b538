"""Show a calibration: the histogram of each tensor with the threshold that was chosen, and the noise that it leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from agent.common.html.charts import Axis, Mark, histogram_chart
from agent.common.html.pages import Figure, Section, Table, show_share
from calibrate.histogram import AbsHistogram
from calibrate.noise import noise_power
from engines.calibration import Calibration

_BINS = 64  # bars of a drawing
_DRAWN = 4  # the noisiest tensors, drawn large
_SHARE_OF_ZERO = 0.5  # share of a step: smaller values are rounded to zero


@dataclass(frozen=True)
class TensorFacts:
    """One tensor under its scale.

    clipped, rounded: the shares of its values that lie beyond the range, and that become zero though they are not.
    sqnr_db: predicted signal to noise, from the histogram. clipping: the share of clipping in the noise.
    """

    name: str
    histogram: AbsHistogram
    amax: float
    clipped: float
    rounded: float
    sqnr_db: float
    clipping: float


def tensor_facts(calibration: Calibration) -> list[TensorFacts]:
    """Return the facts of each tensor with a scale and a histogram, the noisiest first.

    A calibration that was read from another tool's cache, without frames, has no histograms.
    """
    facts = [
        _facts(name, calibration.histograms[name], calibration)
        for name in calibration.amax
        if name in calibration.histograms
    ]
    return sorted(facts, key=lambda each: each.sqnr_db)


def _facts(name: str, histogram: AbsHistogram, calibration: Calibration) -> TensorFacts:
    scale, amax = calibration.scales[name], calibration.amax[name]
    centres = (np.arange(histogram.counts.size) + 0.5) * histogram.bin_width
    total = max(histogram.total, 1)
    rounding, clipping = (float(part[0]) for part in noise_power(histogram, np.array([scale])))
    power = float(histogram.counts @ np.square(centres)) / total
    noise = rounding + clipping
    return TensorFacts(
        name,
        histogram,
        amax,
        clipped=float(histogram.counts[centres > amax].sum()) / total,
        rounded=float(max(histogram.counts[centres < _SHARE_OF_ZERO * scale].sum() - histogram.zeros, 0)) / total,
        sqnr_db=10.0 * float(np.log10(power / noise)) if power > 0.0 and noise > 0.0 else float("inf"),
        clipping=clipping / noise if noise > 0.0 else 0.0,
    )


def calibration_sections(calibration: Calibration) -> list[Section]:
    """Return the sections of a report on a calibration."""
    facts = tensor_facts(calibration)
    finite = [each for each in facts if np.isfinite(each.sqnr_db)]
    return [
        Section(
            "Tensors",
            [
                "Each histogram counts the absolute values of one tensor over the calibration's frames. The dashed "
                "line is the threshold, the end of the INT8 range. Values beyond it are clipped, and those below half "
                "a step become zero. The signal to noise is predicted from the histogram, for 127 steps.",
            ],
            figures=[Figure(_caption(each), tensor_chart(each)) for each in finite[:_DRAWN]],
            tables=[Table(_HEADS, [_row(each) for each in facts], f"All {len(facts)} tensors", filters=True)],
        )
    ]


_HEADS = (
    ("tensor", False), ("histogram", False), ("threshold", True), ("largest", True), ("clipped", True),
    ("rounded to zero", True), ("signal to noise, dB", True), ("of it clipping", True),
)  # fmt: skip


def _row(facts: TensorFacts) -> Sequence[object]:
    chart = Markup(str(tensor_chart(facts)).replace('class="chart"', 'class="chart small"', 1))
    sqnr = f"{facts.sqnr_db:.1f}" if np.isfinite(facts.sqnr_db) else ""
    return (
        facts.name,
        (chart, ""),
        (f"{facts.amax:.4g}", facts.amax),
        (f"{facts.histogram.amax:.4g}", facts.histogram.amax),
        (show_share(facts.clipped), facts.clipped),
        (show_share(facts.rounded), facts.rounded),
        (sqnr, facts.sqnr_db if sqnr else ""),
        (show_share(facts.clipping), facts.clipping),
    )


def _caption(facts: TensorFacts) -> str:
    return f"{facts.name}: {facts.sqnr_db:.1f} dB, {show_share(facts.clipped)} of its values clipped"


def tensor_chart(facts: TensorFacts) -> Markup:
    """Draw the histogram of a tensor, with its threshold."""
    edges, counts = _drawn(facts.histogram)
    words = f"threshold {facts.amax:.4g}, {facts.amax / max(facts.histogram.amax, 1e-30):.0%} of the largest value"
    high = max(facts.histogram.amax, facts.amax, 1e-30)
    axis = Axis("absolute value", 0.0, high)
    return histogram_chart(edges, counts, axis, facts.name, [Mark(facts.amax, words, "bad")])


def _drawn(histogram: AbsHistogram) -> tuple[list[float], list[float]]:
    """Return edges and counts of fewer bins, without the exact zeros, up to the largest value."""
    counts = histogram.counts.astype(np.float64)
    counts[0] = max(counts[0] - histogram.zeros, 0.0)
    used = max(int(np.ceil(histogram.amax / histogram.bin_width)), 1) if histogram.amax > 0.0 else 1
    cuts: NDArray[np.int64] = np.unique(np.linspace(0, min(used + 1, counts.size), _BINS + 1).astype(np.int64))
    merged = np.add.reduceat(counts, cuts[:-1]) if cuts.size > 1 else counts[:1]
    return (cuts * histogram.bin_width).tolist(), merged.tolist()


def calibration_facts(calibration: Calibration) -> dict[str, str]:
    """Return what a calibration is, in a few words each."""
    facts = {
        "method": calibration.method,
        "frames": f"{calibration.frames} of {calibration.source}",
        "tensors": str(len(calibration.amax)),
        "calibration": calibration.id,
        "model": calibration.model_sha256[:16],
    }
    if calibration.merged:
        facts["merged of"] = f"{calibration.merged.get('boards', '?')} boards"
    fidelity = calibration.check.get("result", {}).get("fidelity")
    if isinstance(fidelity, float):
        facts["fidelity, a quick check"] = f"{fidelity:.3f}"
    return facts
