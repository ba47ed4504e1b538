"""The chart of a plan: a picture with the right things in the right places, and none without matplotlib."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from plan_evidence import all_float, by_macs, evidence, of_a_job, one_group, unmeasured

from agent.cli.plan_chart import draw_chart
from agent.common.errors import AgentError

if TYPE_CHECKING:  # its import takes a tenth of the collection of all tests, in each worker
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREEN, RED, BLUE = "#117733", "#cc3311", "#4477aa"


def picture(path: Path) -> NDArray[np.uint8]:
    return cast("NDArray[np.uint8]", cv2.imread(str(path)))


def approx(value: float) -> float:
    """A number that equals those close to it."""
    return cast("float", pytest.approx(value))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[dict[str, Any]], Axes]:
    """The axes that `draw_chart` has drawn on, without a picture of them."""
    from matplotlib.figure import Figure

    monkeypatch.setattr(Figure, "savefig", lambda *_, **__: None)

    def draw(found: dict[str, Any]) -> Axes:
        kept: list[Axes] = []
        add = Figure.add_subplot

        def keep(figure: Figure) -> Axes:
            kept.append(add(figure))
            return kept[0]

        with monkeypatch.context() as patch:
            patch.setattr(Figure, "add_subplot", keep)
            draw_chart(found, tmp_path / "kept.png")
        return kept[0]

    return draw


def points(axes: Axes, color: str) -> list[tuple[float, float]]:
    lines = [line for line in axes.lines if line.get_color() == color]
    return [(x, y) for line in lines for x, y in np.asarray(line.get_xydata(), float).tolist()]


def key(axes: Axes) -> list[str]:
    legend = axes.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend is not None else []


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A chart of every kind of evidence."""
    folder, made = tmp_path_factory.mktemp("charts"), {}
    for make in (evidence, all_float, by_macs, unmeasured, one_group, of_a_job):
        made[make.__name__] = folder / f"{make.__name__}.png"
        draw_chart(make(), made[make.__name__])
    return made


def test_every_plan_has_a_picture(pictures: dict[str, Path]) -> None:
    for path in pictures.values():
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        image = picture(path)
        assert image.shape == (800, 1280, 3)
        assert 0.002 < float((image.min(axis=2) < 200).mean()) < 0.2  # ink: neither blank nor painted over


def test_points_lie_where_the_evidence_says(drawn: Callable[[dict[str, Any]], Axes]) -> None:
    axes = drawn(evidence())
    assert points(axes, BLUE) == [(4.6, 0.3), (5.3, 0.015), (5.9, 0.0)]
    assert {(5.3, 0.0204), (5.3, 0.0487)} == set(points(axes, GREEN))
    assert {(4.6, 0.081), (4.6, 0.19)} == set(points(axes, RED))
    assert (approx(7.4), 0.0) in points(axes, "#222222")  # all float: 6.4 ms, and 1 ms that no plan changes
    assert axes.get_xlabel() == "predicted latency (ms)"
    confidence = "with 95 % confidence"
    assert set(key(axes)) == {
        "allowed: 0.050",
        "all float",
        "plans, loss on 32 frames",
        f"accepted: loss 0.020, at most 0.049 {confidence}",
        f"refused: loss 0.081, at most 0.190 {confidence}",
    }


def test_a_prediction_is_not_drawn_as_measured(drawn: Callable[[dict[str, Any]], Axes]) -> None:
    for found in (unmeasured(), of_a_job()):
        axes = drawn(found)
        assert (points(axes, GREEN), points(axes, RED)) == ([], [])
    refused = drawn(all_float())
    assert (points(refused, GREEN), bool(points(refused, RED))) == ([], True)


@pytest.mark.parametrize(("upper", "max_loss"), [(1.0, 0.001), (0.00005, 0.0001), (0.19, 0.05), (0.2, 0.9)])
def test_the_axis_holds_all_losses_and_its_ticks_stay_apart(
    drawn: Callable[[dict[str, Any]], Axes], upper: float, max_loss: float
) -> None:
    found = evidence()
    found["candidates"][0]["trial"]["upper"] = upper
    axes = drawn({**found, "max_loss": max_loss})
    low, high = axes.get_ylim()
    assert low == 0.0
    assert high > max(upper, max_loss, 0.3)
    ticks = np.sqrt(axes.get_yticks() / high)
    assert 5 <= len(ticks) <= 15
    assert np.diff(ticks).min() >= 0.06


def test_a_model_with_a_dollar_sign(drawn: Callable[[dict[str, Any]], Axes]) -> None:
    axes = drawn({**evidence(), "model_name": "a$b_$.onnx"})
    assert axes.get_title(loc="left").startswith("a$b_$.onnx")  # and no ParseException before


def test_equal_evidence_gives_equal_bytes_whatever_the_style_of_the_user(
    pictures: dict[str, Path], tmp_path: Path
) -> None:
    import matplotlib

    with matplotlib.rc_context({"figure.facecolor": "black", "font.size": 30.0}):
        draw_chart(evidence(), tmp_path / "black.png")
        assert matplotlib.rcParams["font.size"] == 30.0  # and the chart leaves it as it was
    again = (tmp_path / "black.png").read_bytes()
    assert pictures["evidence"].read_bytes() == again
    assert b"tEXt" not in again


def test_without_matplotlib_there_is_a_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in {"matplotlib", *(name for name in sys.modules if name.startswith("matplotlib."))}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(AgentError, match=r"plan\.plot: no package matplotlib.*pip install '.\[plot\]'"):
        draw_chart(evidence(), tmp_path / "chart.png")
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match=r"plan\.chart.*missing"):
        draw_chart(evidence(), tmp_path / "missing" / "chart.png")
