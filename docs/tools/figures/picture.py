"""The common look of the pictures, and the small files that they become.

Every picture is 1280 pixels wide on white, so that it can be read on a dark page as well.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image  # comes with matplotlib

WIDTH_PX = 1280
DPI = 160
INK, FAINT = "#222222", "#6b6b6b"
# Okabe and Ito's colours, which colour-blind people can distinguish (jfly.uni-koeln.de/color).
ORANGE, SKY, GREEN, BLUE, VERMILLION = "#e69f00", "#56b4e9", "#009e73", "#0072b2", "#d55e00"
MOST_BYTES = 200_000
_COLOURS = 256
_STYLE: dict[Any, Any] = {
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid.axis": "y",
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
}


def new_figure(height_px: int) -> Figure:
    """Return an empty figure."""
    matplotlib.rcdefaults()  # whatever style the user has set
    matplotlib.rcParams.update(_STYLE)
    return Figure(figsize=(WIDTH_PX / DPI, height_px / DPI), dpi=DPI, facecolor="white")


def mark(axes: Axes, at: float, text: str, color: str, align: str = "left") -> None:
    """Draw a line across the axes at x = `at`, with its name above the axes."""
    axes.axvline(at, color=color, linewidth=1.2, linestyle=(0, (4, 2)), zorder=1.5)
    shift = {"left": 4, "right": -4, "center": 0}[align]
    axes.annotate(
        text, (at, 1.0), (shift, 3), axes.get_xaxis_transform(), "offset points", color=color, ha=align, va="bottom"
    )


def save(figure: Figure, path: Path) -> None:
    """Write a figure as a small PNG."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    save_small(drawn.getvalue(), path)


def save_small(png: bytes, path: Path) -> None:
    """Write a PNG with a palette of 256 colours. Raises SystemExit where it is too large for a manual all the same."""
    with Image.open(io.BytesIO(png)) as picture:
        whole = picture.convert("RGB")
    # By far the least error in the largest difference: a state's colour on a page is a small area.
    small = whole.quantize(_COLOURS, Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE)
    small.save(path, optimize=True)
    if path.stat().st_size > MOST_BYTES:
        raise SystemExit(f"error: {path} has {path.stat().st_size} bytes; expected at most {MOST_BYTES}")
