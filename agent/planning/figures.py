"""The figures of a precision plan, in the digits and units in which the table, the text and the chart show them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Evidence = Mapping[str, Any]  # how a plan was found, as JSON holds it
Group = Mapping[str, Any]
Candidate = Mapping[str, Any]


class CostScale:
    """What plans and groups take, as people read it: ms where that was measured, else % of what all float costs.

    A plan's time counts what no plan changes, `costs.fixed`; a group's and a boundary's are theirs alone.
    """

    def __init__(self, evidence: Evidence) -> None:
        costs = evidence["costs"]
        self.measured: bool = costs["source"] == "measured"
        self.unit = "ms" if self.measured else "%"
        self.all_float: float = costs["fixed"] + sum(group["time_float"] for group in evidence["groups"])
        self._factor = 1.0 if self.measured else 100.0 / (self.all_float or 1.0)

    def value(self, time: float) -> float:
        """A time of the evidence, in `unit`."""
        return time * self._factor

    def show(self, time: float) -> str:
        """With its unit."""
        return f"{show_digits(self.value(time))} {self.unit}"

    def pair(self, group: Group) -> str:
        """INT8 / float, without the unit."""
        return f"{show_digits(self.value(group['time_int8']))} / {show_digits(self.value(group['time_float']))}"


def chosen_candidate(evidence: Evidence) -> Candidate | None:
    """None where every layer stays float."""
    accepted: int | None = evidence["accepted"]
    return None if accepted is None else evidence["candidates"][accepted]


def precision_of(group: Group) -> str:
    """As people write it."""
    return "INT8" if group["precision"] == "int8" else "float"


def noise_share(evidence: Evidence, groups: Sequence[Group]) -> float:
    """Of the noise that INT8 in all groups would add."""
    everything = sum(group["sensitivity"] for group in evidence["groups"])
    return sum(group["sensitivity"] for group in groups) / everything if everything else 0.0


def show_confidence(evidence: Evidence) -> str:
    return f"{100.0 * (1.0 - evidence['certificate']['error']):.3g} % confidence"


def show_digits(value: float) -> str:
    """About three digits of a time in ms, or of a percentage; both are >= 0."""
    if 0.0 < value < 0.0005:
        return "< 0.001"
    return f"{value:.1f}" if value >= 10.0 else f"{value:.2f}" if value >= 1.0 else f"{value:.3f}"


def show_loss(loss: float) -> str:
    """Three decimals, or two digits of what is small."""
    if 0.0 < loss < 0.0001:
        return "< 0.0001"
    return f"{loss:.3f}" if loss >= 0.01 else f"{loss:.2g}"


def show_share(share: float) -> str:
    """A share in [0, 1] as a percentage; neither nothing nor everything unless it is."""
    percent = 100.0 * share
    if 0.0 < percent < 0.05:
        return "< 0.1 %"
    return "> 99.9 %" if 99.95 <= percent < 100.0 else f"{percent:.1f} %"
