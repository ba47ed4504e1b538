"""The summary a person reads."""

from __future__ import annotations

import io

from rich.console import Console

from agent.common.latency import LoopSample
from agent.control.summary import Alarm, RunSummary, Score, Swap
from agent.daemon.review import REFERENCE
from agent.daemon.summary_table import print_summary, sparkline
from agent.vision.answer import MatchCounts
from calibrate.statistics.evidence import Interval


def test_a_sparkline_shows_means_over_time_and_bridges_gaps() -> None:
    points = [(0.0, 1.0), (1.0, 1.0), (2.0, 0.0), (9.0, 0.5), (9.9, 0.7)]
    assert sparkline(points, 10) == "██▁▁▁▁▁▁▁▅"


def story() -> RunSummary:
    summary = RunSummary("store/artefacts/b", last_ts=300.0)
    summary.loop = LoopSample(3000, {"stale": 4}, 59.7, 3.1, 6.7)
    summary.swaps = [
        Swap(50.0, "aaaa", "first-start", 8.0, 0.98, None, 0, 0.8, 2.0),
        Swap(200.0, "bbbb", "alarm", 3.0, 0.99, 0.6),
    ]
    summary.alarms = [Alarm(185.0, 120.0, 11.5, 1e6)]
    summary.results_dropped = {"file": 3}
    summary.fidelity = Interval(0.99, 0.9, 1.0, 70)
    summary.fidelity_history = [(60.0, 1.0), (290.0, 0.5)]
    score = Score(MatchCounts(9, 1, 1), 9.0, 10)
    summary.accuracy = {"first light": {REFERENCE: score, "aaaa": score, "bbbb": score}}
    return summary


def test_the_tables_show_the_run_in_order() -> None:
    shown = printed(story())
    places = [shown.index(part) for part in ("50.0 s  new engine", "185.0 s  alarm", "200.0 s  new engine")]
    assert places == sorted(places)
    assert "live 15 s of video after the alarm, 80 s after onset" in shown
    for part in (
        "4 stale",
        "results lost",
        "3 by file",
        "65 s after onset",
        "0.600 -> 0.990",
        "FP32 reference",
        "INT8 bbbb, alarm",
        "0.900 (0.900)",
        "INT8 is 2.5 times as fast as float on this machine",
    ):
        assert part in shown


def test_the_periods_are_the_first_light_and_the_last() -> None:
    summary = story()
    assert [(p.start_s, p.end_s) for p in summary.periods()] == [(50.0, 120.0), (200.0, 300.0)]
    summary.swaps, summary.alarms = summary.swaps[:1], []
    assert [(p.start_s, p.end_s) for p in summary.periods()] == [(50.0, 300.0)]
    summary.swaps = []
    assert summary.periods() == []


def printed(summary: RunSummary) -> str:
    text = io.StringIO()
    print_summary(summary, Console(file=text, width=120))
    return text.getvalue()


def test_a_run_without_a_calibration_says_why_in_a_sentence() -> None:
    why = "the float reference serves, because the view is blind; see the camera"
    summary = RunSummary("store/artefacts/r", stopped_by="SIGTERM", degraded=why, held_back="the view is blind")
    text = printed(summary)
    assert why in text
    assert "held back" not in text
    assert "SIGTERM" in text
    assert "held back" in printed(RunSummary("store/artefacts/r", held_back="the view is blind"))
