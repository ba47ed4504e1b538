"""Draw an alarm: the predicted gain of a recalibration, block by block, and the evidence that it adds up to."""

from __future__ import annotations

from pathlib import Path

from calibrate.statistics.evidence import FULL_SCALE_DB
from docs.tools.figures.picture import BLUE, FAINT, INK, VERMILLION, mark, new_figure, save
from docs.tools.figures.replay import detector_of, drift_blocks
from docs.tools.figures.street_run import StreetRun

_HEIGHT_PX = 760
_DASHED = (0, (5, 3))
_WARNING = "#9a6a00"


def draw_alarm(run: StreetRun, path: Path) -> None:
    """Write the picture."""
    blocks = drift_blocks(run)
    last = blocks[-1]
    if last.state != "alarm" or last.onset_ts is None:
        raise SystemExit(f"error: no alarm in the replay, which ends {last}; run the sample again")
    drift, detector = run.config.drift, detector_of(run.config.drift)
    figure = new_figure(_HEIGHT_PX)
    figure.set_layout_engine("constrained")
    above, below = figure.subplots(2, sharex=True)
    times, gains = [block.ts for block in blocks], [block.gain_db for block in blocks]
    above.vlines(times, 0.0, gains, color=BLUE, linewidth=2.0)
    above.plot(times, gains, "o", color=BLUE)
    above.set_ylabel("predicted gain (dB)")
    above.set_ylim(-0.6, 1.15 * max(gains))
    weighed = [block for block in blocks if block.e_value > 0.0]  # the first frames are for the scales
    below.plot([block.ts for block in weighed], [block.e_value for block in weighed], "o-", color=BLUE, markersize=5)
    below.set_yscale("log")
    below.set_ylim(top=20.0 * detector.threshold)
    below.set_ylabel("e-value (log scale)")
    below.set_xlabel(f"time in the recording (s); a point is a block of {drift.block_s:g} s")
    levels = (
        (above, drift.tolerance_db, f"tolerated: {drift.tolerance_db:g} dB", INK),
        (above, FULL_SCALE_DB, f"more counts as {FULL_SCALE_DB:g} dB", FAINT),
        (below, detector.warning_threshold, f"warning from {detector.warning_threshold:,.0f} on", _WARNING),
        (below, detector.threshold, f"alarm from {detector.threshold:,.0f} on", VERMILLION),
    )
    for axes, level, words, color in levels:
        axes.axhline(level, color=color, linewidth=1.2, linestyle=_DASHED)
        axes.annotate(words, (0.0, level), (6, 3), axes.get_yaxis_transform(), "offset points", color=color)
    for axes, onset, end in ((above, "drift begins", "alarm"), (below, "", "")):
        mark(axes, last.onset_ts, onset, FAINT, "center")
        mark(axes, last.ts, end, VERMILLION, "center")
    save(figure, path)
