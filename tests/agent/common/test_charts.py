"""Shapes of a chart are where its values are; text of strangers stays text."""

from __future__ import annotations

import re

import pytest

from agent.common.html.charts import (
    HEIGHT,
    WIDTH,
    Axis,
    Mark,
    Series,
    histogram_chart,
    line_chart,
    scatter_chart,
    stacked_bars,
    strip,
    timeline,
)
from agent.common.html.text import visible


def points(chart: str, kind: str) -> list[tuple[float, float]]:
    (path,) = re.findall(rf'<path class="{kind}" d="([^"]*)"', chart)
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)]


def axis_texts(chart: str, anchor: str) -> list[str]:
    return re.findall(rf'<text class="{anchor} axis"[^>]*>([^<]*)<', chart)


def test_a_line_goes_from_end_to_end_and_a_higher_value_is_drawn_higher() -> None:
    chart = line_chart([Series("s", [(0.0, 0.0), (10.0, 1.0)])], Axis(), Axis("y", 0.0, 1.0), "t")
    (left, foot), (right, top) = points(chart, "line c0")
    assert 0 < left < right <= WIDTH
    assert 0 <= top < foot <= HEIGHT
    assert axis_texts(chart, "end")[:6] == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]


def test_times_of_a_recording_are_minutes_and_those_of_a_camera_a_clock() -> None:
    recording = line_chart([Series("s", [(0.0, 1.0), (240.0, 1.0)])], Axis(times=True), Axis(), "t")
    assert axis_texts(recording, "middle") == ["0:00", "1:00", "2:00", "3:00", "4:00"]
    noon = 1_700_000_000 // 86400 * 86400 + 43_200.0
    camera = line_chart([Series("s", [(noon, 1.0), (noon + 7200.0, 1.0)])], Axis(times=True), Axis(), "t")
    assert axis_texts(camera, "middle") == ["12:00", "13:00", "14:00"]


def test_bars_are_as_long_as_they_count() -> None:
    chart = stacked_bars({"a": {"x": 3, "y": 1}, "b": {"y": 2}}, {"x": "good", "y": "bad"}, "t")
    widths = [float(each) for each in re.findall(r'<rect [^>]*width="([\d.]+)"', chart)]
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.01)
    assert widths[2] == pytest.approx(2 * widths[1], rel=0.01)


def test_a_histogram_of_very_unequal_counts_shows_the_small_ones_too() -> None:
    chart = histogram_chart([0.0, 1.0, 2.0, 3.0], [1e6, 0.0, 1.0], Axis("x"), "t", [Mark(2.5, "limit", "bad")])
    (path,) = re.findall(r'class="bars c0" d="([^"]*)"', chart)
    tops = [float(each) for each in re.findall(r"V([\d.]+)h", path)]
    assert len(tops) == 2  # a bin without a count is left out
    assert HEIGHT > tops[1] > tops[0]
    assert "limit" in chart


def test_nothing_and_one_moment_can_be_drawn() -> None:
    assert line_chart([], Axis(times=True), Axis(), "t").startswith("<svg")
    assert line_chart([Series("s", [(5.0, 0.5)])], Axis(times=True), Axis(), "t").count("<circle") == 1
    assert (
        line_chart([Series("s", [(0.0, 0.0), (1.0, 5e-324)])], Axis(), Axis(low=0.0), "t").count('class="line c0"') == 1
    )
    assert timeline({"r": [(5.0, "good", "begun")]}, "t").count("<circle") == 1
    assert scatter_chart([], Axis(), Axis(), "t").startswith("<svg")
    assert strip([], "t").startswith("<svg")
    assert stacked_bars({}, {}, "t").startswith("<svg")


@pytest.mark.parametrize("hidden", ["\u202e", "\u200b", "\n", "\x1b", "\x00", "\u2066", "\ud800"])
def test_characters_that_hide_or_turn_text_become_visible(hidden: str) -> None:
    assert visible(f"a{hidden}b") == "a\ufffdb"
