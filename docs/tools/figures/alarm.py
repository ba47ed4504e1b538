"""Draw an alarm: the predicted gain of a recalibration, block by block, and the evidence that it adds up to."""

from __future__ import annotations

from pathlib import Path

from docs.tools.figures.picture import BLUE, FAINT, INK, ORANGE, VERMILLION, mark, new_figure, save
from docs.tools.figures.replay import detector_of, drift_blocks
from docs.tools.figures.street_run import StreetRun

_HEIGHT_PX = 760


def draw_alarm(run: StreetRun, path: Path) -> None:
    """Write the picture."""
    blocks = drift_blocks(run)
    last = blocks[-1]
    if last.state != "alarm" or last.onset_ts is None:
        raise SystemExit(f"error: no alarm in the replay, which ends {last}; run the sample again")
    drift, detector = run.config.drift, detector_of(run.config.drift)
    times = [block.ts for block in blocks]
    figure = new_figure(_HEIGHT_PX)
    figure.set_layout_engine("constrained")
    above, below = figure.subplots(2, sharex=True)
    above.stem(times, [block.gain_db for block in blocks], linefmt=BLUE, markerfmt="o", basefmt=" ")
    above.axhline(drift.tolerance_db, color=INK, linewidth=1.0, linestyle=(0, (5, 3)))
    above.text(times[0], drift.tolerance_db + 0.4, f"tolerated: {drift.tolerance_db:g} dB", color=INK)
    above.set_ylabel("predicted gain (dB)")
    above.set_ylim(bottom=0.0)
    above.grid()
    below.plot(times, [max(block.e_value, 1e-2) for block in blocks], "o-", color=BLUE, markersize=4)
    below.set_yscale("log")
    below.axhline(detector.threshold, color=VERMILLION, linewidth=1.0, linestyle=(0, (5, 3)))
    below.axhline(detector.warning_threshold, color=ORANGE, linewidth=1.0, linestyle=(0, (5, 3)))
    below.set_ylabel("e-value (log scale)")
    below.set_xlabel(f"time in the recording (s), blocks of {drift.block_s:g} s")
    for axes in (above, below):
        mark(axes, last.onset_ts, "drift begins" if axes is above else "", FAINT, "right")
        mark(axes, last.ts, "alarm" if axes is above else "", VERMILLION, "right")
    save(figure, path)
